//! Control frames.
//!
//! ```text
//!   0 magic u32   4 version u8   5 type u8   6 flags u16 = 0   8 session u64   16 epoch u32   20 reserved u32 = 0
//!  24 seq u64    32 ack u64     40 payload_len u32            44 crc32c u32 (of all, itself as 0)   48 payload
//! ```

use super::payload::{Ack, Direction, Lists, PayloadError, ReadPiece, Status, read_payload, write_payload};
use super::{CONTROL_SLOT_BYTES, MAX_LANES};
use crate::ids::{Epoch, LaneId, NotifySeq, SessionId};

/// Length of the header.
pub const CONTROL_HEADER_BYTES: usize = 48;

/// Longest payload.
pub(super) const MAX_PAYLOAD_BYTES: usize = CONTROL_SLOT_BYTES - CONTROL_HEADER_BYTES;

const MAGIC: u32 = u32::from_le_bytes(*b"BtnC");
const VERSION: u8 = 1;
const CRC_AT: usize = 44;

/// Types of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// 1
    CreditRequest = 1,
    /// 2
    DataAck,
    /// 3
    SessionOpen,
    /// 4
    Notify,
    /// 5
    NotifyAck,
    /// 6
    ReadReq,
    /// 7
    XferNack,
    /// 8
    Abort,
    /// 9
    AbortAck,
    /// 10
    CreditReclaim,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 10] = [
        Kind::CreditRequest,
        Kind::DataAck,
        Kind::SessionOpen,
        Kind::Notify,
        Kind::NotifyAck,
        Kind::ReadReq,
        Kind::XferNack,
        Kind::Abort,
        Kind::AbortAck,
        Kind::CreditReclaim,
    ];

    fn of(byte: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// What every frame begins with, without what is constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Session.
    pub session: SessionId,
    /// Generation of its queue pairs.
    pub epoch: Epoch,
    /// Number of the frame: from 1, exactly one more than the last.
    pub seq: u64,
    /// Highest number received from the other side.
    pub ack: u64,
}

/// One frame. Lists and messages are borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// "I am waiting": a hint, never an order.
    CreditRequest {
        /// Where.
        lane: LaneId,
        /// Messages that wait.
        want: u32,
        /// Their bytes.
        waiting_bytes: u64,
        /// How long the oldest waits.
        oldest_wait_us: u64,
    },
    /// Where transfers stand.
    DataAck {
        /// The sender of the frame will never name its own transfers below this again.
        released_below: u64,
        /// At most [`super::MAX_ACKS`].
        acks: &'a [Ack],
    },
    /// First frame of an epoch: what both sides must agree on.
    SessionOpen {
        /// Length of a data slot.
        slot_bytes: u32,
        /// Transfers that the sender of the frame takes at once.
        request_depth: u32,
        /// Bytes of notifications that it takes unacknowledged.
        notify_window: u32,
        /// Data lanes.
        lanes: u8,
        /// The sender of the frame will never name its own transfers below this again.
        released_below: u64,
    },
    /// A notification, or a piece of one: pieces follow each other in order.
    Notify {
        /// Its number.
        seq: NotifySeq,
        /// To be delivered when that WRITE is complete; 0: at once.
        after_transfer: u64,
        /// Length of the whole message.
        total_len: u32,
        /// Where this piece begins.
        offset: u32,
        /// The piece.
        bytes: &'a [u8],
    },
    /// All notifications up to this number were taken, and their bytes are free again.
    NotifyAck {
        /// Number.
        up_to: NotifySeq,
    },
    /// "Send me these."
    ReadReq {
        /// Of the sender of the frame.
        transfer: u64,
        /// Index of the first piece here.
        first: u32,
        /// No more pieces follow.
        last: bool,
        /// 1 to [`super::MAX_READ_PIECES`].
        pieces: &'a [ReadPiece],
    },
    /// A transfer was refused.
    XferNack {
        /// Which.
        transfer: u64,
        /// Whose: see [`Direction`].
        direction: Direction,
        /// Why; never [`Status::Ok`].
        status: Status,
        /// The chunk or piece refused; `u32::MAX`: no particular one.
        at: u32,
    },
    /// The sender of the frame gives up one of its own transfers.
    Abort {
        /// Which.
        transfer: u64,
        /// WRITE or READ.
        direction: Direction,
    },
    /// Nothing of that transfer will touch memory any more.
    AbortAck {
        /// Which.
        transfer: u64,
        /// WRITE or READ.
        direction: Direction,
        /// What became of it: [`Status::Ok`] if it was complete before the ABORT came.
        status: Status,
        /// Chunks placed (WRITE) or sent (READ).
        chunks: u32,
    },
    /// "Burn this many free credits with NOPs."
    CreditReclaim {
        /// Where.
        lane: LaneId,
        /// How many.
        count: u32,
    },
}

impl Frame<'_> {
    /// Its type.
    pub fn kind(&self) -> Kind {
        match self {
            Frame::CreditRequest { .. } => Kind::CreditRequest,
            Frame::DataAck { .. } => Kind::DataAck,
            Frame::SessionOpen { .. } => Kind::SessionOpen,
            Frame::Notify { .. } => Kind::Notify,
            Frame::NotifyAck { .. } => Kind::NotifyAck,
            Frame::ReadReq { .. } => Kind::ReadReq,
            Frame::XferNack { .. } => Kind::XferNack,
            Frame::Abort { .. } => Kind::Abort,
            Frame::AbortAck { .. } => Kind::AbortAck,
            Frame::CreditReclaim { .. } => Kind::CreditReclaim,
        }
    }
}

