//! The one-sided endpoints of a connect attempt: rings, credit page, and the lanes that read and write the peer's memory.

use super::{DISCARD_WAIT, MadeEndpoints, QueueDepths, Theirs, take_down};
use crate::err;
use crate::error::Result;
use crate::memory::{CREDIT_PAGE_BYTES, EpochMemory, RING_BYTES};
use crate::peer::post_recvs;
use baton_core::LaneId;
use baton_core::notify::NotifyMode;
use baton_core::peer::{LaneSetup, RingId};
use baton_core::prepared::LaneRails;
use baton_core::wire::{AgreedOneSided, Depths, EndpointOffer, MemoryOffer, OneSidedOffer, SEND_RQ_DEPTH};
use baton_fabric::{EndpointId, Fabric};
use std::sync::Arc;

/// RECVs per lane: notified transfers that may be on their way at once.
const LANE_RQ_DEPTH: u32 = 512;
/// Send-queue depth of the control endpoint.
const CONTROL_SQ_DEPTH: u32 = 256;
/// RECVs of the control endpoint: standalone notifications on their way at once.
const CONTROL_RQ_DEPTH: u32 = 256;

/// Endpoints of one fabric: control first, then the lanes.
pub(crate) struct OneSidedSet {
    fabric: Arc<dyn Fabric>,
    pub endpoints: Vec<EndpointId>,
    pub memory: Arc<EpochMemory>,
    /// Whether immediates are offered.
    pub immediate: bool,
    rails: Vec<u8>,
}

/// All endpoints of an offer, control first.
pub(super) fn endpoints(offer: &OneSidedOffer) -> Vec<&EndpointOffer> {
    std::iter::once(&offer.control).chain(&offer.lanes).collect()
}

impl OneSidedSet {
    /// Creates and fills everything: endpoints first, because their rails decide which keys of the rings the peer needs.
    pub(super) fn create(
        fabric: &Arc<dyn Fabric>,
        theirs: &Theirs<'_>,
        notify: NotifyMode,
    ) -> Result<(OneSidedSet, OneSidedOffer)> {
        let immediate = notify == NotifyMode::Immediate && fabric.caps().immediate;
        let most_recvs = if immediate { u32::MAX } else { SEND_RQ_DEPTH };
        let depths = QueueDepths {
            control: (CONTROL_SQ_DEPTH, CONTROL_RQ_DEPTH.min(most_recvs)),
            lane: (fabric.caps().lane_sq_depth, LANE_RQ_DEPTH.min(most_recvs)),
            max_sge: 1,
            exposed: true,
        };
        let MadeEndpoints { ids, control, lanes } = theirs.create(&**fabric, &depths)?;
        let rails: Vec<u8> = std::iter::once(&control).chain(&lanes).map(|endpoint| endpoint.rail).collect();
        let memory = match EpochMemory::new(fabric, &rails) {
            Ok(memory) => Arc::new(memory),
            Err(e) => {
                take_down(&**fabric, ids.into_iter());
                return Err(e.into());
            }
        };
        let (addr, key) = memory.credit_page();
        let offer = OneSidedOffer {
            immediate,
            control,
            control_ring: ring_offer(&memory, RingId::Control),
            rings: (0..lanes.len())
                .map(|lane| ring_offer(&memory, RingId::Lane(LaneId(lane as u8))))
                .collect(),
            lanes,
            credit_page: MemoryOffer { addr, key, bytes: CREDIT_PAGE_BYTES as u64 },
        };
        let fabric = Arc::clone(fabric);
        Ok((OneSidedSet { fabric, endpoints: ids, memory, immediate, rails }, offer))
    }

    /// Posts the RECVs that both sides agreed on.
    pub(super) fn post_recvs(&self, agreed: &AgreedOneSided) -> Result<()> {
        let depths = std::iter::once(&agreed.control).chain(&agreed.lanes);
        let used: Vec<_> = self.endpoints.iter().zip(depths).collect();
        if agreed.notify == NotifyMode::Send {
            let slots: Vec<_> = used
                .iter()
                .map(|(endpoint, depths)| (self.fabric.rail(**endpoint), depths.rq_depth))
                .collect();
            self.memory.make_slots(&slots)?;
        }
        for (index, (endpoint, depths)) in used.into_iter().enumerate() {
            post_recvs(&*self.fabric, *endpoint, &self.memory, index, 0, depths.rq_depth)?;
        }
        Ok(())
    }

    /// What the session needs to know of each endpoint: control, lanes.
    pub fn setups(
        &self,
        theirs: &OneSidedOffer,
        agreed: &AgreedOneSided,
    ) -> Result<(LaneSetup, Vec<LaneSetup>)> {
        let setup = |index: usize, depths: &Depths, ring: &MemoryOffer, bytes: u64| LaneSetup {
            endpoint: self.endpoints[index],
            sq_depth: depths.sq_depth,
            rq_depth: depths.rq_depth,
            peer_ring_addr: ring.addr,
            peer_ring_key: ring.key,
            ring_bytes: bytes as u32,
        };
        let rings = std::iter::once(agreed.control_ring_bytes).chain(agreed.ring_bytes.iter().copied());
        if let Some(bytes) = rings.into_iter().find(|bytes| *bytes != u64::from(RING_BYTES)) {
            return Err(err!(
                Protocol,
                "the peer offers a record ring of {bytes} bytes; this version has {RING_BYTES}"
            ));
        }
        let control = setup(0, &agreed.control, &theirs.control_ring, agreed.control_ring_bytes);
        let lanes = agreed
            .lanes
            .iter()
            .enumerate()
            .map(|(i, depths)| setup(i + 1, depths, &theirs.rings[i], agreed.ring_bytes[i]))
            .collect();
        Ok((control, lanes))
    }

    /// On which rails each lane in use runs, here and at the peer.
    pub fn lane_rails(&self, theirs: &OneSidedOffer, agreed: &AgreedOneSided) -> Box<[LaneRails]> {
        let pairs = self.rails[1..].iter().zip(&theirs.lanes).take(agreed.lanes.len());
        pairs.map(|(own, peer)| LaneRails { own: *own, peer: peer.rail }).collect()
    }

    /// Takes everything down again; nothing of it was ever used.
    pub(super) fn discard(self) {
        let deadline = take_down(&*self.fabric, self.endpoints.iter().copied());
        if let Err(e) = self.memory.deregister(deadline + DISCARD_WAIT) {
            tracing::error!("rings of an abandoned connect attempt stay registered: {e}");
            std::mem::forget(self.memory);
        }
    }
}

fn ring_offer(memory: &EpochMemory, ring: RingId) -> MemoryOffer {
    let (addr, key) = memory.ring(ring);
    MemoryOffer { addr, key, bytes: u64::from(RING_BYTES) }
}
