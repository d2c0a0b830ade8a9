//! The listener, and connections that have not yet said which endpoint they are for.

use std::net::{Shutdown, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use baton_fabric::FabricError;
use parking_lot::Mutex;
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use socket2::{Domain, Protocol, Socket, Type};

use super::endpoint::{Connection, State};
use super::hello::{Answer, HELLO, Hello, NoHello};
use super::net_addr::{NetAddr, PortRange};
use super::shared::Shared;
use super::sys::{self, Epoll, no_event, system};

/// Connections that have not yet said who they are, at most; one more pushes out the oldest.
const MAX_HALF_OPEN: usize = 64;
/// How long a connection may take to say who it is.
const HALF_OPEN_PATIENCE: Duration = Duration::from_secs(3);
/// Connections taken in one step.
const ACCEPTS_PER_STEP: usize = 64;
/// How long the listener rests after the system had nothing left for another connection.
const PAUSE: Duration = Duration::from_millis(250);
/// Connections that the kernel keeps for us.
const BACKLOG: i32 = 1024;
const LISTENER: u64 = 0;

struct HalfOpen {
    id: u64,
    fd: OwnedFd,
    since: Instant,
    bytes: [u8; HELLO],
    filled: usize,
}

#[derive(Default)]
struct Waiting {
    // In the order of arrival.
    list: Vec<HalfOpen>,
    last_id: u64,
    /// The listener is out of the epoll set until then.
    paused_until: Option<Instant>,
}

pub(super) struct Acceptor {
    listener: TcpListener,
    address: SocketAddr,
    epoll: Epoll,
    waiting: Mutex<Waiting>,
}

impl Acceptor {
    /// Listens at `listen`, by default at all addresses and a port that the kernel chooses.
    pub fn new(listen: Option<&NetAddr>) -> Result<Acceptor, FabricError> {
        let listener = match listen {
            Some(addr) => bind_range(addr)?,
            // Hosts without IPv6 exist.
            None => bind_range(&NetAddr::new(std::net::Ipv6Addr::UNSPECIFIED.into()))
                .or_else(|_| bind_range(&NetAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into())))?,
        };
        let address = listener.local_addr().map_err(|e| system("address of the listener", e))?;
        let epoll = Epoll::new()?;
        epoll.add(&listener, LISTENER, EventFlags::IN)?;
        Ok(Acceptor { listener, address, epoll, waiting: Mutex::default() })
    }

    /// Readable when [`Acceptor::step`] has something to do.
    pub fn epoll(&self) -> &Epoll {
        &self.epoll
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes new connections and reads what half-open ones say; never blocks.
    pub fn step(&self, shared: &Shared) {
        let Some(mut waiting) = self.waiting.try_lock() else { return };
        let mut events = [no_event(); MAX_HALF_OPEN + 1];
        for event in self.epoll.take(&mut events) {
            match event.data.u64() {
                LISTENER => self.accept(shared, &mut waiting),
                id => self.hear(shared, &mut waiting, id),
            }
        }
        if !waiting.list.is_empty() {
            shared.tick_soon();
        }
    }

    fn accept(&self, shared: &Shared, waiting: &mut Waiting) {
        for _ in 0..ACCEPTS_PER_STEP {
            let fd = match self.listener.accept() {
                Ok((stream, _)) => OwnedFd::from(stream),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(error) if concerns_one_connection(&error) => continue,
                Err(error) => return self.pause(shared, waiting, &error),
            };
            if rustix::io::ioctl_fionbio(&fd, true).is_err() {
                continue;
            }
            if waiting.list.len() >= MAX_HALF_OPEN {
                // Peers of ours say who they are at once, so whoever waits longest is the least likely to be one.
                waiting.list.remove(0);
                shared.counters.half_open_evicted.add(1);
            }
            waiting.last_id += 1;
            let id = waiting.last_id;
            if self.epoll.add(&fd, id, EventFlags::IN | EventFlags::RDHUP).is_err() {
                continue;
            }
            waiting.list.push(HalfOpen { id, fd, since: Instant::now(), bytes: [0; HELLO], filled: 0 });
            self.hear(shared, waiting, id);
        }
    }

    /// The connection that could not be taken stays in the kernel's queue, so the listener would stay ready for nothing.
    fn pause(&self, shared: &Shared, waiting: &mut Waiting, error: &std::io::Error) {
        tracing::warn!(
            "tcp: cannot accept connections: {error}; next try in {} ms; if descriptors ran out, raise RLIMIT_NOFILE",
            PAUSE.as_millis()
        );
        shared.counters.accept_pauses.add(1);
        self.epoll.remove(&self.listener);
        waiting.paused_until = Some(Instant::now() + PAUSE);
        shared.tick_soon();
    }

    fn resume(&self, waiting: &mut Waiting, now: Instant) {
        if waiting.paused_until.is_some_and(|until| now >= until)
            && self.epoll.add(&self.listener, LISTENER, EventFlags::IN).is_ok()
        {
            waiting.paused_until = None;
        }
    }

    fn hear(&self, shared: &Shared, waiting: &mut Waiting, id: u64) {
        let Some(at) = waiting.list.iter().position(|h| h.id == id) else { return };
        let half = &mut waiting.list[at];
        while half.filled < HELLO {
            match rustix::io::read(&half.fd, &mut half.bytes[half.filled..]) {
                Ok(0) => {
                    shared.counters.half_open_gone.add(1);
                    waiting.list.remove(at);
                    return;
                }
                Ok(n) => half.filled += n,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR) => {}
                Err(_) => {
                    shared.counters.half_open_gone.add(1);
                    waiting.list.remove(at);
                    return;
                }
            }
            if !Hello::may_become(&half.bytes[..half.filled]) {
                break;
            }
        }
        let half = waiting.list.remove(at);
        self.epoll.remove(&half.fd);
        welcome(shared, half);
    }

    /// Closes those that took too long, and ends a pause. `true`: there is more to wait for.
    pub fn expire(&self, shared: &Shared, now: Instant) -> bool {
        let Some(mut waiting) = self.waiting.try_lock() else { return true };
        let before = waiting.list.len();
        waiting.list.retain(|h| now.duration_since(h.since) < HALF_OPEN_PATIENCE);
        shared.counters.half_open_expired.add((before - waiting.list.len()) as u64);
        self.resume(&mut waiting, now);
        !waiting.list.is_empty() || waiting.paused_until.is_some()
    }

    pub fn half_open(&self) -> usize {
        self.waiting.lock().list.len()
    }
}

