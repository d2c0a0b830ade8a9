//! The fabric: devices, endpoints, completion queues and memory put together.

use crate::choose::{
    AckTime, EndpointAddress, FabricAddress, Mtu, PairError, Pairing, PeerRail, Rail, mtu, rails, read_depth,
};
use crate::config::VerbsConfig;
use crate::endpoint::Endpoint;
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
use baton_verbs::{Connection, Library, PathMtu, Qp, QpCap, QpConfig, SOFT_ROCE_VENDOR};
use parking_lot::{Mutex, RwLock};
use serde_json::{Value, json};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// READs in flight per queue pair and direction that are asked for: what current adapters have.
const READ_DEPTH: u32 = 16;
/// Longest message of the engine, whatever the device could.
const MAX_MESSAGE_BYTES: u32 = 1 << 30;
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
    queues: RwLock<Vec<Arc<Queue>>>,
    next_queue: AtomicUsize,
    next_token: AtomicU64,
    pub(crate) memory: Registrations,
    vram: Vram,
    pub(crate) flusher: Arc<Flusher>,
    pub(crate) wake: Wake,
    pub(crate) counters: Arc<Counters>,
    /// How devices and GIDs were chosen, for whoever asks.
    notes: Vec<String>,
    /// Pairings that have been told to the log.
    told: Mutex<Vec<String>>,
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
            notes,
            told: Mutex::default(),
            looked_at_devices: Mutex::new(Instant::now()),
        }))
    }

    /// Rails that can be used now, and the index of each among all.
    fn usable(&self) -> Result<(Vec<Rail>, Vec<u8>), FabricError> {
        let up = self.rails.iter().enumerate().filter(|(_, rail)| rail.down().is_none());
        let (facts, indexes): (Vec<_>, Vec<_>) = up.map(|(i, rail)| (rail.facts(), i as u8)).unzip();
        if !facts.is_empty() {
            return Ok((facts, indexes));
        }
        let why: Vec<_> =
            self.rails.iter().filter_map(|rail| Some(format!("{rail}: {}", rail.down()?.why))).collect();
        Err(FabricError::System(format!("no RDMA port is up: {}", why.join("; "))))
    }

    fn pairing(&self, own: &[Rail], peer: Option<&Value>) -> Result<Pairing, FabricError> {
        let Some(peer) = peer else { return Ok(rails::unpaired(own)) };
        let peer = FabricAddress::parse(peer).map_err(|e| FabricError::Peer(e.to_string()))?;
        rails::active(own, &peer.rails).map_err(no_path)
    }

    /// The rail of each endpoint to be created.
    fn rails_for(&self, count: usize, peer: PeerView<'_>) -> Result<Vec<u8>, FabricError> {
        let (own, index) = self.usable()?;
        let chosen: Vec<u8> = match peer {
            PeerView::Endpoints(offered) => {
                let offered: Vec<PeerRail> = offered
                    .iter()
                    .map(|one| EndpointAddress::parse(one).map(|address| address.rail))
                    .collect::<Result<_, _>>()
                    .map_err(|e| FabricError::Peer(e.to_string()))?;
                let mut chosen = rails::passive(&own, &offered).map_err(no_path)?;
                chosen.resize(count, *chosen.first().unwrap_or(&0));
                chosen
            }
            PeerView::Unknown | PeerView::Fabric(_) => {
                let address = if let PeerView::Fabric(address) = peer { Some(address) } else { None };
                let pairing = self.pairing(&own, address)?;
                self.tell_once(&pairing.log);
                let lane = |i: usize| pairing.lane_rail((i - 1) as u8);
                (0..count).map(|i| if i == 0 { pairing.control_rail() } else { lane(i) }).collect()
            }
        };
        Ok(chosen.into_iter().map(|own| index[usize::from(own)]).collect())
    }

    fn tell_once(&self, line: &str) {
        let mut told = self.told.lock();
        if !told.iter().any(|earlier| earlier == line) {
            tracing::info!("verbs: {line}");
            if told.len() < 64 {
                told.push(line.to_owned());
            }
        }
    }

    /// Completion queues for endpoints on one device: one for all, or one for each where all are too many for the device.
    fn make_queues(&self, device_index: usize, needs: &[u32]) -> Result<Vec<Arc<Queue>>, FabricError> {
        let device = &self.devices[device_index];
        let together = needs.iter().fold(0u32, |sum, need| sum.saturating_add(*need));
        let make = |entries: u32| {
            let token = self.next_token.fetch_add(1, Ordering::Relaxed);
            let flusher = (&self.flusher, device_index);
            let queue = Queue::new(&device.channel, entries, token, &self.counters, flusher);
            queue.map(Arc::new).map_err(|e| {
                FabricError::System(format!(
                    "device {}: a completion queue of {entries} entries (limit {} entries, {} queues): {e}",
                    device.name, device.attr.max_cqe, device.attr.max_qp
                ))
            })
        };
        let made = if together <= device.attr.max_cqe {
            let one = make(together)?;
            vec![one; needs.len()]
        } else {
            needs.iter().map(|need| make(*need)).collect::<Result<Vec<_>, _>>()?
        };
        Ok(made)
    }

    fn make_endpoint(
        &self,
        config: &EndpointConfig,
        rail_index: u8,
        queue: &Arc<Queue>,
        member: u16,
    ) -> Result<Arc<Endpoint>, FabricError> {
        let rail = &self.rails[usize::from(rail_index)];
        let device = &rail.device;
        let cap = QpCap {
            // One more for the mark at the end of a fenced queue.
            max_send_wr: config.sq_depth + 1,
            max_recv_wr: config.rq_depth,
            ..device.cap
        };
        let failed = |e: baton_verbs::VerbsError| {
            FabricError::System(format!(
                "{rail}: a queue pair with {} sends and {} RECVs (the device's limits: {} queue pairs, {} work requests each): \
                 {e}; BATON_LANES lowers the number of queue pairs per session",
                cap.max_send_wr, cap.max_recv_wr, device.attr.max_qp, device.attr.max_qp_wr
            ))
        };
        let qp =
            Qp::new(&device.pd, &QpConfig { send_cq: &queue.cq, recv_cq: &queue.cq, cap }).map_err(failed)?;
        qp.to_init(rail.port, self.config.pkey_index, true, true).map_err(|e| {
            FabricError::System(format!("{rail}, partition key index {}: {e}", self.config.pkey_index))
        })?;
        let reads = READ_DEPTH.min(device.attr.max_qp_rd_atom).min(device.attr.max_qp_init_rd_atom) as u8;
        let psn = random_psn()?;
        let endpoint = self.endpoints.insert(|id| {
            Endpoint::new(id, qp, Arc::clone(queue), (Arc::clone(rail), rail_index), member, psn, reads)
        })?;
        queue.add(&endpoint);
        Ok(endpoint)
    }

    fn address_of(&self, endpoint: &Endpoint) -> Value {
        EndpointAddress {
            qpn: endpoint.qp.number(),
            psn: endpoint.psn,
            rail: PeerRail::of(endpoint.rail_index, &endpoint.rail.facts()),
            max_message_bytes: endpoint.rail.max_message_bytes,
            read_responder: endpoint.read_depth,
            read_initiator: endpoint.read_depth,
        }
        .to_value()
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
    }

    fn take_down(&self, made: Vec<Arc<Endpoint>>) {
        for endpoint in made {
            self.endpoints.remove(endpoint.id);
            self.destroy(endpoint);
        }
    }
}

