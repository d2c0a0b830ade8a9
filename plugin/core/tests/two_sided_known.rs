//! Faults that transfer engines of this kind are known for: each as a check that it does not happen here.

mod two_toy;

use baton_core::two_sided::chunks::Piece;
use baton_core::two_sided::codec::*;
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::pool::{PoolAction, PoolStats, SlotState};
use baton_core::two_sided::report::*;
use baton_core::{Epoch, LaneId, Nanos, NotifySeq, RegionId, SessionId};
use two_toy::*;

fn write(world: &mut World, token: u64, at: usize, len: usize) {
    world.nodes[0].mem.set_data(at, &pattern(token, len));
    world.submit(0, token, Direction::Write, &[(at, at, len)], None);
}

fn assert_moved(world: &World, token: u64, at: usize, len: usize) {
    assert_eq!(world.result_of(0, token), Some(&Ok(())));
    assert_eq!(world.nodes[1].mem.data(at, len), pattern(token, len));
    assert_eq!(world.nodes[1].mem.data(at - 64, 64), [0; 64], "sentinel before");
    assert_eq!(world.nodes[1].mem.data(at + len, 64), [0; 64], "sentinel behind");
}

/// Six transfers at once, so that the receiver's pool grows.
fn load(world: &mut World, first: u64) {
    for token in first..first + 6 {
        write(world, token, 1000 + (token % 6) as usize * 100_000, 90_000);
    }
    world.settle();
    assert!(world.nodes[1].pool.stats().slabs > 1, "{:?}", world.nodes[1].pool.stats());
}

fn pool(world: &World) -> PoolStats {
    world.nodes[1].pool.stats()
}

// ---- credit and the pool

#[test]
fn a_pool_that_shrinks_never_lowers_a_grant_and_a_trickle_beside_it_meets_a_recv_every_time() {
    let mut world = World::new(Config::default(), 1);
    load(&mut world, 0);
    let mut known = [0; 2];
    for round in 0..100u64 {
        world.pass(100);
        if round % 5 == 0 {
            write(&mut world, 100 + round, 700_000, 300);
            world.settle();
        }
        world.check_credit();
        let lanes = world.nodes[0].channel.stats().lanes;
        for (before, lane) in known.iter_mut().zip(lanes) {
            assert!(lane.known >= *before, "a grant fell from {before} to {}", lane.known);
            *before = lane.known;
        }
    }
    world.pass(10_000);
    assert_eq!((pool(&world).slabs, pool(&world).draining), (1, 0), "{:?}", pool(&world));
    world.audit();
}

#[test]
fn slots_of_a_draining_slab_that_is_needed_again_are_posted_before_they_are_granted() {
    let mut world = World::new(Config::default(), 2);
    let mut revived = 0;
    for round in 0..4u64 {
        load(&mut world, 10 * round);
        world.pass(3_000);
        // What is asked back does not come at once.
        world.frozen.extend([(0, 1), (0, 2)]);
        for _ in 0..200 {
            world.pass(50);
            if pool(&world).draining > 0 {
                break;
            }
        }
        assert!(pool(&world).draining > 0, "{:?}", pool(&world));
        world.frozen.clear();
        // More than what is left takes: the slabs on their way out are wanted back.
        load(&mut world, 10 * round + 6);
        revived = pool(&world).counters.revived;
    }
    assert!(revived > 0, "{:?}", pool(&world));
    world.audit();
}

#[test]
fn the_newest_slabs_go_also_while_a_slow_copy_holds_a_slot_of_an_old_one() {
    let mut world = World::new(Config::default(), 3);
    load(&mut world, 0);
    world.no_copies.push(1);
    write(&mut world, 20, 700_000, 400);
    world.settle();
    let held = world.nodes[1].copies.len();
    assert!(held > 0);
    world.pass(15_000);
    // Twice what is lent, and the slab of the held slot.
    assert!(pool(&world).slabs <= 3, "one slot is held, not the whole pool: {:?}", pool(&world));
    world.no_copies.clear();
    world.pass(10_000);
    assert_eq!(pool(&world).slabs, 1, "{:?}", pool(&world));
    assert_eq!(world.result_of(0, 20), Some(&Ok(())));
    world.audit();
}

