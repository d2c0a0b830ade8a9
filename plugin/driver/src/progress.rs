//! Moving work on: completions to sessions, sessions to fabrics.

use crate::hand_over::HandOver;
use crate::peer::{Peer, PeerState};
use crate::shared::Shared;
use baton_fabric::{Completion, CompletionKind, EndpointId};
use parking_lot::RwLock;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Completions taken from a fabric at once.
pub(crate) const POLL_BATCH: usize = 64;

/// Of polls of the host that find something, every so manieth is noted.
const NOTE_EVERY: u32 = 16;

/// Which peer an endpoint belongs to; one table per fabric, indexed by the endpoint's slot.
#[derive(Default)]
pub(crate) struct Routes {
    slots: RwLock<Vec<Option<Route>>>,
    /// Counts changes.
    version: AtomicU64,
}

#[derive(Clone)]
struct Route {
    endpoint: EndpointId,
    /// Its place among the endpoints of its channel.
    nth: usize,
    peer: Arc<Peer>,
}

impl Routes {
    /// The endpoints of one channel, in its order.
    pub fn add(&self, endpoints: impl Iterator<Item = EndpointId>, peer: &Arc<Peer>) {
        let mut slots = self.slots.write();
        for (nth, endpoint) in endpoints.enumerate() {
            let at = endpoint.slot as usize;
            if slots.len() <= at {
                slots.resize(at + 1, None);
            }
            slots[at] = Some(Route { endpoint, nth, peer: Arc::clone(peer) });
        }
        self.version.fetch_add(1, Ordering::Release);
    }

    pub fn remove(&self, endpoint: EndpointId) {
        if let Some(slot) = self.slots.write().get_mut(endpoint.slot as usize)
            && slot.as_ref().is_some_and(|route| route.endpoint == endpoint)
        {
            *slot = None;
            self.version.fetch_add(1, Ordering::Release);
        }
    }

    pub fn clear(&self) {
        self.slots.write().clear();
        self.version.fetch_add(1, Ordering::Release);
    }

    fn find(&self, endpoint: EndpointId) -> Option<Route> {
        let slots = self.slots.read();
        slots.get(endpoint.slot as usize)?.as_ref().filter(|route| route.endpoint == endpoint).cloned()
    }
}

/// Endpoints whose peers a poller remembers.
const RECENT: usize = 16;

/// What whoever polls needs: room for completions, and the routes of the endpoints that completed lately.
pub(crate) struct Poller {
    buffer: [Completion; POLL_BATCH],
    recent: Recent,
    /// Polls of the host since it was last noted when.
    unnoted: u32,
    /// Whose acknowledgements are due once nothing more arrives.
    answers_due: Vec<Arc<Peer>>,
}

/// Spares the lock of the routes and a reference to the peer. An endpoint never changes its peer, so what is remembered is never wrong,
/// but must not be kept for long when a route is gone.
#[derive(Default)]
struct Recent {
    /// By the last digits of the slot, with the index of the fabric.
    routes: [Option<(usize, Route)>; RECENT],
    /// Of all fabrics' routes together, when they were looked up.
    version: u64,
}

impl Recent {
    fn find(&mut self, routes: &Routes, fabric_index: usize, endpoint: EndpointId) -> Option<&Route> {
        let entry = &mut self.routes[endpoint.slot as usize % RECENT];
        let known =
            entry.as_ref().is_some_and(|(index, route)| *index == fabric_index && route.endpoint == endpoint);
        if !known {
            *entry = Some((fabric_index, routes.find(endpoint)?));
        }
        entry.as_ref().map(|(_, route)| route)
    }
}

impl Poller {
    pub fn new() -> Poller {
        Poller {
            buffer: [Completion::EMPTY; POLL_BATCH],
            recent: Recent::default(),
            unnoted: 0,
            answers_due: Vec::new(),
        }
    }

    /// Lets go of all peers.
    pub fn forget(&mut self) {
        self.recent = Recent::default();
        self.answers_due.clear();
    }
}

