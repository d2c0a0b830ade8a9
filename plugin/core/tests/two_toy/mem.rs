//! Memory of a node: data, bounce slabs, send and control slots, the credit page.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use baton_core::RegionId;
use baton_core::two_sided::channel::Channel;
use baton_core::two_sided::codec::{CONTROL_SLOT_BYTES, Direction, Status};
use baton_core::two_sided::pool::{SlabId, SlotId};
use baton_core::two_sided::setup::{Place, PlaceJob, Span, TwoMemory};

use super::Config;

/// The data region, and where its owner has it.
pub const REGION: RegionId = RegionId(0xDA7A);
pub const LOCAL_BASE: u64 = 0x10_0000;
/// Regions of the same bytes that peers may only read, may only write, and that was withdrawn.
pub const READ_ONLY: RegionId = RegionId(1);
pub const WRITE_ONLY: RegionId = RegionId(2);
pub const WITHDRAWN: RegionId = RegionId(3);

/// What RECV slots hold when they are posted.
const SPOILT: u8 = 0xEE;

/// Memory of bounce slabs; several nodes may be one engine and share it.
pub type Slabs = Rc<RefCell<HashMap<SlabId, Vec<u8>>>>;

pub struct Mem {
    data: RefCell<Vec<u8>>,
    slabs: Slabs,
    control: RefCell<Vec<Vec<u8>>>,
    page: RefCell<Vec<u8>>,
    /// What waits to be taken, by the slot of its head.
    rests: RefCell<HashMap<SlotId, Vec<u8>>>,
    slot_bytes: usize,
    slab_bytes: usize,
    gather: bool,
    /// The data region was withdrawn.
    pub withdrawn: Cell<bool>,
    /// Length of the region; what lies behind is nobody's.
    pub limit: Cell<u64>,
}

impl Mem {
    pub fn new(config: &Config, slabs: Slabs) -> Mem {
        let mem = Mem {
            data: RefCell::new(vec![0; config.data_bytes]),
            slabs,
            control: RefCell::default(),
            page: RefCell::default(),
            rests: RefCell::default(),
            slot_bytes: config.slot as usize,
            slab_bytes: (config.slot * config.pool.slab_slots) as usize,
            gather: config.gather,
            withdrawn: false.into(),
            limit: Cell::new(config.data_bytes as u64),
        };
        mem.reset(config);
        mem
    }

    /// What belongs to an epoch is new in each.
    pub fn reset(&self, config: &Config) {
        // Nobody took what a peer sent after it broke the protocol.
        self.rests.borrow_mut().clear();
        *self.control.borrow_mut() = vec![vec![SPOILT; CONTROL_SLOT_BYTES]; config.control_rq as usize];
        *self.page.borrow_mut() = vec![0; Channel::credit_page_bytes(config.lanes.into())];
    }

    pub fn add_slab(&self, slab: SlabId) {
        assert!(self.slabs.borrow_mut().insert(slab, vec![SPOILT; self.slab_bytes]).is_none());
    }

    pub fn drop_slab(&self, slab: SlabId) {
        self.slabs.borrow_mut().remove(&slab).expect("a slab that is there");
    }

    pub fn data(&self, at: usize, len: usize) -> Vec<u8> {
        self.data.borrow()[at..at + len].to_vec()
    }

