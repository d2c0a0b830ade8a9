//! Registered memory: keys, checks, and the guards that make `deregister` wait for running copies.
//!
//! The table is one lazily backed anonymous mapping that never moves, so a peer on this host can read it with
//! `process_vm_readv`: slot 0 is the header with the random instance of the table, slot `i` is the region of index `i`.
//!
//! ```text
//! free ──register──▶ live ──revoke──▶ revoked ──deregister (no guards left)──▶ free, next generation
//!                    key = k          key = 0                                  key = 0
//! ```
//!
//! A guard counts itself in (`users`) *before* it looks at the key, revoking clears the key *before* it looks at `users`,
//! both sequentially consistent: either the guard sees the key gone or the deregistration sees the guard.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use baton_fabric::{FabricError, Keys, Memory, MemoryKind, WcStatus};
use parking_lot::{Condvar, Mutex};

/// Regions registered at once, at most.
pub(crate) const MAX_REGIONS: usize = 1 << 20;
/// Bytes of a slot; the address of the stamp of region `i` is the table's plus `i` times this.
pub(crate) const SLOT_BYTES: usize = 64;
/// Tells a table from any other memory.
pub(crate) const TABLE_MAGIC: u64 = u64::from_le_bytes(*b"BATONRGN");

/// Peers may read.
pub(crate) const FLAG_REMOTE_READ: u64 = 1;
/// Peers may write.
pub(crate) const FLAG_REMOTE_WRITE: u64 = 2;
/// The memory is a sealed file, from its first byte on; the upper half of the flags is its descriptor.
pub(crate) const FLAG_SHARED: u64 = 4;
const FILE_SHIFT: u32 = 32;

/// Slot of the table. The first four words are the stamp that peers read.
#[repr(C, align(64))]
struct Slot {
    /// The live key, 0 if there is none.
    key: AtomicU64,
    base: AtomicU64,
    len: AtomicU64,
    flags: AtomicU64,
    /// Key of the registration until it is deregistered, also while it is revoked.
    owner: AtomicU64,
    /// Guards alive, and attempts under way.
    users: AtomicU32,
    /// Deregistrations that wait for `users` to become 0.
    waiting: AtomicU32,
    /// Used for this slot's next key.
    generation: AtomicU32,
    /// 1 for memory that is certainly mapped; of no concern to peers.
    mapped: AtomicU32,
    _pad: [u32; 2],
}

const _: () = assert!(size_of::<Slot>() == SLOT_BYTES);

/// Stamp of one region as a peer reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub key: u64,
    pub base: u64,
    pub len: u64,
    pub flags: u64,
}

impl Stamp {
    /// The owner's descriptor of the file that holds a shared region.
    pub fn file(&self) -> Option<i32> {
        let number = i32::try_from(self.flags >> FILE_SHIFT).ok();
        number.filter(|_| self.flags & FLAG_SHARED != 0)
    }

    /// Whether an access of a peer is inside and permitted.
    pub fn permits(&self, addr: u64, len: u64, write: bool) -> bool {
        let flag = if write { FLAG_REMOTE_WRITE } else { FLAG_REMOTE_READ };
        self.flags & flag != 0 && inside(self.base, self.len, addr, len)
    }
}

/// First words of a table as a peer reads them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    pub magic: u64,
    pub instance: [u8; 16],
}

/// Index of a key's region: key = index 24 · generation 16 · random 24.
pub(crate) fn index_of(key: u64) -> usize {
    (key >> 40) as usize
}

fn inside(base: u64, region_len: u64, addr: u64, len: u64) -> bool {
    addr >= base && len <= region_len && addr - base <= region_len - len
}

struct Free {
    /// Slots used before, the longest unused one first.
    slots: VecDeque<u32>,
    /// First slot never used.
    next: u32,
}

/// The registrations of one fabric.
pub(crate) struct Regions {
    table: NonNull<Slot>,
    instance: [u8; 16],
    free: Mutex<Free>,
    quiet: Mutex<()>,
    quiet_changed: Condvar,
}

// SAFETY: the table is shared memory of atomics (the header is written once, before the value is shared) that lives
// as long as the value.
unsafe impl Send for Regions {}
// SAFETY: as above.
unsafe impl Sync for Regions {}

/// Permission to touch part of a region for as long as it lives; `deregister` waits for it, so hold it for one
/// system call or slice, never across a wait.
pub(crate) struct Guard<'a> {
    regions: &'a Regions,
    slot: &'a Slot,
}

