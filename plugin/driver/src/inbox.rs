//! Notifications that arrived and wait for the host, the descriptor that announces them, and the event hook.

use crate::channel::Path;
use crate::peer::Peer;
use parking_lot::{Condvar, Mutex};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// One notification, complete and exactly once.
pub struct Notification {
    /// Agent name of the sender.
    pub name: Arc<str>,
    /// The message.
    pub message: Vec<u8>,
    /// Whose back-pressure account it is on; none for our own.
    pub(crate) peer: Option<Arc<Peer>>,
    /// By which it came.
    pub(crate) path: Path,
}

impl Notification {
    pub(crate) fn of(peer: &Arc<Peer>, path: Path, message: Vec<u8>) -> Notification {
        Notification { name: peer.name(), message, peer: Some(Arc::clone(peer)), path }
    }

    /// From this engine to itself.
    pub(crate) fn own(name: Arc<str>, message: Vec<u8>) -> Notification {
        Notification { name, message, peer: None, path: Path::OneSided }
    }
}

/// The queue. A leaf lock: nothing else is taken while it is held.
#[derive(Default)]
pub struct Inbox {
    queue: Mutex<VecDeque<Notification>>,
    len: AtomicUsize,
    wants_fd: AtomicBool,
    fd: Mutex<Option<OwnedFd>>,
}

impl Inbox {
    /// Adds one.
    pub(crate) fn push(&self, n: Notification) {
        let mut queue = self.queue.lock();
        queue.push_back(n);
        self.len.store(queue.len(), Ordering::Release);
        if queue.len() == 1 && self.wants_fd.load(Ordering::Relaxed) {
            self.signal(true);
        }
    }

    /// Notifications waiting; a hint without a lock.
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Whether none wait; a hint without a lock.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes notifications from the front as long as `accept` says yes.
    pub(crate) fn take_while(&self, mut accept: impl FnMut(&Notification) -> bool) -> Vec<Notification> {
        let mut queue = self.queue.lock();
        let n = queue.iter().take_while(|n| accept(n)).count();
        let mut taken = Vec::with_capacity(n);
        while taken.len() < n
            && let Some(one) = queue.pop_front()
        {
            taken.push(one);
        }
        self.len.store(queue.len(), Ordering::Release);
        if queue.is_empty() && !taken.is_empty() && self.wants_fd.load(Ordering::Relaxed) {
            self.signal(false);
        }
        taken
    }

    /// The eventfd that is readable while notifications wait.
    pub fn notify_fd(&self) -> std::io::Result<RawFd> {
        let queue = self.queue.lock();
        let raw = {
            let mut fd = self.fd.lock();
            if fd.is_none() {
                *fd = Some(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
            }
            fd.as_ref().map_or(-1, |fd| fd.as_raw_fd())
        };
        if !self.wants_fd.swap(true, Ordering::Relaxed) && !queue.is_empty() {
            self.signal(true);
        }
        Ok(raw)
    }

    // Called with the queue locked, so the descriptor always tells the queue's state.
    fn signal(&self, readable: bool) {
        let fd = self.fd.lock();
        let Some(fd) = fd.as_ref() else { return };
        let outcome = if readable {
            rustix::io::write(fd, &1u64.to_ne_bytes()).map(drop)
        } else {
            rustix::io::read(fd, &mut [0u8; 8]).map(drop)
        };
        if let Err(e) = outcome {
            tracing::warn!("notification eventfd: {e}");
        }
    }
}

const NOTIFICATION_BIT: u32 = 1;

/// Something for the host's event hook.
#[derive(Clone, Debug)]
pub enum HostEvent {
    /// At least one notification waits.
    Notification {
        /// Sender of the one that arrived.
        name: Arc<str>,
    },
    /// A session ended by failure.
    PeerFailed {
        /// Agent name.
        name: Arc<str>,
        /// The instance that failed.
        instance: [u8; 16],
        /// Inbound notified transfers that had begun to arrive and never will.
        partial_seqs: Vec<u64>,
    },
}

impl HostEvent {
    /// Bit of this kind in a hook's mask.
    pub fn mask_bit(&self) -> u32 {
        match self {
            HostEvent::Notification { .. } => NOTIFICATION_BIT,
            HostEvent::PeerFailed { .. } => 2,
        }
    }
}

/// The host's hook.
pub type HookFn = Box<dyn Fn(&HostEvent) + Send + Sync>;

/// Holds the hook and the events that wait for the service thread to run it.
pub struct Hook {
    mask: AtomicU32,
    pending: Mutex<VecDeque<HostEvent>>,
    hook: Mutex<Option<Arc<HookFn>>>,
    running: Mutex<Option<std::thread::ThreadId>>,
    idle: Condvar,
    /// Events that found no room.
    pub(crate) dropped: AtomicU64,
}

/// Events kept while the hook has not run yet; older ones of kind NOTIFICATION are merged, so this bounds peers' failures.
const MAX_PENDING_EVENTS: usize = 4096;

impl Hook {
    /// No hook.
    pub fn new() -> Hook {
        Hook {
            mask: AtomicU32::new(0),
            pending: Mutex::new(VecDeque::new()),
            hook: Mutex::new(None),
            running: Mutex::new(None),
            idle: Condvar::new(),
            dropped: AtomicU64::new(0),
        }
    }

    /// Whether the host wants to hear of notifications.
    pub(crate) fn wants_notifications(&self) -> bool {
        self.mask.load(Ordering::Relaxed) & NOTIFICATION_BIT != 0
    }

    /// Queues an event if somebody wants it; `true` if the service thread should be woken.
    pub(crate) fn raise(&self, event: HostEvent) -> bool {
        if self.mask.load(Ordering::Relaxed) & event.mask_bit() == 0 {
            return false;
        }
        let mut pending = self.pending.lock();
        let merges = matches!((&event, pending.back()), (HostEvent::Notification { name }, Some(HostEvent::Notification { name: last })) if name == last);
        if merges {
            return true;
        }
        if pending.len() < MAX_PENDING_EVENTS {
            pending.push_back(event);
        } else {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        true
    }

    /// Sets or unsets the hook; returns after a call that is running on another thread has ended.
    pub fn set(&self, mask: u32, hook: Option<HookFn>) {
        self.mask.store(if hook.is_some() { mask } else { 0 }, Ordering::Relaxed);
        *self.hook.lock() = hook.map(Arc::new);
        let mut running = self.running.lock();
        while running.is_some_and(|thread| thread != std::thread::current().id()) {
            self.idle.wait(&mut running);
        }
    }

    /// Runs the hook for everything that is queued; called by the service thread under no lock.
    pub(crate) fn run(&self) {
        loop {
            let Some(event) = self.pending.lock().pop_front() else { return };
            *self.running.lock() = Some(std::thread::current().id());
            let hook = self.hook.lock().clone();
            if let Some(hook) = hook {
                hook(&event);
            }
            *self.running.lock() = None;
            self.idle.notify_all();
        }
    }
}
