//! One peer instance: its session of the current epoch and what waits for one.
//!
//! Lock order: poller → `Peer::state` → leaves (inbox, a transfer's small locks, a lifeline's output). Nobody takes the poller
//! while holding a peer.

use crate::channel::{Channel, OneSided, Path};
use crate::epoch::xfer_error;
use crate::err;
use crate::error::{Error, Result};
use crate::hand_over::HandOver;
use crate::inbox::{HostEvent, Notification};
use crate::memory::EpochMemory;
use crate::revoke::Draining;
use crate::shared::Shared;
use crate::transfer::Xfer;
use crate::two_sided::Rest;
use baton_core::handshake;
use baton_core::notify::{Carry, ID_BYTES, MAX_MESSAGE_BYTES, Tell};
use baton_core::peer::{Action, EndReason, Event, SessionLimits, SubmitError};
use baton_core::two_sided::report::TwoEnd;
use baton_core::wire::{ConnInfo, LifelineFrame};
use baton_core::{Instance, Nanos};
use baton_fabric::{Completion, EndpointId, Fabric, RecvSlot};
use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Turns of the service thread in which a peer's duties may be put off because its lock is held.
const MOST_LEFT_ALONE: u32 = 16;

/// A peer, keyed by its instance and never by its name.
pub struct Peer {
    pub(crate) instance: Instance,
    name: RwLock<Arc<str>>,
    /// The host has this instance's connection information under its current name.
    pub(crate) bound: AtomicBool,
    pub(crate) state: Mutex<PeerState>,
    /// Signalled when `PeerState::conn` changes; for `connect` with a timeout.
    pub(crate) changed: Condvar,
    /// The two-sided path has something to tell before the engine sleeps.
    pub(crate) credit_dirty: AtomicBool,
    /// How often in a row one of the engine's threads left it to whoever held its lock.
    left_alone: AtomicU32,
    /// The two-sided path has something to acknowledge once nothing more arrives.
    pub(crate) answers_due: AtomicBool,
    /// The session waits for the peer's credit page.
    pub(crate) waits_for_credit: AtomicBool,
    /// Last time something was received from it, for the lifeline's silence rule.
    pub(crate) last_received_ns: AtomicU64,
    /// There is a session, perhaps a dying one.
    pub(crate) connected: AtomicBool,
    /// Generation of the channel opened last, 0 for none: tells which of two instances connected later.
    pub(crate) opened_at: AtomicU64,
    /// Notifications of it that wait for the host.
    pub(crate) notes_waiting: AtomicU64,
}

/// What is protected by a peer's lock.
pub(crate) struct PeerState {
    pub conn: Conn,
    /// The peer's name again, for those who hold the lock anyway.
    name: Arc<str>,
    /// Who may connect when: attempts, back-off, glare.
    pub machine: handshake::Link,
    pub pending: Option<PendingAttempt>,
    pub info: Option<Arc<ConnInfo>>,
    /// What the epochs before left behind, and notifications for a peer that is not connected.
    pub carry: Carry,
    /// The same of the two-sided path.
    pub rest: Rest,
    /// Without a session by then, its notifications are given up.
    pub rest_until: Nanos,
    /// Of a peer that the host has not loaded: until then it may come back and resume its session; 0 when it may not.
    pub lingers_until: Nanos,
    /// Posted transfers by token.
    pub inflight: Vec<Option<Arc<Xfer>>>,
    free_tokens: Vec<usize>,
    /// Transfers that wait for a connection, each with its message inside.
    pub waiting: VecDeque<Arc<Xfer>>,
    /// What waits is failed at that time at the latest; 0 when nothing waits.
    pub waiting_until: Nanos,
    /// Calls of the host that wait for a connection.
    pub callers: u32,
    /// Next time to ask the machine for a connection.
    pub retry_at: Option<Nanos>,
    /// Error of the last failed attempt.
    pub last_error: Option<Error>,
    /// The peer asked for patience with it: those who wait go on waiting.
    pub told_to_wait: bool,
    pub epochs_ended: u64,
    /// It was said why SENDs take the place of immediates.
    pub send_mode_told: bool,
    /// REVOKEs that are not acknowledged yet.
    pub revokes: Vec<Draining>,
    /// Taken out of the engine's table: whoever still holds it must look the instance up again.
    pub forgotten: bool,
}

