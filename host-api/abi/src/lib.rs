//! The stable binary interface between a host and a Baton engine.
//!
//! This crate is the single truth of the interface: plain `#[repr(C)]` data ([`types`]), one table of
//! functions ([`table`]) and the integer codes both sides exchange ([`codes`]). It names no other crate of
//! the project. `bindings/c/include/baton.h` is generated from it.
//!
//! Rules that every type here follows: explicit widths, no `bool`, no Rust `enum`, no padding; reserved fields
//! must be zero and are checked; a structure that a caller passes in starts with its own size, so it can grow.
//! Nothing allocated by one side is freed by the other.

pub mod codes;
mod export;
pub mod layout;
#[cfg(feature = "stable_abi")]
pub mod rust_door;
pub mod table;
pub mod types;

pub use codes::*;
pub use layout::{FIELD_NAMES, FIELDS, STRUCT_SIZES, UNSUPPORTED_TABLE};
pub use table::*;
pub use types::*;

/// Major version of this interface: another major is refused.
pub const BATON_ABI_MAJOR: u32 = 1;
/// Minor version: entries are only ever added at the end of the table, each addition raises it.
pub const BATON_ABI_MINOR: u32 = 1;
/// Name of the data symbol that the C door looks up in an engine library, NUL-terminated.
pub const BATON_ENGINE_SYMBOL_V1: &[u8] = b"baton_engine_v1\0";
/// First eight bytes of every table ("BATONEV1", little-endian): tells a table from any other symbol.
pub const BATON_TABLE_MAGIC: u64 = u64::from_le_bytes(*b"BATONEV1");