#[test]
fn slots_come_in_slabs_of_one_allocation_each() {
    let mut world = World::new(Config::default(), 4);
    load(&mut world, 0);
    let (stats, config) = (pool(&world), world.nodes[1].pool.config());
    let slots = stats.free + stats.lent;
    assert_eq!(slots, stats.slabs * config.slab_slots, "each registration serves a slab of slots");
    assert!(slots >= 4 * stats.slabs && stats.counters.expanded >= u64::from(stats.slabs - 1), "{stats:?}");
    let told = std::iter::from_fn(|| world.nodes[1].pool.next_action(world.now));
    assert!(!told.into_iter().any(|action| matches!(action, PoolAction::Allocate(_))));
}

#[test]
fn a_slot_is_lent_again_as_soon_as_it_was_copied_also_when_no_answer_gets_out() {
    let mut world = World::new(Config { control_sq: 8, ..Config::default() }, 5);
    world.settle();
    // The receiver's control queue is full and stays so.
    world.frozen.push((1, 0));
    for token in 0..4 {
        write(&mut world, token, 1000 + token as usize * 600, 400);
    }
    world.settle();
    assert_eq!(world.nodes[0].done, [], "no answer got out");
    assert!(world.nodes[1].copies.is_empty());
    let posted: usize = (1..=2).map(|lane| world.nodes[1].recvs(lane)).sum();
    let lent = pool(&world).lent as usize;
    assert_eq!(lent, posted, "what is lent is a RECV, none is kept for an answer");
    world.frozen.clear();
    world.settle();
    world.audit();
}

#[test]
fn a_burst_that_wants_every_slot_never_finds_one_that_was_granted_and_not_posted() {
    for seed in 0..20 {
        let mut config = Config { first_recvs: (seed % 3) as u32, ..Config::default() };
        config.pool.max_slabs = 2 + (seed % 4) as u32;
        let mut world = World::new(config, 600 + seed);
        for token in 0..30 {
            write(&mut world, token, 1000 + token as usize * 20_000, 15_000);
            for _ in 0..7 {
                world.step();
            }
            world.check_credit();
        }
        world.settle();
        assert!((0..30).all(|token| world.result_of(0, token) == Some(&Ok(()))));
        world.audit();
    }
}

// ---- fencing

#[test]
fn no_frame_of_another_epoch_or_session_changes_anything_whatever_its_kind() {
    let ack = [Ack { transfer: 1, direction: Direction::Write, status: Status::Ok, chunks_done: 1 }];
    let piece = [ReadPiece { region: REGION, offset: 0, len: 1 }];
    let frames = [
        Frame::CreditRequest { lane: LaneId(0), want: 9, waiting_bytes: 1, oldest_wait_us: 1 },
        Frame::DataAck { released_below: 1, acks: &ack },
        Frame::SessionOpen {
            slot_bytes: 1024,
            request_depth: 16,
            notify_window: 8192,
            lanes: 2,
            released_below: 1,
        },
        Frame::Notify { seq: NotifySeq(1), after_transfer: 0, total_len: 1, offset: 0, bytes: b"a" },
        Frame::NotifyAck { up_to: NotifySeq(1) },
        Frame::ReadReq { transfer: 1, first: 0, last: true, pieces: &piece },
        Frame::XferNack { transfer: 1, direction: Direction::Write, status: Status::Range, at: 0 },
        Frame::Abort { transfer: 1, direction: Direction::Write },
        Frame::AbortAck { transfer: 1, direction: Direction::Write, status: Status::Aborted, chunks: 0 },
        Frame::CreditReclaim { lane: LaneId(0), count: 4 },
    ];
    for (nth, frame) in (0..).zip(&frames) {
        for session in [true, false] {
            let mut world = World::new(Config::default(), 30 + nth);
            world.hostile = true;
            world.settle();
            // Something of ours is under way, which the frames name.
            world.frozen.extend([(0, 1), (0, 2)]);
            world.submit(0, 1, Direction::Write, &[(0, 0, 500)], Some(b"kept"));
            world.settle();
            let before = world.nodes[0].channel.stats();
            world.say(
                1,
                |header| match session {
                    true => header.session = SessionId(1),
                    false => header.epoch = Epoch(9),
                },
                frame,
            );
            world.poll(0, 0);
            let mut after = world.nodes[0].channel.stats();
            let counted = after.counters;
            let stale = if session { counted.stale_session } else { counted.stale_epoch };
            assert_eq!(stale, 1, "{frame:?}");
            after.counters = before.counters;
            after.control_received = before.control_received;
            after.control_granted = before.control_granted;
            assert_eq!(after, before, "{frame:?}");
            assert_eq!(world.nodes[0].done, []);
        }
    }
}

