//! Behaviour of two sessions joined by the toy fabric.

mod toy;

use baton_core::notify::NotifyMode;
use baton_core::peer::*;
use baton_core::sequence::{Imm, ImmKind};
use baton_core::{LaneId, XferSeq};
use baton_fabric::{Op, WcStatus};
use toy::nics::{all_nics, assert_moved, write};
use toy::{Config, World, pattern};

#[test]
fn a_small_notified_write_takes_one_batch() {
    let mut world = World::new(Config { lanes: 1, ..Config::default() }, 1);
    write(&mut world, 7, 4096, 1000, Some(b"done"));
    assert_eq!(world.nodes[0].batches.len(), 1);
    world.settle();
    assert_moved(&world, 7, 4096, 1000);
    assert_eq!(world.nodes[1].mem.data(4096 - 8, 8), [0; 8]);
    assert_eq!(world.nodes[1].mem.data(5096, 8), [0; 8]);
    assert_eq!(world.nodes[1].delivered, [b"done".to_vec()]);
    world.audit();
}

#[test]
fn a_write_over_three_lanes_is_delivered_once_with_its_empty_message() {
    let mut world = World::new(Config { lanes: 3, ..Config::default() }, 2);
    write(&mut world, 7, 0, 3000, Some(b""));
    assert_eq!(world.nodes[0].batches.len(), 3);
    world.settle();
    assert_moved(&world, 7, 0, 3000);
    assert_eq!(world.nodes[1].delivered, [Vec::<u8>::new()]);
    world.audit();
}

#[test]
fn a_large_write_goes_in_slices_and_its_tail_comes_last() {
    let mut world = World::new(Config { sq: 16, ..Config::default() }, 3);
    write(&mut world, 7, 0, 100_000, Some(b"large"));
    assert!(world.nodes[1].delivered.is_empty());
    world.settle();
    assert_moved(&world, 7, 0, 100_000);
    assert_eq!(world.nodes[1].delivered, [b"large".to_vec()]);
    world.audit();
}

#[test]
fn an_unnotified_write_uses_no_credit() {
    let mut world = World::new(Config::default(), 4);
    write(&mut world, 7, 0, 50_000, None);
    world.settle();
    assert_moved(&world, 7, 0, 50_000);
    assert!(world.nodes[1].delivered.is_empty());
    let stats = world.nodes[0].session.stats();
    assert!(stats.endpoints.iter().all(|end| end.recv_consumed == 0 && end.ring_consumed == 0));
    world.audit();
}

#[test]
fn a_read_tells_the_target_that_its_memory_was_read() {
    for config in all_nics() {
        for (seed, len) in [(5, 1500), (6, 100_000)] {
            let mut world = World::new(Config { sq: 32, ..config.clone() }, seed);
            world.nodes[1].mem.set_data(0, &pattern(9, len));
            let work = world.prepare(Op::Read, &[(0, 0, len)]);
            world.submit(0, 9, work, Some(b"read"));
            while world.nodes[1].delivered.is_empty() {
                assert!(world.step(), "the notification comes");
            }
            assert_eq!(world.nodes[0].mem.data(0, len), pattern(9, len), "all of it was read by then");
            world.settle();
            assert_eq!(world.result_of(0, 9), Some(&Ok(())));
            assert_eq!(world.nodes[1].delivered, [b"read".to_vec()]);
            world.audit();
        }
    }
}

#[test]
fn no_read_is_posted_behind_a_fence_in_flight_where_the_fabric_cannot_have_it() {
    for (reads_behind_fence, posted_at_once) in [(true, 2), (false, 1)] {
        let config = Config { lanes: 1, reads_behind_fence, ..Config::default() };
        let mut world = World::new(config, 8);
        world.nodes[1].mem.set_data(0, &pattern(9, 3000));
        for token in [1, 2] {
            let at = token as usize * 10_000;
            let work = world.prepare(Op::Read, &[(at, 0, 3000)]);
            world.submit(0, token, work, Some(&[token as u8]));
        }
        assert_eq!(
            world.nodes[0].batches.len(),
            posted_at_once,
            "the second READ waits for the first's tail"
        );
        world.settle();
        for token in [1, 2] {
            assert_eq!(world.result_of(0, token), Some(&Ok(())));
            assert_eq!(world.nodes[0].mem.data(token as usize * 10_000, 3000), pattern(9, 3000));
        }
        assert_eq!(world.nodes[1].delivered, [vec![1], vec![2]]);
        world.audit();
    }
}

