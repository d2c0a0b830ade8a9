//! What a set of chunks takes from the allocator is at most what it says.
//! One test only: the count is the whole process's.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_core::two_sided::chunks::ChunkSet;
use baton_core::two_sided::codec::MAX_CHUNKS;

struct Counting;

static LIVE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// What malloc takes for a block: a header, and room up to the next multiple.
fn taken(layout: Layout) -> usize {
    (layout.size() + 8).next_multiple_of(16)
}

// SAFETY: forwards to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE_BYTES.fetch_add(taken(layout), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(taken(layout), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Inserts them all; the most bytes that it had.
fn fill(order: &str, chunks: impl Iterator<Item = u32>) -> usize {
    let before = LIVE_BYTES.load(Ordering::Relaxed);
    let (mut set, mut most) = (ChunkSet::default(), 0);
    for (sent, chunk) in (1..).zip(chunks) {
        set.insert(chunk);
        let live = LIVE_BYTES.load(Ordering::Relaxed) - before;
        assert!(live <= set.bytes(), "{order}: {live} bytes after {sent} chunks, it says {}", set.bytes());
        assert!(set.bytes() <= sent * ChunkSet::MOST_BYTES_A_CHUNK);
        most = most.max(live);
    }
    most
}

#[test]
fn a_set_takes_no_more_memory_than_it_says() {
    const WORDS: u32 = 1 << 15;
    let end = MAX_CHUNKS - 64 * WORDS;
    assert_eq!(fill("in order", 0..1 << 18), 0);
    // Chunk n over four lanes, one of which is 100 messages behind.
    let lanes = (0..40_000).map(|n| if n % 4 == 3 { (n - 400i32).max(0) } else { n } as u32);
    assert!(fill("over four lanes", lanes) < 1000);
    fill("one of each word, upwards", (0..WORDS).map(|n| end + n * 64));
    fill("one of each word, downwards", (0..WORDS).rev().map(|n| n * 64 + 63));
    // An odd factor visits each word once.
    fill("one of each word, anywhere", (0..WORDS).map(|n| n.wrapping_mul(0x9E37_79B1) % WORDS * 64 + 1));
    fill("all but the first", 1..1 << 18);
    fill("all downwards", (0..1 << 18).rev());
    // Leaves that are split and then emptied.
    let split = (0..WORDS / 8).map(|n| n * 64 * 8).chain((0..WORDS * 8).filter(|n| n % 64 != 0));
    fill("each eighth word, then all", split);
}
