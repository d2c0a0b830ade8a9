//! A local registration with the count of transfers that use it right now.

use crate::err;
use crate::error::Result;
use baton_core::prepared::KeyTable;
use baton_core::registry::LocalRegion;
use baton_core::wire::MAX_REGION_KEYS;
use baton_fabric::{Fabric, FabricError, Keys, MAX_RAILS, Memory, RegionKeys};
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Instant;

/// What one fabric made of a region.
pub(crate) struct OnFabric {
    /// Names the registration.
    pub keys: Keys,
    /// Everything that work requests need.
    pub all: RegionKeys,
}

impl OnFabric {
    /// Registers memory, or says why not.
    pub fn register(fabric: &dyn Fabric, memory: &Memory) -> std::result::Result<OnFabric, FabricError> {
        let keys = fabric.register(memory)?;
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
        if let Err(e) = fabric.deregister(self.keys, Instant::now() + crate::work::DEREGISTER_LIMIT) {
            tracing::error!("taking back a registration on fabric {}: {e}", fabric.name());
        }
    }
}

/// A registered region of this engine, on every fabric that can have it.
pub struct Mr {
    pub(crate) region: Arc<LocalRegion>,
    /// One entry per fabric, in the engine's order: what it made, or why it did not.
    pub(crate) on: Vec<std::result::Result<OnFabric, FabricError>>,
    pins: Mutex<Pins>,
    unpinned: Condvar,
}

#[derive(Default)]
struct Pins {
    active: u32,
    revoked: bool,
}

impl Mr {
    pub(crate) fn new(region: Arc<LocalRegion>, on: Vec<std::result::Result<OnFabric, FabricError>>) -> Mr {
        Mr { region, on, pins: Mutex::new(Pins::default()), unpinned: Condvar::new() }
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

    /// Counts one more posted transfer; `false` if the region was withdrawn.
    pub(crate) fn pin(&self) -> bool {
        let mut pins = self.pins.lock();
        if !pins.revoked {
            pins.active += 1;
        }
        !pins.revoked
    }

    /// Takes one `pin` back.
    pub(crate) fn unpin(&self) {
        let mut pins = self.pins.lock();
        pins.active -= 1;
        if pins.active == 0 && pins.revoked {
            self.unpinned.notify_all();
        }
    }

    /// No new pins from now on.
    pub(crate) fn revoke(&self) {
        self.pins.lock().revoked = true;
    }

    /// Waits for the last pin to go; `false` when `deadline` came first.
    pub(crate) fn wait_unpinned(&self, deadline: Instant) -> bool {
        let mut pins = self.pins.lock();
        while pins.active > 0 {
            if self.unpinned.wait_until(&mut pins, deadline).timed_out() {
                return pins.active == 0;
            }
        }
        true
    }
}
