//! A name is all that a host sees of a peer, so one instance has it at a time; and that those who may have it get it.

mod common;

use baton_core::wire::ConnInfo;
use baton_driver::{Code, Driver, Status};
use baton_fabric::Op;
use common::*;
use std::time::{Duration, Instant};

fn counter(engine: &Driver, name: &str) -> u64 {
    let stats: serde_json::Value = serde_json::from_str(&engine.stats()).expect("json");
    stats["counters"][name].as_u64().expect("a counter")
}

fn until(what: &str, engine: &Driver, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + WATCHDOG;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}: {}", engine.stats());
        std::thread::yield_now();
    }
}

/// An engine that calls itself `name` and has loaded `victim`, which has not loaded it.
fn stranger(name: &str, victim: &Driver) -> Driver {
    let stranger = engine(name, &["tcp"]);
    stranger.load_remote(Some("v"), victim.conn_info()).expect("load v");
    stranger
}

/// A transfer with a message from one to the other, compared.
fn assert_works(from: &Driver, to: &Driver, message: &[u8]) {
    let (source, target) = (Buffer::new(from, 8192, 1), Buffer::new(to, 8192, 2));
    let xfer = scattered(from, Op::Write, "v", &source, &target, import(from, "v", to, &target), 1024);
    from.post(&xfer, Some(message)).expect("post");
    done(from, &xfer);
    let got = notification(to);
    assert_eq!((&*got.name, &got.message[..]), ("good", message));
    assert_eq!(target.read(), reversed(&source.read(), 1024));
    target.assert_guards();
}

