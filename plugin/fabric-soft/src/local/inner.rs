//! What the fabric's callers and its copy threads share: endpoints, who has work, and how it gets done.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use baton_fabric::{Completion, EndpointId, FabricError, WcStatus};
use parking_lot::{Mutex, RwLock};
use rustix::event::epoll;

use super::LocalConfig;
use super::door::{Door, MAX_SLOTS, SlotSet};
use super::endpoint::{Endpoint, Link, State};
use super::joint::Joint;
use super::peer::{Backlog, FabricAddress, HEAVY_LOAD, Peer};
use super::pool::Pool;
use super::send::{SendQueue, Started, load};
use super::shm::Mapping;
use super::stats::Stats;
use super::{inbound, outbound, sys};
use crate::regions::Regions;

/// Bytes that one hold of a region's guard moves at most (doubled when that saves a call).
pub const SLICE_BYTES: usize = 1 << 20;
/// What a slice is charged at least, so that a flood of empty work requests uses the budget up as well.
const MIN_CHARGE: usize = 4096;
/// Polls that find nothing between two looks at the event descriptor.
const IDLE_POLLS: u64 = 4096;

/// Rings in the middle of arming before that is given up; the caller then comes again.
const ARM_ATTEMPTS: usize = 8;

/// Bytes of an endpoint's stamp: instance, token, zero.
const STAMP_BYTES: usize = 32;

const TOKEN_DOORBELL: u64 = 0;
const TOKEN_TIMER: u64 = 1;
const TOKEN_FIRST_PEER: u64 = 2;

/// What one slice of work did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    pub bytes: usize,
    pub more: bool,
}

impl Moved {
    pub const NOTHING: Moved = Moved { bytes: 0, more: false };
}

/// Place for an endpoint.
#[derive(Default)]
pub struct Slot {
    /// The next endpoint here gets this generation.
    pub generation: u32,
    pub endpoint: Option<Arc<Endpoint>>,
}

/// Where the next round of polling starts, so that no endpoint waits for ever behind others.
#[derive(Default)]
pub struct Cursors {
    work: u32,
    completions: u32,
    idle: u64,
}

/// See the module's text.
pub struct Inner {
    pub config: LocalConfig,
    pub address: FabricAddress,
    pub regions: Regions,
    pub stats: Stats,
    pub door: Door,
    /// Peers fetch the door's page through it.
    pub _door_fd: OwnedFd,
    stamps: Mapping,
    events: OwnedFd,
    timer: OwnedFd,
    pub slots: Box<[RwLock<Slot>]>,
    /// Endpoints that have something to pull.
    work: SlotSet,
    /// Endpoints that have something to poll.
    completions: SlotSet,
    /// Endpoints whose peer waits for a RECV.
    stalled: SlotSet,
    /// Outstanding WRITEs, which peers pull from here.
    writes: Backlog,
    polling: Mutex<Cursors>,
    peers: Mutex<Vec<Arc<Peer>>>,
    next_token: AtomicU64,
    pub pool: Pool,
    /// The pull that the threads of `pool` can join.
    pub joint: Joint,
}

fn system(what: &str) -> impl Fn(std::io::Error) -> FabricError + '_ {
    move |error| FabricError::System(format!("{what}: {error}"))
}

