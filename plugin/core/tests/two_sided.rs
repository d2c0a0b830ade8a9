//! Behaviour of two two-sided channels joined by the toy fabric.

mod two_toy;

use baton_core::two_sided::chunks::Piece;
use baton_core::two_sided::codec::{Direction, Status};
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::report::*;
use baton_core::two_sided::setup::TwoLimits;
use two_toy::writes::{assert_moved, write};
use two_toy::*;

#[test]
fn a_small_write_arrives_and_its_message_after_it() {
    let mut world = World::new(Config::default(), 1);
    write(&mut world, 7, 4096, 1000, Some(b"done"));
    while world.nodes[1].delivered.is_empty() {
        assert!(world.turn());
    }
    assert_eq!(world.nodes[1].mem.data(4096, 1000), pattern(7, 1000), "all of it was there by then");
    world.settle();
    assert_moved(&world, 7, 4096, 1000);
    assert_eq!(world.nodes[1].delivered, [b"done".to_vec()]);
    world.audit();
}

#[test]
fn a_large_write_goes_over_all_lanes_with_what_credit_there_is() {
    for gather in [true, false] {
        let mut world = World::new(Config { gather, ..Config::default() }, 2);
        write(&mut world, 7, 4096, 300_000, None);
        world.settle();
        assert_moved(&world, 7, 4096, 300_000);
        let counters = *world.nodes[0].channel.counters();
        assert_eq!(counters.messages_gathered > 0, gather, "{counters:?}");
        world.audit();
    }
}

#[test]
fn a_read_brings_every_byte_and_its_message_tells_that_it_was_read() {
    let mut world = World::new(Config::default(), 3);
    world.nodes[1].mem.set_data(5000, &pattern(9, 100_000));
    world.submit(0, 9, Direction::Read, &[(64, 5000, 60_000), (70_000, 65_000, 40_000)], Some(b"read"));
    world.settle();
    assert_eq!(world.result_of(0, 9), Some(&Ok(())));
    let all = pattern(9, 100_000);
    assert_eq!(world.nodes[0].mem.data(64, 60_000), all[..60_000]);
    assert_eq!(world.nodes[0].mem.data(70_000, 40_000), all[60_000..]);
    assert_eq!(world.nodes[0].mem.data(0, 64), [0; 64]);
    assert_eq!(world.nodes[0].mem.data(60_064, 9_936), [0; 9_936]);
    assert_eq!(world.nodes[1].delivered, [b"read".to_vec()]);
    world.audit();
}

#[test]
fn notifications_arrive_in_order_also_when_they_are_longer_than_a_frame() {
    let mut world = World::new(Config::default(), 4);
    let messages: Vec<Vec<u8>> = (0..200).map(|n| pattern(n, (n as usize * 37) % 4000)).collect();
    for (token, message) in (0..).zip(&messages) {
        world.notify(0, token, message, if token % 2 == 0 { Resolve::Sent } else { Resolve::Taken });
    }
    world.settle();
    assert_eq!(world.nodes[1].delivered, messages);
    let mut ended = world.nodes[0].notes.clone();
    ended.sort_unstable();
    assert_eq!(ended, (0..200).map(|token| (token, true)).collect::<Vec<_>>(), "each exactly once");
    world.audit();
}

#[test]
fn many_small_blocks_are_packed() {
    let mut world = World::new(Config::default(), 5);
    let spans: Vec<(usize, usize, usize)> = (0..100).map(|n| (n * 200, 64 + n * 300, 150)).collect();
    world.nodes[0].mem.set_data(0, &pattern(1, 20_000));
    world.submit(0, 1, Direction::Write, &spans, Some(b"packed"));
    world.settle();
    assert_eq!(world.result_of(0, 1), Some(&Ok(())));
    for (local, remote, len) in spans {
        assert_eq!(world.nodes[1].mem.data(remote, len), world.nodes[0].mem.data(local, len));
        assert_eq!(world.nodes[1].mem.data(remote + len, 150), [0; 150]);
    }
    let counters = world.nodes[0].channel.counters();
    assert_eq!((counters.blocks_packed, counters.messages_sent), (100, 20), "five fit a slot of 1024 bytes");
    assert_eq!(world.nodes[1].delivered, [b"packed".to_vec()]);
    world.audit();
}

