//! Memory of accelerators: dma-bufs, and WRITEs into them that a completion may overtake.

use super::abi;
use super::dma::{self, Piece};
use super::model::{Errno, State};
use rdma_sys::{ibv_mr, ibv_pd};
use std::ffi::c_int;
use std::io::{Read, Seek, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd};

const MAGIC: u64 = u64::from_le_bytes(*b"fakedma\0");

/// A WRITE that is on its way into an accelerator's memory.
pub(super) struct Late {
    device: usize,
    to: u64,
    bytes: Vec<u8>,
}

/// A descriptor that stands for memory of this process, as a dma-buf stands for memory of an accelerator. The fake's devices take it.
///
/// # Errors
/// Those of the system.
pub fn dmabuf(addr: u64, len_bytes: u64) -> std::io::Result<OwnedFd> {
    let name = std::ffi::CString::new(format!("fake-dmabuf-{addr:x}"))?;
    // SAFETY: a valid name; the descriptor is checked.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: just made, owned by nobody else.
    let mut file = unsafe { std::fs::File::from_raw_fd(fd) };
    for word in [MAGIC, addr, len_bytes] {
        file.write_all(&word.to_ne_bytes())?;
    }
    Ok(file.into())
}

/// Address and length of what a descriptor stands for.
fn resolve(fd: c_int) -> Result<(u64, u64), Errno> {
    // SAFETY: takes no pointers.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return Err(libc::EBADF);
    }
    // SAFETY: open, and not closed by this value.
    let mut file = ManuallyDrop::new(unsafe { std::fs::File::from_raw_fd(fd) });
    let mut words = [[0; 8]; 3];
    file.rewind().map_err(|_| libc::EINVAL)?;
    for word in &mut words {
        file.read_exact(word).map_err(|_| libc::EINVAL)?;
    }
    let [magic, addr, len] = words.map(u64::from_ne_bytes);
    if magic == MAGIC { Ok((addr, len)) } else { Err(libc::EINVAL) }
}

pub(super) unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: a domain that is alive, by the caller's promise.
    let takes = unsafe { abi::takes_dmabuf(pd) };
    let found = if takes { resolve(fd) } else { Err(libc::EOPNOTSUPP) };
    let base = found.and_then(|(addr, bytes)| {
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= bytes);
        // Device and host must agree on where pages begin.
        let alike = (addr + offset) % 4096 == iova % 4096;
        if inside && alike { Ok(addr + offset) } else { Err(libc::EINVAL) }
    });
    match base {
        // SAFETY: as above.
        Ok(base) => unsafe { abi::register(pd, base, len as u64, iova, access as u32, true) },
        Err(errno) => abi::refuse(errno),
    }
}

impl State {
    /// Places what a peer writes. Into an accelerator's memory it goes its own way, and a completion may be faster.
    pub fn place(&mut self, device: usize, from: &[Piece], to: &[Piece]) {
        let regions = || self.mrs.values().filter(|mr| mr.vram && mr.device == device);
        let inside = |piece: &Piece| regions().any(|mr| (mr.base..mr.base + mr.len).contains(&piece.addr));
        if !self.config.late_vram || !to.iter().any(inside) {
            return self.transfer(from, to);
        }
        for (piece, target) in dma::zip(from, to) {
            let mut bytes = vec![0; piece.len as usize];
            // SAFETY: a registered region or the buffer of a work request, and a buffer of the same length.
            unsafe { dma::copy(piece.addr, bytes.as_mut_ptr() as u64, piece.len) };
            self.late.push(Late { device, to: target, bytes });
        }
    }

    /// A READ of an accelerator's memory by this device: it does not overtake the device's WRITEs.
    pub fn settle_before_read(&mut self, device: usize, from: Piece) {
        let regions = || self.mrs.values().filter(|mr| mr.vram && mr.device == device);
        if regions().any(|mr| (mr.base..mr.base + mr.len).contains(&from.addr)) {
            self.settle(device);
        }
    }

    /// Everything on its way arrives.
    pub fn settle(&mut self, device: usize) {
        let (now, later) = std::mem::take(&mut self.late).into_iter().partition(|late| late.device == device);
        self.late = later;
        let now: Vec<Late> = now;
        for late in now {
            // SAFETY: inside a region that was registered when it was checked; none of the device's is deregistered before this.
            unsafe { dma::copy(late.bytes.as_ptr() as u64, late.to, late.bytes.len() as u64) };
        }
    }
}
