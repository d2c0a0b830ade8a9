//! A prepared transfer is posted again without a single allocation on the posting thread, over each software fabric, and the thread
//! that takes its notification allocates none but a list.

mod common;

use baton_counting_alloc::allocations;
use baton_driver::{Status, Taker};
use baton_fabric::Op;
use common::*;
use std::time::Instant;

/// A host that expects one message again and again.
struct Host {
    message: [u8; 64],
    taken: usize,
}

impl Taker for Host {
    fn admits(&mut self, _: &str, _: &[u8]) -> bool {
        true
    }

    fn take(&mut self, name: &str, message: &[u8]) {
        assert!(name == "a" && message == self.message, "{name:?}: {message:?}");
        self.taken += 1;
    }
}

fn a_repost_allocates_nothing(fabric: &str, op: Op) {
    let (a, b) = pair(&[fabric]);
    let (local, remote) = (Buffer::new(&a, 128 * 4096, 1), Buffer::new(&b, 128 * 4096, 2));
    let xfer = scattered(&a, op, "b", &local, &remote, import(&a, "b", &b, &remote), 4096);
    let message = [7u8; 64];
    for warm_up in 0..64 {
        a.post(&xfer, Some(&message)).expect("post");
        done(&a, &xfer);
        assert_eq!(notification(&b).message, message, "{warm_up}");
    }
    for round in 0..50 {
        let posting = allocations(|| a.post(&xfer, Some(&message)).expect("post"));
        assert_eq!(posting, 0, "post of round {round} allocated");
        let deadline = Instant::now() + WATCHDOG;
        let polling = allocations(|| {
            while matches!(a.status(&xfer), Status::InProgress) {
                assert!(Instant::now() < deadline);
                std::thread::yield_now();
            }
        });
        assert_eq!(polling, 0, "status of round {round} allocated");
        assert!(matches!(a.status(&xfer), Status::Done));
        let mut host = Host { message, taken: 0 };
        let taking = allocations(|| {
            while host.taken == 0 {
                assert!(Instant::now() < deadline);
                b.hand_over(&mut host).expect("an engine");
            }
        });
        // One that another thread found first has waited and is told of by a list; one that came by a SEND is copied out of its slot.
        assert!(taking <= 1, "the notification of round {round} took {taking} allocations");
    }
}

#[test]
fn over_the_local_fabric() {
    a_repost_allocates_nothing("local", Op::Write);
    a_repost_allocates_nothing("local", Op::Read);
}

#[test]
fn by_sends() {
    a_repost_allocates_nothing("local send", Op::Write);
    a_repost_allocates_nothing("local send", Op::Read);
    a_repost_allocates_nothing("tcp send", Op::Write);
}

#[test]
fn over_tcp() {
    a_repost_allocates_nothing("tcp", Op::Write);
    a_repost_allocates_nothing("tcp", Op::Read);
}
