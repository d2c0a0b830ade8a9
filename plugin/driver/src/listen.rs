//! The listener's side of the handshake. Until READY is verified, a connection costs a bounded set of endpoints for a
//! bounded time and changes nothing else.

use crate::connect::Made;
use crate::dial::{prepare, read_frame, send_frame};
use crate::endpoints::{EndpointSet, Side};
use crate::err;
use crate::error::Result;
use crate::inbox::MAX_WAITING_BYTES;
use crate::names::HeldName;
use crate::peer::{Conn, Peer, PeerState};
use crate::shared::{Shared, random_bytes, random_u64};
use baton_core::SessionId;
use baton_core::handshake::{
    AwaitReady, Decision, Failure, HelloReceived, Link, Listener, Proof, ReadyReceived,
};
use baton_core::peer::EndReason;
use baton_core::wire::{
    Agreed, ErrorCode, FabricOffer, FrameReader, Hello, Progress, Refusal, Reply, ResumeToken, negotiate,
};
use baton_fabric::Fabric;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Endpoint sets of handshakes under way per source; another waits its turn (PROTOCOL §2).
const MAX_HALF_OPEN_PER_SOURCE: usize = 16;
/// Connections that have not proved to hold the session key; beyond, the oldest is closed and counted.
const MAX_STRANGERS: usize = 128;
/// Rest of the listener when a connection cannot be accepted.
const LISTENER_PAUSE_MS: u64 = 500;
/// Time for a handshake at the listener (times the timeout scale).
const HALF_OPEN_MS: u64 = 3000;
/// Time for the old epoch to end before a new one is accepted (times the timeout scale).
const DRAIN_WAIT_MS: u64 = 3000;

/// Where to listen.
#[derive(Clone, Debug)]
pub struct ListenSpec {
    /// Address to bind.
    pub addr: IpAddr,
    /// Ports to try in order; 0 lets the kernel choose.
    pub ports: RangeInclusive<u16>,
}

/// Binds the first free port.
pub(crate) fn bind(spec: &ListenSpec) -> Result<TcpListener> {
    let mut last = None;
    for port in spec.ports.clone() {
        match TcpListener::bind(SocketAddr::new(spec.addr, port)) {
            Ok(listener) => {
                listener.set_nonblocking(true).map_err(|e| err!(Local, "listener: {e}"))?;
                return Ok(listener);
            }
            Err(e) => last = Some(e),
        }
    }
    let (first, end) = (spec.ports.start(), spec.ports.end());
    let why = last.map_or_else(|| "the port range is empty".to_owned(), |e| e.to_string());
    Err(err!(Local, "cannot listen on {} port {first}..{end}: {why}; choose another BATON_LISTEN", spec.addr))
}

/// Connections on their way to a session.
#[derive(Default)]
pub(crate) struct HalfOpen {
    /// Those that have not proved to hold the session key, oldest first; the clone is there to end them.
    strangers: Mutex<VecDeque<(u64, TcpStream)>>,
    /// Endpoint sets of handshakes under way, by source.
    sets: Mutex<HashMap<IpAddr, usize>>,
    set_freed: Condvar,
    next_id: AtomicU64,
}

impl HalfOpen {
    /// Takes a stranger in. When there are too many, the oldest is sent away: silence must not keep others out.
    fn enter(&self, stream: &TcpStream) -> std::io::Result<(u64, bool)> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let mut strangers = self.strangers.lock();
        strangers.push_back((id, stream.try_clone()?));
        let crowded = strangers.len() > MAX_STRANGERS;
        if crowded && let Some((_, oldest)) = strangers.pop_front() {
            // It may have gone by itself.
            let _gone = oldest.shutdown(std::net::Shutdown::Both);
        }
        Ok((id, crowded))
    }

    /// It is no stranger any more, or gone.
    fn leave(&self, id: u64) {
        self.strangers.lock().retain(|(other, _)| *other != id);
    }

    /// Waits for a place for an endpoint set.
    fn place(&self, source: IpAddr, deadline: Instant) -> Option<Place<'_>> {
        let mut sets = self.sets.lock();
        while sets.get(&source).is_some_and(|n| *n >= MAX_HALF_OPEN_PER_SOURCE) {
            if self.set_freed.wait_until(&mut sets, deadline).timed_out() {
                return None;
            }
        }
        *sets.entry(source).or_default() += 1;
        Some(Place { half_open: self, source })
    }
}

