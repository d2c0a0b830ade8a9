//! The system calls that only this fabric needs, and facts about this host and its processes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags};

/// Pieces that one call takes on either side (UIO_MAXIOV).
pub const MAX_PIECES: usize = 1024;

/// A piece of memory of this or of another process.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct Piece(libc::iovec);

// SAFETY: an address and a length; only the kernel looks through it.
unsafe impl Send for Piece {}

impl Piece {
    pub fn new(addr: u64, len: usize) -> Piece {
        Piece(libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: len })
    }

    /// Grows by `len` if the piece ends at `addr`.
    pub fn extend(&mut self, addr: u64, len: usize) -> bool {
        let touches = self.0.iov_base as u64 + self.0.iov_len as u64 == addr;
        if touches {
            self.0.iov_len += len;
        }
        touches
    }
}

/// Copies from another process into `own`. Returns how many bytes were copied, in order; the error only if none were.
///
/// # Safety
/// This process's program must allow its memory in `own` to be overwritten at any time during the call.
pub unsafe fn vm_read(pid: i32, own: &[Piece], peer: &[Piece]) -> Result<usize, i32> {
    debug_assert!(own.len() <= MAX_PIECES && peer.len() <= MAX_PIECES);
    // SAFETY: `Piece` is transparent over iovec; the kernel checks every address itself and answers EFAULT; that the
    // bytes may be overwritten is the caller's promise.
    let n = unsafe {
        libc::process_vm_readv(
            pid,
            own.as_ptr().cast(),
            own.len() as libc::c_ulong,
            peer.as_ptr().cast(),
            peer.len() as libc::c_ulong,
            0,
        )
    };
    usize::try_from(n).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Reads exactly one value of plain words out of another process.
pub fn vm_read_words<const N: usize>(pid: i32, addr: u64) -> Result<[u64; N], i32> {
    let mut words = [0u64; N];
    let len = N * 8;
    let own = [Piece::new(words.as_mut_ptr() as u64, len)];
    // SAFETY: `words` is a local that nobody else uses during the call.
    match unsafe { vm_read(pid, &own, &[Piece::new(addr, len)]) } {
        Ok(n) if n == len => Ok(words),
        Ok(_) => Err(libc::EFAULT),
        Err(errno) => Err(errno),
    }
}

pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

pub fn pidfd_getfd(pidfd: BorrowedFd<'_>, fd: i32) -> io::Result<OwnedFd> {
    Ok(rustix::process::pidfd_getfd(pidfd, fd, PidfdGetfdFlags::empty())?)
}

/// Whether the process of a pidfd has ended.
pub fn has_ended(pidfd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(n) if n > 0)
}

pub fn new_eventfd() -> io::Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Wakes whoever sleeps on the eventfd.
pub fn ring(event: &OwnedFd) {
    // A full counter means that it is readable already.
    let _ = rustix::io::write(event.as_fd(), &1u64.to_ne_bytes());
}

/// Consumes earlier wake-ups.
pub fn drain(fd: &OwnedFd) {
    let mut count = [0u8; 8];
    let _ = rustix::io::read(fd.as_fd(), &mut count);
}

/// Lets every process of this user read this one's memory, where Yama restricts that to ancestors.
pub fn allow_any_tracer() -> io::Result<()> {
    // SAFETY: PR_SET_PTRACER takes plain numbers and touches no memory of ours.
    let result = unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
    match result {
        0 => Ok(()),
        // EINVAL: this kernel has no Yama, so nothing is restricted.
        _ if io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL) => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Yama's ptrace scope, 0 where there is no Yama.
pub fn yama_scope() -> u32 {
    let text = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

pub fn boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Name of the pid namespace, e.g. `pid:[4026531836]`.
pub fn pid_namespace() -> io::Result<String> {
    Ok(std::fs::read_link("/proc/self/ns/pid")?.to_string_lossy().into_owned())
}

/// When a process started, in clock ticks after boot: tells it from a later one with the same pid.
pub fn start_time(pid: i32) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in parentheses may hold anything; field 22 is the 20th behind it.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    rest.split_ascii_whitespace()
        .nth(19)
        .and_then(|ticks| ticks.parse().ok())
        .ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat is not understood")))
}

/// The error behind an errno, for messages.
pub fn errno_text(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}
