//! Notifications reach the host once, whole and in their sender's order, whichever way they take to it.

mod common;

use baton_driver::{Driver, Taker};
use common::*;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

const FABRICS: [&str; 5] = ["local", "tcp", "tcp send", "tcp two-sided", "verbs"];

/// Every fifth is longer than what is handed over at once, every seventh empty.
fn text(n: usize) -> Vec<u8> {
    let len = match n {
        n if n.is_multiple_of(7) => 0,
        n if n.is_multiple_of(5) => 9000,
        n => 8 + n % 60,
    };
    let mut bytes: Vec<u8> = (0..len).map(|i| (i * 31 + n) as u8).collect();
    bytes.iter_mut().zip(n.to_le_bytes()).for_each(|(byte, digit)| *byte = digit);
    bytes
}

/// A host with room for so many; it notes what it took.
struct Host {
    room: usize,
    taken: Vec<(String, Vec<u8>)>,
    admitted: Vec<Vec<u8>>,
}

impl Taker for Host {
    fn admits(&mut self, _: &str, message: &[u8]) -> bool {
        let room = self.admitted.len() < self.room;
        if room {
            self.admitted.push(message.to_vec());
        }
        room
    }

    fn take(&mut self, name: &str, message: &[u8]) {
        self.taken.push((name.to_owned(), message.to_vec()));
    }
}

fn take(engine: &Driver, room: usize) -> Vec<(String, Vec<u8>)> {
    let mut host = Host { room, taken: Vec::new(), admitted: Vec::new() };
    let count = engine.hand_over(&mut host).expect("take");
    let taken: Vec<_> = host.taken.iter().map(|(_, message)| message.clone()).collect();
    assert!(count as usize == taken.len() && taken == host.admitted, "what was admitted is taken, in order");
    host.taken
}

/// Sends them all; what waits at the sender is limited, so it may have to wait.
fn send(engine: &Driver, count: usize) {
    let deadline = Instant::now() + WATCHDOG;
    for n in 0..count {
        while engine.notify("b", &text(n)).is_err() {
            assert!(Instant::now() < deadline, "message {n}: {}", engine.stats());
            engine.progress().expect("progress");
        }
    }
}

fn unpopped(engine: &Driver) -> Vec<serde_json::Value> {
    let stats: serde_json::Value = serde_json::from_str(&engine.stats()).expect("JSON");
    let session = &stats["peers"][0]["session"]["protocol"];
    ["unpopped_messages", "unpopped_bytes"].map(|key| session[key].clone()).to_vec()
}

#[test]
fn what_the_host_has_no_room_for_waits_and_all_comes_in_order_while_another_thread_polls() {
    const COUNT: usize = 1500;
    for fabric in FABRICS {
        let (a, b) = pair(&[fabric]);
        let (stop, deadline) = (AtomicBool::new(false), Instant::now() + WATCHDOG);
        std::thread::scope(|scope| {
            scope.spawn(|| send(&a, COUNT));
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) && Instant::now() < deadline {
                    b.progress().expect("progress");
                    std::thread::yield_now();
                }
            });
            let (mut next, mut turn) = (0, 0);
            while next < COUNT && Instant::now() < deadline {
                turn += 1;
                for (name, message) in take(&b, turn % 4) {
                    assert!(message == text(next), "{fabric}: message {next} of {} bytes", message.len());
                    assert_eq!(name, "a");
                    next += 1;
                }
                std::thread::yield_now();
            }
            stop.store(true, Ordering::Relaxed);
            assert_eq!(next, COUNT, "{fabric}: {}", b.stats());
        });
        assert!(take(&b, 1).is_empty(), "{fabric}: nothing twice");
        if !fabric.ends_with("two-sided") {
            assert_eq!(unpopped(&b), [0, 0], "{fabric}: all of it is off the account");
        }
    }
}

#[test]
fn callers_that_ask_at_once_get_each_notification_once() {
    const COUNT: usize = 1200;
    for fabric in FABRICS {
        let (a, b) = pair(&[fabric]);
        let (taken, deadline) = (Mutex::new(Vec::new()), Instant::now() + WATCHDOG);
        std::thread::scope(|scope| {
            scope.spawn(|| send(&a, COUNT));
            for room in [1, 3, usize::MAX] {
                let (b, taken) = (&b, &taken);
                scope.spawn(move || {
                    while taken.lock().expect("no panic").len() < COUNT && Instant::now() < deadline {
                        let more = take(b, room);
                        taken.lock().expect("no panic").extend(more);
                        std::thread::yield_now();
                    }
                });
            }
        });
        let taken = taken.into_inner().expect("no panic");
        assert_eq!(taken.len(), COUNT, "{fabric}: {}", b.stats());
        let empty = (0..COUNT).filter(|n| text(*n).is_empty()).count();
        let messages: BTreeSet<_> = taken.into_iter().map(|(_, message)| message).collect();
        let expected: BTreeSet<_> = (0..COUNT).map(text).collect();
        assert!(messages == expected && expected.len() == COUNT - empty + 1, "{fabric}: each once");
    }
}

#[test]
fn where_a_hook_wants_to_hear_of_notifications_they_wait_for_the_host() {
    for fabric in FABRICS {
        let (a, b) = pair(&[fabric]);
        let told = Arc::new(AtomicBool::new(false));
        let tell = Arc::clone(&told);
        b.set_hook(1, Some(Box::new(move |_| tell.store(true, Ordering::Relaxed))));
        a.notify("b", b"hello").expect("notify");
        let deadline = Instant::now() + WATCHDOG;
        let mut taken = Vec::new();
        while taken.is_empty() || !told.load(Ordering::Relaxed) {
            assert!(Instant::now() < deadline, "{fabric}: {taken:?} {}", b.stats());
            taken.extend(take(&b, usize::MAX));
            std::thread::yield_now();
        }
        assert_eq!(taken, [("a".to_owned(), b"hello".to_vec())], "{fabric}");
        b.set_hook(0, None);
    }
}