#[test]
fn a_session_open_that_differs_from_what_was_agreed_ends_the_epoch_by_name() {
    type Change = fn(&mut [u32; 3], &mut u8);
    let cases: [(Change, &str); 4] = [
        (|n, _| n[0] = 2048, "slot_bytes 2048, agreed was 1024"),
        (|n, _| n[1] = 17, "request_depth 17, agreed was 16"),
        (|n, _| n[2] = 9000, "notify_window 9000, agreed was 8192"),
        (|_, lanes| *lanes = 3, "lanes 3, agreed was 2"),
    ];
    for (change, text) in cases {
        let mut world = World::new(Config::default(), 50);
        world.hostile = true;
        let (mut numbers, mut lanes) = ([1024, 16, 8192], 2);
        change(&mut numbers, &mut lanes);
        let [slot_bytes, request_depth, notify_window] = numbers;
        let open = Frame::SessionOpen { slot_bytes, request_depth, notify_window, lanes, released_below: 1 };
        world.say(1, |header| (header.seq, header.ack) = (1, 0), &open);
        world.poll(0, 0);
        let told = world.nodes[0].ended.as_ref().expect("a violation").to_string();
        assert!(told.contains(text), "{told}");
    }
}

// ---- ends

#[test]
fn the_death_of_a_peer_fails_running_and_waiting_transfers_alike_and_once_each() {
    let mut config = Config::default();
    config.limits.request_depth = 4;
    let mut world = World::new(config, 60);
    world.settle();
    for token in 0..20 {
        write(&mut world, token, 1000 + token as usize * 20_000, 15_000);
    }
    world.notify(0, 77, b"note", Resolve::Taken);
    for _ in 0..100 {
        world.step();
    }
    let done = world.nodes[0].done.len();
    let stats = world.nodes[0].channel.stats();
    assert!(done < 16 && stats.transfers > 4, "some run, some wait: {stats:#?}");
    world.fence(1, 1);
    while world.nodes[0].ended.is_none() {
        assert!(world.turn(), "an error completion is seen");
    }
    world.drain();
    let mut node = world.nodes.remove(0);
    let closed = node.channel.close(world.now, &mut node.pool);
    let end = TwoEnd::Closed("the peer is dead".into());
    let mut all: Vec<u64> = node.done.iter().chain(&closed.done).map(|(token, _)| *token).collect();
    all.extend(closed.durable.abandon(&end).transfers.iter().map(|(token, failure)| {
        assert_eq!(failure, &XferFailure::Ended(end.clone()));
        *token
    }));
    all.sort_unstable();
    assert_eq!(all, (0..20).collect::<Vec<_>>(), "each exactly once");
    node.pool.audit();
}

