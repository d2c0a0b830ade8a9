//! Two sessions joined by the toy fabric, over NICs without immediates or without inline data.

mod toy;

use baton_core::notify::{
    BodyFlags, NotifyMode, Record, RecordScope, SEND_HEADER_BYTES, SendError, SendHeader,
};
use baton_core::peer::*;
use baton_core::sequence::{Imm, ImmKind};
use baton_core::{Epoch, LaneId, NotifySeq, XferSeq};
use baton_fabric::{Completion, CompletionKind, EndpointId, Op, WcStatus};
use toy::nics::{assert_moved, poor_nics, write};
use toy::{Config, World, pattern};

#[test]
fn a_small_notified_write_takes_one_batch_with_a_send_at_its_end() {
    for config in poor_nics() {
        let mut world = World::new(Config { lanes: 1, ..config }, 1);
        write(&mut world, 7, 4096, 1000, Some(b"done"));
        // Four pieces of 256 bytes, and what tells of them.
        assert_eq!(world.nodes[0].batches, [(EndpointId { slot: 1, generation: 7 }, 5, true)]);
        world.settle();
        assert_moved(&world, 7, 4096, 1000);
        assert_eq!(world.nodes[1].mem.data(4096 - 8, 8), [0; 8]);
        assert_eq!(world.nodes[1].mem.data(5096, 8), [0; 8]);
        assert_eq!(world.nodes[1].delivered, [b"done".to_vec()]);
        world.audit();
    }
}

#[test]
fn every_used_lane_ends_with_a_send_and_no_ring_bytes_are_used() {
    for (len, message) in [(3000, &b""[..]), (100_000, &[9; 900])] {
        let config = Config { lanes: 3, sq: 16, notify: NotifyMode::Send, inline: 0, ..Config::default() };
        let mut world = World::new(config, 2);
        write(&mut world, 7, 0, len, Some(message));
        world.settle();
        assert_moved(&world, 7, 0, len);
        assert_eq!(world.nodes[1].delivered, [message.to_vec()]);
        let stats = world.nodes[0].session.stats();
        assert!(stats.endpoints[1..].iter().all(|end| end.recv_consumed == 1), "{stats:#?}");
        assert!(stats.endpoints.iter().all(|end| end.ring_consumed == 0), "{stats:#?}");
        world.audit();
    }
}

#[test]
fn the_largest_message_fits_a_slot_many_times_over() {
    for config in poor_nics() {
        let mut world = World::new(Config { ring: 32 * 1024, ..config }, 9);
        let limit = record_limit(32 * 1024);
        assert_eq!((limit, slot_bytes(32 * 1024)), (8192 - 48, 8192 + 8));
        let work = world.prepare(Op::Write, &[(0, 0, 10)]);
        for round in 0..40 {
            // Several at once, so that the staging ring is full more than once.
            for token in 0..6 {
                world.submit(0, token, work.clone(), Some(&pattern(round, limit)));
                world.notify(0, &pattern(round, limit));
            }
            world.settle();
            assert_eq!(world.nodes[1].delivered.len(), 12);
            assert!(world.nodes[1].delivered.iter().all(|message| *message == pattern(round, limit)));
            world.nodes[0].done.clear();
            world.nodes[1].delivered.clear();
        }
        world.audit();
    }
}

