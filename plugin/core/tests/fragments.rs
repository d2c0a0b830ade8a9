//! Messages longer than a record, over two sessions joined by the toy fabric.

mod toy;

use baton_core::notify::{
    BodyFlags, Fragment, FragmentError, MAX_BODY_BYTES, MAX_MESSAGE_BYTES, NotifyMode, Record, RecordError,
    RecordScope, SendHeader, Tell,
};
use baton_core::peer::*;
use baton_core::sequence::{Imm, ImmKind};
use baton_core::{Epoch, LaneId, NotifySeq, XferSeq};
use baton_fabric::Op;
use toy::{Config, World, pattern};

const LONGEST: usize = MAX_MESSAGE_BYTES as usize;

/// A ring of 1 KiB: 208 bytes to a record.
fn small(notify: NotifyMode) -> Config {
    Config { notify, ring: 1024, rq: 4, ..Config::default() }
}

const RECORD: usize = 208;

fn both_modes(run: impl Fn(NotifyMode)) {
    [NotifyMode::Immediate, NotifyMode::Send].into_iter().for_each(run);
}

fn counters(world: &World, n: usize) -> Counters {
    world.nodes[n].session.stats().counters
}

#[test]
fn a_record_of_a_small_ring_takes_what_these_tests_think() {
    assert_eq!(record_limit(1024), RECORD);
}

#[test]
fn messages_of_any_length_around_a_multiple_of_a_record_arrive_whole() {
    both_modes(|notify| {
        for op in [Op::Write, Op::Read] {
            let mut world = World::new(Config { lanes: 3, ..small(notify) }, 1);
            let lengths = [RECORD, RECORD + 1, 2 * RECORD - 1, 2 * RECORD, 2 * RECORD + 1, 20 * RECORD + 7];
            for (token, len) in (0..).zip(lengths) {
                let work = world.prepare(op, &[(token as usize * 5000, token as usize * 5000, 3000)]);
                let message = pattern(token, len);
                let id = Some(token + 100);
                world.submit_telling(0, token, work, Tell { message: Some(&message), id });
                world.notify(0, &message);
                world.settle();
                assert_eq!(world.result_of(0, token), Some(&Ok(())), "{notify:?} {op:?} {len}");
                assert_eq!(world.nodes[1].delivered, [message.clone(), message], "{notify:?} {op:?} {len}");
                assert_eq!(world.nodes[1].landed, [token + 100]);
                world.nodes[1].delivered.clear();
                world.nodes[1].landed.clear();
            }
            assert_eq!(counters(&world, 0).fragments_sent, counters(&world, 1).fragments_received);
            assert_eq!(counters(&world, 1).partial_messages_dropped, 0);
            world.audit();
        }
    });
}

#[test]
fn the_longest_message_arrives_and_one_byte_more_is_refused_with_the_limit_before_anything_is_posted() {
    both_modes(|notify| {
        let mut world = World::new(Config { notify, ring: 32 * 1024, rq: 16, ..Config::default() }, 2);
        let (limit, message) = (world.nodes[0].session.message_limit(), pattern(9, LONGEST));
        assert_eq!(limit, LONGEST);
        let work = world.prepare(Op::Write, &[(0, 0, 100)]);
        let too_long = vec![0; LONGEST + 1];
        let refusal = SubmitError::MessageTooLong { len: LONGEST + 1, limit };
        let now = world.now;
        let session = &mut world.nodes[0].session;
        assert_eq!(session.submit(now, 2, work.clone(), Some(&too_long)), Err(refusal.clone()));
        assert_eq!(session.notify(now, &too_long, now), Err(refusal.clone()));
        assert!(refusal.to_string().contains("8388609") && refusal.to_string().contains("8388608"));
        assert!(world.nodes[0].batches.is_empty());
        // The id comes on top.
        world.submit_telling(0, 1, work.clone(), Tell { message: Some(&message), id: Some(5) });
        world.notify(0, &message);
        let empty = world.prepare(Op::Write, &[]);
        world.settle();
        world.submit_telling(0, 3, empty, Tell { message: Some(&message), id: Some(6) });
        world.settle();
        assert_eq!(world.nodes[1].delivered.len(), 3);
        assert!(world.nodes[1].delivered.iter().all(|got| *got == message));
        assert_eq!(world.nodes[1].landed, [5, 6]);
        world.audit();
    });
}