/// The channel of a peer.
pub(crate) enum Conn {
    /// There is none.
    None,
    /// In use.
    Open(Box<Channel>),
    /// Its epoch is being ended; completions still count.
    Ending(Box<Channel>),
}

/// Endpoints of an own attempt between READY and ACCEPT: the peer may already send, so completions are kept until the session exists.
pub(crate) struct PendingAttempt {
    pub attempt: u64,
    pub fabric_index: usize,
    pub endpoints: Vec<EndpointId>,
    pub stash: Vec<Completion>,
}

impl Conn {
    pub fn channel(&mut self) -> Option<&mut Channel> {
        match self {
            Conn::Open(channel) | Conn::Ending(channel) => Some(channel),
            Conn::None => None,
        }
    }

    pub fn word(&self) -> &'static str {
        match self {
            Conn::None => "none",
            Conn::Open(_) => "open",
            Conn::Ending(_) => "ending",
        }
    }
}

impl Peer {
    pub(crate) fn new(machine: handshake::Link, name: &str) -> Peer {
        let name: Arc<str> = Arc::from(name);
        Peer {
            instance: machine.peer(),
            name: RwLock::new(Arc::clone(&name)),
            bound: AtomicBool::new(false),
            state: Mutex::new(PeerState {
                conn: Conn::None,
                name,
                machine,
                pending: None,
                info: None,
                carry: Carry::default(),
                rest: Rest::default(),
                rest_until: Nanos(0),
                lingers_until: Nanos(0),
                inflight: Vec::with_capacity(64),
                free_tokens: Vec::with_capacity(64),
                waiting: VecDeque::with_capacity(16),
                callers: 0,
                waiting_until: Nanos(0),
                retry_at: None,
                last_error: None,
                told_to_wait: false,
                epochs_ended: 0,
                send_mode_told: false,
                revokes: Vec::new(),
                forgotten: false,
            }),
            changed: Condvar::new(),
            credit_dirty: AtomicBool::new(false),
            left_alone: AtomicU32::new(0),
            answers_due: AtomicBool::new(false),
            waits_for_credit: AtomicBool::new(false),
            last_received_ns: AtomicU64::new(0),
            connected: AtomicBool::new(false),
            opened_at: AtomicU64::new(0),
            notes_waiting: AtomicU64::new(0),
        }
    }

    /// Agent name of this instance.
    pub fn name(&self) -> Arc<str> {
        Arc::clone(&self.name.read())
    }

    /// Whether the host has yet to take something of it; a hint without a lock.
    pub(crate) fn has_notes_waiting(&self) -> bool {
        self.notes_waiting.load(Ordering::Relaxed) > 0
    }

    /// Its lock, for duties of the engine's own threads that may wait: a host that holds it is not made to wake a waiter, nor to hand
    /// the lock over in the middle of its posts. `None`: try again later, which is refused [`MOST_LEFT_ALONE`] times in a row at most.
    pub(crate) fn lock_unless_held(&self) -> Option<MutexGuard<'_, PeerState>> {
        let state = self.state.try_lock();
        if state.is_some() || self.left_alone.fetch_add(1, Ordering::Relaxed) >= MOST_LEFT_ALONE {
            self.left_alone.store(0, Ordering::Relaxed);
            return Some(state.unwrap_or_else(|| self.state.lock()));
        }
        None
    }

    pub(crate) fn rename(&self, state: &mut PeerState, name: &str) {
        if *state.name != *name {
            state.name = Arc::from(name);
            *self.name.write() = Arc::clone(&state.name);
        }
    }
}

