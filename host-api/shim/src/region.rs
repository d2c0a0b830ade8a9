//! Registered memory, here and at a peer, and lists of blocks in it.

use std::sync::Arc;

use baton_abi::{
    BATON_ACCESS_REMOTE_READ, BATON_ACCESS_REMOTE_WRITE, BATON_MEM_DRAM, BATON_MEM_VRAM, BatonDesc,
    BatonMemory, BatonSlice,
};

use crate::engine::Engine;
use crate::error::Error;
use crate::inner::Inner;
use crate::log::Level;

/// What peers may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Read it.
    pub remote_read: bool,
    /// Write it.
    pub remote_write: bool,
}

impl Access {
    pub(crate) fn flags(self) -> u32 {
        let read = if self.remote_read { BATON_ACCESS_REMOTE_READ } else { 0 };
        let write = if self.remote_write { BATON_ACCESS_REMOTE_WRITE } else { 0 };
        read | write
    }
}

impl Default for Access {
    fn default() -> Access {
        Access { remote_read: true, remote_write: true }
    }
}

/// What a region is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryKind {
    /// Host memory.
    #[default]
    Dram,
    /// Memory of an accelerator.
    Vram,
}

/// What to register besides address and length; the default is host memory that peers may read and write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// What it is made of.
    pub kind: MemoryKind,
    /// Index of the device as the host counts.
    pub device: u64,
    /// What peers may do.
    pub access: Access,
}

impl Memory {
    fn at(self, addr: u64, len_bytes: u64) -> BatonMemory {
        let kind = match self.kind {
            MemoryKind::Dram => BATON_MEM_DRAM,
            MemoryKind::Vram => BATON_MEM_VRAM,
        };
        BatonMemory { addr, len_bytes, device: self.device, kind, access: self.access.flags() }
    }
}

/// Registered memory. Dropping it deregisters: when that returns, no byte will land there any more.
#[derive(Debug)]
pub struct Region {
    inner: Arc<Inner>,
    handle: u64,
    addr: u64,
    len_bytes: u64,
}

impl Region {
    /// A piece of it for the local side of a transfer.
    ///
    /// # Panics
    /// If the piece is not inside the region.
    pub fn desc(&self, offset: u64, len_bytes: u64) -> BatonDesc {
        let end = offset.checked_add(len_bytes);
        assert!(
            end.is_some_and(|end| end <= self.len_bytes),
            "{len_bytes} bytes at {offset} are not inside a region of {} bytes",
            self.len_bytes
        );
        BatonDesc { addr: self.addr + offset, len_bytes, region: self.handle, reserved: 0 }
    }

    /// Its first byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// The engine's own handle.
    pub fn handle(&self) -> u64 {
        self.handle
    }

    /// Bytes with which a peer can import it.
    pub fn export(&self) -> Result<Vec<u8>, Error> {
        self.inner.export(self.handle)
    }

