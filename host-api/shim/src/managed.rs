//! Memory that the engine allocates.

use std::sync::Arc;

use baton_abi::{BATON_MEM_DRAM, BatonDesc, BatonMemory};

use crate::engine::Engine;
use crate::error::Error;
use crate::inner::Inner;
use crate::log::Level;
use crate::region::Access;

/// Registered memory of the engine's own, page-aligned and at first zero. Dropping it withdraws and unmaps it.
///
/// It is only handed out as an address: transfers and peers may change it at any time, so what reads or writes it through a
/// pointer must not do so while a transfer does.
#[derive(Debug)]
pub struct ManagedBuffer {
    inner: Arc<Inner>,
    handle: u64,
    addr: u64,
    len_bytes: u64,
}

impl ManagedBuffer {
    /// A piece of it for the local side of a transfer.
    ///
    /// # Panics
    /// If the piece is not inside the buffer.
    pub fn desc(&self, offset: u64, len_bytes: u64) -> BatonDesc {
        let end = offset.checked_add(len_bytes);
        assert!(
            end.is_some_and(|end| end <= self.len_bytes),
            "{len_bytes} bytes at {offset} are not inside a managed buffer of {} bytes",
            self.len_bytes
        );
        BatonDesc { addr: self.addr + offset, len_bytes, region: self.handle, reserved: 0 }
    }

    /// Its first byte; valid until the buffer is freed.
    pub fn as_ptr(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.addr as usize)
    }

    /// Its address.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// Its length as asked for.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// The engine's own handle of its region.
    pub fn handle(&self) -> u64 {
        self.handle
    }

    /// Bytes with which a peer can import it.
    pub fn export(&self) -> Result<Vec<u8>, Error> {
        self.inner.export(self.handle)
    }

    /// Frees it and tells whether that went well; otherwise it is still mapped, and this can be tried again.
    pub fn free(self) -> Result<(), (ManagedBuffer, Error)> {
        match self.inner.free_managed(self.handle) {
            Ok(()) => {
                let this = std::mem::ManuallyDrop::new(self);
                // SAFETY: read out once, and `this` is never dropped.
                drop(unsafe { std::ptr::read(&this.inner) });
                Ok(())
            }
            Err(error) => Err((self, error)),
        }
    }
}

impl Drop for ManagedBuffer {
    fn drop(&mut self) {
        if let Err(error) = self.inner.free_managed(self.handle) {
            let text = format!("managed buffer {} stays mapped: {error}", self.handle);
            self.inner.log(Level::Error, "baton_host::managed", &text);
        }
    }
}

impl Engine {
    /// Allocates and registers memory of the engine's own: on huge pages where there are any, and mapped by peers on this host
    /// instead of copied through the kernel. Takes as long as zeroing it takes.
    pub fn alloc_managed(&self, len_bytes: usize, access: Access) -> Result<ManagedBuffer, Error> {
        let mut memory = BatonMemory {
            addr: 0,
            len_bytes: len_bytes as u64,
            device: 0,
            kind: BATON_MEM_DRAM,
            access: access.flags(),
        };
        let handle = self.alloc_managed_raw(&mut memory)?;
        let BatonMemory { addr, len_bytes, .. } = memory;
        Ok(ManagedBuffer { inner: Arc::clone(self.inner()), handle, addr, len_bytes })
    }

    /// As [`Engine::alloc_managed`], for hosts that keep handles themselves; undone by [`Engine::free_managed_raw`].
    /// `memory.addr` must be 0 and becomes the address.
    pub fn alloc_managed_raw(&self, memory: &mut BatonMemory) -> Result<u64, Error> {
        let inner = self.inner();
        let mut handle = 0;
        // SAFETY: the engine lives, both pointers are valid for the call.
        let code = unsafe { (inner.table().alloc_managed)(inner.raw(), memory, &mut handle) };
        inner.check(code).map(|_| handle)
    }

    /// Frees what [`Engine::alloc_managed_raw`] made. The caller has no pointer into it in use any more.
    pub fn free_managed_raw(&self, region: u64) -> Result<(), Error> {
        self.inner().free_managed(region)
    }
}

impl Inner {
    fn free_managed(&self, region: u64) -> Result<(), Error> {
        // SAFETY: the engine lives.
        let code = unsafe { (self.table().free_managed)(self.raw(), region) };
        self.check(code).map(drop)
    }
}
