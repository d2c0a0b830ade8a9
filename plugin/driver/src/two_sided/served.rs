//! The regions that peers may name on the two-sided path.

use std::collections::HashMap;
use std::sync::Arc;

use baton_core::RegionId;
use baton_core::registry::LocalRegion;
use baton_core::two_sided::codec::{Direction, Status};
use parking_lot::RwLock;

use super::Regions;
use crate::region::Mr;

/// Regions from their registration until no peer may use them any more, which is after the host has withdrawn them: what is under
/// way when a withdrawal begins ends in order.
#[derive(Default)]
pub(crate) struct Served {
    regions: RwLock<HashMap<RegionId, Arc<Mr>>>,
}

impl Served {
    /// From now on.
    pub fn add(&self, mr: &Arc<Mr>) {
        self.regions.write().insert(mr.region.id(), Arc::clone(mr));
    }

    /// No longer.
    pub fn remove(&self, region: RegionId) {
        self.regions.write().remove(&region);
    }
}

impl Regions for Served {
    fn find(&self, region: RegionId, offset: u64, len: u64, direction: Direction) -> Result<u64, Status> {
        let regions = self.regions.read();
        let mr = regions.get(&region).ok_or(Status::NoRegion)?;
        let LocalRegion { memory, .. } = &*mr.region;
        let permitted = match direction {
            Direction::Write => memory.remote_write,
            Direction::Read => memory.remote_read,
        };
        if !permitted {
            return Err(Status::Permission);
        }
        match offset.checked_add(len) {
            Some(end) if end <= memory.len_bytes => Ok(memory.addr + offset),
            _ => Err(Status::Range),
        }
    }
}