    /// Deregisters and tells whether that went well; otherwise the region is still there.
    pub fn deregister(self) -> Result<(), (Region, Error)> {
        match self.inner.deregister(self.handle) {
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

impl Drop for Region {
    fn drop(&mut self) {
        if let Err(error) = self.inner.deregister(self.handle) {
            let text = format!("region {} stays registered: {error}", self.handle);
            self.inner.log(Level::Error, "baton_host::region", &text);
        }
    }
}

/// A peer's region. Dropping it forgets it; prepared transfers keep what they need.
#[derive(Debug)]
pub struct RemoteRegion {
    inner: Arc<Inner>,
    handle: u64,
}

impl RemoteRegion {
    /// A piece of it, by its address at the peer, for the remote side of a transfer.
    pub fn desc(&self, addr: u64, len_bytes: u64) -> BatonDesc {
        BatonDesc { addr, len_bytes, region: self.handle, reserved: 0 }
    }

    /// The engine's own handle.
    pub fn handle(&self) -> u64 {
        self.handle
    }
}

impl Drop for RemoteRegion {
    fn drop(&mut self) {
        // Failing means that the engine has forgotten it already.
        let _ = self.inner.release_remote(self.handle);
    }
}

/// Blocks that transfers pick by index.
#[derive(Debug)]
pub struct BlockList {
    inner: Arc<Inner>,
    handle: u64,
}

impl BlockList {
    /// The engine's own handle.
    pub fn handle(&self) -> u64 {
        self.handle
    }
}

impl Drop for BlockList {
    fn drop(&mut self) {
        // SAFETY: the engine lives.
        unsafe { (self.inner.table().release_block_list)(self.inner.raw(), self.handle) };
    }
}

impl Engine {
    /// Registers memory.
    ///
    /// # Safety
    /// Until the region is dropped the memory must stay mapped; while a transfer of ours reads from or writes
    /// into it, or a peer may, nobody else may access it in a way that would be a data race.
    pub unsafe fn register(&self, addr: *mut u8, len_bytes: usize, memory: Memory) -> Result<Region, Error> {
        let (addr, len_bytes) = (addr.expose_provenance() as u64, len_bytes as u64);
        // SAFETY: the caller's promise.
        let handle = unsafe { self.register_raw(&memory.at(addr, len_bytes)) }?;
        Ok(Region { inner: Arc::clone(self.inner()), handle, addr, len_bytes })
    }

    /// As [`Engine::register`], for hosts that keep handles themselves; undone by [`Engine::deregister_raw`].
    ///
    /// # Safety
    /// As [`Engine::register`], until it is deregistered.
    pub unsafe fn register_raw(&self, memory: &BatonMemory) -> Result<u64, Error> {
        let inner = self.inner();
        let mut handle = 0;
        // SAFETY: the engine lives, both pointers are valid for the call.
        let code = unsafe { (inner.table().register)(inner.raw(), memory, &mut handle) };
        inner.check(code).map(|_| handle)
    }

    /// Withdraws a registration made by [`Engine::register_raw`].
    pub fn deregister_raw(&self, region: u64) -> Result<(), Error> {
        self.inner().deregister(region)
    }

    /// Bytes with which a peer can import a region, by its handle.
    pub fn export_raw(&self, region: u64) -> Result<Vec<u8>, Error> {
        self.inner().export(region)
    }

    /// Takes a region that a peer exported.
    pub fn import_region(&self, peer: &str, blob: &[u8]) -> Result<RemoteRegion, Error> {
        let handle = self.import_raw(peer, blob)?;
        Ok(RemoteRegion { inner: Arc::clone(self.inner()), handle })
    }

    /// As [`Engine::import_region`], for hosts that keep handles themselves; undone by
    /// [`Engine::release_remote_raw`].
    pub fn import_raw(&self, peer: &str, blob: &[u8]) -> Result<u64, Error> {
        let inner = self.inner();
        let mut handle = 0;
        let (peer, blob) = (BatonSlice::of(peer.as_bytes()), BatonSlice::of(blob));
        // SAFETY: the engine lives, the slices are borrowed for the call.
        let code = unsafe { (inner.table().import_region)(inner.raw(), peer, blob, &mut handle) };
        inner.check(code).map(|_| handle)
    }

    /// Forgets an imported region by its handle.
    pub fn release_remote_raw(&self, remote_region: u64) -> Result<(), Error> {
        self.inner().release_remote(remote_region)
    }

    /// Keeps a list of blocks: of a peer, or our own with an empty name.
    pub fn create_block_list(&self, peer: &str, blocks: &[BatonDesc]) -> Result<BlockList, Error> {
        let inner = self.inner();
        let mut handle = 0;
        let peer = BatonSlice::of(peer.as_bytes());
        // SAFETY: the engine lives, slice and blocks are borrowed for the call.
        let code = unsafe {
            (inner.table().create_block_list)(
                inner.raw(),
                peer,
                blocks.as_ptr(),
                blocks.len() as u64,
                &mut handle,
            )
        };
        inner.check(code).map(|_| BlockList { inner: Arc::clone(inner), handle })
    }
}

impl Inner {
    pub(crate) fn export(&self, region: u64) -> Result<Vec<u8>, Error> {
        self.read(|buf, cap, needed| {
            // SAFETY: the engine lives; the buffer is `cap` long.
            unsafe { (self.table().export_region)(self.raw(), region, buf, cap, needed) }
        })
    }

    fn deregister(&self, region: u64) -> Result<(), Error> {
        // SAFETY: the engine lives.
        let code = unsafe { (self.table().deregister)(self.raw(), region) };
        self.check(code).map(drop)
    }

    fn release_remote(&self, region: u64) -> Result<(), Error> {
        // SAFETY: the engine lives.
        let code = unsafe { (self.table().release_remote_region)(self.raw(), region) };
        self.check(code).map(drop)
    }
}