/// A place for an endpoint set; free again when dropped.
struct Place<'a> {
    half_open: &'a HalfOpen,
    source: IpAddr,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut sets = self.half_open.sets.lock();
        if let Some(n) = sets.get_mut(&self.source) {
            *n -= 1;
            if *n == 0 {
                sets.remove(&self.source);
            }
        }
        self.half_open.set_freed.notify_all();
    }
}

/// What a connection has come to when READY arrives.
struct Half {
    set: EndpointSet,
    theirs: FabricOffer,
    agreed: Agreed,
    stream: TcpStream,
    reader: FrameReader,
}

/// A session may open, with the peer still locked.
struct Accepted<'a> {
    state: MutexGuard<'a, PeerState>,
    proof: Proof,
    name: HeldName,
}

impl Shared {
    /// Accepts what waits at the listener; each connection gets an executor thread.
    pub(crate) fn accept(self: &Arc<Self>) {
        loop {
            let (stream, source) = match self.listener.accept() {
                Ok((stream, addr)) => (stream, addr.ip()),
                Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(e) => return self.pause_listener(&e),
            };
            let shared = Arc::clone(self);
            let spawned = self.threads.spawn("baton-accept", move || {
                if let Err(e) = shared.listen_handshake(source, stream) {
                    shared.counters.handshakes_refused.fetch_add(1, Ordering::Relaxed);
                    tracing::info!("connection from {source} refused: {e}");
                }
            });
            if let Err(e) = spawned {
                self.counters.accepts_dropped.fetch_add(1, Ordering::Relaxed);
                tracing::error!("no thread for a handshake: {e}");
            }
        }
    }

    /// Out of descriptors or memory: the connections wait in the kernel, and asking again at once would only burn the core.
    fn pause_listener(&self, why: &std::io::Error) {
        self.counters.listener_pauses.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(
            "no connection can be accepted for {LISTENER_PAUSE_MS} ms: {why}; raise RLIMIT_NOFILE if this goes on"
        );
        self.unwatch_listener();
        self.listener_resumes_ns.store(self.clock.now().plus_ms(LISTENER_PAUSE_MS).0, Ordering::Relaxed);
    }

    /// Waits for HELLO; a stranger who says nothing is sent away when others come.
    fn greet(
        &self,
        stream: &mut TcpStream,
        reader: &mut FrameReader,
        deadline: Instant,
    ) -> Result<HelloReceived> {
        let (id, crowded) = self.half_open.enter(stream).map_err(|e| err!(Local, "handshake: {e}"))?;
        if crowded {
            self.counters.accepts_dropped.fetch_add(1, Ordering::Relaxed);
        }
        let body = read_frame(stream, reader, deadline, &self.halt);
        let received = body.and_then(|body| {
            told(Listener::new(self.session_key.clone(), self.instance).on_hello(&body), stream, deadline)
        });
        self.half_open.leave(id);
        received
    }

    fn listen_handshake(self: &Arc<Self>, source: IpAddr, stream: TcpStream) -> Result<()> {
        let deadline = Instant::now() + self.scaled(HALF_OPEN_MS);
        stream.set_nonblocking(false).map_err(|e| err!(Local, "handshake: {e}"))?;
        let mut stream = prepare(stream).map_err(|e| err!(Local, "handshake: {e}"))?;
        let mut reader = FrameReader::new();
        let received = self.greet(&mut stream, &mut reader, deadline)?;
        if let Err(e) = self.usable() {
            let refusal = Refusal::new(ErrorCode::Shutdown, e.to_string());
            return refuse(received.refuse(refusal.clone()), refusal, &mut stream, deadline);
        }
        // From here on the other side is known to hold the key; its time starts anew when it gets a place.
        let Some(_place) = self.half_open.place(source, deadline) else {
            let text =
                format!("{MAX_HALF_OPEN_PER_SOURCE} handshakes from {source} are under way; try again");
            let refusal = Refusal::new(ErrorCode::Busy, text);
            return refuse(received.refuse(refusal.clone()), refusal, &mut stream, deadline);
        };
        let deadline = Instant::now() + self.scaled(HALF_OPEN_MS);
        let hello = received.hello.clone();
        if let Some(refusal) = self.hold_off(&hello) {
            return refuse(received.refuse(refusal.clone()), refusal, &mut stream, deadline);
        }
        if let Decision::Refuse(refusal) = self.with_machine(&hello, |machine| machine.on_hello(&hello)) {
            return refuse(received.refuse(refusal.clone()), refusal, &mut stream, deadline);
        }
        if let Err(refusal) = self.look_at_name(&hello) {
            return refuse(received.refuse(refusal.clone()), refusal, &mut stream, deadline);
        }
        let (set, theirs, received) = match self.choose_fabric(received, deadline) {
            Ok(chosen) => chosen,
            Err((received, refusal)) => {
                return refuse(received.refuse(refusal.clone()), refusal, &mut stream, deadline);
            }
        };
        match self.reply(received, &set, &mut stream, &mut reader, deadline, &theirs) {
            Ok((ready, agreed)) => self.ready(ready, Half { set, theirs, agreed, stream, reader }, deadline),
            Err(e) => {
                self.abandon(set);
                Err(e)
            }
        }
    }

