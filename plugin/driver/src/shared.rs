//! What the host's calls and the engine's threads share, and the rules about peers that concern all of it.

use crate::blocks::BlockLists;
use crate::clock::Clock;
use crate::config::Config;
use crate::err;
use crate::error::{Error, Result};
use crate::halt::Halt;
use crate::host_calls::HostCalls;
use crate::inbox::{Hook, Inbox, Notification};
use crate::landed::Landed;
use crate::lifeline::LifelineHandle;
use crate::linger::Lingering;
use crate::listen::HalfOpen;
use crate::managed::Managed;
use crate::names::Names;
use crate::peer::{Conn, Peer};
use crate::progress::{Poller, Routes};
use crate::region::Mr;
use crate::revoke::Revokes;
use crate::selfcopy::SelfCopies;
use crate::spin::Spinner;
use crate::threads::Threads;
use crate::two_sided::{Bounces, Copiers, Served};
use baton_core::epoch::EpochBook;
use baton_core::peer::EndReason;
use baton_core::registry::Registry;
use baton_core::wire::{HostId, SessionKey, check_name};
use baton_core::{Instance, Nanos};
use baton_fabric::Fabric;
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// Peer instances known at once.
pub(crate) const MAX_PEERS: usize = 65_536;
/// A standalone notification waits this long for a session, and for the next after the loss of one (times the timeout
/// scale, PROTOCOL §3).
const NOTIFY_MS: u64 = 30_000;
/// Joining threads at the end takes at most this long (times the timeout scale).
const JOIN_MS: u64 = 5000;

/// Counts of everything that is dropped, refused or ended.
#[derive(Default)]
pub(crate) struct Counters {
    pub orphan_completions: AtomicU64,
    pub notifications_expired: AtomicU64,
    pub notifications_lost: AtomicU64,
    pub epochs_ended: AtomicU64,
    pub sessions_opened: AtomicU64,
    pub partial_inbound: AtomicU64,
    pub connects_failed: AtomicU64,
    pub fallbacks: AtomicU64,
    pub handshakes_refused: AtomicU64,
    pub names_refused: AtomicU64,
    pub names_in_use: AtomicU64,
    pub names_taken_back: AtomicU64,
    pub accepts_dropped: AtomicU64,
    pub handshakes_held_off: AtomicU64,
    pub listener_pauses: AtomicU64,
    pub revokes_unanswered: AtomicU64,
    /// By cause.
    pub violations: Mutex<BTreeMap<String, u64>>,
    pub lifelines_broken: AtomicU64,
    pub stale_fences: AtomicU64,
    pub registrations_partial: AtomicU64,
    pub ids_dropped: AtomicU64,
    pub ids_forgotten: AtomicU64,
}

/// Shared by the host's calls and the engine's threads.
pub(crate) struct Shared {
    pub config: Config,
    pub instance: Instance,
    pub session_key: SessionKey,
    pub host: HostId,
    pub clock: Clock,
    pub fabrics: Vec<Arc<dyn Fabric>>,
    pub routes: Vec<Routes>,
    pub registry: RwLock<Registry>,
    pub regions: RwLock<HashMap<u64, Arc<Mr>>>,
    /// Regions that peers may name on the two-sided path.
    pub served: Arc<Served>,
    pub bounces: Bounces,
    /// They copy for two-sided paths.
    pub copiers: Arc<Copiers>,
    pub managed: Managed,
    pub block_lists: BlockLists,
    /// Fabric and whether it was device memory: whose refusal of a registration the log has already.
    pub partial_registrations_said: Mutex<HashSet<(&'static str, bool)>>,
    pub peers: RwLock<HashMap<Instance, Arc<Peer>>>,
    pub epochs: Mutex<EpochBook>,
    pub lingering: Lingering,
    pub names: Arc<Names>,
    pub inbox: Inbox,
    pub landed: Landed,
    pub hook: Hook,
    pub self_copies: SelfCopies,
    pub revokes: Revokes,
    pub poller: Mutex<Poller>,
    pub credit_waiters: Mutex<VecDeque<Arc<Peer>>>,
    pub credit_waiters_count: AtomicUsize,
    pub credit_dirty: Mutex<Vec<Arc<Peer>>>,
    pub host_calls: HostCalls,
    pub listener: TcpListener,
    /// When a resting listener is watched again; 0 while it is.
    pub listener_resumes_ns: AtomicU64,
    pub conn_info: Vec<u8>,
    pub half_open: HalfOpen,
    pub lifelines: Mutex<HashMap<u64, LifelineHandle>>,
    pub unread_lifelines: Mutex<Vec<LifelineHandle>>,
    pub next_lifeline: AtomicU64,
    pub next_generation: AtomicU64,
    pub next_timer_check_ns: AtomicU64,
    pub epoll: OwnedFd,
    pub wake_fd: OwnedFd,
    pub service_wake: AtomicBool,
    pub threads: Arc<Threads>,
    pub spinner: Spinner,
    pub stopping: AtomicBool,
    pub halt: Halt,
    pub poisoned: AtomicBool,
    pub counters: Counters,
    pub own_name: Arc<str>,
}

pub(crate) fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0u8; N];
    // Without the kernel's randomness there are no keys and no instances; nothing sensible could go on.
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
    bytes
}