#[test]
fn long_messages_of_several_transfers_come_one_after_the_other_over_any_lanes() {
    both_modes(|notify| {
        for seed in 0..20 {
            let mut world = World::new(Config { lanes: 4, stripe_min: 1 << 20, ..small(notify) }, seed);
            for token in 0..30u64 {
                let at = token as usize * 1000;
                let work = world.prepare(Op::Write, &[(at, at, 500)]);
                // Long and short ones mixed.
                let len = if token % 3 == 0 { 20 } else { 300 + 100 * token as usize };
                world.submit(0, token, work, Some(&pattern(token, len)));
            }
            while world.nodes[1].delivered.len() < 30 {
                let held = world.nodes[1].session.stats().reassembly_bytes;
                assert!(held <= 3300, "more than one message is being put together: {held}");
                assert_eq!(world.nodes[1].ended, None, "seed {seed}");
                if !world.step() {
                    let before = world.nodes[1].delivered.len();
                    world.settle();
                    assert!(world.nodes[1].delivered.len() > before, "seed {seed}: stuck");
                }
            }
            world.settle();
            let mut got = world.nodes[1].delivered.clone();
            let mut expected: Vec<_> = (0..30u64)
                .map(|token| pattern(token, if token % 3 == 0 { 20 } else { 300 + 100 * token as usize }))
                .collect();
            got.sort_unstable();
            expected.sort_unstable();
            assert_eq!(got, expected, "seed {seed}");
            assert_eq!(counters(&world, 1).partial_messages_dropped, 0, "seed {seed}");
            world.audit();
        }
    });
}

#[test]
fn standalone_notifications_keep_their_order_with_long_ones_among_them() {
    both_modes(|notify| {
        let mut world = World::new(small(notify), 3);
        let messages: Vec<_> = (0..40).map(|n| pattern(n, (n as usize % 5) * 150)).collect();
        messages.iter().for_each(|message| world.notify(0, message));
        world.settle();
        assert_eq!(world.nodes[1].delivered, messages);
        world.audit();
    });
}

#[test]
fn a_cancel_in_the_middle_of_a_message_ends_it_and_the_next_one_arrives() {
    both_modes(|notify| {
        for standalone in [false, true] {
            let mut world = World::new(Config { lanes: 2, ..small(notify) }, 4);
            let spans: &[_] = if standalone { &[] } else { &[(0, 0, 400)] };
            let work = world.prepare(Op::Write, spans);
            world.submit(0, 1, work.clone(), Some(&pattern(1, 30 * RECORD)));
            while world.nodes[1].session.stats().reassembly_bytes < 3 * RECORD as u64 {
                assert!(world.step());
            }
            let outcome = world.nodes[0].session.cancel(1);
            assert!(matches!(outcome, CancelOutcome::Canceled | CancelOutcome::Draining), "{outcome:?}");
            world.pump(0);
            world.settle();
            assert_eq!(world.result_of(0, 1), Some(&Err(XferFailure::Canceled)));
            assert!(world.nodes[1].delivered.is_empty());
            assert!(world.nodes[1].session.stats().reassembly_bytes > 0, "kept until another begins");
            for token in [2, 3] {
                world.submit(0, token, work.clone(), Some(&pattern(token, 5 * RECORD)));
            }
            world.settle();
            assert_eq!(world.nodes[1].delivered, [pattern(2, 5 * RECORD), pattern(3, 5 * RECORD)]);
            assert_eq!(counters(&world, 1).partial_messages_dropped, 1);
            assert_eq!(world.nodes[1].session.stats().reassembly_bytes, 0);
            world.audit();
        }
    });
}

#[test]
fn a_long_notification_past_its_deadline_is_dropped_in_the_middle_and_the_next_arrives() {
    let mut world = World::new(small(NotifyMode::Immediate), 5);
    let soon = world.now.plus_ms(10);
    world.nodes[0].session.notify(world.now, &pattern(1, 30 * RECORD), soon).unwrap();
    world.pump(0);
    world.settle_for(20);
    assert!(world.nodes[0].session.stats().notifications_waiting > 0);
    world.now = soon;
    world.nodes[0].session.on_timeout(soon);
    world.notify(0, b"short");
    world.notify(0, &pattern(2, 3 * RECORD));
    world.settle();
    assert_eq!(world.nodes[0].expired, [1]);
    assert_eq!(world.nodes[1].delivered, [b"short".to_vec(), pattern(2, 3 * RECORD)]);
    assert_eq!(counters(&world, 1).partial_messages_dropped, 1);
    world.audit();
}

