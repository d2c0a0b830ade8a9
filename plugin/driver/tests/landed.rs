//! The view by transfer ids: what was posted with an id has landed at the other side, said once.

mod common;

use baton_driver::{Code, Driver, Status, Tell};
use baton_fabric::Op;
use common::*;
use std::time::Instant;

/// Waits until a transfer has landed.
fn landed(engine: &Driver, peer: &str, id: u64) {
    let deadline = Instant::now() + WATCHDOG;
    while !engine.inbound_status(peer, id).expect("inbound status") {
        assert!(Instant::now() < deadline, "transfer {id} of {peer} has not landed: {}", engine.stats());
        std::thread::yield_now();
    }
}

fn stat(engine: &Driver, name: &str) -> u64 {
    let stats: serde_json::Value = serde_json::from_str(&engine.stats()).expect("json");
    stats[name].as_u64().or(stats["counters"][name].as_u64()).expect("a number")
}

const FABRICS: [&str; 9] = [
    "local",
    "local send",
    "tcp",
    "tcp send",
    "verbs",
    "verbs send",
    "verbs rails",
    "verbs meagre",
    "verbs meagre send",
];

#[test]
fn a_transfer_with_an_id_has_landed_when_its_target_is_told_so_on_every_fabric() {
    for fabric in FABRICS {
        let (a, b) = pair(&[fabric]);
        let (source, target) = (Buffer::new(&a, 64 * 1024, 1), Buffer::new(&b, 64 * 1024, 2));
        let imported = import(&a, "b", &b, &target);
        assert!(!b.inbound_status("a", 7).expect("not yet"), "nothing was posted");
        let write = scattered(&a, Op::Write, "b", &source, &target, imported, 4096);
        a.post_telling(&write, Tell { message: None, id: Some(7) }).expect("post");
        landed(&b, "a", 7);
        assert_eq!(target.read(), reversed(&source.read(), 4096), "{fabric}");
        assert!(
            !b.inbound_status("a", 7).expect("asked again"),
            "{fabric}: an id is forgotten once it was read"
        );
        done(&a, &write);

        let read = scattered(&a, Op::Read, "b", &source, &target, imported, 4096);
        a.post_telling(&read, Tell { message: Some(b"with it"), id: Some(0) }).expect("post");
        assert_eq!(notification(&b).message, b"with it");
        assert!(b.inbound_status("a", 0).expect("asked"), "{fabric}: the id is there with its message");
        done(&a, &read);

        let nothing = a
            .create_xfer(Op::Write, "b", &[source.desc(0, 0, source.region)], &[target.desc(0, 0, imported)])
            .expect("create");
        a.post_telling(&nothing, Tell { message: None, id: Some(u64::MAX) }).expect("post");
        landed(&b, "a", u64::MAX);
        done(&a, &nothing);
        // The same id twice before anybody asks: it has landed twice.
        for _ in 0..2 {
            a.post_telling(&write, Tell { message: None, id: Some(7) }).expect("post");
            done(&a, &write);
        }
        landed(&b, "a", 7);
        landed(&b, "a", 7);
        assert!(!b.inbound_status("a", 7).expect("asked"));
        assert!(b.take_notifications(usize::MAX).expect("take").is_empty(), "{fabric}: no message was sent");
        assert_eq!(stat(&b, "ids_unread"), 0);
        target.assert_guards();
        source.assert_guards();
    }
}

#[test]
fn ids_that_nobody_reads_hold_the_sender_back_and_reading_lets_it_go_on() {
    const POSTS: u64 = 17_500;
    let (a, b) = pair(&["local"]);
    let (source, target) = (Buffer::new(&a, 64, 1), Buffer::new(&b, 64, 2));
    let xfer = scattered(&a, Op::Write, "b", &source, &target, import(&a, "b", &b, &target), 64);
    let mut posted = 0;
    let stalled = 'posts: loop {
        a.post_telling(&xfer, Tell { message: None, id: Some(posted) }).expect("post");
        posted += 1;
        let deadline = Instant::now() + WATCHDOG;
        while matches!(a.status(&xfer), Status::InProgress) {
            // It stays in progress once the receiver withholds credit.
            if stat(&b, "ids_unread") >= 16_384 && waits(&a) {
                break 'posts true;
            }
            assert!(Instant::now() < deadline, "{}", a.stats());
        }
        if posted == POSTS {
            break false;
        }
    };
    assert!(stalled, "{posted} ids were taken and none read");
    let unread = stat(&b, "ids_unread");
    assert!(unread < POSTS, "{unread}");
    for id in 0..unread {
        assert!(b.inbound_status("a", id).expect("asked"), "{id} has landed");
    }
    done(&a, &xfer);
    landed(&b, "a", posted - 1);
}