fn counters(world: &World, n: usize) -> TwoCounters {
    *world.nodes[n].channel.counters()
}

#[test]
fn a_notification_resolves_on_its_work_completion_and_never_before() {
    let mut world = World::new(Config::default(), 10);
    world.settle();
    world.unpolled.push((0, 0));
    world.notify(0, 1, b"sent", Resolve::Sent);
    world.settle();
    assert_eq!(world.nodes[1].delivered, [b"sent".to_vec()], "it is there");
    assert_eq!(world.nodes[0].notes, [], "its completion was not polled yet");
    world.unpolled.clear();
    world.settle();
    assert_eq!(world.nodes[0].notes, [(1, true)]);
    world.audit();
}

#[test]
fn a_notification_that_asks_for_it_resolves_only_when_the_peer_has_taken_it() {
    let mut world = World::new(Config::default(), 11);
    world.settle();
    world.unpolled.push((1, 0));
    world.notify(0, 1, b"taken", Resolve::Taken);
    world.notify(0, 2, b"sent", Resolve::Sent);
    world.settle();
    assert_eq!(world.nodes[0].notes, [(2, true)], "sent, but nobody has looked at it");
    world.unpolled.clear();
    world.settle();
    assert_eq!(world.nodes[0].notes, [(2, true), (1, true)]);
    world.audit();
}

#[test]
fn nobody_is_answered_at_once_for_a_few_notifications_but_for_a_transfer() {
    let mut world = World::new(Config::default(), 12);
    world.settle();
    (0..5).for_each(|token| world.notify(0, token, b"note", Resolve::Taken));
    while world.step() {}
    assert_eq!(world.nodes[1].delivered.len(), 5);
    assert!(world.nodes[0].notes.is_empty() && !world.nodes[1].channel.owes_answers());
    world.settle();
    assert_eq!(world.nodes[0].notes, (0..5).map(|token| (token, true)).collect::<Vec<_>>(), "once it idles");
    write(&mut world, 9, 1000, 2000, None);
    while world.step() {}
    assert!(world.nodes[1].channel.owes_answers(), "the RECV that it took is missed");
    world.settle();
    assert!(world.nodes.iter().all(|node| !node.channel.owes_answers()));
    world.audit();
}

#[test]
fn a_failed_work_request_ends_the_epoch_once_and_the_next_one_finishes_everything_exactly_once() {
    for index in [0, 1, 2] {
        let mut world = World::new(Config::default(), 12);
        for token in 0..5 {
            write(&mut world, token, 1000 + token as usize * 50_000, 40_000, Some(&[token as u8]));
        }
        world.notify(0, 77, b"note", Resolve::Taken);
        (0..40).for_each(|_| assert!(world.step()));
        world.fence(1, index);
        for _ in 0..300 {
            world.step();
        }
        assert!(world.nodes.iter().any(|node| node.ended.is_some()), "an error completion was seen");
        assert!(world.nodes[0].done.iter().all(|(_, result)| result.is_ok()), "nothing has failed yet");
        world.next_epoch();
        world.settle();
        for token in 0..5 {
            assert_moved(&world, token, 1000 + token as usize * 50_000, 40_000);
        }
        assert_eq!(world.nodes[0].notes, [(77, true)]);
        let mut delivered = world.nodes[1].delivered.clone();
        delivered.sort();
        let mut expected: Vec<Vec<u8>> = (0..5).map(|token| vec![token as u8]).collect();
        expected.push(b"note".to_vec());
        assert_eq!(delivered, expected);
        world.audit();
    }
}

