//! Frames of the software fabric over TCP.

use baton_fabric::WcStatus;

// The fabric shows nobody its frames; the module stands alone.
#[allow(dead_code, clippy::all)]
#[path = "../../../plugin/fabric-soft/src/tcp/frame.rs"]
mod frame;

use frame::{HEADER, Header, PIECE, TRAILER};

const EPOCH: u32 = 9;

pub(crate) fn run(bytes: &[u8]) {
    check(bytes);
    let mut mended = bytes.to_vec();
    mend(&mut mended);
    check(&mended);
    if let Some(trailer) = bytes.first_chunk::<TRAILER>()
        && let Ok(good) = frame::decode_trailer(trailer)
    {
        assert_eq!(frame::trailer(!good), *trailer);
    }
}

fn check(bytes: &[u8]) {
    let Some((head, rest)) = bytes.split_first_chunk::<HEADER>() else { return };
    let Ok(header) = frame::decode(head, EPOCH) else { return };
    let mut out = Vec::new();
    frame::encode(&mut out, &header);
    assert_eq!(out, head, "what decodes is canonical");
    assert!(usize::from(header.count) <= frame::MAX_PIECES && header.len as usize <= frame::MAX_FRAME_BYTES);
    assert!(header.status.completion() == WcStatus::Success || header.op == frame::FrameOp::Nak);
    let Some(table) = rest.get(..usize::from(header.count) * PIECE) else { return };
    let mut pieces = Vec::new();
    if frame::decode_pieces(table, &header, 1 << 20, &mut pieces).is_ok() {
        let mut out = Vec::new();
        pieces.iter().for_each(|piece| frame::encode_piece(&mut out, piece));
        assert_eq!(out, table, "what decodes is canonical");
    }
}

/// Magic and epoch as they should be.
fn mend(bytes: &mut [u8]) {
    let Some(head) = bytes.first_chunk_mut::<HEADER>() else { return };
    head[..4].copy_from_slice(b"BTF1");
    head[8..12].copy_from_slice(&EPOCH.to_le_bytes());
    head[44..].fill(0);
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    use frame::{ACK_WANTED, FrameOp, HEAD, MORE, Piece, Status};
    let ack = Header::ack(EPOCH, 5);
    let write = Header { op: FrameOp::Write, count: 2, len: 30, seq: 7, ends: 2, ..ack };
    let headers = [
        write,
        Header { op: FrameOp::Imm, imm: 0xdead_beef, message_bytes: 20, ..write },
        Header { op: FrameOp::ReadReq, len: 0, flags: 0, ..write },
        Header { op: FrameOp::ReadResp, len: 100, seq: 7, ..ack },
        Header { op: FrameOp::Send, flags: ACK_WANTED | MORE, len: 4096, message_bytes: 8192, ..ack },
        Header { op: FrameOp::Send, flags: HEAD, len: 100, message_bytes: 100, imm: 64, ends: 1, ..ack },
        ack,
        Header { op: FrameOp::Nak, status: Status::NoRecv, seq: 3, ..ack },
    ];
    let whole = |header: &Header| {
        let mut out = Vec::new();
        frame::encode(&mut out, header);
        for len in [10, 20].into_iter().take(header.count.into()) {
            frame::encode_piece(&mut out, &Piece { key: 3, addr: 0x1000, len });
        }
        out
    };
    headers.iter().map(whole).chain([frame::trailer(false).to_vec(), frame::trailer(true).to_vec()]).collect()
}