fn waits(engine: &Driver) -> bool {
    let stats: serde_json::Value = serde_json::from_str(&engine.stats()).expect("json");
    let waiters = &stats["peers"][0]["session"]["protocol"]["waiters"];
    waiters.as_array().is_some_and(|all| all.iter().any(|one| one.to_string().contains("consumed of")))
}

#[test]
fn nothing_of_an_instance_is_left_for_another_of_its_name() {
    // Once with the connection information of both loaded, once by an engine that has loaded none.
    for knows in [true, false] {
        let b = engine("b", &["tcp"]);
        let target = Buffer::new(&b, 4096, 2);
        let send = |round: u8, id| {
            let a = engine("a", &["tcp"]);
            if knows {
                b.load_remote(Some("a"), a.conn_info()).expect("load a");
            }
            a.load_remote(Some("b"), b.conn_info()).expect("load b");
            let source = Buffer::new(&a, 4096, round);
            let xfer = scattered(&a, Op::Write, "b", &source, &target, import(&a, "b", &b, &target), 4096);
            a.post_telling(&xfer, Tell { message: None, id: Some(id) }).expect("post");
            done(&a, &xfer);
            (a, source)
        };
        let first = send(1, 5);
        let deadline = Instant::now() + WATCHDOG;
        while stat(&b, "ids_unread") == 0 {
            b.progress().expect("progress");
            assert!(Instant::now() < deadline, "{}", b.stats());
        }
        drop(first);
        let _second = send(2, 6);
        landed(&b, "a", 6);
        // The first may be noticed to be gone a little later than the second is there.
        let deadline = Instant::now() + WATCHDOG;
        while stat(&b, "ids_forgotten") == 0 {
            b.progress().expect("progress");
            assert!(Instant::now() < deadline, "{}", b.stats());
        }
        assert!(!b.inbound_status("a", 5).expect("asked"), "an id of the instance before");
        assert_eq!(stat(&b, "ids_unread"), 0);
    }
}

#[test]
fn an_id_survives_the_session_that_brought_it() {
    let (a, b) = pair(&["tcp"]);
    let (source, target) = (Buffer::new(&a, 4096, 1), Buffer::new(&b, 4096, 2));
    let xfer = scattered(&a, Op::Write, "b", &source, &target, import(&a, "b", &b, &target), 4096);
    a.post_telling(&xfer, Tell { message: None, id: Some(9) }).expect("post");
    done(&a, &xfer);
    drop(source);
    drop(a);
    landed(&b, "a", 9);
}

#[test]
fn transfers_within_an_engine_land_too_and_their_unread_ids_are_limited() {
    let a = engine("a", &["tcp"]);
    let (source, target) = (Buffer::new(&a, 64, 1), Buffer::new(&a, 64, 2));
    let xfer = scattered(&a, Op::Write, "a", &source, &target, import(&a, "a", &a, &target), 64);
    for id in 0..16_384 {
        a.post_telling(&xfer, Tell { message: None, id: Some(id) }).expect("post");
        done(&a, &xfer);
    }
    let refused = a.post_telling(&xfer, Tell { message: None, id: Some(1) }).expect_err("too many");
    assert_eq!(refused.code, Code::Limit);
    assert!(refused.text.contains("16384"), "{refused}");
    landed(&a, "a", 3);
    a.post_telling(&xfer, Tell { message: None, id: Some(3) }).expect("there is room again");
    landed(&a, "a", 3);
}

#[test]
fn a_name_that_cannot_be_is_refused_and_one_that_nobody_knows_has_sent_nothing() {
    let a = engine("a", &["tcp"]);
    assert!(!a.inbound_status("nobody", 1).expect("a legal name"));
    for name in ["", "a\0b", &"x".repeat(256)] {
        assert_eq!(a.inbound_status(name, 1).expect_err("illegal").code, Code::InvalidParam, "{name:?}");
    }
}