#[test]
fn a_session_that_is_not_resumed_reports_every_transfer_and_every_notification() {
    let mut world = World::new(Config::default(), 13);
    world.frozen.push((0, 1));
    for token in 0..5 {
        write(&mut world, token, 1000 + token as usize * 50_000, 40_000, None);
    }
    world.frozen.push((0, 0));
    world.notify(0, 77, b"note", Resolve::Sent);
    world.drain();
    let mut node = world.nodes.remove(0);
    let durable = node.channel.close(world.now, &mut node.pool).durable;
    let end = TwoEnd::Closed("the peer was restarted".into());
    let mut left = durable.abandon(&end);
    left.transfers.sort_by_key(|(token, _)| *token);
    let expected: Vec<_> = (0..5).map(|token| (token, XferFailure::Ended(end.clone()))).collect();
    assert_eq!(left.transfers, expected);
    assert_eq!(left.notes, [(77, b"note".to_vec())]);
}

#[test]
fn bytes_are_read_only_until_the_completion_and_slots_are_not_used_again_before_it() {
    for gather in [false, true] {
        let config = Config { gather, send_slots: 2, max_sge: 2, ..Config::default() };
        let mut world = World::new(config, 14);
        // Executed late: the toy reads memory then, and would see what was put there in between.
        world.frozen.extend([(0, 1), (0, 2)]);
        write(&mut world, 1, 1000, 8000, None);
        write(&mut world, 2, 20_000, 8000, None);
        world.pass(5);
        assert_eq!(world.nodes[0].done, []);
        world.frozen.clear();
        world.settle();
        assert_moved(&world, 1, 1000, 8000);
        assert_moved(&world, 2, 20_000, 8000);
        world.audit();
    }
}

#[test]
fn a_transfer_is_not_done_while_its_memory_may_still_be_read_also_if_the_answer_is_faster() {
    let mut world = World::new(Config::default(), 15);
    world.settle();
    world.unpolled.extend([(0, 1), (0, 2)]);
    write(&mut world, 1, 1000, 500, None);
    world.settle();
    assert_eq!(world.nodes[1].mem.data(1000, 500), pattern(1, 500));
    assert_eq!(world.nodes[0].done, [], "acknowledged, but its SEND has not completed");
    world.unpolled.clear();
    world.settle();
    assert_moved(&world, 1, 1000, 500);
    world.audit();
}

#[test]
fn a_small_window_never_meets_a_missing_recv_however_large_the_burst() {
    let config = Config { rq: 2, control_rq: 2, ..Config::default() };
    let mut world = World::new(config, 16);
    for token in 0..40 {
        write(&mut world, token, 1000 + token as usize * 3000, 2000, Some(&[token as u8]));
        world.notify(0, 1000 + token, &[token as u8], Resolve::Sent);
    }
    world.settle();
    for token in 0..40 {
        assert_moved(&world, token, 1000 + token as usize * 3000, 2000);
    }
    assert_eq!(world.nodes[1].delivered.len(), 80);
    world.audit();
}

fn submit_to(
    world: &mut World,
    token: u64,
    region: baton_core::RegionId,
    offset: u64,
    len: u64,
    direction: Direction,
) {
    let piece = Piece { local: LOCAL_BASE, region, offset, len };
    world.nodes[0].channel.submit(world.now, token, direction, vec![piece].into(), Some(b"no")).unwrap();
    world.pump(0);
}

