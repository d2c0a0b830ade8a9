use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::ids::{Epoch, LaneId, Nanos, NotifySeq, XferSeq};
use crate::peer::{RingId, SubmitError, Violation};

fn header_of(record: &[u8]) -> [u8; RECORD_HEADER_BYTES] {
    record[..RECORD_HEADER_BYTES].try_into().unwrap()
}

fn body(message: &[u8]) -> Body {
    Body { flags: BodyFlags::MESSAGE, bytes: message.to_vec() }
}

/// Anything that a record may say, with where it would say it.
fn records() -> impl Strategy<Value = (Record, RingId)> {
    let lane = RingId::Lane(LaneId(3));
    let fragment = (1u64.., 2u32..50, any::<u32>(), 50u32..=MAX_BODY_BYTES)
        .prop_map(|(key, count, index, total_len)| Fragment { key, index: index % count, count, total_len });
    (any::<u64>(), 1u8..=64, 1u64.., any::<u32>(), proptest::option::of(fragment), any::<bool>()).prop_map(
        move |(seq, lanes, notify_seq, epoch, fragment, control)| {
            let last = fragment.is_none_or(|fragment| fragment.is_last());
            let (scope, ring) = match (control, last) {
                (true, _) => (RecordScope::Standalone { seq: NotifySeq(notify_seq) }, RingId::Control),
                (false, true) => (RecordScope::Transfer { seq: XferSeq(seq), lanes }, lane),
                (false, false) => (RecordScope::Part, lane),
            };
            let fragment = match control {
                true => fragment.map(|fragment| Fragment { key: notify_seq, ..fragment }),
                false => fragment,
            };
            (Record { epoch: Epoch(epoch), scope, fragment, flags: BodyFlags::MESSAGE }, ring)
        },
    )
}

fn standalone(seq: u64) -> Record {
    let scope = RecordScope::Standalone { seq: NotifySeq(seq) };
    Record { epoch: Epoch(3), scope, fragment: None, flags: BodyFlags::MESSAGE }
}

