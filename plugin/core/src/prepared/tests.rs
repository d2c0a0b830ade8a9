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

fn split(lane_count: u8, stripe_min_bytes: u64, first_lane: u64) -> LaneSplit {
    LaneSplit { lane_count, stripe_min_bytes, first_lane, lane_map_generation: 3 }
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
        let prepared = Prepared::new(&plan, &[9, 10], &[0, 0, 20], &split(lane_count, stripe_min, first_lane));
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
        let prepared = Prepared::new(&plan, &[0, 1], &[0, 1, 2], &split(7, 4096, n));
        assert_eq!(prepared.lanes().len(), 1);
        uses[usize::from(prepared.lanes()[0].lane.0)] += 1;
    }
    assert_eq!(uses, [100; 7]);
}

#[test]
fn an_ordered_plan_stays_on_one_lane_also_when_split_anew() {
    let plan = plan(&[5000, 5000], true);
    let prepared = Prepared::new(&plan, &[0, 1], &[0, 1, 2], &split(4, 1, 0));
    assert_eq!(prepared.lanes().len(), 1);
    assert_eq!(prepared.resplit(&split(8, 1, 5)).lanes().len(), 1);
}

#[test]
fn nothing_to_move_uses_no_lane() {
    let prepared = Prepared::new(&plan(&[0, 0], false), &[], &[], &split(4, 1, 0));
    assert!(prepared.lanes().is_empty() && prepared.templates().is_empty());
    assert_eq!(prepared.total_bytes(), 0);
    assert_eq!(prepared.lane_map_generation(), 3);
}
