//! The fabric: devices, endpoints, completion queues and memory put together.

use crate::choose::{AckTime, FabricAddress, Rail, rails};
use crate::config::VerbsConfig;
use crate::endpoint::{Endpoint, Posted};
use crate::flush::Flusher;
use crate::memory::{Registrations, Vram};
use crate::queue::{Counters, Queue};
use crate::rail::{self, Device, OpenRail};
use crate::table::Table;
use crate::vram::{Accelerators, Offer};
use crate::wake::Wake;
use baton_fabric::{
    Batch, Caps, Completion, EndpointConfig, EndpointId, Fabric, FabricError, Keys, Memory, PeerView,
    PostError, RecvSlot, RegionKeys,
};
use baton_verbs::{Library, QpCap, SOFT_ROCE_VENDOR};
use parking_lot::{Mutex, RwLock};
use serde_json::{Value, json};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Blocks up to this long are worth packing on soft-RoCE.
const SOFT_PACK_BYTES: u32 = 2048;

/// Longest READ on soft-RoCE: one of 4 MiB loses packets, asks for them again and is a tenth as fast.
const SOFT_READ_BYTES: u32 = 1 << 20;

/// Longest message of the engine, whatever the device could.
const MAX_MESSAGE_BYTES: u32 = 1 << 30;
/// Most pieces of one SEND: what current adapters have. Only endpoints that ask for them have room for them in their queues.
const MAX_SEND_SGE: u32 = 30;
/// Below this many bytes a transfer stays on one lane.
const STRIPE_MIN_BYTES: u64 = 256 * 1024;
/// How often a busy service thread asks devices for events; a sleeping one is woken by them.
const DEVICE_EVENTS_EVERY: Duration = Duration::from_millis(2);
/// Queues that are looked at in every poll although nothing is expected of them.
const COLD_QUEUES_PER_POLL: usize = 8;

/// The RDMA fabric.
pub struct VerbsFabric {
    pub(crate) config: VerbsConfig,
    pub(crate) devices: Vec<Arc<Device>>,
    pub(crate) rails: Vec<Arc<OpenRail>>,
    rail_devices: Arc<[usize]>,
    caps: Caps,
    pub(crate) endpoints: Table,
    pub(crate) queues: RwLock<Vec<Arc<Queue>>>,
    next_queue: AtomicUsize,
    pub(crate) next_token: AtomicU64,
    pub(crate) memory: Registrations,
    vram: Vram,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) wake: Wake,
    pub(crate) counters: Arc<Counters>,
    /// What queue pairs that are gone had handed to their devices.
    posted_before: Mutex<Posted>,
    /// How devices and GIDs were chosen, for whoever asks.
    notes: Vec<String>,
    /// Pairings that have been told to the log.
    pub(crate) told: Mutex<Vec<String>>,
    /// When devices were last asked for events; they are asked often by a busy service thread.
    looked_at_devices: Mutex<Instant>,
}

impl VerbsFabric {
    /// Opens libibverbs and the devices that the settings want.
    ///
    /// # Errors
    /// Without the library, a usable device or what the settings name; the text says which and why.
    pub fn open(config: VerbsConfig) -> Result<Arc<VerbsFabric>, FabricError> {
        let library = Library::open().map_err(|e| FabricError::Unsupported(e.to_string()))?;
        // Without it a child that writes to a registered page would leave the parent with another page than the device's.
        if let Err(e) = library.fork_init() {
            tracing::warn!(
                "{e}: a fork of this process may corrupt registered memory on kernels before 5.12"
            );
        }
        VerbsFabric::with_accelerators(&library, config, Accelerators::of_host)
    }

    /// As [`VerbsFabric::open`], with a library that is open already and without accelerators.
    pub fn with_library(library: &Library, config: VerbsConfig) -> Result<Arc<VerbsFabric>, FabricError> {
        VerbsFabric::with_accelerators(library, config, || Accelerators::none("they were not looked for"))
    }

