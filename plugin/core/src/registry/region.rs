//! The two kinds of regions, and their handles.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use baton_fabric::Memory;

use crate::ids::{Instance, RegionId};
use crate::wire::RegionBlob;

/// A region as the host names it. Own ones have the top bit clear, imported ones set; 0 is never used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RegionHandle(pub u64);

const REMOTE: u64 = 1 << 63;

impl RegionHandle {
    /// `0 | index 23 | generation 16 | random 24`, and never 0.
    pub(super) fn local(index: u32, generation: u32, random: u32) -> Self {
        let random = u64::from(random & 0xff_ffff).max(1);
        Self(u64::from(index & 0x7f_ffff) << 40 | u64::from(generation & 0xffff) << 24 | random)
    }

    pub(super) fn local_index(self) -> u32 {
        (self.0 >> 40) as u32
    }

    /// `1 | generation 31 | index 32`.
    pub(super) fn remote(index: u32, generation: u32) -> Self {
        Self(REMOTE | u64::from(generation & 0x7fff_ffff) << 32 | u64::from(index))
    }

    pub(super) fn remote_index(self) -> u32 {
        self.0 as u32
    }
}

/// An own registration.
#[derive(Debug)]
pub struct LocalRegion {
    /// Its handle, whose value is also its number on the wire.
    pub handle: RegionHandle,
    /// What is registered.
    pub memory: Memory,
    exported: Box<[u8]>,
    revoked: AtomicBool,
}

impl LocalRegion {
    pub(super) fn new(handle: RegionHandle, memory: Memory, exported: Vec<u8>) -> Self {
        Self { handle, memory, exported: exported.into(), revoked: AtomicBool::new(false) }
    }

    /// Number on the wire.
    pub fn id(&self) -> RegionId {
        RegionId(self.handle.0)
    }

    /// Whether `addr..addr + len` lies inside.
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        inside(self.memory.addr, self.memory.len_bytes, addr, len)
    }

    /// The host has deregistered it: nothing new may touch it.
    pub fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    pub(super) fn revoke(&self) {
        self.revoked.store(true, Ordering::Release);
    }

    pub(super) fn exported(&self) -> &[u8] {
        &self.exported
    }
}

/// An imported region.
#[derive(Debug)]
pub struct RemoteRegion {
    /// Agent name under which it was imported.
    pub name: Arc<str>,
    /// What its owner says of it.
    pub blob: RegionBlob,
    revoked: AtomicBool,
}

impl RemoteRegion {
    pub(super) fn new(name: Arc<str>, blob: RegionBlob, revoked: bool) -> Self {
        Self { name, blob, revoked: AtomicBool::new(revoked) }
    }

    /// Whether `addr..addr + len` lies inside.
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        inside(self.blob.base, self.blob.len, addr, len)
    }

    /// Its owner has deregistered it: nothing new may be posted to it.
    pub fn is_revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    pub(super) fn revoke(&self) {
        self.revoked.store(true, Ordering::Release);
    }
}

/// What an imported region's handle names.
#[derive(Clone, Debug)]
pub enum Resolved {
    /// A peer's region.
    Remote(Arc<RemoteRegion>),
    /// One of our own, imported under our own name.
    Own(Arc<LocalRegion>),
}

/// Both ends as differences from the base: no sum can overflow.
fn inside(base: u64, region_len: u64, addr: u64, len: u64) -> bool {
    addr >= base && addr - base <= region_len && len <= region_len - (addr - base)
}

/// Regions withdrawn lately, for blobs that arrive after the news.
#[derive(Debug)]
pub(super) struct Revoked {
    set: HashSet<(Instance, RegionId)>,
    order: VecDeque<(Instance, RegionId)>,
}

const REMEMBERED: usize = 16_384;

impl Revoked {
    pub(super) fn new() -> Self {
        Self { set: HashSet::new(), order: VecDeque::new() }
    }

    pub(super) fn contains(&self, key: &(Instance, RegionId)) -> bool {
        self.set.contains(key)
    }

    pub(super) fn insert(&mut self, key: (Instance, RegionId)) {
        if !self.set.insert(key) {
            return;
        }
        self.order.push_back(key);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.set.remove(&oldest);
        }
    }
}
