//! Many callers at once, towards peers that are there, go away, or never answer: one session, one error, no deadlock, no wait without end.

mod common;

use baton_driver::{Code, Driver, Status};
use baton_fabric::Op;
use common::*;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};

const FABRICS: [&str; 2] = ["tcp", "tcp two-sided"];

fn stats(engine: &Driver) -> serde_json::Value {
    serde_json::from_str(&engine.stats()).expect("JSON")
}

/// Fails the whole test, wherever its threads stand, when it does not end.
fn within<T: Send>(limit: Duration, what: &str, work: impl FnOnce() -> T + Send) -> T {
    let (ended, wait) = mpsc::channel::<()>();
    let what = what.to_owned();
    let watchdog = std::thread::spawn(move || {
        if wait.recv_timeout(limit) == Err(mpsc::RecvTimeoutError::Timeout) {
            eprintln!("{what} does not end");
            std::process::abort();
        }
    });
    let result = work();
    drop(ended);
    watchdog.join().expect("the watchdog ends");
    result
}

#[test]
fn sixty_four_threads_that_send_first_and_at_once_share_one_session_and_all_succeed() {
    for fabric in FABRICS {
        let (a, b) = pair(&[fabric]);
        let barrier = Barrier::new(64);
        let buffers: Vec<_> =
            (0..32).map(|n| (Buffer::new(&a, 4096, n), Buffer::new(&b, 4096, 100 + n))).collect();
        std::thread::scope(|scope| {
            for n in 0..64usize {
                let (a, b, barrier, buffers) = (&a, &b, &barrier, &buffers);
                scope.spawn(move || {
                    if n % 2 == 0 {
                        barrier.wait();
                        return a.notify("b", &[n as u8]).expect("notify");
                    }
                    let (source, target) = &buffers[n / 2];
                    let xfer = scattered(a, Op::Write, "b", source, target, import(a, "b", b, target), 512);
                    barrier.wait();
                    a.post(&xfer, Some(&[n as u8])).expect("post");
                    done(a, &xfer);
                });
            }
        });
        let mut told: Vec<u8> = (0..64).map(|_| notification(&b).message[0]).collect();
        told.sort_unstable();
        assert_eq!(told, (0..64).collect::<Vec<u8>>(), "{fabric}: each once");
        for (source, target) in &buffers {
            assert_eq!(target.read(), reversed(&source.read(), 512));
            target.assert_guards();
        }
        for engine in [&a, &b] {
            assert_eq!(stats(engine)["counters"]["sessions_opened"], 1, "{fabric}: {}", engine.stats());
        }
    }
}

#[test]
fn both_sides_that_open_at_once_agree_on_one_session_round_after_round() {
    for fabric in FABRICS {
        let (a, b) = pair(&[fabric]);
        for round in 0..25u8 {
            std::thread::scope(|scope| {
                for (engine, peer) in [(&a, "b"), (&b, "a")] {
                    scope.spawn(move || {
                        if round % 3 == 1 && peer == "a" {
                            std::thread::yield_now();
                        }
                        engine.notify(peer, &[round]).expect("notify");
                    });
                }
            });
            assert_eq!(notification(&b).message, [round], "{fabric}, round {round}");
            assert_eq!(notification(&a).message, [round], "{fabric}, round {round}");
            let [of_a, of_b] = [&a, &b].map(|engine| stats(engine)["peers"][0]["session"]["epoch"].clone());
            assert_eq!(of_a, of_b, "{fabric}: both hold the same epoch");
            a.disconnect("b").expect("disconnect");
            b.disconnect("a").expect("disconnect");
            a.load_remote(Some("b"), b.conn_info()).expect("load b");
            b.load_remote(Some("a"), a.conn_info()).expect("load a");
        }
    }
}

