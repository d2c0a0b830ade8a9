//! Connecting: the active side dials the candidates of its peer, the passive side waits for the connection.
//!
//! Both run the listener's steps while they wait, so nobody else has to.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_fabric::FabricError;
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::endpoint::{Connection, Endpoint, State};
use super::hello::{Address, Answer, Hello, REPLY};
use super::net_addr::NetAddr;
use super::shared::{Shared, random};
use super::sys::{self, WakeUp, system};

/// The next candidate is tried when the one before has not answered for so long.
const STAGGER: Duration = Duration::from_millis(250);
/// How long a peer may take to answer a hello.
const REPLY_PATIENCE: Duration = Duration::from_secs(5);

/// Connects an endpoint to the one that `peer` describes.
pub(super) fn connect(
    shared: &Shared,
    endpoint: &Arc<Endpoint>,
    peer: &serde_json::Value,
    deadline: Instant,
) -> Result<(), FabricError> {
    let address = Address::parse(peer).map_err(FabricError::Invalid)?;
    let token = address.token().map_err(FabricError::Invalid)?;
    let waiter = Arc::new(WakeUp::new()?);
    {
        let mut link = endpoint.link.lock();
        if endpoint.state() != State::New || link.waiter.is_some() {
            return Err(FabricError::Invalid(format!(
                "endpoint {:?} is {:?} or being connected already; create a new one",
                endpoint.id,
                endpoint.state()
            )));
        }
        link.waiter = Some(Arc::clone(&waiter));
    }
    let made = if endpoint.config.active {
        dial(shared, endpoint, &address, token, &waiter, deadline)
    } else {
        await_peer(shared, endpoint, token, &waiter, deadline)
    };
    endpoint.link.lock().waiter = None;
    install(shared, endpoint, made?)
}

fn install(shared: &Shared, endpoint: &Arc<Endpoint>, connection: Connection) -> Result<(), FabricError> {
    if endpoint.connection.set(connection).is_err() || !endpoint.open() {
        return Err(gone(endpoint));
    }
    let fd = endpoint.fd().expect("set just above");
    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
    shared.epoll.add(fd, Shared::tag(endpoint.id), flags)?;
    if endpoint.state() != State::Open {
        // Fenced in the meantime, perhaps before there was a descriptor to shut down.
        sys::shutdown(fd, std::net::Shutdown::Both);
        shared.epoll.remove(fd);
        return Err(gone(endpoint));
    }
    endpoint.rx_ready.store(true, std::sync::atomic::Ordering::SeqCst);
    shared.push_ready(endpoint);
    shared.wake();
    Ok(())
}

fn gone(endpoint: &Endpoint) -> FabricError {
    FabricError::NotFound(format!("endpoint {:?} was fenced while it was being connected", endpoint.id))
}

// ---- passive

fn await_peer(
    shared: &Shared,
    endpoint: &Endpoint,
    token: [u8; 16],
    waiter: &WakeUp,
    deadline: Instant,
) -> Result<Connection, FabricError> {
    loop {
        shared.acceptor.step(shared);
        if endpoint.state() != State::New {
            return Err(gone(endpoint));
        }
        if let Some((connection, from)) = endpoint.link.lock().accepted.take() {
            if from != token {
                return Err(FabricError::Peer(format!(
                    "the connection for endpoint {:?} came from another endpoint than the one agreed on",
                    endpoint.id
                )));
            }
            return Ok(connection);
        }
        waiter.drain();
        if endpoint.link.lock().accepted.is_some() {
            continue;
        }
        let mut fds = [
            PollFd::new(waiter, PollFlags::IN),
            PollFd::from_borrowed_fd(shared.acceptor.epoll().as_fd(), PollFlags::IN),
        ];
        if !wait(&mut fds, deadline) {
            return Err(FabricError::Timeout(format!(
                "no connection for endpoint {:?} arrived",
                endpoint.id
            )));
        }
    }
}

/// Waits for one of the descriptors. `false`: the deadline passed.
fn wait(fds: &mut [PollFd<'_>], deadline: Instant) -> bool {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return false;
    }
    let limit = Timespec { tv_sec: left.as_secs().min(3600) as i64, tv_nsec: i64::from(left.subsec_nanos()) };
    // An interruption or error only means one more look.
    let _ = rustix::event::poll(fds, Some(&limit));
    true
}

