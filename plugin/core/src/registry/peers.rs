//! Names and what they are bound to. A name lives while it is bound or has imported regions.

use std::collections::HashMap;
use std::sync::Arc;

use super::slab::Slab;
use crate::ids::Instance;
use crate::wire::ConnInfo;

#[derive(Debug)]
pub(super) struct PeerTable {
    slab: Slab<Peer>,
    by_name: HashMap<Arc<str>, u32>,
    by_instance: HashMap<Instance, u32>,
}

#[derive(Debug)]
struct Peer {
    name: Arc<str>,
    bound: Option<Arc<ConnInfo>>,
    imports: usize,
}

impl PeerTable {
    pub(super) fn new() -> Self {
        Self { slab: Slab::new(), by_name: HashMap::new(), by_instance: HashMap::new() }
    }

    pub(super) fn used(&self) -> usize {
        self.slab.used()
    }

    pub(super) fn find(&self, name: &str) -> Option<u32> {
        self.by_name.get(name).copied()
    }

    pub(super) fn add(&mut self, name: &str) -> u32 {
        let name: Arc<str> = name.into();
        let mut at = 0;
        let inserted = self.slab.insert(|index, _| {
            at = index;
            Ok::<_, std::convert::Infallible>(Peer { name: name.clone(), bound: None, imports: 0 })
        });
        match inserted {
            Ok(()) => {}
            Err(never) => match never {},
        }
        self.by_name.insert(name, at);
        at
    }

    /// Binds; returns the instance bound before and the new one.
    pub(super) fn bind(&mut self, peer: u32, info: Arc<ConnInfo>) -> (Option<Instance>, Instance) {
        let new = info.instance;
        let Some(slot) = self.slab.find_mut(peer) else { return (None, new) };
        let old = slot.bound.replace(info).map(|before| before.instance);
        if let Some(old) = old.filter(|old| self.by_instance.get(old) == Some(&peer)) {
            self.by_instance.remove(&old);
        }
        self.by_instance.insert(new, peer);
        (old, new)
    }

    pub(super) fn unbind(&mut self, name: &str) -> Option<Instance> {
        let peer = self.find(name)?;
        let old = self.slab.find_mut(peer)?.bound.take()?.instance;
        if self.by_instance.get(&old) == Some(&peer) {
            self.by_instance.remove(&old);
        }
        self.drop_if_unused(peer);
        Some(old)
    }

    pub(super) fn bound(&self, name: &str) -> Option<&Arc<ConnInfo>> {
        self.slab.find(self.find(name)?)?.bound.as_ref()
    }

    pub(super) fn bound_instance(&self, instance: &Instance) -> Option<&Arc<ConnInfo>> {
        self.slab.find(*self.by_instance.get(instance)?)?.bound.as_ref()
    }

    pub(super) fn instance(&self, peer: u32) -> Option<Instance> {
        self.slab.find(peer)?.bound.as_ref().map(|info| info.instance)
    }

    pub(super) fn bindings(&self) -> impl Iterator<Item = &Arc<ConnInfo>> {
        self.slab.iter().filter_map(|peer| peer.bound.as_ref())
    }

    /// One more imported region under this name.
    pub(super) fn retain(&mut self, peer: u32) -> Arc<str> {
        let slot = self.slab.find_mut(peer).expect("a peer just found or added");
        slot.imports += 1;
        slot.name.clone()
    }

    /// One less.
    pub(super) fn release(&mut self, peer: u32) {
        if let Some(slot) = self.slab.find_mut(peer) {
            slot.imports -= 1;
        }
        self.drop_if_unused(peer);
    }

    fn drop_if_unused(&mut self, peer: u32) {
        if self.slab.find(peer).is_some_and(|slot| slot.bound.is_none() && slot.imports == 0)
            && let Some(slot) = self.slab.remove(peer)
        {
            self.by_name.remove(&slot.name);
        }
    }
}