fn no_path(e: PairError) -> FabricError {
    FabricError::Peer(e.to_string())
}

fn random_psn() -> Result<u32, FabricError> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).map_err(|e| FabricError::System(format!("random numbers: {e}")))?;
    Ok(u32::from_ne_bytes(bytes) & 0xff_ffff)
}

fn caps(config: &VerbsConfig, devices: &[Arc<Device>], rails: &[Arc<OpenRail>]) -> Caps {
    let least = |of: fn(&QpCap) -> u32| devices.iter().map(|device| of(&device.cap)).min().unwrap_or(0);
    let message = rails.iter().map(|rail| rail.max_message_bytes).min().unwrap_or(0);
    let facts: Vec<Rail> = rails.iter().map(|rail| rail.facts()).collect();
    Caps {
        max_sq_depth: least(|cap| cap.max_send_wr) - 1,
        max_rq_depth: least(|cap| cap.max_recv_wr),
        max_message_bytes: message.min(MAX_MESSAGE_BYTES),
        inline_bytes: least(|cap| cap.max_inline_bytes),
        default_lanes: rails::unpaired(&facts).lanes(config.lanes),
        stripe_min_bytes: STRIPE_MIN_BYTES,
        immediate: config.immediates && devices.iter().all(|device| device.context.has_immediate()),
        owner_revokes: false,
        needs_service: false,
        vram: false,
        // Its driver sends a fenced request again only when no READ is under way, and counts those behind it: a lost ACK, and both wait for ever.
        reads_behind_fence: devices.iter().all(|device| device.attr.vendor_id != SOFT_ROCE_VENDOR),
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
        self.flusher.ready()?;
        let chosen = self.rails_for(configs.len(), peer)?;
        let mut in_use: Vec<u8> = chosen.clone();
        in_use.sort_unstable();
        in_use.dedup();
        for rail in in_use {
            let rail = &self.rails[usize::from(rail)];
            rail.refresh(&self.config).map_err(|why| FabricError::System(format!("{rail}: {why}")))?;
        }
        let needs: Vec<u32> = configs.iter().map(|config| config.sq_depth + 1 + config.rq_depth).collect();
        let mut queues: Vec<Option<(Arc<Queue>, u16)>> = vec![None; configs.len()];
        for index in 0..self.devices.len() {
            let of_device: Vec<usize> = (0..configs.len())
                .filter(|at| self.rails[usize::from(chosen[*at])].device_index == index)
                .collect();
            let needs: Vec<u32> = of_device.iter().map(|at| needs[*at]).collect();
            let made = if needs.is_empty() { Vec::new() } else { self.make_queues(index, &needs)? };
            for (member, (at, queue)) in of_device.into_iter().zip(made).enumerate() {
                queues[at] = Some((queue, member as u16));
            }
        }
        let mut made = Vec::with_capacity(configs.len());
        for ((config, rail), queue) in configs.iter().zip(&chosen).zip(&queues) {
            let (queue, member) = queue.as_ref().ok_or_else(|| FabricError::System("no queue".to_owned()))?;
            match self.make_endpoint(config, *rail, queue, *member) {
                Ok(endpoint) => made.push(endpoint),
                Err(e) => {
                    self.take_down(made);
                    return Err(e);
                }
            }
        }
        let mut all = self.queues.write();
        for (queue, _) in queues.into_iter().flatten() {
            if !all.iter().any(|known| Arc::ptr_eq(known, &queue)) {
                all.push(queue);
            }
        }
        drop(all);
        Ok(made.iter().map(|endpoint| (endpoint.id, self.address_of(endpoint))).collect())
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
        let endpoint = self.get(endpoint)?;
        let peer = EndpointAddress::parse(peer).map_err(|e| FabricError::Peer(e.to_string()))?;
        let rail = endpoint.rail.facts();
        let refused = |why: String| FabricError::Peer(format!("{rail}: {why}"));
        let path: Mtu = mtu(rail.mtu, peer.rail.mtu, self.config.mtu);
        let path_mtu = PathMtu::from_bytes(path.bytes());
        let path_mtu =
            path_mtu.ok_or_else(|| refused(format!("path MTU {path} is none of {}", Mtu::LIST)))?;
        let initiator_reads = read_depth(endpoint.read_depth, peer.read_responder).map_err(refused)?;
        let connection = Connection {
            port: endpoint.rail.port,
            sgid_index: rail.gid.index,
            dgid: peer.rail.gid.0,
            dlid: peer.rail.lid,
            global: peer.rail.lid == 0 || rail.gid.gid.subnet_prefix() != peer.rail.gid.subnet_prefix(),
            dest_qp_num: peer.qpn,
            path_mtu,
            rq_psn: peer.psn,
            sq_psn: endpoint.psn,
            responder_reads: endpoint.read_depth,
            initiator_reads,
            service_level: self.config.sl,
            traffic_class: self.config.tc,
            hop_limit: self.config.hop_limit,
            min_rnr_timer: self.config.min_rnr,
            timeout: self.config.ib_timeout,
            retry_cnt: self.config.ib_retry,
            rnr_retry: self.config.rnr_retry,
        };
        *endpoint.gid.lock() = Some(rail.gid.gid);
        endpoint.qp.connect(&connection).map_err(|e| {
            let route = match e.errno {
                libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ETIMEDOUT => {
                    "; there is no route between the two, or no answer on it"
                }
                _ => "",
            };
            let text = format!(
                "{rail}, GID index {}: connecting to {} (queue pair {}): {e}{route}",
                rail.gid.index,
                peer.rail.gid.ip(),
                peer.qpn
            );
            FabricError::System(text)
        })
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
        json!({
            "rails": rails,
            "notes": self.notes,
            "queue_pairs": self.endpoints.len(),
            "completion_queues": self.queues.read().len(),
            "registrations": registrations,
            "memory_regions": memory_regions,
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