proptest! {
    #[test]
    fn a_record_survives_the_wire((record, ring) in records(), message in prop::collection::vec(any::<u8>(), 1..300)) {
        let mut out = vec![1, 2, 3];
        record.encode(&message, &mut out);
        prop_assert_eq!(&out[..3], [1, 2, 3].as_slice());
        let bytes = &out[3..];
        prop_assert_eq!(bytes.len(), RECORD_HEADER_BYTES + message.len());
        let header = RecordHeader::decode(&header_of(bytes), record.epoch, ring, 300).unwrap();
        prop_assert_eq!((header.record, header.len as usize), (record, message.len()));
        prop_assert_eq!(header.check(&header_of(bytes), &bytes[RECORD_HEADER_BYTES..]), Ok(()));
    }

    #[test]
    fn places_in_a_staging_ring_never_overlap_while_their_sends_are_in_flight(
        size in prop::sample::select(vec![512u32, 1024, 32768]),
        steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..200),
    ) {
        let mut stage = Stage::new(size);
        let mut in_flight: VecDeque<(u64, u64, u64)> = VecDeque::new();
        for (send, len) in steps {
            let len = 1 + len.index((size / 4) as usize) as u32;
            let place = stage.place(len).filter(|_| send);
            if let Some(place) = place {
                let (begin, end) = (u64::from(place.offset), u64::from(place.offset + len));
                prop_assert!(end <= u64::from(size) && begin % 64 == 0);
                prop_assert!(in_flight.iter().all(|&(from, to, _)| end <= from || begin >= to));
                stage.take(place);
                in_flight.push_back((begin, end, place.end));
            } else if let Some((_, _, done)) = in_flight.pop_front() {
                stage.complete(done);
            } else {
                prop_assert!(!send, "an empty ring takes anything");
            }
        }
        in_flight.back().iter().for_each(|(_, _, done)| stage.complete(*done));
        prop_assert_eq!(stage.in_use(), 0);
    }

    #[test]
    fn a_send_header_survives_the_wire(imm in any::<u32>(), epoch in any::<u32>()) {
        let header = SendHeader { imm, epoch: Epoch(epoch) };
        let mut out = Vec::new();
        header.encode(&mut out);
        prop_assert_eq!(SendHeader::decode(out[..].try_into().unwrap()), header);
    }

    #[test]
    fn any_changed_bit_of_a_record_is_noticed(
        (record, ring) in records(), message in prop::collection::vec(any::<u8>(), 0..60), at in any::<prop::sample::Index>(), bit in 0u8..8,
    ) {
        let mut bytes = Vec::new();
        record.encode(&message, &mut bytes);
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let outcome = RecordHeader::decode(&header_of(&bytes), record.epoch, ring, 60)
            .and_then(|header| {
                // A changed length would make the reader take other bytes; it cannot look beyond what is there.
                let end = (RECORD_HEADER_BYTES + header.len as usize).min(bytes.len());
                header.check(&header_of(&bytes), &bytes[RECORD_HEADER_BYTES..end])
            });
        prop_assert!(outcome.is_err());
    }

    #[test]
    fn the_short_way_takes_what_is_plain_and_nothing_that_the_long_way_refuses(
        (record, ring) in records(), message in prop::collection::vec(any::<u8>(), 0..90),
        change in prop::option::of((any::<prop::sample::Index>(), 0u8..8)), junk in any::<u8>(),
    ) {
        let mut bytes = Vec::new();
        record.encode(&message, &mut bytes);
        if let Some((at, bit)) = change {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        let mut copy = PlainRecord::default();
        copy.bytes().fill(junk);
        let n = bytes.len().min(PlainRecord::BYTES);
        copy.bytes()[..n].copy_from_slice(&bytes[..n]);
        let (seq, lanes) = match record.scope {
            RecordScope::Transfer { seq, lanes } => (seq, lanes),
            _ => (XferSeq(0), 1),
        };
        let short = copy.message(record.epoch, seq, lanes).map(<[u8]>::to_vec);
        let is_plain = matches!(record.scope, RecordScope::Transfer { .. })
            && record.fragment.is_none()
            && record.flags == BodyFlags::MESSAGE
            && bytes.len() <= PlainRecord::BYTES
            && change.is_none();
        prop_assert_eq!(short.is_some(), is_plain);
        if let Some(short) = short {
            let header = RecordHeader::decode(&header_of(&bytes), record.epoch, ring, 300).expect("taken");
            prop_assert_eq!(header.record, record);
            prop_assert_eq!(header.check(&header_of(&bytes), &short), Ok(()));
            prop_assert_eq!(short, message);
        }
    }

    #[test]
    fn a_decoder_never_panics(bytes in any::<[u8; 32]>(), tail in any::<[u8; 16]>(), limit in any::<u32>(), control in any::<bool>()) {
        let mut header = [0; RECORD_HEADER_BYTES];
        header[..32].copy_from_slice(&bytes);
        header[32..].copy_from_slice(&tail);
        header[..5].copy_from_slice(b"BtnR\x01");
        let ring = if control { RingId::Control } else { RingId::Lane(LaneId(0)) };
        let epoch = Epoch(u32::from_le_bytes(bytes[8..12].try_into().unwrap()));
        let _ = RecordHeader::decode(&header, epoch, ring, limit);
    }

    /// Records never cross the ring's end, never overlap what is not yet read, and both sides agree.
    #[test]
    fn ring_cursors_agree_and_records_never_overlap(
        size in 2u32..40, lengths in prop::collection::vec(0u32..3000, 1..200), reads in any::<u64>(),
    ) {
        let size = size * 256;
        let (mut writer, mut reader) = (Ring::new(size), Ring::new(size));
        let mut unread = std::collections::VecDeque::<(u32, u32)>::new();
        let mut free = u64::from(size);
        for (nth, len) in lengths.into_iter().enumerate() {
            let len = len % (writer.max_record_bytes() + 1);
            let placement = writer.place(len);
            while placement.charge > free || (reads >> (nth % 64) & 1 == 1 && !unread.is_empty()) {
                let front = unread.pop_front();
                prop_assert!(front.is_some(), "an empty ring takes any record");
                let (offset, len) = front.unwrap();
                prop_assert_eq!(reader.next_offset(), offset);
                let read = reader.place(len);
                reader.advance(read);
                free += read.charge;
            }
            prop_assert!(placement.offset + len <= size);
            prop_assert!(u64::from(placement.offset).is_multiple_of(RECORD_ALIGN));
            let clear = |&(at, other): &(u32, u32)| at + other <= placement.offset || placement.offset + len <= at;
            prop_assert!(unread.iter().all(clear));
            writer.advance(placement);
            free -= placement.charge;
            unread.push_back((placement.offset, len));
        }
        prop_assert_eq!(writer.cursor() - reader.cursor(), u64::from(size) - free);
    }

    /// Any order of the lanes' reports over any transfers in flight: each message comes out once, when its last lane is in.
    #[test]
    fn every_transfer_is_delivered_once_in_any_order(
        lanes in prop::collection::vec(1u8..5, 1..40), first in (1u64 << 24) - 20..(1 << 24), shuffle in any::<u64>(),
    ) {
        let mut inbound = Inbound::new(XferSeq(first), 1000);
        let mut reports: Vec<(u64, u8, u8)> = Vec::new();
        for (seq, &count) in (first..).zip(&lanes) {
            reports.extend((0..count).map(|lane| (seq, count, lane)));
        }
        let mut state = shuffle | 1;
        for n in (1..reports.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            reports.swap(n, (state >> 33) as usize % (n + 1));
        }
        let mut delivered = Vec::new();
        for (nth, &(seq, count, lane)) in reports.iter().enumerate() {
            let low = (seq & 0xFF_FFFF) as u32;
            prop_assert_eq!(inbound.unwrap(low, LaneId(lane)), Ok(XferSeq(seq)));
            let arrival = if lane == 0 { Arrival::Record(body(&seq.to_le_bytes())) } else { Arrival::Tail };
            let out = inbound.arrive(XferSeq(seq), count, LaneId(lane), arrival).unwrap();
            let is_last = reports[nth + 1..].iter().all(|later| later.0 != seq);
            prop_assert_eq!(out.is_some(), is_last);
            if let Some(told) = out {
                prop_assert_eq!(told, body(&seq.to_le_bytes()));
                delivered.push(seq);
            }
        }
        delivered.sort_unstable();
        prop_assert_eq!(delivered, (first..first + lanes.len() as u64).collect::<Vec<_>>());
        prop_assert_eq!(inbound.lowest().0, first + lanes.len() as u64);
        prop_assert_eq!(inbound.partial().count(), 0);
    }

    #[test]
    fn a_window_sees_each_number_once(numbers in prop::collection::vec(1u64..3000, 1..300)) {
        let mut window = NotifyWindow::default();
        let (mut seen, mut highest) = (std::collections::BTreeSet::new(), 0u64);
        for n in numbers {
            let first = window.insert(NotifySeq(n));
            let in_reach = n + 1024 > highest;
            prop_assert_eq!(first, in_reach && !seen.contains(&n));
            seen.insert(n);
            highest = highest.max(n);
        }
        prop_assert!(!window.insert(NotifySeq(0)));
    }
}

