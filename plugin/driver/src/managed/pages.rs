//! Memory that the engine gives to its host: a sealed file of memory, zeroed, on huge pages where there are any.

use crate::err;
use crate::error::{Error, Result};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// With these nobody, not even this process, can take pages away under a mapping of a peer.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// Buffers shorter than this are not worth a huge page.
const HUGE_FROM_BYTES: u64 = 2 << 20;
const SMALL_PAGE_BYTES: u64 = 4096;

/// What a buffer's pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageKind {
    /// From the system's reserve of huge pages.
    Reserved,
    /// The kernel makes them huge where it can.
    Transparent,
    /// Ordinary ones.
    Small,
}

/// A mapping that is *not* unmapped on drop: a peer or a device might still touch it. See [`Pages::free`].
pub(crate) struct Pages {
    base: NonNull<c_void>,
    mapped_bytes: u64,
    file: OwnedFd,
    kind: PageKind,
}

// SAFETY: an address that only the host and the fabrics look through.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// At least `len_bytes` zeroed bytes, every page of them there already: what is missing shows here and not as a crash later.
    pub fn alloc(len_bytes: u64) -> Result<Pages> {
        if len_bytes >= HUGE_FROM_BYTES {
            match Pages::reserved(len_bytes) {
                Ok(Some(pages)) => return Ok(pages),
                Ok(None) => {}
                Err(e) => {
                    tracing::debug!("managed memory of {len_bytes} bytes is not on reserved huge pages: {e}")
                }
            }
        }
        check_available(len_bytes)?;
        let system = |what: &'static str| move |e: Errno| failed(what, len_bytes, e);
        let mapped_bytes = round_up(len_bytes, SMALL_PAGE_BYTES)
            .ok_or_else(|| failed("rounding up to pages", len_bytes, Errno::OVERFLOW))?;
        let file = new_file(MemfdFlags::empty()).map_err(system("memfd_create"))?;
        seal(&file, mapped_bytes).map_err(system("sealing a file"))?;
        let transparent = len_bytes >= HUGE_FROM_BYTES && shared_memory_may_be_huge();
        let kind = if transparent { PageKind::Transparent } else { PageKind::Small };
        Pages::map(file, mapped_bytes, kind).map_err(system("mapping"))
    }

    /// On reserved huge pages; `None` if they would be a waste.
    fn reserved(len_bytes: u64) -> std::result::Result<Option<Pages>, Errno> {
        let file = new_file(MemfdFlags::HUGETLB)?;
        let page_bytes = fstat(&file)?.st_blksize as u64;
        let Some(mapped_bytes) = round_up(len_bytes, page_bytes) else { return Ok(None) };
        if mapped_bytes - len_bytes > len_bytes / 8 {
            return Ok(None);
        }
        seal(&file, mapped_bytes)?;
        Pages::map(file, mapped_bytes, PageKind::Reserved).map(Some)
    }

    fn map(file: OwnedFd, mapped_bytes: u64, kind: PageKind) -> std::result::Result<Pages, Errno> {
        let len = usize::try_from(mapped_bytes).map_err(|_| Errno::NOMEM)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe { mmap(std::ptr::null_mut(), len, access, MapFlags::SHARED, &file, 0) }?;
        let base = NonNull::new(base).ok_or(Errno::NOMEM)?;
        let pages = Pages { base, mapped_bytes, file, kind };
        if let Err(e) = pages.populate(len) {
            // SAFETY: nobody else knows it yet.
            unsafe { pages.free() };
            return Err(e);
        }
        Ok(pages)
    }

    fn populate(&self, len: usize) -> std::result::Result<(), Errno> {
        let at = self.base.as_ptr();
        // SAFETY: exactly our mapping, whose bytes none of these changes. A forked child must not write into what its parent
        // shares with peers; without huge pages there are small ones.
        unsafe {
            madvise(at, len, Advice::LinuxDontFork)?;
            if self.kind == PageKind::Transparent {
                let _ = madvise(at, len, Advice::LinuxHugepage);
            }
            match madvise(at, len, Advice::LinuxPopulateWrite) {
                // Older kernels do not know it.
                Err(Errno::INVAL) => fallocate(&self.file, FallocateFlags::empty(), 0, self.mapped_bytes),
                other => other,
            }
        }
    }

    /// First byte.
    pub fn addr(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Bytes mapped: whole pages.
    pub fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    /// What a peer on this host maps; the memory is the file from its first byte on.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub fn kind(&self) -> PageKind {
        self.kind
    }

    /// Whether huge pages were tried.
    pub fn wanted_huge(&self) -> bool {
        self.mapped_bytes >= HUGE_FROM_BYTES
    }

    /// Unmaps.
    ///
    /// # Safety
    /// Nothing of this process, no device and no copy in flight touches the memory any more.
    pub unsafe fn free(self) {
        // SAFETY: the caller's promise; the range is our mapping.
        if let Err(e) = unsafe { munmap(self.base.as_ptr(), self.mapped_bytes as usize) } {
            tracing::error!("unmapping {} bytes of managed memory: {e}", self.mapped_bytes);
        }
    }
}

