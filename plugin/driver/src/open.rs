//! How a session opens, on either side: what the handshake settled becomes a channel of the peer.

use crate::channel::{Channel, OneSided};
use crate::connect::Made;
use crate::endpoints::EndpointSet;
use crate::err;
use crate::error::Result;
use crate::lane_map::LaneMap;
use crate::lifeline::Lifeline;
use crate::names::HeldName;
use crate::peer::{Conn, Peer, PeerState};
use crate::shared::Shared;
use crate::two_sided::{Outcome, TwoSided};
use baton_core::Epoch;
use baton_core::Nanos;
use baton_core::lifeline::Lifeline as Watch;
use baton_core::notify::{Carry, NotifyMode};
use baton_core::peer::{EndReason, Session, SessionLimits, SessionSetup};
use baton_core::two_sided::report::TwoEnd;
use baton_core::two_sided::setup::{TwoLimits, TwoSetup};
use baton_core::wire::{Agreed, FabricOffer};
use baton_fabric::Caps;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What the paths are made from.
struct Setups {
    one_sided: Option<SessionSetup>,
    two_sided: Option<TwoSetup>,
}

fn lanes_word(agreed: &Agreed) -> String {
    let one = agreed.one_sided.as_ref().map(|one| format!("{} lane(s)", one.lanes.len()));
    let two = agreed.two_sided.as_ref().map(|two| format!("{} two-sided lane(s)", two.lanes.len()));
    one.into_iter().chain(two).collect::<Vec<_>>().join(" and ")
}

impl Shared {
    /// Both sides agreed: the session exists from here on. `stash`: completions that came before.
    pub(crate) fn open_session(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        mut state: parking_lot::MutexGuard<'_, PeerState>,
        made: Made,
        held_name: HeldName,
        stash: Vec<baton_fabric::Completion>,
    ) {
        let now = self.clock.now();
        state.lingers_until = Nanos(0);
        peer.rename(&mut state, &made.established.peer_name);
        let generation = self.next_generation.fetch_add(1, Ordering::Relaxed);
        let setups = match self.setups(peer, &made) {
            Ok(setups) => setups,
            Err(e) => {
                tracing::error!("session with {}: {e}", peer.name());
                state.machine.draining(made.established.epoch);
                state.machine.ended(made.established.epoch);
                drop(state);
                return self.abandon(made.set);
            }
        };
        let Made { set, theirs, agreed, established, stream, reader, identity, verified } = made;
        let (fabric, fabric_index) = (Arc::clone(&set.fabric), set.fabric_index);
        let endpoints: Vec<_> = set.endpoints().collect();
        let by_send = agreed.one_sided.as_ref().is_some_and(|one| one.notify == NotifyMode::Send);
        if by_send {
            self.tell_send_mode(peer, &mut state, &set);
        }
        let (one_sided, mut two_sided, outcomes) =
            self.open_paths(&mut state, set, &theirs, &agreed, setups, generation, established.resumed);
        let lifeline_id = self.next_lifeline.fetch_add(1, Ordering::Relaxed);
        let watch = Watch::new(now, self.config.timeout_scale);
        let lifeline = Lifeline::new(
            lifeline_id,
            Arc::clone(peer),
            established.epoch,
            stream,
            reader,
            established.lifeline,
            watch,
        )
        .map(Arc::new);
        self.routes[fabric_index].add(endpoints.iter().copied(), peer);
        tracing::info!(
            "session with {} ({}), epoch {}: fabric {}, {}{}{}",
            peer.name(),
            peer.instance,
            established.epoch.0,
            theirs.fabric,
            lanes_word(&agreed),
            if by_send { ", notifications by SEND" } else { "" },
            if verified { "" } else { ", inbound only until its connection information is loaded" }
        );
        peer.opened_at.store(generation, Ordering::Relaxed);
        peer.connected.store(true, Ordering::Release);
        self.forget_ids_before(&peer.name(), generation);
        if let Some(two) = &mut two_sided {
            self.bounces.introduce(two.borrower, peer);
            self.lend_copiers(peer, two);
        }
        state.conn = Conn::Open(Box::new(Channel {
            fabric,
            fabric_index,
            notify_only: self.config.notify_only == Some(fabric_index),
            one_sided,
            two_sided,
            endpoints,
            lifeline: lifeline.as_ref().ok().cloned(),
            epoch: established.epoch,
            session_id: established.session,
            verified,
            identity,
            held_name: Some(held_name),
            ending_since: now,
            has_janitor: false,
            reason: None,
        }));
        for (xfer, outcome) in outcomes {
            xfer.finish(outcome.map_err(|why| self.name_peer(peer, why)));
        }
        self.counters.sessions_opened.fetch_add(1, Ordering::Relaxed);
        self.after_open(peer, state, lifeline, established.epoch, stash, fabric_index);
    }