impl Peer {
    /// When the session wants to look at the clock, or queued work passes a deadline.
    pub(crate) fn next_timeout(&self) -> Option<Nanos> {
        let mut state = self.state.lock();
        let queued = state.carry.next_deadline();
        let session = state.conn.channel().and_then(|channel| channel.next_timeout());
        let waiting = state.has_waiting_transfers().then_some(state.waiting_until);
        let rest = state.rest_is_late(Nanos(u64::MAX)).then_some(state.rest_until);
        let lingers = (state.lingers_until != Nanos(0)).then_some(state.lingers_until);
        queued
            .into_iter()
            .chain(session)
            .chain(waiting)
            .chain(rest)
            .chain(lingers)
            .chain(state.retry_at)
            .min()
    }
}

impl PeerState {
    /// The channel if new outgoing work may use it.
    pub fn outgoing(&mut self) -> Option<&mut Channel> {
        match &mut self.conn {
            Conn::Open(channel) if channel.verified => Some(channel),
            _ => None,
        }
    }

    /// What is left of the two-sided path has waited for a session long enough.
    pub fn rest_is_late(&self, now: Nanos) -> bool {
        matches!(self.conn, Conn::None) && self.rest.waits() && self.rest_until <= now
    }

    /// Transfers wait for a session, or for theirs to be resumed.
    pub fn has_waiting_transfers(&self) -> bool {
        !self.waiting.is_empty() || matches!(self.conn, Conn::None) && self.rest.has_transfers()
    }

    fn take_token(&mut self, xfer: &Arc<Xfer>) -> usize {
        match self.free_tokens.pop() {
            Some(token) => {
                self.inflight[token] = Some(Arc::clone(xfer));
                token
            }
            None => {
                self.inflight.push(Some(Arc::clone(xfer)));
                self.inflight.len() - 1
            }
        }
    }

    pub fn give_token(&mut self, token: usize) -> Option<Arc<Xfer>> {
        let xfer = self.inflight.get_mut(token)?.take()?;
        self.free_tokens.push(token);
        Some(xfer)
    }

    pub fn token_of(&self, xfer: &Arc<Xfer>) -> Option<usize> {
        self.inflight.iter().position(|slot| slot.as_ref().is_some_and(|other| Arc::ptr_eq(other, xfer)))
    }

    /// Whether somebody wants a connection, for outgoing work or because the host asked for one.
    pub fn wants_connection(&self) -> bool {
        self.callers > 0 || !self.waiting.is_empty() || !self.carry.waiting().is_empty() || self.rest.waits()
    }

    /// Takes completions of one endpoint, most likely the `nth` of its channel, to whoever owns it: the session, or an attempt that waits for ACCEPT.
    pub fn on_completions(
        &mut self,
        now: Nanos,
        fabric_index: usize,
        nth: usize,
        completions: &[Completion],
    ) {
        let Some(endpoint) = completions.first().map(|c| c.endpoint) else { return };
        if let Some(channel) = self.conn.channel()
            && channel.fabric_index == fabric_index
            && channel.on_completions(now, nth, endpoint, completions)
        {
            return;
        }
        if let Some(pending) = &mut self.pending
            && pending.fabric_index == fabric_index
            && pending.endpoints.contains(&endpoint)
        {
            pending.stash.extend_from_slice(completions);
        }
    }

    /// Hands a begun transfer to the open session. An error leaves nothing behind but is not yet published to the transfer.
    pub fn submit(&mut self, now: Nanos, xfer: &Arc<Xfer>, tell: Tell<'_>) -> Result<()> {
        // Under the peer's lock: a withdrawal that came before finds it here, one that comes after finds it in flight.
        xfer.check_remotes()?;
        let token = self.take_token(xfer);
        let outcome = match self.outgoing() {
            None => Err(err!(RemoteDisconnect, "the session ended before the transfer could be posted")),
            Some(channel) => channel.submit(now, token as u64, xfer, tell),
        };
        if outcome.is_err() {
            self.give_token(token);
        }
        outcome
    }

    /// Sends or, without a session, keeps a standalone notification.
    pub fn notify(&mut self, now: Nanos, message: &[u8], deadline: Nanos) -> Result<()> {
        if let Some(channel) = self.outgoing() {
            return channel.notify(now, message);
        }
        self.carry.queue(message, deadline, MAX_MESSAGE_BYTES as usize).map(drop).map_err(submit_error)
    }