#[test]
fn every_refusal_is_answered_and_fails_the_transfer_with_its_reason() {
    let end = Config::default().data_bytes as u64;
    let cases = [
        (baton_core::RegionId(99), 0, 100, Direction::Write, Status::NoRegion),
        (WITHDRAWN, 0, 100, Direction::Write, Status::StaleRegion),
        (READ_ONLY, 0, 100, Direction::Write, Status::Permission),
        (WRITE_ONLY, 0, 100, Direction::Read, Status::Permission),
        (REGION, end - 99, 100, Direction::Write, Status::Range),
        (REGION, end - 99, 100, Direction::Read, Status::Range),
        (REGION, end, 1, Direction::Write, Status::Range),
        (REGION, u64::MAX - 100, 100, Direction::Write, Status::Range),
        (READ_ONLY, end - 5000, 5001, Direction::Read, Status::Range),
    ];
    for (nth, (region, offset, len, direction, status)) in (0..).zip(cases) {
        let mut world = World::new(Config::default(), 20 + nth);
        submit_to(&mut world, 1, region, offset, len, direction);
        world.settle();
        let Some(Err(XferFailure::Refused { status: got, .. })) = world.result_of(0, 1) else {
            panic!("{status:?}: {:?}", world.result_of(0, 1))
        };
        assert_eq!(*got, status);
        assert!(world.nodes[1].delivered.is_empty(), "its message is dropped with it");
        assert_eq!(world.nodes[1].mem.data(0, 2000), [0; 2000]);
        assert_eq!(counters(&world, 1).nacks_sent, 1);
        // The session goes on.
        write(&mut world, 2, 4096, 3000, Some(b"yes"));
        world.settle();
        assert_moved(&world, 2, 4096, 3000);
        assert_eq!(world.nodes[1].delivered, [b"yes".to_vec()]);
        world.audit();
    }
}

#[test]
fn a_range_is_checked_per_chunk_and_what_lies_outside_is_refused_by_chunk() {
    let mut world = World::new(Config::default(), 30);
    let end = world.config.data_bytes as u64;
    submit_to(&mut world, 1, REGION, end - 4000, 4001, Direction::Write);
    world.settle();
    let refused = XferFailure::Refused { status: Status::Range, chunk: 4 };
    assert_eq!(world.result_of(0, 1), Some(&Err(refused)));
    world.audit();
}

#[test]
fn a_copy_that_fails_fails_its_transfer_at_either_end() {
    for (node, direction) in [(1, Direction::Write), (0, Direction::Read)] {
        let mut world = World::new(Config::default(), 31);
        world.fail_copy = Some((node, Status::CopyFailed));
        world.submit(0, 1, direction, &[(0, 0, 5000)], Some(b"no"));
        world.settle();
        match (direction, world.result_of(0, 1)) {
            (Direction::Write, Some(Err(XferFailure::Refused { status: Status::CopyFailed, .. }))) => {}
            (Direction::Read, Some(Err(XferFailure::CopyFailed { status: Status::CopyFailed, .. }))) => {}
            other => panic!("{other:?}"),
        }
        assert!(world.nodes[1].delivered.is_empty());
        world.audit();
    }
}

#[test]
fn a_region_that_is_withdrawn_while_it_is_read_ends_the_read_with_its_reason() {
    let mut world = World::new(Config::default(), 32);
    world.submit(0, 1, Direction::Read, &[(0, 0, 200_000)], None);
    while counters(&world, 0).bytes_placed < 50_000 {
        assert!(world.turn());
        if counters(&world, 0).bytes_placed >= 10_000 {
            world.nodes[1].mem.withdrawn.set(true);
        }
        if !world.nodes[0].done.is_empty() {
            break;
        }
    }
    world.settle();
    let Some(Err(XferFailure::Refused { status: Status::StaleRegion, .. })) = world.result_of(0, 1) else {
        panic!("{:?}", world.result_of(0, 1))
    };
    world.audit();
}

