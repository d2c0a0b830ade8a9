//! Memory of a node: arenas at invented addresses, and the regions registered on them.

use baton_fabric::{Keys, Memory, RegionKeys, Sge};
use std::collections::BTreeMap;

/// What somebody wants with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Want {
    /// The owner's own work request.
    Local,
    /// A peer's READ.
    RemoteRead,
    /// A peer's WRITE.
    RemoteWrite,
}

/// A segment of a registration on one rail: what one pair of keys opens.
struct Region {
    memory: Memory,
    rail: u8,
    revoked: bool,
}

/// A node's address space and its registrations.
#[derive(Default)]
pub(crate) struct NodeMemory {
    arenas: BTreeMap<u64, Vec<u8>>,
    next_addr: u64,
    /// By local key.
    regions: BTreeMap<u64, Region>,
    /// Remote key → local key.
    remote: BTreeMap<u64, u64>,
    /// All keys of a registration by its first local one.
    registrations: BTreeMap<u64, RegionKeys>,
}

impl NodeMemory {
    pub fn new(node: usize) -> NodeMemory {
        NodeMemory { next_addr: (node as u64 + 1) << 40, ..NodeMemory::default() }
    }

    pub fn alloc(&mut self, len_bytes: usize, misalign: u64) -> u64 {
        let addr = self.next_addr + misalign;
        // A hole behind each arena, so that running over its end is noticed.
        self.next_addr = (addr + len_bytes as u64 + 8192) & !4095;
        self.arenas.insert(addr, vec![0; len_bytes]);
        addr
    }

    pub fn free(&mut self, addr: u64) {
        self.arenas.remove(&addr);
    }

    /// The bytes at an address, when they all lie in one arena.
    pub fn bytes(&self, addr: u64, len_bytes: usize) -> Option<&[u8]> {
        let (base, arena) = self.arenas.range(..=addr).next_back()?;
        let start = usize::try_from(addr - base).ok()?;
        arena.get(start..start.checked_add(len_bytes)?)
    }

    pub fn bytes_mut(&mut self, addr: u64, len_bytes: usize) -> Option<&mut [u8]> {
        let (base, arena) = self.arenas.range_mut(..=addr).next_back()?;
        let start = usize::try_from(addr - base).ok()?;
        arena.get_mut(start..start.checked_add(len_bytes)?)
    }

    /// `keys` has one pair per rail and segment.
    pub fn register(&mut self, memory: &Memory, keys: RegionKeys) -> bool {
        let known = usize::try_from(memory.len_bytes).is_ok_and(|len| self.bytes(memory.addr, len).is_some());
        if !known {
            return false;
        }
        let segments = keys.segments();
        for (index, (local, remote)) in keys.local.iter().zip(&keys.remote).enumerate() {
            let (rail, offset) = ((index / segments) as u8, (index % segments) as u64 * keys.segment_bytes);
            let len_bytes = keys.segment_bytes.min(memory.len_bytes - offset);
            let segment = Memory { addr: memory.addr + offset, len_bytes, ..*memory };
            self.regions.insert(*local, Region { memory: segment, rail, revoked: false });
            self.remote.insert(*remote, *local);
        }
        self.registrations.insert(keys.local[0], keys);
        true
    }

    /// All keys of a registration.
    pub fn region_keys(&self, keys: Keys) -> Option<&RegionKeys> {
        self.registrations.get(&keys.local).filter(|all| all.remote[0] == keys.remote)
    }

    pub fn revoke(&mut self, keys: Keys) -> bool {
        let Some(all) = self.region_keys(keys).map(|all| all.local.clone()) else { return false };
        for local in all {
            if let Some(region) = self.regions.get_mut(&local) {
                region.revoked = true;
            }
        }
        true
    }

    pub fn deregister(&mut self, keys: Keys) -> bool {
        if self.region_keys(keys).is_none() {
            return false;
        }
        if let Some(all) = self.registrations.remove(&keys.local) {
            self.regions.retain(|local, _| !all.local.contains(local));
            self.remote.retain(|remote, _| !all.remote.contains(remote));
        }
        true
    }

    pub fn region_count(&self) -> usize {
        self.registrations.len()
    }

    /// Whether the key permits this to an endpoint on a rail, now.
    pub fn allows(&self, rail: u8, key: u64, addr: u64, len_bytes: usize, want: Want) -> bool {
        let local = if want == Want::Local { Some(&key) } else { self.remote.get(&key) };
        let Some(region) = local.and_then(|key| self.regions.get(key)) else { return false };
        let permitted = match want {
            Want::Local => true,
            Want::RemoteRead => region.memory.remote_read,
            Want::RemoteWrite => region.memory.remote_write,
        };
        let inside = addr.checked_add(len_bytes as u64).is_some_and(|end| {
            addr >= region.memory.addr && end - region.memory.addr <= region.memory.len_bytes
        });
        permitted && inside && region.rail == rail && !region.revoked
    }

    /// Reads through a key.
    pub fn read(&self, rail: u8, key: u64, addr: u64, len_bytes: usize, want: Want) -> Option<Vec<u8>> {
        if !self.allows(rail, key, addr, len_bytes, want) {
            return None;
        }
        self.bytes(addr, len_bytes).map(<[u8]>::to_vec)
    }

    /// Reads the pieces of an own work request.
    pub fn gather(&self, rail: u8, pieces: &[Sge]) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for piece in pieces {
            bytes.extend(self.read(
                rail,
                piece.local_key,
                piece.addr,
                piece.len_bytes as usize,
                Want::Local,
            )?);
        }
        Some(bytes)
    }

    /// Writes through a key; nothing is written unless all may be.
    pub fn write(&mut self, rail: u8, key: u64, addr: u64, bytes: &[u8], want: Want) -> bool {
        if !self.allows(rail, key, addr, bytes.len(), want) {
            return false;
        }
        match self.bytes_mut(addr, bytes.len()) {
            Some(target) => {
                target.copy_from_slice(bytes);
                true
            }
            None => false,
        }
    }
}