    /// The host took that many messages or ids, of that many bytes together. `true`: there is something to say to the peer.
    pub fn popped(&mut self, path: Path, count: u64, bytes: u64) -> bool {
        let channel = self.conn.channel();
        match path {
            Path::OneSided => match channel.and_then(|channel| channel.one_sided.as_mut()) {
                Some(one) => return one.session.on_popped(count, bytes),
                None => self.carry.on_popped(count, bytes),
            },
            Path::TwoSided => match channel.and_then(|channel| channel.two_sided.as_mut()) {
                Some(two) => {
                    two.exec.channel.on_popped(count, bytes);
                    return true;
                }
                None => self.rest.on_popped(count, bytes),
            },
        }
        false
    }

    /// Whether a transfer with such a message may wait for a connection: by the rules of the session that will take it.
    pub fn admit_waiting(&self, len: usize) -> Result<()> {
        check_message(len)?;
        if len <= SHORT_MESSAGE {
            return Ok(());
        }
        let waiting = self
            .waiting
            .iter()
            .map(|xfer| xfer.told.lock().as_ref().map_or(0, |told| told.tell().body_len() as u64));
        let (waiting, limit) = (waiting.sum::<u64>(), SessionLimits::default().max_waiting_message_bytes);
        if waiting > 0 && waiting + len as u64 > limit {
            return Err(submit_error(SubmitError::TooManyMessageBytes { waiting, len, limit }));
        }
        Ok(())
    }

    /// Acknowledges the REVOKEs whose transfers have ended.
    pub fn acknowledge_revokes(&mut self) {
        if !self.revokes.is_empty() {
            self.acknowledge_drained();
        }
    }

    #[cold]
    fn acknowledge_drained(&mut self) {
        let lifeline = self.conn.channel().and_then(|channel| channel.lifeline.clone());
        let inflight = &self.inflight;
        self.revokes.retain(|revoke| {
            let drained = revoke.is_over(inflight);
            if let (true, Some(lifeline)) = (drained, &lifeline) {
                lifeline.send(&LifelineFrame::RevokeAck { id: revoke.id });
            }
            !drained
        });
    }

    /// Hands the transfers that waited for a connection to the session that just opened.
    pub fn release_waiting(&mut self, now: Nanos) {
        while self.outgoing().is_some() {
            let Some(xfer) = self.waiting.pop_front() else { return };
            let told = xfer.told.lock().take().unwrap_or_default();
            if let Err(e) = self.submit(now, &xfer, told.tell()) {
                xfer.finish(Err(e));
            }
        }
    }

    /// Fails the transfers that wait for a connection or for their session to be resumed; notifications stay until their deadline.
    pub fn fail_waiting(&mut self, error: &Error) {
        if matches!(self.conn, Conn::None) {
            for (token, _) in self.rest.fail_transfers(&TwoEnd::Closed(error.text.clone())) {
                self.give_token(token as usize).into_iter().for_each(|xfer| xfer.finish(Err(error.clone())));
            }
        }
        for xfer in self.waiting.drain(..) {
            xfer.told.lock().take();
            xfer.finish(Err(error.clone()));
        }
    }

    /// The carry for a new epoch. Unless both sides resume the same session, message numbers start anew.
    pub fn take_carry(&mut self, resumed: bool) -> Carry {
        let mut old = std::mem::take(&mut self.carry);
        old.set_deadlines(Nanos(u64::MAX));
        if resumed { old } else { old.restart() }
    }
}

/// Refuses a message that no session would take.
pub(crate) fn check_message(len: usize) -> Result<()> {
    let limit = MAX_MESSAGE_BYTES as usize;
    if len > limit { Err(submit_error(SubmitError::MessageTooLong { len, limit })) } else { Ok(()) }
}

/// Messages up to this length are not counted while they wait for a connection: what counts is how many requests the host has.
const SHORT_MESSAGE: usize = 8192;

