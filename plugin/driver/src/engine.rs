//! The engine as the host sees it, and what all its threads share.

use crate::clock::Clock;
use crate::err;
use crate::error::{Error, Result};
use crate::halt::Halt;
use crate::inbox::{Hook, HookFn, Inbox, Notification};
use crate::lifeline::LifelineHandle;
use crate::listen::{HalfOpen, ListenSpec};
use crate::peer::{Conn, Peer};
use crate::progress::{POLL_BATCH, Routes};
use crate::region::Mr;
use crate::revoke::Revokes;
use crate::selfcopy::SelfCopies;
use crate::spin::Spinner;
use crate::threads::Threads;
use baton_core::Instance;
use baton_core::epoch::EpochBook;
use baton_core::peer::EndReason;
use baton_core::registry::{LoadEffect, Registry, RegistryLimits};
use baton_core::wire::{ConnInfo, HostId, ProtocolRange, SessionKey, check_name};
use baton_fabric::{Completion, Fabric};
use parking_lot::{Mutex, RwLock};
use rustix::event::{EventfdFlags, epoll, eventfd};
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Peer instances known at once.
pub(crate) const MAX_PEERS: usize = 65_536;
/// Joining threads at the end takes at most this long (times the timeout scale).
const JOIN_MS: u64 = 5000;
/// A standalone notification is resent until this long after it was given (times the timeout scale, PROTOCOL §3).
const NOTIFY_MS: u64 = 30_000;

/// What an engine is made from.
#[derive(Clone, Debug)]
pub struct Config {
    /// The agent's name.
    pub agent_name: String,
    /// The backend in use.
    pub backend: String,
    /// What the host asked for, for `stats`.
    pub requested: String,
    /// Why fabrics that were asked for or could have been are not there.
    pub notes: Vec<String>,
    /// Where to listen; any address and port by default.
    pub listen: Option<ListenSpec>,
    /// Addresses to tell to peers, the preferred first.
    pub candidates: Vec<Candidate>,
    /// A spinning progress thread is permitted.
    pub progress_thread: bool,
    /// How long it spins after the last work, 0 for never.
    pub spin_us: u32,
    /// Multiplies all protocol deadlines.
    pub timeout_scale: u32,
}

/// An address that peers are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Address.
    pub ip: IpAddr,
    /// Scope of a link-local v6 address.
    pub scope: Option<String>,
    /// Port, if another than the listener's (a mapped one).
    pub port: Option<u16>,
}

impl Candidate {
    fn text(&self, listener_port: u16) -> String {
        let port = self.port.filter(|port| *port != 0).unwrap_or(listener_port);
        match (&self.ip, &self.scope) {
            (IpAddr::V4(ip), _) => format!("{ip}:{port}"),
            (IpAddr::V6(ip), None) => format!("[{ip}]:{port}"),
            (IpAddr::V6(ip), Some(scope)) => format!("[{ip}%{scope}]:{port}"),
        }
    }
}

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
    pub accepts_dropped: AtomicU64,
    pub revokes_unanswered: AtomicU64,
    pub violations: AtomicU64,
    pub lifelines_broken: AtomicU64,
    pub stale_fences: AtomicU64,
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
    pub peers: RwLock<HashMap<Instance, Arc<Peer>>>,
    pub epochs: Mutex<EpochBook>,
    pub inbox: Inbox,
    pub hook: Hook,
    pub self_copies: SelfCopies,
    pub revokes: Revokes,
    pub poller: Mutex<[Completion; POLL_BATCH]>,
    pub credit_waiters: Mutex<VecDeque<Arc<Peer>>>,
    pub credit_waiters_count: AtomicUsize,
    pub credit_dirty: Mutex<Vec<Arc<Peer>>>,
    pub last_caller_poll_ns: AtomicU64,
    pub listener: TcpListener,
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
    own_name: Arc<str>,
}

