//! A peer that breaks the protocol, or is broken: counted by cause, answered, bounded in memory, never a panic, never a wrong byte.

mod two_toy;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use baton_core::two_sided::codec::*;
use baton_core::two_sided::inbox::TransferViolation;
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::report::*;
use baton_core::{Epoch, LaneId, NotifySeq, RegionId, SessionId};
use two_toy::*;

/// A world at rest after one transfer each way; node 1 is the hostile one.
fn world(seed: u64) -> World {
    let mut world = World::new(Config { first_recvs: 4, ..Config::default() }, seed);
    world.hostile = true;
    world.nodes[0].mem.set_data(0, &pattern(0, 500));
    world.submit(0, 1, Direction::Write, &[(0, 1000, 500)], None);
    world.submit(1, 1, Direction::Write, &[(1000, 5000, 500)], None);
    world.settle();
    world
}

/// A frame of the hostile node's own making.
fn send_frame(world: &mut World, change: impl FnOnce(&mut FrameHeader), frame: &Frame<'_>) {
    world.say(1, change, frame);
    world.settle();
}

/// A message on lane 0.
fn send_data(world: &mut World, kind: DataKind, block: Block, change: impl FnOnce(&mut DataHeader)) {
    world.put(1, kind, block, change);
    world.settle();
}

/// The next number of the hostile node's transfers.
fn block(chunk: u32, total: u32, offset: u64) -> Block {
    Block { transfer: 2, region: REGION, offset, chunk, total, len: 10 }
}

fn violation(world: &World) -> &TwoViolation {
    match &world.nodes[0].ended {
        Some(TwoEnd::Violation(violation)) => {
            assert_eq!(world.nodes[0].channel.counters().violations, 1, "counted");
            violation
        }
        other => panic!("{other:?}"),
    }
}

fn assert_goes_on(world: &World) {
    assert_eq!(world.nodes[0].ended, None);
}

#[test]
fn frames_of_another_session_or_epoch_are_dropped_and_counted() {
    let mut world = world(1);
    let frame = Frame::NotifyAck { up_to: NotifySeq(0) };
    send_frame(&mut world, |header| header.session = SessionId(1), &frame);
    send_frame(&mut world, |header| header.epoch = Epoch(7), &frame);
    send_data(&mut world, DataKind::Write, block(0, 1, 0), |header| header.session = SessionId(1));
    send_data(&mut world, DataKind::Write, block(0, 1, 0), |header| header.epoch = Epoch(0));
    let counters = world.nodes[0].channel.counters();
    assert_eq!((counters.stale_session, counters.stale_epoch), (2, 2));
    assert_eq!(world.nodes[0].mem.data(0, 500), pattern(0, 500), "nothing was placed");
    assert_goes_on(&world);
}

#[test]
fn frames_out_of_order_or_with_a_wrong_acknowledgement_end_the_epoch() {
    let frame = Frame::NotifyAck { up_to: NotifySeq(0) };
    type Case = (fn(&mut FrameHeader), fn(&TwoViolation) -> bool);
    let cases: [Case; 4] = [
        (|header| header.seq += 1, |v| matches!(v, TwoViolation::FrameSeq { .. })),
        (|header| header.seq = 1, |v| matches!(v, TwoViolation::FrameSeq { .. })),
        (|header| header.ack = 1000, |v| matches!(v, TwoViolation::FrameAck { .. })),
        (|header| header.ack = 0, |v| matches!(v, TwoViolation::FrameAck { .. })),
    ];
    for (change, expected) in cases {
        let mut world = world(2);
        send_frame(&mut world, change, &frame);
        assert!(expected(violation(&world)), "{:?}", violation(&world));
    }
}

