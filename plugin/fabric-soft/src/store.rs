//! Stores into memory of the engine's own ([`baton_fabric::Memory::mapped`]), whose readers look at it at any time.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

const WORD: usize = size_of::<u64>();

/// Copies `from` to `to` in ascending order, whole words where they are aligned: a word that is polled is never seen in halves, and
/// nothing is seen before what lies in front of it.
///
/// # Safety
/// `to` is writable for as many bytes, `from` does not overlap it, and whoever else uses it does so with atomic accesses.
pub(crate) unsafe fn store(to: u64, from: &[u8]) {
    let to = std::ptr::with_exposed_provenance_mut::<u8>(to as usize);
    let (head, rest) = from.split_at(to.align_offset(WORD).min(from.len()));
    let (words, tail) = rest.as_chunks::<WORD>();
    // SAFETY: all offsets are inside of the caller's promise, and those of words are aligned behind `head`.
    unsafe {
        store_bytes(to, head);
        let to = to.add(head.len());
        for (i, word) in words.iter().enumerate() {
            AtomicU64::from_ptr(to.add(i * WORD).cast()).store(u64::from_ne_bytes(*word), Ordering::Release);
        }
        store_bytes(to.add(words.len() * WORD), tail);
    }
}

/// # Safety
/// As [`store`].
unsafe fn store_bytes(to: *mut u8, from: &[u8]) {
    for (i, byte) in from.iter().enumerate() {
        // SAFETY: the caller's promise; bytes are always aligned.
        unsafe { AtomicU8::from_ptr(to.add(i)) }.store(*byte, Ordering::Release);
    }
}

/// As [`store`], into the buffers one after the other, as far as they reach. Returns how many bytes that were.
///
/// # Safety
/// As [`store`], for every buffer.
pub(crate) unsafe fn scatter(from: &[u8], to: &[libc::iovec]) -> usize {
    let mut rest = from;
    for buffer in to {
        let (piece, behind) = rest.split_at(buffer.iov_len.min(rest.len()));
        // SAFETY: the caller's promise for this buffer.
        unsafe { store(buffer.iov_base as u64, piece) };
        rest = behind;
    }
    from.len() - rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_at_any_place_and_length_and_its_neighbours_stay() {
        let from: Vec<u8> = (1..=64).collect();
        for at in 0..=9 {
            for len in (0..=25).chain([64]) {
                let mut target = [0xA5u8; 80];
                // SAFETY: inside of an array of our own that nobody else uses.
                unsafe { store(target.as_mut_ptr() as u64 + at as u64, &from[..len]) };
                assert_eq!(target[at..at + len], from[..len]);
                assert!(target[..at].iter().chain(&target[at + len..]).all(|byte| *byte == 0xA5));
            }
        }
    }

    #[test]
    fn buffers_are_filled_one_after_the_other() {
        let (mut a, mut b) = ([0u8; 5], [0u8; 7]);
        let buffers = [&mut a[..], &mut b[..]]
            .map(|buffer| libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() });
        // SAFETY: the buffers are arrays of our own that nobody else uses.
        let n = unsafe { scatter(&[1, 2, 3, 4, 5, 6, 7, 8], &buffers) };
        assert_eq!((n, a, b), (8, [1, 2, 3, 4, 5], [6, 7, 8, 0, 0, 0, 0]));
    }
}
