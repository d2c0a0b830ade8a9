//! Bounce slabs of a node, and what a channel has of its own: credit page, control slots, prefixes.

use crate::Check;
use crate::cells::Cells;
use crate::memory::Area;
use baton_core::Nanos;
use baton_core::RegionId;
use baton_core::two_sided::channel::{Channel, GATHER_PREFIX_BYTES, GATHERS};
use baton_core::two_sided::codec::{CONTROL_SLOT_BYTES, DATA_HEADER_BYTES, Direction, Status};
use baton_core::two_sided::pool::{Pool, PoolAction, PoolConfig, SlabId, SlotId};
use baton_core::two_sided::setup::{Place, Span, TwoMemory};
use baton_fabric::{Fabric, RecvSlot};
use baton_fabric_sim::{Rng, SimFabric, SimWorld};
use std::collections::BTreeMap;
use std::time::Instant;

/// What a RECV slot holds when it is posted: whoever reads it too late notices.
const SPOILT: u8 = 0xEE;

/// The region of a node's cells.
pub(super) fn region(node: usize) -> RegionId {
    RegionId(node as u64 + 1)
}

/// Bounce memory of a node.
pub(super) struct Bounce {
    pub pool: Pool,
    pub slabs: Slabs,
    /// When the pool wants to be looked at although nothing happened.
    pub wake: Option<Nanos>,
}

/// Memory of its slabs.
pub(super) struct Slabs {
    areas: BTreeMap<SlabId, Area>,
    slot_bytes: usize,
}

impl Bounce {
    pub fn new(config: PoolConfig, now: Nanos) -> Bounce {
        let slabs = Slabs { areas: BTreeMap::new(), slot_bytes: config.slot_bytes as usize };
        Bounce { pool: Pool::new(config, now), slabs, wake: None }
    }

    /// Makes and frees slabs; sometimes there is no memory. Whether there was anything.
    pub fn serve(
        &mut self,
        now: Nanos,
        world: &SimWorld,
        fabric: &SimFabric,
        rng: &mut Rng,
    ) -> Result<bool, String> {
        let mut any = false;
        let slab_bytes = self.slabs.slot_bytes * self.pool.config().slab_slots as usize;
        while let Some(action) = self.pool.next_action(now) {
            any = true;
            match action {
                PoolAction::Allocate(slab) => {
                    let made = !rng.chance(1, 20);
                    if made {
                        self.slabs.areas.insert(slab, Area::new(world, fabric, slab_bytes, false)?);
                    }
                    self.pool.on_allocated(now, slab, made);
                }
                PoolAction::Release(slab) => {
                    let area =
                        self.slabs.areas.remove(&slab).ok_or("a slab that is not there is released")?;
                    area.free(world, fabric)?;
                    self.pool.on_released(slab);
                }
            }
        }
        self.wake = self.pool.next_timeout(now);
        Ok(any)
    }
}

impl Slabs {
    /// How many are there.
    pub fn count(&self) -> usize {
        self.areas.len()
    }

    /// Address and local key of bytes of a slot.
    pub fn place(&self, slot: SlotId, at: usize, len: usize) -> (u64, u64) {
        assert!(at + len <= self.slot_bytes, "beyond the end of {slot:?}");
        let area = self.areas.get(&slot.slab).expect("a lent slot has memory");
        let begin = slot.index as usize * self.slot_bytes + at;
        (area.base + begin as u64, area.local_key(0, begin, len))
    }

    /// The slot as a RECV.
    pub fn recv(&self, world: &SimWorld, node: usize, slot: SlotId, id: u32) -> RecvSlot {
        let (addr, local_key) = self.place(slot, 0, self.slot_bytes);
        world.store(node, addr, &vec![SPOILT; self.slot_bytes]);
        RecvSlot { addr, local_key, len_bytes: self.slot_bytes as u32, id }
    }
}

/// Memory of one side of an epoch.
pub(super) struct ChannelMemory {
    page: Area,
    slots: Area,
    control_sq: usize,
    control_rq: usize,
    sq: usize,
    lanes: usize,
}

impl ChannelMemory {
    pub fn new(
        world: &SimWorld,
        fabric: &SimFabric,
        control: (u32, u32),
        lanes: (usize, u32),
    ) -> Result<ChannelMemory, String> {
        let (control_sq, control_rq) = (control.0 as usize, control.1 as usize);
        let (lanes, sq) = (lanes.0, lanes.1 as usize);
        let page = Channel::credit_page_bytes(lanes).next_multiple_of(64);
        let slots = (control_sq + control_rq) * CONTROL_SLOT_BYTES
            + lanes * sq * DATA_HEADER_BYTES
            + GATHERS as usize * GATHER_PREFIX_BYTES;
        Ok(ChannelMemory {
            page: Area::new(world, fabric, page, true)?,
            slots: Area::new(world, fabric, slots, false)?,
            control_sq,
            control_rq,
            sq,
            lanes,
        })
    }