#[test]
fn frames_that_mean_nothing_end_the_epoch_with_the_rule_and_the_value() {
    let not_ours = "of transfer 9 (Write), which is none of ours";
    let cases: Vec<(Frame<'_>, String)> = vec![
        (
            Frame::SessionOpen {
                slot_bytes: 1024,
                request_depth: 16,
                notify_window: 8192,
                lanes: 2,
                released_below: 1,
            },
            "SessionOpen as frame".into(),
        ),
        (Frame::NotifyAck { up_to: NotifySeq(5) }, "acknowledged up to 5, sent were those up to 0".into()),
        (
            Frame::CreditRequest { lane: LaneId(2), want: 1, waiting_bytes: 0, oldest_wait_us: 0 },
            "LaneId(2) of 2".into(),
        ),
        (Frame::CreditReclaim { lane: LaneId(63), count: 1 }, "LaneId(63) of 2".into()),
        (
            Frame::XferNack { transfer: 9, direction: Direction::Write, status: Status::Range, at: 0 },
            format!("XferNack {not_ours}"),
        ),
        (
            Frame::AbortAck { transfer: 9, direction: Direction::Write, status: Status::Aborted, chunks: 0 },
            format!("AbortAck {not_ours}"),
        ),
        (
            Frame::DataAck {
                released_below: 2,
                acks: &[Ack { transfer: 9, direction: Direction::Write, status: Status::Ok, chunks_done: 1 }],
            },
            format!("DataAck {not_ours}"),
        ),
        (Frame::DataAck { released_below: 1, acks: &[] }, "below 1 after 2".into()),
        (Frame::DataAck { released_below: 100, acks: &[] }, "releases its transfers below 100".into()),
        (
            Frame::Abort { transfer: 5000, direction: Direction::Write },
            "transfer 5000 of the peer, granted are".into(),
        ),
        (
            Frame::Notify { seq: NotifySeq(1), after_transfer: 0, total_len: 10, offset: 5, bytes: b"abcde" },
            "a piece at 5 where 0 of notification 0 follows".into(),
        ),
        (
            Frame::Notify {
                seq: NotifySeq(1),
                after_transfer: 0,
                total_len: 9000,
                offset: 0,
                bytes: b"abcde",
            },
            "notification 1 of 9000 bytes: 0 bytes unacknowledged, the window has 8192".into(),
        ),
        (
            Frame::Notify { seq: NotifySeq(1), after_transfer: 4000, total_len: 1, offset: 0, bytes: b"a" },
            "transfer 4000 of the peer, granted are".into(),
        ),
        (
            Frame::ReadReq {
                transfer: 2,
                first: 7,
                last: true,
                pieces: &[ReadPiece { region: REGION, offset: 0, len: 1 }],
            },
            "READ 2 goes on with piece 7 after 0".into(),
        ),
    ];
    for (frame, text) in cases {
        let mut world = world(3);
        send_frame(&mut world, |_| (), &frame);
        let told = violation(&world).to_string();
        assert!(told.contains(&text), "{told:?} does not say {text:?}");
    }
}

#[test]
fn bytes_that_are_no_frame_or_no_message_end_the_epoch() {
    for (index, len) in [(0, 10), (0, 48), (0, 1024), (1, 0), (1, 63), (1, 64), (1, 1024)] {
        let mut world = world(4);
        world.inject(1, index, &vec![0x42; len]);
        world.settle();
        violation(&world);
    }
}

#[test]
fn a_peer_that_ends_the_epoch_by_a_violation_is_not_looked_at_any_more() {
    let mut world = world(5);
    world.inject(1, 0, &[1; 60]);
    let frame = Frame::Notify { seq: NotifySeq(1), after_transfer: 0, total_len: 1, offset: 0, bytes: b"a" };
    let (mut bytes, header) = (Vec::new(), world.next_frame(1));
    encode_frame(header, &frame, &mut bytes).unwrap();
    world.inject(1, 0, &bytes);
    world.settle();
    violation(&world);
    assert!(world.nodes[0].delivered.is_empty());
    assert!(world.nodes[0].channel.counters().late_completions > 0);
}

#[test]
fn a_duplicate_chunk_is_counted_once_and_completes_nothing_early() {
    let mut world = world(6);
    send_data(&mut world, DataKind::Write, block(0, 3, 100), |_| ());
    send_data(&mut world, DataKind::Write, block(0, 3, 200), |_| ());
    send_data(&mut world, DataKind::Write, block(0, 3, 300), |_| ());
    let counters = world.nodes[0].channel.counters();
    assert_eq!(counters.duplicate_chunks, 2);
    assert_eq!(world.nodes[0].channel.stats().peer_transfers, 1, "still open: two chunks are missing");
    assert_eq!(world.nodes[0].mem.data(100, 10), [0xBB; 10]);
    assert_eq!(world.nodes[0].mem.data(200, 10), pattern(0, 500)[200..210], "a duplicate is not placed");
    assert_goes_on(&world);
}

#[test]
fn a_chunk_after_the_end_or_the_abort_of_its_transfer_is_never_placed() {
    let mut world = world(7);
    send_data(&mut world, DataKind::Write, block(0, 2, 100), |_| ());
    send_frame(&mut world, |_| (), &Frame::Abort { transfer: 2, direction: Direction::Write });
    send_data(&mut world, DataKind::Write, block(1, 2, 200), |_| ());
    // Of one that was aborted before anything of it came: the frame is on another queue pair than its chunks.
    send_frame(
        &mut world,
        |header| header.seq += 1,
        &Frame::Abort { transfer: 3, direction: Direction::Write },
    );
    send_data(&mut world, DataKind::Write, Block { transfer: 3, ..block(0, 1, 300) }, |_| ());
    let counters = world.nodes[0].channel.counters();
    assert_eq!((counters.ended_chunks, counters.aborts_received), (2, 2));
    assert_eq!(world.nodes[0].mem.data(200, 200), pattern(0, 500)[200..400]);
    assert_goes_on(&world);
}