/// Says why the session took something not.
pub(crate) fn submit_error(e: SubmitError) -> Error {
    let code = match &e {
        SubmitError::MessageTooLong { .. }
        | SubmitError::TooManyTransfers { .. }
        | SubmitError::TooManyMessageBytes { .. }
        | SubmitError::TooManyNotifications { .. } => crate::error::Code::Limit,
        SubmitError::LaneMap { .. } => crate::error::Code::Local,
        SubmitError::Ended => crate::error::Code::RemoteDisconnect,
    };
    Error::new(code, e.to_string())
}

impl Shared {
    /// [`Shared::pump_at`] the current time.
    pub(crate) fn pump(self: &Arc<Self>, peer: &Arc<Peer>, state: &mut PeerState) {
        self.pump_at(self.clock.now(), peer, state);
    }

    /// Executes what the session wants and publishes what it says, until it is content. Call after every stimulus, with the peer
    /// locked. `now` may be as old as that stimulus: the clock costs more than all else where little is to be done.
    pub(crate) fn pump_at(self: &Arc<Self>, now: Nanos, peer: &Arc<Peer>, state: &mut PeerState) {
        self.pump_for(now, peer, state, &mut None);
    }

    /// [`Shared::pump_at`] while the host may be asking for notifications.
    pub(crate) fn pump_for(
        self: &Arc<Self>,
        now: Nanos,
        peer: &Arc<Peer>,
        state: &mut PeerState,
        host: &mut Option<HandOver<'_>>,
    ) {
        let ending = matches!(state.conn, Conn::Ending(_));
        let Some(channel) = state.conn.channel() else { return };
        let mut failed = None;
        if let Some(one) = &mut channel.one_sided
            && !ending
        {
            self.drive_one_sided(now, peer, &*channel.fabric, one, &mut failed);
        }
        if let Some(two) = &mut channel.two_sided {
            // Also while it is ending: copies of what arrived before still count.
            two.exec.drive(now);
            self.bounces.tend(channel.fabric_index, now);
        }
        if channel.waits_for_credit() {
            self.note_credit_waiter(peer);
        }
        self.take_one_sided_events(peer, state, host, &mut failed);
        if state.conn.channel().is_some_and(|channel| channel.two_sided.is_some()) {
            self.take_two_sided_events(peer, state, &mut failed);
        }
        state.acknowledge_revokes();
        if failed.is_none() && host.as_mut().is_some_and(|host| std::mem::take(&mut host.owes_credit)) {
            return self.pump_for(now, peer, state, host);
        }
        if let Some(reason) = failed
            && !ending
        {
            self.end_epoch(peer, state, reason);
        }
    }

    fn take_one_sided_events(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        state: &mut PeerState,
        host: &mut Option<HandOver<'_>>,
        failed: &mut Option<EndReason>,
    ) {
        while let Some(one) = state.conn.channel().and_then(|channel| channel.one_sided.as_mut()) {
            // The two that come with every transfer are dealt with where they lie.
            match one.session.peek_event() {
                None => return,
                Some(Event::XferDone { token, result: Ok(()) }) => {
                    let token = *token as usize;
                    drop(one.session.next_event());
                    if let Some(xfer) = state.give_token(token) {
                        xfer.finish(Ok(()));
                    }
                }
                Some(Event::Delivered { message }) if self.hands_over(host, &state.name, message) => {
                    let owes_credit = one.session.on_popped(1, message.len() as u64);
                    if let Some(Event::Delivered { message }) = one.session.next_event() {
                        one.session.reuse(message);
                    }
                    host.iter_mut().for_each(|host| host.owes_credit |= owes_credit);
                }
                Some(_) => {
                    let event = one.session.next_event().expect("just looked at");
                    self.on_event(peer, state, event, failed);
                }
            }
        }
    }

    #[inline(never)]
    fn take_two_sided_events(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        state: &mut PeerState,
        failed: &mut Option<EndReason>,
    ) {
        while let Some(two) = state.conn.channel().and_then(|channel| channel.two_sided.as_mut()) {
            let Some(event) = two.exec.channel.next_event() else { break };
            self.on_two_sided_event(peer, state, event, failed);
        }
    }