/// The connection at the head of the queue is broken; the next one may not be (accept(2)).
fn concerns_one_connection(error: &std::io::Error) -> bool {
    let broken = [
        libc::ECONNABORTED,
        libc::EPERM,
        libc::EPROTO,
        libc::ENOPROTOOPT,
        libc::ENETDOWN,
        libc::ENETUNREACH,
        libc::EHOSTDOWN,
        libc::EHOSTUNREACH,
        libc::ENONET,
        libc::EOPNOTSUPP,
    ];
    error.raw_os_error().is_some_and(|code| broken.contains(&code))
}

/// A connection has said who it is for.
fn welcome(shared: &Shared, half: HalfOpen) {
    match Hello::decode(&half.bytes) {
        Err(NoHello::Garbage) => shared.counters.half_open_garbage.add(1),
        Err(NoHello::Version(version)) => {
            shared.counters.half_open_version.add(1);
            tracing::warn!(
                "tcp: a peer speaks version {version} of the wire, this side {}",
                super::hello::VERSION
            );
            // The token of the hello, so that the peer knows whose answer it is.
            let token = half.bytes[16..32].try_into().expect("sixteen bytes");
            say(&half.fd, Answer::OtherVersion, &token);
        }
        Ok(Hello::Probe) => {
            shared.counters.probes.add(1);
            sys::shutdown(half.fd.as_fd(), Shutdown::Both);
        }
        Ok(Hello::Connect { to, from, epoch }) => {
            let endpoint =
                shared.endpoint_of_token(&to).filter(|e| !e.config.active && e.state() == State::New);
            let Some(endpoint) = endpoint else {
                shared.counters.half_open_unknown.add(1);
                say(&half.fd, Answer::NoSuchEndpoint, &to);
                return;
            };
            let mut link = endpoint.link.lock();
            // The same endpoint may dial again as long as nobody has taken up its first connection.
            let again = link.accepted.as_ref().is_some_and(|(_, first)| *first == from);
            if link.taken && !again {
                shared.counters.half_open_unknown.add(1);
                say(&half.fd, Answer::NoSuchEndpoint, &to);
                return;
            }
            let prepared = sys::prepare(half.fd.as_fd(), shared.options).is_ok();
            if !prepared || !say(&half.fd, Answer::Welcome, &to) {
                shared.counters.half_open_gone.add(1);
                return;
            }
            shared.counters.connections_accepted.add(1);
            link.taken = true;
            link.accepted = Some((Connection { fd: half.fd, epoch }, from));
            if let Some(waiter) = &link.waiter {
                waiter.wake();
            }
        }
    }
}

/// The first bytes of a connection always fit its send buffer.
fn say(fd: &OwnedFd, answer: Answer, token: &[u8; 16]) -> bool {
    let bytes = answer.encode(token);
    rustix::net::send(fd, &bytes, rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT)
        == Ok(bytes.len())
}

fn bind_range(addr: &NetAddr) -> Result<TcpListener, FabricError> {
    let ports = addr.ports.unwrap_or(PortRange::ANY);
    let mut last = None;
    for port in ports.first..=ports.last {
        let at = addr.socket_addr(port).map_err(|e| FabricError::Invalid(e.to_string()))?;
        match bind(at) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = Some(error),
        }
    }
    let why = last.map(|e| e.to_string()).unwrap_or_default();
    Err(FabricError::System(format!("cannot listen at {addr}: {why}; choose another address or port range")))
}

fn bind(at: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(at), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    if at.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    if at.port() != 0 {
        // Connections of an earlier engine that linger in TIME_WAIT do not hold the port.
        socket.set_reuse_address(true)?;
    }
    socket.bind(&at.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}
