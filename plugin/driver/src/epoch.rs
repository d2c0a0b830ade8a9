//! The end of an epoch, in the order of PROTOCOL §8: an error that reaches the host means that no memory is touched any more.

use crate::channel::{Channel, OneSided};
use crate::error::{Code, Error, Result};
use crate::inbox::HostEvent;
use crate::peer::{Conn, Peer, PeerState};
use crate::shared::Shared;
use crate::transfer::Xfer;
use baton_core::peer::{EndReason, XferFailure};
use baton_core::wire::LifelineFrame;
use baton_fabric::{EndpointId, Fabric};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// How long a fenced epoch may take to become quiet (times the timeout scale).
pub(crate) const DRAIN_MS: u64 = 1000;
/// Transfers of the two-sided path wait so long for their session to be resumed, from when it began to end: what a stopped peer costs until
/// then and this together are within the seven seconds after which its transfers have failed (times the timeout scale).
const RESUME_MS: u64 = 1500;
/// And so long at least, however long the end took.
const RESUME_LEAST_MS: u64 = 500;
/// Between two looks at a draining epoch when its fabric makes no event of it.
const DRAIN_LOOK_NS: i64 = 1_000_000;

/// What the janitor works with while the channel stays in the peer's state for late completions.
struct Fenced {
    fabric: Arc<dyn Fabric>,
    endpoints: Vec<EndpointId>,
}

/// What came to its end with an epoch; told once no lock is held.
#[derive(Default)]
pub(crate) struct Ended {
    pub transfers: Vec<(Arc<Xfer>, Result<()>)>,
    pub partial_seqs: Vec<u64>,
}

impl Shared {
    /// Begins the end: nothing is posted from here on, a janitor does the rest. Harmless when it has begun already.
    pub(crate) fn end_epoch(self: &Arc<Self>, peer: &Arc<Peer>, state: &mut PeerState, reason: EndReason) {
        let mut channel = match std::mem::replace(&mut state.conn, Conn::None) {
            Conn::Open(channel) => channel,
            Conn::Ending(mut channel) => {
                if channel.reason.as_ref().is_some_and(EndReason::is_consequence) {
                    channel.reason = Some(reason);
                }
                return state.conn = Conn::Ending(channel);
            }
            Conn::None => return,
        };
        if matches!(reason, EndReason::PeerGone(_)) {
            state.machine.lifeline_ended(channel.epoch);
        }
        if let EndReason::Violation(violation) = &reason {
            *self.counters.violations.lock().entry(violation.cause()).or_default() += 1;
        }
        state.machine.draining(channel.epoch);
        channel.held_name = None;
        self.log_end(peer, &channel, &reason);
        self.begin_ending(peer, state, channel, reason);
    }

    fn log_end(&self, peer: &Peer, channel: &Channel, reason: &EndReason) {
        let (name, epoch) = (peer.name(), channel.epoch.0);
        match reason {
            EndReason::Disconnected
            | EndReason::Shutdown
            | EndReason::PeerFenced(_)
            | EndReason::PeerClosed(_) => {
                tracing::info!("session with {name} ({}), epoch {epoch}, ends: {reason}", peer.instance);
            }
            _ => tracing::warn!("session with {name} ({}), epoch {epoch}, ends: {reason}", peer.instance),
        }
    }

    /// Puts a channel into the ending state and hands it to a janitor.
    pub(crate) fn begin_ending(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        state: &mut PeerState,
        mut channel: Box<Channel>,
        reason: EndReason,
    ) {
        if let Some(lifeline) = &channel.lifeline {
            let frame = match &reason {
                EndReason::Disconnected | EndReason::Shutdown => {
                    LifelineFrame::SessionClose { reason: reason.to_string() }
                }
                EndReason::Violation(violation) => LifelineFrame::Violation { text: violation.to_string() },
                other => LifelineFrame::Fence { epoch: channel.epoch, reason: other.to_string() },
            };
            lifeline.send(&frame);
        }
        channel.endpoints.iter().for_each(|endpoint| channel.fabric.fence(*endpoint));
        if let Some(two) = &mut channel.two_sided {
            two.exec.channel.shut(&reason.to_string());
        }
        channel.reason = Some(reason);
        channel.ending_since = self.clock.now();
        self.start_janitor(peer, &mut channel);
        state.conn = Conn::Ending(channel);
    }

    /// Hands a fenced channel to a janitor. Without a thread for it the peer's timer tries again.
    pub(crate) fn start_janitor(self: &Arc<Self>, peer: &Arc<Peer>, channel: &mut Channel) {
        let fenced = Fenced { fabric: Arc::clone(&channel.fabric), endpoints: channel.endpoints.clone() };
        let (shared, peer) = (Arc::clone(self), Arc::clone(peer));
        let spawned = self.threads.spawn("baton-janitor", move || {
            shared.drain(&fenced);
            shared.close_epoch(&peer, &fenced);
        });
        channel.has_janitor = spawned.is_ok();
        if let Err(e) = spawned {
            tracing::error!("no thread to end an epoch, it is tried again within a second: {e}");
        }
    }

    /// Polls until the fenced endpoints touch no memory any more, at most for the drain deadline.
    fn drain(self: &Arc<Self>, fenced: &Fenced) {
        let deadline = Instant::now() + self.scaled(DRAIN_MS);
        while !fenced.endpoints.iter().all(|endpoint| fenced.fabric.is_quiet(*endpoint)) {
            if Instant::now() >= deadline {
                tracing::warn!(
                    "an epoch's endpoints are not quiet after {DRAIN_MS} ms (times the scale): the peer seems stopped in the middle of a copy"
                );
                break;
            }
            self.poll();
            fenced.fabric.serve(0);
            wait_for_event(&*fenced.fabric);
        }
        self.poll_all();
    }

