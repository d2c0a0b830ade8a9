//! The regions that peers may name on the two-sided path, and the memory that a fabric gathers from.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use baton_core::RegionId;
use baton_core::registry::LocalRegion;
use baton_core::two_sided::codec::{Direction, Status};
use baton_core::two_sided::setup::Place;
use parking_lot::RwLock;

use super::{Held, Keep, Regions};
use crate::region::Mr;

/// Registrations that cover an address are looked for among so many that begin before it.
const LOOK_BACK: usize = 16;

/// Regions from their registration until no peer may use them any more, which is after the host has withdrawn them: what is under
/// way when a withdrawal begins ends in order.
#[derive(Default)]
pub(crate) struct Served {
    table: RwLock<Table>,
}

#[derive(Default)]
struct Table {
    regions: HashMap<RegionId, Arc<Mr>>,
    by_addr: BTreeMap<(u64, RegionId), Arc<Mr>>,
}

impl Served {
    /// From now on.
    pub fn add(&self, mr: &Arc<Mr>) {
        let (id, addr) = (mr.region.id(), mr.region.memory.addr);
        let mut table = self.table.write();
        table.regions.insert(id, Arc::clone(mr));
        table.by_addr.insert((addr, id), Arc::clone(mr));
    }

    /// No longer. What is held stays until it is released: [`Mr::wait_unpinned`].
    pub fn remove(&self, region: RegionId) {
        let mut table = self.table.write();
        if let Some(mr) = table.regions.remove(&region) {
            table.by_addr.remove(&(mr.region.memory.addr, region));
        }
    }
}

impl Table {
    fn find(
        &self,
        region: RegionId,
        offset: u64,
        len: u64,
        direction: Direction,
    ) -> Result<(&Arc<Mr>, u64), Status> {
        let mr = self.regions.get(&region).ok_or(Status::NoRegion)?;
        let LocalRegion { memory, .. } = &*mr.region;
        let permitted = match direction {
            Direction::Write => memory.remote_write,
            Direction::Read => memory.remote_read,
        };
        if !permitted {
            return Err(Status::Permission);
        }
        match offset.checked_add(len) {
            Some(end) if end <= memory.len_bytes => Ok((mr, memory.addr + offset)),
            _ => Err(Status::Range),
        }
    }

    /// A registration with a key for all of that memory.
    fn key(&self, fabric_index: usize, addr: u64, len: u32, rail: u8) -> Option<u64> {
        let before = self.by_addr.range(..=(addr, RegionId(u64::MAX))).rev().take(LOOK_BACK);
        before.map(|(_, mr)| mr).find_map(|mr| key_of(mr, fabric_index, addr, len, rail))
    }
}

fn key_of(mr: &Mr, fabric_index: usize, addr: u64, len: u32, rail: u8) -> Option<u64> {
    let memory = &mr.region.memory;
    let offset = addr - memory.addr;
    let inside = offset.checked_add(len.into()).is_some_and(|end| end <= memory.len_bytes);
    let on = mr.on[fabric_index].as_ref().ok().filter(|_| inside)?;
    on.all.local_key(rail, offset, len.into())
}

/// The same as a channel on one fabric sees it.
pub(crate) struct ServedOn {
    pub served: Arc<Served>,
    pub fabric_index: usize,
}

impl Regions for ServedOn {
    fn find(&self, region: RegionId, offset: u64, len: u64, direction: Direction) -> Result<u64, Status> {
        self.served.table.read().find(region, offset, len, direction).map(|(_, addr)| addr)
    }

    fn hold(&self, region: RegionId, offset: u64, len: u64, direction: Direction) -> Result<Held, Status> {
        let table = self.served.table.read();
        let (mr, addr) = table.find(region, offset, len, direction)?;
        // Under the lock: once it is removed there are no new holds, and whoever removed it waits for those that there are.
        mr.hold();
        Ok(Held::new(addr, Arc::clone(mr) as Arc<dyn Keep>))
    }

    fn local_key(&self, from: Place, len: u32, rail: u8) -> Option<u64> {
        let table = self.served.table.read();
        match from {
            Place::Local(addr) => table.key(self.fabric_index, addr, len, rail),
            Place::Region(region, offset) => {
                let mr = table.regions.get(&region)?;
                key_of(mr, self.fabric_index, mr.region.memory.addr.checked_add(offset)?, len, rail)
            }
        }
    }
}

impl Keep for Mr {
    fn release(&self) {
        self.unpin();
    }
}