    /// As [`VerbsFabric::open`], with a library that is open already. Accelerators are looked for once there are devices.
    pub fn with_accelerators(
        library: &Library,
        config: VerbsConfig,
        find: impl FnOnce() -> Accelerators,
    ) -> Result<Arc<VerbsFabric>, FabricError> {
        let rail::Opened { devices, rails, mut notes } = rail::open(library, &config)?;
        let offer = Offer::probe(find(), &devices);
        notes.push(match &offer {
            Ok(offer) => format!("memory of accelerators can be registered: {}", offer.describe()),
            Err(why) => format!("memory of accelerators cannot be registered: {why}"),
        });
        notes.iter().for_each(|note| tracing::info!("verbs: {note}"));
        tracing::info!("verbs: {}", AckTime::new(config.ib_timeout, config.ib_retry));
        let rails: Vec<Arc<OpenRail>> = rails.into_iter().map(Arc::new).collect();
        let wake = Wake::new(&devices).map_err(|e| FabricError::System(format!("epoll: {e}")))?;
        let flusher = Arc::new(Flusher::new(&devices, &rails, &config));
        Ok(Arc::new(VerbsFabric {
            caps: Caps { vram: offer.is_ok(), ..caps(&config, &devices, &rails) },
            vram: Vram { offer, flusher: Arc::clone(&flusher), always_flush: config.always_flush },
            flusher,
            rail_devices: rails.iter().map(|rail| rail.device_index).collect(),
            config,
            devices,
            rails,
            endpoints: Table::new(),
            queues: RwLock::new(Vec::new()),
            next_queue: AtomicUsize::new(0),
            next_token: AtomicU64::new(1),
            memory: Registrations::default(),
            wake,
            counters: Arc::default(),
            posted_before: Mutex::default(),
            notes,
            told: Mutex::default(),
            looked_at_devices: Mutex::new(Instant::now()),
        }))
    }

    fn get(&self, id: EndpointId) -> Result<Arc<Endpoint>, FabricError> {
        self.endpoints.get(id).ok_or_else(|| FabricError::NotFound(format!("{id:?}")))
    }

    /// The session of an endpoint hears that it is over, and the endpoint accepts nothing more.
    pub(crate) fn give_up(&self, endpoint: &Endpoint, device_lost: bool) {
        if device_lost {
            endpoint.lost.store(true, Ordering::Release);
        }
        endpoint.fence();
        endpoint.queue.inject(crate::queue::lost(endpoint));
        self.wake.ring();
    }

    /// A flush failed: nobody knows what is visible of what peers have written, so no session goes on.
    fn end_unflushed(&self) {
        for endpoint in self.endpoints.all().iter().filter(|endpoint| !endpoint.is_fenced()) {
            self.give_up(endpoint, false);
        }
    }

    /// The queue of an event.
    pub(crate) fn queue_by_token(&self, token: u64) -> Option<Arc<Queue>> {
        self.queues.read().iter().find(|queue| queue.token == token).cloned()
    }

    /// Takes an endpoint out and destroys its queue pair: when this returns the device does nothing for it any more.
    fn destroy(&self, endpoint: Arc<Endpoint>) {
        if endpoint.queue.remove(&endpoint) {
            self.queues.write().retain(|queue| !Arc::ptr_eq(queue, &endpoint.queue));
        }
        // Whoever found it before may still be in a call, which never blocks. Nobody finds it any more.
        while Arc::strong_count(&endpoint) > 1 {
            std::thread::yield_now();
        }
        *self.posted_before.lock() += endpoint.posted_so_far();
    }

    /// What all queue pairs, those that are gone too, have handed to their devices.
    fn posted(&self) -> Posted {
        let mut all = *self.posted_before.lock();
        self.endpoints.all().iter().for_each(|endpoint| all += endpoint.posted_so_far());
        all
    }

    pub(crate) fn take_down(&self, made: Vec<Arc<Endpoint>>) {
        for endpoint in made {
            self.endpoints.remove(endpoint.id);
            self.destroy(endpoint);
        }
    }
}

