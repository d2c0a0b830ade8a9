//! The 32-bit immediate and the way back from 24 bits on the wire to a u64.
//!
//! ```text
//!    lowest − 2^21        lowest incomplete        lowest + 2^21
//!         |  complete: a repeat   |   in flight, ≤ 2^16   |            anything else ends the epoch
//! ```
//! A sender has at most [`MAX_INCOMPLETE`] notified transfers incomplete, the window is 2^21 to either side and
//! the wire number wraps at 2^24: no two numbers in the window look alike.

use crate::ids::XferSeq;

/// Notified transfers of a sender incomplete at most.
pub const MAX_INCOMPLETE: u64 = 1 << 16;

/// Distance from the lowest incomplete transfer beyond which a number is impossible.
pub const WINDOW: u64 = 1 << 21;

const SEQ_BITS: u32 = 24;
const SEQ_MASK: u64 = (1 << SEQ_BITS) - 1;

/// The number nearest to `lowest` whose low 24 bits are `seq_low`, if it lies within ± [`WINDOW`].
pub fn unwrap24(seq_low: u32, lowest: XferSeq) -> Option<XferSeq> {
    let ahead = u64::from(seq_low).wrapping_sub(lowest.0) & SEQ_MASK;
    if ahead <= WINDOW {
        return lowest.0.checked_add(ahead).map(XferSeq);
    }
    let behind = SEQ_MASK + 1 - ahead;
    if behind <= WINDOW { lowest.0.checked_sub(behind).map(XferSeq) } else { None }
}

/// What an immediate announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImmKind {
    /// The last work request of a lane.
    Tail,
    /// As [`ImmKind::Tail`], in the place of a record: the transfer tells an empty message.
    Empty,
    /// This work request wrote a record into the endpoint's ring (and nothing of the transfer follows on this lane).
    Record,
}

/// `kind:2 | lanes−1:6 | seq_low:24`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Imm {
    /// Kind.
    pub kind: ImmKind,
    /// Lanes of the transfer, 1 ..= 64.
    pub lanes: u8,
    /// Low 24 bits of its number; 0 for a standalone record.
    pub seq_low: u32,
}

/// Why an immediate means nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImmError {
    /// Kind 3 does not exist.
    #[error("kind {0} does not exist")]
    Kind(u8),
    /// More lanes than the session has.
    #[error("{lanes} lanes, the session has {limit}")]
    Lanes {
        /// Told.
        lanes: u8,
        /// Lanes there are.
        limit: u8,
    },
    /// A standalone record carries number 0 and one lane.
    #[error("a standalone record has number 0 and one lane")]
    Standalone,
}

impl Imm {
    /// The immediate of a transfer's work request. `lanes` is 1 ..= 64.
    pub fn of(kind: ImmKind, lanes: u8, seq: XferSeq) -> Imm {
        assert!((1..=64).contains(&lanes), "a transfer uses 1 to 64 lanes, not {lanes}");
        Imm { kind, lanes, seq_low: (seq.0 & SEQ_MASK) as u32 }
    }

    /// To the wire (host order here; a fabric puts it into network order).
    pub fn encode(self) -> u32 {
        let kind: u32 = match self.kind {
            ImmKind::Tail => 0,
            ImmKind::Record => 1,
            ImmKind::Empty => 2,
        };
        (kind << 30) | (u32::from(self.lanes - 1) << SEQ_BITS) | self.seq_low
    }

    /// From the wire.
    pub fn decode(imm: u32) -> Result<Imm, ImmError> {
        let kind = match imm >> 30 {
            0 => ImmKind::Tail,
            1 => ImmKind::Record,
            2 => ImmKind::Empty,
            other => return Err(ImmError::Kind(other as u8)),
        };
        let lanes = ((imm >> SEQ_BITS) & 0x3F) as u8 + 1;
        Ok(Imm { kind, lanes, seq_low: imm & SEQ_MASK as u32 })
    }
}

#[cfg(test)]
mod tests;
