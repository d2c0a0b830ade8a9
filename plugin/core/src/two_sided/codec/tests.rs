use proptest::prelude::*;

use super::*;
use crate::ids::{Epoch, LaneId, NotifySeq, RegionId, SessionId};

const HEADER: FrameHeader =
    FrameHeader { session: SessionId(0x0102_0304_0506_0708), epoch: Epoch(9), seq: 10, ack: 11 };

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn encoded(frame: &Frame<'_>) -> Vec<u8> {
    let mut out = vec![7; 3];
    encode_frame(HEADER, frame, &mut out).unwrap();
    assert_eq!(out[..3], [7; 3], "what was there stays");
    out.split_off(3)
}

/// One frame of each type, and the bytes of its payload.
pub(super) fn samples() -> Vec<(Frame<'static>, &'static str)> {
    const ACKS: &[Ack] = &[
        Ack { transfer: 5, direction: Direction::Write, status: Status::Ok, chunks_done: 6 },
        Ack { transfer: 7, direction: Direction::Read, status: Status::Range, chunks_done: 0 },
    ];
    const PIECES: &[ReadPiece] = &[ReadPiece { region: RegionId(0x11), offset: 0x22, len: 0x33 }];
    vec![
        (
            Frame::CreditRequest { lane: LaneId(3), want: 4, waiting_bytes: 5, oldest_wait_us: 6 },
            "030000000400000005000000000000000600000000000000",
        ),
        (
            Frame::DataAck { released_below: 4, acks: ACKS },
            concat!(
                "04000000000000000200000000000000",
                "05000000000000000600000000010000",
                "07000000000000000000000003020000"
            ),
        ),
        (
            Frame::SessionOpen {
                slot_bytes: 0x10000,
                request_depth: 256,
                notify_window: 0x100000,
                lanes: 4,
                released_below: 1,
            },
            "000001000001000000001000040000000100000000000000",
        ),
        (
            Frame::Notify { seq: NotifySeq(1), after_transfer: 2, total_len: 5, offset: 2, bytes: b"abc" },
            "010000000000000002000000000000000500000002000000616263",
        ),
        (Frame::NotifyAck { up_to: NotifySeq(9) }, "0900000000000000"),
        (
            Frame::ReadReq { transfer: 8, first: 1, last: true, pieces: PIECES },
            "08000000000000000100000001000000110000000000000022000000000000003300000000000000",
        ),
        (
            Frame::XferNack { transfer: 8, direction: Direction::Write, status: Status::NoRegion, at: 2 },
            "08000000000000000101000002000000",
        ),
        (Frame::Abort { transfer: 8, direction: Direction::Read }, "08000000000000000200000000000000"),
        (
            Frame::AbortAck { transfer: 8, direction: Direction::Read, status: Status::Aborted, chunks: 3 },
            "08000000000000000209000003000000",
        ),
        (Frame::CreditReclaim { lane: LaneId(63), count: 2 }, "3f00000002000000"),
    ]
}

#[test]
fn every_frame_type_has_exactly_these_bytes() {
    for ((frame, payload), kind) in samples().into_iter().zip(Kind::ALL) {
        assert_eq!(frame.kind(), kind);
        let bytes = encoded(&frame);
        let head = format!(
            "42746e4301{:02x}0000080706050403020109000000000000000a000000000000000b00000000000000{}",
            kind as u8,
            hex(&((payload.len() / 2) as u32).to_le_bytes()),
        );
        assert_eq!(hex(&bytes[..44]), head, "{kind:?}");
        assert_eq!(hex(&bytes[48..]), payload, "{kind:?}");
        let mut zeroed = bytes.clone();
        zeroed[44..48].fill(0);
        assert_eq!(bytes[44..48], crc32c::crc32c(&zeroed).to_le_bytes(), "{kind:?}");
        let mut lists = Lists::default();
        assert_eq!(decode_frame(&bytes, &mut lists), Ok((HEADER, frame)));
    }
}

#[test]
fn a_frame_golden_vector_includes_its_checksum() {
    let bytes = encoded(&Frame::NotifyAck { up_to: NotifySeq(9) });
    assert_eq!(u32::from_le_bytes(bytes[44..48].try_into().unwrap()), FRAME_CRC);
}

