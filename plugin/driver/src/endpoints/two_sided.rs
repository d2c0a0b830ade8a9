//! The two-sided endpoints of a connect attempt: control and lanes, the first bounce slots, and the memory of a channel.

use std::sync::Arc;

use baton_core::two_sided::channel::Durable;
use baton_core::two_sided::pool::{Holder, PeerKey, SlotId};
use baton_core::two_sided::setup::{TwoLane, TwoLimits, TwoSetup};
use baton_core::wire::{AgreedTwoSided, EndpointOffer, MemoryOffer, TwoSidedLane, TwoSidedOffer};
use baton_core::{Epoch, LaneId, SessionId};
use baton_fabric::{EndpointId, Fabric};

use super::{QueueDepths, Theirs, take_down};
use crate::err;
use crate::error::Result;
use crate::shared::Shared;
use crate::two_sided::{
    Bounces, ChannelArea, Executor, MAX_BODY_BYTES, Regions, Rest, ServedOn, SharedBounce, TwoSided,
};

/// Frames on their way, either way.
const CONTROL_DEPTH: u32 = 64;
/// Data messages of a lane on their way.
const LANE_SQ_DEPTH: u32 = 128;
/// Bounce slots of a lane at most.
const LANE_RQ_DEPTH: u32 = 64;
/// Bounce slots that messages are copied into before they are sent, at most.
const SEND_SLOTS: u32 = 8;
/// RECVs of a lane before its peer has sent anything.
const FIRST_SLOTS: usize = 1;
/// Bytes of notifications on their way: one of the longest, and then some.
const NOTIFY_WINDOW: u32 = MAX_BODY_BYTES + 4096;

/// Endpoints of the two-sided path: control first, then the lanes.
pub(crate) struct TwoSidedSet {
    fabric: Arc<dyn Fabric>,
    fabric_index: usize,
    pub endpoints: Vec<EndpointId>,
    area: ChannelArea,
    bounce: SharedBounce,
    borrower: PeerKey,
    /// RECVs of the lanes.
    posted: Vec<Vec<SlotId>>,
}

/// All endpoints of an offer, control first.
pub(super) fn endpoints(offer: &TwoSidedOffer) -> Vec<&EndpointOffer> {
    std::iter::once(&offer.control).chain(offer.lanes.iter().map(|lane| &lane.endpoint)).collect()
}

impl TwoSidedSet {
    /// Makes everything; each lane has its first RECVs, as far as the pool has slots.
    pub(super) fn create(
        shared: &Shared,
        fabric: &Arc<dyn Fabric>,
        fabric_index: usize,
        theirs: &Theirs<'_>,
    ) -> Result<(TwoSidedSet, TwoSidedOffer)> {
        let depths = QueueDepths {
            control: (CONTROL_DEPTH, CONTROL_DEPTH),
            lane: (LANE_SQ_DEPTH, LANE_RQ_DEPTH),
            max_sge: fabric.caps().max_send_sge,
            exposed: false,
        };
        let made = theirs.create(&**fabric, &depths)?;
        let lane_sq = made.lanes.iter().map(|lane| lane.sq_depth).max().unwrap_or(0);
        let control = (made.control.sq_depth, made.control.rq_depth);
        let area = match ChannelArea::new(fabric, control, (made.lanes.len(), lane_sq)) {
            Ok(area) => area,
            Err(e) => {
                take_down(&**fabric, made.ids.into_iter());
                return Err(e.into());
            }
        };
        let (bounce, borrower) = shared.bounces.join(fabric_index, fabric, shared.clock.now());
        let mut set = TwoSidedSet {
            fabric: Arc::clone(fabric),
            fabric_index,
            area,
            bounce,
            borrower,
            posted: vec![Vec::new(); made.lanes.len()],
            endpoints: made.ids,
        };
        match set.post_first().and_then(|()| set.offer(made.control, made.lanes)) {
            Ok(offer) => Ok((set, offer)),
            Err(e) => {
                set.discard(&shared.bounces);
                Err(e)
            }
        }
    }

    fn post_first(&mut self) -> Result<()> {
        for (nth, posted) in self.posted.iter_mut().enumerate() {
            let endpoint = self.endpoints[nth + 1];
            let rail = self.fabric.rail(endpoint);
            let mut bounce = self.bounce.lock();
            for n in 0..FIRST_SLOTS {
                let holder = Holder { peer: self.borrower, lane: LaneId(nth as u8) };
                let Some(slot) = bounce.pool.lend(holder) else { break };
                posted.push(slot);
                let recv = bounce.recv(slot, rail, n as u32)?;
                self.fabric.post_recv(endpoint, &[recv])?;
            }
        }
        Ok(())
    }

