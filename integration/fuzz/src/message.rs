//! Data messages of the two-sided backend, PACK tables included.

use baton_core::two_sided::codec::*;
use baton_core::{Epoch, RegionId, SessionId};

/// Slots of the receiver.
const SLOT: u32 = 1024;

pub(crate) fn run(bytes: &[u8]) {
    check(bytes);
    let mut mended = bytes.to_vec();
    mend(&mut mended);
    check(&mended);
}

/// As a channel does it, one step after the other.
fn decode(bytes: &[u8], blocks: &mut Vec<Block>) -> Option<DataHeader> {
    let head = bytes.first_chunk::<DATA_HEADER_BYTES>()?;
    let header = DataHeader::decode(head, bytes.len() as u32, SLOT).ok()?;
    let prefix = bytes.get(..header.prefix_bytes()).expect("a table ends inside its message");
    check_crc(&header, prefix, |crc| extend_crc(crc, &bytes[prefix.len()..])).ok()?;
    if header.kind.is_pack() {
        decode_blocks(&header, &prefix[DATA_HEADER_BYTES..], blocks).ok()?;
    }
    Some(header)
}

fn check(bytes: &[u8]) {
    let before = vec![Block { transfer: 99, ..Block::NONE }];
    let mut blocks = before.clone();
    let Some(header) = decode(bytes, &mut blocks) else {
        assert_eq!(blocks, before, "an error leaves the output alone");
        return;
    };
    let blocks = if header.kind.is_pack() { &blocks[..] } else { &[] };
    assert!(blocks.len() * PACK_BLOCK_BYTES <= bytes.len());
    let mut out = vec![0xA5; 3];
    encode_message(&header, blocks, SLOT, &mut out).expect("what decodes can be encoded");
    let mut out = out.split_off(3);
    let data = &bytes[out.len()..];
    let told: u64 = blocks.iter().map(|block| u64::from(block.len)).sum();
    assert!(!header.kind.is_pack() || told == data.len() as u64, "the blocks' bytes are all that follows");
    if header.data_crc {
        append_data_crc(&mut out, data);
    }
    assert_eq!(out, bytes[..bytes.len() - data.len()], "what decodes is canonical");
}

/// Magic, version, length and checksum as they should be.
pub(crate) fn mend(bytes: &mut [u8]) {
    let len = bytes.len();
    let Some(head) = bytes.first_chunk_mut::<DATA_HEADER_BYTES>() else { return };
    head[..5].copy_from_slice(b"BtnD\x01");
    head[7] = 0;
    head[52..56].copy_from_slice(&((len - DATA_HEADER_BYTES) as u32).to_le_bytes());
    head[60..].fill(0);
    let count = u32::from_le_bytes(head[48..52].try_into().expect("four bytes"));
    let is_pack = [DataKind::Pack as u8, DataKind::ReadPack as u8].contains(&head[5]);
    let prefix = if is_pack { pack_prefix_bytes(count) } else { DATA_HEADER_BYTES };
    let end = if head[6] & 1 == 1 { len } else { prefix.min(len) };
    let crc = crc32c::crc32c(&bytes[..end]);
    bytes[60..64].copy_from_slice(&crc.to_le_bytes());
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let block =
        |transfer, len| Block { transfer, region: RegionId(0x77), offset: 0x88, chunk: 1, total: 3, len };
    let packed = |lens: &[u32]| lens.len() as u32 * PACK_BLOCK_BYTES as u32 + lens.iter().sum::<u32>();
    let (two, three) = ([block(7, 3), block(8, 2)], [block(1, 10), block(1, 20), block(2, 1)]);
    let cases: [(DataKind, Block, &[Block]); 6] = [
        (DataKind::Write, block(7, 5), &[]),
        (DataKind::ReadResp, block(7, 900), &[]),
        (DataKind::Nop, Block::NONE, &[]),
        (DataKind::Pack, Block::of_pack(2, packed(&[3, 2])), &two),
        (DataKind::ReadPack, Block::of_pack(2, packed(&[3, 2])), &two),
        (DataKind::Pack, Block::of_pack(3, packed(&[10, 20, 1])), &three),
    ];
    let mut seeds = Vec::new();
    for data_crc in [false, true] {
        for (kind, block, blocks) in cases {
            let (session, epoch) = (SessionId(0x55), Epoch(4));
            let header = DataHeader { kind, data_crc, session, epoch, lane_seq: 9, block };
            let mut bytes = Vec::new();
            encode_message(&header, blocks, SLOT, &mut bytes).expect("a sample is within the limits");
            let data = vec![0xAB; DATA_HEADER_BYTES + block.len as usize - bytes.len()];
            if data_crc {
                append_data_crc(&mut bytes, &data);
            }
            bytes.extend(data);
            seeds.push(bytes);
        }
    }
    seeds
}