#[test]
fn a_read_behind_other_reads_posts_its_tail_after_its_completion() {
    let mut world = World::new(Config { lanes: 1, ..Config::default() }, 7);
    world.nodes[1].mem.set_data(0, &pattern(9, 3000));
    for token in [1, 2] {
        let at = token as usize * 10_000;
        let work = world.prepare(Op::Read, &[(at, 0, 3000)]);
        world.submit(0, token, work, Some(&[token as u8]));
    }
    let counters = world.nodes[0].session.stats().counters;
    assert_eq!((counters.whole_posts, counters.sliced_posts), (1, 1));
    world.settle();
    assert_eq!(world.nodes[1].delivered.len(), 2);
    for token in [1, 2] {
        assert_eq!(world.nodes[0].mem.data(token * 10_000, 3000), pattern(9, 3000));
    }
    world.audit();
}

#[test]
fn standalone_notifications_arrive_in_order_and_a_transfer_without_bytes_is_one() {
    for config in all_nics() {
        let mut world = World::new(Config { rq: 2, sq: 8, ring: 1024, ..config }, 8);
        for n in 0..50u8 {
            world.notify(0, &vec![n; usize::from(n)]);
        }
        let empty = world.prepare(Op::Write, &[(0, 0, 0)]);
        world.submit(0, 77, empty.clone(), Some(b"no bytes"));
        world.submit(0, 78, empty, None);
        assert_eq!(world.result_of(0, 78), Some(&Ok(())), "nothing to do is done at once");
        assert_eq!(world.result_of(0, 77), None);
        world.settle();
        assert_eq!(world.result_of(0, 77), Some(&Ok(())));
        let expected: Vec<Vec<u8>> =
            (0..50u8).map(|n| vec![n; usize::from(n)]).chain([b"no bytes".to_vec()]).collect();
        assert_eq!(world.nodes[1].delivered, expected);
        world.audit();
    }
}

#[test]
fn the_largest_message_of_one_record_takes_one_record() {
    let mut world = World::new(Config { ring: 32 * 1024, ..Config::default() }, 9);
    let limit = record_limit(32 * 1024);
    assert_eq!(limit, 8192 - 48);
    let work = world.prepare(Op::Write, &[(0, 0, 10)]);
    for _ in 0..9 {
        world.submit(0, 1, work.clone(), Some(&pattern(3, limit)));
        world.notify(0, &pattern(4, limit));
        world.settle();
        world.nodes[0].done.clear();
    }
    assert_eq!(world.nodes[0].session.stats().counters.fragments_sent, 0);
    assert_eq!(world.nodes[1].delivered.len(), 18);
    assert!(world.nodes[1].delivered.iter().all(|m| *m == pattern(3, limit) || *m == pattern(4, limit)));
    world.audit();
}

#[test]
fn numbers_wrap_at_24_bits_without_anyone_noticing() {
    let mut config = Config { rq: 4, ..Config::default() };
    config.limits.first_xfer_seq = (1 << 24) - 5;
    let mut world = World::new(config, 10);
    for token in 0..40u64 {
        write(&mut world, token, token as usize * 1000, 900, Some(&token.to_le_bytes()));
    }
    world.settle();
    let mut got: Vec<u64> =
        world.nodes[1].delivered.iter().map(|m| u64::from_le_bytes(m[..].try_into().unwrap())).collect();
    got.sort_unstable();
    assert_eq!(got, (0..40).collect::<Vec<_>>());
    world.audit();
}

