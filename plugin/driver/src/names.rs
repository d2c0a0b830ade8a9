//! Which instance speaks under which name: the host sees names only, so one has it as long as its session is open.

use crate::peer::{Conn, Peer, PeerState};
use crate::shared::Shared;
use baton_core::Instance;
use baton_core::handshake::{NameClaim, NameDecision, decide_name};
use baton_core::peer::EndReason;
use baton_core::wire::{ErrorCode, Hello, Refusal};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Names of open sessions. A leaf lock: nothing else is taken while it is held.
#[derive(Default)]
pub(crate) struct Names {
    held: Mutex<HashMap<Arc<str>, Holder>>,
}

struct Holder {
    instance: Instance,
    /// An instance may claim its own name again, when both sides connect at once.
    claims: usize,
}

/// A name that an instance has; free again when dropped.
pub(crate) struct HeldName {
    names: Arc<Names>,
    name: Arc<str>,
}

impl HeldName {
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Drop for HeldName {
    fn drop(&mut self) {
        let mut held = self.names.held.lock();
        if let Some(holder) = held.get_mut(&self.name) {
            holder.claims -= 1;
            if holder.claims == 0 {
                held.remove(&self.name);
            }
        }
    }
}

impl Names {
    fn holder(&self, name: &str) -> Option<Instance> {
        self.held.lock().get(name).map(|holder| holder.instance)
    }

    /// Takes a name that nobody else has; the claim says who asks, not who has it.
    fn claim(
        self: &Arc<Self>,
        own_name: &str,
        claim: &NameClaim<'_>,
    ) -> std::result::Result<HeldName, NameDecision> {
        let mut held = self.held.lock();
        let holder = held.get(claim.name).map(|holder| holder.instance);
        match decide_name(own_name, &NameClaim { holder, ..*claim }) {
            NameDecision::Granted => {
                let name: Arc<str> = claim.name.into();
                let holder = Holder { instance: claim.instance, claims: 0 };
                held.entry(Arc::clone(&name)).or_insert(holder).claims += 1;
                Ok(HeldName { names: Arc::clone(self), name })
            }
            other => Err(other),
        }
    }
}

impl Shared {
    /// Looks at HELLO's name before anything is made for the connection; what counts is said when the session opens.
    pub(crate) fn look_at_name(&self, hello: &Hello) -> std::result::Result<(), Refusal> {
        let known = self.peers.read().get(&hello.instance).cloned();
        let info = known.and_then(|peer| peer.state.lock().info.clone());
        let claim = NameClaim {
            instance: hello.instance,
            name: &hello.name,
            bound_as: info.as_ref().map(|info| info.name.as_str()),
            holder: self.names.holder(&hello.name),
        };
        match decide_name(&self.own_name, &claim) {
            NameDecision::Refuse(refusal) => Err(self.count_refused_name(refusal)),
            NameDecision::Granted | NameDecision::InPlaceOf(_) => Ok(()),
        }
    }

    /// Takes the name for a session that is about to open; a peer whose connection information is loaded has proved who it is.
    /// `None`: the session of another had to be ended for it, and the peer was unlocked meanwhile. Look at it anew.
    pub(crate) fn claim_name(
        self: &Arc<Self>,
        peer: &Peer,
        state: &mut MutexGuard<'_, PeerState>,
        name: &str,
    ) -> std::result::Result<Option<HeldName>, Refusal> {
        let bound_as = state.info.as_ref().map(|info| info.name.as_str());
        let claim = NameClaim { instance: peer.instance, name, bound_as, holder: None };
        match self.names.claim(&self.own_name, &claim) {
            Ok(held) => Ok(Some(held)),
            Err(NameDecision::Refuse(refusal)) => Err(self.count_refused_name(refusal)),
            Err(NameDecision::InPlaceOf(holder)) => {
                // Nobody holds two peers at once.
                MutexGuard::unlocked(state, || self.take_name_back(&holder, name, peer.instance));
                Ok(None)
            }
            Err(NameDecision::Granted) => Ok(None),
        }
    }

    /// Ends the session that an instance has under a name which the host gave to another.
    fn take_name_back(self: &Arc<Self>, holder: &Instance, name: &str, rightful: Instance) {
        let Some(peer) = self.peers.read().get(holder).cloned() else { return };
        let mut state = peer.state.lock();
        let under_name = matches!(&state.conn, Conn::Open(channel) if channel.speaks_as(name));
        if under_name {
            self.counters.names_taken_back.fetch_add(1, Ordering::Relaxed);
            self.end_epoch(&peer, &mut state, EndReason::NameOfAnother(rightful));
        }
    }

    fn count_refused_name(&self, refusal: Refusal) -> Refusal {
        let counter = match refusal.code {
            ErrorCode::NameInUse => &self.counters.names_in_use,
            _ => &self.counters.names_refused,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        refusal
    }
}
