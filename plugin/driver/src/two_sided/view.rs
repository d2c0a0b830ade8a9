//! What a channel may look at, and the host's memory that it may use.

use std::cell::RefCell;
use std::sync::Arc;

use baton_core::RegionId;
use baton_core::two_sided::codec::{CONTROL_SLOT_BYTES, Direction, Status, extend_crc};
use baton_core::two_sided::pool::SlotId;
use baton_core::two_sided::setup::{Place, Span, TwoMemory};

use super::ChannelArea;
use super::bounce::Slabs;

/// The host's memory.
pub trait Regions: Send + Sync {
    /// Address of that part of a region, if the peer may write to (WRITE) or read from (READ) it now.
    ///
    /// # Errors
    /// Why not.
    fn find(&self, region: RegionId, offset: u64, len: u64, direction: Direction) -> Result<u64, Status>;

    /// The same, and the memory stays what it is until the answer is dropped: whoever withdraws the region waits for that. It is held in
    /// bounded time: for a copy, or for a SEND until it has completed or its endpoint is gone.
    ///
    /// # Errors
    /// As [`Regions::find`].
    fn hold(&self, region: RegionId, offset: u64, len: u64, direction: Direction) -> Result<Held, Status>;

    /// Key for own work requests on that rail, if all of that memory is registered with the channel's fabric: own memory, which stays until
    /// its transfer was reported, or a region that is held or was found a moment ago.
    fn local_key(&self, from: Place, len: u32, rail: u8) -> Option<u64>;
}

/// What counts the holds of a region.
pub trait Keep: Send + Sync {
    /// One less.
    fn release(&self);
}

/// Memory of a region that stays what it is as long as this is there.
pub struct Held {
    addr: u64,
    keep: Arc<dyn Keep>,
}

impl Held {
    /// Of memory that `keep` has counted a hold for.
    pub fn new(addr: u64, keep: Arc<dyn Keep>) -> Held {
        Held { addr, keep }
    }

    /// First byte.
    pub fn addr(&self) -> u64 {
        self.addr
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.keep.release();
    }
}

/// A part of a region that is held to be sent.
pub(super) struct Pin {
    pub region: RegionId,
    pub offset: u64,
    pub held: Held,
}

/// What was looked up while it was decided what to send.
#[derive(Default)]
pub(super) struct Found {
    /// What was found readable is held: it cannot go before it is sent.
    pub pins: Vec<Pin>,
    /// Keys of the spans that can be gathered, in the order in which they were asked for; only where all lanes are on one rail. The last
    /// that were asked for are those of the message that is sent.
    pub keys: Vec<u64>,
}

impl Found {
    /// Nothing of it is needed any more.
    pub fn clear(&mut self) {
        self.pins.clear();
        self.keys.clear();
    }
}

/// What the channel may look at.
pub(super) struct View<'a> {
    pub area: &'a ChannelArea,
    pub slabs: &'a Slabs,
    pub regions: &'a dyn Regions,
    /// Rails of the lanes, each once.
    pub rails: &'a [u8],
    /// While it is decided what to send.
    pub found: Option<&'a RefCell<Found>>,
}

impl TwoMemory for View<'_> {
    fn check(&self, region: RegionId, offset: u64, len: u64, direction: Direction) -> Result<(), Status> {
        match self.found {
            Some(found) if direction == Direction::Read => {
                let held = self.regions.hold(region, offset, len, direction)?;
                found.borrow_mut().pins.push(Pin { region, offset, held });
                Ok(())
            }
            _ => self.regions.find(region, offset, len, direction).map(drop),
        }
    }

    fn can_gather(&self, span: &Span) -> bool {
        if let (&[rail], Some(found)) = (self.rails, self.found) {
            let key = self.regions.local_key(span.from, span.len, rail);
            found.borrow_mut().keys.extend(key);
            return key.is_some();
        }
        // The lane is not chosen yet.
        self.rails.iter().all(|&rail| self.regions.local_key(span.from, span.len, rail).is_some())
    }

    fn read_slot(&self, slot: SlotId, at: u32, out: &mut [u8]) {
        let (area, begin) = self.slabs.place(slot);
        assert!(at as usize + out.len() <= self.slabs.slot_bytes(), "inside of {slot:?}");
        area.read(begin + at as usize, out);
    }

    fn crc_slot(&self, slot: SlotId, at: u32, len: u32, crc: u32) -> u32 {
        let (area, begin) = self.slabs.place(slot);
        assert!((at + len) as usize <= self.slabs.slot_bytes(), "inside of {slot:?}");
        extend_crc(crc, area.bytes(begin + at as usize, len as usize))
    }

    fn read_control(&self, slot: u32, out: &mut [u8]) {
        self.area.slots.read(slot as usize * CONTROL_SLOT_BYTES, out);
    }

    fn load_credit(&self, word: usize) -> u64 {
        self.area.page.load(word)
    }
}
