//! The rings, the RECV slots and the credit page of one epoch in a node's simulated memory.

use baton_core::LaneId;
use baton_core::peer::{CREDIT_SLOT_BYTES, CREDIT_SLOTS, RingId, SessionMemory, slot_bytes};
use baton_fabric::{EndpointId, Fabric, Keys, Memory, MemoryKind, RecvSlot, RegionKeys};
use baton_fabric_sim::{SimFabric, SimWorld};
use std::time::Instant;

/// What a RECV slot holds when it is posted: whoever reads it too late notices.
const SPOILT: u8 = 0xEE;

/// Sizes of what belongs to an epoch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub ring_bytes: u32,
    pub page_bytes: usize,
    /// RECV slots per endpoint; none where immediates tell.
    pub slots: u32,
}

/// Memory that was allocated and registered.
pub(crate) struct Area {
    pub(crate) base: u64,
    pub(crate) keys: Keys,
    all: RegionKeys,
}

impl Area {
    pub(crate) fn new(
        world: &SimWorld,
        fabric: &SimFabric,
        len_bytes: usize,
        remote_write: bool,
    ) -> Result<Area, String> {
        let base = world.alloc_aligned(fabric.node(), len_bytes);
        let memory = Memory {
            addr: base,
            len_bytes: len_bytes as u64,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: false,
            remote_write,
            ordered: true,
            mapped: true,
        };
        let keys = fabric.register(&memory).map_err(|e| format!("register the rings: {e}"))?;
        Ok(Area { base, keys, all: fabric.region_keys(keys) })
    }

    /// For own work requests on a rail.
    pub(crate) fn local_key(&self, rail: u8, offset: usize, len: usize) -> u64 {
        let key = self.all.local_key(rail, offset as u64, len as u64);
        key.expect("what a session uses lies in one segment")
    }

    /// For the peer's.
    pub(crate) fn remote_key(&self, rail: u8, offset: usize, len: usize) -> u64 {
        let key = self.all.remote_key(rail, offset as u64, len as u64);
        key.expect("what a session uses lies in one segment")
    }
}

/// Owned by one side of a session; written by the peer, read by its session.
pub(crate) struct EpochMemory {
    world: SimWorld,
    node: usize,
    sizes: Sizes,
    /// Of the endpoints: control, then the lanes.
    rails: Vec<u8>,
    /// Credit page, then the rings.
    inbound: Area,
    /// Mirror of the peer's rings.
    staging: Area,
    credit: Area,
    /// By endpoint; none where immediates tell.
    slots: Vec<Area>,
}

impl EpochMemory {
    /// Allocates and registers for endpoints on their rails: control, then the lanes.
    pub fn new(
        world: &SimWorld,
        fabric: &SimFabric,
        endpoints: &[EndpointId],
        sizes: Sizes,
    ) -> Result<Self, String> {
        let sizes = Sizes { page_bytes: sizes.page_bytes.next_multiple_of(64), ..sizes };
        let rings = sizes.ring_bytes as usize * endpoints.len();
        let area = |len, remote_write| Area::new(world, fabric, len, remote_write);
        let slots = slot_bytes(sizes.ring_bytes) as usize * sizes.slots as usize;
        Ok(EpochMemory {
            world: world.clone(),
            node: fabric.node(),
            sizes,
            rails: endpoints.iter().map(|endpoint| fabric.rail(*endpoint)).collect(),
            inbound: area(sizes.page_bytes + rings, true)?,
            staging: area(rings, false)?,
            credit: area((CREDIT_SLOTS * CREDIT_SLOT_BYTES) as usize, false)?,
            slots: endpoints
                .iter()
                .filter(|_| slots > 0)
                .map(|_| area(slots, false))
                .collect::<Result<_, _>>()?,
        })
    }

    /// Where the peer writes credit: address and key.
    pub fn page(&self) -> (u64, u64) {
        (self.inbound.base, self.inbound.remote_key(self.rails[0], 0, self.sizes.page_bytes))
    }

