//! One channel, its memory and its endpoints.

use std::sync::Arc;

use baton_core::two_sided::channel::{Channel, Durable, TwoClosed};
use baton_core::two_sided::codec::{
    CONTROL_SLOT_BYTES, DATA_HEADER_BYTES, Direction, Status, append_data_crc, extend_crc,
};
use baton_core::two_sided::pool::SlotId;
use baton_core::two_sided::setup::{DataSend, Place, PlaceJob, Span, TwoAction, TwoMemory, TwoSetup};
use baton_core::{Nanos, RegionId};
use baton_fabric::{Batch, Completion, EndpointId, Extra, ExtraOp, Fabric, FabricError, RecvSlot};

use super::bounce::Slabs;
use super::{Area, SharedBounce};

/// The host's memory that peers may name.
pub trait Regions: Send + Sync {
    /// Address of that part of a region, if the peer may write to (WRITE) or read from (READ) it now.
    ///
    /// # Errors
    /// Why not.
    fn find(&self, region: RegionId, offset: u64, len: u64, direction: Direction) -> Result<u64, Status>;
}

/// Memory of one epoch: credit page, control slots both ways, send slots.
///
/// ```text
/// page:   | credit words |                                                          written by the peer
/// slots:  | control RECVs | control SENDs and credit, by sequence | NOPs, by lane and sequence | send slots |
/// ```
pub struct ChannelArea {
    page: Area,
    slots: Area,
    control_rq: usize,
    control_sq: usize,
    sq: usize,
    send_base: usize,
    slot_bytes: usize,
}

impl ChannelArea {
    /// For a channel with these depths and lanes.
    pub fn new(
        fabric: &Arc<dyn Fabric>,
        control: (u32, u32),
        lanes: (usize, u32),
        send: (u32, u32),
    ) -> Result<ChannelArea, FabricError> {
        let (control_sq, control_rq) = (control.0 as usize, control.1 as usize);
        let (lanes, sq) = (lanes.0, lanes.1 as usize);
        let (send_slots, slot_bytes) = (send.0 as usize, send.1 as usize);
        let send_base = (control_rq + control_sq) * CONTROL_SLOT_BYTES + lanes * sq * DATA_HEADER_BYTES;
        let page = Area::new(fabric, Channel::credit_page_bytes(lanes), true)?;
        let slots = Area::new(fabric, send_base + send_slots * slot_bytes, false)?;
        Ok(ChannelArea { page, slots, control_rq, control_sq, sq, send_base, slot_bytes })
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

    fn control_send(&self, seq: u64) -> usize {
        (self.control_rq + seq as usize % self.control_sq) * CONTROL_SLOT_BYTES
    }

    fn nop(&self, lane: usize, seq: u64) -> usize {
        let base = (self.control_rq + self.control_sq) * CONTROL_SLOT_BYTES;
        base + (lane * self.sq + seq as usize % self.sq) * DATA_HEADER_BYTES
    }

    fn send_slot(&self, slot: u32) -> usize {
        self.send_base + slot as usize * self.slot_bytes
    }
}

/// What the channel may look at.
struct View<'a> {
    area: &'a ChannelArea,
    slabs: Slabs<'a>,
    regions: &'a dyn Regions,
}