#[test]
fn a_receiver_that_never_pops_stops_the_sender_and_popping_resumes_it() {
    for config in all_nics() {
        let mut config = Config { rq: 4, ring: 1024, ..config };
        config.limits.unpopped_messages = 10;
        let mut world = World::new(config, 11);
        world.nodes[1].popped_by_itself = false;
        for token in 0..100u64 {
            write(&mut world, token, token as usize * 100, 90, Some(&[token as u8; 100]));
            world.notify(0, &[1; 150]);
        }
        world.settle();
        world.flush();
        let held = world.nodes[1].delivered.len();
        assert!(held > 10 && held < 60, "{held} messages were delivered, more than credit allows");
        assert!(world.nodes[0].session.waits_for_credit());
        let stats = world.nodes[0].session.stats();
        assert!(stats.waiters.iter().any(|waiter| waiter.waits_for.contains("granted")), "{stats:#?}");
        assert!(world.nodes[1].session.stats().withholding_credit);
        // Plain data is not held up by any of this.
        write(&mut world, 1000, 500_000, 5000, None);
        world.settle();
        assert_moved(&world, 1000, 500_000, 5000);
        let bytes = world.nodes[1].delivered.iter().map(|m| m.len() as u64).sum();
        world.nodes[1].session.on_popped(held as u64, bytes);
        world.nodes[1].popped_by_itself = true;
        world.pump(1);
        world.settle();
        assert_eq!(world.nodes[1].delivered.len(), 200);
        assert_eq!(world.nodes[0].done.len(), 101);
        world.audit();
    }
}

#[test]
fn transfers_take_turns() {
    let mut world = World::new(Config { lanes: 1, sq: 16, ..Config::default() }, 12);
    write(&mut world, 1, 0, 200_000, Some(b"long"));
    write(&mut world, 2, 300_000, 2_000, Some(b"short"));
    world.settle();
    assert_eq!(world.nodes[0].done.iter().map(|d| d.0).collect::<Vec<_>>(), [2, 1]);
    assert_moved(&world, 1, 0, 200_000);
    assert_moved(&world, 2, 300_000, 2_000);
    world.audit();
}

#[test]
fn outstanding_bytes_stay_under_their_limit() {
    let mut config = Config { sq: 1024, lanes: 4, ..Config::default() };
    config.limits.slice_bytes = 1024;
    config.limits.outstanding_bytes = 4096;
    let mut world = World::new(config, 13);
    write(&mut world, 1, 0, 300_000, Some(b"x"));
    loop {
        let outstanding = world.nodes[0].session.stats().outstanding_bytes;
        // Tails held back go over it by a work request per lane at most.
        assert!(outstanding <= 4096 + 4 * 256, "{outstanding}");
        if !world.step() {
            break;
        }
    }
    world.settle();
    assert_moved(&world, 1, 0, 300_000);
    world.audit();
}

// ---- hostile peers ------------------------------------------------------------------------------------------

fn violation_after(config: Config, index: usize, imm: u32) -> Violation {
    let mut world = World::new(config, 1);
    write(&mut world, 1, 0, 3000, Some(b"first"));
    world.settle();
    world.forge(1, index, imm);
    match world.nodes[1].ended.take() {
        Some(EndReason::Violation(violation)) => violation,
        other => panic!("no violation but {other:?}"),
    }
}

fn imm(kind: ImmKind, lanes: u8, seq: u64) -> u32 {
    Imm::of(kind, lanes, XferSeq(seq)).encode()
}

#[test]
fn forged_immediates_end_the_epoch() {
    let config = Config::default;
    let violation = |index, imm| violation_after(config(), index, imm);
    assert!(matches!(violation(1, imm(ImmKind::Empty, 1, 0)), Violation::SequenceOutside { .. }), "a repeat");
    assert!(matches!(violation(1, imm(ImmKind::Empty, 3, 1)), Violation::Immediate { .. }), "3 lanes of 2");
    assert!(matches!(violation(0, imm(ImmKind::Empty, 1, 0)), Violation::TailOnControl { .. }));
    assert!(matches!(violation(1, 3 << 30), Violation::Immediate { .. }));
    assert!(matches!(violation(0, imm(ImmKind::Tail, 1, 0)), Violation::TailOnControl { .. }));
    assert!(matches!(violation(0, imm(ImmKind::Record, 2, 0)), Violation::Immediate { .. }));
    assert!(matches!(violation(0, imm(ImmKind::Record, 1, 1)), Violation::Immediate { .. }));
    assert!(matches!(violation(1, imm(ImmKind::Tail, 3, 1)), Violation::Immediate { .. }), "3 lanes of 2");
    assert!(matches!(violation(1, imm(ImmKind::Tail, 1, 0)), Violation::SequenceOutside { .. }), "a repeat");
    assert!(matches!(violation(1, imm(ImmKind::Tail, 1, 1 << 22)), Violation::SequenceOutside { .. }));
    assert!(matches!(violation(1, imm(ImmKind::Tail, 1, 70_000)), Violation::SequenceOutside { .. }));
    assert!(matches!(violation(1, imm(ImmKind::Tail, 1, 1)), Violation::RecordCount { records: 0, .. }));
    // A record that was never written: the ring holds what was there before or nothing.
    assert!(matches!(violation(1, imm(ImmKind::Record, 1, 1)), Violation::Record { .. }));
    assert!(matches!(violation(0, imm(ImmKind::Record, 1, 0)), Violation::Record { .. }));
}

