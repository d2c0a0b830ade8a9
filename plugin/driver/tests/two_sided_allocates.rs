//! What a two-sided channel allocates at work, once it is warm: nothing for a chunk, a stated number for a transfer or a notification.

mod two_pair;

use baton_core::Nanos;
use baton_core::two_sided::chunks::Piece;
use baton_core::two_sided::codec::Direction;
use baton_core::two_sided::notes::Resolve;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use two_pair::*;

struct Counting;

thread_local! {
    static COUNT: Cell<Option<u64>> = const { Cell::new(None) };
}

fn note() {
    COUNT.with(|count| {
        let n = count.get().map(|n| n + 1);
        count.set(n);
        if n.is_some() && std::env::var_os("BATON_TEST_TRAP").is_some() {
            count.set(None);
            eprintln!("{}", std::backtrace::Backtrace::force_capture());
            count.set(n);
        }
    });
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

/// Allocations of this thread during `body`, which works for both sides.
fn allocations(body: impl FnOnce()) -> u64 {
    COUNT.set(Some(0));
    body();
    COUNT.replace(None).expect("counting")
}

/// A transfer of one piece, from its submission to its end on both sides.
fn transfer(
    pair: &mut Pair,
    token: u64,
    direction: Direction,
    pieces: &Arc<[Piece]>,
    message: Option<&[u8]>,
) -> u64 {
    let before = pair.sides[1].delivered.len();
    pair.sides.iter_mut().for_each(|side| {
        side.done.clear();
        side.delivered.reserve(16);
    });
    allocations(|| {
        let now = pair.now();
        let channel = &mut pair.sides[0].exec.as_mut().expect("an epoch is open").channel;
        channel.submit(now, token, direction, Arc::clone(pieces), message).expect("taken");
        let told = before + usize::from(message.is_some());
        pair.until("it is done", |sides| sides[0].done.len() == 1 && sides[1].delivered.len() == told);
    })
}

fn measure(setting: Setting) {
    let mut pair = Pair::new(setting);
    let base = pair.sides[0].data.base;
    let pieces =
        |len: u64| -> Arc<[Piece]> { [Piece { local: base, region: REGION, offset: 0, len }].into() };
    for (what, direction, len, message) in [
        ("1 chunk", Direction::Write, 4096, None),
        ("1 chunk and message", Direction::Write, 4096, Some(&b"message"[..])),
        ("64 chunks", Direction::Write, 64 * 60_000, None),
        ("640 chunks", Direction::Write, 320 * 60_000, None),
        ("read 1", Direction::Read, 4096, None),
        ("read 64", Direction::Read, 64 * 60_000, None),
    ] {
        let pieces = pieces(len);
        let counts: Vec<u64> = (0..60).map(|n| transfer(&mut pair, n, direction, &pieces, message)).collect();
        println!("{what}: {:?}", &counts[30..]);
    }
    let mut counts = Vec::new();
    for token in 0..60 {
        pair.sides[0].notes.clear();
        pair.sides[1].delivered.clear();
        let deadline = Instant::now() + PATIENCE;
        counts.push(allocations(|| {
            let channel = &mut pair.sides[0].exec.as_mut().expect("an epoch is open").channel;
            channel.notify(token, b"message", Resolve::Sent, Nanos(u64::MAX)).expect("taken");
            pair.until("it is there", |sides| sides[1].delivered.len() == 1 && sides[0].notes.len() == 1);
        }));
        assert!(Instant::now() < deadline);
    }
    println!("note: {:?}", &counts[30..]);
}

#[test]
fn over_the_local_fabric() {
    measure(local());
    measure(local().registered());
}

#[test]
fn over_tcp() {
    measure(tcp());
    measure(tcp().registered());
}
