//! How a session opens, on either side: what the handshake settled becomes a channel of the peer.

use crate::channel::{Channel, OneSided};
use crate::connect::Made;
use crate::endpoints::{offered, settled};
use crate::err;
use crate::error::Result;
use crate::lane_map::LaneMap;
use crate::lifeline::Lifeline;
use crate::peer::{Conn, Peer, PeerState};
use crate::shared::Shared;
use baton_core::Epoch;
use baton_core::lifeline::Lifeline as Watch;
use baton_core::notify::NotifyMode;
use baton_core::peer::{EndReason, Session, SessionLimits, SessionSetup};
use baton_fabric::Caps;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

impl Shared {
    /// Both sides agreed: the session exists from here on. `stash`: completions that came before.
    pub(crate) fn open_session(
        self: &Arc<Self>,
        peer: &Arc<Peer>,
        mut state: parking_lot::MutexGuard<'_, PeerState>,
        made: Made,
        stash: Vec<baton_fabric::Completion>,
    ) {
        let now = self.clock.now();
        peer.rename(&made.established.peer_name);
        let setup = self.session_setup(peer, &mut state, &made);
        let by_send = setup.as_ref().is_ok_and(|setup| setup.notify == NotifyMode::Send);
        if by_send {
            self.tell_send_mode(peer, &mut state, &made);
        }
        let session = match setup {
            Ok(setup) => Session::new(setup, now),
            Err(e) => {
                tracing::error!("session with {}: {e}", peer.name());
                state.machine.draining(made.established.epoch);
                state.machine.ended(made.established.epoch);
                drop(state);
                return self.abandon(made.set);
            }
        };
        let Made { set, theirs, agreed, established, stream, reader, identity, verified } = made;
        let lanes = Arc::new(LaneMap {
            generation: self.next_generation.fetch_add(1, Ordering::Relaxed),
            fabric: Arc::clone(&set.fabric),
            fabric_index: set.fabric_index,
            rails: set.lane_rails(&theirs, &agreed),
            max_message_bytes: agreed.max_message_bytes,
            next_lane: AtomicU64::new(0),
        });
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
        set.endpoints.iter().for_each(|endpoint| self.routes[set.fabric_index].add(*endpoint, peer));
        tracing::info!(
            "session with {} ({}), epoch {}: fabric {}, {} lane(s){}{}",
            peer.name(),
            peer.instance,
            established.epoch.0,
            theirs.fabric,
            lanes.rails.len(),
            if by_send { ", notifications by SEND" } else { "" },
            if verified { "" } else { ", inbound only until its connection information is loaded" }
        );
        let generation = lanes.generation;
        peer.opened_at.store(generation, Ordering::Relaxed);
        peer.connected.store(true, Ordering::Release);
        self.forget_ids_before(&peer.name(), generation);
        state.conn = Conn::Open(Box::new(Channel {
            fabric: Arc::clone(&set.fabric),
            fabric_index: set.fabric_index,
            endpoints: set.endpoints.clone(),
            one_sided: Some(OneSided { session, memory: set.memory, lanes, endpoints: set.endpoints }),
            two_sided: None,
            lifeline: lifeline.as_ref().ok().cloned(),
            epoch: established.epoch,
            session_id: established.session,
            verified,
            identity,
            has_janitor: false,
            reason: None,
        }));
        self.counters.sessions_opened.fetch_add(1, Ordering::Relaxed);
        self.after_open(peer, state, lifeline, established.epoch, stash, set.fabric_index);
    }

    /// What both sides settled, checked: a peer may offer what no session can work with.
    fn session_setup(&self, peer: &Peer, state: &mut PeerState, made: &Made) -> Result<SessionSetup> {
        let (control, lanes) = made.set.setups(&made.theirs, &made.agreed)?;
        let theirs = offered(&made.theirs)?;
        let defaults = SessionLimits::default();
        // What a NIC is still sending again is not stalled.
        let retries_ms = u64::try_from(made.set.fabric.retry_time().as_millis()).unwrap_or(u64::MAX);
        let stall_ms = defaults.stall_ms * u64::from(self.config.timeout_scale);
        let stall_ms = stall_ms.max(retries_ms.saturating_add(defaults.stall_ms / 5));
        let caps = made.set.fabric.caps();
        let longest = u32::try_from(made.agreed.max_message_bytes).unwrap_or(u32::MAX);
        let setup = SessionSetup {
            own: self.instance,
            peer: peer.instance,
            session: made.established.session,
            epoch: made.established.epoch,
            control,
            lanes,
            peer_credit_addr: theirs.credit_page.addr,
            peer_credit_key: theirs.credit_page.key,
            caps: Caps { max_message_bytes: longest.min(caps.max_message_bytes), ..caps },
            notify: settled(&made.agreed)?.notify,
            limits: SessionLimits { stall_ms, ..defaults },
            carry: baton_core::notify::Carry::default(),
        };
        setup.check().map_err(|e| err!(Protocol, "what the peer offers makes no session: {e}"))?;
        Ok(SessionSetup { carry: state.take_carry(made.established.resumed), ..setup })
    }

    /// Says once per peer why SENDs take the place of immediates.
    fn tell_send_mode(&self, peer: &Peer, state: &mut PeerState, made: &Made) {
        if std::mem::replace(&mut state.send_mode_told, true) {
            return;
        }
        let name = peer.name();
        if self.config.notify == NotifyMode::Send {
            return tracing::info!("notifications with {name} go by SEND, as configured");
        }
        self.counters.fallbacks.fetch_add(1, Ordering::Relaxed);
        if made.set.offer.one_sided.as_ref().is_some_and(|own| own.immediate) {
            tracing::warn!(
                "notifications with {name} go by SEND: it offers no immediates on fabric {}",
                made.theirs.fabric
            );
        } else {
            tracing::warn!(
                "notifications with {name} go by SEND: fabric {} has no immediates here",
                made.theirs.fabric
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
            state.on_completions(now, fabric_index, std::slice::from_ref(completion));
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