#[test]
fn a_repeated_lane_and_another_lane_count_end_the_epoch() {
    let mut world = World::new(Config { lanes: 3, ..Config::default() }, 1);
    world.forge(1, 1, imm(ImmKind::Tail, 3, 5));
    assert_eq!(world.nodes[1].ended, None);
    world.forge(1, 1, imm(ImmKind::Tail, 3, 5));
    let expected = Violation::Repeated { seq: 5, lane: LaneId(0) };
    assert_eq!(world.nodes[1].ended, Some(EndReason::Violation(expected)));

    let mut world = World::new(Config { lanes: 3, ..Config::default() }, 1);
    world.forge(1, 1, imm(ImmKind::Tail, 3, 5));
    world.forge(1, 2, imm(ImmKind::Tail, 2, 5));
    let expected = Violation::LaneCount { seq: 5, expected: 3, got: 2 };
    assert_eq!(world.nodes[1].ended, Some(EndReason::Violation(expected)));
    let closed = world.nodes[1].session.close(EndReason::Disconnected);
    assert_eq!(closed.partial_seqs, [5]);
}

#[test]
fn more_immediates_than_receives_end_the_epoch() {
    let mut world = World::new(Config { lanes: 2, rq: 2, ..Config::default() }, 1);
    // Two lanes each, so that none of them completes; nothing is reposted in between.
    for seq in 0..2 {
        world.forge_only(1, 1, imm(ImmKind::Tail, 2, seq));
    }
    world.take_events(1);
    assert_eq!(world.nodes[1].ended, None);
    world.forge_only(1, 1, imm(ImmKind::Tail, 2, 2));
    world.take_events(1);
    let ring = RingId::Lane(LaneId(0));
    let expected = Violation::TooManyReceives { ring, received: 3, granted: 2 };
    assert_eq!(world.nodes[1].ended, Some(EndReason::Violation(expected)));
}

#[test]
fn a_torn_record_ends_the_epoch() {
    let mut world = World::new(Config { lanes: 1, ..Config::default() }, 1);
    world.unpolled.push((1, 1));
    write(&mut world, 1, 0, 100, Some(b"torn record"));
    world.settle();
    world.nodes[1].mem.poke_ring(RingId::Lane(LaneId(0)), 50, b"X");
    world.unpolled.clear();
    world.settle();
    let reason = world.nodes[1].ended.clone();
    assert!(matches!(reason, Some(EndReason::Violation(Violation::Record { .. }))), "{reason:?}");
    assert!(world.nodes[1].delivered.is_empty());
}

#[test]
fn impossible_credit_ends_the_epoch_and_stale_credit_is_ignored() {
    let mut world = World::new(Config { rq: 2, lanes: 1, ..Config::default() }, 1);
    let word = |epoch: u64, count: u64| (epoch << 48) | count;
    world.nodes[0].mem.set_credit(2, word(9, 1000));
    let node = &mut world.nodes[0];
    assert!(!node.session.poll_credit(world.now, &node.mem));
    assert_eq!(node.session.stats().counters.credit_words_stale, 1);
    node.mem.set_credit(2, word(1, 3));
    node.session.poll_credit(world.now, &node.mem);
    world.take_events(0);
    let reason = world.nodes[0].ended.clone();
    assert!(matches!(reason, Some(EndReason::Violation(Violation::Credit { .. }))), "{reason:?}");
    write_is_refused(&mut world);
}