/// Why bytes are no control frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Shorter than a header or longer than a control RECV.
    #[error("{len} bytes, a control frame has {CONTROL_HEADER_BYTES} to {CONTROL_SLOT_BYTES}")]
    Size {
        /// Received.
        len: usize,
    },
    /// Something else lies there.
    #[error("magic is {0:#010x}")]
    Magic(u32),
    /// A version that was not negotiated.
    #[error("version {0} is not spoken")]
    Version(u8),
    /// No such type.
    #[error("type {0} does not exist")]
    Kind(u8),
    /// Flags or reserved bytes that are not zero.
    #[error("flags {flags:#06x}, reserved {reserved:#010x}: both must be zero")]
    Reserved {
        /// Flags.
        flags: u16,
        /// Reserved.
        reserved: u32,
    },
    /// Frames are numbered from 1.
    #[error("frame number 0 does not exist")]
    Number,
    /// Another length than was received.
    #[error("payload of {told} bytes in a frame with room for exactly {received}")]
    Length {
        /// As told.
        told: u32,
        /// Received behind the header.
        received: u32,
    },
    /// The checksum does not match.
    #[error("checksum is {got:#010x}, the bytes give {expected:#010x}")]
    Crc {
        /// Told.
        got: u32,
        /// Computed.
        expected: u32,
    },
    /// The payload.
    #[error("{kind:?}: {error}")]
    Payload {
        /// Of which type.
        kind: Kind,
        /// What is wrong with it.
        error: PayloadError,
    },
}

/// Appends a frame to `out`.
///
/// # Errors
/// The frame is outside the limits that [`decode_frame`] checks; `out` is as before.
pub fn encode_frame(header: FrameHeader, frame: &Frame<'_>, out: &mut Vec<u8>) -> Result<(), FrameError> {
    if header.seq == 0 {
        return Err(FrameError::Number);
    }
    let begin = out.len();
    out.extend_from_slice(&MAGIC.to_le_bytes());
    out.extend_from_slice(&[VERSION, frame.kind() as u8, 0, 0]);
    out.extend_from_slice(&header.session.0.to_le_bytes());
    out.extend_from_slice(&header.epoch.0.to_le_bytes());
    out.extend_from_slice(&0u32.to_le_bytes());
    out.extend_from_slice(&header.seq.to_le_bytes());
    out.extend_from_slice(&header.ack.to_le_bytes());
    out.extend_from_slice(&[0; 8]);
    debug_assert_eq!(out.len() - begin, CONTROL_HEADER_BYTES);
    if let Err(error) = write_payload(frame, out) {
        out.truncate(begin);
        return Err(FrameError::Payload { kind: frame.kind(), error });
    }
    let payload_len = out.len() - begin - CONTROL_HEADER_BYTES;
    debug_assert!(payload_len <= MAX_PAYLOAD_BYTES, "payload limits keep frames inside a RECV");
    out[begin + 40..begin + 44].copy_from_slice(&(payload_len as u32).to_le_bytes());
    let crc = crc32c::crc32c(&out[begin..]);
    out[begin + CRC_AT..begin + CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    Ok(())
}

/// Reads a frame. `lists` is working space that the result may borrow from.
///
/// # Errors
/// Whatever is wrong first.
pub fn decode_frame<'a>(
    bytes: &'a [u8],
    lists: &'a mut Lists,
) -> Result<(FrameHeader, Frame<'a>), FrameError> {
    let Some((head, payload)) = bytes
        .split_first_chunk::<CONTROL_HEADER_BYTES>()
        .filter(|(_, payload)| payload.len() <= MAX_PAYLOAD_BYTES)
    else {
        return Err(FrameError::Size { len: bytes.len() });
    };
    let u32_at = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four bytes"));
    let u64_at = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("eight bytes"));
    if u32_at(0) != MAGIC {
        return Err(FrameError::Magic(u32_at(0)));
    }
    if head[4] != VERSION {
        return Err(FrameError::Version(head[4]));
    }
    let kind = Kind::of(head[5]).ok_or(FrameError::Kind(head[5]))?;
    let (flags, reserved) = (u16::from_le_bytes([head[6], head[7]]), u32_at(20));
    if (flags, reserved) != (0, 0) {
        return Err(FrameError::Reserved { flags, reserved });
    }
    let (told, received) = (u32_at(40), payload.len() as u32);
    if told != received {
        return Err(FrameError::Length { told, received });
    }
    let mut zeroed = *head;
    zeroed[CRC_AT..].fill(0);
    let expected = crc32c::crc32c_append(crc32c::crc32c(&zeroed), payload);
    if expected != u32_at(CRC_AT) {
        return Err(FrameError::Crc { got: u32_at(CRC_AT), expected });
    }
    let header = FrameHeader {
        session: SessionId(u64_at(8)),
        epoch: Epoch(u32_at(16)),
        seq: u64_at(24),
        ack: u64_at(32),
    };
    if header.seq == 0 {
        return Err(FrameError::Number);
    }
    let frame = read_payload(kind, payload, lists).map_err(|error| FrameError::Payload { kind, error })?;
    Ok((header, frame))
}

/// A lane that may stand in a frame.
pub(super) fn lane_in_range(lane: u8) -> bool {
    lane < MAX_LANES
}