#[test]
fn sends_wait_for_staging_room_that_comes_back_with_completions_and_not_with_credit() {
    let config = Config { lanes: 1, ring: 1024, notify: NotifyMode::Send, inline: 0, ..Config::default() };
    let mut world = World::new(config, 3);
    world.frozen.push((0, 1));
    for token in 0..8 {
        write(&mut world, token, token as usize * 100, 90, Some(&[token as u8; 200]));
    }
    let stats = world.nodes[0].session.stats();
    assert_eq!(stats.tails_waiting, 4, "four of 256 bytes fit into 1024: {stats:#?}");
    assert!(stats.waiters.iter().any(|waiter| waiter.waits_for.contains("staging ring")), "{stats:#?}");
    assert!(!world.nodes[0].session.waits_for_credit());
    // Executed at the peer, which even has read them; but the NIC may still need the bytes.
    world.frozen.clear();
    world.unpolled.push((0, 1));
    world.settle();
    assert_eq!(world.nodes[1].delivered.len(), 4);
    assert_eq!(world.nodes[0].session.stats().tails_waiting, 4);
    world.unpolled.clear();
    world.settle();
    let expected: Vec<_> = (0..8u8).map(|token| vec![token; 200]).collect();
    assert_eq!(world.nodes[1].delivered, expected);
    world.audit();
}

#[test]
fn a_mirrored_record_waits_for_the_completion_of_what_it_overwrites_even_when_there_is_credit() {
    let config = Config { lanes: 1, ring: 1024, inline: 0, ..Config::default() };
    let mut world = World::new(config, 3);
    world.unpolled.push((0, 1));
    for token in 0..8 {
        write(&mut world, token, token as usize * 100, 90, Some(&[token as u8; 200]));
    }
    world.settle();
    world.flush();
    let node = &mut world.nodes[0];
    node.session.poll_credit(world.now, &node.mem);
    world.pump(0);
    world.settle();
    // The peer has read four and given all their bytes back; that they were written is not known here.
    assert_eq!(world.nodes[1].delivered.len(), 4);
    let stats = world.nodes[0].session.stats();
    assert_eq!(stats.endpoints[1].ring_known - stats.endpoints[1].ring_consumed, 1024, "{stats:#?}");
    assert!(stats.waiters.iter().any(|waiter| waiter.waits_for.contains("staging ring")), "{stats:#?}");
    world.unpolled.clear();
    world.settle();
    let expected: Vec<_> = (0..8u8).map(|token| vec![token; 200]).collect();
    assert_eq!(world.nodes[1].delivered, expected);
    world.audit();
}

#[test]
fn credit_words_are_staged_and_no_slot_is_overwritten_in_flight() {
    let config = Config { lanes: 4, rq: 3, inline: 0, ..Config::default() };
    let mut world = World::new(config, 4);
    // Credit of node 1 goes out, and none of it arrives for a while.
    world.frozen.push((1, 0));
    for token in 0..40u64 {
        write(&mut world, token, token as usize * 3000, 2000, Some(&token.to_le_bytes()));
        for _ in 0..40 {
            world.step();
        }
    }
    world.settle();
    let stats = world.nodes[1].session.stats();
    let control = &stats.endpoints[0];
    assert!(control.posted - control.retired <= 8, "{control:?}");
    assert!(stats.counters.credit_writes >= 8, "{stats:#?}");
    world.frozen.clear();
    world.settle();
    assert_eq!(world.nodes[1].delivered.len(), 40);
    world.audit();
}

// ---- hostile peers ------------------------------------------------------------------------------------------

fn word(kind: ImmKind, lanes: u8, seq: u64) -> u32 {
    Imm::of(kind, lanes, XferSeq(seq)).encode()
}

fn payload(imm: u32, epoch: u32, record: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    SendHeader { imm, epoch: Epoch(epoch) }.encode(&mut bytes);
    bytes.extend_from_slice(record);
    bytes
}

fn record(scope: RecordScope, message: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let record = Record { epoch: Epoch(1), scope, fragment: None, flags: BodyFlags::MESSAGE };
    record.encode(message, &mut bytes);
    bytes
}

fn sender() -> World {
    World::new(Config { notify: NotifyMode::Send, ..Config::default() }, 1)
}

/// What a session makes of a payload; `len` is what the NIC says of its length.
fn violation_of_len(index: usize, payload: &[u8], len: u32) -> Violation {
    let mut world = sender();
    write(&mut world, 1, 0, 3000, Some(b"first"));
    world.settle();
    world.forge_send(1, index, payload, len);
    match world.nodes[1].ended.take() {
        Some(EndReason::Violation(violation)) => violation,
        other => panic!("no violation but {other:?}"),
    }
}

