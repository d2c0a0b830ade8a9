use baton_fabric::Op;
use proptest::prelude::*;

use super::*;
use crate::plan::{Pair, PlanLimits};

fn plan(lengths: &[u64], ordered: bool) -> Plan {
    let mut at = 0;
    let mut pairs: Vec<Pair> = lengths
        .iter()
        .map(|&len_bytes| {
            at += len_bytes + 1;
            Pair { local_addr: at, remote_addr: at, len_bytes, local: 1, remote: 2 }
        })
        .collect();
    if ordered {
        pairs.push(pairs[0]);
    }
    Plan::build(Op::Write, pairs, PlanLimits::default()).unwrap()
}

fn split(lane_count: u8, stripe_min_bytes: u64, first_lane: u64) -> LaneSplit<'static> {
    const LANES: [LaneRails; 64] = [LaneRails { own: 0, peer: 0 }; 64];
    LaneSplit {
        lanes: &LANES[..usize::from(lane_count)],
        max_message_bytes: 4 << 20,
        stripe_min_bytes,
        first_lane,
        lane_map_generation: 3,
    }
}

/// Regions of one key each.
fn whole(keys: &[u64]) -> Vec<KeyTable<'_>> {
    keys.iter().map(KeyTable::whole).collect()
}

fn prepare(plan: &Plan, locals: &[u64], remotes: &[u64], split: &LaneSplit<'_>) -> Prepared {
    Prepared::new(plan, &whole(locals), &whole(remotes), split).unwrap()
}

proptest! {
    #[test]
    fn lanes_divide_the_templates_and_share_the_bytes(
        lengths in prop::collection::vec(1u64..5000, 1..60),
        lane_count in 1u8..=64,
        stripe_min in 1u64..20_000,
        first_lane in any::<u64>(),
    ) {
        let plan = plan(&lengths, false);
        let prepared = prepare(&plan, &[9, 10], &[0, 0, 20], &split(lane_count, stripe_min, first_lane));
        let ranges = prepared.lanes();
        prop_assert_eq!(ranges[0].start, 0);
        prop_assert_eq!(ranges.last().unwrap().end as usize, prepared.templates().len());
        prop_assert!(ranges.windows(2).all(|w| w[0].end == w[1].start));
        prop_assert!(ranges.iter().all(|r| r.start < r.end && r.lane.0 < lane_count));
        let mut lanes: Vec<u8> = ranges.iter().map(|r| r.lane.0).collect();
        lanes.sort_unstable();
        lanes.dedup();
        prop_assert_eq!(lanes.len(), ranges.len(), "no lane twice");
        let longest = *lengths.iter().max().unwrap();
        let share = plan.total_bytes() / ranges.len() as u64;
        for range in ranges {
            let templates = &prepared.templates()[range.start as usize..range.end as usize];
            prop_assert_eq!(range.bytes, templates.iter().map(|t| u64::from(t.len_bytes)).sum::<u64>());
            prop_assert!(range.bytes <= share + 2 * longest, "{} of {}", range.bytes, share);
        }
        prop_assert!(prepared.templates().iter().all(|t| (t.local_key, t.remote_key) == (10, 20)));
    }
}

#[test]
fn small_transfers_stay_on_one_lane_and_spread_evenly_over_all() {
    let plan = plan(&[100, 100], false);
    let mut uses = [0u32; 7];
    for n in 0..700 {
        let prepared = prepare(&plan, &[0, 1], &[0, 1, 2], &split(7, 4096, n));
        assert_eq!(prepared.lanes().len(), 1);
        uses[usize::from(prepared.lanes()[0].lane.0)] += 1;
    }
    assert_eq!(uses, [100; 7]);
}

#[test]
fn an_ordered_plan_stays_on_one_lane_also_on_more_lanes() {
    let plan = plan(&[5000, 5000], true);
    let prepared = prepare(&plan, &[0, 1], &[0, 1, 2], &split(4, 1, 0));
    assert_eq!(prepared.lanes().len(), 1);
    assert_eq!(prepare(&plan, &[0, 1], &[0, 1, 2], &split(8, 1, 5)).lanes().len(), 1);
}

#[test]
fn nothing_to_move_uses_no_lane() {
    let prepared = prepare(&plan(&[0, 0], false), &[], &[], &split(4, 1, 0));
    assert!(prepared.lanes().is_empty() && prepared.templates().is_empty());
    assert_eq!(prepared.total_bytes(), 0);
    assert_eq!(prepared.lane_map_generation(), 3);
}

/// A region as a test knows it: `(base, length, segment length, rails)`.
#[derive(Clone, Debug)]
struct Made {
    base: u64,
    len: u64,
    segment_bytes: u64,
    rails: u8,
    keys: Vec<u64>,
}

