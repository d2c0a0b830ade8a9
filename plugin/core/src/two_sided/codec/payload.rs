//! What stands behind the header of a control frame, little-endian, without gaps; every zero is checked.
//!
//! ```text
//!  1 CREDIT_REQUEST  lane u8 · 0 ×3 · want u32 · waiting_bytes u64 · oldest_wait_us u64
//!  2 DATA_ACK        released_below u64 · count u32 · 0 u32 · count × { transfer u64 · chunks_done u32 · status u8 · direction u8 · 0 u16 }
//!  3 SESSION_OPEN    slot_bytes u32 · request_depth u32 · notify_window u32 · lanes u8 · 0 ×3 · released_below u64
//!  4 NOTIFY          notify_seq u64 · after_transfer u64 · total_len u32 · offset u32 · bytes
//!  5 NOTIFY_ACK      up_to u64
//!  6 READ_REQ        transfer u64 · first u32 · last u8 · 0 ×3 · pieces × { region u64 · offset u64 · len u64 }
//!  7 XFER_NACK       transfer u64 · direction u8 · status u8 · 0 u16 · at u32
//!  8 ABORT           transfer u64 · direction u8 · 0 ×7
//!  9 ABORT_ACK       transfer u64 · direction u8 · status u8 · 0 u16 · chunks u32
//! 10 CREDIT_RECLAIM  lane u8 · 0 ×3 · count u32
//! ```

use super::frame::{Frame, Kind, MAX_PAYLOAD_BYTES, lane_in_range};
use super::{MAX_CHUNKS, MAX_LANES, MAX_MESSAGE_BYTES, MAX_PIECES};
use crate::ids::{LaneId, NotifySeq, RegionId};
use crate::wire::Cursor;

const ACK_BYTES: usize = 16;
const PIECE_BYTES: usize = 24;
const ACK_HEAD_BYTES: usize = 16;
const READ_HEAD_BYTES: usize = 16;
const NOTIFY_HEAD_BYTES: usize = 24;

/// Most entries of one DATA_ACK.
pub const MAX_ACKS: usize = (MAX_PAYLOAD_BYTES - ACK_HEAD_BYTES) / ACK_BYTES;
/// Most pieces of one READ_REQ frame.
pub const MAX_READ_PIECES: usize = (MAX_PAYLOAD_BYTES - READ_HEAD_BYTES) / PIECE_BYTES;

/// Most bytes of a message in one NOTIFY frame.
pub const fn notify_bytes() -> usize {
    MAX_PAYLOAD_BYTES - NOTIFY_HEAD_BYTES
}

/// Which way a transfer moves bytes, seen from the side that began it and drew its number.
///
/// It tells whose number an acknowledgement or a refusal names: that of a WRITE travels back to who drew it, that of a READ comes
/// from who drew it (DATA_ACK) or travels back (XFER_NACK, ABORT_ACK).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Direction {
    /// To the peer.
    Write = 1,
    /// From the peer.
    Read = 2,
}

/// Where a transfer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Status {
    /// In DATA_ACK: complete when chunks_done says so; elsewhere never.
    Ok = 0,
    /// No such region.
    NoRegion = 1,
    /// The region was withdrawn.
    StaleRegion = 2,
    /// Outside of the region.
    Range = 3,
    /// The region does not permit it.
    Permission = 4,
    /// Too many pieces or chunks, or no room for their bookkeeping.
    TooMany = 5,
    /// The bytes do not match their checksum.
    Crc = 6,
    /// The copy between slot and region failed.
    CopyFailed = 7,
    /// The engine shuts down.
    Shutdown = 8,
    /// It was given up.
    Aborted = 9,
    /// No credit came for too long.
    Timeout = 10,
}

impl Status {
    /// All of them.
    pub const ALL: [Status; 11] = [
        Status::Ok,
        Status::NoRegion,
        Status::StaleRegion,
        Status::Range,
        Status::Permission,
        Status::TooMany,
        Status::Crc,
        Status::CopyFailed,
        Status::Shutdown,
        Status::Aborted,
        Status::Timeout,
    ];
}

/// Where one transfer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// Which.
    pub transfer: u64,
    /// WRITE: a number of the frame's receiver. READ: one of its sender.
    pub direction: Direction,
    /// How.
    pub status: Status,
    /// Chunks placed so far.
    pub chunks_done: u32,
}

/// A piece of a region to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadPiece {
    /// Where.
    pub region: RegionId,
    /// From its first byte.
    pub offset: u64,
    /// Never 0.
    pub len: u64,
}

