//! Behaviour of two two-sided channels joined by the toy fabric.

mod two_toy;

use baton_core::two_sided::codec::Direction;
use baton_core::two_sided::notes::Resolve;
use two_toy::*;

fn write(world: &mut World, token: u64, at: usize, len: usize, message: Option<&[u8]>) {
    world.nodes[0].mem.set_data(at, &pattern(token, len));
    world.submit(0, token, Direction::Write, &[(at, at, len)], message);
}

fn assert_moved(world: &World, token: u64, at: usize, len: usize) {
    assert_eq!(world.result_of(0, token), Some(&Ok(())));
    assert_eq!(world.nodes[1].mem.data(at, len), pattern(token, len));
    assert_eq!(world.nodes[1].mem.data(at - 64, 64), [0; 64], "sentinel before");
    assert_eq!(world.nodes[1].mem.data(at + len, 64), [0; 64], "sentinel behind");
}

#[test]
fn a_small_write_arrives_and_its_message_after_it() {
    let mut world = World::new(Config::default(), 1);
    write(&mut world, 7, 4096, 1000, Some(b"done"));
    while world.nodes[1].delivered.is_empty() {
        assert!(
            world.step() || {
                world.settle();
                true
            }
        );
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