#[test]
fn transfers_that_were_not_granted_change_their_size_or_their_direction_end_the_epoch() {
    let mut w = world(8);
    send_data(&mut w, DataKind::Write, Block { transfer: 18, ..block(0, 1, 0) }, |_| ());
    let not = TransferViolation::NotGranted { transfer: 18, granted: 18 };
    assert_eq!(violation(&w), &TwoViolation::Transfer(not));
    let mut w = world(8);
    send_data(&mut w, DataKind::Write, block(0, 3, 0), |_| ());
    send_data(&mut w, DataKind::Write, block(1, 4, 0), |_| ());
    let total = TransferViolation::Total { transfer: 2, expected: 3, got: 4 };
    assert_eq!(violation(&w), &TwoViolation::Transfer(total));
    let mut w = world(8);
    send_data(&mut w, DataKind::Write, block(0, 3, 0), |_| ());
    send_frame(&mut w, |_| (), &Frame::Abort { transfer: 2, direction: Direction::Read });
    assert_eq!(violation(&w), &TwoViolation::Transfer(TransferViolation::Direction { transfer: 2 }));
}

#[test]
fn messages_out_of_order_and_chunks_that_nobody_asked_for_end_the_epoch() {
    let mut w = world(9);
    send_data(&mut w, DataKind::Write, block(0, 1, 0), |header| header.lane_seq += 1);
    assert!(matches!(violation(&w), TwoViolation::LaneSeq { .. }));
    for (transfer, text) in [(1, ""), (2, "chunk 0 of READ 2 is not what was asked for")] {
        let mut w = world(9);
        send_data(&mut w, DataKind::ReadResp, Block { transfer, ..block(0, 1, 0) }, |_| ());
        if text.is_empty() {
            assert_goes_on(&w);
            assert_eq!(w.nodes[0].channel.counters().late_read_chunks, 1, "of a transfer that has ended");
        } else {
            assert_eq!(violation(&w).to_string(), text);
        }
    }
}

#[test]
fn more_messages_than_were_announced_end_the_epoch() {
    let mut world = world(10);
    // What node 0 announces does not go out: its RECVs are posted, and after eight credit writes it cannot say so any more.
    world.frozen.push((0, 0));
    for chunk in 0..200 {
        if world.nodes[0].ended.is_some() {
            break;
        }
        assert!(world.nodes[0].recvs(1) > 0);
        send_data(&mut world, DataKind::Write, block(chunk, 1000, 0), |_| ());
    }
    assert!(matches!(violation(&world), TwoViolation::TooManyReceives { lane: Some(LaneId(0)), .. }));
}

#[test]
fn credit_that_falls_is_ignored_and_credit_above_the_depth_ends_the_epoch() {
    let word = |count: u64| ((1u64 << 48) | count).to_le_bytes();
    for (at, depth) in [(0usize, 8u64), (1, 16), (2, 16), (3, 16)] {
        let mut world = world(11);
        let known = |world: &World| {
            let stats = world.nodes[0].channel.stats();
            match at {
                0 => (stats.control_known, stats.control_consumed),
                1 => (stats.request_known, stats.request_consumed),
                lane => (stats.lanes[lane - 2].known, stats.lanes[lane - 2].consumed),
            }
        };
        let before = known(&world);
        for count in [0, 1, before.0.saturating_sub(1)] {
            world.nodes[0].mem.set_credit(at, &word(count));
            let node = &mut world.nodes[0];
            node.channel.poll_credit(&node.mem);
            assert!(known(&world).0 >= before.0, "a grant never falls");
        }
        let consumed = known(&world).1;
        assert_goes_on(&world);
        world.nodes[0].mem.set_credit(at, &word(consumed + depth + 1));
        let node = &mut world.nodes[0];
        node.channel.poll_credit(&node.mem);
        world.take_events(0);
        assert!(matches!(violation(&world), TwoViolation::Credit { word, .. } if *word == at));
    }
}

