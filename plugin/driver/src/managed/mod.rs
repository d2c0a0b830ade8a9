//! Managed buffers: memory that the engine allocates for its host, registered like any other region.
//!
//! ```text
//! alloc ──▶ live ──free: revoked, waited for──▶ unmapped
//!                        │ something may still touch it
//!                        ▼
//!                      kept ──free again, or the engine's end──▶ unmapped, or left mapped for ever
//! ```

mod pages;

use crate::engine::Driver;
use crate::err;
use crate::error::Result;
use crate::region::Mr;
use crate::shared::Shared;
use baton_fabric::{Memory, MemoryKind};
use pages::{PageKind, Pages};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of all managed buffers of an engine together, at most.
pub const MAX_MANAGED_BYTES: u64 = 1 << 40;
/// Managed buffers of an engine at most: each costs a descriptor and a mapping.
pub const MAX_MANAGED_BUFFERS: usize = 4096;

struct Buffer {
    mr: Arc<Mr>,
    pages: Pages,
}

/// Managed buffers by the handle of their region.
#[derive(Default)]
pub(crate) struct Managed {
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    /// In the order of their handles; the end frees them in it.
    buffers: BTreeMap<u64, Buffer>,
    /// Of all buffers, also of those being made or freed.
    count: usize,
    bytes: u64,
    huge_fallbacks: u64,
    frees_unfinished: u64,
}

impl Managed {
    fn reserve(&self, len_bytes: u64) -> Result<()> {
        let mut table = self.table.lock();
        if table.count == MAX_MANAGED_BUFFERS {
            return Err(err!(
                Limit,
                "{MAX_MANAGED_BUFFERS} managed buffers exist (MAX_MANAGED_BUFFERS): allocate fewer and larger ones, or free some"
            ));
        }
        let sum = table.bytes.checked_add(len_bytes).filter(|sum| *sum <= MAX_MANAGED_BYTES);
        table.bytes = sum.ok_or_else(|| {
            err!(
                Limit,
                "{len_bytes} bytes of managed memory with {} in use: the limit is {MAX_MANAGED_BYTES} (MAX_MANAGED_BYTES)",
                table.bytes
            )
        })?;
        table.count += 1;
        Ok(())
    }

    fn give_back(&self, len_bytes: u64) {
        let mut table = self.table.lock();
        table.count -= 1;
        table.bytes -= len_bytes;
    }

    /// For `stats`.
    pub fn stats(&self) -> Value {
        let table = self.table.lock();
        let of = |kind| table.buffers.values().filter(|buffer| buffer.pages.kind() == kind).count();
        json!({
            "buffers": table.count,
            "bytes": table.bytes,
            "mapped_bytes": table.buffers.values().map(|buffer| buffer.pages.mapped_bytes()).sum::<u64>(),
            "on_reserved_huge_pages": of(PageKind::Reserved),
            "on_transparent_huge_pages": of(PageKind::Transparent),
            "huge_page_fallbacks": table.huge_fallbacks,
            "frees_unfinished": table.frees_unfinished,
        })
    }
}

impl Driver {
    /// Allocates zeroed, page-aligned host memory of `memory.len_bytes` and registers it as `memory.access` says; `memory.addr`
    /// must be 0 and becomes its address. The answer is the region's handle. Takes as long as zeroing the memory takes.
    pub fn alloc_managed(&self, memory: &mut Memory) -> Result<u64> {
        let shared = &self.shared;
        shared.usable()?;
        if memory.kind != MemoryKind::Dram {
            return Err(err!(
                Unsupported,
                "managed memory of kind {:?}: only host memory is managed",
                memory.kind
            ));
        }
        if memory.addr != 0 || memory.len_bytes == 0 {
            return Err(err!(
                InvalidParam,
                "managed memory of {} bytes at {:#x}: the length must be at least 1, and the address 0, as the engine chooses it",
                memory.len_bytes,
                memory.addr
            ));
        }
        let len_bytes = memory.len_bytes;
        shared.managed.reserve(len_bytes)?;
        let made = Pages::alloc(len_bytes).and_then(|pages| self.register_managed(memory, pages));
        made.inspect_err(|_| shared.managed.give_back(len_bytes))
    }

