//! Numbers that cross module borders, each with a type of its own.

/// Monotonic time in nanoseconds since an arbitrary start. Always an argument, never read from a clock here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// `self + ms`, saturating.
    pub fn plus_ms(self, ms: u64) -> Nanos {
        Nanos(self.0.saturating_add(ms.saturating_mul(1_000_000)))
    }
    /// Nanoseconds from `earlier` to `self`, 0 if it is later.
    pub fn since(self, earlier: Nanos) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// One engine creation: 128 random bits. Sessions are keyed by it, never by a name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instance(pub [u8; 16]);

impl std::fmt::Debug for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl std::fmt::Display for Instance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

/// One session per pair of instances; random, never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SessionId(pub u64);

/// Generation of a session's queue pairs, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Epoch(pub u32);

/// A data queue pair of a session, 0..=63.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId(pub u8);

/// Number of a notified transfer, per direction and epoch, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct XferSeq(pub u64);

/// Number of a message of a sender in a session, from 1, running on across epochs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NotifySeq(pub u64);

/// A registered region at its owner: index 24 bits, generation 16, random 24.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u64);
