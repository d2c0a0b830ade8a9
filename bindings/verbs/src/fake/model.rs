//! What a fake knows: its devices and everything made on them.

use super::config::{DeviceConfig, FakeConfig, FakeGid};
use super::dma::Piece;
use super::sysfs::Sysfs;
use super::vram::Late;
use rdma_sys::{ibv_event_type, ibv_qp_state, ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode};
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

/// Number of an object, never used again.
pub(super) type Id = u64;

pub(super) type Errno = i32;

pub(super) struct State {
    pub config: FakeConfig,
    pub rng: Rng,
    pub devices: Vec<Device>,
    pub contexts: BTreeMap<Id, Ctx>,
    pub channels: BTreeMap<Id, Channel>,
    pub pds: BTreeMap<Id, Pd>,
    pub mrs: BTreeMap<Id, Mr>,
    pub cqs: BTreeMap<Id, Cq>,
    pub qps: BTreeMap<Id, Qp>,
    /// Queue pairs that may have something to do.
    pub active: BTreeSet<Id>,
    next_id: Id,
    pub violations: Vec<String>,
    /// Events that the program took, by the object that they are about, until that goes away.
    pub taken_events: HashMap<usize, u32>,
    /// Responses to READs are kept back until this ends.
    pub reads_held: bool,
    pub stopping: bool,
    /// Where old libraries look the types of GIDs up.
    pub sysfs: Option<Sysfs>,
    /// WRITEs into accelerators' memory that are on their way.
    pub late: Vec<Late>,
}

pub(super) struct Device {
    pub config: DeviceConfig,
    pub dead: bool,
    pub next_qpn: u32,
    pub next_key: u32,
    pub qpns: HashMap<u32, Id>,
    pub keys: HashMap<u32, Id>,
    pub pinned_bytes: u64,
    /// Work requests that are taken before one fails, and with what.
    pub fail_post: Option<(u32, Errno)>,
    /// What polling its completion queues answers instead of entries.
    pub fail_poll: Option<i32>,
}

pub(super) struct Ctx {
    pub device: usize,
    pub events: VecDeque<Event>,
    pub signal: Signal,
}

