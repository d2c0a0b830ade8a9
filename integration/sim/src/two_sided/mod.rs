//! The two-sided backend in the simulator: channels of several nodes over shared bounce pools, random work, random faults, and
//! checkers.
//!
//! What is checked, at each step of the way:
//! * a transfer that is done has placed exactly its bytes and nothing around them, and is reported once;
//! * no byte lands after a transfer was reported, however it ended: its cells are handed out again;
//! * a message is delivered once, not before its WRITE's bytes, never for a canceled transfer;
//! * notifications arrive in the order of sending, each exactly once, also across epochs, and each resolves once;
//! * credit: nobody knows of more than was announced, announces more than was posted, takes more than was sent; at rest nothing is
//!   missing, and the pools are back at their base;
//! * no epoch ends without a fault, and nothing is ever stuck.

mod checker;
mod drive;
mod link;
mod memory;
mod swarm;

use crate::report::{Failure, Options};
use baton_core::two_sided::report::TwoCounters;

/// What a good run did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TwoReport {
    /// Of the world: two runs with the same digest did the same.
    pub digest: u64,
    /// Virtual time at the end.
    pub at_ns: u64,
    /// Transfers done.
    pub done: u64,
    /// Transfers canceled or refused.
    pub failed: u64,
    /// Messages delivered.
    pub delivered: u64,
    /// Epochs opened.
    pub epochs: u64,
    /// How often each way was taken.
    pub reached: TwoReached,
}

/// How often each way of the protocol was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct TwoReached {
    pub messages_gathered: u64,
    pub messages_copied: u64,
    pub blocks_packed: u64,
    pub nops: u64,
    pub reclaims: u64,
    pub credit_requests: u64,
    pub aborts: u64,
    pub nacks: u64,
    pub chunks_not_placed: u64,
    pub pool_expanded: u64,
    pub pool_shrunk: u64,
    pub pool_revived: u64,
}

impl TwoReached {
    fn add(&mut self, counters: &TwoCounters) {
        self.messages_gathered += counters.messages_gathered;
        self.messages_copied += counters.messages_sent - counters.messages_gathered;
        self.blocks_packed += counters.blocks_packed;
        self.nops += counters.nops_sent;
        self.reclaims += counters.reclaims_sent;
        self.credit_requests += counters.credit_requests_sent;
        self.aborts += counters.aborts_sent;
        self.nacks += counters.nacks_sent;
        self.chunks_not_placed +=
            counters.duplicate_chunks + counters.ended_chunks + counters.released_chunks;
    }

    /// By name.
    pub fn named(&self) -> [(&'static str, u64); 12] {
        [
            ("messages gathered", self.messages_gathered),
            ("messages copied", self.messages_copied),
            ("blocks packed", self.blocks_packed),
            ("NOPs", self.nops),
            ("RECVs asked back", self.reclaims),
            ("credit requests", self.credit_requests),
            ("aborts", self.aborts),
            ("refusals", self.nacks),
            ("chunks not placed", self.chunks_not_placed),
            ("slabs made", self.pool_expanded),
            ("slabs given back", self.pool_shrunk),
            ("slabs taken into use again", self.pool_revived),
        ]
    }

    /// Both together.
    pub fn plus(&self, other: &TwoReached) -> TwoReached {
        TwoReached {
            messages_gathered: self.messages_gathered + other.messages_gathered,
            messages_copied: self.messages_copied + other.messages_copied,
            blocks_packed: self.blocks_packed + other.blocks_packed,
            nops: self.nops + other.nops,
            reclaims: self.reclaims + other.reclaims,
            credit_requests: self.credit_requests + other.credit_requests,
            aborts: self.aborts + other.aborts,
            nacks: self.nacks + other.nacks,
            chunks_not_placed: self.chunks_not_placed + other.chunks_not_placed,
            pool_expanded: self.pool_expanded + other.pool_expanded,
            pool_shrunk: self.pool_shrunk + other.pool_shrunk,
            pool_revived: self.pool_revived + other.pool_revived,
        }
    }
}

/// Runs one seed. A panic in the protocol is a failure like any other. Of the options, those of telling do not matter here.
///
/// # Errors
/// What went wrong, and when.
pub fn run(seed: u64, options: Options) -> Result<TwoReport, Failure> {
    crate::swarm::caught(seed, |at| {
        let mut swarm = swarm::Swarm::new(seed, options)?;
        let result = swarm.run();
        *at = (swarm.step, swarm.world.now_ns());
        result.map(|()| swarm.report()).map_err(|why| format!("{why}\n{}", swarm.pools()))
    })
}