#[test]
fn a_receiver_that_never_pops_keeps_a_bounded_part_and_popping_lets_the_sender_finish() {
    both_modes(|notify| {
        let mut config = small(notify);
        config.limits.unpopped_bytes = 2000;
        let mut world = World::new(config, 6);
        world.nodes[1].popped_by_itself = false;
        for token in 0..20u64 {
            let work = world.prepare(Op::Write, &[(token as usize * 100, token as usize * 100, 90)]);
            world.submit(0, token, work, Some(&pattern(token, 5 * RECORD)));
            world.notify(0, &pattern(100 + token, 5 * RECORD));
        }
        world.settle();
        let held: usize = world.nodes[1].delivered.iter().map(Vec::len).sum();
        let stats = world.nodes[1].session.stats();
        assert!(stats.withholding_credit && world.nodes[0].session.waits_for_credit());
        // Credit that was out still comes: the lanes' and the control endpoint's, and an unfinished message of each.
        assert!(held <= 2000 + 6 * 5 * RECORD && held > 2000, "{held}");
        assert!(stats.reassembly_bytes <= 2 * 5 * RECORD as u64);
        assert!(world.nodes[0].done.len() < 20);
        let popped = world.nodes[1].delivered.len() as u64;
        world.nodes[1].popped_by_itself = true;
        world.nodes[1].session.on_popped(popped, held as u64);
        world.pump(1);
        // Told at once, not when there is enough of it or when the engine falls asleep: the sender may wait for the last RECV.
        for end in world.nodes[1].session.stats().endpoints {
            assert_eq!(
                (end.recv_announced, end.ring_announced),
                (end.recv_granted, end.ring_freed),
                "{}",
                end.name
            );
        }
        world.settle();
        assert_eq!(world.nodes[1].delivered.len(), 40);
        assert_eq!(world.nodes[0].done.len(), 20);
        world.audit();
    });
}

#[test]
fn an_epoch_that_ends_in_the_middle_starts_a_notification_anew_and_delivers_it_once() {
    both_modes(|notify| {
        for moment in 0..60 {
            let mut world = World::new(small(notify), moment);
            let messages: Vec<_> = (0..4).map(|n| pattern(n, (n as usize + 2) * RECORD + 9)).collect();
            messages.iter().for_each(|message| world.notify(0, message));
            for _ in 0..moment {
                world.step();
            }
            world.fence_and_drain();
            let closed = world.next_epoch();
            assert_eq!(world.nodes[1].session.stats().reassembly_bytes, 0);
            assert!(closed[0].failed.is_empty());
            world.pump(0);
            world.settle();
            assert_eq!(world.nodes[1].delivered, messages, "moment {moment}");
            world.audit();
        }
    });
}

#[test]
fn a_transfer_whose_epoch_ends_in_the_middle_of_its_message_fails_and_its_repost_arrives_once() {
    let mut world = World::new(small(NotifyMode::Immediate), 7);
    let work = world.prepare(Op::Write, &[(0, 0, 400)]);
    world.submit(0, 1, work.clone(), Some(&pattern(1, 10 * RECORD)));
    while world.nodes[1].session.stats().reassembly_bytes == 0 {
        assert!(world.step());
    }
    world.fence_and_drain();
    let closed = world.next_epoch();
    assert_eq!(closed[0].failed.len(), 1);
    assert_eq!(closed[1].counters.partial_messages_dropped, 1);
    world.submit(0, 2, work, Some(&pattern(1, 10 * RECORD)));
    world.settle();
    assert_eq!(world.nodes[1].delivered, [pattern(1, 10 * RECORD)]);
    world.audit();
}

