//! The rings and the credit page of one epoch in a node's simulated memory.

use baton_core::LaneId;
use baton_core::peer::{RingId, SessionMemory};
use baton_fabric::{Fabric, Keys, Memory, MemoryKind};
use baton_fabric_sim::{SimFabric, SimWorld};
use std::time::Instant;

/// Owned by one side of a session; written by the peer, read by its session.
pub(crate) struct EpochMemory {
    world: SimWorld,
    node: usize,
    ring_bytes: u32,
    page_bytes: usize,
    inbound: u64,
    staging: u64,
    inbound_keys: Keys,
    staging_keys: Keys,
}

fn rounded(bytes: usize) -> usize {
    bytes.next_multiple_of(64)
}

impl EpochMemory {
    /// Allocates and registers.
    pub fn new(
        world: &SimWorld,
        fabric: &SimFabric,
        lanes: u8,
        ring_bytes: u32,
        page_bytes: usize,
    ) -> Result<Self, String> {
        let node = fabric.node();
        let page_bytes = rounded(page_bytes);
        let rings = ring_bytes as usize * (1 + usize::from(lanes));
        let inbound = world.alloc_aligned(node, page_bytes + rings);
        let staging = world.alloc_aligned(node, rings);
        let memory = |addr, len_bytes, remote_write| Memory {
            addr,
            len_bytes,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: false,
            remote_write,
            ordered: true,
        };
        let error = |e| format!("register the rings: {e}");
        let inbound_keys =
            fabric.register(&memory(inbound, (page_bytes + rings) as u64, true)).map_err(error)?;
        let staging_keys = fabric.register(&memory(staging, rings as u64, false)).map_err(error)?;
        let world = world.clone();
        Ok(EpochMemory { world, node, ring_bytes, page_bytes, inbound, staging, inbound_keys, staging_keys })
    }

    /// Where the peer writes credit: address and key.
    pub fn page(&self) -> (u64, u64) {
        (self.inbound, self.inbound_keys.remote)
    }

    /// Where the peer writes records: address and key.
    pub fn ring(&self, ring: RingId) -> (u64, u64) {
        (self.inbound + (self.page_bytes + self.ring_at(ring)) as u64, self.inbound_keys.remote)
    }

    fn ring_at(&self, ring: RingId) -> usize {
        self.ring_bytes as usize
            * match ring {
                RingId::Control => 0,
                RingId::Lane(LaneId(lane)) => 1 + usize::from(lane),
            }
    }

    /// Gives everything back. Whoever still touches it stops the run.
    pub fn free(self, fabric: &SimFabric) -> Result<(), String> {
        for keys in [self.inbound_keys, self.staging_keys] {
            fabric.deregister(keys, Instant::now()).map_err(|e| format!("deregister the rings: {e}"))?;
        }
        self.world.free(self.node, self.inbound);
        self.world.free(self.node, self.staging);
        Ok(())
    }
}

impl SessionMemory for EpochMemory {
    fn read_record(&self, ring: RingId, offset: u32, out: &mut [u8]) {
        assert!(
            offset as usize + out.len() <= self.ring_bytes as usize,
            "a record beyond the end of its ring"
        );
        let base = self.inbound + (self.page_bytes + self.ring_at(ring)) as u64;
        self.world.load(self.node, base + u64::from(offset), out);
    }

    fn stage_record(&self, ring: RingId, offset: u32, bytes: &[u8]) -> (u64, u64) {
        assert!(
            offset as usize + bytes.len() <= self.ring_bytes as usize,
            "a record beyond the end of its ring"
        );
        let addr = self.staging + (self.ring_at(ring) + offset as usize) as u64;
        self.world.store(self.node, addr, bytes);
        (addr, self.staging_keys.local)
    }

    fn load_credit(&self, word: usize) -> u64 {
        let mut bytes = [0; 8];
        assert!(word * 8 + 8 <= self.page_bytes, "a word beyond the end of the credit page");
        self.world.load(self.node, self.inbound + 8 * word as u64, &mut bytes);
        u64::from_le_bytes(bytes)
    }
}
