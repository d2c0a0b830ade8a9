//! Credit: cumulative counters that only rise.
//!
//! ```text
//! receiver: granted (ever posted or freed)  received (ever taken)       sender: known (highest announcement seen)  consumed (ever posted)
//! I1 consumed + reserved ≤ known ≤ granted      I2 received ≤ consumed      I3 granted − received = free at the receiver ≤ depth
//! ```
//! The same two types count RECVs (depth = RECVs) and ring bytes (depth = ring length). What this side does wrong is an
//! assertion, also in release; what a peer can do is a [`CreditViolation`]. Consumed credit is never given back.

use crate::ids::{Epoch, LaneId};
use crate::peer::RingId;

const COUNT_BITS: u32 = 48;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

/// A word of the credit page: epoch low 16 bits ‖ 48-bit cumulative count. 0 = not written yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditWord {
    /// Low 16 bits of the epoch.
    pub tag: u16,
    /// Low 48 bits of the count.
    pub count: u64,
}

impl CreditWord {
    /// To the wire (a little-endian u64 in the page).
    pub fn encode(epoch: Epoch, count: u64) -> u64 {
        (u64::from(epoch.0 as u16) << COUNT_BITS) | (count & COUNT_MASK)
    }

    /// From the wire; `None` = not written yet.
    pub fn decode(word: u64) -> Option<CreditWord> {
        (word != 0).then_some(CreditWord { tag: (word >> COUNT_BITS) as u16, count: word & COUNT_MASK })
    }
}

/// A grant that no receiver can have made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("granted {granted}, but with {consumed} consumed and a depth of {depth} at most {} can be", consumed + depth)]
pub struct CreditViolation {
    /// As announced.
    pub granted: u64,
    /// Consumed by this side.
    pub consumed: u64,
    /// Depth.
    pub depth: u64,
}

/// What a credit word did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordOutcome {
    /// More credit.
    Raised,
    /// Nothing new.
    Unchanged,
    /// Of another epoch; ignored.
    Stale,
    /// Less than was known; ignored. Nobody who keeps the rules writes that.
    Lower,
}

/// The sender's half.
#[derive(Debug)]
pub struct SendCredit {
    known: u64,
    consumed: u64,
    reserved: u64,
    depth: u64,
}

impl SendCredit {
    /// `depth` was agreed in the handshake and is known from the start.
    pub fn new(depth: u64) -> SendCredit {
        SendCredit { known: depth, consumed: 0, reserved: 0, depth }
    }

    /// Not all of `depth` is there from the start, or counting goes on: so much is known and consumed.
    pub fn resumed(depth: u64, known: u64, consumed: u64) -> SendCredit {
        let credit = SendCredit { known, consumed, reserved: 0, depth };
        credit.check();
        credit
    }

    /// Highest grant seen.
    pub fn known(&self) -> u64 {
        self.known
    }

    /// Ever consumed.
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// Of those consumed, so many are available again: the peer has taken at least as many.
    pub fn returned(&self) -> u64 {
        self.known - self.depth
    }

    /// Free to reserve.
    pub fn available(&self) -> u64 {
        self.known - self.consumed - self.reserved
    }

    /// All of `n` or nothing. Dropping the permit gives it back.
    pub fn try_reserve(&mut self, n: u64) -> Option<Permit<'_>> {
        if self.available() < n {
            return None;
        }
        self.reserved += n;
        self.check();
        Some(Permit { credit: self, n })
    }

    /// Looks at a word of the own credit page.
    pub fn on_word(&mut self, word: u64, epoch: Epoch) -> Result<WordOutcome, CreditViolation> {
        let Some(word) = CreditWord::decode(word) else { return Ok(WordOutcome::Unchanged) };
        if word.tag != epoch.0 as u16 {
            return Ok(WordOutcome::Stale);
        }
        // Serial arithmetic on 48 bits: "behind" is a late word, not a leap of 2^47.
        let ahead = word.count.wrapping_sub(self.known) & COUNT_MASK;
        if ahead == 0 {
            return Ok(WordOutcome::Unchanged);
        }
        if ahead > COUNT_MASK / 2 {
            return Ok(WordOutcome::Lower);
        }
        let granted = self.known + ahead;
        // granted ≤ received + depth ≤ consumed + depth ≤ known + depth: the tightest bound this side can check.
        if granted > self.consumed + self.depth {
            return Err(CreditViolation { granted, consumed: self.consumed, depth: self.depth });
        }
        self.known = granted;
        self.check();
        Ok(WordOutcome::Raised)
    }

    fn check(&self) {
        assert!(self.consumed + self.reserved <= self.known, "I1: consumed + reserved ≤ known");
        assert!(self.known <= self.consumed + self.depth, "I3: known ≤ consumed + depth");
    }
}