#[test]
fn a_flood_of_credit_requests_drives_the_pool_to_the_peers_share_and_no_further() {
    let mut config = Config::default();
    config.pool.peer_slots = 6;
    let mut world = World::new(config, 12);
    world.hostile = true;
    world.settle();
    for n in 0..500u32 {
        let frame = Frame::CreditRequest {
            lane: LaneId((n % 2) as u8),
            want: u32::MAX,
            waiting_bytes: u64::MAX,
            oldest_wait_us: u64::MAX,
        };
        send_frame(&mut world, |header| header.seq += u64::from(n), &frame);
        if n % 50 == 0 {
            world.pass(2);
        }
        if world.nodes[0].ended.is_some() {
            panic!("{:?}", world.nodes[0].ended);
        }
    }
    let pool = world.nodes[0].pool.stats();
    assert!(pool.lent <= 6 && pool.slabs <= 3, "{pool:?}");
    assert!(world.nodes[0].channel.counters().credit_requests_ignored > 400);
}

#[test]
fn bookkeeping_for_a_peer_is_bounded_and_what_exceeds_it_is_refused() {
    let mut config = Config { first_recvs: 4, ..Config::default() };
    config.limits.inbox_bytes = 10_000;
    let mut world = World::new(config, 13);
    world.hostile = true;
    world.settle();
    for refused in 0..3 {
        let mut sent = 0;
        while world.nodes[0].channel.counters().refused_chunks == refused {
            // One chunk of each word, where they cost most.
            let (transfer, chunk) = (1 + refused, MAX_CHUNKS - 1 - 64 * sent);
            let block = Block { transfer, ..block(chunk, MAX_CHUNKS, 0) };
            send_data(&mut world, DataKind::Write, block, |_| ());
            sent += 1;
            assert!(world.nodes[0].channel.stats().inbox_bytes <= 10_000);
            assert!(sent < 1000, "nothing is refused");
        }
        assert!(sent > 200, "{sent} chunks are not much; what was refused is free again");
        assert_eq!(world.nodes[0].channel.counters().nacks_sent, 1 + refused);
    }
}

#[test]
fn bookkeeping_costs_what_was_sent_and_not_what_was_announced() {
    let mut world = world(15);
    let before = world.nodes[0].channel.stats().inbox_bytes;
    for transfer in 2..11 {
        let last = MAX_CHUNKS - 1;
        send_data(&mut world, DataKind::Write, Block { transfer, ..block(last, MAX_CHUNKS, 0) }, |_| ());
    }
    let grown = world.nodes[0].channel.stats().inbox_bytes - before;
    assert_eq!(world.nodes[0].channel.counters().refused_chunks, 0);
    assert!(grown <= 9 * 512, "nine short messages cost {grown} bytes");
    assert_goes_on(&world);
}

#[test]
fn a_read_with_too_many_chunks_is_refused_by_name() {
    let mut world = world(14);
    let pieces = [ReadPiece { region: RegionId(5), offset: 0, len: u64::MAX }];
    send_frame(&mut world, |_| (), &Frame::ReadReq { transfer: 2, first: 0, last: true, pieces: &pieces });
    let pieces = [ReadPiece { region: REGION, offset: 0, len: 1 << 20 }; 40];
    send_frame(
        &mut world,
        |h| h.seq += 1,
        &Frame::ReadReq { transfer: 3, first: 0, last: false, pieces: &pieces },
    );
    assert_eq!(world.nodes[0].channel.counters().nacks_sent, 1);
    assert_goes_on(&world);
}

#[test]
fn bytes_that_do_not_match_their_checksum_fail_the_transfer_and_are_not_placed() {
    let mut world = World::new(Config { data_crc: true, first_recvs: 4, ..Config::default() }, 15);
    world.hostile = true;
    world.settle();
    send_data(&mut world, DataKind::Write, Block { transfer: 1, ..block(0, 1, 100) }, |header| {
        header.data_crc = true
    });
    let counters = world.nodes[0].channel.counters();
    assert_eq!((counters.crc_errors, counters.nacks_sent), (1, 1));
    assert_eq!(world.nodes[0].mem.data(0, 500), [0; 500]);
    assert_goes_on(&world);
}

