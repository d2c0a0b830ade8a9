//! The Baton protocol as pure state machines.
//!
//! Nothing here knows a clock, a thread, a socket, the environment or raw memory: time is an argument, bytes come
//! in and go out as slices, work for a fabric leaves as values. `plugin/PROTOCOL.md` is the specification.
#![forbid(unsafe_code)]

pub mod credit;
pub mod epoch;
pub mod handshake;
pub mod ids;
pub mod ledger;
pub mod lifeline;
pub mod notify;
pub mod one_sided;
pub mod peer;
pub mod plan;
pub mod prepared;
pub mod registry;
pub mod sequence;
pub mod spare;
pub mod two_sided;
pub mod wire;

pub use ids::*;
