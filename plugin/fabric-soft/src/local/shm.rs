//! Mappings: sealed memory shared between two processes, and private memory that peers may read.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

/// A mapping for reading alone, of a file that a peer created; unmapped when dropped.
pub struct ReadMapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: only its address is given out.
unsafe impl Send for ReadMapping {}
// SAFETY: as above.
unsafe impl Sync for ReadMapping {}

impl ReadMapping {
    /// Maps the first `len` bytes; refuses a file whose pages the peer could take away.
    pub fn open(fd: BorrowedFd<'_>, len: u64) -> io::Result<ReadMapping> {
        let size = check_sealed(fd)?;
        // Whole pages, which may be huge: nothing less is unmapped.
        let page = fstat(fd)?.st_blksize.unsigned_abs().max(1);
        let whole = len.checked_next_multiple_of(page).filter(|_| (1..=size).contains(&len));
        let len = whole
            .and_then(|whole| usize::try_from(whole).ok())
            .ok_or_else(|| io::Error::other(format!("shared memory of {size} bytes, {len} are expected")))?;
        // SAFETY: a fresh mapping at an address of the kernel's choice; its size is sealed.
        let base = unsafe { mmap(std::ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, fd, 0) }?;
        Ok(ReadMapping { base: NonNull::new(base.cast()).expect("mmap never returns null"), len })
    }

    /// First byte.
    pub fn addr(&self) -> u64 {
        self.base.as_ptr() as u64
    }
}

impl Drop for ReadMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; whoever copies out of it holds it.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Size of a file whose pages nobody can take away under a mapping.
fn check_sealed(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let seals = fcntl_get_seals(fd)?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(io::Error::other(format!("shared memory with the seals {seals:?}, SHRINK is missing")));
    }
    Ok(fstat(fd)?.st_size.unsigned_abs())
}

/// With these nobody, not even the creator, can take pages away under a mapping.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Types that may lie in shared memory: only atomics, every bit pattern valid, zero to begin with.
///
/// # Safety
/// The implementor promises exactly that.
pub unsafe trait Plain {}

// SAFETY: an atomic integer.
unsafe impl Plain for AtomicU64 {}

/// A mapping that is unmapped when dropped.
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: only `Plain` references and raw addresses into the mapping are given out.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// New shared memory of `len` bytes, sealed, and the descriptor by which a peer maps it.
    pub fn create(name: &str, len: usize) -> io::Result<(OwnedFd, Mapping)> {
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, len as u64)?;
        fcntl_add_seals(&fd, SEALS)?;
        let mapping = Mapping::shared(fd.as_fd(), len)?;
        Ok((fd, mapping))
    }

    /// Maps what a peer created; refuses anything whose pages the peer could take away.
    pub fn open(fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        let size = check_sealed(fd)?;
        if size != len as u64 {
            return Err(io::Error::other(format!("shared memory of {size} bytes, expected {len}")));
        }
        Mapping::shared(fd, len)
    }

    fn shared(fd: BorrowedFd<'_>, len: usize) -> io::Result<Mapping> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice; its size is sealed.
        let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, fd, 0) }?;
        Ok(Mapping { base: NonNull::new(base.cast()).expect("mmap never returns null"), len })
    }

    /// Zeroed memory of this process alone.
    pub fn private(len: usize) -> io::Result<Mapping> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, flags) }?;
        Ok(Mapping { base: NonNull::new(base.cast()).expect("mmap never returns null"), len })
    }

    /// The value at an offset.
    pub fn at<T: Plain>(&self, offset: usize) -> &T {
        &self.slice(offset, 1)[0]
    }

    /// The values from an offset on.
    pub fn slice<T: Plain>(&self, offset: usize, count: usize) -> &[T] {
        let bytes = count.checked_mul(size_of::<T>()).and_then(|n| n.checked_add(offset));
        assert!(
            offset.is_multiple_of(align_of::<T>()) && bytes.is_some_and(|end| end <= self.len),
            "{count} values of {} bytes at {offset} in a mapping of {}",
            size_of::<T>(),
            self.len
        );
        // SAFETY: inside the mapping, which lives as long as `self`; aligned, since mappings begin at a page; `Plain`
        // makes every content a value and shared mutation sound.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset).cast(), count) }
    }

    /// Address of a byte range, checked.
    pub fn bytes(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{len} bytes at {offset}");
        // SAFETY: inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Address of an offset, for peers.
    pub fn addr(&self, offset: usize) -> u64 {
        self.bytes(offset, 0) as u64
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and every reference into it borrows `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}