#[test]
fn without_credit_a_transfer_holds_nothing_and_fails_at_its_deadline_with_the_reason() {
    let mut config = Config { first_recvs: 0, ..Config::default() };
    config.pool.peer_slots = 0;
    let mut world = World::new(config, 40);
    write(&mut world, 1, 1000, 5000, None);
    world.pass(29_000);
    assert_eq!(world.nodes[0].done, []);
    let stats = world.nodes[0].channel.stats();
    assert_eq!(
        (stats.request_consumed, stats.send_slots, stats.gathers),
        (0, 0, 0),
        "it waits and holds nothing"
    );
    let asked = counters(&world, 0).credit_requests_sent;
    assert!((2..1000).contains(&asked), "it asked {asked} times");
    world.pass(10_000);
    let Some(Err(XferFailure::Waited { why, .. })) = world.result_of(0, 1) else {
        panic!("{:?}", world.result_of(0, 1))
    };
    assert_eq!(why, "RECV credit of the peer (lane 0: granted 0, consumed 0; lane 1: granted 0, consumed 0)");
    assert_eq!(world.nodes[1].mem.data(0, 10_000), [0; 10_000]);
}

#[test]
fn requests_beyond_the_depth_wait_without_a_number_and_go_when_earlier_ones_are_released() {
    let mut config = Config::default();
    config.limits.request_depth = 2;
    let mut world = World::new(config, 41);
    world.no_copies.push(1);
    for token in 0..10 {
        write(&mut world, token, 1000 + token as usize * 3000, 500, None);
    }
    world.settle();
    assert_eq!(world.nodes[0].channel.stats().request_consumed, 2);
    assert_eq!(world.nodes[1].channel.stats().peer_transfers, 2);
    world.no_copies.clear();
    world.settle();
    for token in 0..10 {
        assert_moved(&world, token, 1000 + token as usize * 3000, 500);
    }
    world.audit();
}

#[test]
fn small_transfers_are_not_held_up_by_a_large_one_nor_the_other_way() {
    let mut world = World::new(Config::default(), 42);
    world.nodes[0].mem.set_data(0, &pattern(0, 400_000));
    world.submit(0, 0, Direction::Write, &[(0, 0, 400_000)], None);
    for token in 1..200 {
        write(&mut world, token, 500_000 + token as usize * 600, 200, None);
    }
    let order = |world: &World, token| world.nodes[0].done.iter().position(|(t, _)| *t == token);
    world.settle();
    assert!(order(&world, 0).unwrap() > 100, "most small ones were faster");
    let sent = counters(&world, 0);
    assert_eq!(world.nodes[0].done.len(), 200, "{sent:?}");
    world.audit();
}

#[test]
fn the_large_ones_share_the_lanes_by_bytes() {
    let mut config = Config::default();
    config.limits.small_bytes = 0;
    let mut world = World::new(config, 43);
    for token in 0..4 {
        write(&mut world, token, 1000 + token as usize * 210_000, 200_000, None);
    }
    // Nobody is finished before everybody has got most of its bytes through.
    while world.nodes[0].done.is_empty() {
        assert!(world.turn());
    }
    for token in 0..4 {
        let at = 1000 + token * 210_000;
        let moved = world.nodes[1].mem.data(at, 200_000).iter().filter(|byte| **byte != 0).count();
        assert!(moved > 0, "transfer {token} got its turn");
    }
    world.settle();
    world.audit();
}

#[test]
fn the_pool_grows_under_load_and_is_back_at_its_base_within_ten_seconds_without_a_missing_recv() {
    let mut world = World::new(Config::default(), 50);
    for round in 0..3u64 {
        for token in 0..6 {
            write(&mut world, round * 10 + token, 1000 + token as usize * 100_000, 90_000, None);
        }
        world.settle();
        let grown = world.nodes[1].pool.stats();
        assert!(grown.slabs > 1, "{grown:?}");
        world.pass(10_000);
        let stats = world.nodes[1].pool.stats();
        assert_eq!((stats.slabs, stats.draining), (1, 0), "{stats:?}");
        assert!(world.nodes[0].channel.counters().nops_sent > 0, "RECVs were taken back by NOPs");
        world.audit();
    }
    let moved = world.nodes[1].mem.data(1000, 90_000);
    assert_eq!(moved, pattern(20, 90_000));
}

