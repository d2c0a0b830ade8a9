//! Random work.

use crate::cells::{CELL, Cells, Run};
use crate::checker::{Fate, Piece, Xfer};
use baton_core::plan::{Pair, Plan, PlanLimits};
use baton_core::prepared::{LaneRails, LaneSplit, Prepared};
use baton_fabric::Op;
use baton_fabric_sim::Rng;

/// A transfer as it will be submitted.
pub(crate) struct Work {
    pub xfer: Xfer,
    pub prepared: Prepared,
}

/// Between two nodes; `None` when memory is scarce.
pub(crate) struct Recipe<'a> {
    pub rng: &'a mut Rng,
    pub cells: &'a mut [Cells],
    pub local: usize,
    pub remote: usize,
    pub lanes: &'a [LaneRails],
    pub max_message_bytes: u64,
    pub epoch: u32,
    pub poisoned: bool,
}

impl Recipe<'_> {
    pub fn work(mut self, notified: bool) -> Result<Option<Work>, String> {
        let op = if self.rng.chance(1, 2) { Op::Write } else { Op::Read };
        let count = match self.rng.below(10) {
            0 => 0,
            1..=6 => self.rng.between(1, 4),
            7 | 8 => self.rng.between(5, 16),
            _ => self.rng.between(17, 48),
        };
        let mut pieces = Vec::new();
        let mut pairs = Vec::new();
        while (pieces.len() as u64) < count {
            let Some((local, remote)) = self.runs()? else { break };
            self.fill(op, local, remote, &mut pieces, &mut pairs);
        }
        let poisoned = self.poisoned && !pieces.is_empty();
        let xfer = Xfer {
            op,
            notified,
            with_id: false,
            silent: false,
            landed: false,
            poisoned,
            epoch: self.epoch,
            fate: Fate::Pending,
            delivered: false,
            local_free: pieces.is_empty(),
            remote_free: pieces.is_empty(),
            pieces,
        };
        Ok(Some(Work { prepared: self.prepare(op, pairs, poisoned)?, xfer }))
    }

    fn runs(&mut self) -> Result<Option<(Run, Run)>, String> {
        let count = self.rng.between(1, 3) as usize;
        let Some(local) = self.cells[self.local].take(self.rng, count)? else { return Ok(None) };
        match self.cells[self.remote].take(self.rng, count)? {
            Some(remote) => Ok(Some((local, remote))),
            None => {
                self.cells[self.local].give(local);
                Ok(None)
            }
        }
    }

    /// Puts source and filler into the runs; sometimes in several descriptors that a plan may merge, sometimes with a zero-length one.
    fn fill(&mut self, op: Op, local: Run, remote: Run, pieces: &mut Vec<Piece>, pairs: &mut Vec<Pair>) {
        let total = local.count * CELL;
        let len = self.rng.between(1, total as u64) as usize;
        let offset = self.rng.below((total - len + 1) as u64) as usize;
        let mut source: Vec<u8> = (0..total / 8).flat_map(|_| self.rng.bits().to_le_bytes()).collect();
        let filler = self.rng.bits() as u8;
        let destination = vec![filler; total];
        let (from, to) = if op == Op::Write { (local, remote) } else { (remote, local) };
        self.cells[from.node].store(from, &source);
        self.cells[to.node].store(to, &destination);
        let (local_addr, remote_addr) =
            (self.cells[local.node].addr(local), self.cells[remote.node].addr(remote));
        let mut done = 0;
        while done < len {
            let part = if self.rng.chance(1, 3) {
                self.rng.between(0, (len - done) as u64) as usize
            } else {
                len - done
            };
            pairs.push(Pair {
                local_addr: local_addr + (offset + done) as u64,
                remote_addr: remote_addr + (offset + done) as u64,
                len_bytes: part as u64,
                local: 0,
                remote: 0,
            });
            done += part;
        }
        let bytes = source.drain(offset..offset + len).collect();
        pieces.push(Piece { local, remote, offset, len, bytes, filler });
    }

    fn prepare(&mut self, op: Op, mut pairs: Vec<Pair>, poisoned: bool) -> Result<Prepared, String> {
        // The host lists its blocks in any order.
        for i in (1..pairs.len()).rev() {
            pairs.swap(i, self.rng.below(i as u64 + 1) as usize);
        }
        let limits =
            PlanLimits { max_chunk_bytes: self.rng.between(64, 4096) as u32, ..PlanLimits::default() };
        let plan = Plan::build(op, pairs, limits).map_err(|e| format!("plan: {e}"))?;
        let split = LaneSplit {
            lanes: self.lanes,
            max_message_bytes: self.max_message_bytes,
            stripe_min_bytes: self.rng.between(1, 4096),
            first_lane: self.rng.bits(),
            lane_map_generation: u64::from(self.epoch),
        };
        let right = self.cells[self.remote].remote_keys();
        let wrong: Vec<u64> = right.keys.iter().map(|key| key ^ u64::from(poisoned)).collect();
        let remote = self.cells[self.remote].key_table(&wrong);
        Prepared::new(&plan, &[self.cells[self.local].local_keys()], &[remote], &split)
            .map_err(|e| format!("prepare: {e}"))
    }
}
