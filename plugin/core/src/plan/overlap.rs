//! A plan for paths that promise no order at all: where destinations overlap, only the bytes that come last in the host's order move.

use std::collections::BTreeMap;

use super::{Pair, Plan};

impl Plan {
    /// The pieces without the bytes that a later piece would overwrite.
    pub fn disjoint_pieces(&self) -> Vec<Pair> {
        if !self.is_ordered() {
            return self.pieces().to_vec();
        }
        let mut covered = Covered::default();
        let mut kept = Vec::with_capacity(self.pieces().len());
        for pair in self.pieces().iter().rev() {
            let (region, addr) = pair.destination(self.op());
            covered.add(region, addr, addr + pair.len_bytes, |from, to| {
                let skip = from - addr;
                kept.push(Pair {
                    local_addr: pair.local_addr + skip,
                    remote_addr: pair.remote_addr + skip,
                    len_bytes: to - from,
                    ..*pair
                });
            });
        }
        kept.reverse();
        kept
    }
}

/// Disjoint spans by region: start → end.
#[derive(Default)]
struct Covered {
    spans: BTreeMap<(u32, u64), u64>,
}

impl Covered {
    /// Adds a span and reports the parts of it that were not there, the last first.
    fn add(&mut self, region: u32, start: u64, end: u64, mut fresh: impl FnMut(u64, u64)) {
        let (mut low, mut high, mut open) = (start, end, end);
        // From the right: every span that begins before `open` and does not end before `start`.
        while let Some((&(of, from), &to)) = self.spans.range(..(region, open)).next_back() {
            if of != region || to < start {
                break;
            }
            if to < open {
                fresh(to.max(start), open);
            }
            self.spans.remove(&(of, from));
            (low, high, open) = (low.min(from), high.max(to), open.min(from));
            if from <= start {
                break;
            }
        }
        if open > start {
            fresh(start, open);
        }
        self.spans.insert((region, low), high);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::PlanLimits;
    use baton_fabric::Op;
    use proptest::prelude::*;

    const BYTES: u64 = 64;

    fn result_of(pieces: &[Pair], op: Op) -> Vec<Option<u64>> {
        let mut memory = vec![None; 3 * BYTES as usize];
        for pair in pieces {
            let (_, to) = pair.destination(op);
            let from = if op == Op::Write { pair.local_addr } else { pair.remote_addr };
            (0..pair.len_bytes).for_each(|n| memory[(to + n) as usize] = Some(from + n));
        }
        memory
    }

    proptest! {
        #[test]
        fn what_is_left_has_no_overlaps_and_the_same_result_in_any_order(
            spans in prop::collection::vec((0..BYTES, 0..BYTES, 1..BYTES), 1..12),
            write in any::<bool>(),
        ) {
            let op = if write { Op::Write } else { Op::Read };
            let pairs: Vec<_> = spans
                .iter()
                .map(|&(local_addr, remote_addr, len_bytes)| Pair { local_addr, remote_addr, len_bytes, local: 0, remote: 0 })
                .collect();
            let plan = Plan::build(op, pairs.clone(), PlanLimits::default()).expect("legal");
            let mut left = plan.disjoint_pieces();
            let bytes: u64 = left.iter().map(|pair| pair.len_bytes).sum();
            let expected = result_of(&pairs, op);
            prop_assert_eq!(bytes, expected.iter().flatten().count() as u64, "no byte moves twice");
            left.reverse();
            prop_assert_eq!(result_of(&left, op), expected);
        }
    }
}