    /// Address and key for the peer.
    pub fn page(&self) -> (u64, u64) {
        (self.page.base, self.page.remote_key(0, 0, Channel::credit_page_bytes(self.lanes)))
    }

    pub fn control_recv(&self, world: &SimWorld, node: usize, n: u64) -> RecvSlot {
        let id = n as usize % self.control_rq;
        let at = id * CONTROL_SLOT_BYTES;
        let addr = self.slots.base + at as u64;
        world.store(node, addr, &[SPOILT; CONTROL_SLOT_BYTES]);
        let local_key = self.slots.local_key(0, at, CONTROL_SLOT_BYTES);
        RecvSlot { addr, local_key, len_bytes: CONTROL_SLOT_BYTES as u32, id: id as u32 }
    }

    /// Where the n-th frame or credit write is sent from.
    pub fn control_send(&self, seq: u64, len: usize) -> (u64, u64) {
        self.at((self.control_rq + seq as usize % self.control_sq) * CONTROL_SLOT_BYTES, len)
    }

    pub fn nop(&self, lane: usize, seq: u64) -> (u64, u64) {
        let base = (self.control_rq + self.control_sq) * CONTROL_SLOT_BYTES;
        self.at(base + (lane * self.sq + seq as usize % self.sq) * DATA_HEADER_BYTES, DATA_HEADER_BYTES)
    }

    pub fn prefix(&self, n: u32, len: usize) -> (u64, u64) {
        let base = (self.control_rq + self.control_sq) * CONTROL_SLOT_BYTES
            + self.lanes * self.sq * DATA_HEADER_BYTES;
        self.at(base + n as usize * GATHER_PREFIX_BYTES, len)
    }

    fn at(&self, at: usize, len: usize) -> (u64, u64) {
        (self.slots.base + at as u64, self.slots.local_key(0, at, len))
    }

    /// Gives everything back. Whoever still touches it stops the run.
    pub fn free(self, world: &SimWorld, fabric: &SimFabric) -> Check {
        self.page.free(world, fabric)?;
        self.slots.free(world, fabric)
    }
}

impl Area {
    pub(super) fn free(self, world: &SimWorld, fabric: &SimFabric) -> Check {
        fabric.deregister(self.keys, Instant::now()).map_err(|e| format!("deregister: {e}"))?;
        world.free(fabric.node(), self.base);
        Ok(())
    }
}

/// What a channel sees of its node.
pub(super) struct View<'a> {
    pub world: &'a SimWorld,
    pub node: usize,
    pub memory: &'a ChannelMemory,
    pub slabs: &'a Slabs,
    pub cells: &'a Cells,
    pub gather: bool,
}

impl View<'_> {
    /// Where bytes of a transfer are.
    pub fn address(&self, place: Place) -> u64 {
        match place {
            Place::Local(addr) => addr,
            Place::Region(_, offset) => self.cells.base + offset,
        }
    }

    pub fn load(&self, addr: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.world.load(self.node, addr, &mut bytes);
        bytes
    }
}

impl TwoMemory for View<'_> {
    fn check(&self, asked: RegionId, offset: u64, len: u64, _: Direction) -> Result<(), Status> {
        if asked != region(self.node) {
            return Err(Status::NoRegion);
        }
        match offset.checked_add(len) {
            Some(end) if end <= self.cells.len_bytes() => Ok(()),
            _ => Err(Status::Range),
        }
    }

    fn can_gather(&self, _: &Span) -> bool {
        self.gather
    }

    fn read_slot(&self, slot: SlotId, at: u32, out: &mut [u8]) {
        let (addr, _) = self.slabs.place(slot, at as usize, out.len());
        self.world.load(self.node, addr, out);
    }

    fn crc_slot(&self, slot: SlotId, at: u32, len: u32, crc: u32) -> u32 {
        let mut bytes = vec![0; len as usize];
        self.read_slot(slot, at, &mut bytes);
        baton_core::two_sided::codec::extend_crc(crc, &bytes)
    }

    fn read_control(&self, slot: u32, out: &mut [u8]) {
        let (addr, _) = self.memory.at(slot as usize * CONTROL_SLOT_BYTES, out.len());
        self.world.load(self.node, addr, out);
    }

    fn load_credit(&self, word: usize) -> u64 {
        let mut bytes = [0; 8];
        self.world.load(self.node, self.memory.page.base + 8 * word as u64, &mut bytes);
        u64::from_le_bytes(bytes)
    }
}
