//! A host that takes no notifications, and peers that come, notify and go: what waits is bounded, and nothing is lost.

mod common;

use baton_driver::Driver;
use baton_fabric::Op;
use common::*;
use serde_json::Value;
use std::time::Instant;

/// The longest, to get to the limit soon.
const MESSAGE_BYTES: usize = 8 << 20;
/// So many messages are more than may wait.
const MOST_NEWCOMERS: usize = 40;

fn stats(engine: &Driver) -> Value {
    serde_json::from_str(&engine.stats()).expect("JSON")
}

fn number(engine: &Driver, what: &str) -> u64 {
    stats(engine).pointer(what).and_then(Value::as_u64).expect("a number")
}

fn held_off(hub: &Driver) -> u64 {
    number(hub, "/counters/handshakes_held_off")
}

fn until(what: &str, engine: &Driver, is_so: impl Fn() -> bool) {
    let deadline = Instant::now() + WATCHDOG;
    while !is_so() {
        assert!(Instant::now() < deadline, "not {what}: {}", engine.stats());
        std::thread::yield_now();
    }
}

/// The `n`-th newcomer, which has told the hub something, or will.
fn newcomer(n: usize, hub: &Driver, kind: &str) -> Driver {
    let peer = engine(&format!("newcomer-{n}"), &[kind]);
    peer.load_remote(Some("hub"), hub.conn_info()).expect("load");
    peer.notify("hub", &vec![n as u8; MESSAGE_BYTES]).expect("taken");
    peer
}

fn assert_takes(hub: &Driver, n: usize) {
    let told = notification(hub);
    assert_eq!(*told.name, format!("newcomer-{n}"));
    assert!(told.message.len() == MESSAGE_BYTES && told.message.iter().all(|byte| *byte == n as u8));
}

/// Newcomers come and go until one is held off; that one, which is the last.
fn crowd(hub: &Driver, kind: &str) -> (usize, Driver) {
    for n in 0..MOST_NEWCOMERS {
        let peer = newcomer(n, hub, kind);
        until("told or held off", hub, || hub.inbox().len() > n || held_off(hub) > 0);
        if held_off(hub) > 0 {
            return (n, peer);
        }
    }
    panic!("nobody is held off: {}", hub.stats());
}

fn newcomers_are_held_off_while_too_much_waits(kind: &str) {
    let (known, hub) = (engine("known", &[kind]), engine("hub", &[kind]));
    known.load_remote(Some("hub"), hub.conn_info()).expect("load");
    hub.load_remote(Some("known"), known.conn_info()).expect("load");
    let (source, target) = (Buffer::new(&known, 8192, 1), Buffer::new(&hub, 8192, 2));
    let remote = import(&known, "hub", &hub, &target);
    let xfer = scattered(&known, Op::Write, "hub", &source, &target, remote, 1024);
    known.post(&xfer, None).expect("post");
    done(&known, &xfer);

    let (last, waits) = crowd(&hub, kind);
    let limit = number(&hub, "/notifications_waiting_limit_bytes");
    let waiting = number(&hub, "/notifications_waiting_bytes");
    assert_eq!(hub.inbox().len(), last, "{kind}");
    assert!(waiting > limit && waiting <= limit + 3 * MESSAGE_BYTES as u64, "{kind}: {waiting} of {limit}");
    until("told why", &waits, || {
        stats(&waits)["peers"][0]["last_error"].as_str().is_some_and(|why| why.contains("wait for the host"))
    });

    // Whoever is known and has nothing waiting is not concerned, even if it connects anew.
    known.disconnect("hub").expect("disconnect");
    known.load_remote(Some("hub"), hub.conn_info()).expect("load");
    let remote = import(&known, "hub", &hub, &target);
    let xfer = scattered(&known, Op::Write, "hub", &source, &target, remote, 1024);
    known.post(&xfer, None).expect("post");
    done(&known, &xfer);

    (0..last).for_each(|n| assert_takes(&hub, n));
    // Its retry gets through.
    assert_takes(&hub, last);
    assert_eq!(number(&hub, "/notifications_waiting_bytes"), 0, "{kind}");
    waits.notify("hub", b"and no other in between").expect("taken");
    assert_eq!(notification(&hub).message, b"and no other in between", "{kind}: exactly once");
    assert_eq!(number(&waits, "/counters/notifications_expired"), 0);
    target.assert_guards();
}

#[test]
fn one_sided() {
    newcomers_are_held_off_while_too_much_waits("local");
}

#[test]
fn two_sided() {
    newcomers_are_held_off_while_too_much_waits("local two-sided");
}