fn caps(config: &VerbsConfig, devices: &[Arc<Device>], rails: &[Arc<OpenRail>]) -> Caps {
    let least = |of: fn(&QpCap) -> u32| devices.iter().map(|device| of(&device.cap)).min().unwrap_or(0);
    let message = rails.iter().map(|rail| rail.max_message_bytes).min().unwrap_or(0);
    let max_message_bytes = message.min(MAX_MESSAGE_BYTES);
    let facts: Vec<Rail> = rails.iter().map(|rail| rail.facts()).collect();
    let soft = |device: &Arc<Device>| device.attr.vendor_id == SOFT_ROCE_VENDOR;
    Caps {
        max_sq_depth: least(|cap| cap.max_send_wr) - 1,
        max_rq_depth: least(|cap| cap.max_recv_wr),
        max_message_bytes,
        longest_read_bytes: match devices.iter().any(soft) {
            true => max_message_bytes.min(SOFT_READ_BYTES),
            false => max_message_bytes,
        },
        inline_bytes: least(|cap| cap.max_inline_bytes),
        max_send_sge: devices
            .iter()
            .map(|device| device.attr.max_sge)
            .min()
            .unwrap_or(1)
            .clamp(1, MAX_SEND_SGE),
        default_lanes: rails::unpaired(&facts).lanes(config.lanes),
        lane_sq_depth: 1024,
        stripe_min_bytes: STRIPE_MIN_BYTES,
        immediate: config.immediates && devices.iter().all(|device| device.context.has_immediate()),
        owner_revokes: false,
        needs_service: false,
        vram: false,
        // Its driver sends a fenced request again only when no READ is under way, and counts those behind it: a lost ACK, and both wait for ever.
        reads_behind_fence: !devices.iter().any(soft),
        headed_bytes: 0,
        // A NIC has no time to lose with a work request; the kernel has (128 × 1 KiB packed: WRITE 1.5 to 2.5 times as fast, READ
        // 1.2 times; even at 4 KiB).
        pack_below_bytes: match devices.iter().any(soft) {
            true => SOFT_PACK_BYTES,
            false => 0,
        },
    }
}

