//! The endpoints and memory of one connect attempt: made before HELLO or REPLY, handed to the session at ACCEPT, or discarded.

use crate::err;
use crate::error::Result;
use crate::memory::{CREDIT_PAGE_BYTES, EpochMemory, RING_BYTES};
use crate::peer::post_empty_recvs;
use baton_core::LaneId;
use baton_core::peer::{LaneSetup, RingId};
use baton_core::wire::{Agreed, EndpointOffer, FabricOffer, MemoryOffer};
use baton_fabric::{EndpointConfig, EndpointId, Fabric};
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Send-queue depth of a lane before negotiation and the fabric's own limit.
const LANE_SQ_DEPTH: u32 = 1024;
/// RECVs per lane: notified transfers that may be on their way at once.
const LANE_RQ_DEPTH: u32 = 512;
/// Send-queue depth of the control endpoint.
const CONTROL_SQ_DEPTH: u32 = 256;
/// RECVs of the control endpoint: standalone notifications on their way at once.
const CONTROL_RQ_DEPTH: u32 = 256;
/// Longest wait for endpoints that never carried anything to become quiet.
const DISCARD_WAIT: Duration = Duration::from_secs(1);

/// Endpoints of one fabric: control first, then the lanes.
pub(crate) struct EndpointSet {
    pub fabric: Arc<dyn Fabric>,
    pub fabric_index: usize,
    pub endpoints: Vec<EndpointId>,
    pub memory: Arc<EpochMemory>,
    pub offer: FabricOffer,
}

impl EndpointSet {
    /// Creates and fills everything. With a peer's offer: no deeper and no more lanes than it has.
    pub fn create(
        fabric: &Arc<dyn Fabric>,
        fabric_index: usize,
        active: bool,
        theirs: Option<&FabricOffer>,
    ) -> Result<EndpointSet> {
        let caps = fabric.caps();
        let lanes = theirs.map_or(usize::from(caps.default_lanes.max(1)), |offer| {
            offer.lanes.len().min(usize::from(caps.default_lanes.max(1)))
        });
        let memory = Arc::new(EpochMemory::new(fabric, lanes)?);
        let offer = FabricOffer {
            fabric: fabric.name().to_owned(),
            address: fabric.address(),
            max_message_bytes: u64::from(caps.max_message_bytes),
            control: EndpointOffer { address: Value::Null, sq_depth: 0, rq_depth: 0 },
            lanes: Vec::with_capacity(lanes),
            control_ring: ring_offer(&memory, RingId::Control),
            rings: (0..lanes).map(|lane| ring_offer(&memory, RingId::Lane(LaneId(lane as u8)))).collect(),
            credit_page: MemoryOffer {
                addr: memory.credit_page().0,
                key: memory.credit_page().1,
                bytes: CREDIT_PAGE_BYTES as u64,
            },
        };
        let mut set = EndpointSet {
            fabric: Arc::clone(fabric),
            fabric_index,
            endpoints: Vec::with_capacity(lanes + 1),
            memory,
            offer,
        };
        match set.create_endpoints(lanes, active, theirs) {
            Ok(()) => Ok(set),
            Err(e) => {
                set.discard();
                Err(e)
            }
        }
    }

    fn create_endpoints(&mut self, lanes: usize, active: bool, theirs: Option<&FabricOffer>) -> Result<()> {
        let caps = self.fabric.caps();
        for index in 0..=lanes {
            let control = index == 0;
            let (sq, rq) =
                if control { (CONTROL_SQ_DEPTH, CONTROL_RQ_DEPTH) } else { (LANE_SQ_DEPTH, LANE_RQ_DEPTH) };
            let limit = theirs.map(|offer| if control { &offer.control } else { &offer.lanes[index - 1] });
            let sq_depth = sq.min(caps.max_sq_depth).min(limit.map_or(u32::MAX, |l| l.sq_depth));
            let rq_depth = rq.min(caps.max_rq_depth).min(limit.map_or(u32::MAX, |l| l.rq_depth));
            let (endpoint, address) =
                self.fabric.create_endpoint(&EndpointConfig { sq_depth, rq_depth, active, control })?;
            self.endpoints.push(endpoint);
            let offer = EndpointOffer { address, sq_depth, rq_depth };
            if control {
                self.offer.control = offer;
            } else {
                self.offer.lanes.push(offer);
            }
        }
        Ok(())
    }

    /// Posts the RECVs that both sides agreed on. They stand before the endpoint can receive anything.
    pub fn post_recvs(&self, agreed: &Agreed) -> Result<()> {
        let depths = std::iter::once(&agreed.control).chain(&agreed.lanes);
        for (endpoint, depths) in self.endpoints.iter().zip(depths) {
            post_empty_recvs(&*self.fabric, *endpoint, depths.rq_depth)?;
        }
        Ok(())
    }

    /// Connects every endpoint that both sides use to the peer's.
    pub fn connect(&self, theirs: &FabricOffer, agreed: &Agreed, deadline: Instant) -> Result<()> {
        let addresses = std::iter::once(&theirs.control).chain(&theirs.lanes);
        for (endpoint, peer) in self.endpoints.iter().zip(addresses).take(1 + agreed.lanes.len()) {
            self.fabric.connect_endpoint(*endpoint, &peer.address, deadline)?;
        }
        Ok(())
    }

    /// What the session needs to know of each endpoint: control, lanes.
    pub fn setups(&self, theirs: &FabricOffer, agreed: &Agreed) -> Result<(LaneSetup, Vec<LaneSetup>)> {
        let setup =
            |index: usize, depths: &baton_core::wire::Depths, ring: &MemoryOffer, bytes: u64| LaneSetup {
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

    /// Takes everything down again; nothing of it was ever used.
    pub fn discard(self) {
        self.endpoints.iter().for_each(|endpoint| self.fabric.fence(*endpoint));
        let deadline = Instant::now() + DISCARD_WAIT;
        for endpoint in &self.endpoints {
            while !self.fabric.is_quiet(*endpoint) && Instant::now() < deadline {
                crate::epoch::wait_for_event(&*self.fabric);
            }
            self.fabric.destroy_endpoint(*endpoint);
        }
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
