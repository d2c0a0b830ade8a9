//! What all threads of a fabric share: regions, endpoints, the completion queue, the list of ready endpoints, wake-ups.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton_fabric::{Completion, EndpointConfig, EndpointId, FabricError};
use parking_lot::{Mutex, RwLock};
use rustix::event::epoll::{Event, EventFlags};

use super::accept::Acceptor;
use super::counters::Counters;
use super::endpoint::Endpoint;
use super::pump;
use super::sys::{Epoll, Options, Timer, WakeUp, no_event};
use super::workers::Workers;
use crate::regions::Regions;

/// How long a message may wait for a RECV.
pub(super) const RECV_PATIENCE: Duration = Duration::from_millis(100);
/// How often deadlines are looked at, while there are any.
const TICK: Duration = Duration::from_millis(25);
/// After so long somebody else goes on with what a caller of `poll` or `post` began.
const LEASE: Duration = Duration::from_millis(1);
/// Looks in vain after which acknowledgements that may come later are sent.
const VAIN_LOOKS: u32 = 4;
/// For so long a caller that polls reads where it found something last, before it asks the kernel what else there is.
const WARM_FOR: Duration = Duration::from_micros(5);
/// How often a fabric without endpoints is looked at: all that can come is somebody who connects or probes, and hosts that poll for what
/// comes by other fabrics would pay for a system call in every look.
const IDLE_LOOK_NS: u64 = 100_000;
/// Endpoints of one fabric at most.
const MAX_ENDPOINTS: usize = 1 << 16;

// What an event is about; anything below is slot and generation of an endpoint.
pub(super) const ACCEPT: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;
const TICKED: u64 = u64::MAX - 2;
const LEASED: u64 = u64::MAX - 3;

#[derive(Default)]
struct Slot {
    generation: u32,
    endpoint: Option<Arc<Endpoint>>,
}

#[derive(Default)]
struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

pub(super) struct Shared {
    pub regions: Regions,
    pub counters: Counters,
    pub epoll: Epoll,
    pub acceptor: Acceptor,
    pub workers: Workers,
    pub options: Options,
    table: RwLock<Table>,
    /// Endpoints in the table.
    endpoints: AtomicUsize,
    since: Instant,
    /// When a fabric without endpoints was looked at, counted from `since`.
    looked_ns: AtomicU64,
    tokens: Mutex<HashMap<[u8; 16], EndpointId>>,
    cq: Mutex<VecDeque<Completion>>,
    cq_len: AtomicUsize,
    ready: Mutex<VecDeque<Arc<Endpoint>>>,
    ready_len: AtomicUsize,
    /// Whose acknowledgements wait until there is nothing else to do.
    debtors: Mutex<Vec<EndpointId>>,
    debts: AtomicUsize,
    /// Looks in vain in a row while something is owed.
    vain: AtomicU32,
    pub poller: Mutex<()>,
    /// Who received something last, and when all were looked at: hosts that spin for an answer are spared a system call.
    warm: Mutex<Option<(Arc<Endpoint>, Instant)>>,
    armed: AtomicBool,
    wake: WakeUp,
    tick: Timer,
    ticking: AtomicBool,
    lease: Timer,
    leased: AtomicBool,
    /// A rest was taken as far as it is here.
    pub awaited: AtomicBool,
}

