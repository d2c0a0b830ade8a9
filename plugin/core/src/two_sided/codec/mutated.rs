//! Golden bytes, changed in every way that a fuzzer knows, most with a right length and checksum so that they get past the first
//! checks: a decoder yields one error and leaves its output alone, or a value that encodes to the same bytes. Never a panic.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};

use super::tests::{SLOT, block, data_header, decode_message, encoded, samples};
use super::*;

/// Values that sit at the edges of fields.
const EDGES: [u64; 12] = [
    0,
    1,
    0x7F,
    0xFF,
    0xFFFF,
    MAX_CHUNKS as u64,
    MAX_CHUNKS as u64 + 1,
    MAX_MESSAGE_BYTES as u64,
    u32::MAX as u64,
    1 << 63,
    u64::MAX - 1,
    u64::MAX,
];

#[derive(Clone, Debug)]
enum Change {
    Flip(Index, u8),
    Set(Index, u8),
    /// An edge value of 1, 2, 4 or 8 bytes, aligned.
    Field(Index, u8, usize),
    Insert(Index, u8, u8),
    Remove(Index, u8),
    Truncate(Index),
    /// Bytes of another golden vector.
    Splice(Index, usize, Index),
}

fn change() -> impl Strategy<Value = Change> {
    let at = || any::<Index>();
    prop_oneof![
        (at(), 0..8u8).prop_map(|(at, bit)| Change::Flip(at, bit)),
        (at(), any::<u8>()).prop_map(|(at, byte)| Change::Set(at, byte)),
        (at(), 0..4u8, 0..EDGES.len()).prop_map(|(at, wide, edge)| Change::Field(at, wide, edge)),
        (at(), any::<u8>(), 1..20u8).prop_map(|(at, byte, n)| Change::Insert(at, byte, n)),
        (at(), 1..20u8).prop_map(|(at, n)| Change::Remove(at, n)),
        at().prop_map(Change::Truncate),
        (at(), 0..64usize, at()).prop_map(|(at, other, from)| Change::Splice(at, other, from)),
    ]
}