fn write_is_refused(world: &mut World) {
    let work = world.prepare(Op::Write, &[(0, 0, 10)]);
    let now = world.now;
    let session = &mut world.nodes[0].session;
    assert_eq!(session.submit(now, 5, work, None), Err(SubmitError::Ended));
    assert_eq!(session.notify(now, b"", now), Err(SubmitError::Ended));
}

// ---- cancel --------------------------------------------------------------------------------------------------

#[test]
fn a_cancel_before_anything_is_posted_ends_the_transfer_at_once() {
    let mut world = World::new(Config { lanes: 1, sq: 8, ..Config::default() }, 1);
    world.frozen.push((0, 1));
    write(&mut world, 1, 0, 10_000, Some(b"one"));
    let work = world.prepare(Op::Write, &[(50_000, 50_000, 600)]);
    world.submit(0, 2, work, Some(b"two"));
    assert_eq!(world.nodes[0].session.cancel(2), CancelOutcome::Canceled);
    assert_eq!(world.nodes[0].session.cancel(3), CancelOutcome::NotFound);
    world.pump(0);
    assert_eq!(world.result_of(0, 2), Some(&Err(XferFailure::Canceled)));
    world.frozen.clear();
    world.settle();
    assert_moved(&world, 1, 0, 10_000);
    assert_eq!(world.nodes[1].delivered, [b"one".to_vec()]);
    world.audit();
}

#[test]
fn a_cancel_in_the_middle_of_data_drains_and_the_peer_hears_nothing() {
    let mut world = World::new(Config { lanes: 2, sq: 8, ..Config::default() }, 1);
    write(&mut world, 1, 0, 50_000, Some(b"one"));
    for _ in 0..20 {
        world.step();
    }
    assert_eq!(world.nodes[0].session.cancel(1), CancelOutcome::Draining);
    assert_eq!(world.nodes[0].session.cancel(1), CancelOutcome::TooLate);
    world.pump(0);
    world.settle();
    assert_eq!(world.result_of(0, 1), Some(&Err(XferFailure::Canceled)));
    assert!(world.nodes[1].delivered.is_empty());
    write(&mut world, 2, 100_000, 1000, Some(b"two"));
    world.settle();
    assert_eq!(world.nodes[1].delivered, [b"two".to_vec()], "no gap in the numbers");
    world.audit();
}

#[test]
fn a_cancel_of_a_transfer_that_waits_for_credit_holds_nothing() {
    let mut config = Config { lanes: 1, rq: 2, ..Config::default() };
    config.limits.unpopped_messages = 0;
    let mut world = World::new(config, 1);
    world.nodes[1].popped_by_itself = false;
    for token in 0..10 {
        write(&mut world, token, token as usize * 1000, 500, Some(b"m"));
    }
    world.settle();
    assert_eq!(world.nodes[1].delivered.len(), 2);
    assert_eq!(world.nodes[0].session.cancel(5), CancelOutcome::Canceled);
    assert_eq!(world.nodes[0].session.cancel(1), CancelOutcome::NotFound, "done long ago");
    world.nodes[1].popped_by_itself = true;
    world.nodes[1].session.on_popped(2, 2);
    world.pump(1);
    world.pump(0);
    while world.nodes[1].delivered.len() < 9 {
        world.settle();
    }
    assert_eq!(world.nodes[0].done.len(), 10);
    world.audit();
}

#[test]
fn a_cancel_after_the_tail_comes_too_late() {
    let mut world = World::new(Config::default(), 1);
    write(&mut world, 1, 0, 100, Some(b"m"));
    assert_eq!(world.nodes[0].session.cancel(1), CancelOutcome::TooLate);
    let empty = world.prepare(Op::Write, &[]);
    world.submit(0, 2, empty.clone(), Some(b"n"));
    assert_eq!(world.nodes[0].session.cancel(2), CancelOutcome::TooLate);
    let now = world.now;
    world.nodes[0].session.submit(now, 3, empty, Some(b"o")).unwrap();
    assert_eq!(world.nodes[0].session.cancel(3), CancelOutcome::Canceled, "still in the outbox");
    world.pump(0);
    world.settle();
    assert_eq!(world.nodes[1].delivered.len(), 2);
    assert_eq!(world.result_of(0, 3), Some(&Err(XferFailure::Canceled)));
    world.audit();
}

// ---- the end of an epoch -------------------------------------------------------------------------------------