#[test]
fn messages_that_wait_are_limited_by_their_bytes() {
    let mut config = small(NotifyMode::Immediate);
    (config.limits.max_waiting_message_bytes, config.limits.max_notification_bytes) = (5000, 3000);
    let mut world = World::new(config, 8);
    world.frozen.extend([(0, 0), (0, 1), (0, 2)]);
    let work = world.prepare(Op::Write, &[(0, 0, 400)]);
    let now = world.now;
    let session = &mut world.nodes[0].session;
    session.submit(now, 1, work.clone(), Some(&[1; 4000])).unwrap();
    let refused = session.submit(now, 2, work.clone(), Some(&[1; 1001]));
    assert_eq!(refused, Err(SubmitError::TooManyMessageBytes { waiting: 4000, len: 1001, limit: 5000 }));
    session.submit(now, 2, work.clone(), Some(&[1; 1000])).unwrap();
    session.notify(now, &[1; 2999], now.plus_ms(1)).unwrap();
    session.notify(now, &[1; 6000], now.plus_ms(1)).unwrap();
    let refused = session.notify(now, &[1; 1], now.plus_ms(1));
    assert!(matches!(refused, Err(SubmitError::TooManyNotifications { bytes: 8999, max_bytes: 3000, .. })));
    assert_eq!(session.cancel(1), CancelOutcome::Canceled);
    session.submit(now, 3, work, Some(&[1; 4000])).expect("room again");
}

// ---- hostile peers ------------------------------------------------------------------------------------------

fn fragment(key: u64, index: u32, count: u32, total_len: u32) -> Option<Fragment> {
    Some(Fragment { key, index, count, total_len })
}

/// A peer that writes what it likes: records on an end (0 is control), each with its immediate.
struct Forger {
    world: World,
    at: [u32; 4],
}

impl Forger {
    fn new(notify: NotifyMode) -> Forger {
        Forger {
            world: World::new(Config { lanes: 2, ring: 4096, rq: 16, notify, ..Config::default() }, 1),
            at: [0; 4],
        }
    }

    fn ring(index: usize) -> RingId {
        if index == 0 { RingId::Control } else { RingId::Lane(LaneId(index as u8 - 1)) }
    }

    fn write(&mut self, index: usize, imm: Imm, record: Record, part: &[u8]) {
        let mut bytes = Vec::new();
        if self.world.config.notify == NotifyMode::Send {
            SendHeader { imm: imm.encode(), epoch: Epoch(1) }.encode(&mut bytes);
            record.encode(part, &mut bytes);
            return self.world.forge_send(1, index, &bytes, bytes.len() as u32);
        }
        record.encode(part, &mut bytes);
        self.world.nodes[1].mem.poke_ring(Self::ring(index), self.at[index], &bytes);
        self.at[index] += (bytes.len() as u32).next_multiple_of(64);
        self.world.forge(1, index, imm.encode());
    }

    /// A fragment before the last, or the one of a standalone notification.
    fn part(&mut self, index: usize, fragment: Option<Fragment>, part: &[u8]) {
        let key = fragment.expect("a fragment").key;
        let scope =
            if index == 0 { RecordScope::Standalone { seq: NotifySeq(key) } } else { RecordScope::Part };
        let imm = Imm::of(ImmKind::Record, 1, XferSeq(0));
        let record = Record { epoch: Epoch(1), scope, fragment, flags: BodyFlags::MESSAGE };
        self.write(index, imm, record, part);
    }

    fn last(&mut self, index: usize, seq: u64, fragment: Option<Fragment>, part: &[u8]) {
        let scope = RecordScope::Transfer { seq: XferSeq(seq), lanes: 1 };
        let imm = Imm::of(ImmKind::Record, 1, XferSeq(seq));
        let record = Record { epoch: Epoch(1), scope, fragment, flags: BodyFlags::MESSAGE };
        self.write(index, imm, record, part);
    }

    fn violation(mut self) -> Violation {
        assert!(self.world.nodes[1].delivered.is_empty());
        match self.world.nodes[1].ended.take() {
            Some(EndReason::Violation(violation)) => violation,
            other => panic!("no violation but {other:?}"),
        }
    }
}

