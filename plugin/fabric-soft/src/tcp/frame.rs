//! The frames between two endpoints: fixed little-endian headers, strict decode.
//!
//! A frame is a header, a table of `count` pieces, `len` bytes of payload (those of the pieces, in order) and, after the
//! payload of a `READ_RESP`, a trailer that says whether the bytes are good. Work requests are numbered from 0 per
//! direction in the order of posting; `seq` is the number of the first one that a request frame carries.

use baton_fabric::WcStatus;

/// Payload of one frame at most.
pub const MAX_FRAME_BYTES: usize = 256 * 1024;
/// Pieces of one frame at most.
pub const MAX_PIECES: usize = 256;
/// Pieces that a peer may have asked for and not yet received.
pub const MAX_READS: usize = 1024;
/// Size of a header.
pub const HEADER: usize = 48;
/// Size of one entry of the table.
pub const PIECE: usize = 24;
/// Size of the trailer of a `READ_RESP`.
pub const TRAILER: usize = 8;

const MAGIC: u32 = u32::from_le_bytes(*b"BTF1");
const TRAILER_MAGIC: u32 = u32::from_le_bytes(*b"BTE1");

/// The peer shall acknowledge when everything up to this frame is placed.
pub const ACK_WANTED: u8 = 1;
/// The peer may acknowledge with whatever it sends next, or when it has nothing else to do.
pub const ACK_LATER: u8 = 8;
/// The message goes on in the next frame.
pub const MORE: u8 = 2;
/// The message begins with a head of `imm` bytes, which tells where the rest goes.
pub const HEAD: u8 = 4;

/// What a frame does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameOp {
    /// Places pieces.
    Write = 1,
    /// Places pieces; the last work request in it carries an immediate.
    Imm = 2,
    /// Asks for pieces.
    ReadReq = 3,
    /// Bytes asked for, in the order of asking; `seq` is their offset in the stream of all answers.
    ReadResp = 4,
    /// A message for a RECV slot.
    Send = 5,
    /// Nothing but the acknowledgement that every header carries.
    Ack = 6,
    /// Work request `seq` is refused with `status`; the sender of this frame stops.
    Nak = 7,
}

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it does.
    pub op: FrameOp,
    /// [`ACK_WANTED`], [`ACK_LATER`], [`MORE`], [`HEAD`].
    pub flags: u8,
    /// Pieces in the table.
    pub count: u16,
    /// Connection it belongs to.
    pub epoch: u32,
    /// Payload bytes.
    pub len: u32,
    /// See [`FrameOp`].
    pub seq: u64,
    /// The peer's work requests below this number are placed.
    pub ack: u64,
    /// Immediate, or length of a message's head.
    pub imm: u32,
    /// Whole length of the work request that carries the immediate, or of the message.
    pub message_bytes: u32,
    /// Work requests that end in this frame.
    pub ends: u16,
    /// Why a [`FrameOp::Nak`] refuses.
    pub status: Status,
}

impl Header {
    /// A header that carries only an acknowledgement.
    pub fn ack(epoch: u32, ack: u64) -> Header {
        Header {
            op: FrameOp::Ack,
            flags: 0,
            count: 0,
            epoch,
            len: 0,
            seq: 0,
            ack,
            imm: 0,
            message_bytes: 0,
            ends: 0,
            status: Status::Good,
        }
    }
}

/// A refusal on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Status {
    /// None.
    Good = 0,
    /// Key, bounds or permission.
    Access = 1,
    /// No RECV.
    NoRecv = 2,
    /// RECV slot too small.
    TooLong = 3,
}

impl Status {
    fn from_wire(value: u16) -> Option<Status> {
        [Status::Good, Status::Access, Status::NoRecv, Status::TooLong]
            .into_iter()
            .find(|s| *s as u16 == value)
    }

    /// As the initiator's completion says it.
    pub fn completion(self) -> WcStatus {
        match self {
            Status::Good => WcStatus::Success,
            Status::Access => WcStatus::RemoteAccess,
            Status::NoRecv => WcStatus::RnrExceeded,
            Status::TooLong => WcStatus::RemoteLength,
        }
    }
}

