//! Flushing what peers wrote into memory of accelerators.
//!
//! A NIC's WRITE into a GPU's memory and the completion that tells of it go different ways and may overtake each other. A READ of
//! that memory by the same NIC cannot overtake its WRITEs, so a completion is delivered only after such a READ, of one byte of every GPU by
//! every device, through a queue pair that is connected to itself. Reads come in rounds, one in flight at a time:
//!
//! ```text
//!   completion polled ─┐                      ┌─ delivered
//!   round    n in flight │ n+1 in flight      │        a round covers what was polled before it started,
//!                        └─ ticket n+1 ───────┘        so all that was polled during one shares the next
//! ```
//! A round that fails or takes too long fails its tickets and the next: what waited is never delivered, the sessions of all endpoints end,
//! and the next session builds new queue pairs.
//!
//! Without memory of accelerators that peers may write nothing of this exists; it costs one load per poll.

use crate::choose::{AckTime, Mtu};
use crate::config::VerbsConfig;
use crate::rail::{Device, OpenRail};
use baton_fabric::FabricError;
use baton_verbs::{
    Access, Channel, Connection, Cq, Mr, Opcode, PathMtu, Pd, Qp, QpCap, QpConfig, SendChain, SendFlags,
    Status, WcBuffer,
};
use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// GPUs whose memory peers may write, at most: READs of one round.
const MAX_GPUS: usize = 64;
/// How much longer a round may take than a device that gives up.
const GRACE: Duration = Duration::from_secs(1);

/// What has become of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Its round has not ended.
    Waiting,
    /// What was written before is visible.
    Flushed,
    /// Nobody knows; it must not be delivered.
    Failed,
}

/// A memory region of every device, one byte long, of one registration.
struct Target {
    id: u64,
    gpu: i32,
    addr: u64,
    mrs: Vec<Mr>,
}

/// One page that READs go to.
struct Page(NonNull<u8>);

// SAFETY: plain memory that nothing but devices touches.
unsafe impl Send for Page {}

const PAGE_BYTES: usize = 4096;

impl Page {
    fn new() -> Result<Page, FabricError> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a fresh private mapping that aliases nothing.
        let page = unsafe { mmap_anonymous(std::ptr::null_mut(), PAGE_BYTES, prot, flags) };
        let page = page.map_err(|e| FabricError::System(format!("mmap of a page for flushes: {e}")))?;
        NonNull::new(page.cast())
            .map(Page)
            .ok_or_else(|| FabricError::System("mmap answered null".to_owned()))
    }

    fn addr(&self) -> u64 {
        self.0.as_ptr() as u64
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: made by `new`; the memory region on it is withdrawn before (order of fields).
        if let Err(e) = unsafe { munmap(self.0.as_ptr().cast(), PAGE_BYTES) } {
            tracing::warn!("munmap of the page for flushes: {e}");
        }
    }
}

/// A queue pair that is connected to itself.
struct Link {
    qp: Qp,
    cq: Arc<Cq>,
    chain: SendChain,
    buffer: WcBuffer,
    /// A READ of this round is out.
    busy: bool,
}

/// What a device needs for it. A domain of its own: peers' queue pairs can do nothing with these regions.
struct Side {
    link: Option<Link>,
    landing: Mr,
    page: Page,
    pd: Arc<Pd>,
}

struct State {
    /// One per device, once there was something to flush.
    sides: Vec<Side>,
    targets: Vec<Target>,
    next_target: u64,
    /// Number of the last round that was started.
    round: u64,
    /// When the round that is in flight is given up.
    in_flight: Option<Instant>,
    /// Somebody has the ticket of the next round.
    wanted: bool,
    /// Why there are no queue pairs although there are targets.
    broken: Option<String>,
}

/// All flushing of a fabric.
pub(crate) struct Flusher {
    devices: Vec<Arc<Device>>,
    rails: Vec<Arc<OpenRail>>,
    config: VerbsConfig,
    active: AtomicBool,
    /// Rounds up to this one are complete, or covered by one that is.
    flushed: AtomicU64,
    /// Rounds up to this one will never be.
    failed: AtomicU64,
    /// Sessions have to end and nobody has ended them yet.
    news: AtomicBool,
    state: Mutex<State>,
    pub rounds: AtomicU64,
    pub reads: AtomicU64,
    pub failures: AtomicU64,
    /// Completions that waited for a round.
    pub held: AtomicU64,
    /// Completions that were dropped because theirs failed.
    pub dropped: AtomicU64,
}

