//! The send queue of one endpoint.
//!
//! ```text
//!   retired          posted            depth
//!      |  in flight    |    free         |        retired ≤ posted ≤ retired + depth
//! ```
//! A completion of sequence s retires everything ≤ s: an RC send queue completes in order. Only signaled work requests complete
//! (but for errors), so two rules keep entries from leaking:
//! * a batch is signaled when `unsignaled + next > depth / 2` (or 64 work requests, or 8 MiB), decided *before* room is
//!   reserved, so a reservation that fails never leaves a long unsignaled run behind; and
//! * where something waits for room and no signaled work request is in flight, the *leftovers* are retired by a signaled
//!   zero-length WRITE ([`Ledger::needs_flush`]); there is always room for it, because unsignaled ≤ depth / 2 < depth.

/// Work requests after which one is signaled.
pub const SIGNAL_WRS: u32 = 64;

/// Bytes after which one is signaled.
pub const SIGNAL_BYTES: u64 = 8 << 20;

/// Counts one send queue. Sequences run from 0.
#[derive(Debug)]
pub struct Ledger {
    depth: u32,
    posted: u64,
    retired: u64,
    reserved: u32,
    /// Posted behind the last signaled work request.
    unsignaled: u32,
    unsignaled_bytes: u64,
    /// One past the last signaled sequence, and what it was before the last batch.
    signaled_end: u64,
    signaled_end_before: u64,
}

/// A completion of something that is not in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("completion of sequence {seq}, in flight are {retired} .. {posted}")]
pub struct NotInFlight {
    /// Told.
    pub seq: u64,
    /// Oldest in flight.
    pub retired: u64,
    /// Next to be posted.
    pub posted: u64,
}

impl Ledger {
    /// An empty queue with room for `depth`.
    pub fn new(depth: u32) -> Ledger {
        assert!(depth >= 2, "a send queue of {depth} cannot retire leftovers");
        Ledger {
            depth,
            posted: 0,
            retired: 0,
            reserved: 0,
            unsignaled: 0,
            unsignaled_bytes: 0,
            signaled_end: 0,
            signaled_end_before: 0,
        }
    }

    /// Room.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Ever posted; the sequence of the next work request.
    pub fn posted(&self) -> u64 {
        self.posted
    }

    /// Ever retired; the sequence of the oldest in flight.
    pub fn retired(&self) -> u64 {
        self.retired
    }

    /// In flight.
    pub fn in_flight(&self) -> u32 {
        (self.posted - self.retired) as u32
    }

    /// Free and not reserved.
    pub fn free(&self) -> u32 {
        self.depth - self.in_flight() - self.reserved
    }

    /// Whether a completion is on its way.
    pub fn awaits_completion(&self) -> bool {
        self.signaled_end > self.retired
    }

    /// Whether only work requests without a completion are in flight.
    pub fn needs_flush(&self) -> bool {
        self.in_flight() > 0 && !self.awaits_completion()
    }

    /// Whether the next `n` work requests with `bytes` must end signaled. Ask before [`Ledger::reserve`].
    pub fn must_signal(&self, n: u32, bytes: u64) -> bool {
        let run = self.unsignaled.saturating_add(n);
        run > self.depth / 2
            || run >= SIGNAL_WRS
            || self.unsignaled_bytes.saturating_add(bytes) >= SIGNAL_BYTES
    }

    /// Room for all of `n`, or none. Dropping the reservation gives it back.
    pub fn reserve(&mut self, n: u32) -> Option<Reservation<'_>> {
        if self.free() < n {
            return None;
        }
        self.reserved += n;
        Some(Reservation { ledger: self, n })
    }

    /// A completion (or an error) of `seq`: everything up to it is retired. How many that were.
    pub fn retire(&mut self, seq: u64) -> Result<u32, NotInFlight> {
        if seq < self.retired || seq >= self.posted {
            return Err(NotInFlight { seq, retired: self.retired, posted: self.posted });
        }
        let n = (seq + 1 - self.retired) as u32;
        self.retired = seq + 1;
        // An error may retire into the unsignaled run.
        self.unsignaled = self.unsignaled.min(self.in_flight());
        self.check();
        Ok(n)
    }

    /// The fabric took only `taken` of the last `offered` work requests.
    pub fn took_only(&mut self, offered: u32, taken: u32) {
        assert!(taken <= offered && u64::from(offered) <= self.posted - self.retired, "more than was posted");
        self.posted -= u64::from(offered - taken);
        if taken < offered {
            self.signaled_end = self.signaled_end_before;
        }
        self.unsignaled = self.unsignaled.min(self.in_flight());
        self.check();
    }

    fn check(&self) {
        assert!(self.retired <= self.posted, "retired ≤ posted");
        assert!(self.in_flight() + self.reserved <= self.depth, "posted + reserved ≤ retired + depth");
        assert!(self.signaled_end <= self.posted, "signaled ≤ posted");
    }
}

/// Reserved room: drop gives back, commit posts.
#[derive(Debug)]
#[must_use = "dropping a reservation gives the room back"]
pub struct Reservation<'a> {
    ledger: &'a mut Ledger,
    n: u32,
}

impl Reservation<'_> {
    /// All of it is being posted. The sequence of the first work request.
    pub fn commit(self, bytes: u64, signaled: bool) -> u64 {
        let ledger = &mut *self.ledger;
        let first = ledger.posted;
        ledger.signaled_end_before = ledger.signaled_end;
        ledger.posted += u64::from(self.n);
        if signaled && self.n > 0 {
            ledger.signaled_end = ledger.posted;
            ledger.unsignaled = 0;
            ledger.unsignaled_bytes = 0;
        } else {
            ledger.unsignaled += self.n;
            ledger.unsignaled_bytes = ledger.unsignaled_bytes.saturating_add(bytes);
        }
        first
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.ledger.reserved -= self.n;
        self.ledger.check();
    }
}

#[cfg(test)]
mod tests;