impl Inner {
    pub fn new(config: LocalConfig) -> Result<Inner, FabricError> {
        use std::os::fd::AsRawFd;
        let regions = Regions::new()?;
        let (door_fd, door) = Door::create().map_err(system("a door page"))?;
        let stamps = Mapping::private(MAX_SLOTS * STAMP_BYTES).map_err(system("the stamps"))?;
        let flags = epoll::CreateFlags::CLOEXEC;
        let events = epoll::create(flags).map_err(|e| system("epoll_create")(e.into()))?;
        let timer = rustix::time::timerfd_create(
            rustix::time::TimerfdClockId::Monotonic,
            rustix::time::TimerfdFlags::CLOEXEC | rustix::time::TimerfdFlags::NONBLOCK,
        )
        .map_err(|e| system("timerfd_create")(e.into()))?;
        for (fd, token) in [(door.event(), TOKEN_DOORBELL), (&timer, TOKEN_TIMER)] {
            watch(&events, fd, token).map_err(system("epoll_ctl"))?;
        }
        let pid = std::process::id() as i32;
        let address = FabricAddress {
            boot_id: sys::boot_id().map_err(system("the boot id"))?,
            pid_namespace: sys::pid_namespace().map_err(system("the pid namespace"))?,
            pid,
            start_time: sys::start_time(pid).map_err(system("the start time"))?,
            uid: rustix::process::getuid().as_raw(),
            instance: super::peer::hex(&regions.instance()),
            table: regions.table_addr(),
            door_fd: door_fd.as_raw_fd(),
            event_fd: door.event().as_raw_fd(),
        };
        Ok(Inner {
            pool: Pool::new(config.copy_threads),
            joint: Joint::new(config.copy_threads != 0),
            config,
            address,
            regions,
            stats: Stats::default(),
            door,
            _door_fd: door_fd,
            stamps,
            events,
            timer,
            slots: (0..MAX_SLOTS).map(|_| RwLock::default()).collect(),
            work: SlotSet::new(),
            completions: SlotSet::new(),
            stalled: SlotSet::new(),
            writes: Backlog::default(),
            polling: Mutex::default(),
            peers: Mutex::default(),
            next_token: AtomicU64::new(TOKEN_FIRST_PEER),
        })
    }

    pub fn event_fd(&self) -> &OwnedFd {
        &self.events
    }

    // ---- endpoints and peers

    pub fn endpoint(&self, id: EndpointId) -> Option<Arc<Endpoint>> {
        let endpoint = self.in_slot(id.slot)?;
        (endpoint.id == id).then_some(endpoint)
    }

    fn in_slot(&self, slot: u32) -> Option<Arc<Endpoint>> {
        self.slots.get(slot as usize)?.read().endpoint.clone()
    }

    /// Writes an endpoint's stamp; the token is 0 from its end on.
    pub fn set_stamp(&self, slot: u32, token: u64) {
        let words = self.stamps.slice::<AtomicU64>(slot as usize * STAMP_BYTES, 3);
        let instance = self.regions.instance();
        for (word, half) in words.iter().zip(instance.chunks_exact(8)) {
            let half = half.try_into().expect("chunks of eight");
            word.store(u64::from_ne_bytes(half), Ordering::Relaxed);
        }
        words[2].store(token, Ordering::SeqCst);
    }

    pub fn stamp_addr(&self, slot: u32) -> u64 {
        self.stamps.addr(slot as usize * STAMP_BYTES)
    }

    /// The peer of an address: known already, or probed now.
    pub fn peer(&self, address: &FabricAddress) -> Result<Arc<Peer>, String> {
        let mut peers = self.peers.lock();
        // Only endpoints keep a peer; one that no endpoint uses any more goes here.
        peers.retain(|peer| Arc::strong_count(peer) > 1);
        if let Some(peer) = peers.iter().find(|peer| peer.matches(address) && !peer.is_dead()) {
            return Ok(Arc::clone(peer));
        }
        let token = self.next_token.fetch_add(1, Ordering::Relaxed);
        let peer = Arc::new(Peer::open(&self.address, address, token)?);
        if peer.pid != self.address.pid {
            watch(&self.events, &peer.pidfd, token).map_err(|e| format!("watching the peer: {e}"))?;
        }
        peers.push(Arc::clone(&peer));
        Ok(peer)
    }

    /// Moves an endpoint to its end: the work request whose turn it is gets `status`, all others are flushed.
    pub fn end(&self, endpoint: &Endpoint, status: Option<WcStatus>) {
        if !endpoint.set_ended() {
            return;
        }
        let slot = endpoint.id.slot;
        self.set_stamp(slot, 0);
        endpoint.ring.close();
        if let Some(link) = endpoint.link.get() {
            link.ring.refuse();
            let mut send = endpoint.send.lock();
            // What the peer has done by now was done.
            let status = endpoint.ring.failure().or(status);
            let sane = send.absorb(endpoint.ring.done());
            send.end(if sane { status } else { Some(WcStatus::PeerGone) });
            self.count_bytes(endpoint, &mut send);
            drop(send);
            self.announce(link, true);
        }
        self.completions.add(slot);
        self.wake();
    }