#[derive(Clone, Copy)]
pub(super) struct Event {
    pub kind: ibv_event_type,
    pub about: About,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum About {
    Device,
    Port(u8),
    Qp(Id),
    Cq(Id),
}

pub(super) struct Channel {
    pub device: usize,
    pub signal: Signal,
    pub events: VecDeque<Id>,
    pub cqs: u32,
}

pub(super) struct Pd {
    pub device: usize,
    pub context: Id,
    pub users: u32,
}

pub(super) struct Mr {
    pub device: usize,
    pub pd: Id,
    /// Addresses as work requests name them.
    pub iova: u64,
    pub len: u64,
    /// Where `iova` is in this process.
    pub base: u64,
    pub access: u32,
    /// It is an accelerator's.
    pub vram: bool,
    pub key: u32,
    pub pinned_bytes: u64,
}

pub(super) struct Cq {
    pub device: usize,
    pub context: Id,
    /// The object that the program holds.
    pub ptr: usize,
    pub channel: Option<Id>,
    pub capacity: usize,
    pub entries: VecDeque<Cqe>,
    pub armed: bool,
    pub overrun: bool,
    pub qps: u32,
}

pub(super) struct Cqe {
    pub wr_id: u64,
    pub status: ibv_wc_status::Type,
    pub opcode: ibv_wc_opcode::Type,
    pub byte_len: u32,
    /// As on the wire.
    pub imm: Option<u32>,
    pub qpn: u32,
    /// Which slots polling it gives back: of the queue pair's send queue or not, up to this count.
    pub retires: (Id, bool, u64),
}

#[derive(Clone, Copy, Default)]
pub(super) struct Caps {
    pub send_wr: u32,
    pub recv_wr: u32,
    pub send_sge: u32,
    pub recv_sge: u32,
    pub inline: u32,
}

pub(super) struct Qp {
    pub device: usize,
    pub context: Id,
    pub pd: Id,
    pub ptr: usize,
    pub qpn: u32,
    pub send_cq: Id,
    pub recv_cq: Id,
    pub cap: Caps,
    pub signal_all: bool,
    pub state: ibv_qp_state::Type,
    pub path: Path,
    /// The first `started` have been executed at the peer and wait for their answer; the next one may be under way.
    pub sq: VecDeque<SendWr>,
    pub started: usize,
    pub rq: VecDeque<RecvWr>,
    pub sq_slots: Slots,
    pub rq_slots: Slots,
    /// Messages sent and received since the connection: with the first packet numbers they must agree on both sides.
    pub sent: u32,
    pub received: u32,
    /// When a work request was executed last.
    pub last_start: Option<Instant>,
    /// The peer does not answer: when to try again, and how often that was in vain.
    pub silence: Option<(Instant, u32)>,
    /// The peer had no RECV: when to try again, and how often that was in vain.
    pub rnr: Option<(Instant, u32)>,
}

/// Slots of a ring: taken at post, given back when a completion behind them is polled.
#[derive(Default)]
pub(super) struct Slots {
    pub posted: u64,
    pub retired: u64,
}

impl Slots {
    pub fn used(&self) -> u64 {
        self.posted - self.retired
    }
}

/// Attributes of a connection, as modify_qp set them.
#[derive(Clone, Copy, Default)]
pub(super) struct Path {
    pub port: u8,
    pub pkey_index: u16,
    pub access: u32,
    pub mtu: u32,
    pub dest_qpn: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub responder_reads: u8,
    pub initiator_reads: u8,
    pub min_rnr_timer: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub sgid_index: u8,
    pub sgid: Option<FakeGid>,
    pub dgid: [u8; 16],
    pub dlid: u16,
    pub global: bool,
}

pub(super) struct SendWr {
    pub wr_id: u64,
    pub opcode: ibv_wr_opcode::Type,
    pub signaled: bool,
    pub fenced: bool,
    pub imm: u32,
    pub sges: Vec<Sge>,
    pub inline: Option<Vec<u8>>,
    pub len: u64,
    pub remote_addr: u64,
    pub rkey: u32,
    /// Its number in the queue, from 1.
    pub number: u64,
    /// Bytes moved.
    pub done: u64,
    /// A READ's data, when it was taken before it is placed.
    pub taken: Option<Vec<u8>>,
    /// A READ's data stays away until then.
    pub late_until: Option<Instant>,
    /// How it failed; known before its turn to complete comes.
    pub failed: Option<ibv_wc_status::Type>,
    /// The failure came from the peer, so the peer answered everything before.
    pub refused_by_peer: bool,
}

impl SendWr {
    pub fn is_read(&self) -> bool {
        self.opcode == ibv_wr_opcode::IBV_WR_RDMA_READ
    }
}

#[derive(Clone, Copy)]
pub(super) struct Sge {
    pub addr: u64,
    pub len: u64,
    pub lkey: u32,
}

pub(super) struct RecvWr {
    pub wr_id: u64,
    pub sges: Vec<Sge>,
    pub number: u64,
}

/// A descriptor that is readable while there are events.
pub(super) struct Signal(OwnedFd);

impl Signal {
    pub fn new() -> Result<Signal, Errno> {
        use std::os::fd::FromRawFd;
        // SAFETY: takes no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
        if fd < 0 {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EMFILE));
        }
        // SAFETY: just made, owned by nobody else.
        Ok(Signal(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub fn fd(&self) -> i32 {
        self.0.as_raw_fd()
    }

    pub fn raise(&self) {
        // SAFETY: an open eventfd and a word; its count never comes near the limit at which a write would block.
        unsafe { libc::eventfd_write(self.fd(), 1) };
    }
}

/// xorshift64*: the schedule is the seed's, as far as threads permit.
pub(super) struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize) % n.max(1)
    }

    pub fn coin(&mut self) -> bool {
        self.below(2) == 0
    }
}