impl Fabric for VerbsFabric {
    fn name(&self) -> &'static str {
        "verbs"
    }

    fn caps(&self) -> Caps {
        self.caps
    }

    fn address(&self) -> Value {
        let facts: Vec<Rail> = self.rails.iter().map(|rail| rail.facts()).collect();
        FabricAddress::of(&facts).to_value()
    }

    fn reach(&self, peer: &Value, _deadline: Instant) -> Result<(), String> {
        let (own, _) = self.usable().map_err(|e| e.to_string())?;
        self.pairing(&own, Some(peer)).map(drop).map_err(|e| e.to_string())
    }

    fn lanes_for(&self, peer: Option<&Value>) -> u8 {
        let pairing = self.usable().and_then(|(own, _)| self.pairing(&own, peer));
        pairing.map_or(self.caps.default_lanes, |pairing| pairing.lanes(self.config.lanes))
    }

    fn register(&self, memory: &Memory) -> Result<Keys, FabricError> {
        self.memory.register(&self.devices, &self.rail_devices, memory, &self.vram)
    }

    fn region_keys(&self, keys: Keys) -> RegionKeys {
        self.memory.keys(keys).unwrap_or_else(|| RegionKeys::whole(keys))
    }

    fn revoke(&self, keys: Keys) {
        self.memory.revoke(keys);
    }

    fn deregister(&self, keys: Keys, _deadline: Instant) -> Result<(), FabricError> {
        self.memory.deregister(keys)
    }

    fn create_endpoint(&self, config: &EndpointConfig) -> Result<(EndpointId, Value), FabricError> {
        let mut made = self.create_endpoints(&[*config], PeerView::Unknown)?;
        made.pop().ok_or_else(|| FabricError::System("no endpoint was made".to_owned()))
    }

    fn create_endpoints(
        &self,
        configs: &[EndpointConfig],
        peer: PeerView<'_>,
    ) -> Result<Vec<(EndpointId, Value)>, FabricError> {
        self.create_all(configs, peer)
    }

    fn rail(&self, endpoint: EndpointId) -> u8 {
        self.endpoints.get(endpoint).map_or(0, |endpoint| endpoint.rail_index)
    }

    fn connect_endpoint(
        &self,
        endpoint: EndpointId,
        peer: &Value,
        _deadline: Instant,
    ) -> Result<(), FabricError> {
        self.connect(&*self.get(endpoint)?, peer)
    }

    fn post_recv(&self, endpoint: EndpointId, slots: &[RecvSlot]) -> Result<(), FabricError> {
        self.get(endpoint)?.post_recv(slots)
    }

    fn post(&self, endpoint: EndpointId, batch: &Batch<'_>) -> Result<(), PostError> {
        let found = self.endpoints.get(endpoint);
        let found = found
            .ok_or_else(|| PostError { taken: 0, error: FabricError::NotFound(format!("{endpoint:?}")) })?;
        found.post(batch)
    }

    fn poll(&self, out: &mut [Completion]) -> usize {
        if self.flusher.is_active() {
            self.flusher.pump();
        }
        if self.flusher.take_news() {
            self.end_unflushed();
        }
        let queues = self.queues.read();
        if queues.is_empty() {
            return 0;
        }
        let start = self.next_queue.fetch_add(1, Ordering::Relaxed);
        let mut cold = COLD_QUEUES_PER_POLL;
        let mut n = 0;
        for turn in 0..queues.len() {
            if n == out.len() {
                break;
            }
            let queue = &queues[start.wrapping_add(turn) % queues.len()];
            if !queue.is_hot() {
                if cold == 0 {
                    continue;
                }
                cold -= 1;
            }
            n += queue.poll(&mut out[n..]);
        }
        n
    }

    fn serve(&self, _budget_bytes: usize) -> bool {
        false
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.wake.fd().as_raw_fd())
    }

    fn arm(&self) -> bool {
        self.take_events();
        let queues: Vec<Arc<Queue>> = self.queues.read().clone();
        // Every queue, also after one has something: they are armed once and stay so until their event.
        let mut waiting = queues.iter().filter(|queue| queue.arm()).count();
        if self.flusher.is_active() {
            waiting += queues.iter().filter(|queue| queue.is_holding() && queue.look()).count();
            // Behind the looks, which may have begun a round.
            waiting += usize::from(self.flusher.arm());
            if self.flusher.take_news() {
                self.end_unflushed();
                waiting += 1;
            }
        }
        waiting == 0
    }

    fn disarm(&self) {}

    fn retry_time(&self) -> Duration {
        AckTime::new(self.config.ib_timeout, self.config.ib_retry).worst
    }

    fn tend(&self) {
        let now = Instant::now();
        let due = {
            let mut last = self.looked_at_devices.lock();
            let due = now.duration_since(*last) >= DEVICE_EVENTS_EVERY;
            if due {
                *last = now;
            }
            due
        };
        if due {
            self.take_device_events();
        }
    }

    fn fence(&self, endpoint: EndpointId) {
        if let Some(endpoint) = self.endpoints.get(endpoint) {
            endpoint.fence();
        }
    }

    fn is_quiet(&self, endpoint: EndpointId) -> bool {
        let Some(endpoint) = self.endpoints.get(endpoint) else { return true };
        self.flusher.pump();
        if !endpoint.is_drained() || endpoint.queue.is_holding() {
            endpoint.queue.look();
        }
        endpoint.is_drained() && !endpoint.queue.is_holding()
    }

    fn destroy_endpoint(&self, endpoint: EndpointId) {
        if let Some(endpoint) = self.endpoints.remove(endpoint) {
            self.destroy(endpoint);
        }
    }

    fn stats(&self) -> Value {
        let rails: Vec<Value> = self
            .rails
            .iter()
            .map(|rail| {
                let facts = rail.facts();
                json!({
                    "device": facts.device, "port": facts.port, "gid": facts.gid.gid.to_string(), "gid_index": facts.gid.index,
                    "mtu": facts.mtu.bytes(), "speed_mbps": facts.speed_mbps, "down": rail.down().map(|down| down.why),
                })
            })
            .collect();
        let (registrations, memory_regions) = self.memory.count();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let posted = self.posted();
        json!({
            "rails": rails,
            "notes": self.notes,
            "queue_pairs": self.endpoints.len(),
            "completion_queues": self.queues.read().len(),
            "registrations": registrations,
            "memory_regions": memory_regions,
            "sends_posted": posted.sends,
            "receives_posted": posted.receives,
            "doorbells": posted.doorbells,
            "completions": count(&self.counters.completions),
            "errors": count(&self.counters.errors),
            "completion_queue_errors": count(&self.counters.queue_errors),
            "late_completions": count(&self.counters.late),
            "accelerators": {
                "offered": self.caps.vram,
                "regions_flushed": self.flusher.targets(),
                "flushes": count(&self.flusher.rounds),
                "flush_reads": count(&self.flusher.reads),
                "flushes_failed": count(&self.flusher.failures),
                "receives_held": count(&self.flusher.held),
                "receives_dropped": count(&self.flusher.dropped),
            },
        })
    }
}

impl Drop for VerbsFabric {
    fn drop(&mut self) {
        // Endpoints and queues hold each other until they are taken apart.
        self.take_down(self.endpoints.drain());
    }
}