/// Working space of the decoder; bounded by [`MAX_ACKS`] and [`MAX_READ_PIECES`].
#[derive(Debug, Default)]
pub struct Lists {
    acks: Vec<Ack>,
    pieces: Vec<ReadPiece>,
}

/// Why a payload cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// Too short or too long for its type.
    #[error("payload of {got} bytes, needed are {need}")]
    Size {
        /// Received.
        got: usize,
        /// Needed (the least, where lengths vary).
        need: usize,
    },
    /// Too few or too many entries.
    #[error("{got} entries, allowed are {least} to {most}")]
    Count {
        /// Told.
        got: usize,
        /// Limit.
        least: usize,
        /// Limit.
        most: usize,
    },
    /// A field out of range.
    #[error("{field} is {value}: {allowed}")]
    Value {
        /// Which.
        field: &'static str,
        /// Told.
        value: u64,
        /// What may stand there.
        allowed: &'static str,
    },
}

fn value(field: &'static str, value: u64, allowed: &'static str) -> PayloadError {
    PayloadError::Value { field, value, allowed }
}

pub(super) fn write_payload(frame: &Frame<'_>, out: &mut Vec<u8>) -> Result<(), PayloadError> {
    check(frame)?;
    let begin = out.len();
    let mut put = |bytes: &[u8]| out.extend_from_slice(bytes);
    match *frame {
        Frame::CreditRequest { lane, want, waiting_bytes, oldest_wait_us } => {
            put(&[lane.0, 0, 0, 0]);
            put(&want.to_le_bytes());
            put(&waiting_bytes.to_le_bytes());
            put(&oldest_wait_us.to_le_bytes());
        }
        Frame::DataAck { released_below, acks } => {
            put(&released_below.to_le_bytes());
            put(&(acks.len() as u32).to_le_bytes());
            put(&[0; 4]);
            for ack in acks {
                put(&ack.transfer.to_le_bytes());
                put(&ack.chunks_done.to_le_bytes());
                put(&[ack.status as u8, ack.direction as u8, 0, 0]);
            }
        }
        Frame::SessionOpen { slot_bytes, request_depth, notify_window, lanes, released_below } => {
            put(&slot_bytes.to_le_bytes());
            put(&request_depth.to_le_bytes());
            put(&notify_window.to_le_bytes());
            put(&[lanes, 0, 0, 0]);
            put(&released_below.to_le_bytes());
        }
        Frame::Notify { seq, after_transfer, total_len, offset, bytes } => {
            put(&seq.0.to_le_bytes());
            put(&after_transfer.to_le_bytes());
            put(&total_len.to_le_bytes());
            put(&offset.to_le_bytes());
            put(bytes);
        }
        Frame::NotifyAck { up_to } => put(&up_to.0.to_le_bytes()),
        Frame::ReadReq { transfer, first, last, pieces } => {
            put(&transfer.to_le_bytes());
            put(&first.to_le_bytes());
            put(&[u8::from(last), 0, 0, 0]);
            for piece in pieces {
                put(&piece.region.0.to_le_bytes());
                put(&piece.offset.to_le_bytes());
                put(&piece.len.to_le_bytes());
            }
        }
        Frame::XferNack { transfer, direction, status, at } => {
            put(&transfer.to_le_bytes());
            put(&[direction as u8, status as u8, 0, 0]);
            put(&at.to_le_bytes());
        }
        Frame::Abort { transfer, direction } => {
            put(&transfer.to_le_bytes());
            put(&[direction as u8, 0, 0, 0, 0, 0, 0, 0]);
        }
        Frame::AbortAck { transfer, direction, status, chunks } => {
            put(&transfer.to_le_bytes());
            put(&[direction as u8, status as u8, 0, 0]);
            put(&chunks.to_le_bytes());
        }
        Frame::CreditReclaim { lane, count } => {
            put(&[lane.0, 0, 0, 0]);
            put(&count.to_le_bytes());
        }
    }
    debug_assert!(out.len() - begin <= MAX_PAYLOAD_BYTES, "checked counts keep payloads short");
    Ok(())
}

