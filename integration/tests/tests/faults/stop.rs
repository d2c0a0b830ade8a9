//! A process that is stopped, or that is dead but whose child keeps its sockets open, says nothing at all: the PING
//! rule finds it.

use baton_host::{ErrorCode, Op, Status};
use baton_tests::{Block, WATCHDOG, wait_for};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use std::time::Instant;

use crate::{LARGE, PIECE, agent, assert_works, node, on_each_fabric};

/// Killed when dropped.
struct Orphan(Pid);

impl Drop for Orphan {
    fn drop(&mut self) {
        // It is there until now: nobody else ends it.
        let _ = kill_process(self.0, Signal::KILL);
    }
}

on_each_fabric! {
    fn a_stopped_target_ends_the_session_and_after_it_goes_on_no_late_byte_lands(fabric) {
        let (a, mut b) = (node("a", fabric), agent("b", fabric));
        b.befriend(&a, "a");
        let (here, there) = (Block::new(&a.engine, LARGE, 1).expect("register"), b.block(LARGE, 2));
        let remote = b.import_into(&a, &there);
        let mine = Block::new(&a.engine, LARGE, 3).expect("register");
        let (write, read) = (
            a.scattered(Op::Write, &here, &remote, PIECE).expect("create"),
            a.scattered(Op::Read, &mine, &remote, PIECE).expect("create"),
        );
        a.run(&write, None);
        write.post(Some(b"never whole")).expect("post");
        read.post(None).expect("post");
        b.stop();
        for transfer in [&write, &read] {
            // One of them may have been through already.
            if let Err(error) = a.finish(transfer) {
                assert_eq!(error.code, ErrorCode::RemoteDisconnect, "{error}");
            }
        }
        assert_eq!(a.next_failure().peer, "b");
        here.fill(4);
        mine.fill(5);
        b.resume();
        assert_eq!(b.ask(json!({ "do": "failure" }))["peer"], "a");
        b.ask(json!({ "do": "fill", "block": there.number, "seed": 6 }));
        b.ask(json!({ "do": "stats" }));
        here.assert_holds(4, "here, after the peer went on");
        mine.assert_holds(5, "here, after the peer went on");
        b.assert_holds(&there, 6, None, "after it went on");

        // The instances are the same, so the same requests work in a new epoch.
        a.run(&write, Some(b"whole"));
        let mut heard = Vec::new();
        while heard.last() != Some(&json!(["a", "whole"])) {
            heard.extend(b.ask(json!({ "do": "heard" })).as_array().cloned().unwrap_or_default());
        }
        // Whether a transfer that failed has notified is open.
        assert!(heard.len() == 1 || heard[..1] == [json!(["a", "never whole"])] && heard.len() == 2, "{heard:?}");
        b.assert_holds(&there, 4, Some(PIECE), "after the repost");
        a.run(&read, None);
        mine.assert_holds(4, "after the repost, reversed twice");
        assert_works(&a, "a", &mut b);
    }

    fn a_stopped_target_is_found_out_while_it_is_read_from(fabric) {
        let (a, mut b) = (node("a", fabric), agent("b", fabric));
        b.befriend(&a, "a");
        let (mine, there) = (Block::new(&a.engine, PIECE, 1).expect("register"), b.block(PIECE, 2));
        let read = a.scattered(Op::Read, &mine, &b.import_into(&a, &there), PIECE).expect("create");
        a.run(&read, None);
        b.stop();
        let give_up = Instant::now() + WATCHDOG;
        // Where the kernel reads for us, all of them succeed until the peer is given up.
        let error = loop {
            if let Err(error) = read.post(None).and_then(|_| a.finish(&read)) {
                break error;
            }
            assert!(Instant::now() < give_up, "{}", a.stats());
        };
        assert_eq!(error.code, ErrorCode::RemoteDisconnect, "{error}");
        assert_eq!(a.next_failure().peer, "b");
        b.resume();
        // A try to connect that began while it was stopped may have yet to end.
        wait_for("a session with it", || matches!(a.engine.connect("b", WATCHDOG), Ok(Status::Done)).then_some(()));
        assert_works(&a, "a", &mut b);
    }

    fn a_stopped_initiator_is_found_out_and_may_connect_anew(fabric) {
        let (a, mut b) = (node("a", fabric), agent("b", fabric));
        b.befriend(&a, "a");
        let (here, there) = (Block::new(&a.engine, LARGE, 1).expect("register"), b.block(LARGE, 2));
        let transfers: Vec<_> = (0..4).map(|_| b.create("write", &there, "a", &here, PIECE)).collect();
        b.run(transfers[0], None).expect("done");
        for transfer in &transfers {
            b.post(*transfer, None).expect("post");
        }
        b.stop();
        assert_eq!(a.next_failure().peer, "b");
        here.fill(4);
        b.resume();
        assert_eq!(b.ask(json!({ "do": "failure" }))["peer"], "a");
        for transfer in &transfers {
            // What its target had placed before is done.
            if let Err((code, text)) = b.finish(*transfer) {
                assert_eq!(code, ErrorCode::RemoteDisconnect, "{text}");
            }
        }
        here.assert_holds(4, "after the stopped process went on");
        b.run(transfers[0], Some("anew")).expect("a new epoch");
        a.expect_notification("b", b"anew");
        here.assert_holds_reversed(2, PIECE, "after the repost");
        assert_works(&a, "a", &mut b);
    }

    fn deregistering_beside_a_stopped_peer_is_bounded_and_leaves_the_memory_quiet(fabric) {
        let (a, mut b) = (node("a", fabric), agent("b", fabric));
        b.befriend(&a, "a");
        let (mut here, there) = (Block::new(&a.engine, LARGE, 1).expect("register"), b.block(LARGE, 2));
        let transfer = b.create("write", &there, "a", &here, PIECE);
        b.run(transfer, None).expect("done");
        b.hammer("write", &there, "a", &here, PIECE);
        b.stop();
        here.deregister().expect("deregister");
        here.fill(4);
        b.resume();
        let (code, text) = b.hammered();
        assert!(crate::is_gone(code), "{code}: {text}");
        here.assert_holds(4, "after deregister");
        assert_works(&a, "a", &mut b);
    }

    fn a_dead_peer_whose_child_keeps_its_sockets_open_is_found_out(fabric) {
        let (a, mut b) = (node("a", fabric), agent("b", fabric));
        b.befriend(&a, "a");
        let (here, there) = (Block::new(&a.engine, LARGE, 1).expect("register"), b.block(LARGE, 2));
        let remote = b.import_into(&a, &there);
        let write = a.scattered(Op::Write, &here, &remote, PIECE).expect("create");
        a.run(&write, None);
        let child = b.ask(json!({ "do": "fork" })).as_i64().and_then(|pid| Pid::from_raw(pid as i32));
        let _orphan = Orphan(child.expect("a process"));
        write.post(None).expect("post");
        b.kill();
        match a.finish(&write) {
            Ok(()) => {}
            Err(error) => assert_eq!(error.code, ErrorCode::RemoteDisconnect, "{error}"),
        }
        assert_eq!(a.next_failure().peer, "b");
        let mut next = agent("b", fabric);
        next.befriend(&a, "a");
        assert_works(&a, "a", &mut next);
    }
}