fn violation(index: usize, payload: &[u8]) -> Violation {
    violation_of_len(index, payload, payload.len() as u32)
}

#[test]
fn payloads_that_cannot_be_end_the_epoch() {
    let tail = payload(word(ImmKind::Tail, 2, 1), 1, b"");
    let is_send = |violation: Violation| match violation {
        Violation::Send { error, .. } => error,
        other => panic!("{other:?}"),
    };
    let (least, most) = (8, slot_bytes(4096));
    for len in [0, 1, 7] {
        let error = is_send(violation(1, &tail[..len]));
        assert_eq!(error, SendError::Size { len: len as u32, least, most });
    }
    let error = is_send(violation_of_len(1, &tail, most + 1));
    assert_eq!(error, SendError::Size { len: most + 1, least, most });
    let error = is_send(violation(1, &payload(word(ImmKind::Tail, 2, 1), 2, b"")));
    assert_eq!(error, SendError::Epoch { got: 2, expected: 1 });
    let error = is_send(violation(1, &payload(word(ImmKind::Tail, 2, 1), 1, b"x")));
    assert_eq!(error, SendError::Length { len: 9, announced: 8 });
    assert!(matches!(violation(1, &payload(3 << 30, 1, b"")), Violation::Immediate { .. }));
    assert!(matches!(violation(0, &payload(3 << 30, 1, b"")), Violation::Immediate { .. }));
    let empty = word(ImmKind::Empty, 1, 1);
    assert!(matches!(violation(0, &payload(empty, 1, b"")), Violation::TailOnControl { .. }));
    let error = is_send(violation(1, &payload(empty, 1, b"x")));
    assert_eq!(error, SendError::Length { len: 9, announced: 8 });
    assert!(matches!(violation(0, &tail), Violation::Immediate { .. } | Violation::TailOnControl { .. }));
    // The window of numbers and the lanes, as with immediates.
    let tail_of = |lanes, seq| violation(1, &payload(word(ImmKind::Tail, lanes, seq), 1, b""));
    assert!(matches!(tail_of(3, 1), Violation::Immediate { .. }), "3 lanes of 2");
    assert!(matches!(tail_of(1, 0), Violation::SequenceOutside { .. }), "a repeat");
    assert!(matches!(tail_of(1, 70_000), Violation::SequenceOutside { .. }));
    assert!(matches!(tail_of(1, 1), Violation::RecordCount { records: 0, .. }));
}

#[test]
fn records_in_slots_are_checked_like_those_in_rings() {
    let good = record(RecordScope::Transfer { seq: XferSeq(1), lanes: 1 }, b"hello");
    let sent = |record: &[u8]| violation(1, &payload(word(ImmKind::Record, 1, 1), 1, record));
    for len in [0, 1, 47] {
        let (least, most) = (56, slot_bytes(4096));
        let error = SendError::Size { len: SEND_HEADER_BYTES as u32 + len, least, most };
        assert_eq!(sent(&good[..len as usize]), Violation::Send { ring: RingId::Lane(LaneId(0)), error });
    }
    for wrong in [&good[..52], &[&good[..], b"!"].concat()] {
        let error = SendError::Length { len: 8 + wrong.len() as u32, announced: 8 + 53 };
        assert_eq!(sent(wrong), Violation::Send { ring: RingId::Lane(LaneId(0)), error });
    }
    let mut torn = good.clone();
    torn[50] ^= 1;
    assert!(matches!(sent(&torn), Violation::Record { .. }));
    let other = record(RecordScope::Transfer { seq: XferSeq(2), lanes: 1 }, b"hello");
    assert!(matches!(sent(&other), Violation::Record { .. }), "another transfer's");
    let alone = record(RecordScope::Standalone { seq: NotifySeq(4) }, b"hello");
    assert!(matches!(sent(&alone), Violation::Record { .. }), "a standalone one on a lane");
    let control = |imm, record: &[u8]| violation(0, &payload(imm, 1, record));
    assert!(matches!(control(word(ImmKind::Record, 1, 0), &good), Violation::Record { .. }));
    assert!(matches!(control(word(ImmKind::Record, 2, 0), &alone), Violation::Immediate { .. }));
    assert!(matches!(control(word(ImmKind::Record, 1, 3), &alone), Violation::Immediate { .. }));
    // What the slot held before is no record either.
    assert!(matches!(violation_of_len(1, &[], 64), Violation::Send { .. }));
}

