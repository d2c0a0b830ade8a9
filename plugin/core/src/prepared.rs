//! [`Plan`] + keys → [`Prepared`]: the work templates of a transfer, split over lanes. Immutable and shared by every post of
//! the request: a post touches a few numbers per lane, never the templates.

mod keys;

use baton_fabric::{Op, Template};

use crate::ids::LaneId;
use crate::plan::{Pair, Plan};
use crate::spare::Spare;
use crate::wire::MAX_LANES;
pub use keys::{KeyTable, PrepareError};
use keys::{cut, on_rail};

/// Rails of a lane: whose keys its work requests carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct LaneRails {
    /// Of the own endpoint: local keys.
    pub own: u8,
    /// Of the peer's endpoint: remote keys.
    pub peer: u8,
}

/// How a transfer is spread over the lanes of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneSplit<'a> {
    /// The lanes of the session, 1 ..= 64.
    pub lanes: &'a [LaneRails],
    /// Longest work request that both sides permit.
    pub max_message_bytes: u64,
    /// Below this many bytes one lane carries everything; above, each used lane carries at least about this much.
    pub stripe_min_bytes: u64,
    /// Any running number: lane `first_lane % lanes` is used first. Counting up from transfer to transfer
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
    templates: Spare<Template>,
    lanes: Box<[LaneRange]>,
    total_bytes: u64,
    lane_map_generation: u64,
}

impl Prepared {
    /// Cuts the pieces where the session or the regions' segments ask for it, splits them over lanes and bakes keys into
    /// templates. `locals` and `remotes` are indexed by [`crate::plan::Pair::local`] and [`crate::plan::Pair::remote`];
    /// a missing table, or a piece outside its table's region, is the caller's bug and panics.
    ///
    /// # Errors
    /// A lane is on a rail for which a region has no keys, or the pieces become too many.
    pub fn new(
        plan: &Plan,
        locals: &[KeyTable<'_>],
        remotes: &[KeyTable<'_>],
        split: &LaneSplit<'_>,
    ) -> Result<Prepared, PrepareError> {
        let wanted = lanes_wanted(plan, split);
        // No piece is longer than a lane's share: one large descriptor is spread like many small ones.
        let share = plan.total_bytes().div_ceil(wanted).next_multiple_of(SHARE_ALIGN_BYTES);
        let pieces = cut(plan, locals, remotes, split.max_message_bytes.min(share))?;
        let lanes = split_ranges(&pieces, plan.total_bytes(), wanted, split);
        let mut templates = Spare::with_capacity(pieces.len());
        for range in &lanes {
            let rails = split.lanes[usize::from(range.lane.0)];
            let locals = on_rail("local", locals, rails.own, range.lane)?;
            let remotes = on_rail("remote", remotes, rails.peer, range.lane)?;
            let pieces = &pieces[range.start as usize..range.end as usize];
            templates.extend(pieces.iter().map(|piece| Template {
                local_addr: piece.local_addr,
                remote_addr: piece.remote_addr,
                local_key: locals[piece.local as usize].key(piece.local_addr),
                remote_key: remotes[piece.remote as usize].key(piece.remote_addr),
                len_bytes: piece.len_bytes as u32,
                op: plan.op(),
                reserved: [0; 3],
            }));
        }
        Ok(Prepared {
            op: plan.op(),
            templates,
            lanes,
            total_bytes: plan.total_bytes(),
            lane_map_generation: split.lane_map_generation,
        })
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

/// Pieces that are cut to spread over lanes end at multiples of this from their start.
const SHARE_ALIGN_BYTES: u64 = 4096;

fn lane_count(split: &LaneSplit<'_>) -> u64 {
    split.lanes.len().clamp(1, MAX_LANES) as u64
}

/// Lanes that the transfer's length is worth.
fn lanes_wanted(plan: &Plan, split: &LaneSplit<'_>) -> u64 {
    let wanted = if plan.is_ordered() { 1 } else { plan.total_bytes() / split.stripe_min_bytes.max(1) };
    wanted.clamp(1, lane_count(split))
}

/// Contiguous ranges of about equal bytes: neighbours in memory stay on one lane.
fn split_ranges(pieces: &[Pair], total: u64, wanted: u64, split: &LaneSplit<'_>) -> Box<[LaneRange]> {
    let lane_count = lane_count(split);
    let used = wanted.min(pieces.len() as u64);
    let mut ranges = Vec::with_capacity(used as usize);
    let (mut start, mut sent) = (0usize, 0u64);
    for k in 0..used {
        let target = (u128::from(total) * u128::from(k + 1) / u128::from(used)) as u64;
        // Leave at least one piece to each of the lanes to come.
        let last_end = pieces.len() - (used - k - 1) as usize;
        let (mut end, mut bytes) = (start, 0u64);
        while end < last_end && (end == start || k + 1 == used || sent + bytes < target) {
            bytes += pieces[end].len_bytes;
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