impl Shared {
    pub fn new(acceptor: Acceptor, options: Options, workers: Workers) -> Result<Shared, FabricError> {
        let (epoll, wake, tick, lease) = (Epoll::new()?, WakeUp::new()?, Timer::new()?, Timer::new()?);
        epoll.add(&wake, WAKE, EventFlags::IN)?;
        epoll.add(&tick, TICKED, EventFlags::IN)?;
        epoll.add(&lease, LEASED, EventFlags::IN)?;
        epoll.add(acceptor.epoll(), ACCEPT, EventFlags::IN)?;
        Ok(Shared {
            regions: Regions::new()?,
            counters: Counters::default(),
            epoll,
            acceptor,
            workers,
            options,
            table: RwLock::default(),
            endpoints: AtomicUsize::new(0),
            since: Instant::now(),
            looked_ns: AtomicU64::new(0),
            tokens: Mutex::default(),
            cq: Mutex::default(),
            cq_len: AtomicUsize::new(0),
            ready: Mutex::default(),
            ready_len: AtomicUsize::new(0),
            debtors: Mutex::default(),
            debts: AtomicUsize::new(0),
            vain: AtomicU32::new(0),
            poller: Mutex::new(()),
            warm: Mutex::default(),
            armed: AtomicBool::new(false),
            wake,
            tick,
            ticking: AtomicBool::new(false),
            lease,
            leased: AtomicBool::new(false),
            awaited: AtomicBool::new(false),
        })
    }

    // ---- endpoints

    pub fn create(&self, config: &EndpointConfig) -> Result<Arc<Endpoint>, FabricError> {
        let token = random()?;
        let mut table = self.table.write();
        let slot = match table.free.pop() {
            Some(slot) => slot,
            None if table.slots.len() < MAX_ENDPOINTS => {
                table.slots.push(Slot::default());
                table.slots.len() as u32 - 1
            }
            None => {
                return Err(FabricError::Limit(format!(
                    "{MAX_ENDPOINTS} endpoints exist, the most one fabric holds"
                )));
            }
        };
        let entry = &mut table.slots[slot as usize];
        let id = EndpointId { slot, generation: entry.generation };
        let endpoint = Arc::new(Endpoint::new(id, *config, token));
        entry.endpoint = Some(Arc::clone(&endpoint));
        self.endpoints.fetch_add(1, Ordering::SeqCst);
        let slots = table.slots.len();
        drop(table);
        // All endpoints at once may be ready, or owe.
        let mut ready = self.ready.lock();
        let room = slots - ready.len().min(slots);
        ready.reserve(room);
        drop(ready);
        let mut debtors = self.debtors.lock();
        let room = slots - debtors.len().min(slots);
        debtors.reserve(room);
        drop(debtors);
        self.tokens.lock().insert(token, id);
        self.cq.lock().reserve(config.sq_depth as usize + config.rq_depth as usize);
        Ok(endpoint)
    }

    pub fn endpoint(&self, id: EndpointId) -> Option<Arc<Endpoint>> {
        let table = self.table.read();
        let slot = table.slots.get(id.slot as usize)?;
        if slot.generation == id.generation { slot.endpoint.clone() } else { None }
    }

    pub fn endpoint_of_token(&self, token: &[u8; 16]) -> Option<Arc<Endpoint>> {
        let id = *self.tokens.lock().get(token)?;
        self.endpoint(id)
    }

    pub fn all_endpoints(&self) -> Vec<Arc<Endpoint>> {
        self.table.read().slots.iter().filter_map(|slot| slot.endpoint.clone()).collect()
    }

    pub fn forget(&self, endpoint: &Endpoint) {
        let id = endpoint.id;
        {
            let mut table = self.table.write();
            let Some(slot) = table.slots.get_mut(id.slot as usize) else { return };
            if slot.generation != id.generation || slot.endpoint.take().is_none() {
                return;
            }
            self.endpoints.fetch_sub(1, Ordering::SeqCst);
            slot.generation = slot.generation.wrapping_add(1) & 0x7fff_ffff;
            table.free.push(id.slot);
        }
        self.tokens.lock().remove(&endpoint.token);
        self.warm.lock().take_if(|(warm, _)| warm.id == id);
        if let Some(fd) = endpoint.fd() {
            self.epoll.remove(fd);
        }
        let mut cq = self.cq.lock();
        endpoint.destroyed.store(true, Ordering::SeqCst);
        cq.retain(|c| c.endpoint != id);
        self.cq_len.store(cq.len(), Ordering::SeqCst);
    }

    /// Number of an endpoint in the epoll set.
    pub fn tag(id: EndpointId) -> u64 {
        u64::from(id.generation) << 32 | u64::from(id.slot)
    }

