//! Memory of a node: data, rings, their sending mirrors, the credit page.

use std::cell::RefCell;
use std::collections::HashMap;

use baton_core::LaneId;
use baton_core::credit::CreditPage;
use baton_core::peer::{RingId, SessionMemory};

use super::Config;

pub const DATA_BASE: u64 = 0x10_0000;
pub const DATA_KEY: u64 = 1;
pub const RING_KEY: u64 = 100;
pub const STAGE_KEY: u64 = 200;
pub const PAGE_KEY: u64 = 300;
pub const RING_BASE: u64 = 0x4000_0000;
pub const STAGE_BASE: u64 = 0x6000_0000;
pub const PAGE_BASE: u64 = 0x8000_0000;

struct Region {
    base: u64,
    bytes: Vec<u8>,
}

/// Memory of a node.
pub struct Mem {
    regions: RefCell<HashMap<u64, Region>>,
    page: CreditPage,
}

impl Mem {
    pub fn new(config: &Config) -> Mem {
        let page = CreditPage::new(config.lanes);
        let mut regions = HashMap::new();
        regions.insert(DATA_KEY, Region { base: DATA_BASE, bytes: vec![0; config.data_bytes] });
        for n in 0..=u64::from(config.lanes) {
            let bytes = || vec![0; config.ring as usize];
            regions.insert(RING_KEY + n, Region { base: RING_BASE + (n << 20), bytes: bytes() });
            regions.insert(STAGE_KEY + n, Region { base: STAGE_BASE + (n << 20), bytes: bytes() });
        }
        regions.insert(PAGE_KEY, Region { base: PAGE_BASE, bytes: vec![0; page.bytes()] });
        Mem { regions: RefCell::new(regions), page }
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
    fn load_credit(&self, word: usize) -> u64 {
        let bytes = self.read(PAGE_KEY, PAGE_BASE + word as u64 * 8, 8).unwrap();
        u64::from_le_bytes(bytes.try_into().unwrap())
    }
}
