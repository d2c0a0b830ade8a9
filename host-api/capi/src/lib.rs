//! Baton for hosts that are not Rust: libbaton.so and a static library
