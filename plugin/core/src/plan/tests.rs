use baton_fabric::Op;
use proptest::prelude::*;

use super::*;

fn pair(local_addr: u64, remote_addr: u64, len_bytes: u64) -> Pair {
    Pair { local_addr, remote_addr, len_bytes, local: 0, remote: 0 }
}

fn build(op: Op, pairs: &[Pair], max_chunk_bytes: u32) -> Plan {
    Plan::build(op, pairs.to_vec(), PlanLimits { max_chunk_bytes, ..PlanLimits::default() }).unwrap()
}

/// Moves bytes as a fabric does that keeps the order of the pieces: (region, address) → (region, address).
fn moved(op: Op, pieces: &[Pair]) -> std::collections::BTreeMap<(u32, u64), (u32, u64)> {
    let mut to = std::collections::BTreeMap::new();
    for piece in pieces {
        for n in 0..piece.len_bytes {
            let (local, remote) =
                ((piece.local, piece.local_addr + n), (piece.remote, piece.remote_addr + n));
            match op {
                Op::Write => to.insert(remote, local),
                Op::Read => to.insert(local, remote),
            };
        }
    }
    to
}

fn any_pairs() -> impl Strategy<Value = Vec<Pair>> {
    let one = (0u64..400, 0u64..400, 0u64..40, 0u32..2, 0u32..2);
    let scattered = prop::collection::vec(one, 0..12).prop_map(|all| {
        all.into_iter()
            .map(|(l, r, len_bytes, local, remote)| Pair {
                local_addr: 1000 + l,
                remote_addr: 5000 + r,
                len_bytes,
                local,
                remote,
            })
            .collect()
    });
    // Neighbours on both sides, shuffled.
    let blocks = (1usize..30).prop_flat_map(|n| Just((0..n as u64).collect::<Vec<_>>()).prop_shuffle());
    let touching = blocks.prop_map(|order| {
        order.into_iter().map(|n| pair(1000 + 16 * n, 5000 + 16 * (n + n / 5), 16)).collect()
    });
    prop_oneof![scattered, touching]
}

proptest! {
    #[test]
    fn a_plan_moves_exactly_what_the_host_listed(
        pairs in any_pairs(),
        read in any::<bool>(),
        max_chunk in 1u32..50,
    ) {
        let op = if read { Op::Read } else { Op::Write };
        let plan = build(op, &pairs, max_chunk);
        prop_assert_eq!(moved(op, plan.pieces()), moved(op, &pairs));
        prop_assert_eq!(plan.total_bytes(), pairs.iter().map(|p| p.len_bytes).sum::<u64>());
        prop_assert!(plan.pieces().iter().all(|p| (1..=u64::from(max_chunk)).contains(&p.len_bytes)));
        let sorted = plan.pieces().is_sorted_by_key(|p| p.source(op));
        let apart = |all: &[Pair]| {
            let mut spans: Vec<_> = all.iter().map(|p| (p.source(op), p.len_bytes)).collect();
            spans.sort_unstable();
            spans.windows(2).all(|w| w[0].0.0 != w[1].0.0 || w[0].0.1 + w[0].1 <= w[1].0.1)
        };
        // Overlapping sources interleave once they are cut.
        prop_assert!(sorted || plan.is_ordered() || !apart(&pairs));
    }

    #[test]
    fn a_span_is_inside_exactly_when_every_byte_is(
        addr in 0u64..40, len in 0u64..40, base in 0u64..40, region in 0u64..40,
    ) {
        let inside = addr >= base && addr + len <= base + region;
        prop_assert_eq!(check_span(addr, len, base, region).is_ok(), inside);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn both_sorts_agree_with_the_obvious_one(
        n in prop_oneof![0usize..50, 2040usize..4000],
        spread in prop_oneof![Just(1u64), Just(1 << 20), Just(1 << 44), Just(u64::MAX)],
        regions in prop_oneof![Just(1u32), Just(3), Just(u32::MAX)],
        align in prop_oneof![Just(1u64), Just(4096)],
        seed in any::<u64>(),
    ) {
        let mut state = seed;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state ^ (state >> 31)
        };
        let pairs: Vec<Pair> = (0..n)
            .map(|_| Pair { remote: (random() >> 20) as u32 % regions, ..pair(0, random() % spread / align * align, 1) })
            .collect();
        let key: fn(&Pair) -> (u32, u64) = |p| (p.remote, p.remote_addr);
        let mut expected: Vec<u32> = (0..n as u32).collect();
        expected.sort_by_key(|&at| key(&pairs[at as usize]));
        let order = order::ascending(n, |at| key(&pairs[at]));
        prop_assert_eq!(order.positions().map(|at| at as u32).collect::<Vec<_>>(), expected.clone());
        let spans_overlap = |len: u64| {
            expected.windows(2).any(|w| {
                let ((ra, aa), (rb, ab)) = (key(&pairs[w[0] as usize]), key(&pairs[w[1] as usize]));
                ra == rb && ab - aa < len
            })
        };
        for len in [1, 4096, 5000] {
            prop_assert!(order.spans_overlap(len).is_none_or(|answer| answer == spans_overlap(len)));
        }
    }
}

