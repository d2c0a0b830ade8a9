//! The protocol of `baton-core` in the simulator: sessions of several nodes, random work, random faults, and checkers
//! that look at every byte and every notification. A run follows from its seed alone.
//!
//! What is checked, at each step of the way:
//! * a transfer that is done has placed exactly its bytes, and nothing around them;
//! * a notification is never delivered before the data that it announces, and a READ's never before its source has been read;
//! * a transfer that is done is delivered exactly once while its target lives; one that failed at most once; a canceled one never;
//! * standalone notifications arrive in the order of sending, each exactly once, also across epochs;
//! * no byte lands in memory after the transfer that owned it was reported as over;
//! * credit: what a sender knows was granted, what a receiver took was sent; at rest nothing is missing;
//! * a host that does not pop holds its peer back;
//! * no epoch ends without a fault, and nothing is ever stuck.

mod agenda;
mod cells;
mod checker;
mod drive;
mod link;
mod memory;
mod report;
mod swarm;
pub mod two_sided;
mod workload;

pub use report::{Failure, Faults, Neglect, Options, Reached, Report};
pub use swarm::run;

/// What one run may go wrong with.
pub(crate) type Check = Result<(), String>;