#[test]
fn a_forger_s_legal_fragments_are_put_together() {
    both_modes(|notify| {
        let mut forger = Forger::new(notify);
        forger.part(1, fragment(5, 0, 3, 9), b"abc");
        forger.part(0, fragment(6, 0, 2, 5), b"xyz");
        // A transfer without fragments over another lane comes between.
        forger.last(2, 1, None, b"other");
        forger.part(1, fragment(5, 1, 3, 9), b"def");
        forger.part(0, fragment(6, 1, 2, 5), b"uv");
        forger.last(1, 0, fragment(5, 2, 3, 9), b"ghi");
        assert_eq!(forger.world.nodes[1].ended, None);
        assert_eq!(forger.world.nodes[1].delivered, [&b"other"[..], b"xyzuv", b"abcdefghi"]);
    });
}

#[test]
fn forged_repeated_and_missing_fragments_end_the_epoch_with_their_cause() {
    both_modes(|notify| {
        for index in [0, 1] {
            let after_first = |next: Option<Fragment>, part: &[u8]| {
                let mut forger = Forger::new(notify);
                forger.part(index, fragment(5, 0, 4, 12), b"abc");
                assert_eq!(forger.world.nodes[1].ended, None);
                forger.part(index, next, part);
                match forger.violation() {
                    Violation::Fragment { ring, error } if ring == Forger::ring(index) => error,
                    other => panic!("{other:?}"),
                }
            };
            let order = |got| FragmentError::Order { key: 5, expected: 1, got };
            assert_eq!(after_first(fragment(5, 0, 4, 12), b"abc"), order(0), "{notify:?}: repeated");
            assert_eq!(after_first(fragment(5, 2, 4, 12), b"abc"), order(2), "missing");
            let stranger = FragmentError::NoBeginning { key: 6, index: 1 };
            assert_eq!(after_first(fragment(6, 1, 4, 12), b"abc"), stranger);
            let changed = FragmentError::Changed { key: 5, index: 1 };
            assert_eq!(after_first(fragment(5, 1, 5, 12), b"abc"), changed);
            assert_eq!(after_first(fragment(5, 1, 4, 13), b"abc"), changed);
            let length = FragmentError::Length { key: 5, index: 1, received: 11, total_len: 12 };
            assert_eq!(after_first(fragment(5, 1, 4, 12), b"abcdefgh"), length);
        }
    });
}

#[test]
fn a_last_fragment_that_does_not_belong_there_ends_the_epoch() {
    both_modes(|notify| {
        let mut forger = Forger::new(notify);
        forger.last(1, 0, fragment(5, 3, 4, 12), b"abc");
        let error = FragmentError::NoBeginning { key: 5, index: 3 };
        assert_eq!(forger.violation(), Violation::Fragment { ring: RingId::Lane(LaneId(0)), error });

        // The right fragments for a transfer that cannot be.
        let mut forger = Forger::new(notify);
        forger.part(1, fragment(5, 0, 2, 6), b"abc");
        forger.last(1, 70_000, fragment(5, 1, 2, 6), b"def");
        assert!(matches!(forger.violation(), Violation::SequenceOutside { .. }));

        // A fragment that claims a transfer in its immediate.
        let mut forger = Forger::new(notify);
        let record = Record {
            epoch: Epoch(1),
            scope: RecordScope::Part,
            fragment: fragment(5, 0, 2, 6),
            flags: BodyFlags::MESSAGE,
        };
        forger.write(1, Imm::of(ImmKind::Record, 1, XferSeq(1)), record, b"abc");
        assert!(matches!(forger.violation(), Violation::Immediate { .. }));
    });
}

#[test]
fn a_message_that_claims_to_be_too_long_is_refused_with_the_limit_and_claims_no_memory() {
    both_modes(|notify| {
        let mut forger = Forger::new(notify);
        forger.part(1, fragment(5, 0, 2, MAX_BODY_BYTES), b"abc");
        assert_eq!(forger.world.nodes[1].ended, None);
        assert_eq!(forger.world.nodes[1].session.stats().reassembly_bytes, 3);
        forger.part(1, fragment(6, 0, 2, MAX_BODY_BYTES + 1), b"abc");
        match forger.violation() {
            Violation::Record { error: RecordError::Fragment { total_len, limit, .. }, .. } => {
                assert_eq!((total_len, limit), (MAX_BODY_BYTES + 1, MAX_BODY_BYTES));
            }
            other => panic!("{other:?}"),
        }
    });
}