#[test]
fn neighbours_on_both_sides_merge_whatever_their_order() {
    let pairs: Vec<Pair> = [3, 0, 2, 1].map(|n| pair(100 + 10 * n, 500 + 10 * n, 10)).to_vec();
    for op in [Op::Write, Op::Read] {
        assert_eq!(build(op, &pairs, 4096).pieces(), [pair(100, 500, 40)]);
        assert_eq!(build(op, &pairs, 16).piece_count(), 3);
    }
    let apart = [pair(100, 500, 10), pair(111, 510, 10)];
    assert_eq!(build(Op::Write, &apart, 4096).piece_count(), 2, "only the remote sides touch");
    let regions = [pair(100, 500, 10), Pair { remote: 1, ..pair(110, 510, 10) }];
    assert_eq!(build(Op::Write, &regions, 4096).piece_count(), 2, "two regions");
}

#[test]
fn pieces_stand_in_the_order_in_which_their_bytes_lie_at_the_source() {
    let pairs: Vec<Pair> =
        [(3, 0), (0, 2), (2, 3), (1, 1)].map(|(l, r)| pair(100 + 10 * l, 500 + 10 * r, 10)).to_vec();
    let local = |plan: Plan| plan.pieces().iter().map(|p| p.local_addr).collect::<Vec<_>>();
    let remote = |plan: Plan| plan.pieces().iter().map(|p| p.remote_addr).collect::<Vec<_>>();
    assert_eq!(local(build(Op::Write, &pairs, 4096)), [100, 110, 120, 130]);
    assert_eq!(remote(build(Op::Read, &pairs, 4096)), [500, 510, 520, 530]);
}

#[test]
fn equal_destinations_in_a_grid_are_apart_and_whatever_else_is_looked_at_closely() {
    let all = |places: &[u64]| places.iter().map(|place| pair(0, 5000 + place, 16)).collect::<Vec<_>>();
    for (places, apart) in [
        (&[32, 0, 16][..], true),
        (&[], true),
        (&[48], true),
        (&[32, 0, 32], false),
        (&[32, 0, 24], false),
        (&[1 << 40, 0], false),
        (&[u64::MAX - 5000, 0], false),
    ] {
        assert_eq!(have_own_cells(&all(places), Op::Write), apart, "{places:?}");
    }
    let uneven = [pair(0, 16, 16), pair(0, 0, 8)];
    assert!(!have_own_cells(&uneven, Op::Write) && !build(Op::Write, &uneven, 4096).is_ordered());
    let odd = [3, 1, 0].map(|n| pair(0, 24 * n, 24));
    assert!(have_own_cells(&odd, Op::Write), "cells need not be powers of two");
    let regions = [pair(0, 16, 16), pair(0, 0, 16), Pair { remote: 1, ..pair(0, 16, 16) }];
    assert!(!have_own_cells(&regions, Op::Write) && !build(Op::Write, &regions, 4096).is_ordered());
}

#[test]
fn overlapping_destinations_keep_the_order_of_the_host_and_one_lane() {
    let pairs = [pair(0, 520, 10), pair(50, 515, 10), pair(90, 500, 5)];
    let plan = build(Op::Write, &pairs, 4096);
    assert_eq!(plan.pieces(), pairs);
    assert!(plan.is_ordered());
    let plan = build(Op::Read, &pairs, 4096);
    assert!(!plan.is_ordered(), "sources may overlap");
    let same_target = [pair(0, 600, 10), pair(5, 500, 10)];
    assert!(build(Op::Read, &same_target, 4096).is_ordered());
}

#[test]
fn bad_descriptors_are_named() {
    let overflow = vec![pair(0, 0, 1), pair(u64::MAX - 4, 0, 4), pair(5, u64::MAX, 1)];
    let error = Plan::build(Op::Write, overflow, PlanLimits::default()).unwrap_err();
    assert_eq!(error, PlanError::Overflow { index: 2, side: "remote", addr: u64::MAX, len_bytes: 1 });
    let limits = PlanLimits { max_chunk_bytes: 10, max_pieces: 4 };
    let error = Plan::build(Op::Write, vec![pair(0, 0, 41)], limits).unwrap_err();
    assert_eq!(error, PlanError::TooManyPieces { pieces: 5, limit: 4, max_chunk_bytes: 10 });
    assert_eq!(
        check_span(u64::MAX, 2, 0, u64::MAX),
        Err(SpanError::Overflow { addr: u64::MAX, len_bytes: 2 })
    );
    assert!(check_span(u64::MAX - 4, 4, u64::MAX - 10, 10).is_ok());
}
