//! The two-sided backend in the simulator: channels of several nodes over shared bounce pools, random work, random faults, and
//! checkers.
//!
//! What is checked, at each step of the way:
//! * a transfer that is done has placed exactly its bytes and nothing around them, and is reported once;
//! * no byte lands after a transfer was reported, however it ended: its cells are handed out again;
//! * a message is delivered once, not before its WRITE's bytes, never for a canceled transfer;
//! * so with a rest, which is taken late, in order, straight to its place, or is lost with its endpoint and sent again;
//! * notifications arrive in the order of sending, each exactly once, also across epochs, and each resolves once;
//! * credit: nobody knows of more than was announced, announces more than was posted, takes more than was sent; at rest nothing is
//!   missing, and the pools are back at their base;
//! * no epoch ends without a fault, and nothing is ever stuck.
//!
//! In the second half of a run whole nodes die, and the names of some come back as new instances. A survivor learns it late, by its
//! lifeline or by a work request that fails. Then, besides the above:
//! * every transfer to the dead node is reported, once, and every notification to it is resolved, once, as done or as given up;
//! * once the survivor has closed its epoch, memory that the dead node was writing to or reading from is anybody's, and no byte lands there;
//! * all slots of the pool that the dead node's lanes held have come back, and its endpoints and registrations are gone;
//! * the survivor's other links have not noticed: none of their epochs ends;
//! * the new instance is another peer with another session: nothing of the old one is delivered or reported there.
//!
//! Between two living nodes, too, a next epoch may come so late that transfers are failed meanwhile: nothing of them lands in it.

mod checker;
mod death;
mod drive;
mod link;
mod memory;
mod rests;
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

macro_rules! reached {
    ($($field:ident: $name:literal,)*) => {
        /// How often each way of the protocol was taken.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[allow(missing_docs)]
        pub struct TwoReached {
            $(pub $field: u64,)*
        }

        impl TwoReached {
            /// By name.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$(($name, self.$field),)*]
            }

            /// Both together.
            pub fn plus(&self, other: &TwoReached) -> TwoReached {
                TwoReached { $($field: self.$field + other.$field,)* }
            }
        }
    };
}

reached! {
    messages_gathered: "messages gathered",
    messages_copied: "messages copied",
    blocks_packed: "blocks packed",
    nops: "NOPs",
    reclaims: "RECVs asked back",
    credit_requests: "credit requests",
    aborts: "aborts",
    nacks: "refusals",
    chunks_not_placed: "chunks not placed",
    notes_expired: "notifications expired",
    heads_received: "heads received",
    rests_taken: "rests taken",
    rests_unwanted: "rests that were not wanted",
    rests_lost: "rests lost with their endpoint",
    pool_expanded: "slabs made",
    pool_shrunk: "slabs given back",
    pool_revived: "slabs taken into use again",
    nodes_killed: "nodes killed",
    nodes_restarted: "nodes restarted",
    deaths_told: "deaths told by a lifeline",
    deaths_found: "deaths found by a work request",
    transfers_orphaned: "transfers failed with a dead peer",
    notes_orphaned: "notifications given up with a dead peer",
    transfers_given_up: "transfers failed between two epochs",
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
        self.notes_expired += counters.notes_expired;
        self.heads_received += counters.heads_received;
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