    fn register_managed(&self, memory: &mut Memory, pages: Pages) -> Result<u64> {
        let placed = Memory { addr: pages.addr(), ..*memory };
        match self.register_with(&placed, Some(pages.file())) {
            Ok(mr) => {
                let handle = mr.region.handle.0;
                let mut table = self.shared.managed.table.lock();
                table.huge_fallbacks += u64::from(pages.wanted_huge() && pages.kind() == PageKind::Small);
                table.buffers.insert(handle, Buffer { mr, pages });
                drop(table);
                *memory = placed;
                Ok(handle)
            }
            Err(e) => {
                // SAFETY: no fabric has it, and nobody else knows it yet.
                unsafe { pages.free() };
                Err(e)
            }
        }
    }

    /// Withdraws a managed buffer like [`Driver::deregister`] and unmaps it. With an error it stays mapped, since something may still
    /// touch it, and the call can be repeated; the engine's end tries once more.
    pub fn free_managed(&self, handle: u64) -> Result<()> {
        let shared = &self.shared;
        let taken = shared.managed.table.lock().buffers.remove(&handle);
        let Some(buffer) = taken else {
            return Err(match shared.own_region(handle) {
                Ok(mr) if !mr.managed => err!(
                    InvalidParam,
                    "region {handle:#x} is registered memory of the host's own: use deregister"
                ),
                _ => err!(NotFound, "managed buffer {handle:#x} does not exist (any more)"),
            });
        };
        shared.regions.write().remove(&handle);
        let outcome =
            self.withdraw(&buffer.mr).and_then(|()| match buffer.mr.wait_unpinned(Instant::now()) {
                true => Ok(()),
                false => Err(err!(
                    Busy,
                    "transfers that use managed buffer {handle:#x} have not ended; free it again"
                )),
            });
        shared.unmap_or_keep(handle, buffer, outcome)
    }
}

impl Shared {
    fn unmap_or_keep(&self, handle: u64, buffer: Buffer, withdrawn: Result<()>) -> Result<()> {
        let len_bytes = buffer.mr.region.memory.len_bytes;
        match &withdrawn {
            Ok(()) => {
                self.managed.give_back(len_bytes);
                // SAFETY: every fabric has let go of the region, no transfer holds it, and the host gave it up.
                unsafe { buffer.pages.free() };
            }
            Err(e) => {
                tracing::error!("managed buffer {handle:#x} of {len_bytes} bytes stays mapped: {e}");
                let mut table = self.managed.table.lock();
                table.frees_unfinished += 1;
                table.buffers.insert(handle, buffer);
            }
        }
        withdrawn
    }

    /// Frees what the host has left, after the engine's threads have ended and its sessions with them.
    pub(crate) fn free_all_managed(&self) {
        let left = std::mem::take(&mut self.managed.table.lock().buffers);
        if !left.is_empty() {
            tracing::debug!("{} managed buffers are freed with their engine", left.len());
        }
        let deadline = Instant::now() + crate::register::DEREGISTER_LIMIT;
        for (handle, buffer) in left {
            buffer.mr.revoke();
            let withdrawn = self.take_from_fabrics(&buffer.mr, deadline).and_then(|()| {
                match buffer.mr.wait_unpinned(deadline) {
                    true => Ok(()),
                    false => Err(err!(Busy, "transfers that use it have not ended with the engine")),
                }
            });
            // What may still be touched is told and stays.
            let _ = self.unmap_or_keep(handle, buffer, withdrawn);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn only_so_many_buffers_and_bytes_exist_and_what_is_given_back_makes_room() {
        let managed = Managed::default();
        (0..MAX_MANAGED_BUFFERS).for_each(|_| managed.reserve(1).expect("room"));
        let error = managed.reserve(1).expect_err("one too many");
        assert!(error.code == Code::Limit && error.text.contains("MAX_MANAGED_BUFFERS"), "{error}");
        managed.give_back(1);
        let left = MAX_MANAGED_BYTES - (MAX_MANAGED_BUFFERS as u64 - 1);
        let error = managed.reserve(left + 1).expect_err("a byte too many");
        assert!(error.code == Code::Limit && error.text.contains("MAX_MANAGED_BYTES"), "{error}");
        managed.reserve(left).expect("exactly what is left");
        assert_eq!(managed.stats()["bytes"].as_u64(), Some(MAX_MANAGED_BYTES));
        assert_eq!(managed.stats()["buffers"].as_u64(), Some(MAX_MANAGED_BUFFERS as u64));
    }
}