impl TwoMemory for View<'_> {
    fn check(&self, region: RegionId, offset: u64, len: u64, direction: Direction) -> Result<(), Status> {
        self.regions.find(region, offset, len, direction).map(drop)
    }

    fn can_gather(&self, _: &Span) -> bool {
        false
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

/// What remains of an action once its borrows are gone.
enum After {
    Nothing,
    Place(PlaceJob),
    Failed(EndpointId),
}

/// A channel on its fabric.
pub struct Executor {
    /// The machine.
    pub channel: Channel,
    fabric: Arc<dyn Fabric>,
    bounce: SharedBounce,
    area: ChannelArea,
    regions: Arc<dyn Regions>,
    control: EndpointId,
    lanes: Vec<EndpointId>,
    peer_credit: (u64, u64),
}

impl Executor {
    /// Begins an epoch: the RECVs are posted, the endpoints connected.
    pub fn new(
        fabric: Arc<dyn Fabric>,
        bounce: SharedBounce,
        area: ChannelArea,
        regions: Arc<dyn Regions>,
        setup: TwoSetup,
        durable: Durable,
        now: Nanos,
    ) -> Executor {
        assert_eq!(setup.max_sge, 1, "nothing is gathered yet");
        let lanes = setup.lanes.iter().map(|lane| lane.endpoint).collect();
        let peer_credit = (setup.peer_credit_addr, setup.peer_credit_key);
        let control = setup.control;
        let channel = Channel::new(setup, durable, now);
        Executor { channel, fabric, bounce, area, regions, control, lanes, peer_credit }
    }

    /// Its endpoints, control first.
    pub fn endpoints(&self) -> Vec<EndpointId> {
        std::iter::once(self.control).chain(self.lanes.iter().copied()).collect()
    }

    /// A completion of one of its endpoints (or of another, which the channel ignores).
    pub fn on_completion(&mut self, now: Nanos, done: &Completion) {
        let mut bounce = self.bounce.lock();
        let (pool, slabs) = bounce.split();
        let view = View { area: &self.area, slabs, regions: &*self.regions };
        self.channel.on_completion(now, done, &view, pool);
    }

    /// Re-reads the credit page; `true`: there is more.
    pub fn poll_credit(&mut self) -> bool {
        let mut bounce = self.bounce.lock();
        let (_, slabs) = bounce.split();
        let view = View { area: &self.area, slabs, regions: &*self.regions };
        self.channel.poll_credit(&view)
    }

    /// Deadlines.
    pub fn on_timeout(&mut self, now: Nanos) {
        self.channel.on_timeout(now, &self.bounce.lock().pool);
    }

    /// Carries out everything that there is to do; `true`: there was something.
    pub fn drive(&mut self, now: Nanos) -> bool {
        let mut any = false;
        let bounce = Arc::clone(&self.bounce);
        let mut bounce = bounce.lock();
        loop {
            let (pool, slabs) = bounce.split();
            let view = View { area: &self.area, slabs, regions: &*self.regions };
            let Some(action) = self.channel.next_action(now, &view, pool) else { return any };
            any = true;
            let post = Post { fabric: &*self.fabric, area: &self.area, slabs, regions: &*self.regions };
            let after = post.carry_out(&action, &self.lanes, self.peer_credit);
            match after {
                After::Nothing => {}
                After::Failed(endpoint) => self.channel.on_post_failed(endpoint),
                After::Place(job) => {
                    let outcome = post.copy(&job);
                    self.channel.on_placed(now, job.ticket, job.len, outcome, pool);
                }
            }
        }
    }

    /// Ends it, after its endpoints were fenced, drained and destroyed.
    pub fn close(self, now: Nanos) -> TwoClosed {
        self.channel.close(now, &mut self.bounce.lock().pool)
    }
}

/// Carries out one action.
struct Post<'a> {
    fabric: &'a dyn Fabric,
    area: &'a ChannelArea,
    slabs: Slabs<'a>,
    regions: &'a dyn Regions,
}