pub(crate) fn random_u64() -> u64 {
    u64::from_le_bytes(random_bytes())
}

impl Shared {
    pub fn own_name(&self) -> Arc<str> {
        Arc::clone(&self.own_name)
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// When a standalone notification that finds no session from now on is given up.
    pub fn notify_deadline(&self) -> Nanos {
        self.clock.now().plus_ms(self.scaled(NOTIFY_MS).as_millis() as u64)
    }

    /// An error if the engine cannot work any more.
    pub fn usable(&self) -> Result<()> {
        if self.poisoned.load(Ordering::Acquire) {
            return Err(err!(
                Panic,
                "the engine panicked earlier and refuses further work; destroy it and create another"
            ));
        }
        if self.is_stopping() {
            return Err(err!(Shutdown, "the engine is being destroyed"));
        }
        Ok(())
    }

    pub fn poison(self: &Arc<Self>) {
        if self.poisoned.swap(true, Ordering::AcqRel) {
            return;
        }
        tracing::error!("the engine panicked: all its queue pairs go to error, it refuses further work");
        // The panic has been caught, so its unwinding has given every lock back.
        let peers: Vec<_> = self.peers.read().values().cloned().collect();
        for peer in peers {
            let mut state = peer.state.lock();
            state.fail_waiting(&err!(Panic, "the engine panicked"));
            self.end_epoch(&peer, &mut state, EndReason::PeerFenced("this engine panicked".into()));
        }
    }

    /// The peer to which a name is bound.
    pub fn peer_named(&self, name: &str) -> Result<Arc<Peer>> {
        check_name(name.as_bytes()).map_err(|e| err!(InvalidParam, "{e}"))?;
        let instance = self.registry.read().bound(name).map(|info| info.instance);
        let instance = instance.ok_or_else(|| {
            err!(NotFound, "agent {name:?} is unknown: load its connection information first")
        })?;
        self.peer_for(instance, name)
    }

    /// The host's name for an instance is gone: its outgoing work ends. What the peer sends to us is not touched,
    /// unless own work is on its way over the same queue pairs.
    pub fn unbind(self: &Arc<Self>, instance: &Instance, reason: EndReason) {
        let Some(peer) = self.peers.read().get(instance).cloned() else { return };
        peer.bound.store(false, Ordering::Release);
        self.forget_ids_of(instance);
        let mut state = peer.state.lock();
        state.info = None;
        state.retry_at = None;
        state.lingers_until = Nanos(0);
        state.fail_waiting(&err!(RemoteDisconnect, "{}: {reason}", peer.name()));
        // Message numbers start anew with the next session, so the old one must not be resumed.
        if matches!(state.conn, Conn::None) {
            self.give_up_rest(&peer, &mut state);
        }
        let lost = state.carry.expire(Nanos(u64::MAX)).len();
        state.carry = std::mem::take(&mut state.carry).restart();
        state.machine.forget_session();
        if lost > 0 {
            self.counters.notifications_lost.fetch_add(lost as u64, Ordering::Relaxed);
            tracing::warn!("{lost} notifications to {} are lost: {reason}", peer.name());
        }
        let active = state.inflight.iter().any(Option::is_some);
        if active || matches!(reason, EndReason::PeerRestarted) {
            self.end_epoch(&peer, &mut state, reason);
        }
        drop(state);
        self.forget_if_unused(&peer);
    }

    /// Drops a peer that nothing refers to; what must outlive it goes into the epoch book.
    pub fn forget_if_unused(&self, peer: &Arc<Peer>) {
        let mut peers = self.peers.write();
        let mut state = peer.state.lock();
        let unused = matches!(state.conn, Conn::None)
            && state.pending.is_none()
            && state.waiting.is_empty()
            && matches!(
                state.machine.state(),
                baton_core::handshake::LinkState::Idle | baton_core::handshake::LinkState::Backoff { .. }
            )
            && state.lingers_until == Nanos(0)
            && !peer.bound.load(Ordering::Acquire);
        if unused && peers.get(&peer.instance).is_some_and(|known| Arc::ptr_eq(known, peer)) {
            self.epochs.lock().record(peer.instance, state.machine.memory().clone());
            state.forgotten = true;
            // Notifications that wait for the host keep the peer, but need nothing of this.
            (state.rest, state.carry) = Default::default();
            peers.remove(&peer.instance);
        }
    }

    /// Gives ring and imm credit back for what the host took.
    pub fn account_popped(self: &Arc<Self>, taken: &[Notification]) {
        let of = |n: &Notification| (n.peer.as_ref().map(Arc::as_ptr), n.path);
        for run in taken.chunk_by(|a, b| of(a) == of(b)) {
            let Notification { peer: Some(peer), path, .. } = &run[0] else { continue };
            let bytes = run.iter().map(|n| n.message.len() as u64).sum();
            let mut state = peer.state.lock();
            if state.popped(*path, run.len() as u64, bytes) {
                self.pump(peer, &mut state);
            }
        }
    }

    /// Timers of one peer: session watchdog, notification deadlines, connect retries. A peer whose lock is held has its turn later.
    pub fn run_peer_timers(self: &Arc<Self>, peer: &Arc<Peer>, now: Nanos) {
        let Some(mut state) = peer.lock_unless_held() else { return };
        if let Conn::Ending(channel) = &mut state.conn
            && !channel.has_janitor
        {
            self.start_janitor(peer, channel);
        }
        if let Some(channel) = state.conn.channel()
            && channel.next_timeout().is_some_and(|at| at <= now)
        {
            channel.on_timeout(now);
            self.pump(peer, &mut state);
        }
        let expired = state.carry.expire(now);
        if let (Some(first), Some(last)) = (expired.first(), expired.last()) {
            self.counters.notifications_expired.fetch_add(expired.len() as u64, Ordering::Relaxed);
            tracing::warn!(
                "{} notifications to {} (numbers {} to {}) found no session before their deadline and are lost{}",
                expired.len(),
                peer.name(),
                first.0,
                last.0,
                state.last_error.as_ref().map_or(String::new(), |why| format!("; {why}"))
            );
        }
        if state.has_waiting_transfers() && state.waiting_until <= now {
            let error = state.last_error.clone();
            state.fail_waiting(
                &error.unwrap_or_else(|| err!(RemoteDisconnect, "no session with {} in time", peer.name())),
            );
        }
        if state.rest_is_late(now) {
            self.give_up_rest(peer, &mut state);
        }
        if state.retry_at.is_some_and(|at| at <= now) {
            state.retry_at = None;
            self.connect_if_wanted(peer, &mut state);
        }
        if state.lingers_until != Nanos(0) && state.lingers_until <= now {
            state.lingers_until = Nanos(0);
            drop(state);
            self.forget_if_unused(peer);
        }
    }

    pub fn shut_down(self: &Arc<Self>) -> Result<()> {
        if self.stopping.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let error: Error = err!(Shutdown, "the engine is being destroyed");
        let peers: Vec<_> = self.peers.read().values().cloned().collect();
        for peer in &peers {
            let mut state = peer.state.lock();
            state.fail_waiting(&error);
            self.end_epoch(peer, &mut state, EndReason::Shutdown);
            peer.changed.notify_all();
        }
        self.halt.pull();
        self.self_copies.stop();
        self.copiers.stop();
        self.spinner.stop();
        self.bounces.wake();
        self.wake_service();
        let patience = self.scaled(JOIN_MS);
        let joined = self.threads.join(Instant::now() + patience);
        self.peers.write().clear();
        self.block_lists.write().clear();
        self.routes.iter().for_each(Routes::clear);
        self.poller.lock().forget();
        self.hook.set(0, None);
        // A thread that still runs may touch anything.
        if joined.is_ok() {
            self.free_all_managed();
        }
        joined.map_err(|names| err!(Timeout, "threads still run after {patience:?}: {}", names.join(", ")))
    }
}