/// Changes bytes of something that crossed; with or without a right checksum.
fn mutate(rng: &mut Rng, index: usize, bytes: &mut Vec<u8>) {
    for _ in 0..1 + rng.below(3) {
        if bytes.is_empty() {
            return;
        }
        let head = if rng.below(2) == 0 { bytes.len().min(64) } else { bytes.len() };
        let at = rng.below(head as u64) as usize;
        match rng.below(5) {
            0 => bytes[at] ^= 1 << rng.below(8),
            1 => bytes[at] = rng.next() as u8,
            2 => bytes[at] = rng.pick(&[0, 1, 0x7F, 0x80, 0xFF]),
            3 => bytes.truncate(at),
            _ => bytes[at] = bytes[at].wrapping_add(1),
        }
    }
    let (at, header) = if index == 0 { (44, 48) } else { (60, 64) };
    if rng.below(8) > 0 && bytes.len() >= header {
        if index == 0 && rng.below(4) > 0 {
            let len = (bytes.len() - header) as u32;
            bytes[40..44].copy_from_slice(&len.to_le_bytes());
        }
        bytes[at..at + 4].fill(0);
        let table = if index > 0 && matches!(bytes[5], 4 | 5) { bytes[48] as usize * 40 } else { 0 };
        let end = if index == 0 { bytes.len() } else { (64 + table).min(bytes.len()) };
        let crc = crc32c::crc32c(&bytes[..end]);
        bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    }
}

/// Node 1 mixes changed copies of what it sent before into its traffic, and scribbles over node 0's credit page.
fn run(seed: u64, causes: &mut BTreeSet<String>) {
    let mut rng = Rng::new(seed);
    let config = Config {
        lanes: 1 + rng.below(3) as u8,
        first_recvs: rng.pick(&[1, 8]),
        data_crc: rng.below(2) == 0,
        ..Config::default()
    };
    let mut world = World::new(config, seed);
    world.hostile = true;
    let guard = 900_000;
    for n in [0, 1] {
        world.nodes[n].mem.limit.set(guard as u64);
        world.nodes[n].mem.set_data(guard, &pattern(n as u64, 10_000));
    }
    let mut token = 0;
    for _ in 0..30 {
        token += 1;
        let n = rng.below(2) as usize;
        let direction = rng.pick(&[Direction::Write, Direction::Read]);
        let at = 1000 * token as usize;
        let spans = [(at, at, 1 + rng.below(4000) as usize), (at + 5000, at + 5000, 100)];
        let now = world.now;
        let _ = world.nodes[n].channel.submit(now, token, direction, pieces(&spans), Some(b"hello"));
        let deadline = world.now.plus_ms(1000);
        let _ = world.nodes[n].channel.notify(token, &[7; 1500], Resolve::Taken, deadline);
        world.pump(n);
        if rng.below(4) == 0 {
            world.nodes[n].channel.cancel(rng.below(token + 1));
            world.pump(n);
        }
        for _ in 0..rng.below(60) {
            world.turn();
        }
        if rng.below(2) == 0 && !world.tap.is_empty() {
            let (index, mut bytes) = world.tap[rng.below(world.tap.len() as u64) as usize].clone();
            mutate(&mut rng, index, &mut bytes);
            bytes.truncate(1024);
            world.inject(1, index, &bytes);
        }
        if rng.below(6) == 0 {
            let word = rng.below(u64::from(world.config.lanes) + 2) as usize;
            let value =
                rng.pick(&[0, 1 << 48, (1 << 48) | 3, (1 << 48) | 1000, u64::MAX, rng.clone().next()]);
            world.nodes[0].mem.set_credit(word, &value.to_le_bytes());
        }
        if rng.below(6) == 0 {
            world.pass(10);
        }
        if let Some(TwoEnd::Violation(violation)) = &world.nodes[0].ended {
            let text = format!("{violation:?}");
            causes.insert(text.split([' ', '(']).next().unwrap_or_default().to_owned());
        }
        if world.nodes.iter().any(|node| node.ended.is_some()) {
            world.next_epoch();
        }
    }
    for _ in 0..3000 {
        world.turn();
    }
    let stats = world.nodes[0].channel.stats();
    assert!(stats.inbox_bytes < 1 << 20, "{stats:#?}");
    world.nodes[0].pool.audit();
    assert_eq!(
        world.nodes[0].mem.data(guard, 10_000),
        pattern(0, 10_000),
        "no byte where none was asked for"
    );
}

#[test]
fn changed_bytes_never_panic_and_never_land_elsewhere() {
    let seeds: Vec<u64> = match std::env::var("BATON_TEST_SEED") {
        Ok(seed) => vec![seed.parse().expect("BATON_TEST_SEED is a number")],
        Err(_) => {
            let count = std::env::var("BATON_TEST_SEEDS").map_or(300, |n| n.parse().expect("a number"));
            (0..count).collect()
        }
    };
    let (mut causes, all) = (BTreeSet::new(), seeds.len() > 1);
    for seed in seeds {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed, &mut causes))) {
            eprintln!("repeat with BATON_TEST_SEED={seed}");
            resume_unwind(panic);
        }
    }
    assert!(!all || causes.len() >= 8, "the changes reach the checks: {causes:?}");
}