/// Computed bit by bit, by another program.
const FRAME_CRC: u32 = 0x86ad_3423;

/// Puts a right checksum on changed bytes, so that what else is wrong is seen.
fn mend(bytes: &mut [u8]) {
    bytes[44..48].fill(0);
    let crc = crc32c::crc32c(bytes);
    bytes[44..48].copy_from_slice(&crc.to_le_bytes());
}

fn refusal(frame: &Frame<'_>, change: impl FnOnce(&mut Vec<u8>)) -> FrameError {
    let mut bytes = encoded(frame);
    change(&mut bytes);
    if bytes.len() >= 48 {
        mend(&mut bytes);
    }
    decode_frame(&bytes, &mut Lists::default()).unwrap_err()
}

#[test]
fn each_fault_of_a_header_has_its_own_error() {
    let frame = Frame::NotifyAck { up_to: NotifySeq(9) };
    assert_eq!(refusal(&frame, |b| b.truncate(47)), FrameError::Size { len: 47 });
    assert_eq!(refusal(&frame, |b| b.resize(1025, 0)), FrameError::Size { len: 1025 });
    assert!(matches!(refusal(&frame, |b| b[0] = 0), FrameError::Magic(_)));
    assert_eq!(refusal(&frame, |b| b[4] = 2), FrameError::Version(2));
    assert_eq!(refusal(&frame, |b| b[5] = 0), FrameError::Kind(0));
    assert_eq!(refusal(&frame, |b| b[5] = 11), FrameError::Kind(11));
    assert_eq!(refusal(&frame, |b| b[6] = 1), FrameError::Reserved { flags: 1, reserved: 0 });
    assert_eq!(refusal(&frame, |b| b[20] = 1), FrameError::Reserved { flags: 0, reserved: 1 });
    assert_eq!(refusal(&frame, |b| b[24] = 0), FrameError::Number);
    assert_eq!(refusal(&frame, |b| b[40] = 9), FrameError::Length { told: 9, received: 8 });
    assert_eq!(refusal(&frame, |b| b.push(0)), FrameError::Length { told: 8, received: 9 });
    let mut bytes = encoded(&frame);
    bytes[44] ^= 1;
    assert!(matches!(decode_frame(&bytes, &mut Lists::default()), Err(FrameError::Crc { .. })));
}

#[test]
fn payload_fields_out_of_range_are_refused_by_name() {
    let cases: [(usize, usize, u8, &str); 11] = [
        (0, 0, 64, "lane is 64: 0 to 63"),
        (0, 1, 1, "a reserved byte is 1: must be 0"),
        (1, 8, 3, "payload of 48 bytes, needed are 64"),
        (1, 8, 61, "61 entries, allowed are 0 to 60"),
        (1, 28, 11, "status is 11: 0 to 10"),
        (1, 29, 3, "direction is 3: 1 (WRITE) or 2 (READ)"),
        (2, 12, 65, "lanes is 65: 1 to 64"),
        (3, 0, 0, "notify_seq is 0: numbers run from 1"),
        (5, 32, 0, "len is 0: a piece has bytes"),
        (6, 9, 0, "status is 0: a refusal has a reason"),
        (7, 0, 0, "transfer is 0: numbers run from 1"),
    ];
    for (nth, at, byte, text) in cases {
        let (frame, _) = samples()[nth];
        let error = refusal(&frame, |bytes| bytes[48 + at] = byte);
        assert_eq!(error.to_string(), format!("{:?}: {text}", frame.kind()));
    }
    let notify = samples()[3].0;
    let text = "Notify: offset is 3: a piece has bytes and ends inside its message";
    assert_eq!(refusal(&notify, |bytes| bytes[48 + 20] = 3).to_string(), text);
}

