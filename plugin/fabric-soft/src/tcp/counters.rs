//! What is counted, for `stats`.

use std::sync::atomic::{AtomicU64, Ordering};

use super::frame::Malformed;

/// A number that only grows.
#[derive(Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one fabric.
        #[derive(Default)]
        pub(super) struct Counters {
            $($(#[$doc])* pub $name: Counter,)*
            pub malformed: [Counter; Malformed::COUNT],
        }

        impl Counters {
            pub fn to_json(&self) -> serde_json::Value {
                let mut all = serde_json::Map::new();
                $(all.insert(stringify!($name).into(), self.$name.count().into());)*
                let malformed = Malformed::NAMES.iter().zip(&self.malformed).filter(|(_, c)| c.count() > 0);
                let malformed: serde_json::Map<_, _> =
                    malformed.map(|(name, c)| (name.to_string(), c.count().into())).collect();
                all.insert("malformed".into(), malformed.into());
                all.into()
            }
        }
    };
}

counters! {
    /// Bytes through sockets, headers included.
    bytes_sent, bytes_received,
    /// System calls that moved them, and those that would have blocked.
    sends, receives, sends_blocked,
    /// Acknowledgements that went out by themselves; all others came along with something.
    acknowledgements_sent,
    /// Times a message found no RECV and waited.
    recv_waits,
    refusals_sent, refusals_received,
    /// Work requests or answers cut short by a revoked region.
    aborted,
    /// READ answers whose memory was revoked on the way, filled up with zeros.
    zero_filled,
    /// Registered memory that turned out not to be mapped, or not for this access.
    unmapped,
    connections_accepted, connections_dialled, endpoints_failed,
    /// Connections to the listener that ended early: another protocol, another version, no such endpoint, silent.
    half_open_garbage, half_open_version, half_open_unknown, half_open_expired, half_open_evicted, half_open_gone,
    /// Times the listener rested because the system had no descriptor or memory for another connection.
    accept_pauses,
    /// Peers that looked whether this fabric is reachable.
    probes,
    /// Wake-ups of the service thread by other threads, and by the lease of a caller that polled and left work.
    wakes, leases,
}
