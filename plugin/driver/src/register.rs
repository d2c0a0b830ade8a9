//! Regions: what the host registers, exports and imports.

use crate::engine::Driver;
use crate::err;
use crate::error::{Code, Error, Result};
use crate::memory::is_mapped;
use crate::peer::Conn;
use crate::region::{Mr, OnFabric};
use crate::shared::{Shared, random_u64};
use baton_core::peer::EndReason;
use baton_core::registry::{RegionHandle, RegistryError};
use baton_fabric::{Fabric, FabricError, Memory, MemoryKind};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Withdrawing a region blocks at most this long (PROTOCOL §8).
pub(crate) const DEREGISTER_LIMIT: Duration = Duration::from_secs(1);

fn registry_error(e: RegistryError) -> Error {
    let code = match &e {
        RegistryError::Limit { .. } => Code::Limit,
        _ => Code::InvalidParam,
    };
    Error::new(code, e.to_string())
}

impl Driver {
    /// Registers memory on every fabric that can have it. One is enough; a transfer over another then fails with its reason.
    pub fn register(&self, memory: &Memory) -> Result<u64> {
        self.register_with(memory, None).map(|mr| mr.region.handle.0)
    }

    /// With a file: managed memory, which is the file from its first byte on.
    pub(crate) fn register_with(&self, memory: &Memory, file: Option<BorrowedFd<'_>>) -> Result<Arc<Mr>> {
        let shared = &self.shared;
        shared.usable()?;
        if memory.len_bytes == 0 || memory.addr.checked_add(memory.len_bytes).is_none() {
            return Err(err!(
                InvalidParam,
                "memory at {:#x} of {} bytes: the length must be at least 1 and the end inside the address space",
                memory.addr,
                memory.len_bytes
            ));
        }
        let exposed = shared.config.backends.one_sided;
        let on =
            if exposed { shared.register_exposed(memory, file)? } else { shared.register_hidden(memory)? };
        let named: Vec<_> = shared
            .fabrics
            .iter()
            .zip(&on)
            .filter_map(|(fabric, made)| Some((fabric.name(), &made.as_ref().ok()?.all)))
            .filter(|_| exposed)
            .collect();
        let mut registry = shared.registry.write();
        let handle = registry.add_local(*memory, &named, random_u64() as u32).map_err(registry_error);
        let region = handle.as_ref().ok().and_then(|handle| registry.local(*handle).cloned());
        drop(registry);
        match (handle, region) {
            (Ok(handle), Some(region)) => {
                let mr = Arc::new(Mr::new(region, on, file.is_some()));
                // What the CPU does not reach is not served by copies.
                if shared.config.backends.two_sided && memory.kind == MemoryKind::Dram {
                    shared.served.add(&mr);
                }
                shared.regions.write().insert(handle.0, Arc::clone(&mr));
                Ok(mr)
            }
            (outcome, _) => {
                let made = shared.fabrics.iter().zip(&on);
                made.filter_map(|(fabric, made)| Some((fabric, made.as_ref().ok()?)))
                    .for_each(|(fabric, made)| made.take_back(&**fabric));
                Err(outcome
                    .err()
                    .unwrap_or_else(|| err!(Local, "the region vanished while it was registered")))
            }
        }
    }

    /// Withdraws a registration. When it has succeeded no byte will land in the memory any more. After an error the region can be
    /// used no more but may still be touched, and the call can be repeated.
    pub fn deregister(&self, handle: u64) -> Result<()> {
        let mut regions = self.shared.regions.write();
        if regions.get(&handle).is_some_and(|mr| mr.managed) {
            return Err(err!(InvalidParam, "region {handle:#x} is managed memory: use free_managed"));
        }
        let mr = regions.remove(&handle);
        drop(regions);
        let mr = mr.ok_or_else(|| err!(NotFound, "region {handle:#x} is not registered (any more)"))?;
        self.withdraw(&mr).inspect_err(|_| {
            self.shared.regions.write().insert(handle, mr);
        })
    }

