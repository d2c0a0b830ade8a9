//! Names, instances and regions. No post, completion or status passes through it; what a request needs it holds by `Arc`.
//!
//! A name is bound to one instance at a time, by connection information only. Imported regions remember name and
//! instance; which of them are usable follows from the binding, so neither order of arrival matters.

mod local;
mod peers;
mod region;
mod slab;
#[cfg(test)]
mod tests;

pub use region::{LocalRegion, RegionHandle, RemoteRegion, Resolved};

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use baton_fabric::{Memory, RegionKeys};

use crate::ids::{Instance, RegionId};
use crate::wire::{ConnInfo, NameError, RegionBlob, RegionBlobError, check_name};
use local::LocalTable;
use peers::PeerTable;
use region::Revoked;
use slab::Slab;

/// Limits of a registry, fixed when the engine is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegistryLimits {
    /// Own registrations.
    pub local_regions: usize,
    /// Names, bound or with imported regions.
    pub peers: usize,
    /// Imported regions.
    pub remote_regions: usize,
}

impl RegistryLimits {
    /// Most own registrations that a region's number can tell apart.
    pub const MAX_LOCAL_REGIONS: usize = 1 << 23;
}

impl Default for RegistryLimits {
    fn default() -> Self {
        Self { local_regions: 1 << 17, peers: 4096, remote_regions: 1 << 20 }
    }
}

/// Why the registry did not take something.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    /// A limit.
    #[error("limit {what} of {limit} is reached; release some or raise it when the engine is created")]
    Limit {
        /// Its name.
        what: &'static str,
        /// Its value.
        limit: usize,
    },
    /// A name.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The connection information is somebody else's.
    #[error("this connection information is of agent {inside:?}, not of {expected:?}")]
    OtherName {
        /// Name asked for.
        expected: String,
        /// Name inside.
        inside: String,
    },
    /// Another engine has our name.
    #[error(
        "agent {name:?} is this engine's own name, but the connection information is of instance {instance}; agents that meet need different names"
    )]
    OwnName {
        /// The name.
        name: String,
        /// The other instance.
        instance: Instance,
    },
    /// A blob.
    #[error(transparent)]
    Blob(#[from] RegionBlobError),
}

/// What [`Registry::load_remote`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadEffect {
    /// The name was not bound.
    New,
    /// The name was bound to that instance already; addresses and key are the new ones.
    Same,
    /// The name was bound to another instance, whose outgoing work must now fail.
    ReplacedInstance {
        /// That one.
        old: Instance,
    },
    /// It is this engine's own; nothing to bind.
    Own,
}

/// Whether an imported region can be used at this moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// Yes.
    Bound,
    /// Its name has no connection information yet.
    Unbound,
    /// Its name is bound to another instance.
    Stale,
}

/// Why a handle cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// No such handle.
    #[error("remote region {0:#x} does not exist (any more)")]
    NotFound(u64),
    /// Its owner has withdrawn it.
    #[error("remote region {handle:#x} was deregistered by its owner {name:?}")]
    Revoked {
        /// Handle.
        handle: u64,
        /// Owner.
        name: String,
    },
    /// No connection information yet.
    #[error("remote region {handle:#x}: the connection information of agent {name:?} is not loaded")]
    Unbound {
        /// Handle.
        handle: u64,
        /// Owner.
        name: String,
    },
    /// Another instance.
    #[error(
        "remote region {handle:#x} is of instance {instance} of agent {name:?}, but instance {bound} is loaded; import its region again"
    )]
    Stale {
        /// Handle.
        handle: u64,
        /// Owner.
        name: String,
        /// The blob's.
        instance: Instance,
        /// The binding's.
        bound: Instance,
    },
}

/// How much there is of everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RegistryCounts {
    /// Own registrations.
    pub local_regions: usize,
    /// Names bound to an instance.
    pub bound_peers: usize,
    /// Names known, bound or not.
    pub peers: usize,
    /// Imported regions.
    pub remote_regions: usize,
    /// Refused because of a limit, ever.
    pub refused: u64,
}

/// The registry of one engine.
#[derive(Debug)]
pub struct Registry {
    own: Instance,
    own_name: String,
    limits: RegistryLimits,
    local: LocalTable,
    peers: PeerTable,
    remote: Slab<Remote>,
    /// Imported regions by what they name, so that a revocation finds all of them.
    by_region: HashMap<(Instance, RegionId), Vec<u32>>,
    /// Released imports that requests still hold: a revocation must reach them too.
    held: HashMap<(Instance, RegionId), Vec<Weak<RemoteRegion>>>,
    revoked: Revoked,
    refused: u64,
}

#[derive(Debug)]
struct Remote {
    handle: RegionHandle,
    peer: u32,
    region: Arc<RemoteRegion>,
}

