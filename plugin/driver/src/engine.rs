//! The engine as the host sees it: its life, its peers and their messages. Regions are in `register.rs`, transfers in `work.rs`.

use crate::clock::Clock;
use crate::config::{Config, candidates, encode_conn_info, fabric_addresses, host_id};
use crate::err;
use crate::error::Result;
use crate::halt::Halt;
use crate::host_calls::HostCalls;
use crate::inbox::{Hook, HookFn, Inbox, Notification};
use crate::landed::Landed;
use crate::linger::Lingering;
use crate::listen::{HalfOpen, ListenSpec};
use crate::managed::Managed;
use crate::peer::{Conn, Peer, PeerState, check_message};
use crate::progress::{Poller, Routes};
use crate::revoke::Revokes;
use crate::selfcopy::SelfCopies;
use crate::shared::{Counters, Shared, random_bytes};
use crate::spin::Spinner;
use crate::threads::Threads;
use crate::two_sided::{Bounces, Copiers};
use baton_core::Instance;
use baton_core::epoch::EpochBook;
use baton_core::peer::EndReason;
use baton_core::registry::{LoadEffect, Registry, RegistryLimits};
use baton_core::wire::{ConnInfo, ProtocolRange, SessionKey, check_name};
use baton_fabric::Fabric;
use parking_lot::{Mutex, MutexGuard, RwLock};
use rustix::event::{EventfdFlags, epoll, eventfd};
use std::collections::{HashMap, VecDeque};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Peers in queues of the polling thread for which there is room from the start, so that it does not allocate when the first waits.
const QUEUED_PEERS: usize = 64;

/// One engine. All methods may be called from any thread.
pub struct Driver {
    pub(crate) shared: Arc<Shared>,
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
            addresses: fabric_addresses(&fabrics),
            backends: config.backends.words().map(str::to_owned).collect(),
            protocol: ProtocolRange::OURS,
            features: Vec::new(),
        };
        let conn_info = encode_conn_info(conn_info)?;
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
            served: Arc::default(),
            bounces: Bounces::new(fabrics.len()),
            copiers: Arc::new(Copiers::default()),
            fabrics,
            registry: RwLock::new(registry),
            regions: RwLock::new(HashMap::new()),
            managed: Managed::default(),
            block_lists: RwLock::default(),
            partial_registrations_said: Mutex::default(),
            peers: RwLock::new(HashMap::new()),
            epochs: Mutex::new(EpochBook::default()),
            lingering: Lingering::default(),
            names: Arc::default(),
            inbox: Inbox::default(),
            landed: Landed::default(),
            hook: Hook::new(),
            self_copies: SelfCopies::new(),
            revokes: Revokes::default(),
            poller: Mutex::new(Poller::new()),
            credit_waiters: Mutex::new(VecDeque::with_capacity(QUEUED_PEERS)),
            credit_waiters_count: AtomicUsize::new(0),
            credit_dirty: Mutex::new(Vec::with_capacity(QUEUED_PEERS)),
            host_calls: HostCalls::default(),
            listener,
            listener_resumes_ns: AtomicU64::new(0),
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
            threads: Arc::new(Threads::new(config.thread_start.clone())),
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
        if self.shared.config.backends.two_sided {
            spawn("baton-bounce", Shared::tend_bounces)?;
            for _ in 0..self.shared.config.copy_threads {
                spawn("baton-copy", |shared| shared.copiers.work())?;
            }
        }
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
            shared.config.backends,
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
        peer.rename(&mut state, name);
        state.info.clone_from(info);
        peer.bound.store(true, Ordering::Release);
        // A session that the peer opened before may carry outgoing work only once it has proved who it is.
        let wrong = match &mut state.conn {
            Conn::Open(channel) if !channel.verified => {
                channel.verified = channel.identity.as_ref().is_some_and(|identity| identity.verify(key));
                !channel.verified || !channel.speaks_as(name)
            }
            Conn::Open(channel) => !channel.speaks_as(name),
            _ => false,
        };
        if wrong {
            let why = "the session's other end does not prove to be the instance and name it claims".into();
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
        loop {
            let peer = self.shared.peer_named(name)?;
            let mut state = peer.state.lock();
            // Nobody looks after one that was forgotten in between.
            if !state.forgotten {
                return self.connect_to(&peer, &mut state, timeout_ms);
            }
        }
    }

    fn connect_to(
        &self,
        peer: &Arc<Peer>,
        state: &mut MutexGuard<'_, PeerState>,
        timeout_ms: u32,
    ) -> Result<bool> {
        state.last_error = None;
        // Also when back-off makes the attempt begin later, somebody waits for it.
        state.callers += 1;
        let connected = self.wait_connected(peer, state, timeout_ms);
        state.callers -= 1;
        connected
    }

    fn wait_connected(
        &self,
        peer: &Arc<Peer>,
        state: &mut MutexGuard<'_, PeerState>,
        timeout_ms: u32,
    ) -> Result<bool> {
        let deadline = Instant::now() + Duration::from_millis(u64::from(timeout_ms));
        loop {
            // Under the lock that whoever ends the engine takes before it wakes those who wait: nobody comes too late to be told.
            self.shared.usable()?;
            if state.outgoing().is_some() {
                return Ok(true);
            }
            if let Some(error) = state.last_error.clone().filter(|_| !state.told_to_wait) {
                return Err(error);
            }
            self.shared.start_connect(peer, state);
            if timeout_ms == 0 {
                return Ok(false);
            }
            if peer.changed.wait_until(state, deadline).timed_out() && state.outgoing().is_none() {
                return Err(state.last_error.clone().unwrap_or_else(|| {
                    err!(Timeout, "no session with {} after {timeout_ms} ms", peer.name())
                }));
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
            check_message(message.len())?;
            self.shared.deliver(Notification::own(self.shared.own_name(), message.to_vec()));
            return Ok(());
        }
        loop {
            let peer = self.shared.peer_named(name)?;
            let mut state = peer.state.lock();
            // What waits at one that was forgotten in between would be lost.
            if state.forgotten {
                continue;
            }
            state.notify(self.shared.clock.now(), message, self.shared.notify_deadline())?;
            self.shared.pump(&peer, &mut state);
            if state.outgoing().is_none() {
                self.shared.connect_if_wanted(&peer, &mut state);
                self.shared.wake_service();
            }
            return Ok(());
        }
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
