//! Baton for hosts that are not Rust: libbaton.so and a static library.
//!
//! The C interface is the engine's table, entry by entry, behind a handle that also chose and loaded the engine.
//! `bindings/c/include/baton.h` is generated from these sources and from the interface's own.

mod entries;
mod guard;
mod open;

pub use entries::*;
pub use guard::{BatonHost, baton_last_error};
pub use open::*;
