//! Control frames of the two-sided backend.

use baton_core::two_sided::codec::*;
use baton_core::{Epoch, LaneId, NotifySeq, RegionId, SessionId};

pub(crate) fn run(bytes: &[u8]) {
    check(bytes);
    let mut mended = bytes.to_vec();
    mend(&mut mended);
    check(&mended);
}

fn check(bytes: &[u8]) {
    let mut lists = Lists::default();
    if let Ok((header, frame)) = decode_frame(bytes, &mut lists) {
        let mut out = vec![0xA5; 3];
        encode_frame(header, &frame, &mut out).expect("what decodes can be encoded");
        assert_eq!(out[..3], [0xA5; 3], "what was there stays");
        assert_eq!(&out[3..], bytes, "what decodes is canonical");
    }
}

/// Magic, version, length and checksum as they should be.
pub(crate) fn mend(bytes: &mut [u8]) {
    let len = bytes.len();
    let Some(head) = bytes.first_chunk_mut::<CONTROL_HEADER_BYTES>() else { return };
    head[..5].copy_from_slice(b"BtnC\x01");
    head[6..8].fill(0);
    head[20..24].fill(0);
    head[40..44].copy_from_slice(&((len - CONTROL_HEADER_BYTES) as u32).to_le_bytes());
    head[44..].fill(0);
    let crc = crc32c::crc32c(bytes);
    bytes[44..48].copy_from_slice(&crc.to_le_bytes());
}

const ACKS: &[Ack] = &[
    Ack { transfer: 5, direction: Direction::Write, status: Status::Ok, chunks_done: 6 },
    Ack { transfer: 7, direction: Direction::Read, status: Status::Range, chunks_done: 0 },
];
const PIECES: &[ReadPiece] = &[
    ReadPiece { region: RegionId(0x11), offset: 0x22, len: 0x33 },
    ReadPiece { region: RegionId(0x11), offset: 0x122, len: 1 << 20 },
];

/// At least one frame of each type.
pub(crate) fn frames() -> Vec<Frame<'static>> {
    let (direction, status) = (Direction::Read, Status::Aborted);
    let open = (0x10000, 256, 0x100000);
    vec![
        Frame::CreditRequest { lane: LaneId(3), want: 4, waiting_bytes: 5, oldest_wait_us: 6 },
        Frame::DataAck { released_below: 4, acks: ACKS },
        Frame::DataAck { released_below: 1, acks: &[] },
        Frame::SessionOpen {
            slot_bytes: open.0,
            request_depth: open.1,
            notify_window: open.2,
            lanes: 4,
            released_below: 1,
        },
        Frame::Notify { seq: NotifySeq(1), after_transfer: 2, total_len: 5, offset: 2, bytes: b"abc" },
        Frame::Notify { seq: NotifySeq(2), after_transfer: 0, total_len: 0, offset: 0, bytes: b"" },
        Frame::NotifyAck { up_to: NotifySeq(9) },
        Frame::ReadReq { transfer: 8, first: 1, last: true, pieces: PIECES },
        Frame::XferNack { transfer: 8, direction: Direction::Write, status: Status::NoRegion, at: 2 },
        Frame::Abort { transfer: 8, direction },
        Frame::AbortAck { transfer: 8, direction, status, chunks: 3 },
        Frame::CreditReclaim { lane: LaneId(63), count: 2 },
    ]
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let header = FrameHeader { session: SessionId(0x0102_0304), epoch: Epoch(9), seq: 10, ack: 11 };
    let encoded = |frame: &Frame<'_>| {
        let mut out = Vec::new();
        encode_frame(header, frame, &mut out).expect("a sample is within the limits");
        out
    };
    frames().iter().map(encoded).collect()
}