#[test]
fn the_encoder_keeps_the_decoders_limits_and_leaves_the_output_alone() {
    let acks = vec![Ack { transfer: 1, direction: Direction::Write, status: Status::Ok, chunks_done: 1 }; 61];
    let pieces = vec![ReadPiece { region: RegionId(1), offset: 0, len: 1 }; 41];
    let bytes = vec![0; notify_bytes() + 1];
    let long = [
        Frame::DataAck { released_below: 0, acks: &acks },
        Frame::ReadReq { transfer: 1, first: 0, last: true, pieces: &pieces },
        Frame::ReadReq { transfer: 1, first: MAX_PIECES - 39, last: true, pieces: &pieces[..40] },
        Frame::ReadReq { transfer: 1, first: 0, last: true, pieces: &[] },
        Frame::Notify { seq: NotifySeq(1), after_transfer: 0, total_len: 1 << 20, offset: 0, bytes: &bytes },
        Frame::Notify {
            seq: NotifySeq(1),
            after_transfer: 0,
            total_len: MAX_MESSAGE_BYTES + 1,
            offset: 0,
            bytes: &[1],
        },
        Frame::AbortAck {
            transfer: 1,
            direction: Direction::Read,
            status: Status::Ok,
            chunks: MAX_CHUNKS + 1,
        },
    ];
    for frame in &long {
        let mut out = vec![1, 2];
        assert!(
            matches!(encode_frame(HEADER, frame, &mut out), Err(FrameError::Payload { .. })),
            "{frame:?}"
        );
        assert_eq!(out, [1, 2]);
    }
    assert_eq!(encoded(&Frame::DataAck { released_below: 0, acks: &acks[..60] }).len(), CONTROL_SLOT_BYTES);
    let full = Frame::ReadReq { transfer: 1, first: 0, last: true, pieces: &pieces[..40] };
    assert!(encoded(&full).len() <= CONTROL_SLOT_BYTES);
}

pub(super) const SLOT: u32 = 4096;

pub(super) fn data_header(kind: DataKind, block: Block) -> DataHeader {
    DataHeader { kind, data_crc: false, session: SessionId(2), epoch: Epoch(3), lane_seq: 4, block }
}

pub(super) fn block(transfer: u64, len: u32) -> Block {
    Block { transfer, region: RegionId(0x55), offset: 0x66, chunk: 1, total: 9, len }
}

#[test]
fn data_messages_have_exactly_these_bytes() {
    let mut out = Vec::new();
    let write = data_header(DataKind::Write, block(7, 3));
    encode_message(&write, &[], SLOT, &mut out).unwrap();
    assert_eq!(
        hex(&out[..60]),
        concat!(
            "42746e4401010000020000000000000003000000010000000700000000000000",
            "550000000000000066000000000000000900000003000000",
            "04000000"
        )
    );
    assert_eq!(u32::from_le_bytes(out[60..].try_into().unwrap()), WRITE_CRC);
    let mut out = Vec::new();
    let pack = data_header(DataKind::Pack, Block::of_pack(2, 85));
    encode_message(&pack, &[block(7, 3), block(8, 2)], SLOT, &mut out).unwrap();
    assert_eq!(
        hex(&out[..60]),
        concat!(
            "42746e4401040000020000000000000003000000000000000000000000000000",
            "000000000000000000000000000000000200000055000000",
            "04000000"
        )
    );
    assert_eq!(
        hex(&out[64..]),
        concat!(
            "0700000000000000550000000000000066000000000000000100000009000000",
            "0300000000000000",
            "0800000000000000550000000000000066000000000000000100000009000000",
            "0200000000000000"
        )
    );
}

const WRITE_CRC: u32 = 0x49f5_ea19;

pub(super) fn decode_message(bytes: &[u8], blocks: &mut Vec<Block>) -> Result<DataHeader, MessageError> {
    let Some(head) = bytes.first_chunk::<DATA_HEADER_BYTES>() else {
        return Err(MessageError::Size { len: bytes.len() as u32, slot_bytes: SLOT });
    };
    let header = DataHeader::decode(head, bytes.len() as u32, SLOT)?;
    let prefix = &bytes[..header.prefix_bytes()];
    check_crc(&header, prefix, |crc| crc32c::crc32c_append(crc, &bytes[prefix.len()..]))?;
    if header.kind.is_pack() {
        decode_blocks(&header, &prefix[DATA_HEADER_BYTES..], blocks)?;
    }
    Ok(header)
}

