//! Records of notifications, as they lie in rings and behind the header of a SEND, and long messages put together from them.

use baton_core::notify::*;
use baton_core::peer::RingId;
use baton_core::{Epoch, LaneId, NotifySeq, XferSeq};

use crate::input::Input;

const EPOCH: Epoch = Epoch(3);
/// Most that fits a record here.
const LIMIT: u32 = 256;

pub(crate) fn run(bytes: &[u8]) {
    check_all(bytes);
    let mut mended = bytes.to_vec();
    mend(&mut mended);
    check_all(&mended);
    reassemble(bytes);
}

fn check_all(bytes: &[u8]) {
    check_send(bytes);
    for ring in [RingId::Control, RingId::Lane(LaneId(0))] {
        check(bytes, ring);
    }
    check_plain(bytes);
}

fn decode(bytes: &[u8], ring: RingId) -> Option<(Record, &[u8])> {
    let (head, rest) = bytes.split_first_chunk::<RECORD_HEADER_BYTES>()?;
    let header = RecordHeader::decode(head, EPOCH, ring, LIMIT).ok()?;
    assert!(header.len <= LIMIT, "no more is copied than a record may have");
    let body = rest.get(..header.len as usize)?;
    header.check(head, body).ok()?;
    Some((header.record, body))
}

fn check(bytes: &[u8], ring: RingId) {
    let Some((record, part)) = decode(bytes, ring) else { return };
    let mut out = Vec::new();
    record.encode(part, &mut out);
    assert_eq!(out, bytes[..out.len()], "what decodes is canonical");
    if record.fragment.is_none() {
        let (id, message) = Body { flags: record.flags, bytes: part.to_vec() }.open();
        let mut body = Vec::new();
        let tell = Tell { message: message.as_deref(), id };
        tell.encode(&mut body);
        assert_eq!((body.as_slice(), tell.flags()), (part, record.flags), "a body says what was told");
    }
}

/// The short cut takes nothing that the long way would not take.
fn check_plain(bytes: &[u8]) {
    let mut plain = PlainRecord::default();
    let copied = bytes.len().min(PlainRecord::BYTES);
    plain.bytes()[..copied].copy_from_slice(&bytes[..copied]);
    let whole = plain.bytes().to_vec();
    let word = |at: usize| whole[at..at + 8].try_into().map(u64::from_le_bytes).expect("eight bytes");
    let (seq, lanes) = (XferSeq(word(16)), whole[5]);
    let short = plain.message(EPOCH, seq, lanes).map(<[u8]>::to_vec);
    let long = decode(&whole, RingId::Lane(LaneId(0)));
    if let Some(message) = short {
        let (record, part) = long.expect("what the short cut takes is a record");
        let expected = Record {
            epoch: EPOCH,
            scope: RecordScope::Transfer { seq, lanes },
            fragment: None,
            flags: BodyFlags::MESSAGE,
        };
        assert_eq!((record, part), (expected, message.as_slice()));
    }
}

fn check_send(bytes: &[u8]) {
    let Some((head, _)) = bytes.split_first_chunk::<SEND_HEADER_BYTES>() else { return };
    let mut out = Vec::new();
    SendHeader::decode(*head).encode(&mut out);
    assert_eq!(out, head);
}

/// Fragments in any order: what is put together is exactly what came, and is as long as every one of them told.
fn reassemble(bytes: &[u8]) {
    let (mut input, mut reassembly) = (Input::new(bytes), Reassembly::default());
    let mut came: Vec<u8> = Vec::new();
    let fragment = |input: &mut Input<'_>| {
        let (key, index) = (input.number()?, input.number32()?);
        // A header that decodes promises this much.
        let (count, total_len) = (input.number32()?.max(2), input.number32()?.min(MAX_BODY_BYTES));
        Some(Fragment { key, index, count, total_len })
    };
    while let Some(fragment) = fragment(&mut input) {
        let Some(part) = input.bytes() else { return };
        if part.is_empty()
            || !(2..=fragment.total_len).contains(&fragment.count)
            || fragment.index >= fragment.count
        {
            continue;
        }
        if reassembly.give_up(Some(&fragment)) || fragment.index == 0 && reassembly.held_bytes() == 0 {
            came.clear();
        }
        let held = reassembly.held_bytes();
        match reassembly.add(fragment, BodyFlags::MESSAGE, part) {
            Ok(done) => {
                came.extend_from_slice(part);
                if let Some(body) = done {
                    assert_eq!(body, came);
                    assert_eq!((body.len(), reassembly.held_bytes()), (fragment.total_len as usize, 0));
                    came.clear();
                }
            }
            Err(_) if held == 0 => {}
            Err(_) => assert_eq!(reassembly.held_bytes(), held, "a refusal changes nothing"),
        }
        assert!(reassembly.held_bytes() <= u64::from(MAX_BODY_BYTES));
    }
}

/// Magic, version, epoch, length and checksum as they should be.
fn mend(bytes: &mut [u8]) {
    let len = bytes.len();
    let Some(head) = bytes.first_chunk_mut::<RECORD_HEADER_BYTES>() else { return };
    let whole = u32::from_le_bytes(head[40..44].try_into().expect("four bytes")) as usize;
    let body = (len - RECORD_HEADER_BYTES).min(LIMIT as usize);
    let is_whole = u32::from_le_bytes(head[36..40].try_into().expect("four bytes")) == 1;
    let body = if is_whole { body.min(whole) } else { body };
    head[..5].copy_from_slice(b"BtnR\x01");
    head[8..12].copy_from_slice(&EPOCH.0.to_le_bytes());
    head[12..16].fill(0);
    head[44..].copy_from_slice(&(body as u32).to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..RECORD_HEADER_BYTES + body]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let transfer = RecordScope::Transfer { seq: XferSeq(77), lanes: 2 };
    let standalone = RecordScope::Standalone { seq: NotifySeq(5) };
    let tells = [
        Tell { message: Some(b"done"), id: None },
        Tell { message: Some(b""), id: None },
        Tell { message: Some(b"done"), id: Some(7) },
        Tell { message: None, id: Some(u64::MAX) },
    ];
    let mut seeds = Vec::new();
    for (scope, tell) in [transfer, standalone].into_iter().flat_map(|scope| tells.map(|tell| (scope, tell)))
    {
        let (mut body, mut out) = (Vec::new(), Vec::new());
        tell.encode(&mut body);
        Record { epoch: EPOCH, scope, fragment: None, flags: tell.flags() }.encode(&body, &mut out);
        seeds.push(out);
    }
    let body: Vec<u8> = (0..200).collect();
    for (nth, part) in body.chunks(80).enumerate() {
        let fragment = Fragment::of(9, nth * 80, body.len(), 80);
        for scope in [transfer, RecordScope::Part, RecordScope::Standalone { seq: NotifySeq(9) }] {
            let mut out = Vec::new();
            Record { epoch: EPOCH, scope, fragment, flags: BodyFlags::MESSAGE }.encode(part, &mut out);
            seeds.push(out);
        }
    }
    let mut send = Vec::new();
    SendHeader { imm: 1 << 30, epoch: EPOCH }.encode(&mut send);
    seeds.push([send, seeds[0].clone()].concat());
    // Fragments 0 to 2 of one message of six bytes.
    seeds.push(vec![1, 0, 3, 6, 2, 10, 11, 1, 1, 3, 6, 2, 12, 13, 1, 2, 3, 6, 2, 14, 15]);
    seeds
}