    /// The epoch is quiet: counts what is left, frees it, tells the host, reconnects if somebody waits.
    fn close_epoch(self: &Arc<Self>, peer: &Arc<Peer>, fenced: &Fenced) {
        let mut state = peer.state.lock();
        // What arrived before the end is copied and told.
        self.pump(peer, &mut state);
        let mut channel = match std::mem::replace(&mut state.conn, Conn::None) {
            Conn::Ending(channel) => channel,
            other => return state.conn = other,
        };
        let routes = &self.routes[channel.fabric_index];
        fenced.endpoints.iter().for_each(|endpoint| routes.remove(*endpoint));
        fenced.endpoints.iter().for_each(|endpoint| fenced.fabric.destroy_endpoint(*endpoint));
        let reason = channel.reason.take().unwrap_or(EndReason::Shutdown);
        let mut ended = Ended::default();
        if let Some(one) = channel.one_sided.take() {
            self.close_one_sided(&mut state, one, &reason, &mut ended);
        }
        if let Some(two) = channel.two_sided.take() {
            self.close_two_sided(&mut state, channel.fabric_index, two, &reason, &mut ended);
        }
        state.revokes.clear();
        state.carry.set_deadlines(self.notify_deadline());
        state.machine.ended(channel.epoch);
        state.epochs_ended += 1;
        if state.rest.has_transfers() && state.waiting.is_empty() {
            let scaled = |ms| self.scaled(ms).as_millis() as u64;
            let at_least = self.clock.now().plus_ms(scaled(RESUME_LEAST_MS));
            state.waiting_until = channel.ending_since.plus_ms(scaled(RESUME_MS)).max(at_least);
        }
        state.rest_until = self.notify_deadline();
        state.lingers_until = self.lingers_until(peer, &reason);
        self.counters.epochs_ended.fetch_add(1, Ordering::Relaxed);
        self.counters.partial_inbound.fetch_add(ended.partial_seqs.len() as u64, Ordering::Relaxed);
        peer.connected.store(false, Ordering::Release);
        self.connect_if_wanted(peer, &mut state);
        peer.changed.notify_all();
        drop(state);
        self.forget_ids_after_end(peer);
        for (xfer, outcome) in ended.transfers {
            xfer.finish(outcome.map_err(|why| self.name_peer(peer, why)));
        }
        if let Some(lifeline) = channel.lifeline.take() {
            self.forget_lifeline(&lifeline);
            lifeline.send(&LifelineFrame::DrainAck { epoch: channel.epoch });
            lifeline.close();
        }
        let graceful = matches!(reason, EndReason::Disconnected | EndReason::Shutdown);
        if !graceful {
            let event = HostEvent::PeerFailed {
                name: peer.name(),
                instance: peer.instance.0,
                partial_seqs: ended.partial_seqs,
            };
            if self.hook.raise(event) {
                self.wake_service();
            }
        }
        self.linger(peer);
        self.forget_if_unused(peer);
    }

    fn close_one_sided(&self, state: &mut PeerState, one: OneSided, reason: &EndReason, ended: &mut Ended) {
        let OneSided { mut session, memory, .. } = one;
        if let Err(e) = memory.deregister(Instant::now() + self.scaled(DRAIN_MS)) {
            tracing::error!("rings of an ended epoch stay registered: {e}");
            // Unmapping memory that a fabric may still write would be worse than losing it.
            std::mem::forget(Arc::clone(&memory));
        }
        let closed = session.close(reason.clone());
        // Meanwhile the host has gone on.
        let queued = std::mem::replace(&mut state.carry, closed.carry);
        state.carry.append(queued);
        let failed = closed
            .failed
            .into_iter()
            .filter_map(|(token, why)| Some((state.give_token(token as usize)?, Err(xfer_error(&why)))));
        ended.transfers.extend(failed);
        ended.partial_seqs.extend(closed.partial_seqs);
    }

    /// Says with whom something went wrong.
    pub(crate) fn name_peer(&self, peer: &Peer, error: Error) -> Error {
        Error::new(error.code, format!("transfer with {} ({}): {error}", peer.name(), peer.instance))
    }

    /// A protocol deadline in milliseconds, multiplied as configured.
    pub(crate) fn scaled(&self, ms: u64) -> Duration {
        Duration::from_millis(ms * u64::from(self.config.timeout_scale))
    }
}

/// The host's view of why a transfer failed.
pub(crate) fn xfer_error(failure: &XferFailure) -> Error {
    let code = match failure {
        XferFailure::Canceled => Code::Canceled,
        XferFailure::Expired => Code::Timeout,
        XferFailure::LocalAccess { .. } => Code::Local,
        XferFailure::RemoteAccess { .. } | XferFailure::EpochEnded(_) => Code::RemoteDisconnect,
    };
    Error::new(code, failure.to_string())
}

pub(crate) fn wait_for_event(fabric: &dyn Fabric) {
    let timeout = Timespec { tv_sec: 0, tv_nsec: DRAIN_LOOK_NS };
    let mut fds = Vec::with_capacity(1);
    if let Some(fd) = fabric.event_fd() {
        // SAFETY: the fabric outlives this call and owns the descriptor for its whole life.
        fds.push(PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(fd) }, PollFlags::IN));
    }
    if let Err(e) = poll(&mut fds, Some(&timeout))
        && e != rustix::io::Errno::INTR
    {
        tracing::warn!("waiting for a fenced endpoint: {e}");
    }
}