#[test]
fn what_succeeded_before_the_flush_counts_and_the_rest_fails() {
    let mut world = World::new(Config { lanes: 1, ..Config::default() }, 1);
    write(&mut world, 1, 0, 100, Some(b"one"));
    // Data and record of the first are placed, its completion is not polled yet; nothing of the second is.
    world.execute(0, 1);
    world.execute(0, 1);
    write(&mut world, 2, 1000, 100, Some(b"two"));
    world.fence_and_drain();
    assert_eq!(world.result_of(0, 1), Some(&Ok(())));
    assert_eq!(world.result_of(0, 2), None);
    assert_eq!(world.nodes[1].delivered, [b"one".to_vec()]);
    assert!(matches!(world.nodes[0].ended, Some(EndReason::WorkFailed { status: WcStatus::Flushed, .. })));
    let closed = world.nodes[0].session.close(EndReason::PeerGone("lifeline".into()));
    assert_eq!(closed.failed.len(), 1);
    // Of the flush and what caused it, the host is told the cause.
    assert!(matches!(closed.failed[0], (2, XferFailure::EpochEnded(EndReason::PeerGone(_)))));
    assert!(closed.partial_seqs.is_empty());
}

#[test]
fn the_descriptor_that_the_peer_refused_is_named() {
    let mut world = World::new(Config { lanes: 1, ..Config::default() }, 1);
    let beyond = world.config.data_bytes - 300;
    let work = world.prepare(Op::Write, &[(0, 0, 256), (1000, beyond, 512)]);
    world.submit(0, 1, work, Some(b"never"));
    world.settle();
    world.fence_and_drain();
    let closed = world.nodes[0].session.close(EndReason::Disconnected);
    let (token, failure) = &closed.failed[0];
    assert_eq!(*token, 1);
    let at = toy::DATA_BASE + beyond as u64 + 256;
    assert!(
        matches!(failure, XferFailure::RemoteAccess { remote_addr, len_bytes: 256, .. } if *remote_addr == at),
        "{failure}"
    );
    assert!(world.nodes[1].delivered.is_empty());
}

#[test]
fn a_batch_taken_in_part_ends_the_epoch_and_accounts_what_was_posted() {
    for taken in [0, 1, 3] {
        let mut world = World::new(Config { lanes: 1, ..Config::default() }, 1);
        world.nodes[0].refuse_after = Some(taken);
        write(&mut world, 1, 0, 1000, Some(b"never"));
        let reason = world.nodes[0].ended.clone();
        assert!(matches!(reason, Some(EndReason::PostFailed { offered: 5, .. })), "{reason:?}");
        assert_eq!(world.nodes[0].session.stats().endpoints[1].posted, taken as u64);
        assert!(!world.nodes[0].session.has_outstanding());
        world.fence_and_drain();
        let closed = world.nodes[0].session.close(EndReason::Disconnected);
        assert_eq!(closed.failed.len(), 1);
    }
}

#[test]
fn unacknowledged_notifications_are_resent_in_the_next_epoch_and_never_delivered_twice() {
    let mut world = World::new(Config::default(), 1);
    world.unpolled.push((0, 0));
    for n in 0..5u8 {
        world.notify(0, &[n]);
    }
    // Two arrive, but the sender does not see their completions; the others are lost.
    world.execute(0, 0);
    world.execute(0, 0);
    world.poll(1, 0);
    world.poll(1, 0);
    let empty = world.prepare(Op::Write, &[]);
    world.submit(0, 9, empty, Some(b"of a transfer"));
    let closed = world.next_epoch();
    assert_eq!(closed[0].failed.len(), 1, "the transfer without bytes is reported, not resent");
    world.pump(0);
    world.settle();
    assert_eq!(world.nodes[1].delivered, (0..5u8).map(|n| vec![n]).collect::<Vec<_>>());
    assert_eq!(world.nodes[1].session.stats().counters.duplicates_dropped, 2);
    assert_eq!(world.nodes[0].session.stats().counters.notifications_resent, 5);
    world.notify(0, b"next");
    world.settle();
    assert_eq!(world.nodes[1].delivered.last().unwrap(), b"next");
    world.audit();
}

