//! What a sender keeps for a peer that does not take it, and when it takes no more from its host.

mod two_toy;

use baton_core::Nanos;
use baton_core::two_sided::codec::Direction;
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::report::TwoSubmitError;
use two_toy::writes::assert_moved;
use two_toy::*;

fn notify(world: &mut World, token: u64, len: usize, deadline: Nanos) -> Result<(), TwoSubmitError> {
    let message = pattern(token, len);
    let outcome = world.nodes[0].channel.notify(token, &message, Resolve::Taken, deadline);
    world.pump(0);
    outcome
}

#[test]
fn notifications_beyond_the_limit_of_bytes_are_refused_until_the_peer_has_taken_some() {
    let mut config = Config::default();
    config.limits.max_notification_bytes = 10_000;
    let mut world = World::new(config, 1);
    world.frozen.push((0, 0));
    for round in 0..3 {
        // The one that reaches the limit is still taken.
        for n in 0..3 {
            assert_eq!(notify(&mut world, 10 * round + n, 4096, Nanos(u64::MAX)), Ok(()));
        }
        let refused = notify(&mut world, 10 * round + 3, 1, Nanos(u64::MAX));
        let expected = TwoSubmitError::TooManyBytes { what: "notifications", bytes: 12_288, limit: 10_000 };
        assert_eq!(refused, Err(expected));
        world.frozen.clear();
        world.settle();
        world.frozen.push((0, 0));
        let expected: Vec<_> = (0..3).map(|n| pattern(10 * round + n, 4096)).collect();
        assert_eq!(std::mem::take(&mut world.nodes[1].delivered), expected);
    }
    world.frozen.clear();
    world.audit();
}

#[test]
fn what_expires_and_what_ends_with_its_epoch_leaves_the_account() {
    let mut config = Config { control_sq: 10, ..Config::default() };
    config.limits.max_notification_bytes = 10_000;
    let mut world = World::new(config, 1);
    world.frozen.push((0, 0));
    // The first is begun and stays; the others are not sent in time, in whatever order their deadlines are.
    let after = |ms| START.plus_ms(ms);
    for (token, ms) in [(0, 50), (1, 70), (2, 20)] {
        assert_eq!(notify(&mut world, token, 4096, after(ms)), Ok(()));
    }
    assert!(notify(&mut world, 3, 1, after(90)).is_err());
    world.pass(30);
    assert_eq!(world.nodes[0].notes, [(2, false)], "the one whose deadline was first");
    assert_eq!(notify(&mut world, 4, 4096, after(1000)), Ok(()), "its bytes are free");
    world.pass(60);
    assert_eq!(world.nodes[0].notes, [(2, false), (1, false)]);
    world.frozen.clear();
    world.next_epoch();
    world.settle();
    assert_eq!(world.nodes[1].delivered, [pattern(0, 4096), pattern(4, 4096)]);
    for token in 10..13 {
        assert_eq!(notify(&mut world, token, 4096, Nanos(u64::MAX)), Ok(()), "nothing is left on it");
    }
    world.settle();
    world.audit();
}

#[test]
fn a_notification_whose_first_pieces_were_lost_with_their_epoch_expires_at_its_deadline() {
    let mut world = World::new(Config { control_sq: 10, ..Config::default() }, 1);
    // Credit for eight frames: the opening, the four of the first, and the beginning of the second.
    world.frozen.push((1, 0));
    assert_eq!(notify(&mut world, 0, 3500, Nanos(u64::MAX)), Ok(()));
    assert_eq!(notify(&mut world, 1, 3500, START.plus_ms(100)), Ok(()));
    assert_eq!(notify(&mut world, 2, 10, START.plus_ms(20)), Ok(()));
    // The look at what expires here passes over the one that is begun.
    world.pass(30);
    assert_eq!(world.nodes[0].notes, [(2, false)]);
    // In the next epoch the first goes again and takes all the room.
    world.next_epoch();
    world.frozen = vec![(0, 0), (1, 0)];
    world.pass(200);
    assert_eq!(world.nodes[0].notes, [(2, false), (1, false)]);
    world.frozen.clear();
    world.settle();
    assert_eq!(world.nodes[0].notes, [(2, false), (1, false), (0, true)]);
    assert_eq!(world.nodes[1].delivered, [pattern(0, 3500)]);
    world.audit();
}

#[test]
fn messages_of_transfers_are_bounded_as_well_and_a_single_one_always_goes() {
    let mut config = Config::default();
    config.limits.max_message_bytes = 3000;
    let mut world = World::new(config, 1);
    let submit = |world: &mut World, token: u64, message: Option<&[u8]>| {
        let at = 1000 + token as usize * 3000;
        world.nodes[0].mem.set_data(at, &pattern(token, 500));
        let outcome = world.nodes[0].channel.submit(
            world.now,
            token,
            Direction::Write,
            pieces(&[(at, at, 500)]),
            message,
        );
        world.pump(0);
        outcome
    };
    world.no_copies.push(1);
    let big = pattern(9, 4096);
    assert_eq!(submit(&mut world, 0, Some(&big)), Ok(()), "alone it may be longer than all together");
    let expected = TwoSubmitError::TooManyBytes { what: "messages of transfers", bytes: 4096, limit: 3000 };
    assert_eq!(submit(&mut world, 1, Some(b"one more")), Err(expected));
    assert_eq!(submit(&mut world, 2, None), Ok(()), "without a message it goes");
    world.no_copies.clear();
    world.settle();
    assert_eq!(submit(&mut world, 1, Some(b"one more")), Ok(()));
    world.settle();
    for token in 0..3 {
        assert_moved(&world, token, 1000 + token as usize * 3000, 500);
    }
    assert_eq!(world.nodes[1].delivered, [big, b"one more".to_vec()]);
    world.audit();
}