impl Registry {
    /// The registry of an engine of that name.
    ///
    /// # Errors
    /// The name is none.
    pub fn new(own: Instance, own_name: &str, limits: RegistryLimits) -> Result<Self, NameError> {
        let own_name = check_name(own_name.as_bytes())?.to_owned();
        let local_regions = limits.local_regions.min(RegistryLimits::MAX_LOCAL_REGIONS);
        Ok(Self {
            own,
            own_name,
            limits: RegistryLimits { local_regions, ..limits },
            local: LocalTable::new(),
            peers: PeerTable::new(),
            remote: Slab::new(),
            by_region: HashMap::new(),
            held: HashMap::new(),
            revoked: Revoked::new(),
            refused: 0,
        })
    }

    /// Whether a name is this engine's own.
    pub fn is_own(&self, name: &str) -> bool {
        name == self.own_name
    }

    // ---- own regions

    /// Adds a registration with its keys on each fabric that has it. Equal and overlapping ones are independent. `random` makes the number unguessable.
    ///
    /// # Errors
    /// Limit, or memory that cannot be exported (empty, beyond the address space).
    pub fn add_local(
        &mut self,
        memory: Memory,
        keys: &[(&str, &RegionKeys)],
        random: u32,
    ) -> Result<RegionHandle, RegistryError> {
        self.room("local_regions", self.local.used(), self.limits.local_regions)?;
        Ok(self.local.add(self.own, memory, keys, random)?)
    }

    /// An own registration.
    pub fn local(&self, handle: RegionHandle) -> Option<&Arc<LocalRegion>> {
        self.local.find(handle)
    }

    /// Takes a registration out: nothing new finds it, and what holds it sees it revoked.
    pub fn remove_local(&mut self, handle: RegionHandle) -> Option<Arc<LocalRegion>> {
        self.local.remove(handle)
    }

    /// The bytes with which a peer imports it; the same at every call.
    pub fn export(&self, handle: RegionHandle) -> Option<&[u8]> {
        self.local(handle).map(|region| region.exported())
    }

    /// All own registrations.
    pub fn locals(&self) -> impl Iterator<Item = &Arc<LocalRegion>> {
        self.local.iter()
    }

    // ---- names

    /// Binds the name inside `info` to its instance. With `expected` the name must be that one.
    ///
    /// # Errors
    /// Another name inside, our own name with another instance, or a limit.
    pub fn load_remote(
        &mut self,
        expected: Option<&str>,
        info: ConnInfo,
    ) -> Result<LoadEffect, RegistryError> {
        if let Some(expected) = expected.filter(|name| *name != info.name) {
            return Err(RegistryError::OtherName { expected: expected.to_owned(), inside: info.name });
        }
        if info.instance == self.own {
            return Ok(LoadEffect::Own);
        }
        if self.is_own(&info.name) {
            return Err(RegistryError::OwnName { name: info.name, instance: info.instance });
        }
        let peer = self.peer(&info.name)?;
        Ok(match self.peers.bind(peer, Arc::new(info)) {
            (None, _) => LoadEffect::New,
            (Some(old), new) if old == new => LoadEffect::Same,
            (Some(old), _) => LoadEffect::ReplacedInstance { old },
        })
    }

    /// Forgets a name's binding; its imported regions stay, unusable until it is bound again. The instance is returned once.
    pub fn disconnect(&mut self, name: &str) -> Option<Instance> {
        self.peers.unbind(name)
    }

    /// The connection information that a name is bound to.
    pub fn bound(&self, name: &str) -> Option<&Arc<ConnInfo>> {
        self.peers.bound(name)
    }

    /// The connection information of an instance, if a name is bound to it.
    pub fn bound_instance(&self, instance: &Instance) -> Option<&Arc<ConnInfo>> {
        self.peers.bound_instance(instance)
    }

    /// All bindings.
    pub fn bindings(&self) -> impl Iterator<Item = &Arc<ConnInfo>> {
        self.peers.bindings()
    }

    // ---- imported regions

    /// Imports a region that agent `name` exported. Each import is a handle of its own.
    ///
    /// # Errors
    /// Bytes that are no region, a name that is none, or a limit.
    pub fn import(&mut self, name: &str, blob: &[u8]) -> Result<(RegionHandle, Binding), RegistryError> {
        let blob = RegionBlob::decode(blob)?;
        check_name(name.as_bytes())?;
        self.room("remote_regions", self.remote.used(), self.limits.remote_regions)?;
        let peer = self.peer(name)?;
        let name = self.peers.retain(peer);
        let key = (blob.instance, blob.region);
        let region = Arc::new(RemoteRegion::new(name, blob, self.revoked.contains(&key)));
        let (mut handle, mut at) = (RegionHandle(0), 0);
        let inserted = self.remote.insert(|index, generation| {
            handle = RegionHandle::remote(index, generation);
            at = index;
            Ok::<_, std::convert::Infallible>(Remote { handle, peer, region })
        });
        match inserted {
            Ok(()) => {}
            Err(never) => match never {},
        }
        self.by_region.entry(key).or_default().push(at);
        Ok((handle, self.binding(handle).unwrap_or(Binding::Unbound)))
    }