    // ---- completions

    pub fn complete(&self, endpoint: &Endpoint, completion: Completion) {
        let mut cq = self.cq.lock();
        if endpoint.destroyed.load(Ordering::SeqCst) {
            return;
        }
        cq.push_back(completion);
        self.cq_len.store(cq.len(), Ordering::SeqCst);
    }

    pub fn has_completions(&self) -> bool {
        self.cq_len.load(Ordering::SeqCst) > 0
    }

    pub fn take_completions(&self, out: &mut [Completion]) -> usize {
        if self.cq_len.load(Ordering::SeqCst) == 0 {
            return 0;
        }
        let mut cq = self.cq.lock();
        let n = out.len().min(cq.len());
        for (place, completion) in out.iter_mut().zip(cq.drain(..n)) {
            *place = completion;
        }
        self.cq_len.store(cq.len(), Ordering::SeqCst);
        n
    }

    // ---- ready endpoints

    /// Puts an endpoint that has something to do into the list, once.
    pub fn push_ready(&self, endpoint: &Arc<Endpoint>) {
        if !endpoint.queued.swap(true, Ordering::SeqCst) {
            let mut ready = self.ready.lock();
            // Control is little and never waits behind bulk.
            if endpoint.config.control {
                ready.push_front(Arc::clone(endpoint));
            } else {
                ready.push_back(Arc::clone(endpoint));
            }
            self.ready_len.store(ready.len(), Ordering::SeqCst);
        }
    }

    pub fn pop_ready(&self) -> Option<Arc<Endpoint>> {
        if self.ready_len.load(Ordering::SeqCst) == 0 {
            return None;
        }
        let mut ready = self.ready.lock();
        let endpoint = ready.pop_front()?;
        self.ready_len.store(ready.len(), Ordering::SeqCst);
        endpoint.queued.store(false, Ordering::SeqCst);
        Some(endpoint)
    }

    pub fn has_ready(&self) -> bool {
        self.ready_len.load(Ordering::SeqCst) > 0
    }

    // ---- acknowledgements that may come later

    /// An acknowledgement of that endpoint's is due once there is nothing else to do.
    pub fn owe(&self, endpoint: &Endpoint) {
        if !endpoint.owing.swap(true, Ordering::SeqCst) {
            let mut debtors = self.debtors.lock();
            debtors.push(endpoint.id);
            self.debts.store(debtors.len(), Ordering::SeqCst);
        }
    }

    pub fn has_debts(&self) -> bool {
        self.debts.load(Ordering::SeqCst) > 0
    }

    /// Before the ready endpoints have their turn: pays if some looks were in vain. One says little: hosts take messages until there is
    /// none, and then answer them.
    pub fn pay_when_idle(&self, in_vain: bool) {
        if !self.has_debts() {
            return;
        }
        let vain = if in_vain { self.vain.load(Ordering::Relaxed) + 1 } else { 0 };
        self.vain.store(vain % VAIN_LOOKS, Ordering::Relaxed);
        if vain == VAIN_LOOKS {
            self.pay();
        }
    }

    /// There is nothing else to do: what is owed and has not gone along with something becomes ready to be sent.
    pub fn pay(&self) {
        while self.has_debts() {
            let mut debtors = self.debtors.lock();
            let next = debtors.pop();
            self.debts.store(debtors.len(), Ordering::SeqCst);
            drop(debtors);
            let Some(endpoint) = next.and_then(|id| self.endpoint(id)) else { continue };
            // Cleared first: what is received from here on is owed anew.
            endpoint.owing.store(false, Ordering::SeqCst);
            if endpoint.ack_due.load(Ordering::SeqCst) {
                endpoint.tx_work.store(true, Ordering::SeqCst);
                self.push_ready(&endpoint);
            }
        }
    }

    // ---- events