/// One engine. All methods may be called from any thread.
pub struct Driver {
    pub(crate) shared: Arc<Shared>,
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

impl Driver {
    /// Creates an engine over fabrics in order of preference: binds the listener and starts the service thread.
    pub fn create(config: Config, fabrics: Vec<Arc<dyn Fabric>>) -> Result<Driver> {
        check_name(config.agent_name.as_bytes()).map_err(|e| err!(InvalidParam, "{e}"))?;
        if fabrics.is_empty() {
            return Err(err!(Unsupported, "no fabric is available: {}", config.notes.join("; ")));
        }
        let spec =
            config.listen.clone().unwrap_or(ListenSpec { addr: Ipv4Addr::UNSPECIFIED.into(), ports: 0..=0 });
        let listener = crate::listen::bind(&spec)?;
        let port = listener.local_addr().map_err(|e| err!(Local, "listener: {e}"))?.port();
        let instance = Instance(random_bytes());
        let session_key = SessionKey::new(random_bytes());
        let host = host_id();
        let conn_info = ConnInfo {
            instance,
            name: config.agent_name.clone(),
            candidates: candidates(&config, &spec, port),
            key: session_key.clone(),
            host: host.clone(),
            fabrics: fabrics.iter().map(|fabric| fabric.name().to_owned()).collect(),
            backends: vec![config.backend.clone()],
            protocol: ProtocolRange::OURS,
            features: Vec::new(),
        };
        let conn_info = conn_info.encode().map_err(|e| err!(InvalidParam, "{e}"))?;
        let registry = Registry::new(instance, &config.agent_name, RegistryLimits::default())
            .map_err(|e| err!(InvalidParam, "{e}"))?;
        let local = |e: rustix::io::Errno| err!(Local, "creating the engine's descriptors: {e}");
        let shared = Arc::new(Shared {
            own_name: Arc::from(config.agent_name.as_str()),
            instance,
            session_key,
            host,
            clock: Clock::start(),
            routes: fabrics.iter().map(|_| Routes::default()).collect(),
            fabrics,
            registry: RwLock::new(registry),
            regions: RwLock::new(HashMap::new()),
            peers: RwLock::new(HashMap::new()),
            epochs: Mutex::new(EpochBook::default()),
            inbox: Inbox::default(),
            hook: Hook::new(),
            self_copies: SelfCopies::new(),
            revokes: Revokes::default(),
            poller: Mutex::new([Completion::EMPTY; POLL_BATCH]),
            credit_waiters: Mutex::new(VecDeque::new()),
            credit_waiters_count: AtomicUsize::new(0),
            credit_dirty: Mutex::new(Vec::new()),
            last_caller_poll_ns: AtomicU64::new(0),
            listener,
            conn_info,
            half_open: HalfOpen::default(),
            lifelines: Mutex::new(HashMap::new()),
            unread_lifelines: Mutex::default(),
            next_lifeline: AtomicU64::new(1),
            next_generation: AtomicU64::new(1),
            next_timer_check_ns: AtomicU64::new(0),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(local)?,
            wake_fd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(local)?,
            service_wake: AtomicBool::new(false),
            threads: Arc::default(),
            spinner: Spinner::default(),
            stopping: AtomicBool::new(false),
            halt: Halt::new().map_err(|e| err!(Local, "creating the engine's descriptors: {e}"))?,
            poisoned: AtomicBool::new(false),
            counters: Counters::default(),
            config,
        });
        shared.watch_listener(&shared.listener).map_err(|e| err!(Local, "watching the listener: {e}"))?;
        let driver = Driver { shared };
        driver.start_threads()?;
        driver.log_choice(port);
        Ok(driver)
    }