    /// Ends all access to a region that no handle names any more. Can be repeated after an error.
    pub(crate) fn withdraw(&self, mr: &Mr) -> Result<()> {
        let shared = &self.shared;
        shared.registry.write().remove_local(mr.region.handle);
        let limit = DEREGISTER_LIMIT * shared.config.timeout_scale;
        let deadline = Instant::now() + limit;
        mr.revoke();
        // Own transfers that use the region end in order if they do in time; polling is what ends them. Peers get the other half.
        let own = Instant::now() + limit / 2;
        while !mr.wait_unpinned(Instant::now() + Duration::from_millis(1)) && Instant::now() < own {
            shared.poll();
        }
        if !shared.is_stopping() {
            shared.revoke_at_peers(mr.region.id(), deadline);
        }
        let served = shared.stop_serving(mr, deadline);
        // Sessions that were ended for it are quiet within their drain deadline.
        let quiet = Instant::now() + shared.scaled(crate::epoch::DRAIN_MS);
        let taken = shared.take_from_fabrics(mr, deadline.max(quiet));
        served.and(taken)
    }

    /// The bytes with which a peer imports a region.
    pub fn export(&self, handle: u64) -> Result<Vec<u8>> {
        self.shared.usable()?;
        let registry = self.shared.registry.read();
        let bytes = registry.export(RegionHandle(handle));
        bytes
            .map(<[u8]>::to_vec)
            .ok_or_else(|| err!(NotFound, "region {handle:#x} is not registered (any more)"))
    }

    /// Takes a peer's exported region.
    pub fn import(&self, name: &str, blob: &[u8]) -> Result<u64> {
        self.shared.usable()?;
        self.shared.registry.write().import(name, blob).map(|(handle, _)| handle.0).map_err(registry_error)
    }

    /// Forgets an imported region.
    pub fn release_remote(&self, handle: u64) -> Result<()> {
        self.shared.usable()?;
        if self.shared.registry.write().release(RegionHandle(handle)) {
            Ok(())
        } else {
            Err(err!(NotFound, "remote region {handle:#x} does not exist (any more)"))
        }
    }
}

impl Shared {
    /// Registers memory so that peers can read and write it, as far as its owner permits.
    fn register_exposed(
        &self,
        memory: &Memory,
        file: Option<BorrowedFd<'_>>,
    ) -> Result<Vec<std::result::Result<OnFabric, FabricError>>> {
        let register =
            |(index, fabric): (usize, &Arc<dyn Fabric>)| match self.config.notify_only == Some(index) {
                true => Err(FabricError::Unsupported("it takes nothing but notifications".into())),
                false => OnFabric::register(&**fabric, memory, file),
            };
        let on: Vec<_> = self.fabrics.iter().enumerate().map(register).collect();
        self.judge_registration(memory, &on)?;
        Ok(on)
    }

    /// Registers memory for own work requests alone. Where a fabric cannot have it, it is copied.
    fn register_hidden(&self, memory: &Memory) -> Result<Vec<std::result::Result<OnFabric, FabricError>>> {
        if memory.kind != MemoryKind::Dram {
            return Err(err!(
                Unsupported,
                "{:?} memory at {:#x} of {} bytes: the two-sided backend copies with the CPU, which reaches host memory only; \
                 use BATON_BACKEND=one-sided",
                memory.kind,
                memory.addr,
                memory.len_bytes
            ));
        }
        // It is not exposed, so a fabric need not have it: whoever gives a wrong address hears of it here all the same.
        if !is_mapped(memory.addr, memory.len_bytes) {
            return Err(err!(
                InvalidParam,
                "memory at {:#x} of {} bytes is not mapped, or not all of it",
                memory.addr,
                memory.len_bytes
            ));
        }
        let hidden = Memory { remote_read: false, remote_write: false, ..*memory };
        let register = |fabric: &Arc<dyn Fabric>| {
            OnFabric::register(&**fabric, &hidden, None).inspect_err(|e| {
                self.counters.registrations_partial.fetch_add(1, Ordering::Relaxed);
                tracing::debug!("memory at {:#x} is copied on fabric {}: {e}", memory.addr, fabric.name());
            })
        };
        Ok(self.fabrics.iter().map(register).collect())
    }

