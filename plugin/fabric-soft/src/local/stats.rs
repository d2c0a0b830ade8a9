//! Counters.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one fabric.
        #[derive(Default)]
        pub struct Stats { $($(#[$doc])* pub $name: Counter,)* }

        impl Stats {
            /// All of them by name.
            pub fn to_json(&self) -> serde_json::Value {
                serde_json::json!({ $(stringify!($name): self.$name.get(),)* })
            }
        }
    };
}

counters! {
    /// Calls of process_vm_readv that moved bulk.
    pulls,
    /// Pieces in them, after merging.
    pull_pieces,
    /// Takes of rests that were cut so that copy threads could join in.
    joint_pulls,
    /// Groups of them that copy threads did.
    joined,
    /// Bytes copied out of mapped regions of peers, without the kernel.
    shared_bytes,
    /// Work requests between managed regions that the kernel copied for want of a mapping.
    shared_fallbacks,
    /// Managed regions of peers mapped.
    mappings_made,
    /// Those that could not be.
    mappings_refused,
    /// Those dropped because their owner withdrew them.
    mappings_dropped,
    /// Bytes placed here for peers' WRITEs and SENDs.
    written_bytes,
    /// Bytes of own READs.
    read_bytes,
    /// Pulls that ended early or under a wrong stamp.
    faults,
    /// Work requests of peers refused for key, bounds, permission or length.
    refused,
    /// Times an endpoint began to wait for a RECV.
    rnr_waits,
    /// Endpoints that ended because no RECV came.
    rnr_exceeded,
    /// Rings or addresses of peers that made no sense.
    violations,
    /// Sleepers woken with a system call.
    wakes,
    /// Slices done by the copy threads.
    copy_slices,
    /// Peers whose process ended.
    peers_gone,
}

/// A counter that costs next to nothing.
#[derive(Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