    pub fn set_data(&self, at: usize, bytes: &[u8]) {
        self.data.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn at(&self, place: Place) -> usize {
        match place {
            Place::Local(addr) => (addr - LOCAL_BASE) as usize,
            Place::Region(_, offset) => offset as usize,
        }
    }

    pub fn read(&self, span: &Span) -> Vec<u8> {
        self.data(self.at(span.from), span.len as usize)
    }

    pub fn place(&self, job: &PlaceJob) {
        let bytes = match job.rest {
            Some(_) => self.take_rest(job),
            None => self.slot(job.slot, job.at as usize, job.len as usize),
        };
        self.set_data(self.at(job.to), &bytes);
    }

    /// The bytes of a job that are not in its slot.
    pub fn take_rest(&self, job: &PlaceJob) -> Vec<u8> {
        let rest = self.rests.borrow_mut().remove(&job.slot).expect("a rest is taken once");
        assert_eq!(rest.len(), job.len as usize, "{job:?}");
        rest
    }

    /// A message, of which only the head goes into the slot if it has one.
    pub fn fill_with(&self, slot: SlotId, bytes: &[u8], head: Option<usize>) {
        let (head, rest) = bytes.split_at(head.unwrap_or(bytes.len()));
        self.fill(slot, head);
        if !rest.is_empty() {
            assert!(
                self.rests.borrow_mut().insert(slot, rest.to_vec()).is_none(),
                "{slot:?} is not lent twice"
            );
        }
    }

    fn slot(&self, slot: SlotId, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.slot_bytes, "outside of {slot:?}");
        let begin = slot.index as usize * self.slot_bytes + at;
        self.slabs.borrow()[&slot.slab][begin..begin + len].to_vec()
    }

    pub fn fill(&self, slot: SlotId, bytes: &[u8]) {
        assert!(bytes.len() <= self.slot_bytes, "a SEND longer than its slot");
        let begin = slot.index as usize * self.slot_bytes;
        let mut slabs = self.slabs.borrow_mut();
        let slab = slabs.get_mut(&slot.slab).expect("a RECV in a slab that is there");
        slab[begin..begin + bytes.len()].copy_from_slice(bytes);
    }

    /// A slot that is posted may be overwritten at once: whoever reads it later must notice.
    pub fn spoil(&self, slot: SlotId) {
        self.fill(slot, &vec![SPOILT; self.slot_bytes]);
    }

    pub fn fill_control(&self, slot: u32, bytes: &[u8]) {
        self.control.borrow_mut()[slot as usize][..bytes.len()].copy_from_slice(bytes);
    }

    pub fn spoil_control(&self, slot: u32) {
        self.control.borrow_mut()[slot as usize].fill(SPOILT);
    }

    pub fn send_slot(&self, slot: SlotId, len: usize) -> Vec<u8> {
        self.slot(slot, 0, len)
    }

    pub fn set_credit(&self, word: usize, bytes: &[u8]) {
        self.page.borrow_mut()[word * 8..word * 8 + bytes.len()].copy_from_slice(bytes);
    }
}

impl TwoMemory for Mem {
    fn check(&self, region: RegionId, offset: u64, len: u64, direction: Direction) -> Result<(), Status> {
        match (region, direction) {
            (WITHDRAWN, _) => return Err(Status::StaleRegion),
            (REGION, _) if self.withdrawn.get() => return Err(Status::StaleRegion),
            (REGION, _) | (READ_ONLY, Direction::Read) | (WRITE_ONLY, Direction::Write) => {}
            (READ_ONLY | WRITE_ONLY, _) => return Err(Status::Permission),
            _ => return Err(Status::NoRegion),
        }
        let end = offset.checked_add(len);
        if end.is_none_or(|end| end > self.limit.get()) { Err(Status::Range) } else { Ok(()) }
    }
    fn can_gather(&self, _: &Span) -> bool {
        self.gather
    }
    fn read_slot(&self, slot: SlotId, at: u32, out: &mut [u8]) {
        out.copy_from_slice(&self.slot(slot, at as usize, out.len()));
    }
    fn crc_slot(&self, slot: SlotId, at: u32, len: u32, crc: u32) -> u32 {
        crc32c::crc32c_append(crc, &self.slot(slot, at as usize, len as usize))
    }
    fn read_control(&self, slot: u32, out: &mut [u8]) {
        out.copy_from_slice(&self.control.borrow()[slot as usize][..out.len()]);
    }
    fn load_credit(&self, word: usize) -> u64 {
        let bytes: [u8; 8] = self.page.borrow()[word * 8..word * 8 + 8].try_into().unwrap();
        u64::from_le_bytes(bytes)
    }
}