#[test]
fn senders_and_those_who_disconnect_and_load_anew_never_wait_for_each_other() {
    for fabric in FABRICS {
        let (a, b) = pair(&[fabric]);
        let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        within(Duration::from_secs(120), "the turmoil", || {
            std::thread::scope(|scope| {
                for n in 0..3u8 {
                    let (a, b, stop, sent) = (&a, &b, &stop, &sent);
                    scope.spawn(move || {
                        let (source, target) = (Buffer::new(a, 4096, n), Buffer::new(b, 4096, 50 + n));
                        while !stop.load(Ordering::Relaxed) {
                            // While its name is not bound, each of these may be refused; none may wait without end.
                            let blob = b.export(target.region).expect("export");
                            let Ok(remote) = a.import("b", &blob) else { continue };
                            let descs =
                                ([source.desc(0, 4096, source.region)], [target.desc(0, 4096, remote)]);
                            let Ok(xfer) = a.create_xfer(Op::Write, "b", &descs.0, &descs.1) else {
                                continue;
                            };
                            if a.post(&xfer, Some(&[n])).is_ok() && matches!(wait(a, &xfer), Status::Done) {
                                assert_eq!(target.read(), source.read());
                                sent.fetch_add(1, Ordering::Relaxed);
                            }
                            drop(xfer);
                        }
                        target.assert_guards();
                    });
                }
                for round in 0..60 {
                    let before = sent.load(Ordering::Relaxed);
                    let limit = Instant::now() + Duration::from_secs(20);
                    while sent.load(Ordering::Relaxed) == before && Instant::now() < limit {
                        // The host takes what comes, or its peer would be held back.
                        b.take_notifications(usize::MAX).expect("notifications");
                        std::thread::yield_now();
                    }
                    assert!(
                        sent.load(Ordering::Relaxed) > before,
                        "{fabric}: nothing moves in round {round}"
                    );
                    a.disconnect("b").expect("disconnect");
                    a.load_remote(Some("b"), b.conn_info()).expect("load b");
                }
                stop.store(true, Ordering::Relaxed);
            });
        });
    }
}

#[test]
fn a_call_that_meets_the_back_off_of_a_failed_attempt_connects_when_it_is_over() {
    let (a, b) = (engine("a", &["tcp"]), engine("b", &["tcp"]));
    let info = baton_core::wire::ConnInfo::decode(b.conn_info()).expect("own connection information");
    // Nobody listens there any more.
    let closed =
        TcpListener::bind(("127.0.0.1", 0)).expect("a port").local_addr().expect("bound").to_string();
    let ghost = baton_core::wire::ConnInfo { candidates: vec![closed], ..info };
    for _ in 0..3 {
        a.load_remote(Some("b"), &ghost.encode().expect("encode")).expect("load");
        let error = a.connect("b", 20_000).expect_err("nobody is there");
        assert_eq!(error.code, Code::RemoteDisconnect, "{error}");
    }
    a.load_remote(Some("b"), b.conn_info()).expect("load");
    assert!(a.connect("b", 20_000).expect("the next attempt comes after the back-off"));
}

/// A listener that accepts and never says a word, and connection information of a peer "b" that leads there.
fn mute_peer() -> (TcpListener, Vec<u8>) {
    let silent = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let b = engine("b", &["tcp"]);
    let info = baton_core::wire::ConnInfo::decode(b.conn_info()).expect("own connection information");
    let candidates = vec![silent.local_addr().expect("bound").to_string()];
    let mute = baton_core::wire::ConnInfo { candidates, ..info };
    (silent, mute.encode().expect("encode"))
}

#[test]
fn an_engine_that_is_destroyed_sends_everybody_home_who_waits_for_it() {
    let (silent, mute) = mute_peer();
    let a = Arc::new(engine("a", &["tcp"]));
    a.load_remote(Some("b"), &mute).expect("load");
    let waiting: Vec<_> = (0..8)
        .map(|_| {
            let a = Arc::clone(&a);
            std::thread::spawn(move || a.connect("b", 600_000))
        })
        .collect();
    let _held = silent.accept().expect("the attempt has begun");
    within(Duration::from_secs(20), "the destruction", || {
        a.destroy().expect("destroy");
        for caller in waiting {
            caller.join().expect("no panic").expect_err("the engine is gone");
        }
    });
}