#[test]
fn an_error_completion_ends_every_outstanding_send_of_its_endpoint_and_none_counts_as_sent() {
    let mut world = World::new(Config::default(), 61);
    world.settle();
    world.frozen.extend([(0, 0), (0, 1), (0, 2)]);
    for token in 0..3 {
        world.notify(0, token, &[token as u8; 20], Resolve::Sent);
        write(&mut world, 10 + token, 1000 + token as usize * 9000, 3000);
    }
    world.fence(0, 0);
    world.settle();
    assert!(matches!(world.nodes[0].ended, Some(TwoEnd::WorkFailed { .. })), "{:?}", world.nodes[0].ended);
    assert_eq!((world.nodes[0].notes.len(), world.nodes[0].done.len()), (0, 0), "an error is no success");
    world.frozen.clear();
    world.next_epoch();
    world.settle();
    let mut resolved = world.nodes[0].notes.clone();
    resolved.sort_unstable();
    assert_eq!(resolved, [(0, true), (1, true), (2, true)]);
    for token in 0..3 {
        assert_moved(&world, 10 + token, 1000 + token as usize * 9000, 3000);
    }
    assert_eq!(world.nodes[1].delivered.len(), 3);
    world.audit();
}

#[test]
fn a_refusal_that_was_lost_with_its_epoch_is_told_again_in_the_next() {
    for direction in [Direction::Write, Direction::Read] {
        let mut world = World::new(Config::default(), 63);
        world.settle();
        // No answer gets out before the epoch ends.
        world.frozen.push((1, 0));
        let piece = Piece { local: LOCAL_BASE, region: RegionId(99), offset: 0, len: 3000 };
        world.nodes[0].channel.submit(world.now, 1, direction, vec![piece].into(), Some(b"no")).unwrap();
        world.pump(0);
        world.settle();
        assert_eq!(world.nodes[0].done, []);
        world.next_epoch();
        world.settle();
        match world.result_of(0, 1) {
            Some(Err(XferFailure::Refused { status: Status::NoRegion, .. })) => {}
            other => panic!("{direction:?}: {other:?}"),
        }
        assert!(world.nodes[1].delivered.is_empty());
        world.audit();
    }
}

#[test]
fn a_transfer_cancelled_while_it_waits_is_over_at_once_and_its_memory_is_never_read() {
    let mut config = Config { gather: true, ..Config::default() };
    config.limits.request_depth = 4;
    let mut world = World::new(config, 62);
    world.settle();
    world.frozen.extend([(0, 1), (0, 2)]);
    for token in 0..12 {
        write(&mut world, token, 1000 + token as usize * 20_000, 15_000);
    }
    world.settle();
    let waiting: Vec<u64> = (0..12)
        .filter(|&token| {
            let outcome = world.nodes[0].channel.cancel(token);
            world.pump(0);
            outcome == TwoCancel::Canceled
        })
        .collect();
    assert!(!waiting.is_empty(), "some had not begun");
    for &token in &waiting {
        assert_eq!(world.result_of(0, token), Some(&Err(XferFailure::Canceled)), "at once");
        // The host uses its memory for something else.
        world.nodes[0].mem.set_data(1000 + token as usize * 20_000, &[0xEE; 15_000]);
    }
    world.frozen.clear();
    world.settle();
    for &token in &waiting {
        assert_eq!(world.nodes[1].mem.data(1000 + token as usize * 20_000, 15_000), [0; 15_000]);
    }
    assert_eq!(world.nodes[0].done.len(), 12, "each reported once");
    world.audit();
}

