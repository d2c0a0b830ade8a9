//! The pool's books together with the memory of its slabs.

use std::sync::Arc;

use baton_core::Nanos;
use baton_core::two_sided::pool::{Pool, PoolAction, PoolConfig, SlabId, SlotId};
use baton_fabric::{Fabric, FabricError, RecvSlot};
use parking_lot::{Mutex, RwLock};

use super::Area;

/// Bounce memory of one engine on one fabric.
pub struct Bounce {
    /// The books.
    pub pool: Pool,
    slabs: Arc<Slabs>,
    fabric: Arc<dyn Fabric>,
}

/// Shared by all channels of the fabric.
pub type SharedBounce = Arc<Mutex<Bounce>>;

impl Bounce {
    /// With its first slabs.
    pub fn new(fabric: Arc<dyn Fabric>, config: PoolConfig, now: Nanos) -> SharedBounce {
        let slabs = Slabs { areas: RwLock::default(), slot_bytes: config.slot_bytes as usize };
        let pool = Pool::new(config, now);
        let bounce = Arc::new(Mutex::new(Bounce { pool, slabs: Arc::new(slabs), fabric }));
        Bounce::serve(&bounce, now);
        bounce
    }

    /// Makes and frees slabs as the pool wants. It allocates and registers, without the lock; not for a progress thread.
    pub fn serve(shared: &SharedBounce, now: Nanos) {
        let slab_bytes = {
            let config = *shared.lock().pool.config();
            config.slot_bytes as usize * config.slab_slots as usize
        };
        loop {
            let (action, fabric) = {
                let mut bounce = shared.lock();
                let Some(action) = bounce.pool.next_action(now) else { return };
                (action, Arc::clone(&bounce.fabric))
            };
            match action {
                PoolAction::Allocate(slab) => {
                    let made = match fabric.caps().headed_bytes {
                        0 => Area::new(&fabric, slab_bytes, false),
                        _ => Area::sparse(&fabric, slab_bytes),
                    };
                    let mut bounce = shared.lock();
                    bounce.pool.on_allocated(now, slab, made.is_ok());
                    match made {
                        Ok(area) => bounce.slabs.insert(slab, area),
                        Err(e) => {
                            tracing::warn!("bounce memory on fabric {} does not grow: {e}", fabric.name())
                        }
                    }
                }
                PoolAction::Release(slab) => {
                    let slabs = Arc::clone(&shared.lock().slabs);
                    // It gives its memory back, without a lock: no slot of it is lent, so nobody else has it.
                    drop(slabs.remove(slab));
                    shared.lock().pool.on_released(slab);
                }
            }
        }
    }

    /// The slot as a RECV of an endpoint on that rail.
    pub fn recv(&self, slot: SlotId, rail: u8, id: u32) -> Result<RecvSlot, FabricError> {
        self.slabs.recv(slot, rail, id)
    }

    /// The memory, for those who use lent slots without the pool's lock.
    pub(super) fn slabs(&self) -> &Arc<Slabs> {
        &self.slabs
    }
}

/// Memory of all slabs. A slab stays while one of its slots is lent, so whoever was lent a slot finds it here; the table's lock is held
/// to find it, never while bytes move.
pub(super) struct Slabs {
    /// By number.
    areas: RwLock<Vec<Option<Arc<Area>>>>,
    slot_bytes: usize,
}

impl Slabs {
    fn insert(&self, slab: SlabId, area: Area) {
        let mut areas = self.areas.write();
        let at = slab.0 as usize;
        if areas.len() <= at {
            areas.resize(at + 1, None);
        }
        assert!(areas[at].is_none(), "{slab:?} is made once");
        areas[at] = Some(Arc::new(area));
    }

    fn remove(&self, slab: SlabId) -> Option<Arc<Area>> {
        self.areas.write()[slab.0 as usize].take()
    }

    /// The slab of a lent slot, and where the slot begins there.
    pub(super) fn place(&self, slot: SlotId) -> (Arc<Area>, usize) {
        let area = self.areas.read()[slot.slab.0 as usize].clone();
        (area.expect("a lent slot has memory"), slot.index as usize * self.slot_bytes)
    }

    /// The slot as a RECV of an endpoint on that rail.
    pub(super) fn recv(&self, slot: SlotId, rail: u8, id: u32) -> Result<RecvSlot, FabricError> {
        let (area, begin) = self.place(slot);
        let local_key = area.local_key(rail, begin, self.slot_bytes)?;
        Ok(RecvSlot { addr: area.addr(begin), local_key, len_bytes: self.slot_bytes as u32, id })
    }

    pub(super) fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }
}
