//! Memory of one channel and epoch.

use std::sync::Arc;

use baton_core::two_sided::channel::{Channel, GATHER_PREFIX_BYTES, GATHERS};
use baton_core::two_sided::codec::{CONTROL_SLOT_BYTES, DATA_HEADER_BYTES};
use baton_fabric::{Fabric, FabricError, RecvSlot};

use super::Area;

/// Memory of one epoch: credit page, control slots both ways, small buffers of SENDs. What is copied to be sent lies in slots of the pool,
/// and only while it is sent.
///
/// ```text
/// page:   | credit words |                                                          written by the peer
/// slots:  | control RECVs | control SENDs and credit, by sequence | NOPs, by lane and sequence | prefixes of gathered messages |
/// ```
pub struct ChannelArea {
    pub(super) page: Area,
    pub(super) slots: Area,
    control_rq: usize,
    control_sq: usize,
    sq: usize,
    prefixes: usize,
}

impl ChannelArea {
    /// For a channel with these depths (send, receive) and lanes (how many, send queue of each).
    pub fn new(
        fabric: &Arc<dyn Fabric>,
        control: (u32, u32),
        lanes: (usize, u32),
    ) -> Result<ChannelArea, FabricError> {
        let (control_sq, control_rq) = (control.0 as usize, control.1 as usize);
        let (lanes, sq) = (lanes.0, lanes.1 as usize);
        let prefixes = (control_rq + control_sq) * CONTROL_SLOT_BYTES + lanes * sq * DATA_HEADER_BYTES;
        let page = Area::new(fabric, Channel::credit_page_bytes(lanes), true)?;
        let slots = Area::new(fabric, prefixes + GATHERS as usize * GATHER_PREFIX_BYTES, false)?;
        Ok(ChannelArea { page, slots, control_rq, control_sq, sq, prefixes })
    }

    /// Settles depths of the control endpoint that are smaller than those it was made for.
    pub fn agree(&mut self, control: (u32, u32)) {
        let (sq, rq) = (control.0 as usize, control.1 as usize);
        assert!(sq <= self.control_sq && rq <= self.control_rq, "no deeper than it was made for");
        (self.control_sq, self.control_rq) = (sq, rq);
    }

    /// Length of the credit page.
    pub fn credit_page_bytes(&self) -> usize {
        self.page.len_bytes()
    }

    /// Bytes of it.
    pub fn len_bytes(&self) -> usize {
        self.page.len_bytes() + self.slots.len_bytes()
    }

    /// Address and key of the credit page, for the peer; `rail` is the control endpoint's.
    pub fn credit_page(&self, rail: u8) -> Result<(u64, u64), FabricError> {
        Ok((self.page.addr(0), self.page.remote_key(rail)?))
    }

    /// The n-th control RECV.
    pub fn control_recv(&self, rail: u8, n: u64) -> Result<RecvSlot, FabricError> {
        let id = n as usize % self.control_rq;
        let at = id * CONTROL_SLOT_BYTES;
        let local_key = self.slots.local_key(rail, at, CONTROL_SLOT_BYTES)?;
        let len_bytes = CONTROL_SLOT_BYTES as u32;
        Ok(RecvSlot { addr: self.slots.addr(at), local_key, len_bytes, id: id as u32 })
    }

    pub(super) fn control_send(&self, seq: u64) -> usize {
        (self.control_rq + seq as usize % self.control_sq) * CONTROL_SLOT_BYTES
    }

    pub(super) fn nop(&self, lane: usize, seq: u64) -> usize {
        let base = (self.control_rq + self.control_sq) * CONTROL_SLOT_BYTES;
        base + (lane * self.sq + seq as usize % self.sq) * DATA_HEADER_BYTES
    }

    pub(super) fn prefix(&self, n: u32) -> usize {
        self.prefixes + n as usize * GATHER_PREFIX_BYTES
    }
}
