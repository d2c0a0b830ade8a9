//! Messages of which only the head is received: the rest goes where the channel says, or nowhere.

mod two_toy;

use baton_core::two_sided::codec::*;
use baton_core::two_sided::report::*;
use two_toy::*;

fn world(seed: u64) -> World {
    World::new(Config { heads: true, first_recvs: 4, ..Config::default() }, seed)
}

fn write(world: &mut World, token: u64, at: usize, len: usize) {
    world.nodes[0].mem.set_data(at, &pattern(token, len));
    world.submit(0, token, Direction::Write, &[(at, at, len)], None);
}

fn counters(world: &World, n: usize) -> TwoCounters {
    *world.nodes[n].channel.counters()
}

#[test]
fn writes_and_reads_go_from_the_message_to_their_place() {
    for gather in [false, true] {
        let config = Config { heads: true, gather, ..Config::default() };
        let mut world = World::new(config, 1);
        write(&mut world, 1, 1000, 50_000);
        world.nodes[0].mem.set_data(100_000, &pattern(2, 50_000));
        world.submit(1, 2, Direction::Read, &[(100_000, 100_000, 50_000)], None);
        world.settle();
        assert_eq!((world.result_of(0, 1), world.result_of(1, 2)), (Some(&Ok(())), Some(&Ok(()))));
        assert_eq!(world.nodes[1].mem.data(1000, 50_000), pattern(1, 50_000));
        assert_eq!(world.nodes[1].mem.data(100_000, 50_000), pattern(2, 50_000));
        let received = counters(&world, 1);
        assert!(received.heads_received >= 100 && received.rests_lost == 0, "{received:?}");
        world.audit();
    }
}

#[test]
fn small_blocks_in_one_message_come_whole() {
    let mut world = world(2);
    let spans: Vec<_> = (0..64).map(|n| (n * 300, n * 300, 150)).collect();
    world.nodes[0].mem.set_data(0, &pattern(3, 64 * 300));
    world.submit(0, 1, Direction::Write, &spans, None);
    world.settle();
    assert_eq!(world.result_of(0, 1), Some(&Ok(())));
    assert_eq!((counters(&world, 0).packs_sent > 0, counters(&world, 1).heads_received), (true, 0));
    world.audit();
}

#[test]
fn a_rest_whose_transfer_was_given_up_while_it_was_awaited_is_not_wanted_and_ends_nothing() {
    let mut world = world(3);
    world.settle();
    world.no_copies.push(1);
    write(&mut world, 1, 1000, 5000);
    world.settle();
    let ticket = world.nodes[1].copies.first().expect("a rest waits").ticket;
    assert!(world.nodes[1].channel.wants(&ticket));
    assert_ne!(world.nodes[0].channel.cancel(1), TwoCancel::NotFound);
    world.settle();
    assert!(!world.nodes[1].channel.wants(&ticket), "ABORT has come");
    world.no_copies.clear();
    world.settle();
    assert_eq!(world.result_of(0, 1), Some(&Err(XferFailure::Canceled)));
    assert_eq!(world.nodes[1].mem.data(1000, 5000), vec![0; 5000], "no late byte");
    assert!(counters(&world, 1).rests_lost > 0);
    write(&mut world, 2, 1000, 5000);
    world.settle();
    assert_eq!(world.result_of(0, 2), Some(&Ok(())));
    world.audit();
}

#[test]
fn a_read_that_was_given_up_wants_none_of_the_rests_that_still_come() {
    let mut world = world(4);
    world.settle();
    world.no_copies.push(0);
    world.nodes[1].mem.set_data(1000, &pattern(1, 5000));
    world.submit(0, 1, Direction::Read, &[(1000, 1000, 5000)], None);
    world.settle();
    let ticket = world.nodes[0].copies.first().expect("a rest waits").ticket;
    assert!(world.nodes[0].channel.wants(&ticket));
    assert_ne!(world.nodes[0].channel.cancel(1), TwoCancel::NotFound);
    assert!(!world.nodes[0].channel.wants(&ticket), "at once: nothing touches its memory any more");
    world.no_copies.clear();
    world.settle();
    assert_eq!(world.result_of(0, 1), Some(&Err(XferFailure::Canceled)));
    assert_eq!(world.nodes[0].mem.data(1000, 5000), vec![0; 5000], "no late byte");
    world.audit();
}

#[test]
fn chunks_whose_rest_went_down_with_their_epoch_are_sent_again() {
    for seed in 0..20 {
        let mut world = world(100 + seed);
        world.settle();
        world.no_copies.push(1);
        write(&mut world, 1, 1000, 9000);
        world.nodes[0].mem.set_data(100_000, &pattern(2, 9000));
        world.submit(1, 2, Direction::Read, &[(100_000, 100_000, 9000)], None);
        world.settle();
        assert!(world.nodes[1].copies.iter().any(|job| job.rest.is_some()));
        world.next_epoch();
        world.settle();
        assert_eq!((world.result_of(0, 1), world.result_of(1, 2)), (Some(&Ok(())), Some(&Ok(()))));
        assert_eq!(world.nodes[1].mem.data(1000, 9000), pattern(1, 9000));
        assert_eq!(world.nodes[1].mem.data(100_000, 9000), pattern(2, 9000));
        world.audit();
    }
}

#[test]
fn duplicates_and_stale_messages_with_a_head_go_nowhere_and_hold_nothing() {
    let mut world = world(5);
    write(&mut world, 1, 1000, 500);
    world.settle();
    world.hostile = true;
    let block = Block { transfer: 2, region: REGION, offset: 20, chunk: 0, total: 2, len: 100 };
    world.put(0, DataKind::Write, block, |_| ());
    world.settle();
    let there = world.nodes[1].mem.data(20, 100);
    world.put(0, DataKind::Write, block, |_| ());
    world.put(0, DataKind::Write, Block { offset: 5000, ..block }, |header| {
        header.epoch = baton_core::Epoch(9)
    });
    world.settle();
    let received = counters(&world, 1);
    assert_eq!(
        (received.duplicate_chunks, received.stale_epoch, received.rests_lost),
        (1, 1, 2),
        "{received:?}"
    );
    assert_eq!(world.nodes[1].mem.data(20, 100), there);
    assert_eq!(world.nodes[1].mem.data(5000, 100), vec![0; 100]);
    assert_eq!((world.nodes[1].ended.clone(), world.nodes[1].channel.copies()), (None, 0));
}

#[test]
fn a_head_that_does_not_tell_where_the_rest_goes_ends_the_epoch_and_nothing_is_placed() {
    let block = |kind| match kind {
        DataKind::Nop => Block::NONE,
        _ => Block { transfer: 2, region: REGION, offset: 20, chunk: 0, total: 1, len: 100 },
    };
    for (kind, head, crc) in [
        (DataKind::Write, 63, false),
        (DataKind::Write, 65, false),
        (DataKind::Write, 1, false),
        (DataKind::Write, 64, true),
    ] {
        let mut world = world(6);
        write(&mut world, 1, 1000, 500);
        world.settle();
        (world.hostile, world.false_heads) = (true, Some(head));
        world.put(0, kind, block(kind), |header| header.data_crc = crc);
        world.settle();
        match &world.nodes[1].ended {
            Some(TwoEnd::Violation(TwoViolation::Message {
                error: MessageError::Head { bytes }, ..
            })) => {
                assert_eq!(*bytes as usize, head);
            }
            other => panic!("{kind:?} {head}: {other:?}"),
        }
        assert_eq!(world.nodes[1].mem.data(20, 100), vec![0; 100]);
    }
}