fn round_up(len: u64, to: u64) -> Option<u64> {
    len.checked_next_multiple_of(to.max(1)).filter(|bytes| i64::try_from(*bytes).is_ok())
}

fn new_file(more: MemfdFlags) -> std::result::Result<OwnedFd, Errno> {
    memfd_create("baton-managed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | more)
}

/// Gives the file its size, for ever.
fn seal(file: &OwnedFd, bytes: u64) -> std::result::Result<(), Errno> {
    ftruncate(file, bytes)?;
    fcntl_add_seals(file, SEALS)
}

fn failed(what: &str, len_bytes: u64, e: Errno) -> Error {
    let text = format!("{what} for {len_bytes} bytes of managed memory: {e}");
    match e {
        Errno::NOMEM | Errno::NOSPC | Errno::MFILE | Errno::NFILE => {
            err!(Limit, "{text}; free some or raise the limit")
        }
        _ => err!(Local, "{text}"),
    }
}

/// Taking more than there is would not fail but have some process killed.
fn check_available(len_bytes: u64) -> Result<()> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    match available_bytes(&text) {
        Some(available) if available < len_bytes => Err(err!(
            Limit,
            "{len_bytes} bytes of managed memory: this machine has {available} bytes available (MemAvailable)"
        )),
        _ => Ok(()),
    }
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Whether the kernel makes huge pages for shared memory that asks for them.
fn shared_memory_may_be_huge() -> bool {
    let text =
        std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    ["[always]", "[within_size]", "[advise]", "[force]"].iter().any(|word| text.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn what_the_machine_has_available_is_read_in_bytes_and_more_is_refused() {
        let text = "MemTotal:       16384 kB\nMemAvailable:    2048 kB\nSwapTotal: 0 kB\n";
        assert_eq!(available_bytes(text), Some(2048 * 1024));
        assert_eq!(available_bytes("MemTotal: 1 kB\n"), None);
        let refused = check_available(1 << 60).expect_err("an exbibyte");
        assert_eq!(refused.code, Code::Limit);
        assert!(refused.text.contains("MemAvailable"), "{}", refused.text);
    }

    #[test]
    fn pages_are_zeroed_whole_and_of_a_file_that_nobody_can_shorten() {
        let pages = Pages::alloc(SMALL_PAGE_BYTES + 1).expect("two pages");
        assert_eq!((pages.addr() % SMALL_PAGE_BYTES, pages.mapped_bytes()), (0, 2 * SMALL_PAGE_BYTES));
        assert_eq!(pages.kind(), PageKind::Small);
        // SAFETY: our own mapping, written by nobody meanwhile.
        let bytes =
            unsafe { std::slice::from_raw_parts(pages.addr() as *const u8, 2 * SMALL_PAGE_BYTES as usize) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        assert_eq!(ftruncate(pages.file(), 0), Err(Errno::PERM));
        assert_eq!(ftruncate(pages.file(), 1 << 20), Err(Errno::PERM));
        // SAFETY: `bytes` is not used any more and nobody else knows the memory.
        unsafe { pages.free() };
    }
}