#[test]
fn a_stranger_cannot_speak_under_the_name_of_a_connected_agent() {
    // Whether the host has loaded the agent or it came by itself.
    for loaded in [true, false] {
        let v = engine("v", &["tcp"]);
        let good = stranger("good", &v);
        if loaded {
            v.load_remote(Some("good"), good.conn_info()).expect("load good");
        }
        assert_works(&good, &v, b"first");
        let liar = stranger("good", &v);
        liar.notify("v", b"a lie").expect("it waits for a session");
        let asked = Instant::now();
        let refused = liar.connect("v", 1000).expect_err("refused");
        let why = "NAME_IN_USE: the name \"good\" is in use by a connected agent";
        assert!(refused.code == Code::RemoteDisconnect && refused.text.contains(why), "{refused}");
        assert!(asked.elapsed() >= Duration::from_millis(1000), "it tries for as long as it may");
        assert!(counter(&v, "names_in_use") > 1, "each try is counted");
        assert_works(&good, &v, b"in between");
        let (source, target) = (Buffer::new(&liar, 4096, 1), Buffer::new(&v, 4096, 2));
        let lie = scattered(&liar, Op::Write, "v", &source, &target, import(&liar, "v", &v, &target), 4096);
        let before = target.read();
        liar.post(&lie, Some(b"another")).expect("it waits for a session");
        match wait(&liar, &lie) {
            Status::Failed(e) => assert!(e.text.contains(why), "{e}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(target.read(), before);
        assert_works(&good, &v, b"last");
        assert!(v.take_notifications(usize::MAX).expect("take").is_empty());
        assert_eq!((counter(&v, "sessions_opened"), counter(&v, "epochs_ended")), (1, 0));
    }
}

#[test]
fn nobody_can_use_our_own_name() {
    let v = engine("v", &["tcp"]);
    let liar = engine("v", &["tcp"]);
    // Its own engine would not let it load anybody of its own name.
    let info = ConnInfo::decode(v.conn_info()).expect("connection information");
    let info = ConnInfo { name: "w".into(), ..info }.encode().expect("encode");
    liar.load_remote(Some("w"), &info).expect("load");
    liar.notify("w", b"a lie").expect("it waits for a session");
    let asked = Instant::now();
    let refused = liar.connect("w", 10_000).expect_err("refused");
    assert!(refused.text.contains("BAD_IDENTITY: the name \"v\" is that of the agent"), "{refused}");
    assert!(asked.elapsed() < Duration::from_secs(5), "patience would not help");
    assert!(counter(&v, "names_refused") > 0);
    v.notify("v", b"truth").expect("to itself");
    assert_eq!(notification(&v).message, b"truth");
    assert!(v.take_notifications(usize::MAX).expect("take").is_empty());
    assert_eq!(counter(&v, "sessions_opened"), 0);
}

#[test]
fn an_engine_that_does_not_answer_under_the_name_of_its_connection_information_is_not_connected_to() {
    let (a, b) = (engine("a", &["tcp"]), engine("b", &["tcp"]));
    let info = ConnInfo::decode(b.conn_info()).expect("connection information");
    let info = ConnInfo { name: "good".into(), ..info }.encode().expect("encode");
    a.load_remote(Some("good"), &info).expect("load");
    let refused = a.connect("good", 10_000).expect_err("another name");
    assert_eq!(refused.code, Code::Protocol, "{refused}");
    assert!(refused.text.contains("REPLY.name: b instead of good"), "{refused}");
    // Nor may it come to us under the other name.
    b.load_remote(Some("a"), a.conn_info()).expect("load a");
    let refused = b.connect("a", 10_000).expect_err("another name");
    assert!(
        refused.text.contains("calls itself \"b\", its connection information says \"good\""),
        "{refused}"
    );
    assert_eq!(counter(&a, "names_refused"), 1);
}

#[test]
fn a_restarted_agent_may_have_its_name_as_soon_as_the_old_one_is_gone() {
    for loaded in [true, false] {
        let v = engine("v", &["tcp"]);
        let old = stranger("good", &v);
        if loaded {
            v.load_remote(Some("good"), old.conn_info()).expect("load good");
        }
        assert_works(&old, &v, b"first life");
        drop(old);
        let next = stranger("good", &v);
        next.notify("v", b"second life").expect("notify");
        assert_eq!(notification(&v).message, b"second life");
        assert_works(&next, &v, b"goes on");
        // One that comes while the one before is still there gets through when that is gone.
        let last = stranger("good", &v);
        last.notify("v", b"third life").expect("notify");
        until("a refusal", &v, || counter(&v, "names_in_use") > 0);
        drop(next);
        assert_eq!(notification(&v).message, b"third life");
        assert!(last.connect("v", 10_000).expect("there is a session"));
        assert_works(&last, &v, b"goes on");
    }
}

#[test]
fn a_new_instance_that_the_host_has_loaded_need_not_wait_for_the_end_of_the_old_one() {
    let v = engine("v", &["tcp"]);
    let old = stranger("good", &v);
    v.load_remote(Some("good"), old.conn_info()).expect("load good");
    assert_works(&old, &v, b"first");
    let next = stranger("good", &v);
    v.load_remote(Some("good"), next.conn_info()).expect("load the new one");
    assert_works(&next, &v, b"second");
    assert!(old.connect("v", 300).expect_err("the name is another's").text.contains("NAME_IN_USE"));
}

#[test]
fn the_hosts_binding_decides_who_has_a_name() {
    // Whether the rightful one connects or is connected to.
    for it_connects in [true, false] {
        let v = engine("v", &["tcp"]);
        let liar = stranger("good", &v);
        liar.notify("v", b"nobody else has the name").expect("notify");
        assert_eq!(&*notification(&v).name, "good");
        let good = stranger("good", &v);
        v.load_remote(Some("good"), good.conn_info()).expect("load good");
        if it_connects {
            assert!(good.connect("v", 10_000).expect("connect"));
        } else {
            assert!(v.connect("good", 10_000).expect("connect"));
        }
        assert_eq!(counter(&v, "names_taken_back"), 1);
        until("the liar's session has ended", &v, || counter(&v, "epochs_ended") == 1);
        until("it hears of it", &liar, || counter(&liar, "epochs_ended") == 1);
        liar.notify("v", b"a lie").expect("it waits for a session");
        let refused = liar.connect("v", 1000).expect_err("refused");
        assert!(refused.text.contains("NAME_IN_USE"), "{refused}");
        assert_works(&good, &v, b"truth");
        v.notify("good", b"heard").expect("notify");
        assert_eq!(notification(&good).message, b"heard");
        assert!(v.take_notifications(usize::MAX).expect("take").is_empty());
        assert!(liar.take_notifications(usize::MAX).expect("take").is_empty());
    }
}

#[test]
fn of_many_that_come_at_once_under_one_name_one_has_it() {
    let v = engine("v", &["tcp"]);
    let all: Vec<_> = (0..8).map(|_| stranger("good", &v)).collect();
    for (n, one) in all.iter().enumerate() {
        one.notify("v", &[n as u8]).expect("notify");
    }
    let first = notification(&v);
    // Each of the others has asked, in vain.
    let give_up = Instant::now() + WATCHDOG;
    while counter(&v, "names_in_use") < 7 {
        assert!(Instant::now() < give_up, "{}", v.stats());
        std::thread::yield_now();
    }
    assert!(v.take_notifications(usize::MAX).expect("take").is_empty());
    assert_eq!(counter(&v, "sessions_opened"), 1);
    assert_works(&all[first.message[0] as usize], &v, b"it has");
}