#[test]
fn a_complete_transfer_that_reports_again_is_a_repeat_also_while_the_table_waits_for_an_older_one() {
    let mut inbound = Inbound::new(XferSeq(0), 10);
    let message = || Arrival::Record(body(&[1]));
    assert_eq!(inbound.arrive(XferSeq(1), 1, LaneId(0), message()), Ok(Some(body(&[1]))));
    assert_eq!(
        inbound.arrive(XferSeq(1), 1, LaneId(1), message()),
        Err(Violation::Repeated { seq: 1, lane: LaneId(1) })
    );
    assert_eq!(
        inbound.arrive(XferSeq(2), 2, LaneId(0), message()).and_then(|_| inbound.arrive(
            XferSeq(2),
            2,
            LaneId(1),
            message()
        )),
        Err(Violation::RecordCount { seq: 2, records: 2 })
    );
}

#[test]
fn records_out_of_place_are_refused_with_their_cause() {
    let mut record = Vec::new();
    standalone(8).encode(b"abc", &mut record);
    let decode_on = |ring, change: &dyn Fn(&mut [u8]), limit| {
        let mut header = header_of(&record);
        change(&mut header);
        RecordHeader::decode(&header, Epoch(3), ring, limit).unwrap_err()
    };
    let decode = |change: &dyn Fn(&mut [u8]), limit| decode_on(RingId::Control, change, limit);
    assert!(matches!(decode(&|h| h[0] = 0, 100), RecordError::Magic(_)));
    assert_eq!(decode(&|h| h[4] = 2, 100), RecordError::Version(2));
    assert_eq!(decode(&|h| h[7] = 1, 100), RecordError::Flags { flags: 256, len: 3 });
    assert_eq!(decode(&|h| h[6] = 1, 100), RecordError::Flags { flags: 1, len: 3 });
    assert_eq!(decode(&|h| h[8] = 4, 100), RecordError::Epoch { got: 4, expected: 3 });
    assert_eq!(decode(&|_| (), 2), RecordError::Length { len: 3, limit: 2 });
    assert_eq!(decode(&|h| h[5] = 2, 100), RecordError::Scope { lanes: 2, seq: 0, notify_seq: 8 });
    assert_eq!(decode(&|h| h[5] = 0, 100), RecordError::Scope { lanes: 0, seq: 0, notify_seq: 8 });
    assert_eq!(decode(&|h| h[16] = 1, 100), RecordError::Scope { lanes: 1, seq: 1, notify_seq: 8 });
    let lane = RingId::Lane(LaneId(0));
    assert_eq!(decode_on(lane, &|_| (), 100), RecordError::Scope { lanes: 1, seq: 0, notify_seq: 8 });
    let no_number = |h: &mut [u8]| h[24] = 0;
    assert_eq!(decode(&no_number, 100), RecordError::Scope { lanes: 1, seq: 0, notify_seq: 0 });
}

