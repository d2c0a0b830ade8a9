//! Connecting: the initiator's side of the handshake, and how a session opens.

use crate::dial::{Dialer, read_frame, send_frame};
use crate::endpoints::{EndpointSet, Side};
use crate::err;
use crate::error::{Code, Error, Result};
use crate::names::HeldName;
use crate::peer::{Peer, PeerState, PendingAttempt};
use crate::shared::Shared;
use baton_core::handshake::{Begin, Established, HandshakeError, IdentityProof, Initiator};
use baton_core::wire::{
    Agreed, Backends, ConnInfo, ErrorCode, FabricOffer, FrameReader, Hello, Progress, ProtocolRange, Refusal,
    ResumeToken, parse_candidate,
};
use baton_core::{Nanos, SessionId};
use parking_lot::MutexGuard;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Longest connect attempt (times the timeout scale), candidates and handshake together.
pub(crate) const CONNECT_MS: u64 = 5000;

/// What an attempt starts from.
struct Start {
    attempt: u64,
    last_epoch: u32,
    session: Option<SessionId>,
    resume_token: Option<ResumeToken>,
}

/// A handshake that came to its end on the wire, not yet a session.
pub(crate) struct Made {
    pub set: EndpointSet,
    pub theirs: FabricOffer,
    pub agreed: Agreed,
    pub established: Established,
    pub stream: TcpStream,
    pub reader: FrameReader,
    pub identity: Option<IdentityProof>,
    /// The peer is known to be who its connection information says.
    pub verified: bool,
}

/// What one attempt works with.
struct Attempt<'a> {
    peer: &'a Arc<Peer>,
    info: &'a ConnInfo,
    /// What both sides have.
    common: Backends,
    start: &'a Start,
    deadline: Instant,
}

/// What came out of the four messages.
struct Said {
    /// Index of the fabric that both sides use.
    chosen: usize,
    theirs: FabricOffer,
    agreed: Agreed,
    established: Established,
    reader: FrameReader,
}

/// Why an attempt ended, for the machine and for the host.
struct Failed {
    cause: Box<HandshakeError>,
    error: Error,
    /// This fabric does not reach the peer; another attempt without it may.
    exclude: Option<usize>,
    /// Whatever address of the peer is tried, it would be the same.
    everywhere: bool,
}

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        let cause = HandshakeError::RefusedUnverified(Refusal::new(ErrorCode::Internal, error.text.clone()));
        Failed { cause: Box::new(cause), error, exclude: None, everywhere: false }
    }
}

impl From<HandshakeError> for Failed {
    fn from(cause: HandshakeError) -> Failed {
        let code = match &cause {
            HandshakeError::BadAuthenticator(_) => Code::Auth,
            HandshakeError::Message(_)
            | HandshakeError::Frame(_)
            | HandshakeError::Unexpected { .. }
            | HandshakeError::Mismatch { .. } => Code::Protocol,
            HandshakeError::EpochsUsedUp(_) => Code::Limit,
            HandshakeError::Refused(_)
            | HandshakeError::RefusedUnverified(_)
            | HandshakeError::WrongInstance { .. } => Code::RemoteDisconnect,
        };
        Failed {
            error: Error::new(code, cause.to_string()),
            cause: Box::new(cause),
            exclude: None,
            everywhere: false,
        }
    }
}

impl Failed {
    /// The peer only asked for patience; what waits goes on waiting.
    fn is_transient(&self) -> bool {
        matches!(&*self.cause, HandshakeError::Refused(refusal)
            if matches!(refusal.code, ErrorCode::GlareWait | ErrorCode::AlreadyOpen | ErrorCode::NameInUse | ErrorCode::Busy))
    }
}

impl Shared {
    /// Starts an attempt if outgoing work waits and none is under way.
    pub(crate) fn connect_if_wanted(self: &Arc<Self>, peer: &Arc<Peer>, state: &mut PeerState) {
        if state.wants_connection() && peer.bound.load(Ordering::Acquire) && self.usable().is_ok() {
            self.start_connect(peer, state);
        }
    }