    /// What both sides settled, checked: a peer may offer what no session can work with.
    fn setups(&self, peer: &Peer, made: &Made) -> Result<Setups> {
        let Made { set, theirs, agreed, established, .. } = made;
        let of_session = (established.session, established.epoch);
        // What a NIC is still sending again is not stalled.
        let retries_ms = u64::try_from(set.fabric.retry_time().as_millis()).unwrap_or(u64::MAX);
        let stall_ms = SessionLimits::default().stall_ms;
        let stall_ms =
            (stall_ms * u64::from(self.config.timeout_scale)).max(retries_ms.saturating_add(stall_ms / 5));
        let mut setups = Setups { one_sided: None, two_sided: None };
        if let (Some(set), Some(theirs), Some(both)) = (&set.one_sided, &theirs.one_sided, &agreed.one_sided)
        {
            let (control, lanes) = set.setups(theirs, both)?;
            let caps = made.set.fabric.caps();
            let longest = u32::try_from(agreed.max_message_bytes).unwrap_or(u32::MAX);
            let setup = SessionSetup {
                own: self.instance,
                peer: peer.instance,
                session: of_session.0,
                epoch: of_session.1,
                control,
                lanes,
                peer_credit_addr: theirs.credit_page.addr,
                peer_credit_key: theirs.credit_page.key,
                caps: Caps { max_message_bytes: longest.min(caps.max_message_bytes), ..caps },
                notify: both.notify,
                limits: SessionLimits { stall_ms, ..SessionLimits::default() },
                carry: Carry::default(),
            };
            setup.check().map_err(|e| err!(Protocol, "what the peer offers makes no session: {e}"))?;
            setups.one_sided = Some(setup);
        }
        if let (Some(set), Some(theirs), Some(both)) = (&set.two_sided, &theirs.two_sided, &agreed.two_sided)
        {
            let wait_ms = TwoLimits::default().wait_ms * u64::from(self.config.timeout_scale);
            setups.two_sided = Some(set.setup(theirs, both, of_session, (wait_ms, stall_ms))?);
        }
        Ok(setups)
    }

    /// The paths of the new epoch, and the transfers that came to their end because the session before is not resumed.
    #[allow(clippy::too_many_arguments, reason = "all of it comes out of one handshake")]
    fn open_paths(
        &self,
        state: &mut PeerState,
        set: EndpointSet,
        theirs: &FabricOffer,
        agreed: &Agreed,
        setups: Setups,
        generation: u64,
        resumed: bool,
    ) -> (Option<OneSided>, Option<TwoSided>, Vec<Outcome>) {
        let EndpointSet { fabric, fabric_index, one_sided, two_sided, .. } = set;
        let (durable, outcomes) = match &setups.two_sided {
            Some(setup) => {
                let (durable, outcomes) = state.take_rest(resumed, setup.limits);
                (Some(durable), outcomes)
            }
            None => (None, state.abandon_rest(&TwoEnd::Closed("the new session is one-sided".into()))),
        };
        let two = two_sided.zip(setups.two_sided).zip(durable);
        let mut two = two.map(|((set, setup), durable)| {
            let rails = theirs.two_sided.as_ref().map(|theirs| set.lane_rails(theirs, setup.lanes.len()));
            let mut two = set.open(setup, durable, self, &mut state.rest);
            two.rails = rails.unwrap_or_default();
            two
        });
        let one = one_sided.zip(setups.one_sided).map(|(set, setup)| {
            let rails = match (&theirs.one_sided, &agreed.one_sided) {
                (Some(theirs), Some(agreed)) => set.lane_rails(theirs, agreed),
                _ => Box::default(),
            };
            let lanes = Arc::new(LaneMap {
                generation,
                fabric: Arc::clone(&fabric),
                fabric_index,
                rails,
                max_message_bytes: agreed.max_message_bytes,
                next_lane: AtomicU64::new(0),
            });
            let setup = SessionSetup { carry: state.take_carry(resumed), ..setup };
            let session = Session::new(setup, self.clock.now());
            OneSided {
                session,
                memory: set.memory,
                lanes,
                pack_below_bytes: fabric.caps().pack_below_bytes,
                endpoints: set.endpoints,
            }
        });
        if one.is_none()
            && let Some(two) = &mut two
        {
            let lost = two.take_over(&mut state.carry);
            self.counters.notifications_lost.fetch_add(lost, Ordering::Relaxed);
        }
        (one, two, outcomes)
    }

    /// Says once per peer why SENDs take the place of immediates.
    fn tell_send_mode(&self, peer: &Peer, state: &mut PeerState, set: &EndpointSet) {
        if std::mem::replace(&mut state.send_mode_told, true) {
            return;
        }
        let name = peer.name();
        if self.config.notify == NotifyMode::Send {
            return tracing::info!("notifications with {name} go by SEND, as configured");
        }
        self.counters.fallbacks.fetch_add(1, Ordering::Relaxed);
        if set.one_sided.as_ref().is_some_and(|own| own.immediate) {
            tracing::warn!(
                "notifications with {name} go by SEND: it offers no immediates on fabric {}",
                set.fabric.name()
            );
        } else {
            tracing::warn!(
                "notifications with {name} go by SEND: fabric {} has no immediates here",
                set.fabric.name()
            );
        }
    }

    fn after_open(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        mut state: parking_lot::MutexGuard<'_, PeerState>,
        lifeline: std::io::Result<Arc<Lifeline>>,
        epoch: Epoch,
        stash: Vec<baton_fabric::Completion>,
        fabric_index: usize,
    ) {
        let now = self.clock.now();
        for completion in &stash {
            state.on_completions(now, fabric_index, 0, std::slice::from_ref(completion));
        }
        let watched = lifeline.and_then(|lifeline| self.watch_lifeline(&lifeline).map(|()| lifeline));
        state.last_error = None;
        state.release_waiting(now);
        self.pump(peer, &mut state);
        if let Err(e) = &watched {
            let reason =
                EndReason::PeerGone(format!("the lifeline of epoch {} cannot be watched: {e}", epoch.0));
            self.end_epoch(peer, &mut state, reason);
        }
        peer.changed.notify_all();
        drop(state);
        // Messages that came behind the handshake's last one are in the reader already and make no event.
        if let Ok(lifeline) = watched {
            self.read_lifeline(&lifeline);
        }
        self.wake_service();
    }
}