#[test]
fn a_slow_copy_does_not_keep_acknowledgements_or_credit_from_others() {
    let mut world = World::new(Config::default(), 51);
    world.no_copies.push(1);
    write(&mut world, 1, 1000, 30_000, None);
    world.settle();
    world.notify(0, 9, b"not held up", Resolve::Taken);
    world.notify(1, 9, b"nor this way", Resolve::Taken);
    world.settle();
    assert_eq!((world.nodes[0].notes.len(), world.nodes[1].notes.len()), (1, 1));
    world.no_copies.clear();
    world.settle();
    assert_moved(&world, 1, 1000, 30_000);
    world.audit();
}

#[test]
fn answers_wait_as_state_when_the_control_queue_is_full_and_arriving_data_never_blocks() {
    let mut world = World::new(Config { control_sq: 8, ..Config::default() }, 52);
    world.settle();
    // Nothing of the receiver's control endpoint goes out.
    world.frozen.push((1, 0));
    for token in 0..10 {
        write(&mut world, token, 1000 + token as usize * 600, 400, Some(&[token as u8]));
    }
    world.settle();
    let placed = counters(&world, 1).bytes_placed;
    assert!(placed > 0, "what had credit was placed");
    assert_eq!(world.nodes[0].done, []);
    world.frozen.clear();
    world.settle();
    for token in 0..10 {
        assert_moved(&world, token, 1000 + token as usize * 600, 400);
    }
    world.audit();
}

#[test]
fn no_completion_for_too_long_ends_the_epoch() {
    let mut world = World::new(Config::default(), 53);
    world.settle();
    world.frozen.extend([(0, 0), (0, 1), (0, 2)]);
    write(&mut world, 1, 1000, 500, None);
    world.pass(4_900);
    assert_eq!(world.nodes[0].ended, None);
    world.pass(200);
    assert!(matches!(world.nodes[0].ended, Some(TwoEnd::Stalled { .. })), "{:?}", world.nodes[0].ended);
}

#[test]
fn notifications_are_not_acknowledged_while_the_host_takes_none_and_memory_stays_bounded() {
    let mut config = Config::default();
    config.limits.unpopped_bytes = 10_000;
    let mut world = World::new(config, 54);
    world.nodes[1].popped_by_itself = false;
    for token in 0..100 {
        world.notify(0, token, &[token as u8; 1000], Resolve::Taken);
    }
    world.settle();
    let held = world.nodes[1].delivered.len();
    assert!((10..=20).contains(&held), "{held}: the limit and one window");
    let mut popped = 0;
    while popped < 100 {
        assert!(popped < world.nodes[1].delivered.len(), "the rest follows");
        world.nodes[1].channel.on_popped(1, 1000);
        popped += 1;
        world.settle();
    }
    assert_eq!(world.nodes[0].notes.len(), 100);
    world.audit();
}

#[test]
fn a_resend_in_a_later_epoch_does_not_overwrite_memory_that_the_host_used_again() {
    let mut world = World::new(Config::default(), 55);
    world.settle();
    // The acknowledgement is lost with the epoch.
    world.frozen.push((1, 0));
    write(&mut world, 1, 1000, 3000, None);
    for _ in 0..100 {
        world.settle();
        let node = &mut world.nodes[0];
        node.channel.poll_credit(&node.mem);
        world.pump(0);
    }
    assert_eq!(world.nodes[0].done, []);
    let lanes_have_credit = world.nodes[1].mem.data(1000, 3000) == pattern(1, 3000);
    world.next_epoch();
    if lanes_have_credit {
        world.nodes[1].mem.set_data(1000, &[9; 3000]);
    }
    world.settle();
    assert_eq!(world.result_of(0, 1), Some(&Ok(())));
    if lanes_have_credit {
        assert_eq!(world.nodes[1].mem.data(1000, 3000), [9; 3000]);
        assert!(counters(&world, 1).ended_chunks > 0);
    }
    world.audit();
}

