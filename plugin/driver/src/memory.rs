//! Memory that the engine itself owns: the rings, the credit page and the RECV slots of one epoch.

use crate::slots::Slots;
use baton_core::LaneId;
use baton_core::peer::{CREDIT_SLOT_BYTES, CREDIT_SLOTS, RingId, SessionMemory};
use baton_fabric::{Fabric, FabricError, Keys, Memory, MemoryKind, RecvSlot};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Bytes of a record ring, per lane and for control (PROTOCOL §3).
pub const RING_BYTES: u32 = 32 * 1024;
/// Bytes of the credit page.
pub const CREDIT_PAGE_BYTES: usize = 4096;
const _: () = assert!((CREDIT_SLOTS * CREDIT_SLOT_BYTES) as usize <= CREDIT_PAGE_BYTES);
/// Longest wait for memory that nobody uses to be withdrawn again.
const TAKE_BACK_WAIT: Duration = Duration::from_secs(1);

/// Whether all of a span of this process is mapped, in whatever way.
pub(crate) fn is_mapped(addr: u64, len_bytes: u64) -> bool {
    const PAGE: u64 = 4096;
    const AT_ONCE: u64 = 1 << 30;
    let mut resident = vec![0u8; (AT_ONCE.min(len_bytes + PAGE) / PAGE + 1) as usize];
    let (mut at, end) = (addr / PAGE * PAGE, addr + len_bytes);
    while at < end {
        let step = (end - at).min(AT_ONCE);
        let start = std::ptr::with_exposed_provenance_mut::<libc::c_void>(at as usize);
        // SAFETY: it looks at page tables only, and writes one byte per page of the span into a buffer with room for them.
        if unsafe { libc::mincore(start, step as usize, resident.as_mut_ptr()) } != 0 {
            return false;
        }
        at += step;
    }
    true
}

/// Anonymous zeroed pages, unmapped on drop.
pub(crate) struct Pages {
    base: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the pages are plain memory; all access goes through atomics or through disjoint staging ranges.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    pub fn new(len_bytes: usize) -> Result<Pages, FabricError> {
        // SAFETY: a fresh private mapping that aliases nothing.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|e| FabricError::System(format!("mmap of {len_bytes} bytes for session rings: {e}")))?;
        let base =
            NonNull::new(base.cast()).ok_or_else(|| FabricError::System("mmap answered null".into()))?;
        Ok(Pages { base, len_bytes })
    }

    /// Of these pages few are ever used: the kernel makes them one by one.
    pub fn keep_small(&self) {
        // SAFETY: advice about our own mapping, which changes no byte. Where it is refused there are no huge pages.
        let _ = unsafe { madvise(self.base.as_ptr().cast(), self.len_bytes, Advice::LinuxNoHugepage) };
    }

    pub fn addr(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        &self.words(offset, 8)[0]
    }

    /// The words that hold `len_bytes` from `offset` on.
    fn words(&self, offset: usize, len_bytes: usize) -> &[AtomicU64] {
        let room = self.len_bytes.saturating_sub(offset);
        assert!(
            len_bytes <= room && offset.is_multiple_of(8) && room.is_multiple_of(8),
            "{len_bytes} bytes at {offset} of {}",
            self.len_bytes
        );
        // SAFETY: in bounds and aligned (checked above; what follows the last whole word is still in bounds, since the room is whole
        // words); the pages live as long as `self`, and every access is atomic.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast(), len_bytes.div_ceil(8)) }
    }
}