    fn start_threads(&self) -> Result<()> {
        let spawn = |name: &str, body: fn(&Arc<Shared>)| {
            let shared = Arc::clone(&self.shared);
            let guarded = move || {
                if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(&shared))).is_err() {
                    shared.poison();
                }
            };
            self.shared.threads.spawn(name, guarded).map_err(|e| err!(Local, "starting thread {name}: {e}"))
        };
        spawn("baton-service", Shared::service)?;
        spawn("baton-selfcopy", |shared| shared.self_copies.work(shared))?;
        if self.shared.config.progress_thread && self.shared.config.spin_us > 0 {
            spawn("baton-progress", Shared::spin)?;
        }
        Ok(())
    }

    fn log_choice(&self, port: u16) {
        let shared = &self.shared;
        let fabrics: Vec<_> = shared.fabrics.iter().map(|fabric| fabric.name()).collect();
        tracing::info!(
            "engine {} ({}): backend {} ({}), fabrics {}, listening on port {port}{}{}",
            shared.own_name,
            shared.instance,
            shared.config.backend,
            shared.config.requested,
            fabrics.join(" then "),
            if shared.config.notes.is_empty() { "" } else { "; passed over: " },
            shared.config.notes.join("; "),
        );
    }

    /// Connection information: whoever has it may connect.
    pub fn conn_info(&self) -> &[u8] {
        &self.shared.conn_info
    }

    /// Binds a peer's name to the instance in `info`. `name`: must be the one inside.
    pub fn load_remote(&self, name: Option<&str>, info: &[u8]) -> Result<()> {
        self.shared.usable()?;
        let info = ConnInfo::decode(info).map_err(|e| err!(InvalidParam, "{e}"))?;
        let (name_inside, instance) = (info.name.clone(), info.instance);
        let key = info.key.clone();
        let mut registry = self.shared.registry.write();
        let effect = registry
            .load_remote(name, info)
            .map_err(|e| err!(InvalidParam, "connection information: {e}"))?;
        let bound = registry.bound(&name_inside).cloned();
        drop(registry);
        match effect {
            LoadEffect::Own => return Ok(()),
            LoadEffect::ReplacedInstance { old } => self.shared.unbind(&old, EndReason::PeerRestarted),
            LoadEffect::New | LoadEffect::Same => {}
        }
        // A peer may be forgotten between the look-up and its lock.
        while !self.adopt(&self.shared.peer_for(instance, &name_inside)?, &name_inside, &bound, &key) {}
        Ok(())
    }

    /// Gives a peer its connection information. `false`: it was forgotten in the meantime.
    fn adopt(&self, peer: &Arc<Peer>, name: &str, info: &Option<Arc<ConnInfo>>, key: &SessionKey) -> bool {
        let mut state = peer.state.lock();
        if state.forgotten {
            return false;
        }
        peer.rename(name);
        state.info.clone_from(info);
        peer.bound.store(true, Ordering::Release);
        // A session that the peer opened before may carry outgoing work only once it has proved who it is.
        let wrong = match &mut state.conn {
            Conn::Open(channel) if !channel.verified => {
                channel.verified = channel.identity.as_ref().is_some_and(|identity| identity.verify(key));
                !channel.verified
            }
            _ => false,
        };
        if wrong {
            let why = "the session's other end does not prove to be the instance it claims".into();
            self.shared.end_epoch(peer, &mut state, EndReason::PeerGone(why));
        }
        state.release_waiting(self.shared.clock.now());
        self.shared.pump(peer, &mut state);
        true
    }

    /// Connects to a peer now; waits up to `timeout_ms`. `Ok(false)`: still under way.
    pub fn connect(&self, name: &str, timeout_ms: u32) -> Result<bool> {
        self.shared.usable()?;
        if *name == *self.shared.own_name {
            return Ok(true);
        }
        let peer = self.shared.peer_named(name)?;
        let deadline = Instant::now() + Duration::from_millis(u64::from(timeout_ms));
        let mut state = peer.state.lock();
        state.last_error = None;
        loop {
            if state.outgoing().is_some() {
                return Ok(true);
            }
            if let Some(error) = state.last_error.clone() {
                return Err(error);
            }
            self.shared.start_connect(&peer, &mut state);
            if timeout_ms == 0 {
                return Ok(false);
            }
            if peer.changed.wait_until(&mut state, deadline).timed_out() && state.outgoing().is_none() {
                return Err(state
                    .last_error
                    .clone()
                    .unwrap_or_else(|| err!(Timeout, "no session with {name} after {timeout_ms} ms")));
            }
        }
    }

    /// Forgets a name's binding; transfers to it end. Harmless for an unknown name.
    pub fn disconnect(&self, name: &str) -> Result<()> {
        self.shared.usable()?;
        let instance = self.shared.registry.write().disconnect(name);
        if let Some(instance) = instance {
            self.shared.unbind(&instance, EndReason::Disconnected);
        }
        Ok(())
    }

    /// Sends a message without a transfer.
    pub fn notify(&self, name: &str, message: &[u8]) -> Result<()> {
        self.shared.usable()?;
        if *name == *self.shared.own_name {
            self.shared.deliver(Notification {
                name: self.shared.own_name(),
                message: message.to_vec(),
                peer: None,
            });
            return Ok(());
        }
        let peer = self.shared.peer_named(name)?;
        let now = self.shared.clock.now();
        let deadline = now.plus_ms(self.shared.scaled(NOTIFY_MS).as_millis() as u64);
        let mut state = peer.state.lock();
        state.notify(now, message, deadline)?;
        self.shared.pump(&peer, &mut state);
        if state.outgoing().is_none() {
            self.shared.connect_if_wanted(&peer, &mut state);
            self.shared.wake_service();
        }
        Ok(())
    }

    /// Moves work on and takes notifications from the front as long as `accept` says yes.
    pub fn take_notifications(&self, accept: impl FnMut(&Notification) -> bool) -> Result<Vec<Notification>> {
        self.shared.usable()?;
        self.shared.caller_polls();
        if self.shared.inbox.is_empty() {
            return Ok(Vec::new());
        }
        let taken = self.shared.inbox.take_while(accept);
        self.shared.account_popped(&taken);
        Ok(taken)
    }

    /// The notifications that wait.
    pub fn inbox(&self) -> &Inbox {
        &self.shared.inbox
    }

    /// Sets or unsets the event hook.
    pub fn set_hook(&self, mask: u32, hook: Option<HookFn>) {
        self.shared.hook.set(mask, hook);
    }

    /// Lets the calling thread move work; whether there was any.
    pub fn progress(&self) -> Result<bool> {
        self.shared.usable()?;
        let copied = self.shared.self_copies.help(&self.shared);
        Ok(self.shared.caller_polls() | copied)
    }

    /// Refuses further work and puts every endpoint into error: after a panic nothing may be trusted.
    pub fn poison(&self) {
        self.shared.poison();
    }

    /// Cancels what is queued, closes every session, joins the threads.
    pub fn destroy(&self) -> Result<()> {
        self.shared.shut_down()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if let Err(e) = self.shared.shut_down() {
            tracing::error!("destroying the engine: {e}");
        }
    }
}

