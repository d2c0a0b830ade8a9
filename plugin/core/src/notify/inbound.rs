//! Collects the tails and the record of each inbound transfer into one delivery.

use std::collections::VecDeque;

use super::Body;
use crate::ids::{LaneId, XferSeq};
use crate::peer::Violation;
use crate::sequence::{MAX_INCOMPLETE, unwrap24};

/// What an immediate brought.
#[derive(Debug)]
pub enum Arrival {
    /// The lane's part is complete.
    Tail,
    /// The lane's part is complete, and this is what is told.
    Record(Body),
}

/// Of one transfer; `lanes` 0 = nothing heard yet.
#[derive(Debug, Default)]
struct Entry {
    bitmap: u64,
    lanes: u8,
    complete: bool,
    body: Option<Body>,
}

/// The transfers of a peer from the lowest incomplete one on.
///
/// ```text
///   lowest                       lowest + table.len()
///     | incomplete | complete | … |          complete ones leave at the front, so the table starts incomplete
/// ```
#[derive(Debug)]
pub struct Inbound {
    lowest: u64,
    table: VecDeque<Entry>,
    limit: u64,
}

impl Inbound {
    /// `first` is the first number of the epoch; `recv_total` the RECVs of all lanes.
    pub fn new(first: XferSeq, recv_total: u64) -> Inbound {
        let limit = MAX_INCOMPLETE + recv_total;
        Inbound { lowest: first.0, table: VecDeque::with_capacity(recv_total.min(1024) as usize), limit }
    }

    /// Lowest incomplete transfer.
    pub fn lowest(&self) -> XferSeq {
        XferSeq(self.lowest)
    }

    /// The transfer an immediate speaks of.
    pub fn unwrap(&self, seq_low: u32, lane: LaneId) -> Result<XferSeq, Violation> {
        let outside = || Violation::SequenceOutside { seq_low, lane, lowest: self.lowest };
        let seq = unwrap24(seq_low, self.lowest()).ok_or_else(outside)?;
        // Below: complete long ago, so this is a repeat. Far above: more than a sender may have incomplete.
        if seq.0 < self.lowest || seq.0 - self.lowest >= self.limit {
            return Err(outside());
        }
        Ok(seq)
    }

    /// Whether that is the lowest one and nothing was heard of it or of any behind it: then it counts as complete, as the record of its
    /// only lane makes it.
    #[must_use]
    pub fn pass(&mut self, seq: XferSeq) -> bool {
        let next = self.table.is_empty() && seq.0 == self.lowest;
        self.lowest += u64::from(next);
        next
    }

    /// Notes an arrival; the body when the transfer is complete with it.
    pub fn arrive(
        &mut self,
        seq: XferSeq,
        lanes: u8,
        lane: LaneId,
        arrival: Arrival,
    ) -> Result<Option<Body>, Violation> {
        let at = (seq.0 - self.lowest) as usize;
        assert!((at as u64) < self.limit, "unwrap() keeps numbers inside the table");
        if at >= self.table.len() {
            self.table.resize_with(at + 1, Entry::default);
        }
        let entry = &mut self.table[at];
        let bit = 1u64 << lane.0;
        if entry.complete || entry.bitmap & bit != 0 {
            return Err(Violation::Repeated { seq: seq.0, lane });
        }
        if entry.lanes != 0 && entry.lanes != lanes {
            return Err(Violation::LaneCount { seq: seq.0, expected: entry.lanes, got: lanes });
        }
        if let Arrival::Record(body) = arrival {
            if entry.body.is_some() {
                return Err(Violation::RecordCount { seq: seq.0, records: 2 });
            }
            entry.body = Some(body);
        }
        entry.lanes = lanes;
        entry.bitmap |= bit;
        if entry.bitmap.count_ones() < u32::from(lanes) {
            return Ok(None);
        }
        let body = entry.body.take().ok_or(Violation::RecordCount { seq: seq.0, records: 0 })?;
        entry.complete = true;
        while self.table.front().is_some_and(|first| first.complete) {
            self.table.pop_front();
            self.lowest += 1;
        }
        Ok(Some(body))
    }

    /// Transfers of which something was heard, but not everything.
    pub fn partial(&self) -> impl Iterator<Item = u64> + '_ {
        (self.lowest..)
            .zip(&self.table)
            .filter(|(_, entry)| entry.lanes != 0 && !entry.complete)
            .map(|(seq, _)| seq)
    }
}