#[test]
fn a_notification_past_its_deadline_is_dropped_and_told() {
    let mut config = Config { rq: 1, ring: 1024, ..Config::default() };
    config.limits.unpopped_messages = 0;
    let mut world = World::new(config, 1);
    world.nodes[1].popped_by_itself = false;
    for _ in 0..20 {
        world.notify(0, &[5; 200]);
    }
    world.settle();
    let waiting = world.nodes[0].session.stats().notifications_waiting;
    assert!(waiting > 0 && waiting < 20);
    let due = world.nodes[0].session.next_timeout().unwrap();
    assert_eq!(due, world.now.plus_ms(30_000));
    world.now = due;
    world.nodes[0].session.on_timeout(due);
    world.pump(0);
    assert_eq!(world.nodes[0].expired.len(), waiting as usize);
    assert_eq!(world.nodes[0].session.next_timeout(), None);
    assert_eq!(world.nodes[0].ended, None);
}

#[test]
fn work_without_a_completion_ends_the_epoch_after_its_time() {
    let mut world = World::new(Config::default(), 1);
    world.frozen.extend([(0, 0), (0, 1), (0, 2)]);
    assert_eq!(world.nodes[0].session.next_timeout(), None);
    write(&mut world, 1, 0, 1000, None);
    let due = world.nodes[0].session.next_timeout().unwrap();
    assert_eq!(due, world.now.plus_ms(5000));
    let early = baton_core::Nanos(due.0 - 1);
    world.nodes[0].session.on_timeout(early);
    world.take_events(0);
    assert_eq!(world.nodes[0].ended, None);
    world.nodes[0].session.on_timeout(due);
    world.take_events(0);
    let reason = world.nodes[0].ended.clone();
    assert!(
        matches!(reason, Some(EndReason::Stalled { waited_ms: 5000, outstanding_bytes: 1000 })),
        "{reason:?}"
    );
}

#[test]
fn limits_are_refused_by_name() {
    let mut config = Config { lanes: 1, ..Config::default() };
    config.limits.max_transfers = 2;
    config.limits.max_notifications = 3;
    let mut world = World::new(config, 1);
    world.frozen.extend([(0, 0), (0, 1)]);
    let (now, work) = (world.now, world.prepare(Op::Write, &[(0, 0, 100)]));
    let session = &mut world.nodes[0].session;
    session.submit(now, 1, work.clone(), None).unwrap();
    session.submit(now, 2, work.clone(), None).unwrap();
    assert_eq!(session.submit(now, 3, work, None), Err(SubmitError::TooManyTransfers { limit: 2 }));
    for _ in 0..3 {
        session.notify(now, b"x", now.plus_ms(1)).unwrap();
    }
    let refused = session.notify(now, b"x", now.plus_ms(1));
    assert!(matches!(refused, Err(SubmitError::TooManyNotifications { count: 3, max_count: 3, .. })));
    let three_lanes =
        World::new(Config { lanes: 3, ..Config::default() }, 1).prepare(Op::Write, &[(0, 0, 5000)]);
    let refused = world.nodes[0].session.submit(now, 4, three_lanes, None);
    assert!(matches!(refused, Err(SubmitError::LaneMap { lanes: 1, .. })), "{refused:?}");
}

#[test]
fn a_setup_that_cannot_work_is_refused_by_name() {
    let world = World::new(Config::default(), 1);
    let refusal = |change: &dyn Fn(&mut SessionSetup)| {
        let mut setup = world.setup(0);
        change(&mut setup);
        setup.check().unwrap_err().to_string()
    };
    assert_eq!(world.setup(0).check(), Ok(()));
    assert!(refusal(&|s| s.lanes[1].sq_depth = 3).contains("lane 1 sq_depth is 3"));
    assert!(refusal(&|s| s.control.rq_depth = 0).contains("control rq_depth is 0"));
    assert!(refusal(&|s| s.lanes[0].ring_bytes = 700).contains("lane 0 ring_bytes is 700"));
    assert!(refusal(&|s| s.lanes.clear()).contains("number of lanes is 0"));
    assert!(refusal(&|s| s.caps.immediate = false).contains("immediates of the fabric is 0"));
    let many = |s: &mut SessionSetup| (s.notify, s.control.rq_depth) = (NotifyMode::Send, 1025);
    assert!(refusal(&many).contains("control rq_depth is 1025"));
}