    /// Refuses the next entry of the peer's ring, which ends the connection.
    pub fn fail_inbound(&self, endpoint: &Endpoint, link: &Link, status: WcStatus) {
        if endpoint.is_connected() {
            link.ring.set_failure(status);
        }
        self.end(endpoint, None);
    }

    /// Forgets a slot whose endpoint is gone.
    pub fn forget(&self, slot: u32) {
        for set in [&self.work, &self.completions, &self.stalled] {
            set.remove(slot);
        }
    }

    // ---- who must hear of what

    fn announce(&self, link: &Link, wake: bool) {
        if link.peer.door.announce(link.slot, wake) {
            self.stats.wakes.add(1);
        }
    }

    /// Wakes the own sleeper.
    pub fn wake(&self) {
        if self.door.wake() {
            self.stats.wakes.add(1);
        }
    }

    /// After [`SendQueue::start`]: tells the peer of new entries and the pollers of completions.
    pub fn tell_started(&self, endpoint: &Endpoint, started: Started, ready: bool) {
        if started.pushed
            && let Some(link) = endpoint.link.get()
        {
            self.announce(link, true);
        }
        if started.fault {
            self.end(endpoint, Some(WcStatus::LocalAccess));
        } else if ready {
            self.completions.add(endpoint.id.slot);
            self.wake();
        }
    }

    /// After a pull: tells the peer how far its ring is served, and the pollers of what was received.
    pub fn tell_done(
        &self,
        endpoint: &Endpoint,
        link: &Link,
        head: u64,
        tail: u64,
        signaled: bool,
        received: bool,
    ) {
        if head != link.ring.done() {
            link.ring.set_done(head);
            // A sleeper is worth waking for a completion, and for the work requests that wait for an empty ring.
            self.announce(link, signaled || head == tail);
        }
        if received {
            self.completions.add(endpoint.id.slot);
            self.wake();
        }
    }

    /// Something happened on a slot: takes over what the peer has done, and notes what there is to do.
    fn touch(&self, slot: u32) {
        let Some(endpoint) = self.in_slot(slot) else { return };
        // Orders the look at the rings behind the taking of the announcement.
        fence(Ordering::SeqCst);
        if let Some(link) = endpoint.live_link() {
            // In this order: what was done before the peer ended the connection counts.
            let gone = endpoint.ring.is_refused() || link.peer.is_known_dead();
            let failure = endpoint.ring.failure();
            let mut send = endpoint.send.lock();
            let sane = send.absorb(endpoint.ring.done());
            let started = send.start(&endpoint.ring);
            self.count_bytes(&endpoint, &mut send);
            let ready = send.is_ready();
            let lost = gone && (send.is_outstanding() || link.peer.is_known_dead());
            drop(send);
            self.tell_started(&endpoint, started, ready);
            if !sane {
                self.stats.violations.add(1);
            }
            if let Some(status) = failure.or((lost || !sane).then_some(WcStatus::PeerGone)) {
                self.end(&endpoint, Some(status));
            }
        }
        if endpoint.has_work() {
            self.work.add(slot);
        }
        if endpoint.is_ready() {
            self.completions.add(slot);
        }
    }

    /// Keeps the backlogs up to date.
    pub fn count_bytes(&self, endpoint: &Endpoint, send: &mut SendQueue) {
        let [writes, reads] = send.changes();
        self.writes.change(writes);
        if let Some(link) = endpoint.link.get()
            && link.peer.reads.change(reads)
        {
            link.peer.door.set_pulled(false);
        }
    }

    /// A managed region has been withdrawn: peers that have it mapped let go of it.
    pub fn tell_withdrawn(&self) {
        for peer in self.peers.lock().iter() {
            peer.door.set_withdrawn();
            if peer.door.wake() {
                self.stats.wakes.add(1);
            }
        }
    }

    /// Lets go of what peers have withdrawn.
    fn drop_withdrawn(&self) {
        let peers = self.peers.lock().clone();
        for peer in peers {
            peer.sources.drop_withdrawn(&peer, &self.stats);
        }
    }