impl Shared {
    /// Polls every fabric once and lets the sessions react. Returns at once if another thread is at it. Never blocks.
    pub(crate) fn poll(self: &Arc<Self>) -> bool {
        let Some(mut poller) = self.poller.try_lock() else { return false };
        self.poll_locked(&mut poller, &mut None)
    }

    /// As `poll`, but waits for its turn: what was complete before the call has been handled after it.
    pub(crate) fn poll_all(self: &Arc<Self>) {
        let mut poller = self.poller.lock();
        while self.poll_locked(&mut poller, &mut None) {}
    }

    /// `host`: it asks for notifications.
    fn poll_locked(self: &Arc<Self>, poller: &mut Poller, host: &mut Option<HandOver<'_>>) -> bool {
        let mut moved = false;
        let version = self.routes.iter().map(|routes| routes.version.load(Ordering::Acquire)).sum();
        if poller.recent.version != version {
            poller.recent = Recent { version, ..Recent::default() };
        }
        for (index, fabric) in self.fabrics.iter().enumerate() {
            let n = fabric.poll(&mut poller.buffer);
            if n > 0 {
                moved = true;
                self.dispatch(index, n, poller, host);
            }
        }
        if self.credit_waiters_count.load(Ordering::Relaxed) > 0 {
            self.poll_credit();
        }
        if !moved {
            self.flush_answers(&mut poller.answers_due);
        }
        moved
    }

    /// The first `n` completions of the buffer are of that fabric.
    fn dispatch(
        self: &Arc<Self>,
        fabric_index: usize,
        n: usize,
        poller: &mut Poller,
        host: &mut Option<HandOver<'_>>,
    ) {
        let Poller { buffer, recent, answers_due, .. } = poller;
        // Sessions only want to know that the peer lives; the two-sided path keeps deadlines of milliseconds.
        let (lately, mut exactly) = (self.clock.lately(), None);
        let mut rest = &buffer[..n];
        while let Some(first) = rest.first() {
            let run = rest.iter().position(|c| c.endpoint != first.endpoint).unwrap_or(rest.len());
            let (now_run, later) = rest.split_at(run);
            rest = later;
            let Some(Route { nth, peer, .. }) =
                recent.find(&self.routes[fabric_index], fabric_index, first.endpoint)
            else {
                self.counters.orphan_completions.fetch_add(run as u64, Ordering::Relaxed);
                continue;
            };
            // What a peer sent shows that it lives. Own work does not: a NIC, or the kernel, does it without the peer's process.
            if now_run.iter().any(|completion| completion.kind != CompletionKind::Send) {
                peer.last_received_ns.store(lately.0, Ordering::Relaxed);
            }
            let mut state = peer.state.lock();
            let answers = state.conn.channel().is_some_and(|channel| channel.two_sided.is_some());
            let now = if answers { *exactly.get_or_insert_with(|| self.clock.now()) } else { lately };
            state.on_completions(now, fabric_index, *nth, now_run);
            self.pump_for(now, peer, &mut state, host);
            drop(state);
            // The lock of the peer's state orders this look behind the last flush that may not have seen what was received.
            if answers && !peer.credit_dirty.load(Ordering::Acquire) {
                self.mark_credit_dirty(peer);
            }
            if answers && !peer.answers_due.swap(true, Ordering::AcqRel) {
                answers_due.push(Arc::clone(peer));
            }
        }
    }

    // A credit word arrives without a completion, so whoever waits for one is looked at in every poll.
    fn poll_credit(self: &Arc<Self>) {
        // Those who go on waiting join the queue again, so one round is as long as the queue is now.
        for _ in 0..self.credit_waiters_count.load(Ordering::Relaxed) {
            let next = {
                let mut waiters = self.credit_waiters.lock();
                let next = waiters.pop_front();
                self.credit_waiters_count.store(waiters.len(), Ordering::Relaxed);
                next
            };
            let Some(peer) = next else { return };
            peer.waits_for_credit.store(false, Ordering::Relaxed);
            let now = self.clock.now();
            let mut state = peer.state.lock();
            if let Some(channel) = state.conn.channel() {
                channel.poll_credit(now);
            }
            self.pump_at(now, &peer, &mut state);
        }
    }

