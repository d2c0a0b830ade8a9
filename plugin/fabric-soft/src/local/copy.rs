//! Copies between mapped regions.

use std::sync::atomic::{Ordering, fence};

/// From here on a copy goes around the caches: it would only push out what is in them.
pub const STREAM_FROM_BYTES: usize = 32 << 10;

/// Copies `len` bytes. What another process changes meanwhile arrives in some mixture.
///
/// # Safety
/// `from` is readable and `to` writable for `len` bytes, the two do not overlap, and whoever else in this process uses `to` or `from`
/// expects this.
pub unsafe fn copy(to: u64, from: u64, len: usize) {
    let (to, from) = (to as *mut u8, from as *const u8);
    if len < STREAM_FROM_BYTES {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    } else {
        // SAFETY: the caller's promise.
        unsafe { stream(to, from, len) };
    }
}

/// Everything copied so far is visible to other processors before what follows, and was read before it.
pub fn finish_copies() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: no memory is named; SSE is part of the architecture.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
    fence(Ordering::SeqCst);
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn stream(to: *mut u8, from: *const u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

#[cfg(target_arch = "x86_64")]
unsafe fn stream(to: *mut u8, from: *const u8, len: usize) {
    if std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: the caller's promise; the processor has AVX.
        unsafe { stream_avx(to, from, len) }
    } else {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
    }
}

/// # Safety
/// As [`copy`], `len` at least a line and the processor with AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream_avx(to: *mut u8, from: *const u8, len: usize) {
    use std::arch::x86_64::{__m256i, _mm256_loadu_si256, _mm256_stream_si256};
    const LINE: usize = 64;
    debug_assert!(len >= LINE);
    let head = to.align_offset(LINE).min(len);
    let lines = (len - head) / LINE;
    // SAFETY: head, lines and tail are the `len` bytes of the caller's promise; the streamed addresses are aligned by `head`.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for line in 0..lines {
            let (to, from) = (to.add(head + line * LINE), from.add(head + line * LINE));
            let low = _mm256_loadu_si256(from.cast::<__m256i>());
            let high = _mm256_loadu_si256(from.add(LINE / 2).cast::<__m256i>());
            _mm256_stream_si256(to.cast::<__m256i>(), low);
            _mm256_stream_si256(to.add(LINE / 2).cast::<__m256i>(), high);
        }
        let done = head + lines * LINE;
        std::ptr::copy_nonoverlapping(from.add(done), to.add(done), len - done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_and_its_neighbours_stay_at_any_place_and_length() {
        const ROOM: usize = STREAM_FROM_BYTES + 4096;
        let source: Vec<u8> = (0..ROOM).map(|i| (i * 31 + i / 251) as u8).collect();
        for len in [0, 1, 63, 64, 65, STREAM_FROM_BYTES - 1, STREAM_FROM_BYTES, STREAM_FROM_BYTES + 777] {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (63, 65), (17, 33), (64, 128)] {
                let mut target = vec![0xA5u8; ROOM];
                // SAFETY: both ranges are inside vectors of our own.
                unsafe {
                    copy(target.as_mut_ptr().add(to) as u64, source.as_ptr().add(from) as u64, len);
                }
                finish_copies();
                assert_eq!(target[to..to + len], source[from..from + len]);
                assert!(target[..to].iter().chain(&target[to + len..]).all(|byte| *byte == 0xA5));
            }
        }
    }
}