#[test]
fn each_fault_of_a_data_message_has_its_own_error() {
    let refuse = |header: DataHeader, blocks: &[Block], change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = Vec::new();
        encode_message(&header, blocks, SLOT, &mut bytes).unwrap();
        bytes.resize(64 + header.block.len as usize, 0xAB);
        change(&mut bytes);
        if let Some(head) = bytes.get_mut(..64) {
            head[60..].fill(0);
            let end = 64 + blocks.len() * PACK_BLOCK_BYTES;
            let crc = crc32c::crc32c(&bytes[..end.min(bytes.len())]);
            bytes[60..64].copy_from_slice(&crc.to_le_bytes());
        }
        let mut out = vec![block(99, 1)];
        let error = decode_message(&bytes, &mut out).unwrap_err();
        assert_eq!(out, [block(99, 1)], "untouched");
        error
    };
    let write = data_header(DataKind::Write, block(7, 3));
    assert_eq!(refuse(write, &[], &|b| b.truncate(63)), MessageError::Size { len: 63, slot_bytes: SLOT });
    assert_eq!(
        refuse(write, &[], &|b| b.resize(4097, 0)),
        MessageError::Size { len: 4097, slot_bytes: SLOT }
    );
    assert!(matches!(refuse(write, &[], &|b| b[3] = 0), MessageError::Magic(_)));
    assert_eq!(refuse(write, &[], &|b| b[4] = 0), MessageError::Version(0));
    assert_eq!(refuse(write, &[], &|b| b[5] = 6), MessageError::Kind(6));
    assert_eq!(refuse(write, &[], &|b| b[6] = 2), MessageError::Flags(2));
    assert_eq!(refuse(write, &[], &|b| b.push(0)), MessageError::Length { told: 3, received: 4 });
    let none = MessageError::Transfer { kind: DataKind::Write, transfer: 0 };
    assert_eq!(refuse(write, &[], &|b| b[24] = 0), none);
    assert_eq!(refuse(write, &[], &|b| b[20] = 9), MessageError::Chunk { chunk: 9, total: 9 });
    let total = (1u32 << 24) + 1;
    let many = refuse(write, &[], &|b| b[48..52].copy_from_slice(&total.to_le_bytes()));
    assert_eq!(many, MessageError::Chunk { chunk: 1, total });
    let span = MessageError::Span { offset: u64::MAX, len: 3 };
    assert_eq!(refuse(write, &[], &|b| b[40..48].fill(0xFF)), span);
    let empty = MessageError::Span { offset: 0x66, len: 0 };
    assert_eq!(
        refuse(write, &[], &|b| {
            b.truncate(64);
            b[52] = 0
        }),
        empty
    );
    let nop = data_header(DataKind::Nop, Block::NONE);
    assert_eq!(refuse(nop, &[], &|b| b[32] = 1), MessageError::Unused(DataKind::Nop));
    let of = MessageError::Transfer { kind: DataKind::Nop, transfer: 1 };
    assert_eq!(refuse(nop, &[], &|b| b[24] = 1), of);
    let (pack, two) = (data_header(DataKind::Pack, Block::of_pack(2, 85)), [block(7, 3), block(8, 2)]);
    assert_eq!(refuse(pack, &two, &|b| b[48] = 0), MessageError::Blocks { count: 0, len: 85 });
    assert_eq!(refuse(pack, &two, &|b| b[48] = 3), MessageError::Blocks { count: 3, len: 85 });
    let sum = MessageError::BlockBytes { told: 6, received: 5 };
    assert_eq!(refuse(pack, &two, &|b| b[64 + 32] = 4), sum);
    assert_eq!(refuse(pack, &two, &|b| b[64 + 36] = 4), MessageError::Unused(DataKind::Pack));
    let none = MessageError::Transfer { kind: DataKind::Pack, transfer: 0 };
    assert_eq!(refuse(pack, &two, &|b| b[64] = 0), none);
}

#[test]
fn a_message_longer_than_the_receivers_slot_is_refused_before_it_is_posted() {
    let mut out = vec![1];
    let long = data_header(DataKind::Write, block(7, SLOT - 63));
    let error = MessageError::Size { len: SLOT + 1, slot_bytes: SLOT };
    assert_eq!(encode_message(&long, &[], SLOT, &mut out), Err(error));
    assert_eq!(out, [1]);
    encode_message(&data_header(DataKind::Write, block(7, SLOT - 64)), &[], SLOT, &mut out).unwrap();
}