#[test]
fn an_answer_that_overtakes_the_completion_of_its_send_counts_nothing_below_nought() {
    for seed in 0..10 {
        let mut world = World::new(Config::default(), 70 + seed);
        world.settle();
        world.unpolled.extend([(0, 1), (0, 2)]);
        for token in 0..8 {
            write(&mut world, token, 1000 + token as usize * 2000, 700);
        }
        world.settle();
        assert_eq!(world.nodes[0].done, []);
        world.unpolled.clear();
        world.settle();
        for token in 0..8 {
            assert_moved(&world, token, 1000 + token as usize * 2000, 700);
        }
        let lanes = world.nodes[0].channel.stats().lanes;
        assert!(lanes.iter().all(|lane| lane.in_flight == 0), "{lanes:?}");
        world.audit();
    }
}

// ---- waiting and waking

#[test]
fn looking_at_the_clock_early_and_often_moves_no_deadline() {
    let failed_at = |often: bool| {
        let mut config = Config { first_recvs: 0, ..Config::default() };
        config.pool.peer_slots = 0;
        let mut world = World::new(config, 80);
        write(&mut world, 1, 1000, 5000);
        while world.nodes[0].done.is_empty() {
            assert!(world.now < START.plus_ms(60_000), "it never fails");
            if !often {
                world.pass(1_000);
                continue;
            }
            // Woken for nothing, many times.
            for _ in 0..3 {
                world.now = Nanos(world.now.0 + 300_000);
                for n in [0, 1] {
                    let node = &mut world.nodes[n];
                    node.channel.on_timeout(world.now, &node.pool);
                    node.channel.poll_credit(&node.mem);
                    node.channel.on_pool_changed();
                    node.channel.flush();
                    world.pump(n);
                }
            }
            world.settle();
        }
        match world.result_of(0, 1) {
            Some(Err(XferFailure::Waited { waited_ms, .. })) => *waited_ms,
            other => panic!("{other:?}"),
        }
    };
    for waited_ms in [failed_at(false), failed_at(true)] {
        assert!((30_000..35_000).contains(&waited_ms), "{waited_ms} ms");
    }
}

#[test]
fn the_watchdog_counts_from_the_post_and_not_from_before_an_idle_time() {
    let mut world = World::new(Config::default(), 83);
    write(&mut world, 1, 1000, 500);
    world.pass(60_000);
    // Nothing has completed for a minute, because nothing was to be done.
    world.frozen.extend([(0, 0), (0, 1), (0, 2)]);
    write(&mut world, 2, 3000, 500);
    let node = &mut world.nodes[0];
    node.channel.on_timeout(world.now, &node.pool);
    assert!(node.channel.next_timeout().is_none_or(|at| at > world.now));
    world.pass(4_800);
    assert_eq!(world.nodes[0].ended, None);
    world.pass(300);
    assert!(matches!(world.nodes[0].ended, Some(TwoEnd::Stalled { .. })), "{:?}", world.nodes[0].ended);
}

#[test]
fn a_channel_at_rest_wants_to_be_woken_for_nothing() {
    let mut world = World::new(Config::default(), 81);
    load(&mut world, 0);
    world.pass(9_000);
    assert_eq!((pool(&world).slabs, pool(&world).draining), (1, 0), "back at its base");
    for node in &world.nodes {
        assert_eq!(node.channel.next_timeout(), None, "{:#?}", node.channel.stats());
        assert_eq!(node.pool.next_timeout(world.now), None, "{:?}", node.pool.stats());
        assert!(!node.channel.waits_for_credit());
    }
    assert!(!world.turn());
}