impl Made {
    /// The key tells its region, rail and segment.
    fn new(side: u64, region: u64, base: u64, len: u64, segment_bytes: u64, rails: u8) -> Made {
        let segments = len.div_ceil(segment_bytes);
        let keys = (0..u64::from(rails)).flat_map(|rail| {
            (0..segments).map(move |segment| side << 56 | region << 48 | rail << 40 | segment)
        });
        let keys = keys.collect();
        Made { base, len, segment_bytes, rails, keys }
    }

    fn table(&self) -> KeyTable<'_> {
        KeyTable { base: self.base, segment_bytes: self.segment_bytes, rails: self.rails, keys: &self.keys }
    }
}

fn any_region(side: u64, region: u64) -> impl Strategy<Value = Made> {
    (1..100_000u64, 1..3000u64, prop_oneof![1..4000u64, Just(1 << 40)], 1..=4u8).prop_map(
        move |(base, len, segment_bytes, rails)| {
            Made::new(side, region, (region << 32) + base, len, segment_bytes, rails)
        },
    )
}

/// Pairs inside their regions; they may overlap, on both sides.
fn any_pairs() -> impl Strategy<Value = (Vec<Made>, Vec<Made>, Vec<Pair>)> {
    let regions = |side| [any_region(side, 0), any_region(side, 1)];
    (regions(0), regions(1)).prop_flat_map(|(locals, remotes)| {
        let sizes = [&locals, &remotes].map(|side| [side[0].len, side[1].len]);
        let pair = (0..2u32, 0..2u32, any::<[prop::sample::Index; 3]>()).prop_map({
            let (locals, remotes) = (locals.clone(), remotes.clone());
            move |(local, remote, [len, at, to])| {
                let (l, r) = (sizes[0][local as usize], sizes[1][remote as usize]);
                let len_bytes = len.index(l.min(r) as usize + 1) as u64;
                Pair {
                    local_addr: locals[local as usize].base + at.index((l - len_bytes) as usize + 1) as u64,
                    remote_addr: remotes[remote as usize].base
                        + to.index((r - len_bytes) as usize + 1) as u64,
                    len_bytes,
                    local,
                    remote,
                }
            }
        });
        (Just(locals.to_vec()), Just(remotes.to_vec()), prop::collection::vec(pair, 0..12))
    })
}

/// What a run of pieces moves, byte by byte and in order: local address, remote address.
fn moved(pieces: impl Iterator<Item = (u64, u64, u64)>) -> Vec<(u64, u64)> {
    pieces.flat_map(|(local, remote, len)| (0..len).map(move |n| (local + n, remote + n))).collect()
}

proptest! {
    #[test]
    fn cutting_moves_every_byte_once_in_order_and_crosses_no_border(
        (locals, remotes, pairs) in any_pairs(),
        max_message_bytes in prop_oneof![1..600u64, Just(u64::MAX)],
        lanes in prop::collection::vec((0..4u8, 0..4u8), 1..6),
        stripe_min_bytes in 1..3000u64,
        first_lane in any::<u64>(),
        op in prop_oneof![Just(Op::Read), Just(Op::Write)],
    ) {
        let limits = PlanLimits { max_chunk_bytes: 2000, ..PlanLimits::default() };
        let plan = Plan::build(op, pairs, limits).unwrap();
        // Rails that every region has.
        let rails = |tables: &[Made]| tables.iter().map(|made| made.rails).min().unwrap();
        let lanes: Vec<_> = lanes
            .iter()
            .map(|(own, peer)| LaneRails { own: own % rails(&locals), peer: peer % rails(&remotes) })
            .collect();
        let split =
            LaneSplit { lanes: &lanes, max_message_bytes, stripe_min_bytes, first_lane, lane_map_generation: 9 };
        let local_tables: Vec<_> = locals.iter().map(Made::table).collect();
        let remote_tables: Vec<_> = remotes.iter().map(Made::table).collect();
        let prepared = Prepared::new(&plan, &local_tables, &remote_tables, &split).unwrap();

        let planned = moved(plan.pieces().iter().map(|p| (p.local_addr, p.remote_addr, p.len_bytes)));
        let posted = moved(
            prepared.templates().iter().map(|t| (t.local_addr, t.remote_addr, u64::from(t.len_bytes))),
        );
        prop_assert_eq!(planned, posted);
        prop_assert_eq!(prepared.total_bytes(), plan.total_bytes());
        prop_assert!(!plan.is_ordered() || prepared.lanes().len() <= 1);
        let mut at = 0;
        for range in prepared.lanes() {
            prop_assert_eq!(range.start, at);
            at = range.end;
            let rails = lanes[usize::from(range.lane.0)];
            for t in &prepared.templates()[range.start as usize..range.end as usize] {
                let len = u64::from(t.len_bytes);
                prop_assert!(len >= 1 && len <= max_message_bytes);
                for (side, made, rail, key, addr) in [
                    (0, &locals, rails.own, t.local_key, t.local_addr),
                    (1, &remotes, rails.peer, t.remote_key, t.remote_addr),
                ] {
                    let region = &made[(key >> 48 & 0xff) as usize];
                    let segment = key & 0xff_ffff_ffff;
                    prop_assert_eq!((key >> 56, key >> 40 & 0xff), (side, u64::from(rail)));
                    prop_assert!(addr >= region.base && addr + len <= region.base + region.len);
                    prop_assert_eq!((addr - region.base) / region.segment_bytes, segment);
                    prop_assert_eq!((addr + len - 1 - region.base) / region.segment_bytes, segment);
                }
            }
        }
        prop_assert_eq!(at as usize, prepared.templates().len());
    }
}

