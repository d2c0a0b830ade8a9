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

/// Bytes that wait for the host, of all peers together, with which whoever would add to them is not let in. Back-pressure holds
/// each session to 8 MiB, but what it brought outlives it: this is as much as 32 peers may have, far more than a host leaves that
/// takes any, and 2^20 short messages.
pub(crate) const MAX_WAITING_BYTES: u64 = 256 << 20;
/// That a message costs besides its bytes: its place in the queue, which doubles, and its allocation.
const MESSAGE_BYTES: u64 = 256;
/// That a peer costs which is remembered only because something of it waits.
const PEER_BYTES: u64 = 8 << 10;
/// Of those, the tables that it begins with.
const PEER_TABLES_BYTES: u64 = 2 << 10;
const _: () = assert!(size_of::<Peer>() as u64 + PEER_TABLES_BYTES <= PEER_BYTES);

/// The queue. A leaf lock: nothing else is taken while it is held.
#[derive(Default)]
pub struct Inbox {
    queue: Mutex<VecDeque<Notification>>,
    len: AtomicUsize,
    /// What all of it costs.
    waiting_bytes: AtomicU64,
    wants_fd: AtomicBool,
    fd: Mutex<Option<OwnedFd>>,
}

impl Inbox {
    /// Adds one.
    pub(crate) fn push(&self, n: Notification) {
        let mut queue = self.queue.lock();
        let newcomer =
            n.peer.as_ref().is_some_and(|peer| peer.notes_waiting.fetch_add(1, Ordering::Relaxed) == 0);
        self.waiting_bytes.fetch_add(cost(&n, newcomer), Ordering::Relaxed);
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

    /// What they cost, their bookkeeping included.
    pub fn waiting_bytes(&self) -> u64 {
        self.waiting_bytes.load(Ordering::Relaxed)
    }

    /// More wait than should; nothing is dropped, but there are to be no more who add to them.
    pub(crate) fn is_crowded(&self) -> bool {
        self.waiting_bytes() > MAX_WAITING_BYTES
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
            let last =
                one.peer.as_ref().is_some_and(|peer| peer.notes_waiting.fetch_sub(1, Ordering::Relaxed) == 1);
            self.waiting_bytes.fetch_sub(cost(&one, last), Ordering::Relaxed);
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

/// `with_peer`: its peer is remembered for this one alone.
fn cost(n: &Notification, with_peer: bool) -> u64 {
    MESSAGE_BYTES + n.message.capacity() as u64 + if with_peer { PEER_BYTES } else { 0 }
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

#[cfg(test)]
mod tests {
    use super::*;
    use baton_core::Instance;
    use baton_core::epoch::Tombstone;
    use baton_core::handshake::Link;

    #[test]
    fn what_waits_costs_its_bytes_its_place_and_its_peer_until_it_is_taken() {
        let inbox = Inbox::default();
        let peer = |n| {
            Arc::new(Peer::new(Link::new(Instance([9; 16]), Instance([n; 16]), Tombstone::default()), "peer"))
        };
        let (a, b) = (peer(1), peer(2));
        for from in [&a, &b, &a] {
            inbox.push(Notification::of(from, Path::OneSided, vec![7; 1000]));
        }
        inbox.push(Notification::own(Arc::from("self"), Vec::new()));
        assert_eq!(inbox.waiting_bytes(), 3 * 1000 + 4 * MESSAGE_BYTES + 2 * PEER_BYTES);
        let mut room = [(), ()].into_iter();
        let taken = inbox.take_while(|_| room.next().is_some());
        assert_eq!(taken.len(), 2);
        assert_eq!(inbox.waiting_bytes(), 1000 + 2 * MESSAGE_BYTES + PEER_BYTES, "one of `a` still waits");
        assert!(a.has_notes_waiting() && !b.has_notes_waiting());
        inbox.take_while(|_| true);
        assert_eq!((inbox.waiting_bytes(), a.has_notes_waiting()), (0, false));
    }
}