    /// Why a peer is to come again later: too much waits for the host. A session's account holds back what it brings, but that
    /// of an instance begins empty and ends with it; so nobody comes in but those who are known and have added nothing.
    fn hold_off(&self, hello: &Hello) -> Option<Refusal> {
        if !self.inbox.is_crowded() {
            return None;
        }
        if self.peers.read().get(&hello.instance).is_some_and(|peer| !peer.has_notes_waiting()) {
            return None;
        }
        self.counters.handshakes_held_off.fetch_add(1, Ordering::Relaxed);
        let text = format!(
            "{} notifications of {} bytes wait for the host, the limit is {MAX_WAITING_BYTES}: it has to take some; try again",
            self.inbox.len(),
            self.inbox.waiting_bytes(),
        );
        Some(Refusal::new(ErrorCode::Busy, text))
    }

    /// The machine of a known peer, or a fresh one that remembers what outlived the last.
    fn with_machine<T>(&self, hello: &Hello, ask: impl FnOnce(&mut Link) -> T) -> T {
        let known = self.peers.read().get(&hello.instance).cloned();
        match known {
            Some(peer) => ask(&mut peer.state.lock().machine),
            None => {
                ask(&mut Link::new(self.instance, hello.instance, self.epochs.lock().recall(&hello.instance)))
            }
        }
    }

    /// The first offered fabric that this side has and that reaches the peer.
    #[allow(clippy::result_large_err)]
    fn choose_fabric(
        &self,
        received: HelloReceived,
        deadline: Instant,
    ) -> std::result::Result<(EndpointSet, FabricOffer, HelloReceived), (HelloReceived, Refusal)> {
        let mut reasons = Vec::new();
        for offer in &received.hello.offers {
            let Some((index, fabric)) =
                self.fabrics.iter().enumerate().find(|(_, fabric)| fabric.name() == offer.fabric)
            else {
                reasons.push(format!("{}: not enabled here", offer.fabric));
                continue;
            };
            let common = self.config.backends.common(offer.backends());
            let made = common
                .map_err(|why| err!(RemoteDisconnect, "{why}"))
                .and_then(|_| {
                    fabric.reach(&offer.address, deadline).map_err(|why| err!(RemoteDisconnect, "{why}"))
                })
                .and_then(|()| self.answer_offer(fabric, index, offer));
            match made {
                Ok(set) => {
                    self.note_fallback(&received.hello.name, &offer.fabric, &reasons);
                    let offer = offer.clone();
                    return Ok((set, offer, received));
                }
                Err(e) => reasons.push(format!("{}: {e}", offer.fabric)),
            }
        }
        let text = format!("no common fabric works: {}", reasons.join("; "));
        Err((received, Refusal::new(ErrorCode::NoFabric, text)))
    }

