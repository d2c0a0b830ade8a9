//! A local registration with the count of transfers that use it right now.

use crate::err;
use crate::error::Result;
use baton_core::prepared::KeyTable;
use baton_core::registry::LocalRegion;
use baton_core::wire::MAX_REGION_KEYS;
use baton_fabric::{Fabric, FabricError, Keys, MAX_RAILS, Memory, RegionKeys};
use parking_lot::{Condvar, Mutex};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// What one fabric made of a region.
pub(crate) struct OnFabric {
    /// Names the registration.
    pub keys: Keys,
    /// Everything that work requests need.
    pub all: RegionKeys,
}

impl OnFabric {
    /// Registers memory, or says why not. With a file: memory that is the file from its first byte on.
    pub fn register(
        fabric: &dyn Fabric,
        memory: &Memory,
        file: Option<BorrowedFd<'_>>,
    ) -> std::result::Result<OnFabric, FabricError> {
        let keys = match file {
            Some(file) => fabric.register_shared(memory, file),
            None => fabric.register(memory),
        }?;
        let made = OnFabric { keys, all: fabric.region_keys(keys) };
        made.check(memory).inspect_err(|_| made.take_back(fabric))?;
        Ok(made)
    }

    /// One key per rail and segment, and no more than fit into an exported region.
    fn check(&self, memory: &Memory) -> std::result::Result<(), FabricError> {
        let RegionKeys { segment_bytes, rails, local, remote } = &self.all;
        let segments = memory.len_bytes.div_ceil((*segment_bytes).max(1));
        let count = segments.saturating_mul(u64::from(*rails));
        if count > MAX_REGION_KEYS as u64 {
            return Err(FabricError::Limit(format!(
                "memory at {:#x} of {} bytes takes {rails} rails of {segments} segments of {segment_bytes} bytes; \
                 a region has at most {MAX_REGION_KEYS} keys: register it in parts",
                memory.addr, memory.len_bytes
            )));
        }
        let complete = [local.len(), remote.len()] == [count as usize; 2];
        if !complete || *segment_bytes == 0 || !(1..=MAX_RAILS).contains(rails) {
            return Err(FabricError::Invalid(format!(
                "{} local and {} remote keys for {rails} rails of {segments} segments; \
                 each needs one, and there are 1 to {MAX_RAILS} rails",
                local.len(),
                remote.len()
            )));
        }
        Ok(())
    }

    /// Takes a registration back that nobody has seen yet.
    pub fn take_back(&self, fabric: &dyn Fabric) {
        if let Err(e) = fabric.deregister(self.keys, Instant::now() + crate::register::DEREGISTER_LIMIT) {
            tracing::error!("taking back a registration on fabric {}: {e}", fabric.name());
        }
    }
}

/// A registered region of this engine, on every fabric that can have it.
pub struct Mr {
    pub(crate) region: Arc<LocalRegion>,
    /// One entry per fabric, in the engine's order: what it made, or why it did not.
    pub(crate) on: Vec<std::result::Result<OnFabric, FabricError>>,
    /// The engine allocated it: [`crate::managed`] withdraws it.
    pub(crate) managed: bool,
    /// [`REVOKED`] and the count of transfers that use it.
    pins: AtomicU64,
    /// Guards nothing but the wait for the last pin.
    waiting: Mutex<()>,
    unpinned: Condvar,
}

/// No new pins.
const REVOKED: u64 = 1 << 63;

impl Mr {
    pub(crate) fn new(
        region: Arc<LocalRegion>,
        on: Vec<std::result::Result<OnFabric, FabricError>>,
        managed: bool,
    ) -> Mr {
        let (waiting, unpinned) = (Mutex::new(()), Condvar::new());
        Mr { region, on, managed, pins: AtomicU64::new(0), waiting, unpinned }
    }

    /// The keys with which a session on this fabric names the region in its own work requests.
    pub(crate) fn key_table(&self, fabric_index: usize, fabric: &str) -> Result<KeyTable<'_>> {
        let Memory { addr, len_bytes, kind, .. } = self.region.memory;
        match &self.on[fabric_index] {
            Ok(OnFabric { all, .. }) => Ok(KeyTable {
                base: addr,
                segment_bytes: all.segment_bytes,
                rails: all.rails,
                keys: &all.local,
            }),
            Err(why) => Err(err!(
                Unsupported,
                "local region {:#x} ({kind:?}, {len_bytes} bytes at {addr:#x}) is not registered with fabric {fabric}, \
                 which the session uses: {why}; let both engines use a fabric that can register it (BATON_FABRIC)",
                self.region.handle.0
            )),
        }
    }

    /// An error once it was withdrawn.
    pub(crate) fn check_registered(&self) -> Result<()> {
        if self.pins.load(Ordering::Acquire) & REVOKED == 0 {
            return Ok(());
        }
        Err(err!(NotFound, "local region {:#x} is not registered any more", self.region.handle.0))
    }

    /// Counts one more posted transfer; `false` if the region was withdrawn.
    pub(crate) fn pin(&self) -> bool {
        if self.pins.fetch_add(1, Ordering::AcqRel) & REVOKED == 0 {
            return true;
        }
        self.unpin();
        false
    }

    /// Counts one more use of a peer's, which may still begin while the region is being withdrawn; [`Mr::unpin`] ends it.
    pub(crate) fn hold(&self) {
        self.pins.fetch_add(1, Ordering::AcqRel);
    }

    /// Takes one `pin` back.
    pub(crate) fn unpin(&self) {
        if self.pins.fetch_sub(1, Ordering::AcqRel) == REVOKED + 1 {
            // Whoever waits has either seen the count before, and then sleeps by now, or sees it now.
            drop(self.waiting.lock());
            self.unpinned.notify_all();
        }
    }

    /// No new pins from now on.
    pub(crate) fn revoke(&self) {
        self.pins.fetch_or(REVOKED, Ordering::AcqRel);
    }

    /// Waits for the last pin to go; `false` when `deadline` came first.
    pub(crate) fn wait_unpinned(&self, deadline: Instant) -> bool {
        let active = || self.pins.load(Ordering::Acquire) & !REVOKED;
        let mut waiting = self.waiting.lock();
        while active() > 0 {
            if self.unpinned.wait_until(&mut waiting, deadline).timed_out() {
                return active() == 0;
            }
        }
        true
    }
}