/// Reserved credit: drop gives back, commit consumes.
#[derive(Debug)]
#[must_use = "dropping a permit gives the credit back"]
pub struct Permit<'a> {
    credit: &'a mut SendCredit,
    n: u64,
}

impl Permit<'_> {
    /// The credit is used up by a work request that is being posted.
    pub fn commit(self) {
        self.credit.consumed += self.n;
        // Drop takes `reserved` down; together they keep consumed + reserved ≤ known because that held before.
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.credit.reserved -= self.n;
        self.credit.check();
    }
}

/// The receiver's half.
#[derive(Debug)]
pub struct RecvCredit {
    granted: u64,
    received: u64,
    announced: u64,
    depth: u64,
}

impl RecvCredit {
    /// `depth` is there from the start and known to the sender.
    pub fn new(depth: u64) -> RecvCredit {
        RecvCredit { granted: depth, received: 0, announced: depth, depth }
    }

    /// Of `depth`, so much is there from the start and known to the sender.
    pub fn with_grant(depth: u64, granted: u64) -> RecvCredit {
        assert!(granted <= depth, "I3: granted − received ≤ depth");
        RecvCredit { granted, received: 0, announced: granted, depth }
    }

    /// Ever granted.
    pub fn granted(&self) -> u64 {
        self.granted
    }

    /// Ever taken.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// Told to the sender.
    pub fn announced(&self) -> u64 {
        self.announced
    }

    /// Granted and not yet told.
    pub fn unannounced(&self) -> u64 {
        self.granted - self.announced
    }

    /// Of `depth`, what the sender does not know to have: taken and not granted, or granted and not yet told.
    pub fn owed(&self) -> u64 {
        self.depth - (self.announced - self.received)
    }

    /// Taken and not yet made available again.
    pub fn to_grant(&self) -> u64 {
        self.depth - (self.granted - self.received)
    }

    /// The sender used `n`. `false`: more than it was *told* of, which only a faulty peer does.
    #[must_use]
    pub fn receive(&mut self, n: u64) -> bool {
        if self.received + n > self.announced {
            return false;
        }
        self.received += n;
        true
    }

    /// `n` more are available (RECVs posted, ring bytes free).
    pub fn grant(&mut self, n: u64) {
        assert!(n <= self.to_grant(), "I3: granted − received ≤ depth");
        self.granted += n;
    }

    /// Everything granted is being announced; the count for the word.
    pub fn announce(&mut self) -> u64 {
        self.announced = self.granted;
        self.announced
    }
}

/// Where the words stand in a credit page: (RECV credit, ring bytes) of control, then of lane 0, lane 1, …
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditPage {
    lanes: u8,
}

/// Bytes of a word.
pub const WORD_BYTES: usize = 8;

impl CreditPage {
    /// For a session with that many lanes.
    pub fn new(lanes: u8) -> CreditPage {
        assert!((1..=64).contains(&lanes), "a session has 1 to 64 lanes, not {lanes}");
        CreditPage { lanes }
    }

    /// Words of the page.
    pub fn words(&self) -> usize {
        2 + 2 * usize::from(self.lanes)
    }

    /// Bytes of the page.
    pub fn bytes(&self) -> usize {
        self.words() * WORD_BYTES
    }

    /// The word with the RECV credit of an endpoint; the one with its ring bytes follows.
    pub fn recv_word(&self, ring: RingId) -> usize {
        match ring {
            RingId::Control => 0,
            RingId::Lane(LaneId(lane)) => {
                assert!(lane < self.lanes, "lane {lane} of {}", self.lanes);
                2 + 2 * usize::from(lane)
            }
        }
    }

    /// The word with the ring bytes of an endpoint.
    pub fn ring_word(&self, ring: RingId) -> usize {
        self.recv_word(ring) + 1
    }
}

#[cfg(test)]
mod tests;
