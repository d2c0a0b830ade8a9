//! Sessions that break again and again while notifications go on: what the host was told is on its way arrives once, in order.

mod common;

use baton_driver::{Code, Driver, Status};
use baton_fabric::Op;
use common::pages::Pages;
use common::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const LEN: usize = 64 * 1024;
const BREAKS: u64 = 12;

/// Told when it goes, also by a check that fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Numbered messages to b until it is told to stop; how many.
fn send_numbers(a: &Driver, stop: &AtomicBool) -> u64 {
    let mut number = 0u64;
    while !stop.load(Ordering::Relaxed) {
        match a.notify("b", &number.to_le_bytes()) {
            Ok(()) => number += 1,
            // It keeps as many as it takes.
            Err(full) => {
                assert_eq!(full.code, Code::Limit, "{full}");
                std::thread::yield_now();
            }
        }
    }
    number
}

/// The numbers that have come must be those that come next.
fn take_numbers(b: &Driver, next: &mut u64) {
    for one in b.take_notifications(usize::MAX).expect("take") {
        let number = u64::from_le_bytes(one.message.as_slice().try_into().expect("a number"));
        assert_eq!(number, *next, "lost below, twice above");
        *next += 1;
    }
}

fn epochs_ended(engine: &Driver) -> u64 {
    let stats: serde_json::Value = serde_json::from_str(&engine.stats()).expect("JSON");
    stats["counters"]["epochs_ended"].as_u64().expect("a counter")
}

fn numbers_arrive_once_and_in_order_whatever_breaks(fabric: &str, b_knows_a: bool) {
    let (a, b) = (engine("a", &[fabric]), engine("b", &[fabric]));
    a.load_remote(Some("b"), b.conn_info()).expect("load b");
    if b_knows_a {
        b.load_remote(Some("a"), a.conn_info()).expect("load a");
    }
    let gone = Pages::new(LEN);
    let there = gone.register(&b);
    gone.take_away();
    let here = Buffer::new(&a, LEN, 1);
    let region = a.import("b", &b.export(there).expect("export")).expect("import");
    let remote = gone.desc(region);
    let read = a.create_xfer(Op::Read, "b", &[here.desc(0, LEN, here.region)], &[remote]).expect("create");
    let (stop, mut next) = (AtomicBool::new(false), 0);
    let sent = std::thread::scope(|scope| {
        let sending = scope.spawn(|| send_numbers(&a, &stop));
        let stopping = Stop(&stop);
        // A READ that fails because no session came in time broke none.
        while epochs_ended(&a) < BREAKS {
            let so_far = next;
            a.post(&read, None).expect("post");
            let give_up = Instant::now() + WATCHDOG;
            // Each time after some have come again.
            while matches!(a.status(&read), Status::InProgress) || next < so_far + 100 {
                take_numbers(&b, &mut next);
                assert!(Instant::now() < give_up, "{fabric}: {} {}", a.stats(), b.stats());
            }
            assert!(matches!(a.status(&read), Status::Failed(_)), "{fabric}");
        }
        drop(stopping);
        sending.join().expect("the sender")
    });
    let give_up = Instant::now() + WATCHDOG;
    while next < sent {
        take_numbers(&b, &mut next);
        assert!(Instant::now() < give_up, "{fabric}: {next} of {sent}; {} {}", a.stats(), b.stats());
    }
    here.assert_guards();
}

#[test]
fn notifications_given_while_an_epoch_ends_arrive_once_and_in_order() {
    for fabric in ["local", "tcp", "local two-sided", "tcp two-sided", "local auto"] {
        numbers_arrive_once_and_in_order_whatever_breaks(fabric, true);
    }
}

#[test]
fn a_target_that_has_never_heard_of_the_sender_resumes_its_sessions_too() {
    for fabric in ["local", "tcp", "local two-sided", "tcp two-sided", "local auto"] {
        numbers_arrive_once_and_in_order_whatever_breaks(fabric, false);
    }
}