impl Regions {
    /// An empty table with a random instance.
    pub fn new() -> Result<Regions, FabricError> {
        let mut instance = [0u8; 16];
        random(&mut instance)?;
        let len = MAX_REGIONS * SLOT_BYTES;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice.
        let raw = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        if raw == libc::MAP_FAILED {
            let error = std::io::Error::last_os_error();
            return Err(FabricError::System(format!("mmap of {len} bytes for the region table: {error}")));
        }
        // SAFETY: the range was mapped just above; a refusal of the advice is harmless.
        unsafe { libc::madvise(raw, len, libc::MADV_DONTDUMP) };
        // SAFETY: the mapping is page aligned, at least as large as a Header, and nobody else knows it yet.
        unsafe { raw.cast::<Header>().write(Header { magic: TABLE_MAGIC, instance }) };
        Ok(Regions {
            table: NonNull::new(raw.cast()).expect("mmap never returns null"),
            instance,
            free: Mutex::new(Free { slots: VecDeque::new(), next: 1 }),
            quiet: Mutex::new(()),
            quiet_changed: Condvar::new(),
        })
    }

    /// The random instance in the header.
    pub fn instance(&self) -> [u8; 16] {
        self.instance
    }

    /// Address of the header.
    pub fn table_addr(&self) -> u64 {
        self.table.as_ptr() as u64
    }

    fn slot(&self, index: usize) -> Option<&Slot> {
        if index == 0 || index >= MAX_REGIONS {
            return None;
        }
        // SAFETY: inside the mapping, which lives as long as `self`; zero bytes are a valid Slot.
        Some(unsafe { &*self.table.as_ptr().add(index) })
    }

    /// Registers host memory.
    pub fn register(&self, memory: &Memory) -> Result<Keys, FabricError> {
        self.register_with(memory, None)
    }

    /// With a descriptor: that of the sealed file which the memory is, from its first byte on.
    pub fn register_with(&self, memory: &Memory, file: Option<RawFd>) -> Result<Keys, FabricError> {
        if memory.kind != MemoryKind::Dram {
            return Err(FabricError::Unsupported(
                "the software fabric registers host memory only, not the memory of an accelerator".into(),
            ));
        }
        if memory.len_bytes == 0 || memory.addr.checked_add(memory.len_bytes).is_none() {
            return Err(FabricError::Invalid(format!(
                "memory of {} bytes at {:#x}: the length must be at least 1 and the end must not overflow",
                memory.len_bytes, memory.addr
            )));
        }
        let mut noise = [0u8; 4];
        random(&mut noise)?;
        let index = self.take_index()?;
        let slot = self.slot(index as usize).expect("indices handed out are inside the table");
        let generation = slot.generation.fetch_add(1, Ordering::Relaxed).wrapping_add(1) & 0xffff;
        let random = u64::from(u32::from_le_bytes(noise) | 1) & 0xff_ffff;
        let key = u64::from(index) << 40 | u64::from(generation) << 24 | random;
        let flags = if memory.remote_read { FLAG_REMOTE_READ } else { 0 }
            | if memory.remote_write { FLAG_REMOTE_WRITE } else { 0 }
            | file.map_or(0, |fd| FLAG_SHARED | u64::from(fd.unsigned_abs()) << FILE_SHIFT);
        slot.base.store(memory.addr, Ordering::Relaxed);
        slot.len.store(memory.len_bytes, Ordering::Relaxed);
        slot.flags.store(flags, Ordering::Relaxed);
        slot.mapped.store(memory.mapped.into(), Ordering::Relaxed);
        slot.owner.store(key, Ordering::Relaxed);
        slot.key.store(key, Ordering::SeqCst);
        Ok(Keys { local: key, remote: key })
    }

    fn take_index(&self) -> Result<u32, FabricError> {
        let mut free = self.free.lock();
        // Fresh slots first: the longer a slot rests, the longer its old keys stay recognisably old.
        if (free.next as usize) < MAX_REGIONS {
            free.next += 1;
            return Ok(free.next - 1);
        }
        free.slots.pop_front().ok_or_else(|| {
            FabricError::Limit(format!(
                "{} regions are registered, the most one fabric holds",
                MAX_REGIONS - 1
            ))
        })
    }

    /// Whether a registration is of a shared file.
    pub fn is_shared(&self, keys: Keys) -> bool {
        self.slot(index_of(keys.local)).is_some_and(|slot| {
            let flags = slot.flags.load(Ordering::Relaxed);
            slot.owner.load(Ordering::SeqCst) == keys.local && flags & FLAG_SHARED != 0
        })
    }