#[test]
fn fragments_that_cannot_be_are_refused_with_their_numbers() {
    let mut record = Vec::new();
    standalone(8).encode(b"abc", &mut record);
    let decode = |index: u32, count: u32, total_len: u32| {
        let mut header = header_of(&record);
        for (at, field) in [(32, index), (36, count), (40, total_len)] {
            header[at..at + 4].copy_from_slice(&field.to_le_bytes());
        }
        RecordHeader::decode(&header, Epoch(3), RingId::Control, 100)
    };
    let fragment = |index, count, total_len| Fragment { key: 8, index, count, total_len };
    for (index, count, total_len) in [(0, 2, 4), (1, 2, 9), (8_388_607, 8_388_608, MAX_BODY_BYTES)] {
        let header = decode(index, count, total_len).expect("possible");
        assert_eq!(header.record.fragment, Some(fragment(index, count, total_len)));
    }
    for (index, count, total_len) in [
        (0, 0, 3),
        (1, 1, 3),
        (0, 1, 4),
        (0, 1, 2),
        (2, 2, 9),
        (0, 4, 3),
        (0, 2, MAX_BODY_BYTES + 1),
        (0, u32::MAX, u32::MAX),
    ] {
        let limit = MAX_BODY_BYTES;
        let expected = RecordError::Fragment { index, count, len: 3, total_len, limit };
        assert_eq!(decode(index, count, total_len), Err(expected));
    }
}

#[test]
fn a_peer_without_a_session_gets_its_messages_queued_up_to_the_limits() {
    let mut carry = Carry::default();
    let too_long = SubmitError::MessageTooLong { len: 11, limit: 10 };
    assert_eq!(carry.queue(&[0; 11], Nanos(5), 10), Err(too_long));
    for n in 1..=1024 {
        assert_eq!(carry.queue(b"x", Nanos(n), 10), Ok(NotifySeq(n)));
    }
    assert!(matches!(
        carry.queue(b"x", Nanos(5), 10),
        Err(SubmitError::TooManyNotifications { count: 1024, .. })
    ));
    assert_eq!(carry.next_deadline(), Some(Nanos(1)));
    assert_eq!(carry.expire(Nanos(1000)).len(), 1000);
    assert_eq!(carry.waiting().len(), 24);
    let mut carry = Carry::default();
    carry.queue(&vec![0; (1 << 20) - 1], Nanos(5), usize::MAX).unwrap();
    carry.queue(&vec![0; 8 << 20], Nanos(5), usize::MAX).expect("less than the limit waits");
    assert!(carry.queue(b"x", Nanos(5), 10).is_err());
}

#[test]
fn another_session_starts_numbers_anew_and_keeps_what_waits() {
    let mut carry = Carry::default();
    for message in [b"a", b"b", b"c"] {
        carry.queue(message, Nanos(9), 10).unwrap();
    }
    assert!(carry.seen.insert(NotifySeq(1)));
    carry.unacknowledged.pop_front();
    carry.unpopped_messages = 7;
    let mut carry = carry.restart();
    let waiting: Vec<_> = carry.waiting().iter().map(|one| (one.seq.0, one.message.clone())).collect();
    assert_eq!(waiting, [(1, b"b".to_vec()), (2, b"c".to_vec())]);
    assert_eq!(carry.queue(b"d", Nanos(9), 10), Ok(NotifySeq(3)));
    assert!(carry.seen.insert(NotifySeq(1)));
    carry.on_popped(5, 0);
    assert_eq!(carry.unpopped_messages, 2);
}

#[test]
fn numbers_at_the_end_of_what_a_peer_can_say_are_told_apart_as_well() {
    let mut window = NotifyWindow::default();
    assert!(window.insert(NotifySeq(u64::MAX)));
    for below in [1, NotifyWindow::SPAN - 1] {
        assert!(window.insert(NotifySeq(u64::MAX - below)), "{below} below the highest is within reach");
        assert!(!window.insert(NotifySeq(u64::MAX - below)), "and seen now");
    }
    assert!(!window.insert(NotifySeq(u64::MAX - NotifyWindow::SPAN)), "out of reach");
    assert_eq!(window.highest(), u64::MAX);
}