// ---- active

/// One candidate that is being tried.
struct Attempt {
    candidate: String,
    fd: OwnedFd,
    connected: bool,
    /// Since when the hello is out.
    greeted: Option<Instant>,
    reply: [u8; REPLY],
    filled: usize,
}

/// What became of an attempt.
enum Outcome {
    Pending,
    Failed(String),
    Welcome,
}

fn dial(
    shared: &Shared,
    endpoint: &Endpoint,
    address: &Address,
    token: [u8; 16],
    waiter: &WakeUp,
    deadline: Instant,
) -> Result<Connection, FabricError> {
    let epoch = u32::from_le_bytes(random()?[..4].try_into().expect("four bytes"));
    let hello = Hello::Connect { to: token, from: endpoint.token, epoch };
    let fd = race(shared, address, hello, Some(&token), Some((endpoint, waiter)), deadline)?;
    sys::prepare(fd.as_fd(), shared.options).map_err(|e| system("socket options", e))?;
    shared.counters.connections_dialled.add(1);
    Ok(Connection { fd, epoch })
}

/// Proves that one of the candidates takes connections.
pub(super) fn probe(shared: &Shared, address: &Address, deadline: Instant) -> Result<(), FabricError> {
    let fd = race(shared, address, Hello::Probe, None, None, deadline)?;
    sys::shutdown(fd.as_fd(), std::net::Shutdown::Both);
    Ok(())
}

/// Tries the candidates in their order, a further one every [`STAGGER`]. With a token, the first that answers the hello
/// properly wins, and only one at a time is greeted; without one, the first that takes the connection.
fn race(
    shared: &Shared,
    address: &Address,
    hello: Hello,
    token: Option<&[u8; 16]>,
    waiting: Option<(&Endpoint, &WakeUp)>,
    deadline: Instant,
) -> Result<OwnedFd, FabricError> {
    let mut candidates = address.candidates().iter();
    let mut attempts: Vec<Attempt> = Vec::new();
    let mut reasons: Vec<String> = Vec::new();
    let mut next_start = Instant::now();
    loop {
        shared.acceptor.step(shared);
        if let Some((endpoint, _)) = waiting.filter(|(endpoint, _)| endpoint.state() != State::New) {
            return Err(gone(endpoint));
        }
        let now = Instant::now();
        if attempts.is_empty() || now >= next_start {
            match candidates.next() {
                Some(candidate) => {
                    next_start = now + STAGGER;
                    match start(candidate) {
                        Ok(attempt) => attempts.push(attempt),
                        Err(why) => reasons.push(format!("{candidate}: {why}")),
                    }
                    // Whatever became of it, look at it before sleeping.
                    if attempts.is_empty() {
                        continue;
                    }
                }
                None if attempts.is_empty() => {
                    return Err(FabricError::Peer(format!(
                        "no candidate can be reached: {}",
                        reasons.join("; ")
                    )));
                }
                None => next_start = deadline,
            }
        }
        if let Some(fd) = advance(&mut attempts, &mut reasons, &hello, token) {
            return Ok(fd);
        }
        if attempts.is_empty() {
            continue;
        }
        if now >= deadline {
            let tried: Vec<_> = attempts.iter().map(|a| a.candidate.as_str()).collect();
            let others = reasons.join("; ");
            return Err(FabricError::Timeout(format!("no answer from {}; {others}", tried.join(", "))));
        }
        let mut fds: Vec<PollFd<'_>> = attempts.iter().map(watch).collect();
        fds.push(PollFd::from_borrowed_fd(shared.acceptor.epoll().as_fd(), PollFlags::IN));
        fds.extend(waiting.map(|(_, waiter)| PollFd::new(waiter, PollFlags::IN)));
        let patience = attempts.iter().filter_map(|a| a.greeted).map(|since| since + REPLY_PATIENCE);
        let until = patience.chain([next_start, deadline]).min().unwrap_or(deadline);
        wait(&mut fds, until);
    }
}

fn watch(attempt: &Attempt) -> PollFd<'_> {
    let flags = match (attempt.connected, attempt.greeted) {
        (false, _) => PollFlags::OUT,
        (true, Some(_)) => PollFlags::IN,
        // Connected and waiting for its turn: only its end would matter, and that is found then.
        (true, None) => PollFlags::empty(),
    };
    PollFd::new(&attempt.fd, flags)
}

