//! The pool's books together with the memory of its slabs.

use std::collections::HashMap;
use std::sync::Arc;

use baton_core::Nanos;
use baton_core::two_sided::pool::{Pool, PoolAction, PoolConfig, SlabId, SlotId};
use baton_fabric::{Fabric, FabricError, RecvSlot};
use parking_lot::Mutex;

use super::Area;

/// Bounce memory of one engine on one fabric.
pub struct Bounce {
    /// The books.
    pub pool: Pool,
    slabs: HashMap<SlabId, Area>,
    fabric: Arc<dyn Fabric>,
}

/// Shared by all channels of the fabric.
pub type SharedBounce = Arc<Mutex<Bounce>>;

impl Bounce {
    /// With its first slabs.
    pub fn new(fabric: Arc<dyn Fabric>, config: PoolConfig, now: Nanos) -> SharedBounce {
        let bounce =
            Arc::new(Mutex::new(Bounce { pool: Pool::new(config, now), slabs: HashMap::new(), fabric }));
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
                    let made = Area::new(&fabric, slab_bytes, false);
                    let mut bounce = shared.lock();
                    bounce.pool.on_allocated(now, slab, made.is_ok());
                    match made {
                        Ok(area) => drop(bounce.slabs.insert(slab, area)),
                        Err(e) => {
                            tracing::warn!("bounce memory on fabric {} does not grow: {e}", fabric.name())
                        }
                    }
                }
                PoolAction::Release(slab) => {
                    let area = shared.lock().slabs.remove(&slab);
                    drop(area);
                    shared.lock().pool.on_released(slab);
                }
            }
        }
    }

    /// The slab of a slot, and where the slot begins there.
    pub fn place(&self, slot: SlotId) -> (&Area, usize) {
        self.slabs().place(slot)
    }

    /// The slot as a RECV of an endpoint on that rail.
    pub fn recv(&self, slot: SlotId, rail: u8, id: u32) -> Result<RecvSlot, FabricError> {
        self.slabs().recv(slot, rail, id)
    }

    fn slabs(&self) -> Slabs<'_> {
        Slabs { slabs: &self.slabs, slot_bytes: self.pool.config().slot_bytes as usize }
    }

    /// Books and memory at once.
    pub(super) fn split(&mut self) -> (&mut Pool, Slabs<'_>) {
        let slot_bytes = self.pool.config().slot_bytes as usize;
        (&mut self.pool, Slabs { slabs: &self.slabs, slot_bytes })
    }
}

/// Memory of all slabs.
#[derive(Clone, Copy)]
pub(super) struct Slabs<'a> {
    slabs: &'a HashMap<SlabId, Area>,
    slot_bytes: usize,
}

impl<'a> Slabs<'a> {
    pub(super) fn place(&self, slot: SlotId) -> (&'a Area, usize) {
        (&self.slabs[&slot.slab], slot.index as usize * self.slot_bytes)
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
