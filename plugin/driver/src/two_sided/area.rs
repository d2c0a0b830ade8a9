//! Registered memory of the engine's own.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baton_fabric::{Fabric, FabricError, Keys, Memory, MemoryKind, RegionKeys};

use crate::memory::Pages;

const TAKE_BACK_WAIT: Duration = Duration::from_secs(1);

/// Zeroed pages, registered with one fabric until they are dropped. Bytes are copied in and out; who may do so when is the
/// channel's business: a slot belongs to the fabric from its post to its completion, and to nobody else.
pub struct Area {
    pages: ManuallyDrop<Pages>,
    len_bytes: usize,
    keys: Keys,
    region: RegionKeys,
    fabric: Arc<dyn Fabric>,
}

impl Area {
    /// Allocates and registers; `remote_write`: a peer writes into it (the credit page).
    pub fn new(fabric: &Arc<dyn Fabric>, len_bytes: usize, remote_write: bool) -> Result<Area, FabricError> {
        Area::of(Pages::new(len_bytes.next_multiple_of(4096))?, len_bytes, fabric, remote_write)
    }

    /// As [`Area::new`], for bytes few of which are ever used.
    pub fn sparse(fabric: &Arc<dyn Fabric>, len_bytes: usize) -> Result<Area, FabricError> {
        let pages = Pages::new(len_bytes.next_multiple_of(4096))?;
        pages.keep_small();
        Area::of(pages, len_bytes, fabric, false)
    }

    fn of(
        pages: Pages,
        len_bytes: usize,
        fabric: &Arc<dyn Fabric>,
        remote_write: bool,
    ) -> Result<Area, FabricError> {
        let len_bytes = len_bytes.next_multiple_of(4096);
        let keys = fabric.register(&Memory {
            addr: pages.addr(),
            len_bytes: len_bytes as u64,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: false,
            remote_write,
            ordered: remote_write,
            mapped: true,
        })?;
        let region = fabric.region_keys(keys);
        Ok(Area { pages: ManuallyDrop::new(pages), len_bytes, keys, region, fabric: Arc::clone(fabric) })
    }

    /// Bytes of it.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Address of a byte.
    pub fn addr(&self, at: usize) -> u64 {
        self.pages.addr() + at as u64
    }

    /// Key for own work requests on that rail.
    pub fn local_key(&self, rail: u8, at: usize, len: usize) -> Result<u64, FabricError> {
        let key = self.region.local_key(rail, at as u64, len as u64);
        key.ok_or_else(|| {
            FabricError::Limit(format!("no key for {len} bytes at {at} of a bounce area on rail {rail}"))
        })
    }

    /// Key for the peer's work requests to an endpoint on that rail.
    pub fn remote_key(&self, rail: u8) -> Result<u64, FabricError> {
        let key = self.region.remote_key(rail, 0, self.len_bytes as u64);
        key.ok_or_else(|| FabricError::Limit(format!("no key of a credit page on rail {rail}")))
    }

    fn at(&self, at: usize, len: usize) -> *mut u8 {
        assert!(
            at <= self.len_bytes && len <= self.len_bytes - at,
            "{len} bytes at {at} of {}",
            self.len_bytes
        );
        std::ptr::with_exposed_provenance_mut(self.pages.addr() as usize + at)
    }

    /// Copies bytes in.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: in bounds (checked by `at`); the range is no RECV and no SEND in flight, so neither fabric nor peer uses it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(at, bytes.len()), bytes.len()) }
    }

    /// Copies bytes out.
    pub fn read(&self, at: usize, out: &mut [u8]) {
        // SAFETY: in bounds (checked by `at`); the RECV has completed, so nobody writes to the range.
        unsafe { std::ptr::copy_nonoverlapping(self.at(at, out.len()), out.as_mut_ptr(), out.len()) }
    }

    /// Copies from the host's memory; `false`: it cannot be read.
    ///
    /// # Safety
    /// `from` is memory of the host for `len` bytes, as far as the host kept its word.
    #[must_use]
    pub unsafe fn write_from(&self, at: usize, from: u64, len: usize) -> bool {
        let to = self.at(at, len).expose_provenance() as u64;
        // SAFETY: the source by contract, the target as in `write`; an area overlaps no memory of the host.
        unsafe { crate::host_copy::copy(from, to, len as u64) }.is_ok()
    }

    /// Copies to the host's memory; `false`: it cannot be written.
    ///
    /// # Safety
    /// `to` is memory of the host for `len` bytes, as far as the host kept its word, and nothing else uses it.
    #[must_use]
    pub unsafe fn read_to(&self, at: usize, to: u64, len: usize) -> bool {
        let from = self.at(at, len).expose_provenance() as u64;
        // SAFETY: the target by contract, the source as in `read`; an area overlaps no memory of the host.
        unsafe { crate::host_copy::copy(from, to, len as u64) }.is_ok()
    }

    /// The bytes, while nobody writes to them.
    pub fn bytes(&self, at: usize, len: usize) -> &[u8] {
        // SAFETY: in bounds (checked by `at`); callers look at slots whose RECV has completed or whose SEND is being posted, which
        // nobody writes to as long as they look.
        unsafe { std::slice::from_raw_parts(self.at(at, len), len) }
    }

    /// A word that the peer may write at any time.
    pub fn load(&self, word: usize) -> u64 {
        // SAFETY: in bounds (checked by `at`), aligned since pages are; all access to the credit page is by such words.
        let word = unsafe { AtomicU64::from_ptr(self.at(word * 8, 8).cast()) };
        word.load(Ordering::Acquire)
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        match self.fabric.deregister(self.keys, Instant::now() + TAKE_BACK_WAIT) {
            // SAFETY: dropped once, here, and not used afterwards.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.pages) },
            // Whoever still uses it must find memory there.
            Err(e) => tracing::error!("{} bytes of bounce memory stay allocated: {e}", self.len_bytes),
        }
    }
}
