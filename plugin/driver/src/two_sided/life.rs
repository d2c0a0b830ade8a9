//! What happens to a peer's two-sided path: its events, its epoch's end, and what is left of it without a session.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use baton_core::Nanos;
use baton_core::peer::EndReason;
use baton_core::two_sided::channel::{Abandoned, Durable};
use baton_core::two_sided::report::{TwoEnd, TwoEvent, XferFailure};
use baton_core::two_sided::setup::TwoLimits;

use super::path::{TwoSided, failure_code, message_of, unseal};
use crate::channel::Path;
use crate::epoch::Ended;
use crate::error::Error;
use crate::inbox::Notification;
use crate::peer::{Peer, PeerState};
use crate::shared::Shared;
use baton_core::notify::ID_BYTES;
use baton_core::peer::Violation;

impl Shared {
    /// Lets the engine's threads copy for a path, if there are any.
    pub(crate) fn lend_copiers(self: &Arc<Self>, peer: &Arc<Peer>, path: &mut TwoSided) {
        if self.config.copy_threads == 0 {
            return;
        }
        let (shared, peer) = (Arc::downgrade(self), Arc::downgrade(peer));
        let wake = move || {
            if let (Some(shared), Some(peer)) = (shared.upgrade(), peer.upgrade()) {
                let mut state = peer.state.lock();
                shared.pump(&peer, &mut state);
            }
        };
        path.exec.set_copiers(Arc::clone(&self.copiers), Box::new(wake));
    }

    /// Carries out what the channel of a path told.
    pub(crate) fn on_two_sided_event(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        state: &mut PeerState,
        event: TwoEvent,
        failed: &mut Option<EndReason>,
    ) {
        match event {
            TwoEvent::XferDone { token, result } => {
                if let Some(xfer) = state.give_token(token as usize) {
                    xfer.finish(result.map_err(|why| self.name_peer(peer, xfer_error(&why))));
                }
            }
            TwoEvent::NoteDone { sent: true, .. } => {}
            TwoEvent::NoteDone { token, sent: false } => {
                self.counters.notifications_expired.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(
                    "notification {token} to {} was not sent before its deadline and is lost",
                    peer.name()
                );
            }
            TwoEvent::Delivered { message } => {
                if let Err(violation) = self.on_body(peer, state, message) {
                    failed.get_or_insert(EndReason::Violation(violation));
                }
            }
            // Told by this side: what ends the epoch already does.
            TwoEvent::EndEpoch { reason: TwoEnd::Closed(_) } => {}
            TwoEvent::EndEpoch { reason } => {
                failed.get_or_insert(reason.into());
            }
        }
    }

    fn on_body(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        state: &mut PeerState,
        bytes: Vec<u8>,
    ) -> Result<(), Violation> {
        let (len, flags) = (bytes.len(), bytes.first().copied().unwrap_or(0));
        let (id, message) = unseal(bytes).ok_or(Violation::Body { flags, len })?.open();
        // The host takes id and message one by one, so they stand in the back-pressure account one by one.
        let parts = [id.map(|_| ID_BYTES), message.as_ref().map(Vec::len)];
        let (count, total) = parts.iter().flatten().fold((0, 0), |(n, sum), len| (n + 1, sum + *len as u64));
        if let Some(two) = state.conn.channel().and_then(|channel| channel.two_sided.as_mut()) {
            two.exec.channel.on_opened(len, count, total);
        }
        if let Some(id) = id
            && !self.land(Some((peer, Path::TwoSided)), id)
        {
            state.popped(Path::TwoSided, 1, ID_BYTES as u64);
        }
        if let Some(message) = message {
            self.deliver(Notification::of(peer, Path::TwoSided, message));
        }
        Ok(())
    }

    /// The endpoints are gone, all events were taken: counts what is left and keeps what a resumed session goes on with.
    pub(crate) fn close_two_sided(
        &self,
        state: &mut PeerState,
        fabric_index: usize,
        path: TwoSided,
        reason: &EndReason,
        ended: &mut Ended,
    ) {
        let closed = path.close(self.clock.now());
        self.bounces.leave(fabric_index, closed.borrower);
        // Slots came back: somebody may wait for them.
        self.bounces.wake();
        for (token, result) in closed.done {
            if let Some(xfer) = state.give_token(token as usize) {
                ended.transfers.push((xfer, result.map_err(|why| xfer_error(&why))));
            }
        }
        state.rest.keep(closed.durable);
        if !may_resume(reason) {
            let why = TwoEnd::Closed(reason.to_string());
            ended.transfers.extend(state.abandon_rest(&why));
        }
    }
}

impl Shared {
    /// Nobody came back in time: the session will not be resumed, and its notifications are lost.
    pub(crate) fn give_up_rest(&self, peer: &Peer, state: &mut PeerState) {
        state.machine.forget_session();
        let why = TwoEnd::Closed("no session in time".into());
        let Some(Abandoned { transfers, notes }) = state.rest.abandon(&why) else { return };
        for (token, why) in transfers {
            if let Some(xfer) = state.give_token(token as usize) {
                xfer.finish(Err(self.name_peer(peer, xfer_error(&why))));
            }
        }
        if !notes.is_empty() {
            self.counters.notifications_expired.fetch_add(notes.len() as u64, Ordering::Relaxed);
            tracing::warn!(
                "{} notifications to {} found no session before their deadline and are lost",
                notes.len(),
                peer.name()
            );
        }
    }
}

/// Whether the peer may come back and go on.
pub(crate) fn may_resume(reason: &EndReason) -> bool {
    !matches!(
        reason,
        EndReason::Violation(_) | EndReason::Disconnected | EndReason::Shutdown | EndReason::PeerRestarted
    )
}

fn xfer_error(failure: &XferFailure) -> Error {
    Error::new(failure_code(failure), failure.to_string())
}

impl PeerState {
    /// What an epoch begins with: what the one before left if both sides resume the same session, else anew. The second part
    /// came to its end instead.
    pub(crate) fn take_rest(&mut self, resumed: bool, limits: TwoLimits) -> (Durable, Vec<Outcome>) {
        let fits = |rest: &Durable| resumed && rest.check(&limits).is_ok();
        match self.rest.take_if(fits) {
            Some(durable) => (durable, Vec::new()),
            None => {
                let why = TwoEnd::Closed("the session was not resumed".into());
                (Durable::new(limits), self.abandon_rest(&why))
            }
        }
    }

    /// The session will not be resumed: its transfers have failed, its notifications wait for another.
    pub(crate) fn abandon_rest(&mut self, why: &TwoEnd) -> Vec<Outcome> {
        let Some(Abandoned { transfers, notes }) = self.rest.abandon(why) else { return Vec::new() };
        let messages: Vec<_> = notes.into_iter().filter_map(|(_, body)| message_of(body)).collect();
        self.carry.put_back(messages, Nanos(u64::MAX));
        let ended = transfers
            .into_iter()
            .filter_map(|(token, why)| Some((self.give_token(token as usize)?, Err(xfer_error(&why)))));
        ended.collect()
    }
}

/// A transfer and how it ended.
pub(crate) type Outcome = (Arc<crate::transfer::Xfer>, crate::error::Result<()>);