    /// From now on no guard on the region is given out; never blocks.
    pub fn revoke(&self, keys: Keys) {
        if let Some(slot) = self.slot(index_of(keys.local)) {
            let _ = slot.key.compare_exchange(keys.local, 0, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    /// Revokes and waits until the last guard is gone.
    pub fn deregister(&self, keys: Keys, deadline: Instant) -> Result<(), FabricError> {
        let unknown = || FabricError::NotFound(format!("no region has the key {:#x}", keys.local));
        let slot = self.slot(index_of(keys.local)).ok_or_else(unknown)?;
        if keys.local == 0 || slot.owner.load(Ordering::SeqCst) != keys.local {
            return Err(unknown());
        }
        self.revoke(keys);
        if slot.users.load(Ordering::SeqCst) != 0 {
            slot.waiting.fetch_add(1, Ordering::SeqCst);
            let mut lock = self.quiet.lock();
            while slot.users.load(Ordering::SeqCst) != 0 {
                if self.quiet_changed.wait_until(&mut lock, deadline).timed_out() {
                    break;
                }
            }
            slot.waiting.fetch_sub(1, Ordering::SeqCst);
            let users = slot.users.load(Ordering::SeqCst);
            if users != 0 {
                return Err(FabricError::Timeout(format!(
                    "{users} copies still touch the region with the key {:#x}; call again",
                    keys.local
                )));
            }
        }
        // Of several callers one frees.
        if slot.owner.compare_exchange(keys.local, 0, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return Err(unknown());
        }
        self.free.lock().slots.push_back(index_of(keys.local) as u32);
        Ok(())
    }

    /// Access by a work request or RECV of this side.
    pub fn access_local(&self, key: u64, addr: u64, len: u64, _write: bool) -> Result<Guard<'_>, WcStatus> {
        let guard = self.enter(key).ok_or(WcStatus::LocalAccess)?;
        if guard.covers(addr, len) { Ok(guard) } else { Err(WcStatus::LocalAccess) }
    }

    /// Access on behalf of a peer.
    pub fn access_remote(&self, key: u64, addr: u64, len: u64, write: bool) -> Result<Guard<'_>, WcStatus> {
        let guard = self.enter(key).ok_or(WcStatus::RemoteAccess)?;
        if guard.permits(addr, len, write) { Ok(guard) } else { Err(WcStatus::RemoteAccess) }
    }

    fn enter(&self, key: u64) -> Option<Guard<'_>> {
        let slot = self.slot(index_of(key))?;
        // Looked at before counting in as well: attempts on a revoked key must not keep `deregister` waiting.
        if key == 0 || slot.key.load(Ordering::Relaxed) != key {
            return None;
        }
        slot.users.fetch_add(1, Ordering::SeqCst);
        let guard = Guard { regions: self, slot };
        (slot.key.load(Ordering::SeqCst) == key).then_some(guard)
    }
}

impl Guard<'_> {
    /// Whether the bytes are inside the region.
    pub fn covers(&self, addr: u64, len: u64) -> bool {
        let base = self.slot.base.load(Ordering::Relaxed);
        inside(base, self.slot.len.load(Ordering::Relaxed), addr, len)
    }

    /// Whether the memory is a sealed file, which its owner cannot lose under a copy.
    pub fn is_shared(&self) -> bool {
        self.slot.flags.load(Ordering::Relaxed) & FLAG_SHARED != 0
    }

    /// Whether the memory is the engine's own ([`Memory::mapped`]): a plain store cannot fault as long as this guard lives.
    pub fn is_mapped(&self) -> bool {
        self.slot.mapped.load(Ordering::Relaxed) != 0
    }

    /// Whether a peer may touch these bytes.
    pub fn permits(&self, addr: u64, len: u64, write: bool) -> bool {
        let flag = if write { FLAG_REMOTE_WRITE } else { FLAG_REMOTE_READ };
        self.slot.flags.load(Ordering::Relaxed) & flag != 0 && self.covers(addr, len)
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if self.slot.users.fetch_sub(1, Ordering::SeqCst) == 1
            && self.slot.waiting.load(Ordering::SeqCst) != 0
        {
            // Taking the lock orders this after the waiter's look at `users`, so the wake-up cannot fall in between.
            drop(self.regions.quiet.lock());
            self.regions.quiet_changed.notify_all();
        }
    }
}

impl Drop for Regions {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and no guard can outlive `self`.
        unsafe { libc::munmap(self.table.as_ptr().cast(), MAX_REGIONS * SLOT_BYTES) };
    }
}