#[test]
fn who_waits_behind_others_that_get_on_is_not_late() {
    let mut config = Config::default();
    (config.limits.wait_ms, config.limits.request_depth, config.limits.stall_ms) = (200, 1, 1 << 40);
    let mut world = World::new(config, 56);
    for token in 0..10 {
        write(&mut world, token, 1000 + token as usize * 30_000, 25_000, None);
    }
    // Slow, but never still for long.
    while world.nodes[0].done.len() < 10 {
        world.turn();
        world.now.0 += 500_000;
        for n in [0, 1] {
            let node = &mut world.nodes[n];
            node.channel.on_timeout(world.now, &node.pool);
            world.pump(n);
        }
    }
    for token in 0..10 {
        assert_moved(&world, token, 1000 + token as usize * 30_000, 25_000);
    }
}

#[test]
fn blocks_of_4_kib_go_fifteen_to_a_slot_of_64_kib() {
    let mut config = Config { slot: 64 << 10, rq: 16, first_recvs: 16, max_sge: 30, ..Config::default() };
    config.limits = TwoLimits::default();
    (config.pool.slot_bytes, config.pool.slab_slots, config.pool.base_slabs) = (64 << 10, 16, 3);
    let mut world = World::new(config, 57);
    let spans: Vec<(usize, usize, usize)> = (0..128).map(|n| (n * 4096, n * 8000, 4096)).collect();
    world.nodes[0].mem.set_data(0, &pattern(1, 128 * 4096));
    world.submit(0, 1, Direction::Write, &spans, None);
    world.settle();
    assert_eq!(world.result_of(0, 1), Some(&Ok(())));
    for (local, remote, len) in spans {
        assert_eq!(world.nodes[1].mem.data(remote, len), world.nodes[0].mem.data(local, len));
    }
    assert_eq!((counters(&world, 0).messages_sent, counters(&world, 0).blocks_packed), (9, 128));
    world.audit();
}

#[test]
fn small_blocks_of_a_read_are_packed_too() {
    let mut world = World::new(Config::default(), 58);
    let spans: Vec<(usize, usize, usize)> = (0..100).map(|n| (64 + n * 300, n * 200, 150)).collect();
    world.nodes[1].mem.set_data(0, &pattern(1, 20_000));
    world.submit(0, 1, Direction::Read, &spans, Some(b"read"));
    world.settle();
    assert_eq!(world.result_of(0, 1), Some(&Ok(())));
    for (local, remote, len) in spans {
        assert_eq!(world.nodes[0].mem.data(local, len), world.nodes[1].mem.data(remote, len));
        assert_eq!(world.nodes[0].mem.data(local + len, 150), [0; 150]);
    }
    assert_eq!((counters(&world, 1).messages_sent, counters(&world, 1).blocks_packed), (20, 100));
    assert_eq!(world.nodes[1].delivered, [b"read".to_vec()]);
    world.audit();
}

#[test]
fn a_transfer_whose_completion_never_comes_is_told_when_its_epoch_is_closed() {
    let mut world = World::new(Config::default(), 59);
    world.settle();
    world.unpolled.extend([(0, 1), (0, 2)]);
    write(&mut world, 1, 1000, 500, None);
    world.settle();
    assert_eq!(world.nodes[0].done, [], "acknowledged, but its SEND has not completed");
    // A device that is gone gives no completions.
    let mut node = world.nodes.remove(0);
    node.channel.shut("the device is gone");
    while node.channel.next_event().is_some() {}
    let closed = node.channel.close(world.now, &mut node.pool);
    assert_eq!(closed.done, [(1, Ok(()))]);
    assert_eq!(closed.durable.transfers(), 0);
    node.pool.audit();
}