#[test]
fn a_send_among_immediates_and_an_immediate_among_sends_end_the_epoch() {
    let mut world = World::new(Config::default(), 1);
    world.forge_send(1, 1, &payload(word(ImmKind::Tail, 2, 0), 1, b""), 8);
    let expected = Violation::UnexpectedSend { ring: RingId::Lane(LaneId(0)), len_bytes: 8 };
    assert_eq!(world.nodes[1].ended, Some(EndReason::Violation(expected)));
    let mut world = sender();
    let imm = word(ImmKind::Tail, 2, 0);
    world.forge(1, 1, imm);
    let expected = Violation::UnexpectedImmediate { imm, ring: RingId::Lane(LaneId(0)) };
    assert_eq!(world.nodes[1].ended, Some(EndReason::Violation(expected)));
    assert!(world.nodes[1].delivered.is_empty());
}

#[test]
fn more_sends_than_receives_and_a_wrong_slot_end_the_epoch() {
    let mut world = World::new(Config { rq: 2, notify: NotifyMode::Send, ..Config::default() }, 1);
    let completion = |seq| Completion {
        endpoint: EndpointId { slot: 1, generation: 7 },
        kind: CompletionKind::RecvSend,
        status: WcStatus::Success,
        seq,
        len_bytes: 8,
    };
    for seq in 0..3 {
        world.nodes[1].mem.fill_slot(1, (seq % 2) as u32, &payload(word(ImmKind::Tail, 2, seq), 1, b""));
        let node = &mut world.nodes[1];
        node.session.on_completion(world.now, &completion(seq % 2), &node.mem);
    }
    world.take_events(1);
    let ring = RingId::Lane(LaneId(0));
    let expected = Violation::TooManyReceives { ring, received: 3, granted: 2 };
    assert_eq!(world.nodes[1].ended, Some(EndReason::Violation(expected)));

    let mut world = sender();
    let node = &mut world.nodes[1];
    node.session.on_completion(world.now, &completion(5), &node.mem);
    world.take_events(1);
    let reason = world.nodes[1].ended.clone();
    assert!(matches!(reason, Some(EndReason::WrongSlot { slot: 5, expected: 0, .. })), "{reason:?}");
}

#[test]
fn unacknowledged_notifications_are_resent_in_the_next_epoch_whatever_its_mode() {
    for (first, second) in
        [(NotifyMode::Send, NotifyMode::Immediate), (NotifyMode::Immediate, NotifyMode::Send)]
    {
        let mut world = World::new(Config { notify: first, ..Config::default() }, 5);
        world.unpolled.push((0, 0));
        for n in 0..5u8 {
            world.notify(0, &[n; 20]);
        }
        world.settle();
        assert_eq!(world.nodes[1].delivered.len(), 5);
        // Their acknowledgements are lost with the epoch.
        world.fence(0, 0);
        world.config.notify = second;
        world.next_epoch();
        world.notify(0, b"new");
        world.settle();
        world.pump(0);
        world.settle();
        assert_eq!(world.nodes[1].delivered.len(), 6, "delivered once each");
        assert_eq!(world.nodes[1].delivered[5], b"new");
        world.audit();
    }
}