#[test]
fn a_checksum_over_the_data_notices_any_changed_bit() {
    let mut bytes = Vec::new();
    let header = DataHeader { data_crc: true, ..data_header(DataKind::Write, block(7, 9)) };
    encode_message(&header, &[], SLOT, &mut bytes).unwrap();
    append_data_crc(&mut bytes, b"1234");
    append_data_crc(&mut bytes, b"56789");
    bytes.extend_from_slice(b"123456789");
    assert_eq!(decode_message(&bytes, &mut Vec::new()), Ok(header));
    for bit in 0..bytes.len() * 8 {
        let mut bad = bytes.clone();
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(decode_message(&bad, &mut Vec::new()).is_err(), "bit {bit}");
    }
}

fn direction() -> impl Strategy<Value = Direction> {
    prop_oneof![Just(Direction::Write), Just(Direction::Read)]
}

fn status() -> impl Strategy<Value = Status> {
    prop::sample::select(Status::ALL.to_vec())
}

fn acks() -> impl Strategy<Value = Vec<Ack>> {
    let ack = (1u64.., direction(), status(), 0..=MAX_CHUNKS).prop_map(
        |(transfer, direction, status, chunks_done)| Ack { transfer, direction, status, chunks_done },
    );
    prop::collection::vec(ack, 0..=MAX_ACKS)
}

fn pieces() -> impl Strategy<Value = Vec<ReadPiece>> {
    let piece = (any::<u64>(), any::<u64>(), 1u64..).prop_map(|(region, offset, len)| ReadPiece {
        region: RegionId(region),
        offset,
        len,
    });
    prop::collection::vec(piece, 1..=MAX_READ_PIECES)
}

