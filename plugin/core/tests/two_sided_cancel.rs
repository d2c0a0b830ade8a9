//! Transfers that the host gives up: what is reported, and what still happens to memory and messages.

mod two_toy;

use baton_core::two_sided::codec::Direction;
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::report::{TwoCancel, TwoEnd, XferFailure};
use two_toy::writes::write;
use two_toy::*;

#[test]
fn after_a_cancel_is_reported_no_late_byte_lands() {
    for seed in 0..40 {
        let mut world = World::new(Config::default(), 100 + seed);
        write(&mut world, 1, 1000, 60_000, Some(b"never"));
        for _ in 0..30 + seed * 5 {
            world.step();
        }
        // Copies at the peer stand still: the report has to wait for them.
        world.no_copies.push(1);
        let outcome = world.nodes[0].channel.cancel(1);
        world.pump(0);
        world.settle();
        if !world.nodes[1].copies.is_empty() {
            assert_eq!(world.nodes[0].done, [], "a copy may still land");
        }
        world.no_copies.clear();
        while world.nodes[0].done.is_empty() {
            assert!(world.turn());
        }
        assert_eq!(world.result_of(0, 1), Some(&Err(XferFailure::Canceled)), "{outcome:?}");
        world.nodes[1].mem.set_data(1000, &[0; 60_000]);
        world.settle();
        assert_eq!(world.nodes[1].mem.data(0, 70_000), [0; 70_000], "the host used its memory again");
        assert!(world.nodes[1].delivered.is_empty());
        world.audit();
    }
}

#[test]
fn a_message_that_was_taken_back_is_not_waited_for_when_the_bytes_are_acknowledged_once_more() {
    const LEN: usize = 5000;
    let mut config = Config { lanes: 1, first_recvs: 8, ..Config::default() };
    config.pool.slab_slots = 16;
    let mut world = World::new(config, 1);
    // All of it arrives, and that is lost with the epoch: in the next one each of its chunks is acknowledged. Its notification
    // has to wait behind others.
    world.frozen.extend([(0, 0), (1, 0)]);
    for n in 0..20u8 {
        world.notify(0, u64::from(n), &[n; 900], Resolve::Sent);
    }
    write(&mut world, 1, 1000, LEN, Some(b"never"));
    world.settle();
    assert_eq!(world.nodes[1].placed, LEN as u64);
    world.frozen.clear();
    world.next_epoch();
    // Of its messages one is executed.
    world.frozen.extend([(0, 0), (0, 1)]);
    world.execute(0, 1);
    world.settle();
    assert_eq!(world.nodes[0].channel.cancel(1), TwoCancel::Canceled, "its message was taken back");
    world.pump(0);
    world.execute(0, 1);
    world.settle();
    assert_eq!(world.nodes[0].done, [], "its memory is still read");
    world.frozen.clear();
    world.settle();
    assert_eq!(world.result_of(0, 1), Some(&Err(XferFailure::Canceled)));
    assert_eq!(world.nodes[1].delivered, (0..20u8).map(|n| vec![n; 900]).collect::<Vec<_>>());
    assert_eq!(world.nodes[1].mem.data(1000, LEN), pattern(1, LEN));
    world.audit();
}

#[test]
fn transfers_that_are_failed_between_two_epochs_leave_nothing_behind_although_only_their_messages_were_missing()
 {
    let mut config = Config::default();
    config.limits.unpopped_bytes = 1_000;
    let mut world = World::new(config, 56);
    world.nodes[1].popped_by_itself = false;
    // The window is full, so the messages of all that follows wait.
    (100..120).for_each(|token| world.notify(0, token, &[1; 1000], Resolve::Taken));
    world.settle();
    write(&mut world, 1, 1000, 3000, Some(b"written"));
    world.submit(0, 2, Direction::Read, &[(8000, 8000, 3000)], Some(b"read"));
    world.submit(0, 3, Direction::Write, &[], Some(b"nothing"));
    write(&mut world, 4, 20_000, 3000, None);
    world.settle();
    assert_eq!(world.nodes[1].mem.data(1000, 3000), pattern(1, 3000));
    assert_eq!(world.nodes[0].done, [(4, Ok(()))]);
    let end = TwoEnd::Closed("no session in time".into());
    let mut failed = Vec::new();
    world.next_epoch_after(|n, durable| {
        if n == 0 {
            failed = durable.fail_transfers(&end);
        }
    });
    failed.sort_by_key(|(token, _)| *token);
    assert_eq!(failed, [1, 2, 3].map(|token| (token, XferFailure::Ended(end.clone()))));
    for popped in 0..20 {
        world.settle();
        assert!(popped < world.nodes[1].delivered.len(), "the rest follows");
        world.nodes[1].channel.on_popped(1, 1000);
    }
    world.settle();
    assert_eq!(world.nodes[1].delivered, vec![vec![1; 1000]; 20], "no message of those that have failed");
    assert_eq!((world.nodes[0].notes.len(), world.nodes[0].done.len()), (20, 1));
    // Whatever were still known of them would be remembered at the peer.
    world.audit();
}

#[test]
fn a_transfer_that_was_given_up_and_failed_between_two_epochs_is_over_although_the_peer_has_all_of_it() {
    let mut world = World::new(Config::default(), 57);
    world.settle();
    // What the peer answers is lost with the epoch.
    world.frozen.push((1, 0));
    write(&mut world, 1, 1000, 1500, Some(b"told"));
    world.settle();
    assert_eq!(world.nodes[1].delivered, [b"told".to_vec()]);
    assert_eq!(world.nodes[0].channel.cancel(1), TwoCancel::Draining);
    world.settle();
    let mut failed = Vec::new();
    world.next_epoch_after(|n, durable| {
        if n == 0 {
            failed = durable.fail_transfers(&TwoEnd::Closed("no session in time".into()));
        }
    });
    assert_eq!(failed, [(1, XferFailure::Canceled)]);
    world.settle();
    assert_eq!((world.nodes[0].done.len(), world.nodes[1].delivered.len()), (0, 1));
    world.audit();
}