    /// Peers find a withdrawn region no longer, and whoever was copying or sending from it has ended. Who is still at it after the
    /// deadline loses its session.
    fn stop_serving(self: &Arc<Self>, mr: &Mr, deadline: Instant) -> Result<()> {
        if !self.config.backends.two_sided {
            return Ok(());
        }
        self.served.remove(mr.region.id());
        let deadline = deadline.max(Instant::now() + DEREGISTER_LIMIT / 10);
        while !mr.wait_unpinned(Instant::now() + Duration::from_millis(1)) {
            self.poll();
            if Instant::now() < deadline {
                continue;
            }
            tracing::warn!(
                "region {:#x} is withdrawn while peers use it: their sessions end",
                mr.region.handle.0
            );
            let peers: Vec<_> = self.peers.read().values().cloned().collect();
            for peer in peers {
                let mut state = peer.state.lock();
                if matches!(&state.conn, Conn::Open(channel) if channel.two_sided.is_some()) {
                    let why = "it uses memory that was withdrawn".into();
                    self.end_epoch(&peer, &mut state, EndReason::PeerGone(why));
                }
            }
            // Their endpoints are gone in bounded time.
            let patience = self.scaled(crate::epoch::DRAIN_MS) * 2;
            if !mr.wait_unpinned(Instant::now() + patience) {
                return Err(err!(
                    Local,
                    "region {:#x}: {patience:?} after the sessions that used it were ended it is still in use",
                    mr.region.handle.0
                ));
            }
            break;
        }
        Ok(())
    }

    /// Deregisters on every fabric; an error if one may still touch the memory.
    pub(crate) fn take_from_fabrics(&self, mr: &Mr, deadline: Instant) -> Result<()> {
        let mut outcome = Ok(());
        for (fabric, made) in self.fabrics.iter().zip(&mr.on) {
            let Ok(made) = made else { continue };
            match fabric.deregister(made.keys, deadline) {
                // A call that is repeated finds only those that failed before.
                Ok(()) | Err(FabricError::NotFound(_)) => {}
                Err(e) => {
                    let handle = mr.region.handle.0;
                    outcome = Err(err!(Local, "region {handle:#x} on fabric {}: {e}", fabric.name()));
                }
            }
        }
        outcome
    }

    /// An error if no fabric has the memory. What some could not have is counted, and said once per fabric and kind of memory.
    fn judge_registration(
        &self,
        memory: &Memory,
        on: &[std::result::Result<OnFabric, FabricError>],
    ) -> Result<()> {
        let fabrics = self.fabrics.iter().map(|fabric| fabric.name());
        let failed: Vec<_> =
            fabrics.zip(on).filter_map(|(name, made)| Some((name, made.as_ref().err()?))).collect();
        if failed.len() == on.len() {
            let code = failed.first().map_or(Code::Local, |(_, e)| Error::from((*e).clone()).code);
            let mut reasons: Vec<_> = failed.iter().map(|(name, e)| format!("fabric {name}: {e}")).collect();
            // A fabric that is not there might have taken it.
            if memory.kind == MemoryKind::Vram && !self.config.notes.is_empty() {
                reasons.push(format!("not in use: {}", self.config.notes.join("; ")));
            }
            return Err(Error::new(code, reasons.join("; ")));
        }
        let notify_only = self.config.notify_only.map(|index| self.fabrics[index].name());
        for (name, e) in failed.into_iter().filter(|(name, _)| Some(*name) != notify_only) {
            self.counters.registrations_partial.fetch_add(1, Ordering::Relaxed);
            let text = format!(
                "{:?} memory at {:#x} of {} bytes is not registered with fabric {name} and sessions over it cannot use it: {e}",
                memory.kind, memory.addr, memory.len_bytes
            );
            match self.partial_registrations_said.lock().insert((name, memory.kind == MemoryKind::Vram)) {
                true => tracing::warn!("{text} (said once per fabric and kind of memory)"),
                false => tracing::debug!("{text}"),
            }
        }
        Ok(())
    }
}