impl State {
    pub fn new(config: FakeConfig) -> State {
        let sysfs = config.old_library.then(|| Sysfs::new(&config.devices));
        let devices = config.devices.iter().map(|device| Device {
            next_qpn: device.first_qpn,
            next_key: device.first_key,
            config: device.clone(),
            dead: false,
            qpns: HashMap::new(),
            keys: HashMap::new(),
            pinned_bytes: 0,
            fail_post: None,
            fail_poll: None,
        });
        State {
            devices: devices.collect(),
            rng: Rng::new(config.seed),
            config,
            contexts: BTreeMap::new(),
            channels: BTreeMap::new(),
            pds: BTreeMap::new(),
            mrs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            active: BTreeSet::new(),
            next_id: 1,
            violations: Vec::new(),
            taken_events: HashMap::new(),
            reads_held: false,
            stopping: false,
            sysfs,
            late: Vec::new(),
        }
    }

    pub fn fresh_id(&mut self) -> Id {
        self.next_id += 1;
        self.next_id
    }

    /// Something that a correct program never does.
    pub fn violation(&mut self, what: String) {
        tracing::error!("fake verbs: {what}");
        if self.stopping {
            // Nobody is left who would ask.
            eprintln!("fake verbs: {what}");
            std::process::abort();
        }
        self.violations.push(what);
    }

    /// Tells every open context of a device.
    pub fn raise(&mut self, device: usize, kind: ibv_event_type, about: About) {
        for context in self.contexts.values_mut().filter(|context| context.device == device) {
            context.events.push_back(Event { kind, about });
            context.signal.raise();
        }
    }

    /// Tells the context that an object belongs to.
    pub fn tell(&mut self, context: Id, kind: ibv_event_type, about: About) {
        if let Some(context) = self.contexts.get_mut(&context) {
            context.events.push_back(Event { kind, about });
            context.signal.raise();
        }
    }

    /// Forgets events that nobody took yet about an object that goes away.
    pub fn forget_events(&mut self, gone: About) {
        for context in self.contexts.values_mut() {
            context.events.retain(|event| event.about != gone);
        }
    }

    /// Puts an entry into a completion queue.
    pub fn complete(&mut self, cq: Id, entry: Cqe) {
        let Some(queue) = self.cqs.get_mut(&cq) else { return };
        if queue.overrun || queue.entries.len() >= queue.capacity {
            return self.overrun(cq);
        }
        queue.entries.push_back(entry);
        if std::mem::take(&mut queue.armed)
            && let Some(channel) = queue.channel.and_then(|id| self.channels.get_mut(&id))
        {
            channel.events.push_back(cq);
            channel.signal.raise();
        }
    }

    /// The queue takes nothing any more; its context hears so once.
    pub fn overrun(&mut self, cq: Id) {
        let Some(queue) = self.cqs.get_mut(&cq).filter(|queue| !queue.overrun) else { return };
        queue.overrun = true;
        let context = queue.context;
        self.tell(context, ibv_event_type::IBV_EVENT_CQ_ERR, About::Cq(cq));
    }

    /// Takes up to `most` entries. Slots of their queue pairs come free.
    pub fn poll(&mut self, cq: Id, most: usize) -> Result<Vec<Cqe>, i32> {
        let queue = self.cqs.get_mut(&cq).ok_or(-libc::EINVAL)?;
        if let Some(answer) = self.devices[queue.device].fail_poll {
            return Err(answer);
        }
        let n = most.min(queue.entries.len());
        let taken: Vec<Cqe> = queue.entries.drain(..n).collect();
        for entry in &taken {
            let (id, send, number) = entry.retires;
            if let Some(qp) = self.qps.get_mut(&id) {
                let slots = if send { &mut qp.sq_slots } else { &mut qp.rq_slots };
                slots.retired = slots.retired.max(number);
            }
        }
        Ok(taken)
    }

    /// Where `len` bytes at `addr` are, if `key` is of a region of this device and domain with these rights.
    pub fn translate(
        &self,
        device: usize,
        pd: Id,
        key: u32,
        addr: u64,
        len: u64,
        rights: u32,
    ) -> Option<Piece> {
        let mr = self.mrs.get(self.devices[device].keys.get(&key)?)?;
        let end = addr.checked_add(len)?;
        let inside = addr >= mr.iova && end <= mr.iova + mr.len;
        let granted = mr.pd == pd && inside && mr.access & rights == rights;
        granted.then(|| Piece { addr: mr.base + (addr - mr.iova), len })
    }
}