#[test]
fn callers_that_come_while_an_engine_is_destroyed_are_sent_home_as_well() {
    let (silent, mute) = mute_peer();
    for _ in 0..100 {
        let a = engine("a", &["tcp"]);
        a.load_remote(Some("b"), &mute).expect("load");
        let together = Barrier::new(9);
        within(Duration::from_secs(20), "the destruction", || {
            std::thread::scope(|scope| {
                let (a, together) = (&a, &together);
                let wait = move || {
                    a.connect("b", 600_000).expect_err("the engine is gone");
                };
                (0..4).for_each(|_| drop(scope.spawn(wait)));
                let _held = silent.accept().expect("the attempt has begun");
                for _ in 0..8 {
                    scope.spawn(move || {
                        together.wait();
                        wait();
                    });
                }
                together.wait();
                a.destroy().expect("destroy");
            });
        });
    }
}

#[test]
fn engines_of_either_backend_live_in_one_process_and_one_with_both_serves_each() {
    let (one, two, both) =
        (engine("one", &["tcp"]), engine("two", &["tcp two-sided"]), engine("both", &["tcp auto"]));
    for engine in [&one, &two] {
        engine.load_remote(Some("both"), both.conn_info()).expect("load");
    }
    std::thread::scope(|scope| {
        for (engine, seed) in [(&one, 1), (&two, 2)] {
            let both = &both;
            scope.spawn(move || {
                let (source, target) =
                    (Buffer::new(engine, 65536, seed), Buffer::new(both, 65536, 10 + seed));
                let remote = import(engine, "both", both, &target);
                let xfer = scattered(engine, Op::Write, "both", &source, &target, remote, 4096);
                engine.post(&xfer, Some(&[seed])).expect("post");
                done(engine, &xfer);
                assert_eq!(target.read(), reversed(&source.read(), 4096));
                target.assert_guards();
            });
        }
    });
    let mut told = [notification(&both).message[0], notification(&both).message[0]];
    told.sort_unstable();
    assert_eq!(told, [1, 2]);
}

/// Posts of a host that never looks.
const UNWATCHED: usize = 2000;

#[test]
fn a_host_that_goes_on_posting_and_never_looks_is_served_by_its_engine() {
    for fabric in ["local", "tcp", "tcp two-sided"] {
        let (a, b) = pair(&[fabric]);
        let (own, theirs) = (Buffer::new(&a, 64, 1), Buffer::new(&b, 64, 2));
        let (of_a, of_b) = (Buffer::new(&a, 4096, 3), Buffer::new(&b, 4096, 4));
        let imported = import(&a, "b", &b, &theirs);
        let one = || scattered(&a, Op::Write, "b", &own, &theirs, imported, 64);
        let unwatched: Vec<_> = (0..UNWATCHED).map(|_| one()).collect();
        let served = scattered(&b, Op::Write, "a", &of_b, &of_a, import(&b, "a", &a, &of_a), 512);
        let (posting, mut rounds) = (AtomicBool::new(true), 0u32);
        within(Duration::from_secs(120), "the service of the peer", || {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for xfer in &unwatched {
                        a.post(xfer, None).expect("post");
                        // A host at its own pace, some posts a millisecond.
                        std::thread::sleep(Duration::from_micros(200));
                    }
                    posting.store(false, Ordering::Relaxed);
                });
                while posting.load(Ordering::Relaxed) {
                    b.post(&served, None).expect("post");
                    done(&b, &served);
                    rounds += 1;
                }
            });
            unwatched.iter().for_each(|xfer| done(&a, xfer));
        });
        assert!(rounds >= 100, "{fabric}: the peer got through {rounds} times while {UNWATCHED} were posted");
        assert_eq!(of_a.read(), reversed(&of_b.read(), 512), "{fabric}");
        assert_eq!(theirs.read(), own.read(), "{fabric}");
        of_a.assert_guards();
        theirs.assert_guards();
    }
}