fn random(out: &mut [u8]) -> Result<(), FabricError> {
    getrandom::fill(out).map_err(|error| FabricError::System(format!("no random bytes: {error}")))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn memory(addr: u64, len_bytes: u64) -> Memory {
        Memory {
            addr,
            len_bytes,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: true,
            remote_write: false,
            ordered: false,
            mapped: false,
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(10)
    }

    #[test]
    fn bounds_and_permissions_are_checked_to_the_byte() {
        let regions = Regions::new().unwrap();
        let key = regions.register(&memory(1000, 100)).unwrap().remote;
        assert!(regions.access_remote(key, 1000, 100, false).is_ok());
        assert!(regions.access_remote(key, 1099, 1, false).is_ok());
        for (addr, len) in [(999, 1), (1000, 101), (1099, 2), (1100, 1), (1050, u64::MAX), (u64::MAX, 2)] {
            assert_eq!(regions.access_remote(key, addr, len, false).err(), Some(WcStatus::RemoteAccess));
            assert_eq!(regions.access_local(key, addr, len, false).err(), Some(WcStatus::LocalAccess));
        }
        assert_eq!(regions.access_remote(key, 1000, 1, true).err(), Some(WcStatus::RemoteAccess));
        assert!(regions.access_local(key, 1000, 1, true).is_ok());
        for wrong in [0, 1, key ^ 1, key ^ 1 << 30, key ^ 1 << 41, u64::MAX] {
            assert_eq!(regions.access_remote(wrong, 1000, 1, false).err(), Some(WcStatus::RemoteAccess));
        }
    }

    #[test]
    fn bad_memory_is_refused() {
        let regions = Regions::new().unwrap();
        assert!(matches!(regions.register(&memory(1, 0)), Err(FabricError::Invalid(_))));
        assert!(matches!(regions.register(&memory(u64::MAX, 2)), Err(FabricError::Invalid(_))));
        let vram = Memory { kind: MemoryKind::Vram, ..memory(1, 1) };
        assert!(matches!(regions.register(&vram), Err(FabricError::Unsupported(_))));
    }

    #[test]
    fn a_revoked_region_gives_no_guards_and_is_deregistered_once() {
        let regions = Regions::new().unwrap();
        let keys = regions.register(&memory(1000, 100)).unwrap();
        regions.revoke(keys);
        assert!(regions.access_local(keys.local, 1000, 1, false).is_err());
        regions.deregister(keys, soon()).unwrap();
        assert!(matches!(regions.deregister(keys, soon()), Err(FabricError::NotFound(_))));
        assert_ne!(regions.register(&memory(1000, 100)).unwrap(), keys);
    }

    #[test]
    fn deregister_waits_for_the_guard_and_can_be_repeated() {
        let regions = Regions::new().unwrap();
        let keys = regions.register(&memory(1000, 100)).unwrap();
        let guard = regions.access_remote(keys.remote, 1000, 1, false).unwrap();
        assert!(matches!(regions.deregister(keys, Instant::now()), Err(FabricError::Timeout(_))));
        assert!(regions.access_remote(keys.remote, 1000, 1, false).is_err());
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| regions.deregister(keys, soon()));
            while regions.slot(index_of(keys.local)).unwrap().waiting.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            drop(guard);
            waiter.join().unwrap().unwrap();
        });
    }

    #[test]
    fn the_stamp_follows_the_registration() {
        let regions = Regions::new().unwrap();
        // SAFETY: the first slot of the table is a header, as `new` wrote it.
        let header = unsafe { *(regions.table_addr() as *const Header) };
        assert_eq!(header, Header { magic: TABLE_MAGIC, instance: regions.instance() });
        let keys = regions.register(&memory(1000, 100)).unwrap();
        let at = regions.table_addr() as usize + index_of(keys.local) * SLOT_BYTES;
        // SAFETY: a slot begins with the four words of a Stamp and nobody changes it meanwhile.
        let stamp = unsafe { *(at as *const Stamp) };
        assert_eq!(stamp, Stamp { key: keys.remote, base: 1000, len: 100, flags: FLAG_REMOTE_READ });
        assert!(stamp.permits(1000, 100, false) && !stamp.permits(1000, 100, true));
        regions.revoke(keys);
        // SAFETY: as above.
        assert_eq!(unsafe { *(at as *const Stamp) }.key, 0);
    }

    #[test]
    fn guards_and_deregistrations_of_many_threads_never_overlap() {
        let regions = Regions::new().unwrap();
        let current = AtomicU64::new(0);
        let dead = Mutex::new(std::collections::HashSet::new());
        let stop = std::sync::atomic::AtomicBool::new(false);
        let deadline = soon() + Duration::from_secs(50);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) && Instant::now() < deadline {
                        let key = current.load(Ordering::SeqCst);
                        if let Ok(guard) = regions.access_local(key, 1000, 1, true) {
                            assert!(!dead.lock().contains(&key), "a guard on a deregistered region");
                            drop(guard);
                        }
                    }
                });
            }
            for _ in 0..2000 {
                let keys = regions.register(&memory(1000, 100)).unwrap();
                current.store(keys.local, Ordering::SeqCst);
                std::thread::yield_now();
                regions.deregister(keys, soon()).unwrap();
                dead.lock().insert(keys.local);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
