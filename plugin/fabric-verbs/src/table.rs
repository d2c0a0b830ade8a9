//! Endpoints by slot and generation, without a lock that all posts share.

use crate::endpoint::Endpoint;
use baton_fabric::{EndpointId, FabricError};
use parking_lot::{Mutex, RwLock};
use std::sync::{Arc, OnceLock};

/// Slots of one page.
const PAGE: usize = 256;
/// Pages at most.
const PAGES: usize = 256;

type Slot = RwLock<Option<Arc<Endpoint>>>;

/// The table.
pub(crate) struct Table {
    pages: Box<[OnceLock<Box<[Slot]>>]>,
    free: Mutex<Free>,
}

#[derive(Default)]
struct Free {
    /// Generation that each slot gets next.
    generations: Vec<u32>,
    slots: Vec<u32>,
    live: usize,
}

impl Table {
    pub fn new() -> Table {
        Table { pages: (0..PAGES).map(|_| OnceLock::new()).collect(), free: Mutex::default() }
    }

    fn slot(&self, slot: u32) -> Option<&Slot> {
        self.pages.get(slot as usize / PAGE)?.get().map(|page| &page[slot as usize % PAGE])
    }

    pub fn insert(&self, make: impl FnOnce(EndpointId) -> Endpoint) -> Result<Arc<Endpoint>, FabricError> {
        let id = {
            let mut free = self.free.lock();
            let slot = match free.slots.pop() {
                Some(slot) => slot,
                None if free.generations.len() < PAGE * PAGES => {
                    free.generations.push(0);
                    free.generations.len() as u32 - 1
                }
                None => {
                    return Err(FabricError::Limit(format!("{} queue pairs of one engine", PAGE * PAGES)));
                }
            };
            free.live += 1;
            let generation = free.generations[slot as usize];
            free.generations[slot as usize] = generation.wrapping_add(1);
            EndpointId { slot, generation }
        };
        let page =
            self.pages[id.slot as usize / PAGE].get_or_init(|| (0..PAGE).map(|_| Slot::default()).collect());
        let endpoint = Arc::new(make(id));
        *page[id.slot as usize % PAGE].write() = Some(Arc::clone(&endpoint));
        Ok(endpoint)
    }

    pub fn get(&self, id: EndpointId) -> Option<Arc<Endpoint>> {
        let found = self.slot(id.slot)?.read();
        found.as_ref().filter(|endpoint| endpoint.id == id).cloned()
    }

    pub fn remove(&self, id: EndpointId) -> Option<Arc<Endpoint>> {
        let mut found = self.slot(id.slot)?.write();
        let endpoint = found.take_if(|endpoint| endpoint.id == id)?;
        drop(found);
        let mut free = self.free.lock();
        free.live -= 1;
        free.slots.push(id.slot);
        Some(endpoint)
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Endpoint>> {
        let pages = self.pages.iter().filter_map(OnceLock::get);
        pages.flat_map(|page| page.iter().filter_map(|slot| slot.read().clone())).collect()
    }

    /// Takes all of them out.
    pub fn drain(&self) -> Vec<Arc<Endpoint>> {
        self.all().into_iter().filter_map(|endpoint| self.remove(endpoint.id)).collect()
    }

    pub fn len(&self) -> usize {
        self.free.lock().live
    }
}
