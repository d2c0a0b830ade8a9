//! Own registrations.

use std::sync::Arc;

use baton_fabric::{Memory, RegionKeys};

use super::region::{LocalRegion, RegionHandle};
use super::slab::Slab;
use crate::ids::{Instance, RegionId};
use crate::wire::{Access, FabricKeys, RegionBlob, RegionBlobError};

#[derive(Debug)]
pub(super) struct LocalTable {
    slab: Slab<Arc<LocalRegion>>,
}

impl LocalTable {
    pub(super) fn new() -> Self {
        Self { slab: Slab::new() }
    }

    pub(super) fn used(&self) -> usize {
        self.slab.used()
    }

    pub(super) fn add(
        &mut self,
        own: Instance,
        memory: Memory,
        keys: &[(&str, &RegionKeys)],
        random: u32,
    ) -> Result<RegionHandle, RegionBlobError> {
        let mut handle = RegionHandle(0);
        self.slab.insert(|index, generation| {
            handle = RegionHandle::local(index, generation, random);
            let exported = describe(own, handle, &memory, keys).encode()?;
            Ok(Arc::new(LocalRegion::new(handle, memory, exported)))
        })?;
        Ok(handle)
    }

    pub(super) fn find(&self, handle: RegionHandle) -> Option<&Arc<LocalRegion>> {
        self.slab.find(handle.local_index()).filter(|region| region.handle == handle)
    }

    pub(super) fn remove(&mut self, handle: RegionHandle) -> Option<Arc<LocalRegion>> {
        self.find(handle)?;
        let region = self.slab.remove(handle.local_index())?;
        region.revoke();
        Some(region)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<LocalRegion>> {
        self.slab.iter()
    }
}

/// A region that peers may not touch tells no key.
fn describe(
    own: Instance,
    handle: RegionHandle,
    memory: &Memory,
    keys: &[(&str, &RegionKeys)],
) -> RegionBlob {
    let access = Access { remote_read: memory.remote_read, remote_write: memory.remote_write };
    let open = access != Access::default();
    RegionBlob {
        instance: own,
        region: RegionId(handle.0),
        base: memory.addr,
        len: memory.len_bytes,
        kind: memory.kind,
        device: memory.device,
        access,
        fabrics: keys
            .iter()
            .filter(|_| open)
            .map(|(name, keys)| FabricKeys::new(name, memory.len_bytes, keys))
            .collect(),
    }
}
