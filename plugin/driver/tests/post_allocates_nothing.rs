//! A prepared transfer is posted again without a single allocation on the posting thread, over each software fabric.

mod common;

use baton_driver::Status;
use baton_fabric::Op;
use common::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Instant;

struct Counting;

thread_local! {
    static COUNT: Cell<Option<u64>> = const { Cell::new(None) };
}

fn note() {
    COUNT.with(|count| count.set(count.get().map(|n| n + 1)));
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of this thread during `body`.
fn allocations(body: impl FnOnce()) -> u64 {
    COUNT.set(Some(0));
    body();
    COUNT.replace(None).expect("counting")
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
        assert_eq!(notification(&b).message, message);
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
