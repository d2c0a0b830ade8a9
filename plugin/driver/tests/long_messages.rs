//! Messages of many fragments where somebody does not keep up, or goes away.

mod common;

use baton_driver::{Code, Driver, Status};
use baton_fabric::Op;
use common::*;
use std::time::Instant;

const MIB: usize = 1 << 20;

fn text(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 13 + (i >> 8) + seed) as u8).collect()
}

fn protocol(engine: &Driver) -> serde_json::Value {
    let stats: serde_json::Value = serde_json::from_str(&engine.stats()).expect("json");
    stats["peers"][0]["session"]["protocol"].clone()
}

fn until(what: &str, engine: &Driver, mut ready: impl FnMut() -> bool) {
    let deadline = Instant::now() + WATCHDOG;
    while !ready() {
        assert!(Instant::now() < deadline, "{what}: {}", engine.stats());
        engine.progress().expect("progress");
        std::thread::yield_now();
    }
}

#[test]
fn a_receiver_that_takes_no_message_holds_long_ones_back_and_its_memory_stays_bounded() {
    for fabric in ["local", "tcp send"] {
        let (a, b) = pair(&[fabric]);
        let (source, target) = (Buffer::new(&a, 4096, 1), Buffer::new(&b, 4096, 2));
        let imported = import(&a, "b", &b, &target);
        let xfers: Vec<_> =
            (0..8).map(|_| scattered(&a, Op::Write, "b", &source, &target, imported, 1024)).collect();
        for (seed, xfer) in xfers.iter().enumerate() {
            a.post(xfer, Some(&text(seed, 3 * MIB))).expect("post");
        }
        until("the receiver withholds credit", &a, || {
            protocol(&b)["withholding_credit"] == true
                && ["consumed of", "the peer to take"]
                    .iter()
                    .any(|words| protocol(&a)["waiters"].to_string().contains(words))
        });
        let stats = protocol(&b);
        let (held, parts) = (stats["unpopped_bytes"].as_u64(), stats["reassembly_bytes"].as_u64());
        let (held, parts) = (held.expect("a number") as usize, parts.expect("a number") as usize);
        assert!(held <= 9 * MIB + MIB && parts < 3 * MIB, "{fabric}: {stats}");
        assert!(matches!(a.status(&xfers[7]), Status::InProgress));
        for seed in 0..8 {
            assert!(notification(&b).message == text(seed, 3 * MIB), "{fabric}: message {seed}");
        }
        xfers.iter().for_each(|xfer| done(&a, xfer));
        target.assert_guards();
    }
}

#[test]
fn a_sender_that_goes_away_in_the_middle_of_a_message_leaves_nothing_of_it() {
    let (a, b) = pair(&["tcp"]);
    let (source, target) = (Buffer::new(&a, 4096, 1), Buffer::new(&b, 4096, 2));
    let xfer = scattered(&a, Op::Write, "b", &source, &target, import(&a, "b", &b, &target), 1024);
    // Held back in its middle, because what came before is not taken.
    for seed in 0..3 {
        a.notify("b", &text(seed, 4 * MIB)).expect_or_wait(&a, || a.notify("b", &text(seed, 4 * MIB)));
    }
    until("credit is withheld", &a, || protocol(&b)["withholding_credit"] == true);
    a.post(&xfer, Some(&text(9, 4 * MIB))).expect("post");
    until("its message has begun", &a, || protocol(&b)["reassembly_bytes"].as_u64() > Some(0));
    drop(source);
    drop(a);
    let deadline = Instant::now() + WATCHDOG;
    let stats = || -> serde_json::Value { serde_json::from_str(&b.stats()).expect("json") };
    while stats()["counters"]["epochs_ended"] == 0 {
        assert!(Instant::now() < deadline, "{}", b.stats());
        b.progress().expect("progress");
    }
    let whole: Vec<_> = b.take_notifications(usize::MAX).expect("take");
    assert!(whole.iter().zip(0..).all(|(n, seed)| n.message == text(seed, 4 * MIB)), "only whole ones");
    let again = engine("a", &["tcp"]);
    b.load_remote(Some("a"), again.conn_info()).expect("load a");
    again.load_remote(Some("b"), b.conn_info()).expect("load b");
    again.notify("b", &text(5, 2 * MIB)).expect("notify");
    assert!(notification(&b).message == text(5, 2 * MIB));
}

/// What waits at the sender is limited: more is taken once some of it is acknowledged.
trait OrWait {
    fn expect_or_wait(self, engine: &Driver, again: impl FnMut() -> Self);
}

impl OrWait for baton_driver::Result<()> {
    fn expect_or_wait(self, engine: &Driver, mut again: impl FnMut() -> Self) {
        let mut outcome = self;
        until("room for a message", engine, || match &outcome {
            Ok(()) => true,
            Err(e) => {
                assert_eq!(e.code, Code::Limit, "{e}");
                outcome = again();
                false
            }
        });
    }
}