#[test]
fn ten_windows_of_notifications_of_four_senders_keep_each_ones_order_also_over_epochs() {
    let mut world = World::new(Config::default(), 82);
    let mut rng = Rng::new(82);
    let (mut sent, total) = ([0u64; 4], 2_500);
    while sent.iter().any(|count| *count < total) {
        let thread = rng.below(4) as usize;
        if sent[thread] == total {
            continue;
        }
        let mut message = (thread as u64).to_le_bytes().to_vec();
        message.extend(sent[thread].to_le_bytes());
        let token = thread as u64 * total + sent[thread];
        let deadline = world.now.plus_ms(600_000);
        match world.nodes[0].channel.notify(token, &message, Resolve::Taken, deadline) {
            Ok(()) => sent[thread] += 1,
            Err(TwoSubmitError::Ended) => world.next_epoch(),
            Err(other) => panic!("{other}"),
        }
        world.pump(0);
        if rng.below(20) == 0 {
            for _ in 0..rng.below(30) {
                world.step();
            }
        }
        if rng.below(1500) == 0 {
            world.fence(rng.below(2) as usize, 0);
            for _ in 0..50 {
                world.step();
            }
            world.next_epoch();
        }
    }
    world.settle();
    let bytes: usize = world.nodes[1].delivered.iter().map(|message| message.len() + 64).sum();
    assert!(bytes > 10 * world.config.limits.notify_window as usize);
    let mut next = [0u64; 4];
    for message in &world.nodes[1].delivered {
        let number = |at: usize| u64::from_le_bytes(message[at..at + 8].try_into().unwrap());
        let thread = number(0) as usize;
        assert_eq!(number(8), next[thread], "in the order of sender {thread}");
        next[thread] += 1;
    }
    assert_eq!(next, [total; 4], "each once");
    assert_eq!(world.nodes[0].notes.len() as u64, 4 * total);
    world.audit();
}

// ---- what is told

#[test]
fn everything_that_is_dropped_refused_or_waited_for_has_a_counter_in_the_stats() {
    let mut world = World::new(Config::default(), 90);
    load(&mut world, 0);
    let stats = serde_json::to_value(world.nodes[0].channel.stats()).unwrap();
    for name in [
        "stale_epoch",
        "stale_session",
        "duplicate_chunks",
        "ended_chunks",
        "released_chunks",
        "late_read_chunks",
        "late_answers",
        "late_completions",
        "refused_chunks",
        "crc_errors",
        "waits_timed_out",
        "reads_timed_out",
        "credit_requests_ignored",
        "reclaim_timeouts",
        "notes_expired",
        "violations",
    ] {
        assert!(stats["counters"][name].is_u64(), "{name}");
    }
    assert!(
        stats["waiters"].is_array() && stats["note_duplicates"].is_u64() && stats["note_orphans"].is_u64()
    );
    let pool = serde_json::to_value(pool(&world)).unwrap();
    for name in ["expanded", "shrunk", "revived", "allocation_failed", "share_reached", "starved"] {
        assert!(pool["counters"][name].is_u64(), "{name}");
    }
}

#[test]
fn what_waits_says_for_what_with_both_sides_counters() {
    let mut config = Config { first_recvs: 0, ..Config::default() };
    config.pool.peer_slots = 0;
    let mut world = World::new(config, 91);
    write(&mut world, 1, 1000, 5000);
    world.settle();
    let stats = world.nodes[0].channel.stats();
    let [(token, why, _)] = stats.waiters.as_slice() else { panic!("{stats:#?}") };
    assert_eq!(*token, 1);
    assert!(why.contains("credit") && why.contains("granted") && why.contains("consumed"), "{why}");
}

/// The checker of credit is worth nothing if it cannot fail.
#[test]
#[should_panic(expected = "lane 0 of node 0")]
fn a_recv_that_is_missing_is_noticed() {
    let mut world = World::new(Config { first_recvs: 4, ..Config::default() }, 92);
    world.settle();
    world.check_credit();
    world.lose_recv(1, 1);
    world.check_credit();
}

/// States of slots name their holders, or nothing could be accounted for.
#[test]
fn a_posted_slot_names_its_peer_and_lane() {
    let world = World::new(Config::default(), 93);
    let slot = world.posted(1, 2);
    match world.nodes[1].pool.state(slot) {
        SlotState::Posted(holder) => assert_eq!((holder.peer, holder.lane), (world.config.peer, LaneId(1))),
        other => panic!("{other:?}"),
    }
}
