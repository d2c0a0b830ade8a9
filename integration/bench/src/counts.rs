//! What a side did, as its devices see it.

use std::ops::{Add, Sub};

use serde::{Deserialize, Serialize};

/// Counted since the side began, or the difference of two such counts. All 0 where nothing is counted: over software fabrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Work requests of send queues.
    pub sends: u64,
    /// RECVs posted.
    pub receives: u64,
    /// Calls that handed either to a device.
    pub doorbells: u64,
    /// Entries taken from completion queues.
    pub completions: u64,
    /// Packets that the ports sent.
    pub packets: u64,
}

impl Counts {
    fn with(self, other: Counts, both: impl Fn(u64, u64) -> u64) -> Counts {
        Counts {
            sends: both(self.sends, other.sends),
            receives: both(self.receives, other.receives),
            doorbells: both(self.doorbells, other.doorbells),
            completions: both(self.completions, other.completions),
            packets: both(self.packets, other.packets),
        }
    }
}

impl Add for Counts {
    type Output = Counts;

    fn add(self, other: Counts) -> Counts {
        self.with(other, u64::saturating_add)
    }
}

impl Sub for Counts {
    type Output = Counts;

    fn sub(self, other: Counts) -> Counts {
        self.with(other, u64::saturating_sub)
    }
}