fn apply(bytes: &mut Vec<u8>, change: &Change, all: &[Vec<u8>]) {
    if bytes.is_empty() {
        return;
    }
    match change {
        Change::Flip(at, bit) => {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        Change::Set(at, byte) => {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        Change::Field(at, wide, edge) => {
            let wide = 1usize << wide;
            let at = at.index(bytes.len()) / wide * wide;
            let end = (at + wide).min(bytes.len());
            bytes[at..end].copy_from_slice(&EDGES[*edge].to_le_bytes()[..end - at]);
        }
        Change::Insert(at, byte, n) => {
            let at = at.index(bytes.len() + 1);
            bytes.splice(at..at, std::iter::repeat_n(*byte, usize::from(*n)));
        }
        Change::Remove(at, n) => {
            let at = at.index(bytes.len());
            let end = (at + usize::from(*n)).min(bytes.len());
            bytes.drain(at..end);
        }
        Change::Truncate(at) => bytes.truncate(at.index(bytes.len())),
        Change::Splice(at, other, from) => {
            let at = at.index(bytes.len());
            let other = &all[other % all.len()];
            let from = from.index(other.len());
            let len = (other.len() - from).min(bytes.len() - at);
            bytes[at..at + len].copy_from_slice(&other[from..from + len]);
        }
    }
}

fn golden_frames() -> Vec<Vec<u8>> {
    samples().iter().map(|(frame, _)| encoded(frame)).collect()
}

fn golden_messages() -> Vec<Vec<u8>> {
    let packed = (3 + 2 + 2 * PACK_BLOCK_BYTES) as u32;
    let two = [block(7, 3), block(8, 2)];
    let cases: [(DataKind, Block, &[Block]); 5] = [
        (DataKind::Write, block(7, 5), &[]),
        (DataKind::ReadResp, block(7, 900), &[]),
        (DataKind::Nop, Block::NONE, &[]),
        (DataKind::Pack, Block::of_pack(2, packed), &two),
        (DataKind::ReadPack, Block::of_pack(2, packed), &two),
    ];
    let whole = |(kind, block, blocks): &(DataKind, Block, &[Block])| {
        let mut bytes = Vec::new();
        encode_message(&data_header(*kind, *block), blocks, SLOT, &mut bytes).unwrap();
        bytes.resize(DATA_HEADER_BYTES + block.len as usize, 0xAB);
        bytes
    };
    cases.iter().map(whole).collect()
}

/// Length and checksum as they should be.
fn mend_frame(bytes: &mut [u8]) {
    if bytes.len() < CONTROL_HEADER_BYTES {
        return;
    }
    let len = (bytes.len() - CONTROL_HEADER_BYTES) as u32;
    bytes[40..44].copy_from_slice(&len.to_le_bytes());
    bytes[44..48].fill(0);
    let crc = crc32c::crc32c(bytes);
    bytes[44..48].copy_from_slice(&crc.to_le_bytes());
}

fn mend_message(bytes: &mut [u8]) {
    if bytes.len() < DATA_HEADER_BYTES {
        return;
    }
    let len = (bytes.len() - DATA_HEADER_BYTES) as u32;
    bytes[52..56].copy_from_slice(&len.to_le_bytes());
    bytes[60..64].fill(0);
    let blocks = u32::from_le_bytes(bytes[48..52].try_into().unwrap());
    let table = if matches!(bytes[5], 4 | 5) { blocks as usize * PACK_BLOCK_BYTES } else { 0 };
    let covers_data = bytes[6] & 1 == 1;
    let end = if covers_data { bytes.len() } else { (DATA_HEADER_BYTES + table).min(bytes.len()) };
    let crc = crc32c::crc32c(&bytes[..end]);
    bytes[60..64].copy_from_slice(&crc.to_le_bytes());
}

/// What came of a decoder: its error's first word, or `None`.
fn frame_outcome(bytes: &[u8]) -> Option<String> {
    match decode_frame(bytes, &mut Lists::default()) {
        Ok((header, frame)) => {
            let mut out = Vec::new();
            encode_frame(header, &frame, &mut out).unwrap();
            assert_eq!(out, bytes, "what decodes is canonical");
            None
        }
        Err(error) => Some(first_word(&format!("{error:?}"))),
    }
}

fn message_outcome(bytes: &[u8]) -> Option<String> {
    let before = vec![block(99, 1)];
    let mut blocks = before.clone();
    match decode_message(bytes, &mut blocks) {
        Ok(header) => {
            let mut out = Vec::new();
            let blocks = if header.kind.is_pack() { &blocks[..] } else { &[] };
            encode_message(&header, blocks, SLOT, &mut out).unwrap();
            let data = &bytes[out.len()..];
            if header.data_crc {
                append_data_crc(&mut out, data);
            }
            assert_eq!(out, bytes[..bytes.len() - data.len()], "what decodes is canonical");
            None
        }
        Err(error) => {
            assert_eq!(blocks, before, "an error leaves the output alone");
            Some(first_word(&format!("{error:?}")))
        }
    }
}

fn first_word(text: &str) -> String {
    text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
}

/// Runs so many changed vectors and answers which outcomes there were.
fn run(
    cases: u32,
    golden: &[Vec<u8>],
    mend: fn(&mut [u8]),
    outcome: fn(&[u8]) -> Option<String>,
) -> BTreeSet<Option<String>> {
    let seen = std::cell::RefCell::new(BTreeSet::new());
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let strategy = (any::<Index>(), prop::collection::vec(change(), 1..5), 0..4u8);
    let result = TestRunner::new(config).run(&strategy, |(which, changes, whole)| {
        let mut bytes = golden[which.index(golden.len())].clone();
        changes.iter().for_each(|change| apply(&mut bytes, change, golden));
        if whole > 0 {
            mend(&mut bytes);
        }
        seen.borrow_mut().insert(outcome(&bytes));
        Ok(())
    });
    result.unwrap_or_else(|e| panic!("{e}"));
    seen.into_inner()
}

fn check(cases: u32) {
    let frames = run(cases, &golden_frames(), mend_frame, frame_outcome);
    assert!(frames.contains(&None) && frames.len() >= 7, "the changes reach the checks: {frames:?}");
    let messages = run(cases, &golden_messages(), mend_message, message_outcome);
    assert!(messages.contains(&None) && messages.len() >= 8, "the changes reach the checks: {messages:?}");
}

#[test]
fn the_golden_vectors_decode() {
    for bytes in golden_frames() {
        assert_eq!(frame_outcome(&bytes), None);
    }
    for bytes in golden_messages() {
        assert_eq!(message_outcome(&bytes), None);
    }
}

#[test]
fn changed_golden_vectors_are_refused_or_canonical() {
    check(5_000);
}

#[test]
#[ignore = "takes minutes: cargo xtask test --long"]
fn a_million_changed_golden_vectors_are_refused_or_canonical() {
    check(1_000_000);
}