pub(super) fn read_payload<'a>(
    kind: Kind,
    payload: &'a [u8],
    lists: &'a mut Lists,
) -> Result<Frame<'a>, PayloadError> {
    let need = least_bytes(kind);
    let fixed = !matches!(kind, Kind::DataAck | Kind::Notify | Kind::ReadReq);
    if payload.len() < need || fixed && payload.len() != need {
        return Err(PayloadError::Size { got: payload.len(), need });
    }
    let mut fields = Fields(Cursor::new(payload));
    let frame = match kind {
        Kind::CreditRequest => Frame::CreditRequest {
            lane: fields.lane()?,
            want: fields.u32(),
            waiting_bytes: fields.u64(),
            oldest_wait_us: fields.u64(),
        },
        Kind::DataAck => read_acks(&mut fields, payload.len(), &mut lists.acks)?,
        Kind::SessionOpen => Frame::SessionOpen {
            slot_bytes: fields.u32(),
            request_depth: fields.u32(),
            notify_window: fields.u32(),
            lanes: {
                let lanes = fields.u8();
                fields.zeros::<3>()?;
                lanes
            },
            released_below: fields.u64(),
        },
        Kind::Notify => Frame::Notify {
            seq: NotifySeq(fields.u64()),
            after_transfer: fields.u64(),
            total_len: fields.u32(),
            offset: fields.u32(),
            bytes: fields.0.rest(),
        },
        Kind::NotifyAck => Frame::NotifyAck { up_to: NotifySeq(fields.u64()) },
        Kind::ReadReq => read_pieces(&mut fields, payload.len(), &mut lists.pieces)?,
        Kind::XferNack => {
            let (transfer, direction, status) = (fields.u64(), fields.direction()?, fields.status()?);
            fields.zeros::<2>()?;
            Frame::XferNack { transfer, direction, status, at: fields.u32() }
        }
        Kind::Abort => {
            let (transfer, direction) = (fields.u64(), fields.direction()?);
            fields.zeros::<7>()?;
            Frame::Abort { transfer, direction }
        }
        Kind::AbortAck => {
            let (transfer, direction, status) = (fields.u64(), fields.direction()?, fields.status()?);
            fields.zeros::<2>()?;
            Frame::AbortAck { transfer, direction, status, chunks: fields.u32() }
        }
        Kind::CreditReclaim => Frame::CreditReclaim { lane: fields.lane()?, count: fields.u32() },
    };
    check(&frame)?;
    Ok(frame)
}

fn least_bytes(kind: Kind) -> usize {
    match kind {
        Kind::CreditRequest | Kind::SessionOpen => 24,
        Kind::DataAck => ACK_HEAD_BYTES,
        Kind::Notify => NOTIFY_HEAD_BYTES,
        Kind::NotifyAck | Kind::CreditReclaim => 8,
        Kind::ReadReq => READ_HEAD_BYTES,
        Kind::XferNack | Kind::Abort | Kind::AbortAck => 16,
    }
}

fn read_acks<'a>(
    fields: &mut Fields<'_>,
    payload_len: usize,
    acks: &'a mut Vec<Ack>,
) -> Result<Frame<'a>, PayloadError> {
    let (released_below, count) = (fields.u64(), fields.u32() as usize);
    fields.zeros::<4>()?;
    check_count(count, 0, MAX_ACKS)?;
    let need = ACK_HEAD_BYTES + count * ACK_BYTES;
    if payload_len != need {
        return Err(PayloadError::Size { got: payload_len, need });
    }
    acks.clear();
    for _ in 0..count {
        let (transfer, chunks_done) = (fields.u64(), fields.u32());
        let (status, direction) = (fields.status()?, fields.direction()?);
        fields.zeros::<2>()?;
        acks.push(Ack { transfer, direction, status, chunks_done });
    }
    Ok(Frame::DataAck { released_below, acks })
}

fn read_pieces<'a>(
    fields: &mut Fields<'_>,
    payload_len: usize,
    pieces: &'a mut Vec<ReadPiece>,
) -> Result<Frame<'a>, PayloadError> {
    let (transfer, first, last) = (fields.u64(), fields.u32(), fields.u8());
    if last > 1 {
        return Err(value("last", last.into(), "0 or 1"));
    }
    fields.zeros::<3>()?;
    let count = (payload_len - READ_HEAD_BYTES) / PIECE_BYTES;
    let need = READ_HEAD_BYTES + count * PIECE_BYTES;
    if payload_len != need {
        return Err(PayloadError::Size { got: payload_len, need });
    }
    check_count(count, 1, MAX_READ_PIECES)?;
    pieces.clear();
    for _ in 0..count {
        let (region, offset, len) = (RegionId(fields.u64()), fields.u64(), fields.u64());
        pieces.push(ReadPiece { region, offset, len });
    }
    Ok(Frame::ReadReq { transfer, first, last: last == 1, pieces })
}