    /// Endpoints that answer an offer, with the RECVs that both sides agree on.
    fn answer_offer(
        &self,
        fabric: &Arc<dyn Fabric>,
        index: usize,
        offer: &FabricOffer,
    ) -> Result<EndpointSet> {
        let mut set = EndpointSet::create(self, fabric, index, Side::Passive(offer), self.config.backends)?;
        let agreed = negotiate(&set.offer, offer).map_err(|e| err!(Protocol, "{e}"));
        match agreed.and_then(|agreed| set.post_recvs(&agreed)) {
            Ok(()) => Ok(set),
            Err(e) => {
                self.abandon(set);
                Err(e)
            }
        }
    }

    /// Says once per session that a better fabric was passed over.
    fn note_fallback(&self, name: &str, chosen: &str, reasons: &[String]) {
        if !reasons.is_empty() {
            self.counters.fallbacks.fetch_add(1, Ordering::Relaxed);
            tracing::warn!("{name} is reached by {chosen}; passed over: {}", reasons.join("; "));
        }
    }

    fn reply(
        &self,
        received: HelloReceived,
        set: &EndpointSet,
        stream: &mut TcpStream,
        reader: &mut FrameReader,
        deadline: Instant,
        theirs: &FabricOffer,
    ) -> Result<(ReadyReceived, Agreed)> {
        let hello = received.hello.clone();
        let fresh = SessionId(random_u64().max(1));
        let answer = self
            .with_machine(&hello, |machine| machine.answer(&hello, fresh))
            .map_err(|e| err!(Limit, "{e}"))?;
        let protocol = hello
            .protocol
            .newest_common(baton_core::wire::ProtocolRange::OURS)
            .unwrap_or(baton_core::wire::PROTOCOL_VERSION);
        let reply = Reply {
            protocol,
            instance: self.instance,
            name: self.config.agent_name.clone(),
            attempt: hello.attempt,
            session: answer.session,
            last_epoch: answer.last_epoch,
            epoch: answer.epoch,
            progress: if self.config.progress_thread { Progress::Thread } else { Progress::Caller },
            nonce: random_bytes(),
            offer: set.offer.clone(),
            features: Vec::new(),
        };
        let (waiting, frame): (AwaitReady, Vec<u8>) = told(received.reply(reply), stream, deadline)?;
        let agreed = waiting.agreed.clone();
        send_frame(stream, &frame, deadline)?;
        let body = read_frame(stream, reader, deadline, &self.halt)?;
        let ready = told(waiting.on_ready(&body), stream, deadline)?;
        if let Err(e) = self.halt.connecting(set, || set.connect(theirs, &agreed, deadline)) {
            let refusal = Refusal::new(ErrorCode::NoFabric, e.to_string());
            return refuse(ready.refuse(refusal.clone()), refusal, stream, deadline)
                .map(|()| unreachable!("refuse is an error"));
        }
        Ok((ready, agreed))
    }

    /// READY is genuine: asks the peer's machine, drains an old epoch if that is the answer, and opens the session.
    fn ready(self: &Arc<Self>, ready: ReadyReceived, mut half: Half, deadline: Instant) -> Result<()> {
        let refused = match self.peer_for(ready.hello.instance, &ready.hello.name) {
            Err(e) => Refusal::new(ErrorCode::Limit, e.to_string()),
            Ok(peer) => match self.verdict(&peer, &ready) {
                Ok(accepted) => return self.accept_session(&peer, accepted, ready, half, deadline),
                Err(refusal) => {
                    self.forget_if_unused(&peer);
                    refusal
                }
            },
        };
        self.abandon(half.set);
        refuse(ready.refuse(refused.clone()), refused, &mut half.stream, deadline)
    }