/// Any frame at all, built from unrelated parts.
fn with_frame(
    kind: usize,
    numbers: (u64, u64, u32, u32, u8),
    parts: (&[Ack], &[ReadPiece], &[u8]),
    of: (Direction, Status),
    check: impl FnOnce(Frame<'_>),
) {
    let (a, b, c, d, lane) = numbers;
    let (acks, pieces, bytes) = parts;
    let (direction, status) = of;
    let (transfer, lane) = (a.max(1), LaneId(lane % 64));
    check(match Kind::ALL[kind] {
        Kind::CreditRequest => Frame::CreditRequest { lane, want: c, waiting_bytes: a, oldest_wait_us: b },
        Kind::DataAck => Frame::DataAck { released_below: a, acks },
        Kind::SessionOpen => Frame::SessionOpen {
            slot_bytes: c,
            request_depth: d,
            notify_window: c ^ d,
            lanes: lane.0 + 1,
            released_below: b,
        },
        Kind::Notify => {
            let total_len = (bytes.len() as u32 + c % 1000).min(MAX_MESSAGE_BYTES);
            let total_len = if bytes.is_empty() { 0 } else { total_len };
            let offset = total_len - bytes.len() as u32;
            Frame::Notify { seq: NotifySeq(transfer), after_transfer: b, total_len, offset, bytes }
        }
        Kind::NotifyAck => Frame::NotifyAck { up_to: NotifySeq(a) },
        Kind::ReadReq => Frame::ReadReq { transfer, first: c % 100_000, last: d % 2 == 0, pieces },
        Kind::XferNack => {
            let status = if status == Status::Ok { Status::Crc } else { status };
            Frame::XferNack { transfer, direction, status, at: c }
        }
        Kind::Abort => Frame::Abort { transfer, direction },
        Kind::AbortAck => Frame::AbortAck { transfer, direction, status, chunks: c % (MAX_CHUNKS + 1) },
        Kind::CreditReclaim => Frame::CreditReclaim { lane, count: c },
    });
}

proptest! {
    #[test]
    fn a_frame_survives_the_wire_and_no_mutation_passes_unseen(
        kind in 0usize..10, numbers in any::<(u64, u64, u32, u32, u8)>(), acks in acks(), pieces in pieces(),
        bytes in prop::collection::vec(any::<u8>(), 0..=notify_bytes()), of in (direction(), status()),
        at in any::<prop::sample::Index>(), bit in 0u8..8, cut in any::<prop::sample::Index>(),
    ) {
        with_frame(kind, numbers, (&acks, &pieces, &bytes), of, |frame| {
            let bytes = encoded(&frame);
            assert!(bytes.len() <= CONTROL_SLOT_BYTES);
            let mut lists = Lists::default();
            assert_eq!(decode_frame(&bytes, &mut lists), Ok((HEADER, frame)));
            let mut bad = bytes.clone();
            bad[at.index(bytes.len())] ^= 1 << bit;
            assert!(decode_frame(&bad, &mut lists).is_err(), "a flipped bit");
            let mut bad = bytes.clone();
            bad.truncate(cut.index(bytes.len()));
            assert!(decode_frame(&bad, &mut lists).is_err(), "a cut frame");
        });
    }

    /// Mutations with a right checksum reach every check behind it: an error or a frame that encodes to the same bytes, never a panic.
    #[test]
    fn what_decodes_is_canonical_whatever_was_changed(
        nth in 0usize..10, changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        grow in 0usize..30,
    ) {
        let (frame, _) = samples()[nth];
        let mut bytes = encoded(&frame);
        bytes.resize(bytes.len() + grow, 0);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let len = (bytes.len() - CONTROL_HEADER_BYTES) as u32;
        bytes[40..44].copy_from_slice(&len.to_le_bytes());
        mend(&mut bytes);
        let mut lists = Lists::default();
        if let Ok((header, frame)) = decode_frame(&bytes, &mut lists) {
            let mut out = Vec::new();
            encode_frame(header, &frame, &mut out).unwrap();
            prop_assert_eq!(out, bytes);
        }
    }

    #[test]
    fn the_decoders_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..1200), kind in any::<u8>()) {
        let _ = decode_frame(&bytes, &mut Lists::default());
        let mut bytes = bytes;
        if bytes.len() >= 64 {
            bytes[..8].copy_from_slice(&[b'B', b't', b'n', b'D', 1, kind % 7, 0, 0]);
            let behind = (bytes.len() - 64) as u32;
            bytes[52..56].copy_from_slice(&behind.to_le_bytes());
        }
        let _ = decode_message(&bytes, &mut Vec::new());
    }

    #[test]
    fn data_messages_survive_the_wire(
        kind in 0u8..4, transfer in 1u64.., region in any::<u64>(), offset in 0..u64::MAX - 4096, total in 1..=MAX_CHUNKS,
        chunk in any::<prop::sample::Index>(), lens in prop::collection::vec(1u32..100, 1..20), lane_seq in any::<u32>(),
        data_crc in any::<bool>(),
    ) {
        let one = |len| Block {
            transfer, region: RegionId(region), offset, chunk: chunk.index(total as usize) as u32, total, len,
        };
        let blocks: Vec<Block> = lens.iter().map(|&len| one(len)).collect();
        let (kind, block, blocks) = match kind {
            0 => (DataKind::Write, one(lens[0]), vec![]),
            1 => (DataKind::ReadResp, one(lens[0]), vec![]),
            _ => {
                let len = lens.iter().sum::<u32>() + (blocks.len() * PACK_BLOCK_BYTES) as u32;
                let kind = if kind == 2 { DataKind::Pack } else { DataKind::ReadPack };
                (kind, Block::of_pack(blocks.len() as u32, len), blocks)
            }
        };
        let header = DataHeader { kind, data_crc, session: SessionId(transfer ^ 5), epoch: Epoch(lane_seq ^ 1), lane_seq, block };
        let mut bytes = Vec::new();
        encode_message(&header, &blocks, SLOT, &mut bytes).unwrap();
        let data = vec![0x5A; (64 + block.len) as usize - bytes.len()];
        if data_crc {
            append_data_crc(&mut bytes, &data);
        }
        bytes.extend_from_slice(&data);
        let mut out = Vec::new();
        prop_assert_eq!(decode_message(&bytes, &mut out), Ok(header));
        prop_assert_eq!(out, blocks);
    }
}