    /// Asks the machine for a connection; an executor thread does the work.
    pub(crate) fn start_connect(self: &Arc<Self>, peer: &Arc<Peer>, state: &mut PeerState) {
        let now = self.clock.now();
        state.retry_at = None;
        let attempt = crate::shared::random_u64();
        match state.machine.begin(now, attempt) {
            Begin::Start { last_epoch, session, resume_token } => {
                let start = Start { attempt, last_epoch, session, resume_token };
                let (shared, target) = (Arc::clone(self), Arc::clone(peer));
                if let Err(e) = self.threads.spawn("baton-connect", move || shared.connect(&target, start)) {
                    let failed = Failed::from(err!(Local, "no thread for a connect attempt: {e}"));
                    self.attempt_failed(peer, state, attempt, &failed);
                }
            }
            Begin::WaitUntil(at) => {
                state.retry_at = Some(at);
                self.wake_service();
            }
            Begin::Attach | Begin::WaitForDrain | Begin::Open { .. } => {}
        }
    }

    /// When a transfer that finds no session from now on is given up.
    pub(crate) fn connect_deadline(&self) -> Nanos {
        self.clock.now().plus_ms(self.scaled(CONNECT_MS).as_millis() as u64)
    }

    fn connect(self: &Arc<Self>, peer: &Arc<Peer>, start: Start) {
        let attempt = start.attempt;
        let outcome = self.attempt(peer, start);
        let mut state = peer.state.lock();
        let name = outcome.as_ref().ok().map(|made| self.claim_made(peer, &mut state, made));
        let stash = state.pending.take_if(|pending| pending.attempt == attempt).map(|pending| pending.stash);
        match (outcome, name) {
            // The end of the engine has already been at this peer's sessions.
            (Ok(made), Some(Ok(name)))
                if self.usable().is_ok() && state.machine.connected(attempt, &made.established) =>
            {
                self.open_session(peer, state, made, name, stash.unwrap_or_default());
            }
            (Ok(made), name) => {
                if let Some(Err(refused)) = name {
                    self.attempt_failed(peer, &mut state, attempt, &Failed::from(refused));
                }
                drop(state);
                self.abandon(made.set);
            }
            (Err(failed), _) => self.attempt_failed(peer, &mut state, attempt, &failed),
        }
    }

    /// Takes the peer's name, which the host gave it, from whoever has it. Nothing else of the peer has been looked at yet.
    fn claim_made(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        state: &mut MutexGuard<'_, PeerState>,
        made: &Made,
    ) -> Result<HeldName> {
        loop {
            self.usable()?;
            match self.claim_name(peer, state, &made.established.peer_name) {
                Ok(Some(name)) => return Ok(name),
                Ok(None) => {}
                Err(refusal) => return Err(err!(RemoteDisconnect, "{refusal}")),
            }
        }
    }

    fn attempt_failed(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        state: &mut PeerState,
        attempt: u64,
        failed: &Failed,
    ) {
        let now = self.clock.now();
        let error = Error::new(
            failed.error.code,
            format!("connecting to {} ({}): {}", peer.name(), peer.instance, failed.error),
        );
        let retry_at = state.machine.failed(now, attempt, &failed.cause, crate::shared::random_u64() as u32);
        let Some(retry_at) = retry_at else { return tracing::debug!("a void attempt ended: {error}") };
        self.counters.connects_failed.fetch_add(1, Ordering::Relaxed);
        state.told_to_wait = failed.is_transient();
        let somebody_waits = now < state.waiting_until || state.callers > 0;
        let patient = self.is_stopping() || state.told_to_wait && somebody_waits;
        if patient {
            tracing::debug!("{error}");
        } else {
            tracing::warn!("{error}");
            state.fail_waiting(&error);
        }
        state.last_error = Some(error);
        state.retry_at = state.wants_connection().then_some(retry_at);
        peer.changed.notify_all();
        self.wake_service();
    }