    /// The endpoint received something.
    pub fn note_warm(&self, endpoint: &Arc<Endpoint>) {
        let mut warm = self.warm.lock();
        if warm.as_ref().is_some_and(|(known, _)| Arc::ptr_eq(known, endpoint)) {
            return;
        }
        *warm = Some((Arc::clone(endpoint), Instant::now()));
        drop(warm);
        // It may have been destroyed since its turn began, and then nobody else takes it out.
        if self.endpoint(endpoint.id).is_none() {
            self.warm.lock().take_if(|(warm, _)| warm.id == endpoint.id);
        }
    }

    /// Where to read without asking the kernel first; nowhere if it is time to look at all.
    pub fn warm(&self) -> Option<Arc<Endpoint>> {
        let mut warm = self.warm.lock();
        let (endpoint, looked) = warm.as_mut()?;
        let now = Instant::now();
        if now.duration_since(*looked) >= WARM_FOR {
            *looked = now;
            return None;
        }
        endpoint.may_read().then(|| Arc::clone(endpoint))
    }

    /// Whether a caller that polls should look for events now.
    pub fn is_look_due(&self) -> bool {
        if self.endpoints.load(Ordering::SeqCst) > 0 {
            return true;
        }
        let now = self.since.elapsed().as_nanos() as u64;
        let due = now.saturating_sub(self.looked_ns.load(Ordering::Relaxed)) >= IDLE_LOOK_NS;
        if due {
            self.looked_ns.store(now, Ordering::Relaxed);
        }
        due
    }

    /// Turns what the kernel reports into ready endpoints; handles connections and timers on the way.
    pub fn collect(&self) {
        let mut events = [no_event(); 64];
        for event in self.epoll.take(&mut events) {
            self.dispatch(event);
        }
    }

    fn dispatch(&self, event: &Event) {
        match event.data.u64() {
            ACCEPT => self.acceptor.step(self),
            WAKE => self.wake.drain(),
            TICKED => {
                self.tick.drain();
                self.run_tick();
            }
            LEASED => {
                self.lease.drain();
                self.leased.store(false, Ordering::SeqCst);
            }
            tag => {
                let id = EndpointId { slot: tag as u32, generation: (tag >> 32) as u32 };
                if let Some(endpoint) = self.endpoint(id) {
                    pump::on_event(self, &endpoint, event.flags);
                }
            }
        }
    }

    /// Deadlines are to be watched from now on.
    pub fn tick_soon(&self) {
        if !self.ticking.swap(true, Ordering::SeqCst) {
            self.tick.set(TICK);
        }
    }

    fn run_tick(&self) {
        let now = Instant::now();
        // Cleared first: whoever starts a deadline meanwhile sets it again.
        self.ticking.store(false, Ordering::SeqCst);
        let mut again = self.acceptor.expire(self, now);
        for endpoint in self.all_endpoints() {
            again |= endpoint.tick(self, now, RECV_PATIENCE);
            self.push_ready(&endpoint);
        }
        if again {
            self.tick_soon();
        }
    }

    // ---- sleeping

    pub fn arm(&self) -> bool {
        self.armed.store(true, Ordering::SeqCst);
        let idle = |s: &Shared| !s.has_completions() && !s.has_ready() && !s.has_debts();
        if idle(self) {
            self.collect();
            if idle(self) {
                return true;
            }
        }
        self.armed.store(false, Ordering::SeqCst);
        false
    }

    pub fn disarm(&self) {
        self.armed.store(false, Ordering::SeqCst);
    }

    /// Wakes the service thread if it sleeps.
    pub fn wake(&self) {
        if self.armed.swap(false, Ordering::SeqCst) {
            self.counters.wakes.add(1);
            self.wake.wake();
        }
    }

    /// The calling thread leaves work behind and most likely comes back for it at once; if not, the service thread takes over.
    pub fn wake_later(&self) {
        if self.armed.load(Ordering::SeqCst) && !self.leased.swap(true, Ordering::SeqCst) {
            self.counters.leases.add(1);
            self.lease.set(LEASE);
        }
    }
}

pub(super) fn random() -> Result<[u8; 16], FabricError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|e| super::sys::system("no random bytes", e))?;
    Ok(bytes)
}
