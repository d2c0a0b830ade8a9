//! What a Rust host links: choose, load and use a Baton engine