fn check_count(got: usize, least: usize, most: usize) -> Result<(), PayloadError> {
    if (least..=most).contains(&got) { Ok(()) } else { Err(PayloadError::Count { got, least, most }) }
}

/// The limits that both sides of the codec keep.
fn check(frame: &Frame<'_>) -> Result<(), PayloadError> {
    let named = |transfer: u64| {
        if transfer == 0 { Err(value("transfer", 0, "numbers run from 1")) } else { Ok(()) }
    };
    let in_range = |lane: LaneId| {
        if lane_in_range(lane.0) { Ok(()) } else { Err(value("lane", lane.0.into(), "0 to 63")) }
    };
    let counted = |field, chunks: u32| {
        if chunks > MAX_CHUNKS { Err(value(field, chunks.into(), "at most 2^24")) } else { Ok(()) }
    };
    match *frame {
        Frame::CreditRequest { lane, .. } | Frame::CreditReclaim { lane, .. } => in_range(lane),
        Frame::DataAck { acks, .. } => {
            check_count(acks.len(), 0, MAX_ACKS)?;
            acks.iter().try_for_each(|ack| {
                named(ack.transfer)?;
                counted("chunks_done", ack.chunks_done)
            })
        }
        Frame::SessionOpen { lanes, .. } => {
            if (1..=MAX_LANES).contains(&lanes) {
                Ok(())
            } else {
                Err(value("lanes", lanes.into(), "1 to 64"))
            }
        }
        Frame::Notify { seq, total_len, offset, bytes, .. } => {
            if seq.0 == 0 {
                return Err(value("notify_seq", 0, "numbers run from 1"));
            }
            if total_len > MAX_MESSAGE_BYTES {
                return Err(value("total_len", total_len.into(), "at most 8 MiB"));
            }
            check_count(bytes.len(), 0, notify_bytes())?;
            let end = u64::from(offset) + bytes.len() as u64;
            if end > total_len.into() || bytes.is_empty() && total_len > 0 {
                return Err(value("offset", offset.into(), "a piece has bytes and ends inside its message"));
            }
            Ok(())
        }
        Frame::NotifyAck { .. } => Ok(()),
        Frame::ReadReq { transfer, first, pieces, .. } => {
            named(transfer)?;
            check_count(pieces.len(), 1, MAX_READ_PIECES)?;
            if u64::from(first) + pieces.len() as u64 > MAX_PIECES.into() {
                return Err(value("first", first.into(), "at most 2^17 pieces in all"));
            }
            let mut ends = pieces.iter().map(|piece| piece.len);
            match ends.find(|&len| len == 0) {
                Some(_) => Err(value("len", 0, "a piece has bytes")),
                None => Ok(()),
            }
        }
        Frame::XferNack { transfer, status, .. } => {
            named(transfer)?;
            if status == Status::Ok { Err(value("status", 0, "a refusal has a reason")) } else { Ok(()) }
        }
        Frame::Abort { transfer, .. } => named(transfer),
        Frame::AbortAck { transfer, chunks, .. } => {
            named(transfer)?;
            counted("chunks", chunks)
        }
    }
}

/// Fields of a payload whose length was checked before.
struct Fields<'a>(Cursor<'a>);

impl Fields<'_> {
    fn u8(&mut self) -> u8 {
        self.0.u8().expect("the length was checked")
    }

    fn u32(&mut self) -> u32 {
        self.0.u32().expect("the length was checked")
    }

    fn u64(&mut self) -> u64 {
        self.0.u64().expect("the length was checked")
    }

    fn zeros<const N: usize>(&mut self) -> Result<(), PayloadError> {
        let bytes = self.0.array::<N>().expect("the length was checked");
        match bytes.into_iter().find(|&byte| byte != 0) {
            Some(byte) => Err(value("a reserved byte", byte.into(), "must be 0")),
            None => Ok(()),
        }
    }

    fn lane(&mut self) -> Result<LaneId, PayloadError> {
        let lane = LaneId(self.u8());
        self.zeros::<3>()?;
        Ok(lane)
    }

    fn direction(&mut self) -> Result<Direction, PayloadError> {
        match self.u8() {
            1 => Ok(Direction::Write),
            2 => Ok(Direction::Read),
            other => Err(value("direction", other.into(), "1 (WRITE) or 2 (READ)")),
        }
    }

    fn status(&mut self) -> Result<Status, PayloadError> {
        let byte = self.u8();
        let found = Status::ALL.into_iter().find(|status| *status as u8 == byte);
        found.ok_or(value("status", byte.into(), "0 to 10"))
    }
}
