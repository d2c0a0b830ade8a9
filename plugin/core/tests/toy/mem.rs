//! Memory of a node: data, rings, their sending mirrors, the credit page.

use std::cell::RefCell;
use std::collections::HashMap;

use baton_core::LaneId;
use baton_core::credit::CreditPage;
use baton_core::peer::{CREDIT_SLOT_BYTES, CREDIT_SLOTS, RingId, SessionMemory, slot_bytes};

use super::Config;

pub const DATA_BASE: u64 = 0x10_0000;
pub const DATA_KEY: u64 = 1;
pub const RING_KEY: u64 = 100;
pub const STAGE_KEY: u64 = 200;
pub const PAGE_KEY: u64 = 300;
pub const SLOT_KEY: u64 = 400;
pub const CREDIT_KEY: u64 = 500;
pub const RING_BASE: u64 = 0x4000_0000;
pub const STAGE_BASE: u64 = 0x6000_0000;
pub const PAGE_BASE: u64 = 0x8000_0000;
pub const CREDIT_BASE: u64 = 0x9000_0000;

struct Region {
    base: u64,
    bytes: Vec<u8>,
}

/// Memory of a node.
pub struct Mem {
    regions: RefCell<HashMap<u64, Region>>,
    page: CreditPage,
    slot_bytes: u32,
    slots: u32,
}

/// What RECV slots hold when they are posted.
const SPOILT: u8 = 0xEE;

impl Mem {
    pub fn new(config: &Config) -> Mem {
        let page = CreditPage::new(config.lanes);
        let mut regions = HashMap::new();
        regions.insert(DATA_KEY, Region { base: DATA_BASE, bytes: vec![0; config.data_bytes] });
        for n in 0..=u64::from(config.lanes) {
            let bytes = || vec![0; config.ring as usize];
            regions.insert(RING_KEY + n, Region { base: RING_BASE + (n << 20), bytes: bytes() });
            regions.insert(STAGE_KEY + n, Region { base: STAGE_BASE + (n << 20), bytes: bytes() });
            let slots = vec![SPOILT; slot_bytes(config.ring) as usize * config.rq as usize];
            regions.insert(SLOT_KEY + n, Region { base: 0, bytes: slots });
        }
        let credit = vec![0; (CREDIT_SLOTS * CREDIT_SLOT_BYTES) as usize];
        regions.insert(CREDIT_KEY, Region { base: CREDIT_BASE, bytes: credit });
        regions.insert(PAGE_KEY, Region { base: PAGE_BASE, bytes: vec![0; page.bytes()] });
        let (slot_bytes, slots) = (slot_bytes(config.ring), config.rq);
        Mem { regions: RefCell::new(regions), page, slot_bytes, slots }
    }
    pub fn read(&self, key: u64, addr: u64, len: usize) -> Option<Vec<u8>> {
        let regions = self.regions.borrow();
        let region = regions.get(&key)?;
        let at = usize::try_from(addr.checked_sub(region.base)?).ok()?;
        region.bytes.get(at..at.checked_add(len)?).map(<[u8]>::to_vec)
    }
    pub fn write(&self, key: u64, addr: u64, bytes: &[u8]) -> Option<()> {
        let mut regions = self.regions.borrow_mut();
        let region = regions.get_mut(&key)?;
        let at = usize::try_from(addr.checked_sub(region.base)?).ok()?;
        region.bytes.get_mut(at..at.checked_add(bytes.len())?)?.copy_from_slice(bytes);
        Some(())
    }
    pub fn data(&self, offset: usize, len: usize) -> Vec<u8> {
        self.read(DATA_KEY, DATA_BASE + offset as u64, len).unwrap()
    }
    pub fn set_data(&self, offset: usize, bytes: &[u8]) {
        self.write(DATA_KEY, DATA_BASE + offset as u64, bytes).unwrap();
    }
    pub fn set_credit(&self, word: usize, value: u64) {
        self.write(PAGE_KEY, PAGE_BASE + word as u64 * 8, &value.to_le_bytes()).unwrap();
    }
    pub fn ring_index(ring: RingId) -> u64 {
        match ring {
            RingId::Control => 0,
            RingId::Lane(LaneId(lane)) => 1 + u64::from(lane),
        }
    }
    /// What a fabric does with a SEND.
    pub fn fill_slot(&self, n: u64, slot: u32, bytes: &[u8]) {
        self.write(SLOT_KEY + n, u64::from(slot * self.slot_bytes), bytes).expect("inside the slots");
    }
    /// A slot that is posted again may be overwritten at once: whoever reads it later must notice.
    pub fn spoil_slots(&self, n: u64, first: u64, count: u32) {
        for nth in first..first + u64::from(count) {
            let slot = (nth % u64::from(self.slots)) as u32;
            self.fill_slot(n, slot, &vec![SPOILT; self.slot_bytes as usize]);
        }
    }
    /// Writes into the ring that the peer owns for writing, as a hostile peer would.
    pub fn poke_ring(&self, ring: RingId, offset: u32, bytes: &[u8]) {
        let n = Mem::ring_index(ring);
        self.write(RING_KEY + n, RING_BASE + (n << 20) + u64::from(offset), bytes).unwrap();
    }
}

impl SessionMemory for Mem {
    fn read_record(&self, ring: RingId, offset: u32, out: &mut [u8]) {
        let n = Mem::ring_index(ring);
        let addr = RING_BASE + (n << 20) + u64::from(offset);
        out.copy_from_slice(&self.read(RING_KEY + n, addr, out.len()).expect("inside the ring"));
    }
    fn stage_record(&self, ring: RingId, offset: u32, bytes: &[u8]) -> (u64, u64) {
        let n = Mem::ring_index(ring);
        let addr = STAGE_BASE + (n << 20) + u64::from(offset);
        self.write(STAGE_KEY + n, addr, bytes).expect("inside the ring");
        (addr, STAGE_KEY + n)
    }
    fn read_slot(&self, ring: RingId, slot: u32, offset: u32, out: &mut [u8]) {
        assert!(slot < self.slots && offset + out.len() as u32 <= self.slot_bytes, "outside of slot {slot}");
        let addr = u64::from(slot * self.slot_bytes + offset);
        let key = SLOT_KEY + Mem::ring_index(ring);
        out.copy_from_slice(&self.read(key, addr, out.len()).expect("inside the slots"));
    }
    fn stage_credit(&self, slot: u32, words: &[u8]) -> (u64, u64) {
        assert!(slot < CREDIT_SLOTS && words.len() <= CREDIT_SLOT_BYTES as usize);
        let addr = CREDIT_BASE + u64::from(slot * CREDIT_SLOT_BYTES);
        self.write(CREDIT_KEY, addr, words).expect("inside the slots");
        (addr, CREDIT_KEY)
    }
    fn load_credit(&self, word: usize) -> u64 {
        let bytes = self.read(PAGE_KEY, PAGE_BASE + word as u64 * 8, 8).unwrap();
        u64::from_le_bytes(bytes.try_into().unwrap())
    }
}