    /// Regions of peers mapped here.
    pub fn mappings(&self) -> usize {
        self.peers.lock().iter().map(|peer| peer.sources.len()).sum()
    }

    /// Forgets peers that no endpoint uses any more, with what is mapped of them.
    pub fn forget_unused_peers(&self) {
        // Only endpoints keep a peer.
        self.peers.lock().retain(|peer| Arc::strong_count(peer) > 1);
    }

    /// Takes the announcements of peers.
    pub fn harvest(&self) {
        if self.door.take_withdrawn() {
            self.drop_withdrawn();
        }
        self.door.slots().take(|slot| self.touch(slot));
    }

    /// Notes work on an own endpoint and sees that somebody does it.
    pub fn add_work(&self, slot: u32) {
        self.work.add(slot);
        self.wake();
    }

    /// Looks at an endpoint again soon, as if the peer had announced it.
    pub fn look_again(&self, slot: u32) {
        self.door.slots().add(slot);
        self.wake();
    }

    // ---- doing it

    /// Does one slice on a slot. `more`: there is more, and the slot is noted.
    pub fn work_on(&self, slot: u32, budget: usize) -> Moved {
        let Some(endpoint) = self.in_slot(slot) else { return Moved::NOTHING };
        // Said before trying: either the holder sees it after letting go, or the lock is free.
        endpoint.again.store(true, Ordering::SeqCst);
        let Some(mut puller) = endpoint.pull.try_lock() else { return Moved::NOTHING };
        endpoint.again.store(false, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let budget = budget.min(SLICE_BYTES);
        let inbound = inbound::serve(self, &endpoint, &mut puller, budget);
        let own = if inbound.bytes < budget {
            outbound::pull(self, &endpoint, &mut puller, budget - inbound.bytes)
        } else {
            Moved { bytes: 0, more: endpoint.send.lock().has_reads() }
        };
        let bulk_done = puller.bulk_done;
        drop(puller);
        fence(Ordering::SeqCst);
        let more = inbound.more || own.more || endpoint.again.swap(false, Ordering::SeqCst);
        if more {
            self.work.add(slot);
            if pending(&endpoint, bulk_done) > HEAVY_LOAD {
                self.pool.offer(slot);
            }
        }
        Moved { bytes: inbound.bytes + own.bytes, more }
    }

    /// Works until the budget is used up or nothing is left; returns what was used.
    fn work(&self, budget: usize, cursor: &mut u32) -> usize {
        let mut spent = 0;
        while spent < budget {
            let Some(slot) = self.work.pop(*cursor) else { break };
            *cursor = slot + 1;
            let moved = self.work_on(slot, budget - spent);
            spent += moved.bytes.max(MIN_CHARGE);
        }
        spent
    }

    pub fn poll(&self, out: &mut [Completion], budget: usize) -> usize {
        let Some(mut cursors) = self.polling.try_lock() else { return 0 };
        self.harvest();
        self.retry_stalled();
        let spent = self.work(budget, &mut cursors.work);
        let n = self.collect(out, &mut cursors.completions);
        if n == 0 {
            cursors.idle += 1;
            // A caller that only polls must hear of dead peers as well. The bell is the sleeper's: who rang has taken note that it sleeps
            // no more, and rings again only when it has been up.
            if cursors.idle.is_multiple_of(IDLE_POLLS) {
                self.take_events(false);
            }
        }
        drop(cursors);
        if !self.is_idle() {
            self.wake();
        }
        if n == 0 && spent == 0 && self.is_waiting_for_copies() {
            // A caller that spins while others copy megabytes for it must not keep their threads off this core.
            std::thread::yield_now();
        }
        n
    }

    fn is_waiting_for_copies(&self) -> bool {
        self.writes.is_heavy() || self.door.is_pulled() || self.pool.is_busy()
    }

    fn collect(&self, out: &mut [Completion], cursor: &mut u32) -> usize {
        let mut n = 0;
        while n < out.len() {
            let Some(slot) = self.completions.pop(*cursor) else { break };
            *cursor = slot + 1;
            let Some(endpoint) = self.in_slot(slot) else { continue };
            n += endpoint.send.lock().drain(endpoint.id, &mut out[n..]);
            let ended = endpoint.state() == State::Ended;
            n += endpoint.recv.lock().drain(endpoint.id, ended, &mut out[n..]);
            if n == out.len() && endpoint.is_ready() {
                self.completions.add(slot);
            }
        }
        n
    }

    pub fn serve(&self, budget: usize) -> bool {
        self.harvest();
        self.retry_stalled();
        self.work(budget, &mut 0);
        !self.work.is_empty()
    }

    fn is_idle(&self) -> bool {
        self.work.is_empty() && self.completions.is_empty()
    }

    /// Prepares for sleeping on the event descriptor; `false` if something waits.
    pub fn arm(&self) -> bool {
        for _ in 0..ARM_ATTEMPTS {
            self.door.sleep();
            self.take_events(true);
            self.harvest();
            if !self.is_idle() {
                break;
            }
            // Somebody rang while we looked: what it was has been looked at, but the next ring needs a sleeper.
            if self.door.is_asleep() {
                return true;
            }
        }
        self.door.awake();
        false
    }

    // ---- events: the doorbell, the timer, deaths

    /// `sleeper`: whoever the bell wakes is at it.
    fn take_events(&self, sleeper: bool) {
        // Whoever was looking at an endpoint when it was destroyed kept its peer alive for that long.
        self.forget_unused_peers();
        let mut buffer =
            [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 16];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok(n) = epoll::wait(&self.events, &mut buffer[..], Some(&now)) else { return };
        for event in &buffer[..n] {
            match event.data.u64() {
                TOKEN_DOORBELL if sleeper => sys::drain(self.door.event()),
                TOKEN_DOORBELL => {}
                TOKEN_TIMER => {
                    sys::drain(&self.timer);
                    self.retry_stalled();
                }
                token => self.peer_event(token),
            }
        }
    }

    /// A peer's process has ended: every endpoint to it hears so.
    fn peer_event(&self, token: u64) {
        let peer = self.peers.lock().iter().find(|peer| peer.token == token).cloned();
        let Some(peer) = peer else { return };
        if !peer.is_dead() {
            return;
        }
        let _ = epoll::delete(&self.events, &peer.pidfd);
        self.stats.peers_gone.add(1);
        self.door.set_pulled(false);
        for slot in 0..self.slots.len() as u32 {
            let concerned = self.in_slot(slot).is_some_and(|endpoint| {
                endpoint.link.get().is_some_and(|link| Arc::ptr_eq(&link.peer, &peer))
            });
            if concerned {
                self.touch(slot);
            }
        }
    }

    /// An endpoint waits for a RECV, at most `limit` from now.
    pub fn wait_for_recv(&self, slot: u32, limit: Duration) {
        self.stalled.add(slot);
        let limit = limit + Duration::from_millis(1);
        let value = rustix::time::Itimerspec {
            it_interval: rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: rustix::time::Timespec {
                tv_sec: limit.as_secs() as i64,
                tv_nsec: i64::from(limit.subsec_nanos()),
            },
        };
        let _ = rustix::time::timerfd_settime(&self.timer, rustix::time::TimerfdTimerFlags::empty(), &value);
    }

    fn retry_stalled(&self) {
        self.stalled.take(|slot| self.work.add(slot));
    }
}

/// More than this a peer is not believed to have waiting: sums of loads stay far below 2⁶⁴.
const MAX_PENDING_BYTES: u64 = 1 << 40;

/// The load of what the pulling side of an endpoint still has to move, as far as the peer is to be believed.
fn pending(endpoint: &Endpoint, bulk_done: u64) -> u64 {
    let Some(link) = endpoint.live_link() else { return 0 };
    let entries =
        link.ring.tail().wrapping_sub(endpoint.served.load(Ordering::Acquire)).min(link.ring.depth());
    let bytes = link.ring.bulk().wrapping_sub(bulk_done).min(MAX_PENDING_BYTES);
    let inbound = if entries == 0 { 0 } else { load(entries, bytes) };
    inbound + endpoint.send.lock().read_load()
}

fn watch(events: &OwnedFd, fd: impl AsFd, token: u64) -> std::io::Result<()> {
    Ok(epoll::add(events, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?)
}
