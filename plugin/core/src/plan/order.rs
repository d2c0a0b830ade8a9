//! Sorting descriptors by address. A request of 120,000 scattered blocks is sorted while its host waits, hence the radix sort:
//! block addresses differ in few bits, and each pass over eleven of them costs about a nanosecond per block.
//!
//! ```text
//!  63                                        0
//!   | 0 … | region | address / 2^shift | position |     one word per descriptor: its order is the one wanted,
//!          relative to the lowest, no bit that is the same in all       and equal addresses keep the host's
//! ```

use crate::spare::Spare;

/// Below this a comparison sort is as good.
const RADIX_FROM: usize = 2048;

/// Widest digit of a pass: its counters fit the first-level cache.
const DIGIT_BITS: u32 = 11;

/// Descriptors in ascending order of (region, address, position).
pub(super) struct Order {
    words: Spare<u64>,
    packing: Packing,
}

/// Where the parts of a word stand.
#[derive(Clone, Copy)]
struct Packing {
    position_bits: u32,
    /// Address bits in the word, and how many zeros were cut off below them; 0 with words that are bare positions.
    addr_bits: u32,
    shift: u32,
}

impl Order {
    /// The positions in order.
    pub(super) fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        let mask = (1u64 << self.packing.position_bits) - 1;
        self.words.iter().map(move |word| (word & mask) as usize)
    }

    /// Whether spans that all have this length overlap; `None` if the words do not tell.
    pub(super) fn spans_overlap(&self, len_bytes: u64) -> Option<bool> {
        let Packing { position_bits, addr_bits, shift } = self.packing;
        if addr_bits == 0 {
            return None;
        }
        let region = |word: u64| word.checked_shr(position_bits + addr_bits).unwrap_or(0);
        let distance = |a: u64, b: u64| ((b >> position_bits) - (a >> position_bits)) << shift;
        let near = |w: &[u64]| region(w[0]) == region(w[1]) && distance(w[0], w[1]) < len_bytes;
        Some(self.words.windows(2).any(near))
    }
}

/// Sorts `count` descriptors, whose (region, address) `key` tells.
pub(super) fn ascending(count: usize, key: impl Fn(usize) -> (u32, u64)) -> Order {
    let first = if count > 0 { key(0).1 } else { 0 };
    let (mut low, mut high, mut differ) = ((u32::MAX, u64::MAX), (0, 0), 0);
    for position in 0..count {
        let (region, addr) = key(position);
        low = (low.0.min(region), low.1.min(addr));
        high = (high.0.max(region), high.1.max(addr));
        differ |= addr ^ first;
    }
    let shift = differ.trailing_zeros().min(u64::BITS - 1);
    let addr_bits = (u64::BITS - (high.1.saturating_sub(low.1) >> shift).leading_zeros()).max(1);
    let region_bits = u32::BITS - high.0.saturating_sub(low.0).leading_zeros();
    let position_bits = usize::BITS - count.leading_zeros();
    if addr_bits + region_bits + position_bits > u64::BITS {
        let mut words = Spare::with_capacity(count);
        words.extend(0..count as u64);
        words.sort_by_key(|&position| key(position as usize));
        return Order { words, packing: Packing { position_bits, addr_bits: 0, shift: 0 } };
    }
    let mut words = Spare::with_capacity(count);
    for position in 0..count {
        let (region, addr) = key(position);
        let region = u64::from(region - low.0).checked_shl(addr_bits + position_bits).unwrap_or(0);
        words.push(region | ((addr - low.1) >> shift) << position_bits | position as u64);
    }
    if count < RADIX_FROM {
        words.sort_unstable();
    } else {
        words = radix(words, position_bits, addr_bits + region_bits);
    }
    Order { words, packing: Packing { position_bits, addr_bits, shift } }
}

/// Sorts by `bits` bits from bit `low` on, least significant digit first; stable.
fn radix(mut words: Spare<u64>, low: u32, bits: u32) -> Spare<u64> {
    let passes = bits.div_ceil(DIGIT_BITS);
    let width = bits.div_ceil(passes.max(1));
    let mut other = Spare::with_capacity(words.len());
    other.resize(words.len(), 0);
    for pass in 0..passes {
        let shift = low + pass * width;
        let mask = (1usize << width.min(low + bits - shift)) - 1;
        let digit = |word: u64| (word >> shift) as usize & mask;
        let mut starts = [0u32; 1 << DIGIT_BITS];
        for &word in words.iter() {
            starts[digit(word)] += 1;
        }
        let mut sum = 0;
        for start in &mut starts[..=mask] {
            (*start, sum) = (sum, sum + *start);
        }
        for &word in words.iter() {
            let at = &mut starts[digit(word)];
            other[*at as usize] = word;
            *at += 1;
        }
        std::mem::swap(&mut words, &mut other);
    }
    words
}
