//! Withdrawing regions from peers: who was asked, who has answered.

use crate::err;
use crate::lifeline::LifelineHandle;
use crate::peer::Conn;
use crate::shared::Shared;
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
        let users: Vec<_> =
            state.inflight.iter().flatten().filter(|xfer| xfer.uses(regions)).cloned().collect();
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
        state.revokes.push((id, users));
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
