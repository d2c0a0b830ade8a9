//! What only a faulty or hostile peer can cause.

use super::RingId;
use crate::credit::CreditViolation;
use crate::ids::LaneId;
use crate::notify::{FragmentError, RecordError, SendError};
use crate::sequence::ImmError;
use crate::two_sided::report::TwoViolation;

/// What only a faulty or hostile peer can cause. Never a panic.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// An immediate that means nothing.
    #[error("immediate {imm:#010x} on {ring:?}: {error}")]
    Immediate {
        /// As received.
        imm: u32,
        /// Where.
        ring: RingId,
        /// What is wrong.
        error: ImmError,
    },
    /// A TAIL on the control endpoint.
    #[error("a tail on the control endpoint (immediate {imm:#010x})")]
    TailOnControl {
        /// As received.
        imm: u32,
    },
    /// A transfer number too far from what is expected, or of a transfer that is complete.
    #[error("transfer number {seq_low:#08x} on {lane:?} is outside the window around {lowest}")]
    SequenceOutside {
        /// Low 24 bits.
        seq_low: u32,
        /// Where.
        lane: LaneId,
        /// Lowest incomplete transfer.
        lowest: u64,
    },
    /// The same lane reported twice for one transfer.
    #[error("transfer {seq} reported twice on {lane:?}")]
    Repeated {
        /// Transfer.
        seq: u64,
        /// Lane.
        lane: LaneId,
    },
    /// Two immediates of one transfer disagree about its lanes.
    #[error("transfer {seq} reports {got} lanes after {expected}")]
    LaneCount {
        /// Transfer.
        seq: u64,
        /// First told.
        expected: u8,
        /// Told now.
        got: u8,
    },
    /// All lanes of a transfer are in, but no record, or a second record came.
    #[error("transfer {seq} brings {records} records")]
    RecordCount {
        /// Transfer.
        seq: u64,
        /// How many.
        records: u8,
    },
    /// A record that cannot be.
    #[error("record on {ring:?}: {error}")]
    Record {
        /// Where.
        ring: RingId,
        /// What is wrong.
        error: RecordError,
    },
    /// A fragment of a longer message that cannot be.
    #[error("fragment on {ring:?}: {error}")]
    Fragment {
        /// Where.
        ring: RingId,
        /// What is wrong.
        error: FragmentError,
    },
    /// A credit word that cannot be.
    #[error("credit for {ring:?}: {error}")]
    Credit {
        /// Where.
        ring: RingId,
        /// What is wrong.
        error: CreditViolation,
    },
    /// More arrived than RECVs were granted.
    #[error("{received} receives on {ring:?} but only {granted} were granted")]
    TooManyReceives {
        /// Where.
        ring: RingId,
        /// Taken.
        received: u64,
        /// Granted.
        granted: u64,
    },
    /// A SEND where only immediates are expected.
    #[error("a SEND of {len_bytes} bytes on {ring:?}, where none is expected")]
    UnexpectedSend {
        /// Where.
        ring: RingId,
        /// Length.
        len_bytes: u32,
    },
    /// An immediate where only SENDs are expected.
    #[error("immediate {imm:#010x} on {ring:?}, in a session that uses SENDs")]
    UnexpectedImmediate {
        /// As received.
        imm: u32,
        /// Where.
        ring: RingId,
    },
    /// A SEND whose payload cannot be.
    #[error("SEND on {ring:?}: {error}")]
    Send {
        /// Where.
        ring: RingId,
        /// What is wrong.
        error: SendError,
    },
    /// On the two-sided path.
    #[error(transparent)]
    TwoSided(#[from] TwoViolation),
    /// A message of the two-sided path whose flags cannot be, or not with its length.
    #[error("a message of {len} bytes with the flags {flags:#04x}")]
    Body {
        /// Told; 0 where there are none.
        flags: u8,
        /// With the flags.
        len: usize,
    },
}

impl Violation {
    /// What rule was broken, without the values: names of variants, the outermost first, for counters. There are as many as there are
    /// variants, whatever a peer sends.
    #[must_use]
    pub fn cause(&self) -> String {
        let text = format!("{self:?}");
        let name =
            |text: &str| text.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or("").to_owned();
        let outer = text.split_once(' ').map_or(text.as_str(), |(outer, _)| outer);
        let outer = outer.split('(').map(name).filter(|name| name.starts_with(char::is_alphabetic));
        let inner = text.split_once("error: ").map(|(_, inner)| name(inner));
        outer.chain(inner).collect::<Vec<_>>().join(".")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notify::RecordError;
    use crate::two_sided::codec::{FrameError, MessageError};

    #[test]
    fn a_cause_names_the_rule_and_no_value() {
        let lane = LaneId(3);
        let of = |violation: TwoViolation| Violation::from(violation).cause();
        for (cause, expected) in [
            (Violation::Repeated { seq: 77, lane }.cause(), "Repeated"),
            (
                Violation::Record { ring: RingId::Lane(lane), error: RecordError::Magic(0xbad) }.cause(),
                "Record.Magic",
            ),
            (of(TwoViolation::Frame(FrameError::Magic(7))), "TwoSided.Frame.Magic"),
            (of(TwoViolation::Frame(FrameError::Crc { got: 1, expected: 2 })), "TwoSided.Frame.Crc"),
            (of(TwoViolation::Message { lane, error: MessageError::Kind(9) }), "TwoSided.Message.Kind"),
            (of(TwoViolation::LaneSeq { lane, got: 5, expected: 4 }), "TwoSided.LaneSeq"),
        ] {
            assert_eq!(cause, expected);
        }
    }
}