impl Post<'_> {
    fn carry_out(&self, action: &TwoAction<'_>, lanes: &[EndpointId], credit: (u64, u64)) -> After {
        let (endpoint, outcome) = match action {
            TwoAction::Place(job) => return After::Place(*job),
            TwoAction::RecvData { endpoint, first, slots } => {
                (*endpoint, self.recv_data(*endpoint, *first, slots))
            }
            TwoAction::RecvControl { endpoint, first, count } => {
                (*endpoint, self.recv_control(*endpoint, *first, *count))
            }
            TwoAction::Credit { endpoint, seq, word, bytes } => {
                let to = (credit.0 + *word as u64 * 8, credit.1);
                (*endpoint, self.control(*endpoint, *seq, ExtraOp::Write, to, bytes))
            }
            TwoAction::SendControl { endpoint, seq, bytes } => {
                (*endpoint, self.control(*endpoint, *seq, ExtraOp::Send, (0, 0), bytes))
            }
            TwoAction::SendData(send) => (send.endpoint, self.data(send, lanes)),
        };
        match outcome {
            Ok(()) => After::Nothing,
            Err(e) => {
                tracing::error!("two-sided channel on fabric {}: {e}", self.fabric.name());
                After::Failed(endpoint)
            }
        }
    }

    fn recv_data(&self, endpoint: EndpointId, first: u64, slots: &[SlotId]) -> Result<(), FabricError> {
        let rail = self.fabric.rail(endpoint);
        let recvs = (first..).zip(slots).map(|(n, &slot)| self.slabs.recv(slot, rail, n as u32));
        self.fabric.post_recv(endpoint, &recvs.collect::<Result<Vec<_>, FabricError>>()?)
    }

    fn recv_control(&self, endpoint: EndpointId, first: u64, count: u32) -> Result<(), FabricError> {
        let rail = self.fabric.rail(endpoint);
        let recvs = (first..first + u64::from(count)).map(|n| self.area.control_recv(rail, n));
        self.fabric.post_recv(endpoint, &recvs.collect::<Result<Vec<_>, FabricError>>()?)
    }

    fn control(
        &self,
        endpoint: EndpointId,
        seq: u64,
        op: ExtraOp,
        remote: (u64, u64),
        bytes: &[u8],
    ) -> Result<(), FabricError> {
        let at = self.area.control_send(seq);
        self.area.slots.write(at, bytes);
        self.post(endpoint, seq, op, remote, (at, bytes.len()))
    }

    fn data(&self, send: &DataSend<'_>, lanes: &[EndpointId]) -> Result<(), FabricError> {
        let slots = &self.area.slots;
        let Some(slot) = send.send_slot else {
            // Only what has no data needs no slot.
            assert!(send.spans.is_empty(), "nothing is gathered yet");
            let lane = lanes.iter().position(|lane| *lane == send.endpoint).expect("a lane of the channel");
            let at = self.area.nop(lane, send.seq);
            slots.write(at, send.prefix);
            return self.post(send.endpoint, send.seq, ExtraOp::Send, (0, 0), (at, send.prefix.len()));
        };
        let begin = self.area.send_slot(slot);
        let mut prefix = send.prefix.to_vec();
        let mut at = begin + prefix.len();
        for span in send.spans {
            let from = match span.from {
                Place::Local(addr) => addr,
                Place::Region(region, offset) => self
                    .regions
                    .find(region, offset, span.len.into(), Direction::Read)
                    .map_err(|status| FabricError::Invalid(format!("region {region:?}: {status:?}")))?,
            };
            // SAFETY: own memory is valid until the transfer was reported (the host's contract); a region's until it is
            // withdrawn, which waits for the channel that is working here.
            unsafe { slots.write_from(at, from, span.len as usize) };
            if send.data_crc {
                append_data_crc(&mut prefix, slots.bytes(at, span.len as usize));
            }
            at += span.len as usize;
        }
        slots.write(begin, &prefix);
        self.post(send.endpoint, send.seq, ExtraOp::Send, (0, 0), (begin, at - begin))
    }

    fn post(
        &self,
        endpoint: EndpointId,
        seq: u64,
        op: ExtraOp,
        (remote_addr, remote_key): (u64, u64),
        (at, len): (usize, usize),
    ) -> Result<(), FabricError> {
        let slots = &self.area.slots;
        let key = slots.local_key(self.fabric.rail(endpoint), at, len)?;
        let extra = Extra {
            op,
            bytes: slots.bytes(at, len),
            // Short ones are copied by `post`.
            staged: (len > self.fabric.caps().inline_bytes as usize).then(|| (slots.addr(at), key)),
            remote_addr,
            remote_key,
            fenced: false,
        };
        let batch = Batch { work: &[], imm: None, extra: Some(extra), first_seq: seq, signaled: true };
        let posted = self.fabric.post(endpoint, &batch);
        posted.map_err(|e| FabricError::System(format!("post on {endpoint:?}: {e:?}")))
    }

    fn copy(&self, job: &PlaceJob) -> Result<(), Status> {
        let (area, begin) = self.slabs.place(job.slot);
        let to = match job.to {
            Place::Local(addr) => addr,
            // Once more: it may have been withdrawn since the chunk was checked.
            Place::Region(region, offset) => {
                self.regions.find(region, offset, job.len.into(), Direction::Write)?
            }
        };
        // SAFETY: as for the source of a SEND: own memory until the transfer was reported, a region's until it is withdrawn.
        unsafe { area.read_to(begin + job.at as usize, to, job.len as usize) };
        Ok(())
    }
}