    /// One attempt: every candidate until one answers as the right instance.
    fn attempt(self: &Arc<Self>, peer: &Arc<Peer>, start: Start) -> std::result::Result<Made, Failed> {
        let info = peer.state.lock().info.clone();
        let info = info.ok_or_else(|| err!(NotFound, "its connection information is not loaded"))?;
        let common = self.common_backends(&info)?;
        let deadline = Instant::now() + self.scaled(CONNECT_MS);
        // Fabrics that do not reach the peer, and why.
        let mut passed = Vec::new();
        let mut candidates: Vec<_> =
            info.candidates.iter().filter_map(|text| parse_candidate(text)).collect();
        // On the same host loopback is sure to work, whatever the interfaces' addresses are.
        let same_host = info.host == self.host;
        candidates.sort_by_key(|candidate| candidate.addr.ip().is_loopback() != same_host);
        let mut dialer = Dialer::new(&candidates, &self.halt);
        let attempt = Attempt { peer, info: &info, common, start: &start, deadline };
        loop {
            let (addr, stream) = dialer.next(deadline)?;
            match self.handshake(&attempt, stream, &mut passed) {
                Ok(made) => return Ok(made),
                Err(Failed { exclude: Some(fabric), error, .. }) => {
                    self.halt.check()?;
                    self.counters.fallbacks.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!(
                        "{} is tried without fabric {}: {error}",
                        peer.name(),
                        self.fabrics[fabric].name()
                    );
                    passed.push((fabric, error.to_string()));
                    dialer = Dialer::new(&candidates, &self.halt);
                }
                // Not the engine that was meant: "every host's" address, or a port that somebody else got.
                Err(failed)
                    if !failed.everywhere
                        && matches!(
                            *failed.cause,
                            HandshakeError::BadAuthenticator(_)
                                | HandshakeError::WrongInstance { .. }
                                | HandshakeError::RefusedUnverified(_)
                        ) =>
                {
                    dialer.reject(addr, failed.error);
                }
                Err(failed) => return Err(failed),
            }
        }
    }

    fn handshake(
        self: &Arc<Self>,
        attempt: &Attempt<'_>,
        mut stream: TcpStream,
        passed: &mut Vec<(usize, String)>,
    ) -> std::result::Result<Made, Failed> {
        let Attempt { info, common, start, .. } = *attempt;
        let mut sets =
            self.offer(info, common, passed).map_err(|e| Failed { everywhere: true, ..Failed::from(e) })?;
        let hello = Hello {
            protocol: ProtocolRange::OURS,
            instance: self.instance,
            to_instance: info.instance,
            name: self.config.agent_name.clone(),
            attempt: start.attempt,
            session: start.session,
            last_epoch: start.last_epoch,
            progress: if self.config.progress_thread { Progress::Thread } else { Progress::Caller },
            nonce: crate::shared::random_bytes(),
            offers: sets.iter().map(|set| set.offer.clone()).collect(),
            features: Vec::new(),
        };
        let outcome = self.exchange(attempt, &mut stream, hello, &mut sets);
        let chosen = outcome.as_ref().ok().map(|said| sets.swap_remove(said.chosen));
        sets.into_iter().for_each(|unused| self.abandon(unused));
        let Said { theirs, agreed, established, reader, .. } = outcome?;
        let mut set = chosen.ok_or_else(|| err!(Local, "the chosen fabric's endpoints are missing"))?;
        set.keep(self, agreed.backends());
        Ok(Made { set, theirs, agreed, established, stream, reader, identity: None, verified: true })
    }

    /// Without any the peer is not even dialled.
    fn common_backends(&self, info: &ConnInfo) -> Result<Backends> {
        let theirs = Backends::from_words(&info.backends);
        self.config.backends.common(theirs).map_err(|e| err!(RemoteDisconnect, "{e}"))
    }

    /// Endpoints on every fabric that may reach the peer, in order of preference. One that cannot make them is passed over.
    fn offer(
        &self,
        info: &ConnInfo,
        common: Backends,
        passed: &mut Vec<(usize, String)>,
    ) -> Result<Vec<EndpointSet>> {
        let mut sets = Vec::new();
        for (index, fabric) in self.fabrics.iter().enumerate() {
            let name = fabric.name();
            let speaks = info.fabrics.iter().any(|theirs| theirs == name);
            let near_enough = name != "local" || info.host == self.host;
            if !speaks || !near_enough || passed.iter().any(|(other, _)| *other == index) {
                continue;
            }
            let side = Side::Active(info.addresses.get(name));
            match EndpointSet::create(self, fabric, index, side, common) {
                Ok(set) => sets.push(set),
                Err(e) => {
                    self.counters.fallbacks.fetch_add(1, Ordering::Relaxed);
                    tracing::warn!("{} is tried without fabric {name}: {e}", info.name);
                    passed.push((index, e.to_string()));
                }
            }
        }
        if sets.is_empty() {
            return Err(self.nothing_to_offer(info, passed));
        }
        Ok(sets)
    }