impl Pages {
    // A peer or a NIC may write at any time, so everything is copied with atomic loads before it is checked.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let words = self.words(offset, out.len());
        let (chunks, rest) = out.as_chunks_mut::<8>();
        let load = |(chunk, word): (&mut [u8; 8], &AtomicU64)| {
            *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
        };
        // Eight at a time: the compiler does not unroll a loop over atomics.
        let (rounds, last) = chunks.as_chunks_mut::<8>();
        let (round_words, last_words) = words.split_at(8 * rounds.len());
        for (round, words) in rounds.iter_mut().zip(round_words.as_chunks::<8>().0) {
            round.iter_mut().zip(words).for_each(load);
        }
        last.iter_mut().zip(last_words).for_each(load);
        if let (rest @ [_, ..], Some(word)) = (rest, words.last()) {
            rest.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes()[..rest.len()]);
        }
    }

    fn write(&self, offset: usize, bytes: &[u8]) {
        let words = self.words(offset, bytes.len());
        let chunks = bytes.chunks_exact(8);
        if let (rest @ [_, ..], Some(last)) = (chunks.remainder(), words.last()) {
            let mut word = [0u8; 8];
            word[..rest.len()].copy_from_slice(rest);
            last.store(u64::from_ne_bytes(word), Ordering::Relaxed);
        }
        for (chunk, word) in chunks.zip(words) {
            let mut bytes = [0u8; 8];
            bytes.copy_from_slice(chunk);
            word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` and nothing borrows from it any more.
        if let Err(e) = unsafe { munmap(self.base.as_ptr().cast(), self.len_bytes) } {
            tracing::warn!("munmap of session rings: {e}");
        }
    }
}

/// Rings, staging areas and credit page of one epoch, registered with the session's fabric.
///
/// ```text
/// inbound:  | credit page  | control ring | lane 0 ring | lane 1 ring | …     written by the peer
/// staging:  | credit slots | control ring | lane 0 ring | …                   read by the fabric; mirrors the peer's rings
/// ```
/// In send mode the rings of the inbound area lie idle, and what the peer sends arrives in RECV slots.
pub struct EpochMemory {
    inbound: Pages,
    staging: Pages,
    inbound_keys: Keys,
    staging_keys: Keys,
    /// Control, then the lanes.
    rings: Box<[RingKeys]>,
    /// Only in send mode, which is known once the peer has answered.
    slots: OnceLock<Slots>,
    fabric: Arc<dyn Fabric>,
}

/// Keys of one ring on the rail of its endpoint.
#[derive(Clone, Copy)]
struct RingKeys {
    /// For the peer, which writes it; the control ring's serves the credit page as well.
    inbound: u64,
    /// For own work requests that read the staging area; the control ring's serves the credit slots as well.
    staging: u64,
}

impl EpochMemory {
    /// Allocates and registers rings for endpoints on these rails: control, then the lanes.
    pub fn new(fabric: &Arc<dyn Fabric>, rails: &[u8]) -> Result<EpochMemory, FabricError> {
        let rings_bytes = RING_BYTES as usize * rails.len();
        let inbound = Pages::new(CREDIT_PAGE_BYTES + rings_bytes)?;
        let staging = Pages::new(CREDIT_PAGE_BYTES + rings_bytes)?;
        let describe = |pages: &Pages, remote_write| Memory {
            addr: pages.addr(),
            len_bytes: pages.len_bytes as u64,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: false,
            remote_write,
            ordered: true,
            mapped: true,
        };
        let inbound_keys = fabric.register(&describe(&inbound, true))?;
        let staging_keys = match fabric.register(&describe(&staging, false)) {
            Ok(keys) => keys,
            Err(e) => {
                take_back(&**fabric, inbound_keys, inbound);
                return Err(e);
            }
        };
        match ring_keys(&**fabric, rails, inbound_keys, staging_keys) {
            Ok(rings) => {
                let fabric = Arc::clone(fabric);
                let slots = OnceLock::new();
                Ok(EpochMemory { inbound, staging, inbound_keys, staging_keys, rings, slots, fabric })
            }
            Err(e) => {
                take_back(&**fabric, inbound_keys, inbound);
                take_back(&**fabric, staging_keys, staging);
                Err(e)
            }
        }
    }

    /// Address and key of the credit page, for the peer.
    pub fn credit_page(&self) -> (u64, u64) {
        (self.inbound.addr(), self.rings[0].inbound)
    }

    /// Address and key of an inbound ring, for the peer.
    pub fn ring(&self, ring: RingId) -> (u64, u64) {
        let addr = self.inbound.addr() + CREDIT_PAGE_BYTES as u64 + ring_base(ring) as u64;
        (addr, self.rings[ring_index(ring)].inbound)
    }

    /// Send mode: makes the RECV slots, for endpoints given as (rail, depth).
    pub fn make_slots(&self, endpoints: &[(u8, u32)]) -> Result<(), FabricError> {
        let slots = Slots::new(&*self.fabric, endpoints)?;
        self.slots.set(slots).map_err(|again| {
            again.take_back(&*self.fabric);
            FabricError::Invalid("the RECV slots of an epoch are made once".into())
        })
    }

    /// What the n-th RECV of an endpoint (control, then the lanes) is posted with: a slot in send mode, else nothing.
    pub fn recv(&self, endpoint: usize, n: u64) -> RecvSlot {
        self.slots.get().map_or_else(RecvSlot::default, |slots| slots.recv(endpoint, n))
    }

    /// Withdraws all registrations; the memory may be dropped after `Ok`.
    pub fn deregister(&self, deadline: Instant) -> Result<(), FabricError> {
        if let Some(slots) = self.slots.get() {
            self.fabric.deregister(slots.keys(), deadline)?;
        }
        self.fabric.deregister(self.inbound_keys, deadline)?;
        self.fabric.deregister(self.staging_keys, deadline)
    }
}

fn ring_index(ring: RingId) -> usize {
    match ring {
        RingId::Control => 0,
        RingId::Lane(LaneId(lane)) => 1 + lane as usize,
    }
}

fn ring_base(ring: RingId) -> usize {
    RING_BYTES as usize * ring_index(ring)
}

/// One key per ring: the rings must not cross a border between segments.
fn ring_keys(
    fabric: &dyn Fabric,
    rails: &[u8],
    inbound: Keys,
    staging: Keys,
) -> Result<Box<[RingKeys]>, FabricError> {
    let (inbound, staging) = (fabric.region_keys(inbound), fabric.region_keys(staging));
    let ring = u64::from(RING_BYTES);
    let mut keys = Vec::with_capacity(rails.len());
    for (index, rail) in rails.iter().enumerate() {
        let base = index as u64 * ring;
        // The credit page lies in front of the control ring and has its key; so do the slots for credit words.
        let (from, len) = match index {
            0 => (0, CREDIT_PAGE_BYTES as u64 + ring),
            _ => (CREDIT_PAGE_BYTES as u64 + base, ring),
        };
        let found = inbound.remote_key(*rail, from, len).zip(staging.local_key(*rail, from, len));
        let (inbound, staging) = found.ok_or_else(|| {
            FabricError::Limit(format!(
                "fabric {}: ring {index} of a session needs {len} bytes at offset {from} in one segment of rail {rail}; \
                 its memory has {} rails and segments of {} bytes",
                fabric.name(),
                inbound.rails,
                inbound.segment_bytes
            ))
        })?;
        keys.push(RingKeys { inbound, staging });
    }
    Ok(keys.into())
}

/// Nobody has been told these keys yet. Pages whose registration stays in spite of it stay as well: a fabric may store into them.
pub(crate) fn take_back(fabric: &dyn Fabric, keys: Keys, pages: Pages) {
    if let Err(e) = fabric.deregister(keys, Instant::now() + TAKE_BACK_WAIT) {
        tracing::error!("taking back the rings of a session on fabric {}: {e}", fabric.name());
        std::mem::forget(pages);
    }
}

impl SessionMemory for EpochMemory {
    fn read_record(&self, ring: RingId, offset: u32, out: &mut [u8]) {
        self.inbound.read(CREDIT_PAGE_BYTES + ring_base(ring) + offset as usize, out);
    }

    fn stage_record(&self, ring: RingId, offset: u32, bytes: &[u8]) -> (u64, u64) {
        let base = CREDIT_PAGE_BYTES + ring_base(ring) + offset as usize;
        self.staging.write(base, bytes);
        (self.staging.addr() + base as u64, self.rings[ring_index(ring)].staging)
    }

    fn read_slot(&self, ring: RingId, slot: u32, offset: u32, out: &mut [u8]) {
        let slots = self.slots.get().expect("only a session in send mode reads slots");
        slots.read(ring_index(ring), slot, offset, out);
    }

    fn stage_credit(&self, slot: u32, words: &[u8]) -> (u64, u64) {
        assert!(slot < CREDIT_SLOTS && words.len() <= CREDIT_SLOT_BYTES as usize, "credit slot {slot}");
        let base = (slot * CREDIT_SLOT_BYTES) as usize;
        self.staging.write(base, words);
        (self.staging.addr() + base as u64, self.rings[0].staging)
    }

    fn load_credit(&self, word: usize) -> u64 {
        self.inbound.word(8 * word).load(Ordering::Acquire)
    }
}
