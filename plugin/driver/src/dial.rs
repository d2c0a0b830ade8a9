//! Reaching a peer's listener: all candidate addresses, staggered and in parallel, and framed messages with a deadline.

use crate::err;
use crate::error::Result;
use crate::halt::Halt;
use baton_core::wire::{Candidate, FrameReader};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, SocketAddrV6, TcpStream};
use std::time::{Duration, Instant};

/// Head start of each candidate over the next (PROTOCOL §2).
const STAGGER: Duration = Duration::from_millis(250);
/// Data that the peer's kernel does not acknowledge for this long ends the connection.
const USER_TIMEOUT: Duration = Duration::from_secs(4);

/// Connects to candidates and hands out one established connection after another, so that a wrong one can be skipped.
pub(crate) struct Dialer<'a> {
    halt: &'a Halt,
    left: VecDeque<SocketAddr>,
    pending: Vec<(SocketAddr, Socket)>,
    next_start: Instant,
    errors: Vec<String>,
}

impl<'a> Dialer<'a> {
    pub fn new(candidates: &[Candidate], halt: &'a Halt) -> Dialer<'a> {
        Dialer {
            halt,
            left: candidates.iter().map(socket_addr).collect(),
            pending: Vec::new(),
            next_start: Instant::now(),
            errors: Vec::new(),
        }
    }

    /// The next connection that comes up. The error names every address and why it failed.
    pub fn next(&mut self, deadline: Instant) -> Result<(SocketAddr, TcpStream)> {
        loop {
            self.halt.check()?;
            let now = Instant::now();
            if now >= deadline {
                let waiting: Vec<_> =
                    self.pending.iter().map(|(addr, _)| format!("{addr}: no answer")).collect();
                return Err(err!(
                    RemoteDisconnect,
                    "no connection before the deadline: {}",
                    self.report(&waiting)
                ));
            }
            if (now >= self.next_start || self.pending.is_empty())
                && let Some(addr) = self.left.pop_front()
            {
                self.start(addr);
                self.next_start = now + STAGGER;
                continue;
            }
            if self.pending.is_empty() {
                return Err(err!(
                    RemoteDisconnect,
                    "no address of the peer accepts connections: {}",
                    self.report(&[])
                ));
            }
            let until = if self.left.is_empty() { deadline } else { deadline.min(self.next_start) };
            if let Some(up) = self.wait(until) {
                return Ok(up);
            }
        }
    }

    /// Notes why a connection that came up was not the right one.
    pub fn reject(&mut self, addr: SocketAddr, why: impl std::fmt::Display) {
        self.errors.push(format!("{addr}: {why}"));
    }

    fn report(&self, more: &[String]) -> String {
        let all: Vec<_> = self.errors.iter().chain(more).cloned().collect();
        if all.is_empty() { "there is none to try".into() } else { all.join("; ") }
    }

    fn start(&mut self, addr: SocketAddr) {
        let started =
            Socket::new(Domain::for_address(addr), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))
                .and_then(|socket| match socket.connect(&SockAddr::from(addr)) {
                    Ok(()) => Ok(socket),
                    Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok(socket),
                    Err(e) => Err(e),
                });
        match started {
            Ok(socket) => self.pending.push((addr, socket)),
            Err(e) => self.reject(addr, e),
        }
    }

    fn wait(&mut self, until: Instant) -> Option<(SocketAddr, TcpStream)> {
        let ready: Vec<bool> = {
            let mut fds: Vec<_> =
                self.pending.iter().map(|(_, socket)| PollFd::new(socket, PollFlags::OUT)).collect();
            fds.push(PollFd::from_borrowed_fd(self.halt.fd(), PollFlags::IN));
            wait_until(&mut fds, until);
            fds.pop();
            fds.iter().map(|fd| !fd.revents().is_empty()).collect()
        };
        let at = ready.iter().position(|ready| *ready)?;
        let (addr, socket) = self.pending.swap_remove(at);
        let outcome = match socket.take_error() {
            Ok(None) => socket.set_nonblocking(false).and_then(|()| prepare(socket)),
            Ok(Some(e)) | Err(e) => Err(e),
        };
        match outcome {
            Ok(stream) => Some((addr, stream)),
            Err(e) => {
                self.reject(addr, e);
                None
            }
        }
    }
}

/// The scope of a link-local address means something at the host that reads it only: its own interface of that name or index.
fn socket_addr(candidate: &Candidate) -> SocketAddr {
    match (candidate.addr, &candidate.scope) {
        (SocketAddr::V6(v6), Some(scope)) => {
            let index = scope.parse().ok().or_else(|| {
                let name = std::ffi::CString::new(scope.as_str()).ok()?;
                // SAFETY: a NUL-terminated string that lives through the call.
                Some(unsafe { libc::if_nametoindex(name.as_ptr()) })
            });
            SocketAddr::V6(SocketAddrV6::new(*v6.ip(), v6.port(), 0, index.unwrap_or(0)))
        }
        (addr, _) => addr,
    }
}

fn wait_until(fds: &mut [PollFd<'_>], until: Instant) {
    let left = until.saturating_duration_since(Instant::now());
    let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
    if let Err(e) = poll(fds, Some(&timeout))
        && e != rustix::io::Errno::INTR
    {
        tracing::warn!("waiting for a connection: {e}");
    }
}

/// Options of every handshake connection, on both sides.
pub(crate) fn prepare(socket: impl Into<Socket>) -> std::io::Result<TcpStream> {
    let socket = socket.into();
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(Duration::from_secs(2)).with_interval(Duration::from_secs(1)),
    )?;
    Ok(socket.into())
}

/// Sends all of `frame` by `deadline`.
pub(crate) fn send_frame(stream: &mut TcpStream, frame: &[u8], deadline: Instant) -> Result<()> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream
        .set_write_timeout(Some(left))
        .and_then(|()| stream.write_all(frame))
        .map_err(|e| err!(RemoteDisconnect, "sending a handshake message: {e}"))
}

/// Reads one frame's body by `deadline`; the end of the engine ends the wait.
pub(crate) fn read_frame(
    stream: &mut TcpStream,
    reader: &mut FrameReader,
    deadline: Instant,
    halt: &Halt,
) -> Result<Vec<u8>> {
    loop {
        match reader.next_frame() {
            Ok(Some(body)) => return Ok(body.to_vec()),
            Ok(None) => {}
            Err(e) => return Err(err!(Protocol, "handshake: {e}")),
        }
        halt.check()?;
        if Instant::now() >= deadline {
            return Err(err!(Timeout, "the other side did not send its handshake message in time"));
        }
        let mut fds =
            [PollFd::new(&*stream, PollFlags::IN), PollFd::from_borrowed_fd(halt.fd(), PollFlags::IN)];
        wait_until(&mut fds, deadline);
        if fds[0].revents().is_empty() {
            continue;
        }
        let mut buffer = [0u8; 4096];
        match stream.read(&mut buffer) {
            Ok(0) => {
                return Err(err!(
                    RemoteDisconnect,
                    "the other side closed the connection during the handshake"
                ));
            }
            Ok(n) => reader.feed(&buffer[..n]),
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(err!(RemoteDisconnect, "handshake: {e}")),
        }
    }
}