/// A piece of registered memory of the frame's receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Remote key.
    pub key: u64,
    /// Address.
    pub addr: u64,
    /// Length.
    pub len: u32,
}

/// Why a connection dies: what a peer sent that no peer of ours sends. One counter each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum Malformed {
    /// See text.
    #[error("frame does not begin with the magic number")]
    Magic,
    /// See text.
    #[error("unknown frame operation")]
    Op,
    /// See text.
    #[error("flags that this operation does not have")]
    Flags,
    /// See text.
    #[error("frame of another connection")]
    Epoch,
    /// See text.
    #[error("reserved bytes are not zero")]
    Reserved,
    /// See text.
    #[error("more pieces than a frame may hold")]
    PieceCount,
    /// See text.
    #[error("payload longer than a frame may hold")]
    PayloadTooLong,
    /// See text.
    #[error("payload length is not the sum of the pieces")]
    PayloadMismatch,
    /// See text.
    #[error("piece of length zero, or longer than a message may be")]
    PieceLength,
    /// See text.
    #[error("number of work requests does not fit the pieces")]
    Ends,
    /// See text.
    #[error("status where none belongs, or an unknown one")]
    Status,
    /// See text.
    #[error("fields set that this operation does not use")]
    Unused,
    /// See text.
    #[error("work request out of sequence")]
    Sequence,
    /// See text.
    #[error("acknowledgement of work requests that were not sent")]
    Ack,
    /// See text.
    #[error("answer to a READ that was not asked")]
    UnexpectedAnswer,
    /// See text.
    #[error("more READs outstanding than a connection may have")]
    TooManyReads,
    /// See text.
    #[error("READ answer without a proper trailer")]
    Trailer,
    /// See text.
    #[error("message continues differently than it began")]
    Continuation,
    /// See text.
    #[error("refusal of a work request that is not the oldest one outstanding")]
    Refusal,
}

impl Malformed {
    /// Number of reasons.
    pub const COUNT: usize = Malformed::Refusal as usize + 1;
    /// Names for `stats`, by value.
    pub const NAMES: [&'static str; Malformed::COUNT] = [
        "magic",
        "op",
        "flags",
        "epoch",
        "reserved",
        "piece_count",
        "payload_too_long",
        "payload_mismatch",
        "piece_length",
        "ends",
        "status",
        "unused",
        "sequence",
        "ack",
        "unexpected_answer",
        "too_many_reads",
        "trailer",
        "continuation",
        "refusal",
    ];
}

/// Appends a header.
pub fn encode(out: &mut Vec<u8>, h: &Header) {
    let mut b = [0u8; HEADER];
    encode_to(&mut b, h);
    out.extend_from_slice(&b);
}

