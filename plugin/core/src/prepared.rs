//! [`Plan`] + keys → [`Prepared`]: the work templates of a transfer, split over lanes. Immutable and shared by every post of
//! the request: a post touches a few numbers per lane, never the templates.

use baton_fabric::{Op, Template};

use crate::ids::LaneId;
use crate::plan::Plan;

/// How a transfer is spread over the lanes of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneSplit {
    /// Lanes of the session, 1 ..= 64.
    pub lane_count: u8,
    /// Below this many bytes one lane carries everything; above, each used lane carries at least about this much.
    pub stripe_min_bytes: u64,
    /// Any running number: lane `first_lane % lane_count` is used first. Counting up from transfer to transfer
    /// spreads small transfers evenly.
    pub first_lane: u64,
    /// Which lane map this split belongs to; the driver compares it at post time.
    pub lane_map_generation: u64,
}

/// The part of a transfer that goes over one lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneRange {
    /// Lane.
    pub lane: LaneId,
    /// First template.
    pub start: u32,
    /// One past the last template; `start < end`.
    pub end: u32,
    /// Bytes of the range.
    pub bytes: u64,
}

/// A transfer ready to be posted any number of times.
#[derive(Debug)]
pub struct Prepared {
    op: Op,
    templates: Box<[Template]>,
    lanes: Box<[LaneRange]>,
    total_bytes: u64,
    ordered: bool,
    lane_map_generation: u64,
}

impl Prepared {
    /// Bakes keys into templates and splits them over lanes. `local_keys` and `remote_keys` are indexed by
    /// [`crate::plan::Pair::local`] and [`crate::plan::Pair::remote`]; a missing key is the caller's bug and panics.
    pub fn new(plan: &Plan, local_keys: &[u64], remote_keys: &[u64], split: &LaneSplit) -> Prepared {
        let templates: Box<[Template]> = plan
            .pieces()
            .iter()
            .map(|piece| Template {
                local_addr: piece.local_addr,
                remote_addr: piece.remote_addr,
                local_key: local_keys[piece.local as usize],
                remote_key: remote_keys[piece.remote as usize],
                len_bytes: piece.len_bytes as u32,
                op: plan.op(),
                reserved: [0; 3],
            })
            .collect();
        let lanes = split_ranges(&templates, plan.total_bytes(), plan.is_ordered(), split);
        Prepared {
            op: plan.op(),
            templates,
            lanes,
            total_bytes: plan.total_bytes(),
            ordered: plan.is_ordered(),
            lane_map_generation: split.lane_map_generation,
        }
    }

    /// The same work split anew, for another lane map.
    pub fn resplit(&self, split: &LaneSplit) -> Prepared {
        let templates = self.templates.clone();
        let lanes = split_ranges(&templates, self.total_bytes, self.ordered, split);
        Prepared {
            op: self.op,
            templates,
            lanes,
            total_bytes: self.total_bytes,
            ordered: self.ordered,
            lane_map_generation: split.lane_map_generation,
        }
    }

    /// Direction.
    pub fn op(&self) -> Op {
        self.op
    }

    /// Every work request, lane by lane.
    pub fn templates(&self) -> &[Template] {
        &self.templates
    }

    /// The used lanes in the order of their templates; empty when there is nothing to move.
    pub fn lanes(&self) -> &[LaneRange] {
        &self.lanes
    }

    /// Bytes moved.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// [`LaneSplit::lane_map_generation`] of the split.
    pub fn lane_map_generation(&self) -> u64 {
        self.lane_map_generation
    }
}

/// Contiguous ranges of about equal bytes: neighbours in memory stay on one lane.
fn split_ranges(templates: &[Template], total: u64, ordered: bool, split: &LaneSplit) -> Box<[LaneRange]> {
    let lane_count = u64::from(split.lane_count.clamp(1, 64));
    let wanted = if ordered { 1 } else { total / split.stripe_min_bytes.max(1) };
    let used = wanted.clamp(1, lane_count).min(templates.len() as u64);
    let mut ranges = Vec::with_capacity(used as usize);
    let (mut start, mut sent) = (0usize, 0u64);
    for k in 0..used {
        let target = (u128::from(total) * u128::from(k + 1) / u128::from(used)) as u64;
        // Leave at least one template to each of the lanes to come.
        let last_end = templates.len() - (used - k - 1) as usize;
        let (mut end, mut bytes) = (start, 0u64);
        while end < last_end && (end == start || k + 1 == used || sent + bytes < target) {
            bytes += u64::from(templates[end].len_bytes);
            end += 1;
        }
        let lane = ((u128::from(split.first_lane) + u128::from(k)) % u128::from(lane_count)) as u8;
        ranges.push(LaneRange { lane: LaneId(lane), start: start as u32, end: end as u32, bytes });
        (start, sent) = (end, sent + bytes);
    }
    ranges.into_boxed_slice()
}

#[cfg(test)]
mod tests;