    /// Whether a handle can be used now; `None` if there is none.
    pub fn binding(&self, handle: RegionHandle) -> Option<Binding> {
        let remote = self.find_remote(handle)?;
        let owner = remote.region.blob.instance;
        if owner == self.own && self.is_own(&remote.region.name) {
            return Some(Binding::Bound);
        }
        Some(match self.peers.instance(remote.peer) {
            None => Binding::Unbound,
            Some(bound) if bound == owner => Binding::Bound,
            Some(_) => Binding::Stale,
        })
    }

    /// What a handle names. The answer outlives the handle.
    ///
    /// # Errors
    /// It cannot be used now.
    pub fn resolve(&self, handle: RegionHandle) -> Result<Resolved, ResolveError> {
        let Some(Remote { region, peer, .. }) = self.find_remote(handle) else {
            return Err(ResolveError::NotFound(handle.0));
        };
        let name = || region.name.to_string();
        let instance = region.blob.instance;
        if self.is_own(&region.name) {
            return match self.local(RegionHandle(region.blob.region.0)) {
                _ if instance != self.own => {
                    Err(ResolveError::Stale { handle: handle.0, name: name(), instance, bound: self.own })
                }
                Some(local) => Ok(Resolved::Own(local.clone())),
                None => Err(ResolveError::Revoked { handle: handle.0, name: name() }),
            };
        }
        match self.peers.instance(*peer) {
            None => Err(ResolveError::Unbound { handle: handle.0, name: name() }),
            Some(bound) if bound != instance => {
                Err(ResolveError::Stale { handle: handle.0, name: name(), instance, bound })
            }
            Some(_) if region.is_revoked() => Err(ResolveError::Revoked { handle: handle.0, name: name() }),
            Some(_) => Ok(Resolved::Remote(region.clone())),
        }
    }

    /// Forgets an import. Requests that hold the region keep it. `false`: there was none.
    pub fn release(&mut self, handle: RegionHandle) -> bool {
        if self.find_remote(handle).is_none() {
            return false;
        }
        let index = handle.remote_index();
        let Some(remote) = self.remote.remove(index) else { return false };
        let key = (remote.region.blob.instance, remote.region.blob.region);
        if let Some(indices) = self.by_region.get_mut(&key) {
            indices.retain(|i| *i != index);
            if indices.is_empty() {
                self.by_region.remove(&key);
            }
        }
        if Arc::strong_count(&remote.region) > 1 {
            self.hold(key, &remote.region);
        }
        self.peers.release(remote.peer);
        true
    }

    /// The owner withdrew these regions: their handles answer [`ResolveError::Revoked`] from now on, and so do imports
    /// that come late. Returns the regions concerned that are imported here or were and are still held, each once per import.
    pub fn revoke(&mut self, instance: Instance, regions: &[RegionId]) -> Vec<Arc<RemoteRegion>> {
        let mut found = Vec::new();
        for region in regions {
            let key = (instance, *region);
            self.revoked.insert(key);
            for index in self.by_region.get(&key).into_iter().flatten() {
                if let Some(remote) = self.remote.find_mut(*index) {
                    remote.region.revoke();
                    found.push(remote.region.clone());
                }
            }
            for region in self.held.remove(&key).into_iter().flatten().filter_map(|weak| weak.upgrade()) {
                region.revoke();
                found.push(region);
            }
        }
        found
    }

    /// How much there is.
    pub fn counts(&self) -> RegistryCounts {
        RegistryCounts {
            local_regions: self.local.used(),
            bound_peers: self.peers.bindings().count(),
            peers: self.peers.used(),
            remote_regions: self.remote.used(),
            refused: self.refused,
        }
    }

    /// Remembers a released import for as long as something holds it. The table is swept whenever it has doubled.
    fn hold(&mut self, key: (Instance, RegionId), region: &Arc<RemoteRegion>) {
        if self.held.len() == self.held.capacity() {
            self.held.retain(|_, regions| {
                regions.retain(|region| region.strong_count() > 0);
                !regions.is_empty()
            });
        }
        let regions = self.held.entry(key).or_default();
        regions.retain(|region| region.strong_count() > 0);
        regions.push(Arc::downgrade(region));
    }

    fn find_remote(&self, handle: RegionHandle) -> Option<&Remote> {
        self.remote.find(handle.remote_index()).filter(|remote| remote.handle == handle)
    }

    fn peer(&mut self, name: &str) -> Result<u32, RegistryError> {
        if let Some(peer) = self.peers.find(name) {
            return Ok(peer);
        }
        self.room("peers", self.peers.used(), self.limits.peers)?;
        Ok(self.peers.add(name))
    }

    fn room(&mut self, what: &'static str, used: usize, limit: usize) -> Result<(), RegistryError> {
        if used < limit {
            return Ok(());
        }
        self.refused += 1;
        Err(RegistryError::Limit { what, limit })
    }
}