fn start(candidate: &str) -> Result<Attempt, String> {
    let addr: NetAddr = candidate.parse().map_err(|e| format!("{e}"))?;
    let port =
        addr.ports.filter(|p| p.first == p.last && p.first != 0).ok_or("needs exactly one port")?.first;
    let at = addr.socket_addr(port).map_err(|e| e.to_string())?;
    let socket = Socket::new(Domain::for_address(at), Type::STREAM.nonblocking(), Some(Protocol::TCP))
        .map_err(|e| format!("socket: {e}"))?;
    match socket.connect(&SockAddr::from(at)) {
        Ok(()) => {}
        Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(e) => return Err(format!("connect: {e}")),
    }
    let fd = OwnedFd::from(socket);
    Ok(Attempt {
        candidate: candidate.into(),
        fd,
        connected: false,
        greeted: None,
        reply: [0; REPLY],
        filled: 0,
    })
}

/// Takes every attempt as far as it goes without waiting. Returns the winner.
fn advance(
    attempts: &mut Vec<Attempt>,
    reasons: &mut Vec<String>,
    hello: &Hello,
    token: Option<&[u8; 16]>,
) -> Option<OwnedFd> {
    let mut at = 0;
    while at < attempts.len() {
        let free = attempts.iter().all(|a| a.greeted.is_none());
        match attempts[at].advance(hello, token, free) {
            Outcome::Pending => at += 1,
            Outcome::Welcome => return Some(attempts.swap_remove(at).fd),
            Outcome::Failed(why) => {
                let attempt = attempts.remove(at);
                reasons.push(format!("{}: {why}", attempt.candidate));
                // One that waited for its turn may have it now.
                at = 0;
            }
        }
    }
    None
}

impl Attempt {
    fn advance(&mut self, hello: &Hello, token: Option<&[u8; 16]>, may_greet: bool) -> Outcome {
        if !self.connected {
            match self.is_connected() {
                Ok(true) => self.connected = true,
                Ok(false) => return Outcome::Pending,
                Err(error) => return Outcome::Failed(format!("connect: {error}")),
            }
        }
        if self.greeted.is_none() && may_greet {
            let flags = rustix::net::SendFlags::NOSIGNAL;
            match rustix::net::send(&self.fd, &hello.encode(), flags) {
                Ok(n) if n == hello.encode().len() => self.greeted = Some(Instant::now()),
                Ok(_) => return Outcome::Failed("the hello did not fit".into()),
                Err(error) => return Outcome::Failed(format!("hello: {error}")),
            }
        }
        match (self.greeted, token) {
            (Some(_), None) => Outcome::Welcome,
            (Some(since), Some(token)) => self.hear(token, since),
            (None, _) => Outcome::Pending,
        }
    }

    fn is_connected(&self) -> std::io::Result<bool> {
        if let Some(error) = socket2::SockRef::from(&self.fd).take_error()? {
            return Err(error);
        }
        match rustix::net::getpeername(&self.fd) {
            Ok(_) => Ok(true),
            Err(Errno::NOTCONN) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn hear(&mut self, token: &[u8; 16], since: Instant) -> Outcome {
        while self.filled < REPLY {
            match rustix::io::read(&self.fd, &mut self.reply[self.filled..]) {
                Ok(0) => {
                    return Outcome::Failed("closed the connection; no endpoint of ours is there".into());
                }
                Ok(n) => self.filled += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if since.elapsed() < REPLY_PATIENCE => return Outcome::Pending,
                Err(Errno::AGAIN) => {
                    return Outcome::Failed(format!("no answer to the hello in {REPLY_PATIENCE:?}"));
                }
                Err(error) => return Outcome::Failed(format!("reply: {error}")),
            }
        }
        match Answer::decode(&self.reply, token) {
            Some(Answer::Welcome) => Outcome::Welcome,
            Some(Answer::NoSuchEndpoint) => Outcome::Failed("has no such endpoint waiting".into()),
            Some(Answer::OtherVersion) => Outcome::Failed("speaks another version".into()),
            None => Outcome::Failed("is not a Baton listener".into()),
        }
    }
}