    /// Puts a peer on the list of those whose credit page is re-read by the poller.
    pub(crate) fn note_credit_waiter(&self, peer: &Arc<Peer>) {
        if !peer.waits_for_credit.swap(true, Ordering::Relaxed) {
            let mut waiters = self.credit_waiters.lock();
            waiters.push_back(Arc::clone(peer));
            self.credit_waiters_count.store(waiters.len(), Ordering::Relaxed);
        }
    }

    fn mark_credit_dirty(&self, peer: &Arc<Peer>) {
        if !peer.credit_dirty.swap(true, Ordering::AcqRel) {
            self.credit_dirty.lock().push(Arc::clone(peer));
        }
    }

    // Two-sided peers wait for acknowledgements, which go out together once nothing more arrives. Those of bare notifications,
    // which nobody waits for, have time until the engine idles: each would cost as much as the notification itself.
    fn flush_answers(self: &Arc<Self>, answers_due: &mut Vec<Arc<Peer>>) {
        while let Some(peer) = answers_due.pop() {
            peer.answers_due.store(false, Ordering::Release);
            let mut state = peer.state.lock();
            let two = state.conn.channel().and_then(|channel| channel.two_sided.as_mut());
            if let Some(two) = two.filter(|two| two.exec.channel.owes_answers()) {
                two.exec.channel.flush();
                self.pump(&peer, &mut state);
            }
        }
    }

    /// Announces what two-sided peers may wait for: the rule before the engine sleeps (PROTOCOL §6).
    pub(crate) fn flush_credit(self: &Arc<Self>) {
        loop {
            let next = self.credit_dirty.lock().pop();
            let Some(peer) = next else { return };
            peer.credit_dirty.store(false, Ordering::Release);
            let mut state = peer.state.lock();
            self.flush_credit_to(&peer, &mut state);
        }
    }

    /// As above while the host moves work on itself, which announces what is worthwhile: a peer whose lock is held has its turn later.
    pub(crate) fn flush_credit_beside_host(self: &Arc<Self>) {
        let mut nth = 0;
        loop {
            // Only this thread takes any off the list.
            let next = self.credit_dirty.lock().get(nth).cloned();
            let Some(peer) = next else { return };
            let Some(mut state) = peer.lock_unless_held() else {
                nth += 1;
                continue;
            };
            self.credit_dirty.lock().swap_remove(nth);
            peer.credit_dirty.store(false, Ordering::Release);
            self.flush_credit_to(&peer, &mut state);
        }
    }

    fn flush_credit_to(self: &Arc<Self>, peer: &Arc<Peer>, state: &mut PeerState) {
        if let Some(channel) = state.conn.channel() {
            channel.flush_credit();
        }
        self.pump(peer, state);
    }

    /// The host itself polls, so no engine thread needs to be woken for now.
    pub(crate) fn caller_polls(self: &Arc<Self>) -> bool {
        self.caller_polls_for(&mut None)
    }

    /// As above, and what arrives may go straight to the host.
    pub(crate) fn caller_polls_for(self: &Arc<Self>, host: &mut Option<HandOver<'_>>) -> bool {
        self.host_calls.look();
        let Some(mut poller) = self.poller.try_lock() else {
            self.host_calls.looked(self.clock.now());
            return false;
        };
        let moved = self.poll_locked(&mut poller, host);
        // Looking at the clock is a good part of what a completion costs. A poll that found nothing has the time for it, of the others
        // now and then one.
        poller.unnoted = if moved { poller.unnoted + 1 } else { NOTE_EVERY };
        if poller.unnoted >= NOTE_EVERY {
            poller.unnoted = 0;
            drop(poller);
            self.host_calls.looked(self.clock.now());
        }
        moved
    }
}
