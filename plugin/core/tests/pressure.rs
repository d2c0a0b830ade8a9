//! Send queues far smaller than the work, and what is left of their room after trouble.

mod toy;

use baton_core::peer::*;
use baton_fabric::Op;
use std::collections::HashSet;
use toy::nics::write;
use toy::{Config, Rng, World, pattern};

/// A queue of ten, slices of at most two, transfers of four and more.
fn narrow(lanes: u8) -> Config {
    Config { lanes, sq: 10, rq: 6, max_chunk: 64, stripe_min: 256, ..Config::default() }
}

/// At rest nothing is left in the queue of any lane of the present epoch, whatever became of the transfers.
fn assert_room(world: &World) {
    for (n, node) in world.nodes.iter().enumerate() {
        for lane in &node.session.stats().endpoints[1..] {
            assert_eq!(
                lane.posted, lane.retired,
                "node {n}, {}: work requests that nobody retires",
                lane.name
            );
        }
    }
}

#[test]
fn batches_of_four_in_queues_of_ten_all_arrive_and_give_their_room_back() {
    for lanes in [1, 2, 3] {
        let mut world = World::new(narrow(lanes), u64::from(lanes));
        for token in 0..200u64 {
            let message = (token % 3 != 0).then_some(&b"m"[..]);
            write(&mut world, token, token as usize * 512, 256, message);
        }
        assert!(world.nodes[0].done.is_empty(), "pressure is not an error");
        world.settle();
        for token in 0..200u64 {
            assert_eq!(world.result_of(0, token), Some(&Ok(())));
            assert_eq!(world.nodes[1].mem.data(token as usize * 512, 256), pattern(token, 256));
        }
        assert_eq!(world.nodes[1].delivered.len(), 133);
        assert_room(&world);
        world.audit();
    }
}

#[test]
fn a_transfer_that_waits_for_one_lane_holds_no_room_in_another() {
    let mut world = World::new(narrow(2), 4);
    // Lane 1 stands still and fills up; what needs both waits for it.
    world.frozen.push((0, 2));
    for token in 0..20u64 {
        write(&mut world, token, token as usize * 2048, 1024, Some(b"both lanes"));
    }
    world.settle();
    let lanes = world.nodes[0].session.stats();
    assert_eq!(lanes.endpoints[1].posted, lanes.endpoints[1].retired, "nothing sits in the lane that moves");
    assert!(world.nodes[0].done.is_empty());
    // One that needs the moving lane alone passes all of them.
    let passed = (100..130u64).filter(|token| {
        write(&mut world, *token, 100_000 + (*token as usize - 100) * 512, 64, None);
        world.settle();
        world.result_of(0, *token) == Some(&Ok(()))
    });
    assert!(passed.count() >= 10, "half of the small ones are on that lane");
    world.frozen.clear();
    world.settle();
    assert!((0..20).all(|token| world.result_of(0, token) == Some(&Ok(()))));
    assert_room(&world);
    world.audit();
}

/// Transfers, cancels, refusals, batches cut short, descriptors that the peer refuses: a new epoch after each end.
fn trouble(seed: u64) {
    let mut rng = Rng::new(seed);
    let mut world = World::new(narrow(rng.pick(&[1, 2, 3])), seed);
    let reused = world.prepare(Op::Write, &[(0, 0, 512), (1024, 1024, 512)]);
    let mut submitted = HashSet::new();
    let mut token = 0u64;
    let long = vec![0; world.nodes[0].session.message_limit() + 1];
    for _ in 0..40 {
        for _ in 0..rng.below(6) {
            token += 1;
            let message = rng.pick(&[None, Some(&b"m"[..])]);
            let work = match rng.below(8) {
                0 => {
                    let beyond = world.config.data_bytes - 100;
                    world.prepare(Op::Write, &[(0, 0, 128), (4096, beyond, 256)])
                }
                1 | 2 => reused.clone(),
                3 => world.prepare(Op::Read, &[(8192, 8192, 700)]),
                _ => world.prepare(Op::Write, &[(8192, 8192, 1 + rng.below(2000) as usize)]),
            };
            if rng.below(12) == 0 {
                world.nodes[0].refuse_after = Some(rng.below(3) as usize);
            }
            let (session, now) = (&mut world.nodes[0].session, world.now);
            if let Err(refused) = session.submit(now, u64::MAX, work.clone(), Some(&long)) {
                assert!(matches!(refused, SubmitError::MessageTooLong { .. } | SubmitError::Ended));
            }
            if world.nodes[0].session.submit(now, token, work, message).is_ok() {
                submitted.insert(token);
            }
            world.pump(0);
            if rng.below(3) == 0 {
                let _ = world.nodes[0].session.cancel(token - rng.below(3).min(token - 1));
                world.pump(0);
            }
        }
        for _ in 0..rng.below(200) {
            world.step();
        }
        if world.nodes.iter().any(|node| node.ended.is_some()) {
            world.fence_and_drain();
            let closed = world.next_epoch();
            for (failed, _) in &closed[0].failed {
                assert!(submitted.remove(failed), "{failed} is told once");
            }
        }
    }
    world.settle();
    if world.nodes.iter().any(|node| node.ended.is_some()) {
        world.fence_and_drain();
        let closed = world.next_epoch();
        for (failed, _) in &closed[0].failed {
            assert!(submitted.remove(failed), "{failed} is told once");
        }
    }
    for (done, _) in &world.nodes[0].done {
        assert!(submitted.remove(done), "{done} is told once");
    }
    assert!(submitted.is_empty(), "never told: {submitted:?}");
    assert_room(&world);
    // What was prepared before all that works.
    world.nodes[0].refuse_after = None;
    world.nodes[0].mem.set_data(0, &pattern(seed, 1536));
    world.submit(0, u64::MAX - 1, reused, Some(b"again"));
    world.settle();
    assert_eq!(world.result_of(0, u64::MAX - 1), Some(&Ok(())));
    let (sent, there) = (pattern(seed, 1536), world.nodes[1].mem.data(0, 1536));
    assert_eq!((&there[..512], &there[1024..]), (&sent[..512], &sent[1024..]));
    assert_room(&world);
    world.audit();
}

#[test]
fn after_any_mix_of_failures_all_room_is_back_and_the_next_post_works() {
    for seed in 1..150 {
        trouble(seed);
    }
}