    fn offer(&self, control: EndpointOffer, lanes: Vec<EndpointOffer>) -> Result<TwoSidedOffer> {
        let (addr, key) = self.area.credit_page(control.rail)?;
        let lanes: Vec<_> = lanes
            .into_iter()
            .zip(&self.posted)
            .map(|(endpoint, posted)| TwoSidedLane { endpoint, posted: posted.len() as u32 })
            .collect();
        let limits = TwoLimits::default();
        Ok(TwoSidedOffer {
            credit_page: MemoryOffer { addr, key, bytes: self.area.credit_page_bytes() as u64 },
            control,
            lanes,
            slot_bytes: self.bounce.lock().pool.config().slot_bytes,
            request_depth: limits.request_depth,
            notify_window: NOTIFY_WINDOW,
            message_bytes: MAX_BODY_BYTES,
        })
    }

    /// Posts the control RECVs that both sides agreed on. They stand before the endpoint can receive anything.
    pub(super) fn post_recvs(&mut self, agreed: &AgreedTwoSided) -> Result<()> {
        self.area.agree((agreed.control.sq_depth, agreed.control.rq_depth));
        let rail = self.fabric.rail(self.endpoints[0]);
        let recvs = (0..u64::from(agreed.control.rq_depth)).map(|n| self.area.control_recv(rail, n));
        let recvs = recvs.collect::<std::result::Result<Vec<_>, _>>()?;
        Ok(self.fabric.post_recv(self.endpoints[0], &recvs)?)
    }

    /// What the channel needs to know, checked: a peer may offer what no channel can work with.
    pub fn setup(
        &self,
        theirs: &TwoSidedOffer,
        agreed: &AgreedTwoSided,
        (session, epoch): (SessionId, Epoch),
        (wait_ms, stall_ms): (u64, u64),
    ) -> Result<TwoSetup> {
        let lanes = agreed.lanes.iter().enumerate().map(|(nth, depths)| TwoLane {
            endpoint: self.endpoints[nth + 1],
            sq_depth: depths.sq_depth,
            rq_depth: depths.rq_depth,
            posted: self.posted[nth].clone(),
            peer_posted: theirs.posted(nth, agreed),
        });
        let setup = TwoSetup {
            peer: self.borrower,
            session,
            epoch,
            control: self.endpoints[0],
            control_sq_depth: agreed.control.sq_depth,
            control_rq_depth: agreed.control.rq_depth,
            lanes: lanes.collect(),
            slot_bytes: agreed.slot_bytes,
            peer_credit_addr: theirs.credit_page.addr,
            peer_credit_key: theirs.credit_page.key,
            send_slots: SEND_SLOTS,
            max_sge: self.fabric.caps().max_send_sge,
            data_crc: false,
            limits: TwoLimits {
                request_depth: agreed.request_depth,
                notify_window: agreed.notify_window,
                message_bytes: agreed.message_bytes,
                wait_ms,
                stall_ms,
                ..TwoLimits::default()
            },
        };
        setup.check().map_err(|e| err!(Protocol, "what the peer offers makes no session: {e}"))?;
        Ok(setup)
    }

    /// On which rails each lane in use runs, here and at the peer.
    pub fn lane_rails(&self, theirs: &TwoSidedOffer, lanes: usize) -> Vec<[u8; 2]> {
        let pairs = self.endpoints[1..].iter().zip(&theirs.lanes).take(lanes);
        pairs.map(|(own, peer)| [self.fabric.rail(*own), peer.endpoint.rail]).collect()
    }

    /// The path of the epoch.
    pub fn open(self, setup: TwoSetup, durable: Durable, shared: &Shared, rest: &mut Rest) -> TwoSided {
        let served = Arc::clone(&shared.served);
        let regions = Arc::new(ServedOn { served, fabric_index: self.fabric_index }) as Arc<dyn Regions>;
        let unused = self.posted.into_iter().skip(setup.lanes.len()).flatten().collect();
        let exec =
            Executor::new(self.fabric, self.bounce, self.area, regions, setup, durable, shared.clock.now());
        TwoSided::new(exec, self.borrower, unused, rest)
    }

    /// Takes everything down again; nothing of it was ever used.
    pub(super) fn discard(self, bounces: &Bounces) {
        take_down(&*self.fabric, self.endpoints.iter().copied());
        let mut bounce = self.bounce.lock();
        self.posted.iter().flatten().for_each(|slot| bounce.pool.flushed(*slot));
        drop(bounce);
        bounces.leave(self.fabric_index, self.borrower);
    }
}
