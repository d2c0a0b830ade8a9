//! The system calls: scattered reads, gathered sends, wake-up descriptors, socket options.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use baton_fabric::FabricError;
use rustix::event::{EventfdFlags, Timespec, epoll};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};
use socket2::{SockRef, TcpKeepalive};

/// Buffers of one call at most.
pub(super) const MAX_IOV: usize = 1024;

/// `None`: it would block.
pub(super) type Moved = io::Result<Option<usize>>;

fn moved(n: isize) -> Option<Moved> {
    if n >= 0 {
        return Some(Ok(Some(n as usize)));
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::Interrupted => None,
        io::ErrorKind::WouldBlock => Some(Ok(None)),
        _ => Some(Err(error)),
    }
}

fn message(iov: &[libc::iovec]) -> libc::msghdr {
    // SAFETY: msghdr is plain data for which zero means "absent".
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_ptr().cast_mut();
    message.msg_iovlen = iov.len() as _;
    message
}

/// Gathers what the buffers hold into the socket's send buffer; never blocks, never raises SIGPIPE.
///
/// # Safety
/// Every buffer must be this process's to read until the call returns; one that is not mapped is an error ([`is_fault`]).
pub(super) unsafe fn send(fd: BorrowedFd<'_>, iov: &[libc::iovec]) -> Moved {
    let message = message(iov);
    loop {
        // SAFETY: the message points to `iov`, whose buffers the caller vouches for.
        let n = unsafe { libc::sendmsg(fd.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
        if let Some(result) = moved(n) {
            return result;
        }
    }
}

/// Scatters received bytes into the buffers; never blocks; `Some(0)` is the end of the stream.
///
/// # Safety
/// Every buffer must be this process's to write until the call returns, and nothing may rely on its content; one that is not
/// mapped is an error ([`is_fault`]).
pub(super) unsafe fn receive(fd: BorrowedFd<'_>, iov: &[libc::iovec]) -> Moved {
    let mut message = message(iov);
    loop {
        // SAFETY: the message points to `iov`, whose buffers the caller vouches for.
        let n = unsafe { libc::recvmsg(fd.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
        if let Some(result) = moved(n) {
            return result;
        }
    }
}

/// Copies `from` into the buffers, as far as they can be written. Memory that is not mapped or not writable is an error here
/// and would be a signal in a plain copy: registering a region does not promise that it stays mapped.
///
/// # Safety
/// Nothing may rely on the content of the buffers, which do not overlap `from`. Where the kernel denies the call they must
/// be writable.
pub(super) unsafe fn place(from: &[u8], to: &[libc::iovec]) -> io::Result<usize> {
    let source = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    // SAFETY: the call reads `from`; the kernel checks every byte that it writes, and the caller vouches for the rest.
    let n = unsafe { libc::process_vm_readv(libc::getpid(), to.as_ptr(), to.len() as _, &source, 1, 0) };
    if n >= 0 {
        return Ok(n as usize);
    }
    let error = io::Error::last_os_error();
    if !matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) {
        return Err(error);
    }
    // A sandbox without the call: all that is left is to trust the mapping.
    let mut done = 0;
    for buffer in to {
        let n = buffer.iov_len.min(from.len() - done);
        // SAFETY: the caller vouches for the buffers; `n` bytes of `from` are left.
        unsafe { std::ptr::copy_nonoverlapping(from[done..].as_ptr(), buffer.iov_base.cast(), n) };
        done += n;
    }
    Ok(done)
}

/// The call met memory that is not mapped or does not permit the access.
pub(super) fn is_fault(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::EFAULT)
}

/// Throws received bytes away inside the kernel.
pub(super) fn discard(fd: BorrowedFd<'_>, len: usize) -> Moved {
    loop {
        let flags = libc::MSG_TRUNC | libc::MSG_DONTWAIT;
        // SAFETY: with MSG_TRUNC a TCP socket drops the bytes and writes to no buffer (tcp(7)).
        let n = unsafe { libc::recv(fd.as_raw_fd(), std::ptr::null_mut(), len, flags) };
        if let Some(result) = moved(n) {
            return result;
        }
    }
}

/// Ends both directions; the peer sees the end of the stream, later calls here fail.
pub(super) fn shutdown(fd: BorrowedFd<'_>, how: std::net::Shutdown) {
    // An error means that the connection is gone already.
    let _ = SockRef::from(&fd).shutdown(how);
}

pub(super) fn system(what: &str, error: impl std::fmt::Display) -> FabricError {
    FabricError::System(format!("{what}: {error}"))
}

/// An epoll set.
pub(super) struct Epoll(OwnedFd);

impl Epoll {
    pub fn new() -> Result<Epoll, FabricError> {
        epoll::create(epoll::CreateFlags::CLOEXEC).map(Epoll).map_err(|e| system("epoll_create", e))
    }

    pub fn add(&self, fd: impl AsFd, data: u64, flags: epoll::EventFlags) -> Result<(), FabricError> {
        epoll::add(&self.0, fd, epoll::EventData::new_u64(data), flags).map_err(|e| system("epoll_ctl", e))
    }

    pub fn remove(&self, fd: impl AsFd) {
        // Absent is what was asked for.
        let _ = epoll::delete(&self.0, fd);
    }

    /// Events that are there now.
    pub fn take<'a>(&self, out: &'a mut [epoll::Event]) -> &'a [epoll::Event] {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let n = epoll::wait(&self.0, &mut *out, Some(&zero)).unwrap_or(0);
        &out[..n]
    }
}

impl AsFd for Epoll {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// An empty slot for [`Epoll::take`].
pub(super) fn no_event() -> epoll::Event {
    epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }
}

/// Wakes one that sleeps on it.
pub(super) struct WakeUp(OwnedFd);

impl WakeUp {
    pub fn new() -> Result<WakeUp, FabricError> {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(WakeUp)
            .map_err(|e| system("eventfd", e))
    }

    pub fn wake(&self) {
        // A full counter is awake already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    pub fn drain(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for WakeUp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A timer that becomes readable.
pub(super) struct Timer(OwnedFd);

impl Timer {
    pub fn new() -> Result<Timer, FabricError> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)
            .map(Timer)
            .map_err(|e| system("timerfd_create", e))
    }

    /// Fires once, so long from now.
    pub fn set(&self, after: Duration) {
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = Timespec { tv_sec: after.as_secs() as i64, tv_nsec: i64::from(after.subsec_nanos()) };
        let spec = Itimerspec { it_interval: never, it_value: value };
        rustix::time::timerfd_settime(&self.0, TimerfdTimerFlags::empty(), &spec)
            .expect("a timer descriptor of our own and a proper time");
    }

    pub fn drain(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Timer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Options of every connection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Options {
    pub buffer_bytes: usize,
    pub user_timeout: Duration,
}

/// Makes a socket non-blocking, quick, and aware of a dead peer.
pub(super) fn prepare(fd: BorrowedFd<'_>, options: Options) -> io::Result<()> {
    let socket = SockRef::from(&fd);
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    // The kernel clamps the sizes to its limits; smaller buffers only cost speed.
    if options.buffer_bytes > 0 {
        let _ = socket.set_send_buffer_size(options.buffer_bytes);
        let _ = socket.set_recv_buffer_size(options.buffer_bytes);
    }
    let probe = (options.user_timeout / 4).max(Duration::from_secs(1));
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(probe).with_interval(probe).with_retries(3))?;
    socket.set_tcp_user_timeout(Some(options.user_timeout))
}