/// Writes a header.
pub fn encode_to(b: &mut [u8; HEADER], h: &Header) {
    b[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    b[4] = h.op as u8;
    b[5] = h.flags;
    b[6..8].copy_from_slice(&h.count.to_le_bytes());
    b[8..12].copy_from_slice(&h.epoch.to_le_bytes());
    b[12..16].copy_from_slice(&h.len.to_le_bytes());
    b[16..24].copy_from_slice(&h.seq.to_le_bytes());
    b[24..32].copy_from_slice(&h.ack.to_le_bytes());
    b[32..36].copy_from_slice(&h.imm.to_le_bytes());
    b[36..40].copy_from_slice(&h.message_bytes.to_le_bytes());
    b[40..42].copy_from_slice(&h.ends.to_le_bytes());
    b[42..44].copy_from_slice(&(h.status as u16).to_le_bytes());
    b[44..48].fill(0);
}

/// Appends one entry of the table.
pub fn encode_piece(out: &mut Vec<u8>, p: &Piece) {
    let mut b = [0u8; PIECE];
    b[0..8].copy_from_slice(&p.key.to_le_bytes());
    b[8..16].copy_from_slice(&p.addr.to_le_bytes());
    b[16..20].copy_from_slice(&p.len.to_le_bytes());
    out.extend_from_slice(&b);
}

/// The trailer of a `READ_RESP`.
pub fn trailer(aborted: bool) -> [u8; TRAILER] {
    let mut b = [0u8; TRAILER];
    b[..4].copy_from_slice(&TRAILER_MAGIC.to_le_bytes());
    b[4..].copy_from_slice(&u32::from(aborted).to_le_bytes());
    b
}

/// Whether the payload before this trailer is to be believed.
pub fn decode_trailer(b: &[u8; TRAILER]) -> Result<bool, Malformed> {
    let aborted = le32(b, 4);
    if le32(b, 0) != TRAILER_MAGIC || aborted > 1 {
        return Err(Malformed::Trailer);
    }
    Ok(aborted == 0)
}

/// Parses a header and checks every field against the others and against `epoch`.
pub fn decode(b: &[u8; HEADER], epoch: u32) -> Result<Header, Malformed> {
    if le32(b, 0) != MAGIC {
        return Err(Malformed::Magic);
    }
    let op = match b[4] {
        1 => FrameOp::Write,
        2 => FrameOp::Imm,
        3 => FrameOp::ReadReq,
        4 => FrameOp::ReadResp,
        5 => FrameOp::Send,
        6 => FrameOp::Ack,
        7 => FrameOp::Nak,
        _ => return Err(Malformed::Op),
    };
    let h = Header {
        op,
        flags: b[5],
        count: u16::from_le_bytes([b[6], b[7]]),
        epoch: le32(b, 8),
        len: le32(b, 12),
        seq: le64(b, 16),
        ack: le64(b, 24),
        imm: le32(b, 32),
        message_bytes: le32(b, 36),
        ends: u16::from_le_bytes([b[40], b[41]]),
        status: Status::from_wire(u16::from_le_bytes([b[42], b[43]])).ok_or(Malformed::Status)?,
    };
    if le32(b, 44) != 0 {
        return Err(Malformed::Reserved);
    }
    if h.epoch != epoch {
        return Err(Malformed::Epoch);
    }
    check(&h)?;
    Ok(h)
}

fn check(h: &Header) -> Result<(), Malformed> {
    let flags = match h.op {
        FrameOp::Write | FrameOp::Imm => ACK_WANTED | ACK_LATER,
        FrameOp::Ack => ACK_WANTED,
        FrameOp::Send => ACK_WANTED | ACK_LATER | MORE | HEAD,
        FrameOp::ReadReq | FrameOp::ReadResp | FrameOp::Nak => 0,
    };
    if h.flags & !flags != 0 {
        return Err(Malformed::Flags);
    }
    if usize::from(h.count) > MAX_PIECES {
        return Err(Malformed::PieceCount);
    }
    if h.len as usize > MAX_FRAME_BYTES {
        return Err(Malformed::PayloadTooLong);
    }
    if (h.op == FrameOp::Nak) != (h.status != Status::Good) {
        return Err(Malformed::Status);
    }
    let has_pieces = matches!(h.op, FrameOp::Write | FrameOp::Imm | FrameOp::ReadReq);
    let has_message = matches!(h.op, FrameOp::Imm | FrameOp::Send);
    let unused = (!has_pieces && h.count != 0)
        || (!has_message && h.message_bytes != 0)
        || (h.op != FrameOp::Imm && h.flags & HEAD == 0 && h.imm != 0)
        || (has_pieces && (h.op == FrameOp::ReadReq || h.count == 0) && h.len != 0)
        || (matches!(h.op, FrameOp::Ack | FrameOp::Nak) && (h.len != 0 || h.ends != 0))
        || (h.op == FrameOp::Ack && h.seq != 0);
    if unused {
        return Err(Malformed::Unused);
    }
    // Its message is in one frame, and there is something before and behind the cut.
    if h.flags & HEAD != 0 && (h.flags & MORE != 0 || h.imm == 0 || h.imm >= h.len) {
        return Err(Malformed::Flags);
    }
    let ends_fit = match h.op {
        // The last piece may go on in the next frame; without pieces it is one WRITE of nothing.
        FrameOp::Write => {
            (h.count > 0 && (h.ends == h.count || h.ends == h.count - 1)) || (h.count, h.ends) == (0, 1)
        }
        FrameOp::Imm => h.ends == h.count.max(1),
        FrameOp::ReadReq => h.count > 0 && h.ends == h.count,
        FrameOp::Send => h.ends == u16::from(h.flags & MORE == 0),
        FrameOp::ReadResp => h.ends == 0 && h.len > 0,
        FrameOp::Ack | FrameOp::Nak => true,
    };
    if !ends_fit {
        return Err(Malformed::Ends);
    }
    Ok(())
}

/// Parses the table of a frame whose header is `h` and checks it against the payload.
pub fn decode_pieces(b: &[u8], h: &Header, max_len: u32, out: &mut Vec<Piece>) -> Result<(), Malformed> {
    debug_assert_eq!(b.len(), usize::from(h.count) * PIECE);
    out.clear();
    let mut sum = 0u64;
    for entry in b.chunks_exact(PIECE) {
        let piece = Piece { key: le64(entry, 0), addr: le64(entry, 8), len: le32(entry, 16) };
        if le32(entry, 20) != 0 {
            return Err(Malformed::Reserved);
        }
        if piece.len == 0 || piece.len > max_len {
            return Err(Malformed::PieceLength);
        }
        sum += u64::from(piece.len);
        out.push(piece);
    }
    if matches!(h.op, FrameOp::Write | FrameOp::Imm) && sum != u64::from(h.len) {
        return Err(Malformed::PayloadMismatch);
    }
    Ok(())
}

fn le32(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(b[at..at + 4].try_into().expect("four bytes"))
}

fn le64(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(b[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_header() -> Header {
        Header { op: FrameOp::Write, count: 2, len: 30, seq: 7, ends: 2, ..Header::ack(9, 5) }
    }

    fn bytes(h: &Header) -> [u8; HEADER] {
        let mut out = Vec::new();
        encode(&mut out, h);
        out.try_into().expect("a header")
    }

    #[test]
    fn what_was_encoded_is_decoded() {
        let imm = Header { op: FrameOp::Imm, imm: 0xdead_beef, message_bytes: 20, ..write_header() };
        let send = Header {
            op: FrameOp::Send,
            flags: ACK_WANTED | MORE,
            len: 256 * 1024,
            message_bytes: 300_000,
            seq: 1,
            ..Header::ack(9, 5)
        };
        let head = Header { flags: HEAD, len: 100, message_bytes: 100, imm: 64, ends: 1, ..send };
        let nak = Header { op: FrameOp::Nak, status: Status::NoRecv, seq: 3, ..Header::ack(9, 5) };
        for h in [write_header(), imm, send, head, nak, Header::ack(9, 5)] {
            assert_eq!(decode(&bytes(&h), 9), Ok(h));
        }
    }

    #[test]
    fn every_malformed_field_has_a_reason_of_its_own() {
        let cases: [(usize, u8, Malformed); 12] = [
            (0, b'X', Malformed::Magic),
            (4, 0, Malformed::Op),
            (4, 8, Malformed::Op),
            (5, 4, Malformed::Flags),
            (5, MORE, Malformed::Flags),
            (7, 2, Malformed::PieceCount),
            (8, 10, Malformed::Epoch),
            (15, 1, Malformed::PayloadTooLong),
            (32, 1, Malformed::Unused),
            (40, 0, Malformed::Ends),
            (42, 9, Malformed::Status),
            (44, 1, Malformed::Reserved),
        ];
        for (at, value, reason) in cases {
            let mut b = bytes(&write_header());
            b[at] = value;
            assert_eq!(decode(&b, 9), Err(reason), "byte {at} = {value}");
        }
    }

    #[test]
    fn a_head_is_part_of_a_message_in_one_frame() {
        let whole = Header {
            op: FrameOp::Send,
            flags: HEAD,
            len: 100,
            message_bytes: 100,
            imm: 64,
            ends: 1,
            ..Header::ack(9, 5)
        };
        assert_eq!(decode(&bytes(&whole), 9), Ok(whole));
        for (wrong, reason) in [
            (Header { imm: 0, ..whole }, Malformed::Flags),
            (Header { imm: 100, ..whole }, Malformed::Flags),
            (Header { imm: u32::MAX, ..whole }, Malformed::Flags),
            (Header { flags: HEAD | MORE, message_bytes: 200, ends: 0, ..whole }, Malformed::Flags),
            (Header { flags: 0, ..whole }, Malformed::Unused),
            (Header { op: FrameOp::Imm, ..whole }, Malformed::Flags),
        ] {
            assert_eq!(decode(&bytes(&wrong), 9), Err(reason), "{wrong:?}");
        }
    }

    #[test]
    fn no_header_of_random_bytes_panics_the_decoder() {
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        for _ in 0..200_000 {
            let mut b = bytes(&write_header());
            for _ in 0..3 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                b[(state >> 33) as usize % HEADER] = (state >> 56) as u8;
            }
            if let Ok(h) = decode(&b, 9) {
                assert!(usize::from(h.count) <= MAX_PIECES && h.len as usize <= MAX_FRAME_BYTES);
                assert_eq!(bytes(&h), b, "decode and encode are inverse");
            }
        }
    }

    #[test]
    fn a_table_must_fit_its_payload() {
        let piece = |len| Piece { key: 1, addr: 2, len };
        let table = |pieces: &[Piece]| {
            let mut out = Vec::new();
            pieces.iter().for_each(|p| encode_piece(&mut out, p));
            out
        };
        let mut out = Vec::new();
        let h = write_header();
        assert_eq!(decode_pieces(&table(&[piece(10), piece(20)]), &h, 1 << 22, &mut out), Ok(()));
        assert_eq!(out, [piece(10), piece(20)]);
        let wrong = [
            ([piece(10), piece(21)], Malformed::PayloadMismatch),
            ([piece(30), piece(0)], Malformed::PieceLength),
            ([piece(10), piece(1 << 23)], Malformed::PieceLength),
        ];
        for (pieces, reason) in wrong {
            assert_eq!(decode_pieces(&table(&pieces), &h, 1 << 22, &mut out), Err(reason));
        }
        let mut reserved = table(&[piece(10), piece(20)]);
        reserved[PIECE - 1] = 1;
        assert_eq!(decode_pieces(&reserved, &h, 1 << 22, &mut out), Err(Malformed::Reserved));
    }

    #[test]
    fn the_largest_number_of_ends_is_refused_as_well() {
        for op in [FrameOp::Write, FrameOp::Imm, FrameOp::ReadReq, FrameOp::Send, FrameOp::ReadResp] {
            let counts = if matches!(op, FrameOp::Send | FrameOp::ReadResp) { [0, 0] } else { [2, 0] };
            for count in counts {
                let len =
                    if op == FrameOp::ReadReq || (count == 0 && op != FrameOp::ReadResp) { 0 } else { 30 };
                let header = Header { op, count, len, ends: u16::MAX, ..Header::ack(9, 5) };
                assert_eq!(decode(&bytes(&header), 9), Err(Malformed::Ends), "{op:?} of {count}");
            }
        }
    }

    #[test]
    fn trailers_are_checked() {
        assert_eq!(decode_trailer(&trailer(false)), Ok(true));
        assert_eq!(decode_trailer(&trailer(true)), Ok(false));
        assert_eq!(decode_trailer(&[0; TRAILER]), Err(Malformed::Trailer));
        let mut odd = trailer(false);
        odd[4] = 2;
        assert_eq!(decode_trailer(&odd), Err(Malformed::Trailer));
    }
}
