//! Withdrawing regions from peers: who was asked, who has answered.

use crate::err;
use crate::lifeline::LifelineHandle;
use crate::peer::Conn;
use crate::shared::Shared;
use crate::transfer::Xfer;
use baton_core::RegionId;
use baton_core::peer::EndReason;
use baton_core::wire::LifelineFrame;
use parking_lot::{Condvar, Mutex};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// REVOKEs that wait for their acknowledgement, as (lifeline, id).
#[derive(Default)]
pub(crate) struct Revokes {
    waiting: Mutex<HashSet<(u64, u64)>>,
    answered: Condvar,
    next_id: AtomicU64,
}

/// A REVOKE of a peer that is acknowledged when the transfers that use the region are in flight no more.
pub(crate) struct Draining {
    pub id: u64,
    /// Each at its token in the table of transfers in flight.
    users: Vec<(usize, Arc<Xfer>)>,
}

impl Draining {
    /// What uses `regions` among the transfers in flight.
    fn new(id: u64, regions: &[RegionId], inflight: &[Option<Arc<Xfer>>]) -> Draining {
        let inflight = inflight.iter().enumerate().filter_map(|(token, xfer)| Some((token, xfer.as_ref()?)));
        let users = inflight.filter(|(_, xfer)| xfer.uses(regions));
        Draining { id, users: users.map(|(token, xfer)| (token, Arc::clone(xfer))).collect() }
    }

    /// By what is in flight and not by what the host has begun: it may post again what has ended. That is refused, but not here,
    /// and nobody would look at the REVOKE behind it.
    pub fn is_over(&self, inflight: &[Option<Arc<Xfer>>]) -> bool {
        !self
            .users
            .iter()
            .any(|(token, xfer)| inflight[*token].as_ref().is_some_and(|at| Arc::ptr_eq(at, xfer)))
    }
}

impl Revokes {
    pub fn acknowledge(&self, lifeline: u64, id: u64) {
        if self.waiting.lock().remove(&(lifeline, id)) {
            self.answered.notify_all();
        }
    }

    /// The lifeline is gone, nobody will answer on it; its session has ended, which is as good.
    pub fn forget(&self, lifeline: u64) {
        let mut waiting = self.waiting.lock();
        waiting.retain(|(of, _)| *of != lifeline);
        self.answered.notify_all();
    }
}

impl Shared {
    /// A peer has withdrawn regions: what is on its way to them ends in order, then the peer is told. What only waits for a
    /// connection is refused like a new post.
    pub(crate) fn drain_revoked(self: &Arc<Self>, lifeline: &LifelineHandle, id: u64, regions: &[RegionId]) {
        let mut state = lifeline.peer.state.lock();
        let waiting = std::mem::take(&mut state.waiting);
        for xfer in waiting {
            if xfer.uses(regions) {
                xfer.told.lock().take();
                xfer.finish(Err(err!(
                    NotFound,
                    "a remote region of the transfer was withdrawn by its owner"
                )));
            } else {
                state.waiting.push_back(xfer);
            }
        }
        let draining = Draining::new(id, regions, &state.inflight);
        state.revokes.push(draining);
        state.acknowledge_revokes();
    }

    /// Tells every open session that a region is gone and waits for the answers until `deadline`. A peer that does not
    /// answer loses its session: its next operation on the region would fail anyway.
    pub(crate) fn revoke_at_peers(self: &Arc<Self>, region: RegionId, deadline: Instant) {
        let id = self.revokes.next_id.fetch_add(1, Ordering::Relaxed);
        // A peer may post as soon as it has ACCEPT, which goes out under its lock here; its lifeline is among ours when that is free.
        let peers: Vec<_> = self.peers.read().values().cloned().collect();
        peers.iter().for_each(|peer| drop(peer.state.lock()));
        let lifelines: Vec<LifelineHandle> = self.lifelines.lock().values().cloned().collect();
        self.revokes.waiting.lock().extend(lifelines.iter().map(|lifeline| (lifeline.id, id)));
        for lifeline in &lifelines {
            lifeline.send(&LifelineFrame::Revoke { id, regions: vec![region] });
        }
        let mut waiting = self.revokes.waiting.lock();
        while waiting.iter().any(|(_, of)| *of == id) {
            if self.revokes.answered.wait_until(&mut waiting, deadline).timed_out() {
                break;
            }
        }
        let silent: Vec<_> =
            lifelines.into_iter().filter(|lifeline| waiting.remove(&(lifeline.id, id))).collect();
        drop(waiting);
        for lifeline in silent {
            self.counters.revokes_unanswered.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                "{} did not acknowledge that a region is withdrawn; its session ends",
                lifeline.peer.name()
            );
            let mut state = lifeline.peer.state.lock();
            if matches!(&state.conn, Conn::Open(channel) if channel.epoch == lifeline.epoch) {
                let reason = EndReason::PeerGone("it did not acknowledge a withdrawn region in time".into());
                self.end_epoch(&lifeline.peer, &mut state, reason);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::Target;
    use baton_core::Instance;
    use baton_core::plan::{Plan, PlanLimits};
    use baton_fabric::Op;

    fn xfer() -> Arc<Xfer> {
        let plan = Plan::build(Op::Write, Vec::new(), PlanLimits::default()).expect("an empty plan");
        Arc::new(Xfer::new(Instance([1; 16]), Op::Write, Target::Own, plan, Vec::new(), Vec::new()))
    }

    #[test]
    fn a_transfer_that_the_host_begins_again_does_not_hold_up_a_revoke() {
        let xfer = xfer();
        xfer.begin().expect("nothing of it is withdrawn");
        let mut inflight = vec![None, Some(Arc::clone(&xfer))];
        let draining = Draining { id: 7, users: vec![(1, Arc::clone(&xfer))] };
        assert!(!draining.is_over(&inflight), "it is in flight");
        inflight[1] = None;
        xfer.finish(Ok(()));
        // The host sees the end before the REVOKE is looked at.
        xfer.begin().expect("it may be posted again");
        assert!(draining.is_over(&inflight), "what is begun and not in flight names no key");
        xfer.finish(Ok(()));
    }

    #[test]
    fn a_token_that_another_transfer_has_now_does_not_hold_up_a_revoke() {
        let (first, next) = (xfer(), xfer());
        let draining = Draining { id: 7, users: vec![(0, Arc::clone(&first))] };
        assert!(!draining.is_over(&[Some(first)]));
        assert!(draining.is_over(&[Some(next)]));
    }
}