    /// Executes what the session wants. `failed`: why it has to end, if it has.
    fn drive_one_sided(
        &self,
        now: Nanos,
        peer: &Peer,
        fabric: &dyn Fabric,
        one: &mut OneSided,
        failed: &mut Option<EndReason>,
    ) {
        while let Some(action) = one.session.next_action(now, &*one.memory) {
            match action {
                Action::Post { endpoint, batch } => {
                    if let Err(e) = fabric.post(endpoint, &batch) {
                        tracing::warn!("posting to {}: {e}", peer.name());
                        one.session.on_post_failed(endpoint, e.taken);
                    }
                }
                Action::Recv { endpoint, first, count } => {
                    let index = one.endpoints.iter().position(|other| *other == endpoint);
                    let index = index.expect("a session names its own endpoints");
                    if let Err(e) = post_recvs(fabric, endpoint, &one.memory, index, first, count) {
                        *failed = Some(EndReason::PeerGone(format!("RECVs could not be reposted: {e}")));
                        return;
                    }
                }
            }
        }
    }

    fn on_event(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        state: &mut PeerState,
        event: Event,
        failed: &mut Option<EndReason>,
    ) {
        match event {
            Event::XferDone { token, result } => {
                if let Some(xfer) = state.give_token(token as usize) {
                    xfer.finish(result.map_err(|failure| self.name_peer(peer, xfer_error(&failure))));
                }
            }
            Event::Delivered { message } => {
                let (name, peer) = (Arc::clone(&state.name), Some(Arc::clone(peer)));
                self.inbox.push(Notification { name, message, peer, path: Path::OneSided });
                self.tell_hook(&state.name);
            }
            Event::Landed { id } => {
                if !self.land(Some((peer, Path::OneSided)), id) {
                    state.popped(Path::OneSided, 1, ID_BYTES as u64);
                }
            }
            Event::EndEpoch { reason } => {
                failed.get_or_insert(reason);
            }
            Event::NotifyExpired { seq } => {
                self.counters.notifications_expired.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(
                    "notification {} to {} was not acknowledged before its deadline and is lost",
                    seq.0,
                    peer.name()
                );
            }
        }
    }

    /// Queues a notification for the host and tells whoever wants to know.
    pub(crate) fn deliver(&self, notification: Notification) {
        let name = Arc::clone(&notification.name);
        self.inbox.push(notification);
        self.tell_hook(&name);
    }

    /// Comes behind the push: who sets a hook in between finds the notification in the inbox.
    fn tell_hook(&self, name: &Arc<str>) {
        if self.hook.wants_notifications()
            && self.hook.raise(HostEvent::Notification { name: Arc::clone(name) })
        {
            self.wake_service();
        }
    }
}

/// Posts `count` RECVs of an endpoint, the `index`-th of its session, that come behind the first `first`.
pub(crate) fn post_recvs(
    fabric: &dyn Fabric,
    endpoint: EndpointId,
    memory: &EpochMemory,
    index: usize,
    first: u64,
    count: u32,
) -> Result<()> {
    let mut slots = [RecvSlot::default(); 64];
    let mut done = 0;
    while done < count {
        let n = (count - done).min(slots.len() as u32);
        for (slot, nth) in slots.iter_mut().zip(first + u64::from(done)..).take(n as usize) {
            *slot = memory.recv(index, nth);
        }
        fabric.post_recv(endpoint, &slots[..n as usize])?;
        done += n;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_somebody_works_on_is_left_alone_for_some_turns_and_then_waited_for() {
        let link = handshake::Link::new(Instance([1; 16]), Instance([2; 16]), Default::default());
        let peer = Arc::new(Peer::new(link, "peer"));
        drop(peer.lock_unless_held().expect("nobody holds it"));
        let held = peer.state.lock();
        for turn in 0..MOST_LEFT_ALONE {
            assert!(peer.lock_unless_held().is_none(), "{turn}");
        }
        let waits = Arc::clone(&peer);
        let waiter = std::thread::spawn(move || waits.lock_unless_held().is_some());
        drop(held);
        assert!(waiter.join().expect("no panic"), "the turn after those has the lock");
        let held = peer.state.lock();
        assert!(peer.lock_unless_held().is_none(), "and they are counted anew");
        drop(held);
    }
}
