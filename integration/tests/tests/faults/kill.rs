//! kill −9 of either end in the middle of a transfer.

use baton_host::{ErrorCode, Op};
use baton_tests::{Agent, AgentBlock, Block, Node, Remote, wait_for};
use serde_json::json;

use crate::{LARGE, PIECE, agent, assert_works, is_gone, node, on_each_fabric};

struct Scene {
    a: Node,
    b: Agent,
    here: Block,
    there: AgentBlock,
    remote: Remote,
}

fn scene(fabric: &str) -> Scene {
    let (a, mut b) = (node("a", fabric), agent("b", fabric));
    b.befriend(&a, "a");
    let (here, there) = (Block::new(&a.engine, LARGE, 1).expect("register"), b.block(LARGE, 2));
    let remote = b.import_into(&a, &there);
    Scene { a, b, here, there, remote }
}

/// After the death of `b` and its event: what the owner puts into its memory stays, and another process of
/// that name works.
fn the_survivor_goes_on(a: &Node, here: &mut Block, fabric: &str) {
    here.fill(7);
    let mut next = agent("b", fabric);
    next.befriend(a, "a");
    assert_works(a, "a", &mut next);
    here.assert_holds(7, "after the new process's transfers");
    here.deregister().expect("deregister");
    assert_works(a, "a", &mut next);
    here.assert_holds(7, "after deregister");
    next.end();
}

fn the_target_dies(op: Op, fabric: &str) {
    let Scene { a, mut b, mut here, there, remote } = scene(fabric);
    let transfer = a.scattered(op, &here, &remote, PIECE).expect("create");
    a.run(&transfer, Some(b"whole"));
    match op {
        Op::Write => b.assert_holds(&there, 1, Some(PIECE), "after a whole WRITE"),
        Op::Read => here.assert_holds_reversed(2, PIECE, "after a whole READ"),
    }
    // Behind a small one that is done, the large one is under way.
    let first = [here.region().desc(0, 4096)];
    let there = [remote.region.desc(remote.addr, 4096)];
    let small = a.engine.create_xfer(op, "b", &first, &there).expect("create");
    small.post(None).expect("post");
    transfer.post(Some(b"never whole")).expect("post");
    a.finish(&small).expect("done");
    b.kill();
    let error = a.finish(&transfer).expect_err("its target is dead");
    assert_eq!(error.code, ErrorCode::RemoteDisconnect, "{error}");
    assert!(error.text.contains("b ("), "{error}");
    if op == Op::Write {
        here.assert_holds(1, "at the source");
    }
    // The error says that nothing touches the memory any more; the event comes later.
    here.fill(8);
    assert_eq!(a.next_failure().peer, "b");
    here.assert_holds(8, "after the error");
    the_survivor_goes_on(&a, &mut here, fabric);
    let again = transfer.post(None).and_then(|_| a.finish(&transfer)).expect_err("to a process that is gone");
    assert!(is_gone(again.code), "{again}");
}

fn the_initiator_dies(op: &str, fabric: &str) {
    let Scene { a, mut b, mut here, there, .. } = scene(fabric);
    let transfer = b.create(op, &there, "a", &here, PIECE);
    b.run(transfer, Some("whole")).expect("done");
    a.expect_notification("b", b"whole");
    if op == "write" {
        here.assert_holds_reversed(2, PIECE, "after a whole WRITE");
        here.fill(3);
    }
    b.hammer(op, &there, "a", &here, PIECE);
    if op == "write" {
        wait_for("its bytes", || here.touched(3, PIECE).then_some(()));
    } else {
        b.ask(json!({ "do": "stats" }));
    }
    b.kill();
    assert_eq!(a.next_failure().peer, "b");
    the_survivor_goes_on(&a, &mut here, fabric);
}

on_each_fabric! {
    fn a_target_killed_in_a_write_fails_it_and_the_survivor_goes_on(fabric) {
        the_target_dies(Op::Write, fabric);
    }

    fn a_target_killed_in_a_read_fails_it_and_the_survivor_goes_on(fabric) {
        the_target_dies(Op::Read, fabric);
    }

    fn an_initiator_killed_in_its_write_leaves_the_memory_alone(fabric) {
        the_initiator_dies("write", fabric);
    }

    fn an_initiator_killed_in_its_read_is_noticed_and_replaced(fabric) {
        the_initiator_dies("read", fabric);
    }

    fn a_post_to_a_dead_process_ends_with_an_error_and_new_metadata_mends_it(fabric) {
        let Scene { a, mut b, here, remote, .. } = scene(fabric);
        let transfer = a.scattered(Op::Write, &here, &remote, PIECE).expect("create");
        a.run(&transfer, None);
        b.kill();
        assert_eq!(a.next_failure().peer, "b");
        for _ in 0..2 {
            let error = transfer.post(None).and_then(|_| a.finish(&transfer)).expect_err("nobody is there");
            assert_eq!(error.code, ErrorCode::RemoteDisconnect, "{error}");
        }
        let mut next = agent("b", fabric);
        next.befriend(&a, "a");
        assert_works(&a, "a", &mut next);
    }

    fn ten_processes_of_one_name_are_killed_and_replaced_in_turn(fabric) {
        let a = node("a", fabric);
        for _ in 0..10 {
            let mut b = agent("b", fabric);
            b.befriend(&a, "a");
            assert_works(&a, "a", &mut b);
            b.kill();
            assert_eq!(a.next_failure().peer, "b");
        }
        let stats = a.stats();
        let known = stats["peers"].as_array().map(Vec::len);
        assert!(known.is_some_and(|n| n <= 2), "the dead are remembered for ever: {stats}");
    }
}

#[test]
fn with_every_fabric_enabled_a_killed_target_is_replaced() {
    crate::alone("faults::kill::with_every_fabric_enabled_a_killed_target_is_replaced", || {
        the_target_dies(Op::Read, "auto");
        the_initiator_dies("write", "auto");
    });
}
