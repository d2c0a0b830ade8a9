//! Peers that the host has not loaded and whose session broke: they are kept for a while, so that it can be resumed. Without what is
//! known of them their notifications would arrive twice, and transfers under way would fail.

use crate::peer::Peer;
use crate::shared::Shared;
use crate::two_sided::may_resume;
use baton_core::Nanos;
use baton_core::peer::EndReason;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// So many at once; beyond, the one whose session broke first is forgotten: strangers must not make an engine keep more and more.
pub(crate) const MAX_LINGERING: usize = 256;

/// In the order in which their sessions broke. Some may have come back, or be gone.
#[derive(Default)]
pub(crate) struct Lingering(Mutex<VecDeque<Weak<Peer>>>);

impl Lingering {
    /// Adds one; the one that has to go for it.
    fn add(&self, peer: &Arc<Peer>) -> Option<Arc<Peer>> {
        let mut all = self.0.lock();
        all.retain(|other| other.strong_count() > 0 && !std::ptr::eq(other.as_ptr(), Arc::as_ptr(peer)));
        all.push_back(Arc::downgrade(peer));
        if all.len() > MAX_LINGERING { all.pop_front()?.upgrade() } else { None }
    }
}

impl Shared {
    /// How long a peer is kept whose session ends for that reason; 0 if it is not.
    pub(crate) fn lingers_until(&self, peer: &Peer, reason: &EndReason) -> Nanos {
        let parted = matches!(reason, EndReason::PeerClosed(_) | EndReason::NameOfAnother(_));
        let resumable = may_resume(reason) && !parted;
        let stranger = !peer.bound.load(Ordering::Acquire);
        if resumable && stranger { self.notify_deadline() } else { Nanos(0) }
    }

    /// Notes a peer that is kept for a while, and lets go of the first of too many.
    pub(crate) fn linger(&self, peer: &Arc<Peer>) {
        if peer.state.lock().lingers_until == Nanos(0) {
            return;
        }
        if let Some(first) = self.lingering.add(peer) {
            first.state.lock().lingers_until = Nanos(0);
            self.forget_if_unused(&first);
        }
    }
}