    /// `Ok` with the peer still locked: the session may open.
    fn verdict<'a>(
        self: &Arc<Self>,
        peer: &'a Arc<Peer>,
        ready: &ReadyReceived,
    ) -> std::result::Result<Accepted<'a>, Refusal> {
        let mut state = peer.state.lock();
        let drain_deadline = Instant::now() + self.scaled(DRAIN_WAIT_MS);
        loop {
            if let Err(e) = self.usable() {
                return Err(Refusal::new(ErrorCode::Shutdown, e.to_string()));
            }
            if state.forgotten {
                return Err(Refusal::new(
                    ErrorCode::Busy,
                    "this side is forgetting the peer at this moment; try again",
                ));
            }
            let proof = match &state.info {
                None => Proof::Unknown,
                Some(info) if ready.identity.verify(&info.key) => Proof::Verified,
                Some(_) => Proof::Wrong,
            };
            let epoch = ready.ready.epoch;
            match state.machine.on_ready(&ready.hello, epoch, proof, |token| ready.proves_resume(token)) {
                Decision::Accept | Decision::AcceptAndYield => {
                    if let Some(name) = self.claim_name(peer, &mut state, &ready.hello.name)? {
                        return Ok(Accepted { state, proof, name });
                    }
                }
                Decision::Refuse(refusal) => return Err(refusal),
                Decision::Proceed => {
                    return Err(Refusal::new(ErrorCode::Internal, "READY was answered like HELLO"));
                }
                Decision::DrainThenAccept(old) => {
                    if matches!(&state.conn, Conn::Open(channel) if channel.epoch == old) {
                        let why = "the peer lost this epoch and connects anew".into();
                        self.end_epoch(peer, &mut state, EndReason::PeerFenced(why));
                    }
                    if peer.changed.wait_until(&mut state, drain_deadline).timed_out() {
                        return Err(Refusal::new(
                            ErrorCode::Busy,
                            "the old epoch is still being drained; try again",
                        ));
                    }
                }
            }
        }
    }

    fn accept_session(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        accepted: Accepted<'_>,
        ready: ReadyReceived,
        half: Half,
        deadline: Instant,
    ) -> Result<()> {
        let Accepted { mut state, proof, name } = accepted;
        let identity = Some(ready.identity);
        let token = ResumeToken::new(random_bytes());
        let accepted = ready.accept(token).map_err(|e| err!(Protocol, "ACCEPT: {e}")).and_then(
            |(established, frame)| {
                let answer = half.stream.try_clone().map_err(|e| err!(Local, "handshake: {e}"))?;
                if state.machine.accepted(&established) {
                    Ok((established, frame, answer))
                } else {
                    Err(err!(Protocol, "another session with {} came first", peer.name()))
                }
            },
        );
        let (established, frame, mut answer) = match accepted {
            Ok(accepted) => accepted,
            Err(e) => {
                drop(state);
                self.abandon(half.set);
                return Err(e);
            }
        };
        let Half { set, theirs, agreed, stream, reader } = half;
        // ACCEPT goes out before the lifeline carries anything else. The peer may send as soon as it has it: the routes
        // stand before, and whoever finds completions waits for this lock.
        self.routes[set.fabric_index].add(set.endpoints(), peer);
        let sent = send_frame(&mut answer, &frame, deadline);
        let verified = proof == Proof::Verified;
        let made = Made { set, theirs, agreed, established, stream, reader, identity, verified };
        self.open_session(peer, state, made, name, Vec::new());
        sent
    }

    /// The peer object of an instance, made if there is none.
    pub(crate) fn peer_for(&self, instance: baton_core::Instance, name: &str) -> Result<Arc<Peer>> {
        if let Some(peer) = self.peers.read().get(&instance) {
            return Ok(Arc::clone(peer));
        }
        let mut peers = self.peers.write();
        if let Some(peer) = peers.get(&instance) {
            return Ok(Arc::clone(peer));
        }
        if peers.len() >= crate::shared::MAX_PEERS {
            return Err(err!(
                Limit,
                "{} peers are known; the limit is {}",
                peers.len(),
                crate::shared::MAX_PEERS
            ));
        }
        let stone = self.epochs.lock().recall(&instance);
        let peer = Arc::new(Peer::new(Link::new(self.instance, instance, stone), name));
        peers.insert(instance, Arc::clone(&peer));
        Ok(peer)
    }
}

/// Passes a step's result on; a failure is told to the other side first.
fn told<T>(step: std::result::Result<T, Failure>, stream: &mut TcpStream, deadline: Instant) -> Result<T> {
    step.map_err(|failure| {
        // If the other side does not get it, it sees the connection end.
        let _told = failure.send.map(|frame| send_frame(stream, &frame, deadline));
        err!(Protocol, "{}", failure.cause)
    })
}

fn refuse(frame: Option<Vec<u8>>, refusal: Refusal, stream: &mut TcpStream, deadline: Instant) -> Result<()> {
    if let Some(frame) = frame {
        send_frame(stream, &frame, deadline)?;
    }
    Err(err!(RemoteDisconnect, "{refusal}"))
}