    fn nothing_to_offer(&self, info: &ConnInfo, passed: &[(usize, String)]) -> Error {
        if !passed.is_empty() {
            let reasons = passed.iter().map(|(index, why)| format!("{}: {why}", self.fabrics[*index].name()));
            let reasons: Vec<_> = reasons.collect();
            return err!(RemoteDisconnect, "no fabric works: {}", reasons.join("; "));
        }
        let ours: Vec<_> = self.fabrics.iter().map(|fabric| fabric.name()).collect();
        err!(
            RemoteDisconnect,
            "no common fabric: here {}, there {}{}",
            ours.join(" "),
            info.fabrics.join(" "),
            if info.host == self.host { "" } else { " (another host: local does not reach it)" }
        )
    }

    fn exchange(
        self: &Arc<Self>,
        attempt: &Attempt<'_>,
        stream: &mut TcpStream,
        hello: Hello,
        sets: &mut [EndpointSet],
    ) -> std::result::Result<Said, Failed> {
        let Attempt { peer, info, start, deadline, .. } = *attempt;
        let mut reader = FrameReader::new();
        let (await_reply, frame) = Initiator::start(info.key.clone(), hello).map_err(HandshakeError::from)?;
        send_frame(stream, &frame, deadline)?;
        let body = read_frame(stream, &mut reader, deadline, &self.halt)?;
        let reply = await_reply.on_reply(&body).map_err(|failure| {
            // The peer gets to know why; if it does not, it sees the connection end.
            let _told = failure.send.map(|frame| send_frame(stream, &frame, deadline));
            failure.cause
        })?;
        if reply.reply.name != info.name {
            let (expected, got) = (info.name.clone(), reply.reply.name.clone());
            let text = format!("REPLY.name: {got:?} instead of {expected:?}, as connection information says");
            let _told =
                reply.refuse(ErrorCode::BadIdentity, text).map(|frame| send_frame(stream, &frame, deadline));
            return Err(HandshakeError::Mismatch { message: "REPLY", field: "name", expected, got }.into());
        }
        let chosen = reply.chosen;
        if chosen > 0 {
            // Why is known to the listener, which logs it.
            self.counters.fallbacks.fetch_add(1, Ordering::Relaxed);
            let (name, better) = (peer.name(), &sets[0].offer.fabric);
            tracing::warn!(
                "{name} chose fabric {} over {better}; its log says why",
                reply.reply.offer.fabric
            );
        }
        let set = &mut sets[chosen];
        let theirs = reply.reply.offer.clone();
        let agreed = reply.agreed.clone();
        let connected = set
            .fabric
            .reach(&theirs.address, deadline)
            .map_err(|why| err!(RemoteDisconnect, "fabric {}: {why}", theirs.fabric))
            .and_then(|()| set.post_recvs(&agreed))
            .and_then(|()| {
                self.await_accept(peer, start.attempt, set);
                self.halt.connecting(set, || set.connect(&theirs, &agreed, deadline))
            });
        if let Err(e) = connected {
            if let Some(frame) = reply.refuse(ErrorCode::NoFabric, e.to_string()) {
                let _told = send_frame(stream, &frame, deadline);
            }
            return Err(Failed { exclude: Some(set.fabric_index), ..Failed::from(e) });
        }
        let (await_accept, frame) =
            reply.ready(&self.session_key, start.resume_token.as_ref()).map_err(HandshakeError::from)?;
        send_frame(stream, &frame, deadline)?;
        let body = read_frame(stream, &mut reader, deadline, &self.halt)?;
        let established = await_accept.on_accept(&body).map_err(|cause| {
            // The peer could not connect its endpoints of this fabric to ours.
            let exclude = match &cause {
                HandshakeError::Refused(refusal) if refusal.code == ErrorCode::NoFabric => {
                    Some(set.fabric_index)
                }
                _ => None,
            };
            Failed { exclude, ..Failed::from(cause) }
        })?;
        Ok(Said { chosen, theirs, agreed, established, reader })
    }

    // From READY on the peer may send; what arrives before ACCEPT is kept.
    fn await_accept(&self, peer: &Arc<Peer>, attempt: u64, set: &EndpointSet) {
        let mut state = peer.state.lock();
        state.pending = Some(PendingAttempt {
            attempt,
            fabric_index: set.fabric_index,
            endpoints: set.endpoints().collect(),
            stash: Vec::new(),
        });
        self.routes[set.fabric_index].add(set.endpoints(), peer);
    }

    /// Takes the endpoints of a void or failed attempt down.
    pub(crate) fn abandon(&self, set: EndpointSet) {
        set.endpoints().for_each(|endpoint| self.routes[set.fabric_index].remove(endpoint));
        set.discard(self);
    }
}