impl Shared {
    pub fn own_name(&self) -> Arc<str> {
        Arc::clone(&self.own_name)
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
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
    fn unbind(self: &Arc<Self>, instance: &Instance, reason: EndReason) {
        let Some(peer) = self.peers.read().get(instance).cloned() else { return };
        peer.bound.store(false, Ordering::Release);
        let mut state = peer.state.lock();
        state.info = None;
        state.retry_at = None;
        state.fail_waiting(&err!(RemoteDisconnect, "{}: {reason}", peer.name()));
        // Message numbers start anew with the next session, so the old one must not be resumed.
        let lost = state.carry.expire(baton_core::Nanos(u64::MAX)).len();
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
            && !peer.bound.load(Ordering::Acquire);
        if unused && peers.get(&peer.instance).is_some_and(|known| Arc::ptr_eq(known, peer)) {
            self.epochs.lock().record(peer.instance, state.machine.memory().clone());
            state.forgotten = true;
            peers.remove(&peer.instance);
        }
    }

    /// Gives ring and imm credit back for what the host took.
    fn account_popped(self: &Arc<Self>, taken: &[Notification]) {
        let mut rest = taken;
        while let Some(first) = rest.first() {
            let same = |n: &&Notification| match (&n.peer, &first.peer) {
                (Some(a), Some(b)) => Arc::ptr_eq(a, b),
                (None, None) => true,
                _ => false,
            };
            let run = rest.iter().take_while(same).count();
            if let Some(peer) = &first.peer {
                let bytes = rest[..run].iter().map(|n| n.message.len() as u64).sum();
                let mut state = peer.state.lock();
                match state.conn.channel() {
                    Some(channel) => channel.session.on_popped(run as u64, bytes),
                    None => state.carry.on_popped(run as u64, bytes),
                }
                self.pump(peer, &mut state);
            }
            rest = &rest[run..];
        }
    }

    /// Timers of one peer: session watchdog, notification deadlines, connect retries.
    pub fn run_peer_timers(self: &Arc<Self>, peer: &Arc<Peer>, now: baton_core::Nanos) {
        let mut state = peer.state.lock();
        if let Some(channel) = state.conn.channel()
            && channel.session.next_timeout().is_some_and(|at| at <= now)
        {
            channel.session.on_timeout(now);
            self.pump(peer, &mut state);
        }
        for seq in state.carry.expire(now) {
            self.counters.notifications_expired.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                "notification {} to {} found no session before its deadline and is lost",
                seq.0,
                peer.name()
            );
        }
        if !state.waiting.is_empty() && state.waiting_until <= now {
            let error = state.last_error.clone();
            state.fail_waiting(
                &error.unwrap_or_else(|| err!(RemoteDisconnect, "no session with {} in time", peer.name())),
            );
        }
        if state.retry_at.is_some_and(|at| at <= now) {
            state.retry_at = None;
            self.connect_if_wanted(peer, &mut state);
        }
    }

    fn shut_down(self: &Arc<Self>) -> Result<()> {
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
        self.spinner.kick();
        self.wake_service();
        let patience = self.scaled(JOIN_MS);
        let joined = self.threads.join(Instant::now() + patience);
        self.peers.write().clear();
        self.routes.iter().for_each(Routes::clear);
        self.hook.set(0, None);
        joined.map_err(|names| err!(Timeout, "threads still run after {patience:?}: {}", names.join(", ")))
    }
}

/// What peers are told. The port of an address is the listener's unless a mapped one is given.
fn candidates(config: &Config, spec: &ListenSpec, port: u16) -> Vec<String> {
    let mut told = config.candidates.clone();
    if !spec.addr.is_unspecified() {
        told.retain(|candidate| candidate.port.is_some() || candidate.ip == spec.addr);
        if told.is_empty() {
            told.push(Candidate { ip: spec.addr, scope: None, port: None });
        }
    } else if spec.addr.is_ipv4() {
        told.retain(|candidate| candidate.port.is_some() || candidate.ip.is_ipv4());
    }
    if told.is_empty() {
        told.push(Candidate { ip: Ipv4Addr::LOCALHOST.into(), scope: None, port: None });
    }
    told.iter().take(baton_core::wire::MAX_CANDIDATES).map(|candidate| candidate.text(port)).collect()
}

fn host_id() -> HostId {
    use std::os::unix::fs::MetadataExt;
    let boot_id =
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
    let pid_ns = std::fs::metadata("/proc/self/ns/pid").map(|meta| meta.ino()).unwrap_or(0);
    HostId { boot_id, pid_ns }
}
