//! Sorting descriptors by address. A request of 120,000 scattered blocks is sorted while its host waits, hence the radix sort:
//! block addresses differ in few bits, and each pass over eleven of them costs about a nanosecond per block.

use super::Pair;

/// Below this a comparison sort is as good.
const RADIX_FROM: usize = 2048;

const DIGIT_BITS: u32 = 11;
const DIGITS: usize = 1 << DIGIT_BITS;

/// What is sorted: a key whose order is that of (region, address), and the position.
type Keyed = (u64, u32);

/// Positions of `pairs` in ascending order of (region, address, position).
pub(super) fn ascending(pairs: &[Pair], key: fn(&Pair) -> (u32, u64)) -> Vec<u32> {
    match packed(pairs, key) {
        Some(keys) if pairs.len() >= RADIX_FROM => radix(keys),
        Some(mut keys) => {
            keys.sort_unstable();
            keys.into_iter().map(|(_, position)| position).collect()
        }
        None => {
            let mut order: Vec<u32> = (0..pairs.len() as u32).collect();
            order.sort_by_key(|&position| key(&pairs[position as usize]));
            order
        }
    }
}

/// Region and address in one word, relative to the lowest, without the bits that are zero in all; `None` if they need more than 64.
fn packed(pairs: &[Pair], key: fn(&Pair) -> (u32, u64)) -> Option<Vec<Keyed>> {
    let (mut low, mut high) = ((u32::MAX, u64::MAX), (0, 0));
    for pair in pairs {
        let (region, addr) = key(pair);
        low = (low.0.min(region), low.1.min(addr));
        high = (high.0.max(region), high.1.max(addr));
    }
    let addr_bits = u64::BITS - high.1.saturating_sub(low.1).leading_zeros();
    let region_bits = u32::BITS - high.0.saturating_sub(low.0).leading_zeros();
    if addr_bits + region_bits > u64::BITS {
        return None;
    }
    let mut used = 0;
    let mut keys: Vec<Keyed> = Vec::with_capacity(pairs.len());
    for (position, pair) in pairs.iter().enumerate() {
        let (region, addr) = key(pair);
        let high_part = u64::from(region - low.0).checked_shl(addr_bits).unwrap_or(0);
        let packed = high_part | (addr - low.1);
        used |= packed;
        keys.push((packed, position as u32));
    }
    let shift = used.trailing_zeros().min(u64::BITS - 1);
    keys.iter_mut().for_each(|(key, _)| *key >>= shift);
    Some(keys)
}

/// Least significant digit first; stable, so equal keys keep the order of their positions.
fn radix(mut keys: Vec<Keyed>) -> Vec<u32> {
    let used = keys.iter().fold(0, |used, (key, _)| used | key);
    let mut other = vec![(0, 0); keys.len()];
    let mut shift = 0;
    while shift < u64::BITS && used >> shift != 0 {
        let digit = |key: u64| (key >> shift) as usize & (DIGITS - 1);
        let mut starts = [0u32; DIGITS];
        for &(key, _) in &keys {
            starts[digit(key)] += 1;
        }
        let mut sum = 0;
        for start in &mut starts {
            (*start, sum) = (sum, sum + *start);
        }
        for &one in &keys {
            let at = &mut starts[digit(one.0)];
            other[*at as usize] = one;
            *at += 1;
        }
        std::mem::swap(&mut keys, &mut other);
        shift += DIGIT_BITS;
    }
    keys.into_iter().map(|(_, position)| position).collect()
}
