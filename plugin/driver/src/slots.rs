//! RECV slots of one epoch in send mode: memory into which the fabric puts what the peer sends.
//!
//! ```text
//! | slot 0 | slot 1 | … | slot depth−1 |  of control      then of lane 0, lane 1, …      written by the fabric, never by the peer
//! ```
//! The n-th RECV of an endpoint uses slot n mod depth, and RECVs are consumed in order: a slot is posted again only after it was read.

use crate::memory::{Pages, RING_BYTES, take_back};
use baton_core::peer::slot_bytes;
use baton_fabric::{Fabric, FabricError, Keys, Memory, MemoryKind, RecvSlot};

/// Length of a slot: header and largest record.
const SLOT_BYTES: u32 = slot_bytes(RING_BYTES);
/// From slot to slot.
const STRIDE: usize = (SLOT_BYTES as usize).next_multiple_of(64);

/// Slots of one endpoint.
struct Area {
    base: usize,
    depth: u32,
    local_key: u64,
}

/// Slots of all endpoints: control, then the lanes.
pub(crate) struct Slots {
    pages: Pages,
    keys: Keys,
    areas: Box<[Area]>,
}

impl Slots {
    /// Allocates and registers `depth` slots for each endpoint, given as (rail, depth).
    pub fn new(fabric: &dyn Fabric, endpoints: &[(u8, u32)]) -> Result<Slots, FabricError> {
        let total: usize = endpoints.iter().map(|(_, depth)| *depth as usize * STRIDE).sum();
        let pages = Pages::new(total)?;
        let keys = fabric.register(&Memory {
            addr: pages.addr(),
            len_bytes: total as u64,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: false,
            remote_write: false,
            ordered: true,
            mapped: true,
        })?;
        let region = fabric.region_keys(keys);
        let mut base = 0;
        let mut areas = Vec::with_capacity(endpoints.len());
        for (rail, depth) in endpoints {
            let len_bytes = *depth as usize * STRIDE;
            let Some(local_key) = region.local_key(*rail, base as u64, len_bytes as u64) else {
                take_back(fabric, keys, pages);
                return Err(FabricError::Limit(format!(
                    "fabric {}: the RECV slots of endpoint {} need {len_bytes} bytes at offset {base} in one segment of rail {rail}; \
                     segments have {} bytes",
                    fabric.name(),
                    areas.len(),
                    region.segment_bytes
                )));
            };
            areas.push(Area { base, depth: *depth, local_key });
            base += len_bytes;
        }
        Ok(Slots { pages, keys, areas: areas.into() })
    }

    /// The slot of the n-th RECV of an endpoint.
    pub fn recv(&self, endpoint: usize, n: u64) -> RecvSlot {
        let area = &self.areas[endpoint];
        let id = (n % u64::from(area.depth)) as u32;
        let addr = self.pages.addr() + (area.base + id as usize * STRIDE) as u64;
        RecvSlot { addr, local_key: area.local_key, len_bytes: SLOT_BYTES, id }
    }

    /// Copies out of a slot.
    pub fn read(&self, endpoint: usize, slot: u32, offset: u32, out: &mut [u8]) {
        let area = &self.areas[endpoint];
        assert!(slot < area.depth && offset as usize + out.len() <= STRIDE, "slot {slot} of {}", area.depth);
        self.pages.read(area.base + slot as usize * STRIDE + offset as usize, out);
    }

    /// Undoes all of it, before anybody was told.
    pub fn take_back(self, fabric: &dyn Fabric) {
        take_back(fabric, self.keys, self.pages);
    }

    /// Of the registration, for its withdrawal.
    pub fn keys(&self) -> Keys {
        self.keys
    }
}