impl Flusher {
    pub fn new(devices: &[Arc<Device>], rails: &[Arc<OpenRail>], config: &VerbsConfig) -> Flusher {
        Flusher {
            devices: devices.to_vec(),
            rails: rails.to_vec(),
            config: config.clone(),
            active: AtomicBool::new(false),
            flushed: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            news: AtomicBool::new(false),
            state: Mutex::new(State {
                sides: Vec::new(),
                targets: Vec::new(),
                next_target: 1,
                round: 0,
                in_flight: None,
                wanted: false,
                broken: None,
            }),
            rounds: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            held: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    }

    /// Whether anything has to be flushed.
    pub fn is_active(&self) -> bool {
        self.active.load(Ordering::Acquire)
    }

    /// Memory that peers may write: `register` makes a region of its first byte in each device's domain. From here on receives wait.
    pub fn add(
        &self,
        gpu: i32,
        addr: u64,
        register: impl Fn(&Device, &Arc<Pd>) -> Result<Mr, FabricError>,
    ) -> Result<u64, FabricError> {
        let mut state = self.state.lock();
        self.ready_locked(&mut state)?;
        let known = state.targets.iter().any(|target| target.gpu == gpu);
        let mut gpus: Vec<i32> = state.targets.iter().map(|target| target.gpu).collect();
        gpus.sort_unstable();
        gpus.dedup();
        if !known && gpus.len() == MAX_GPUS {
            return Err(FabricError::Limit(format!("memory of {MAX_GPUS} GPUs that peers may write")));
        }
        let sides = self.devices.iter().zip(&state.sides);
        let mrs = sides.map(|(device, side)| register(device, &side.pd)).collect::<Result<_, _>>()?;
        let id = state.next_target;
        state.next_target += 1;
        state.targets.push(Target { id, gpu, addr, mrs });
        self.active.store(true, Ordering::Release);
        Ok(id)
    }

    /// Forgets such memory; when this returns nothing reads it any more.
    pub fn remove(&self, id: u64) {
        let mut state = self.state.lock();
        let Some(at) = state.targets.iter().position(|target| target.id == id) else { return };
        let target = state.targets.swap_remove(at);
        let round = state.round;
        while state.in_flight.is_some() && state.round == round {
            // A round has a deadline, so this ends.
            self.pump_locked(&mut state);
            if state.in_flight.is_some() && state.round == round {
                parking_lot::MutexGuard::unlocked(&mut state, std::thread::yield_now);
            }
        }
        if state.targets.is_empty() {
            self.active.store(false, Ordering::Release);
        }
        drop(state);
        drop(target);
    }

    /// Builds what is missing of the queue pairs. New sessions begin with this, so that they do not begin with a failure.
    pub fn ready(&self) -> Result<(), FabricError> {
        if !self.is_active() {
            return Ok(());
        }
        self.ready_locked(&mut self.state.lock())
    }

    fn ready_locked(&self, state: &mut State) -> Result<(), FabricError> {
        while state.sides.len() < self.devices.len() {
            let side = Side::new(&self.devices[state.sides.len()])?;
            state.sides.push(side);
        }
        for (index, side) in state.sides.iter_mut().enumerate() {
            if side.link.is_none() {
                let rail = self.rails.iter().find(|rail| rail.device_index == index && rail.down().is_none());
                let device = &self.devices[index];
                let Some(rail) = rail else { continue };
                side.link = Some(connect(device, rail, &side.pd, &self.config)?);
            }
        }
        if state.sides.iter().all(|side| side.link.is_none()) {
            return Err(FabricError::System("flushing memory of GPUs: no RDMA port is up".to_owned()));
        }
        state.broken = None;
        Ok(())
    }

    /// A ticket for what has been polled until now of queues of this device.
    pub fn ticket(&self, device_index: usize) -> u64 {
        let mut state = self.state.lock();
        let linked = state.sides.get(device_index).is_some_and(|side| side.link.is_some());
        if !linked && state.broken.is_none() && !state.targets.is_empty() {
            // Its port was down when the others' queue pairs were made; a new session makes its own.
            let name = &self.devices[device_index].name;
            self.give_up(&mut state, format!("device {name} has no queue pair to itself yet"));
            return state.round;
        }
        if state.in_flight.is_some() {
            state.wanted = true;
            return state.round + 1;
        }
        self.start(&mut state);
        state.round
    }

    /// What has become of a ticket.
    pub fn fate(&self, ticket: u64) -> Fate {
        if ticket <= self.flushed.load(Ordering::Acquire) {
            Fate::Flushed
        } else if ticket <= self.failed.load(Ordering::Acquire) {
            Fate::Failed
        } else {
            Fate::Waiting
        }
    }

    /// Whether sessions have to end; forgotten by asking.
    pub fn take_news(&self) -> bool {
        self.news.load(Ordering::Relaxed) && self.news.swap(false, Ordering::AcqRel)
    }

    /// Looks whether the round in flight is over. Never blocks.
    pub fn pump(&self) {
        if let Some(mut state) = self.state.try_lock() {
            self.pump_locked(&mut state);
        }
    }

    /// Asks for an event when the round in flight ends. `true`: one has just ended.
    pub fn arm(&self) -> bool {
        let mut state = self.state.lock();
        let before = (self.flushed.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed));
        if state.in_flight.is_some() {
            for link in state.sides.iter().filter_map(|side| side.link.as_ref()).filter(|link| link.busy) {
                if let Err(e) = link.cq.arm() {
                    tracing::error!("completion queue of flushes: {e}");
                }
            }
            self.pump_locked(&mut state);
        }
        before != (self.flushed.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }

    /// A device is lost.
    pub fn lose(&self, device_index: usize) {
        let mut state = self.state.lock();
        if state.sides.get(device_index).is_some_and(|side| side.link.is_some()) {
            self.give_up(&mut state, format!("device {} is lost", self.devices[device_index].name));
        }
    }

    fn start(&self, state: &mut State) {
        state.wanted = false;
        state.round += 1;
        if state.targets.is_empty() {
            self.flushed.store(state.round, Ordering::Release);
            return;
        }
        if let Some(why) = state.broken.clone() {
            return self.give_up(state, why);
        }
        match self.post(state) {
            Ok(reads) => {
                let patience = AckTime::new(self.config.ib_timeout, self.config.ib_retry).worst;
                state.in_flight =
                    Some(Instant::now() + patience.saturating_add(GRACE).min(Duration::from_secs(3600)));
                self.rounds.fetch_add(1, Ordering::Relaxed);
                self.reads.fetch_add(reads, Ordering::Relaxed);
            }
            Err(why) => self.give_up(state, why),
        }
    }

    /// One READ for each GPU on each device.
    fn post(&self, state: &mut State) -> Result<u64, String> {
        let mut reads = 0;
        let State { sides, targets, round, .. } = state;
        for (index, side) in sides.iter_mut().enumerate() {
            let Some(link) = &mut side.link else { continue };
            link.chain.clear();
            for (at, target) in targets.iter().enumerate() {
                if targets[..at].iter().any(|other| other.gpu == target.gpu) {
                    continue;
                }
                let landing = (side.page.addr(), side.landing.lkey(), 1);
                let from = (target.addr, target.mrs[index].rkey());
                link.chain.push(*round, Opcode::Read, SendFlags::default(), landing, from);
                reads += 1;
            }
            link.chain.signal_last();
            // SAFETY: the page outlives the queue pair (order of fields).
            let posted = unsafe { link.qp.post_send(&mut link.chain) };
            posted.map_err(|e| format!("device {}: {e}", self.devices[index].name))?;
            link.busy = true;
        }
        Ok(reads)
    }

    fn pump_locked(&self, state: &mut State) {
        let Some(deadline) = state.in_flight else { return };
        let mut failure = None;
        for (index, side) in state.sides.iter_mut().enumerate() {
            let Some(link) = side.link.as_mut().filter(|link| link.busy) else { continue };
            match link.cq.poll(&mut link.buffer, MAX_GPUS) {
                Ok([]) => {}
                // Only the last READ makes a completion, unless one fails.
                Ok(done) => match done.iter().find(|wc| wc.status() != Status::Success) {
                    None => link.busy = false,
                    Some(wc) => failure = Some((index, format!("{:?}", wc.status()))),
                },
                Err(e) => failure = Some((index, e.to_string())),
            }
        }
        if let Some((index, why)) = failure {
            let name = &self.devices[index].name;
            return self.give_up(state, format!("device {name}: a READ through its own queue pair: {why}"));
        }
        if state.sides.iter().any(|side| side.link.as_ref().is_some_and(|link| link.busy)) {
            if Instant::now() >= deadline {
                self.give_up(state, "a READ through a device's own queue pair is not answered".to_owned());
            }
            return;
        }
        state.in_flight = None;
        self.flushed.store(state.round, Ordering::Release);
        if state.wanted {
            self.start(state);
        }
    }

    /// Fails this round and the next, and takes the queue pairs down: their READs are over with that.
    fn give_up(&self, state: &mut State, why: String) {
        if state.broken.is_none() {
            tracing::error!(
                "memory of GPUs cannot be flushed: {why}; all RDMA sessions end, for a notification must not be early"
            );
        }
        state.sides.iter_mut().for_each(|side| side.link = None);
        // Tickets of the next round are out, perhaps; the number is not used again.
        state.round += 1;
        state.in_flight = None;
        state.wanted = false;
        state.broken = Some(why);
        self.failed.store(state.round, Ordering::Release);
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.news.store(true, Ordering::Release);
    }

    /// Registrations that are flushed.
    pub fn targets(&self) -> usize {
        self.state.lock().targets.len()
    }
}

impl Side {
    fn new(device: &Device) -> Result<Side, FabricError> {
        let failed = |e: baton_verbs::VerbsError| {
            FabricError::System(format!("device {}, for flushing memory of GPUs: {e}", device.name))
        };
        let page = Page::new()?;
        let pd = Pd::new(&device.context).map_err(failed)?;
        let access = Access { local_write: true, ..Access::default() };
        let landing = Mr::register(&pd, page.addr(), PAGE_BYTES as u64, access).map_err(failed)?;
        Ok(Side { link: None, landing, page, pd })
    }
}

fn connect(
    device: &Device,
    rail: &OpenRail,
    pd: &Arc<Pd>,
    config: &VerbsConfig,
) -> Result<Link, FabricError> {
    let failed = |e: baton_verbs::VerbsError| {
        FabricError::System(format!("{rail}: a queue pair to itself, for flushing memory of GPUs: {e}"))
    };
    let channel: &Arc<Channel> = &device.channel;
    let cap = QpCap {
        max_send_wr: MAX_GPUS as u32,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_bytes: 0,
    };
    // The token is no queue's: its event does nothing but wake.
    let cq = Cq::new(channel, 2 * MAX_GPUS as u32, 0).map_err(failed)?;
    let qp = Qp::new(pd, &QpConfig { send_cq: &cq, recv_cq: &cq, cap }).map_err(failed)?;
    qp.to_init(rail.port, config.pkey_index, true, false).map_err(failed)?;
    let facts = rail.facts();
    let mtu: Mtu = facts.mtu;
    let path_mtu = PathMtu::from_bytes(mtu.bytes());
    qp.connect(&Connection {
        port: rail.port,
        sgid_index: facts.gid.index,
        dgid: facts.gid.gid.0,
        dlid: facts.lid,
        global: facts.lid == 0,
        dest_qp_num: qp.number(),
        path_mtu: path_mtu.ok_or_else(|| FabricError::System(format!("{rail}: path MTU {mtu}")))?,
        rq_psn: 0,
        sq_psn: 0,
        responder_reads: 1,
        initiator_reads: 1,
        service_level: config.sl,
        traffic_class: config.tc,
        hop_limit: config.hop_limit,
        min_rnr_timer: config.min_rnr,
        timeout: config.ib_timeout,
        retry_cnt: config.ib_retry,
        rnr_retry: config.rnr_retry,
    })
    .map_err(failed)?;
    let chain = SendChain::with_capacity(MAX_GPUS);
    Ok(Link { qp, cq, chain, buffer: WcBuffer::new(2 * MAX_GPUS), busy: false })
}
