//! How a session's lanes are laid out: what turns a transfer's plan into work templates.

use crate::error::{Code, Error, Result};
use crate::transfer::Xfer;
use baton_core::prepared::{LaneRails, LaneSplit, PrepareError, Prepared};
use baton_fabric::{Fabric, Op};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The lanes of one epoch. Immutable, so that templates are made without the peer's lock.
pub(crate) struct LaneMap {
    /// Unique in the engine; prepared transfers remember it.
    pub generation: u64,
    pub fabric: Arc<dyn Fabric>,
    pub fabric_index: usize,
    /// Rails of each lane.
    pub rails: Box<[LaneRails]>,
    /// Longest work request that both sides permit.
    pub max_message_bytes: u64,
    /// Counts transfers, so that small ones spread over the lanes.
    pub next_lane: AtomicU64,
}

impl LaneMap {
    /// Templates for these lanes: kept from before, or made anew.
    pub fn prepare(&self, xfer: &Xfer) -> Result<Arc<Prepared>> {
        let mut kept = xfer.prepared.lock();
        if let Some(work) = kept.as_ref().filter(|work| work.lane_map_generation() == self.generation) {
            return Ok(Arc::clone(work));
        }
        let name = self.fabric.name();
        xfer.refuse_unregistered()?;
        let locals = xfer.locals.iter().map(|mr| mr.key_table(self.fabric_index, name));
        let locals: Vec<_> = locals.collect::<Result<_>>()?;
        let remotes: Vec<_> = xfer.remotes.iter().map(|side| side.key_table(name)).collect::<Result<_>>()?;
        let caps = self.fabric.caps();
        let split = LaneSplit {
            lanes: &self.rails,
            max_message_bytes: match xfer.plan.op() {
                Op::Write => self.max_message_bytes,
                Op::Read => self.max_message_bytes.min(u64::from(caps.longest_read_bytes)),
            },
            stripe_min_bytes: caps.stripe_min_bytes,
            first_lane: self.next_lane.fetch_add(1, Ordering::Relaxed),
            lane_map_generation: self.generation,
        };
        let work = Prepared::new(&xfer.plan, &locals, &remotes, &split).map_err(|e| {
            let code = match &e {
                PrepareError::Rail { .. } => Code::Protocol,
                PrepareError::TooManyPieces { .. } => Code::Limit,
            };
            Error::new(code, format!("fabric {name}: {e}"))
        })?;
        let work = Arc::new(work);
        *kept = Some(Arc::clone(&work));
        Ok(work)
    }
}