    /// Where the peer writes records: address and key.
    pub fn ring(&self, ring: RingId) -> (u64, u64) {
        let (at, rail) = (self.sizes.page_bytes + self.ring_at(ring), self.rails[endpoint(ring)]);
        (self.inbound.base + at as u64, self.inbound.remote_key(rail, at, self.sizes.ring_bytes as usize))
    }

    /// What the n-th RECV of an endpoint (control, then the lanes) is posted with.
    pub fn recv(&self, endpoint: usize, n: u64) -> RecvSlot {
        let Some(area) = self.slots.get(endpoint) else { return RecvSlot::default() };
        let id = (n % u64::from(self.sizes.slots)) as u32;
        let len_bytes = slot_bytes(self.sizes.ring_bytes);
        let at = id as usize * len_bytes as usize;
        let addr = area.base + at as u64;
        self.world.store(self.node, addr, &vec![SPOILT; len_bytes as usize]);
        let local_key = area.local_key(self.rails[endpoint], at, len_bytes as usize);
        RecvSlot { addr, local_key, len_bytes, id }
    }

    fn ring_at(&self, ring: RingId) -> usize {
        self.sizes.ring_bytes as usize * endpoint(ring)
    }

    fn within_ring(&self, offset: u32, len: usize) {
        assert!(offset as usize + len <= self.sizes.ring_bytes as usize, "beyond the end of a ring");
    }

    /// Gives everything back. Whoever still touches it stops the run.
    pub fn free(self, fabric: &SimFabric) -> Result<(), String> {
        for area in [self.inbound, self.staging, self.credit].iter().chain(&self.slots) {
            fabric.deregister(area.keys, Instant::now()).map_err(|e| format!("deregister the rings: {e}"))?;
            self.world.free(self.node, area.base);
        }
        Ok(())
    }
}

fn endpoint(ring: RingId) -> usize {
    match ring {
        RingId::Control => 0,
        RingId::Lane(LaneId(lane)) => 1 + usize::from(lane),
    }
}

impl SessionMemory for EpochMemory {
    fn read_record(&self, ring: RingId, offset: u32, out: &mut [u8]) {
        self.within_ring(offset, out.len());
        let base = self.inbound.base + (self.sizes.page_bytes + self.ring_at(ring)) as u64;
        self.world.load(self.node, base + u64::from(offset), out);
    }

    fn stage_record(&self, ring: RingId, offset: u32, bytes: &[u8]) -> (u64, u64) {
        self.within_ring(offset, bytes.len());
        let at = self.ring_at(ring) + offset as usize;
        let addr = self.staging.base + at as u64;
        self.world.store(self.node, addr, bytes);
        (addr, self.staging.local_key(self.rails[endpoint(ring)], at, bytes.len()))
    }

    fn read_slot(&self, ring: RingId, slot: u32, offset: u32, out: &mut [u8]) {
        let area = self.slots.get(endpoint(ring)).expect("only a session in send mode reads slots");
        let len_bytes = slot_bytes(self.sizes.ring_bytes);
        let inside = offset as usize + out.len() <= len_bytes as usize;
        assert!(slot < self.sizes.slots && inside, "beyond the end of slot {slot}");
        self.world.load(self.node, area.base + u64::from(slot * len_bytes + offset), out);
    }

    fn stage_credit(&self, slot: u32, words: &[u8]) -> (u64, u64) {
        assert!(slot < CREDIT_SLOTS && words.len() <= CREDIT_SLOT_BYTES as usize, "beyond a credit slot");
        let addr = self.credit.base + u64::from(slot * CREDIT_SLOT_BYTES);
        self.world.store(self.node, addr, words);
        (addr, self.credit.local_key(self.rails[0], (slot * CREDIT_SLOT_BYTES) as usize, words.len()))
    }

    fn load_credit(&self, word: usize) -> u64 {
        let mut bytes = [0; 8];
        assert!(word * 8 + 8 <= self.sizes.page_bytes, "a word beyond the end of the credit page");
        self.world.load(self.node, self.inbound.base + 8 * word as u64, &mut bytes);
        u64::from_le_bytes(bytes)
    }
}