#[test]
fn a_region_without_keys_for_the_rail_of_a_lane_is_named() {
    let plan = plan(&[5000, 5000], false);
    let made = Made::new(0, 0, 0, 1 << 20, 1 << 40, 2);
    let (two, one) = (made.table(), KeyTable::whole(&7));
    let lanes = [LaneRails { own: 1, peer: 0 }, LaneRails { own: 1, peer: 2 }];
    let split = LaneSplit { lanes: &lanes, ..split(2, 1, 0) };
    let error = Prepared::new(&plan, &[two, two], &[two, one, one], &split).unwrap_err();
    assert_eq!(error, PrepareError::Rail { side: "remote", region: 0, lane: 1, rail: 2, rails: 2 });
    assert!(
        error.to_string().contains("remote region 0 of the transfer has keys for 2 rails only"),
        "{error}"
    );
    let error = Prepared::new(&plan, &[two, one], &[two, one, one], &split).unwrap_err();
    assert_eq!(error, PrepareError::Rail { side: "local", region: 1, lane: 0, rail: 1, rails: 1 });
}

#[test]
fn the_limit_of_pieces_holds_after_cutting() {
    let pair = Pair { local_addr: 0, remote_addr: 0, len_bytes: 10_000, local: 0, remote: 0 };
    let limits = PlanLimits { max_pieces: 10, ..PlanLimits::default() };
    let plan = Plan::build(Op::Write, vec![pair], limits).unwrap();
    let with = |max_message_bytes| LaneSplit { max_message_bytes, ..split(1, 1, 0) };
    let keys = [KeyTable::whole(&1)];
    assert_eq!(Prepared::new(&plan, &keys, &keys, &with(1000)).unwrap().templates().len(), 10);
    let error = Prepared::new(&plan, &keys, &keys, &with(999)).unwrap_err();
    assert_eq!(error, PrepareError::TooManyPieces { limit: 10, max_message_bytes: 999 });
}

#[test]
fn a_plan_that_fits_is_not_copied() {
    let plan = plan(&[4096; 4], false);
    let whole = [KeyTable::whole(&1); 3];
    let cut = |tables: &[KeyTable<'_>], max| keys::cut(&plan, tables, tables, max).unwrap();
    assert!(matches!(cut(&whole, 4096), std::borrow::Cow::Borrowed(_)));
    assert!(matches!(cut(&whole, 4095), std::borrow::Cow::Owned(_)));
    // Segments whose borders no piece crosses.
    let made = Made::new(0, 0, 0, 1 << 20, 1 << 19, 1);
    assert!(matches!(cut(&[made.table(); 3], 4096), std::borrow::Cow::Borrowed(_)));
}

#[test]
fn one_large_descriptor_uses_every_lane_that_it_is_worth() {
    for (len, stripe_min, used) in [(1 << 20, 1 << 18, 4), (1 << 20, 1 << 19, 2), (1 << 20, 1 << 21, 1)] {
        let prepared = prepare(&plan(&[len], false), &[0, 1], &[0, 1, 2], &split(4, stripe_min, 2));
        assert_eq!(prepared.lanes().len(), used);
        assert_eq!(prepared.templates().len(), used, "no more pieces than lanes");
        assert!(prepared.lanes().iter().all(|range| range.bytes == len / used as u64));
    }
    // A large one among small ones does not make its lane the slowest.
    let mixed = prepare(&plan(&[64, 64, 8 << 20], false), &[0, 1], &[0, 1, 2], &split(4, 1 << 20, 0));
    assert!(mixed.lanes().iter().all(|range| range.bytes <= (2 << 20) + 8192), "{:?}", mixed.lanes());
    assert_eq!(prepare(&plan(&[8 << 20], true), &[0, 1], &[0, 1, 2], &split(4, 1, 0)).lanes().len(), 1);
}
