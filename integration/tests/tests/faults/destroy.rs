//! An engine destroyed in the middle of things.

use baton_host::abi::{BATON_OK, BatonStatus};
use baton_host::{Op, Transfer};
use baton_tests::{Block, Node, Remote};
use serde_json::json;

use crate::leaks::{Census, assert_no_engine_threads};
use crate::{PIECE, agent, assert_works, befriend, node, on_each_fabric, options};

const BYTES: usize = 16 << 20;

/// Destroys the engine as a host may that keeps raw handles: with requests posted, regions registered and the
/// hook set. What the safe handles would do afterwards must not happen any more.
fn destroy_now(node: Node, transfers: Vec<Transfer>, block: &mut Block, remote: Remote) -> BatonStatus {
    let (table, raw) = (node.engine.plugin().table(), node.engine.raw());
    // SAFETY: the last call on this engine: every handle of it is forgotten below.
    let answer = unsafe { (table.destroy)(raw) };
    transfers.into_iter().for_each(std::mem::forget);
    std::mem::forget(remote);
    block.forget_region();
    std::mem::forget(node);
    answer
}

on_each_fabric! {
    fn with_running_work_everything_ends_and_no_thread_or_descriptor_stays(fabric) {
        let mut b = agent("b", fabric);
        let there = b.block(BYTES, 2);
        let info = b.info();
        let mut before = None;
        let mut here = Block::unregistered(BYTES, 1);
        for round in 0..25 {
            let a = node("a", fabric);
            a.load("b", &info);
            here.register(&a.engine).expect("register");
            let remote = b.import_into(&a, &there);
            let create = |op| a.scattered(op, &here, &remote, PIECE).expect("create");
            let transfers: Vec<_> = (0..8).map(|i| create(if i % 2 == 0 { Op::Write } else { Op::Read })).collect();
            // In some rounds the session is there before, in others it is just being made.
            if round % 2 == 0 {
                a.run(&transfers[0], None);
            }
            for transfer in &transfers {
                transfer.post(Some(b"perhaps")).expect("post");
            }
            assert_eq!(destroy_now(a, transfers, &mut here, remote), BATON_OK, "round {round}");
            assert_no_engine_threads();
            if round == 4 {
                before = Some(Census::take());
            }
        }
        before.expect("taken").assert_flat("20 engines");
        let a = node("a", fabric);
        b.befriend(&a, "a");
        // What earlier engines may have notified before their end is not what this is about.
        b.ask(json!({ "do": "notify", "peer": "a", "message": "there?" }));
        a.expect_notification("b", b"there?");
    }

    fn while_its_peer_is_stopped_it_is_destroyed_in_bounded_time(fabric) {
        let mut b = agent("b", fabric);
        let there = b.block(BYTES, 2);
        let info = b.info();
        let new_node = |scale: &str| {
            let node = Node::with(options("a", fabric).param("timeout_scale", scale)).expect("open");
            node.load("b", &info);
            node
        };
        let mut here = Block::unregistered(BYTES, 1);
        let new_work = |a: &Node, here: &mut Block| {
            here.register(&a.engine).expect("register");
            let remote = Remote::import(a, "b", &there.blob, there.addr).expect("import");
            let transfer = a.scattered(Op::Write, here, &remote, PIECE).expect("create");
            (remote, transfer)
        };
        let connected = new_node("1");
        let (remote, transfer) = new_work(&connected, &mut here);
        connected.run(&transfer, None);
        b.stop();
        transfer.post(None).expect("post");
        assert_eq!(destroy_now(connected, vec![transfer], &mut here, remote), BATON_OK, "connected");
        assert_no_engine_threads();
        // The peer's kernel takes the connection, the peer itself says nothing; protocol deadlines are long.
        let connecting = new_node("100");
        let (remote, transfer) = new_work(&connecting, &mut here);
        transfer.post(None).expect("post");
        assert_eq!(destroy_now(connecting, vec![transfer], &mut here, remote), BATON_OK, "connecting");
        assert_no_engine_threads();
        b.resume();
        let a = node("a", fabric);
        b.befriend(&a, "a");
        assert_works(&a, "a", &mut b);
    }

    fn two_engines_that_write_to_each_other_are_destroyed_at_the_same_time(fabric) {
        let mut before = None;
        let (mut x, mut y) = (Block::unregistered(BYTES, 1), Block::unregistered(BYTES, 2));
        for round in 0..25 {
            let (a, b) = (node("a", fabric), node("b", fabric));
            befriend((&a, "a"), (&b, "b"));
            x.register(&a.engine).expect("register");
            y.register(&b.engine).expect("register");
            let import = |node: &Node, peer: &str, block: &Block| {
                let blob = block.region().export().expect("export");
                Remote::import(node, peer, &blob, block.region().addr()).expect("import")
            };
            let (to_b, to_a) = (import(&a, "b", &y), import(&b, "a", &x));
            let from_a = a.scattered(Op::Write, &x, &to_b, PIECE).expect("create");
            let from_b = b.scattered(Op::Write, &y, &to_a, PIECE).expect("create");
            from_a.post(Some(b"there")).expect("post");
            from_b.post(Some(b"back")).expect("post");
            if round % 2 == 0 {
                // They may disturb each other's end; both end.
                drop((a.finish(&from_a), b.finish(&from_b)));
            }
            let (of_a, of_b) = std::thread::scope(|scope| {
                let of_b = scope.spawn(|| destroy_now(b, vec![from_b], &mut y, to_a));
                let of_a = destroy_now(a, vec![from_a], &mut x, to_b);
                (of_a, of_b.join().expect("no panic"))
            });
            assert_eq!((of_a, of_b), (BATON_OK, BATON_OK), "round {round}");
            assert_no_engine_threads();
            if round == 4 {
                before = Some(Census::take());
            }
        }
        before.expect("taken").assert_flat("40 engines");
    }
}
