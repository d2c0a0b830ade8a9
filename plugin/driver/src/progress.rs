//! Moving work on: completions to sessions, sessions to fabrics.

use crate::peer::Peer;
use crate::shared::Shared;
use baton_fabric::{Completion, EndpointId};
use parking_lot::RwLock;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Completions taken from a fabric at once.
pub(crate) const POLL_BATCH: usize = 64;

/// Which peer an endpoint belongs to; one table per fabric, indexed by the endpoint's slot.
#[derive(Default)]
pub(crate) struct Routes {
    slots: RwLock<Vec<Option<Route>>>,
}

#[derive(Clone)]
struct Route {
    generation: u32,
    peer: Arc<Peer>,
}

impl Routes {
    pub fn add(&self, endpoint: EndpointId, peer: &Arc<Peer>) {
        let mut slots = self.slots.write();
        let at = endpoint.slot as usize;
        if slots.len() <= at {
            slots.resize(at + 1, None);
        }
        slots[at] = Some(Route { generation: endpoint.generation, peer: Arc::clone(peer) });
    }

    pub fn remove(&self, endpoint: EndpointId) {
        if let Some(slot) = self.slots.write().get_mut(endpoint.slot as usize)
            && slot.as_ref().is_some_and(|route| route.generation == endpoint.generation)
        {
            *slot = None;
        }
    }

    pub fn clear(&self) {
        self.slots.write().clear();
    }

    fn find(&self, endpoint: EndpointId) -> Option<Arc<Peer>> {
        match self.slots.read().get(endpoint.slot as usize) {
            Some(Some(route)) if route.generation == endpoint.generation => Some(Arc::clone(&route.peer)),
            _ => None,
        }
    }
}

impl Shared {
    /// Polls every fabric once and lets the sessions react. Returns at once if another thread is at it. Never blocks.
    pub(crate) fn poll(self: &Arc<Self>) -> bool {
        let Some(mut buffer) = self.poller.try_lock() else { return false };
        self.poll_locked(&mut buffer)
    }

    /// As `poll`, but waits for its turn: what was complete before the call has been handled after it.
    pub(crate) fn poll_all(self: &Arc<Self>) {
        let mut buffer = self.poller.lock();
        while self.poll_locked(&mut buffer) {}
    }

    fn poll_locked(self: &Arc<Self>, buffer: &mut [Completion; POLL_BATCH]) -> bool {
        let mut moved = false;
        for (index, fabric) in self.fabrics.iter().enumerate() {
            let n = fabric.poll(buffer);
            self.dispatch(index, &buffer[..n]);
            moved |= n > 0;
        }
        if self.credit_waiters_count.load(Ordering::Relaxed) > 0 {
            self.poll_credit();
        }
        if !moved {
            self.flush_answers();
        }
        moved
    }

    fn dispatch(self: &Arc<Self>, fabric_index: usize, completions: &[Completion]) {
        let mut rest = completions;
        while let Some(first) = rest.first() {
            let run = rest.iter().take_while(|c| c.endpoint == first.endpoint).count();
            let (now_run, later) = rest.split_at(run);
            rest = later;
            let Some(peer) = self.routes[fabric_index].find(first.endpoint) else {
                self.counters.orphan_completions.fetch_add(run as u64, Ordering::Relaxed);
                continue;
            };
            let now = self.clock.now();
            peer.last_completion_ns.store(now.0, Ordering::Relaxed);
            let mut state = peer.state.lock();
            state.on_completions(now, fabric_index, now_run);
            self.pump(&peer, &mut state);
            let answers = state.conn.channel().is_some_and(|channel| channel.two_sided.is_some());
            drop(state);
            self.mark_credit_dirty(&peer);
            if answers && !peer.answers_due.swap(true, Ordering::AcqRel) {
                self.answers_due.lock().push(peer);
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
            let mut state = peer.state.lock();
            if let Some(channel) = state.conn.channel() {
                let now = self.clock.now();
                channel.poll_credit(now);
            }
            self.pump(&peer, &mut state);
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

    // Two-sided peers wait for acknowledgements, which go out together once nothing more arrives.
    fn flush_answers(self: &Arc<Self>) {
        loop {
            let next = self.answers_due.lock().pop();
            let Some(peer) = next else { return };
            peer.answers_due.store(false, Ordering::Release);
            let mut state = peer.state.lock();
            if let Some(two) = state.conn.channel().and_then(|channel| channel.two_sided.as_mut()) {
                two.exec.channel.flush();
                self.pump(&peer, &mut state);
            }
        }
    }

    /// Announces the credit that peers may need: the rule before the engine sleeps (PROTOCOL §5).
    pub(crate) fn flush_credit(self: &Arc<Self>) {
        loop {
            let next = self.credit_dirty.lock().pop();
            let Some(peer) = next else { return };
            peer.credit_dirty.store(false, Ordering::Release);
            let mut state = peer.state.lock();
            if let Some(channel) = state.conn.channel() {
                channel.flush_credit();
            }
            self.pump(&peer, &mut state);
        }
    }

    /// Notes that the host itself is polling, so no engine thread needs to be woken for now.
    pub(crate) fn caller_polls(self: &Arc<Self>) -> bool {
        self.last_caller_poll_ns.store(self.clock.now().0, Ordering::Relaxed);
        self.poll()
    }

    /// Whether the host polled within the last `within_ns`.
    pub(crate) fn is_polled_by_caller(&self, within_ns: u64) -> bool {
        let last = self.last_caller_poll_ns.load(Ordering::Relaxed);
        last != 0 && self.clock.now().0.saturating_sub(last) < within_ns
    }
}
