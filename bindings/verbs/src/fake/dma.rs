//! Moving bytes between addresses, as a device does: beside the program, without asking it.

use std::sync::atomic::{AtomicU64, Ordering};

/// A piece of this process' memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub addr: u64,
    pub len: u64,
}

/// Up to here, aligned words are moved one by one, each whole: programs poll on words that a peer writes.
const WORDWISE_BYTES: u64 = 8192;

/// Copies `len` bytes.
///
/// # Safety
/// Both ranges must be mapped, `to` writable, and their owners must have handed them to the device.
pub(super) unsafe fn copy(from: u64, to: u64, len: u64) {
    if (from | to).is_multiple_of(8) && len <= WORDWISE_BYTES {
        for at in (0..len / 8).map(|word| word * 8) {
            // SAFETY: aligned, inside both ranges by the caller's promise; atomic because the program may look at the same time.
            unsafe {
                let word = AtomicU64::from_ptr((from + at) as *mut u64).load(Ordering::Acquire);
                AtomicU64::from_ptr((to + at) as *mut u64).store(word, Ordering::Release);
            }
        }
        let done = len / 8 * 8;
        // SAFETY: what is left of the same ranges.
        unsafe { std::ptr::copy((from + done) as *const u8, (to + done) as *mut u8, (len - done) as usize) };
    } else {
        // SAFETY: the caller's promise; the ranges may overlap.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, len as usize) };
    }
}

/// The part `skip..skip + len` of a list of pieces.
pub(super) fn part(pieces: &[Piece], mut skip: u64, mut len: u64) -> Vec<Piece> {
    let mut part = Vec::new();
    for piece in pieces {
        if len == 0 {
            break;
        }
        if skip >= piece.len {
            skip -= piece.len;
            continue;
        }
        let take = (piece.len - skip).min(len);
        part.push(Piece { addr: piece.addr + skip, len: take });
        skip = 0;
        len -= take;
    }
    part
}

/// Pairs of equally long pieces of two lists, up to the shorter list's end.
pub(super) fn zip(from: &[Piece], to: &[Piece]) -> Vec<(Piece, u64)> {
    let mut pairs = Vec::new();
    let (mut f, mut t) = (from.iter().copied(), to.iter().copied());
    let (mut a, mut b) = (f.next(), t.next());
    while let (Some(x), Some(y)) = (a, b) {
        let len = x.len.min(y.len);
        if len > 0 {
            pairs.push((Piece { addr: x.addr, len }, y.addr));
        }
        let rest = |p: Piece| (p.len > len).then_some(Piece { addr: p.addr + len, len: p.len - len });
        a = rest(x).or_else(|| f.next());
        b = rest(y).or_else(|| t.next());
    }
    pairs
}

#[cfg(test)]
mod tests {
    use super::{Piece, part, zip};

    fn piece(addr: u64, len: u64) -> Piece {
        Piece { addr, len }
    }

    #[test]
    fn a_part_of_pieces_is_cut_at_both_ends() {
        let pieces = [piece(100, 10), piece(200, 10), piece(300, 10)];
        assert_eq!(part(&pieces, 5, 10), [piece(105, 5), piece(200, 5)]);
        assert_eq!(part(&pieces, 10, 20), [piece(200, 10), piece(300, 10)]);
        assert_eq!(part(&pieces, 0, 0), []);
    }

    #[test]
    fn pieces_of_different_cuts_are_paired_without_a_gap() {
        let pairs = zip(&[piece(0, 3), piece(100, 5)], &[piece(1000, 4), piece(2000, 9)]);
        assert_eq!(pairs, [(piece(0, 3), 1000), (piece(100, 1), 1003), (piece(101, 4), 2000)]);
    }
}
