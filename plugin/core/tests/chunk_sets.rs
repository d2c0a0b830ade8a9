//! What a set of chunks takes from the allocator is at most what it says.

use baton_core::two_sided::chunks::ChunkSet;
use baton_core::two_sided::codec::MAX_CHUNKS;
use baton_counting_alloc::of_this_thread;

/// Inserts them all; the most bytes that it had.
fn fill(order: &str, chunks: impl Iterator<Item = u32>) -> usize {
    let before = of_this_thread();
    let (mut set, mut most) = (ChunkSet::default(), 0);
    for (sent, chunk) in (1..).zip(chunks) {
        set.insert(chunk);
        let live = (of_this_thread() - before).live_bytes as usize;
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
