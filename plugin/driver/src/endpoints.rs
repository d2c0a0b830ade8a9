//! The endpoints and memory of one connect attempt: made before HELLO or REPLY, handed to the session at ACCEPT, or discarded.

use crate::err;
use crate::error::{Error, Result};
use crate::memory::{CREDIT_PAGE_BYTES, EpochMemory, RING_BYTES};
use crate::peer::post_recvs;
use baton_core::LaneId;
use baton_core::notify::NotifyMode;
use baton_core::peer::{LaneSetup, RingId};
use baton_core::prepared::LaneRails;
use baton_core::wire::{
    Agreed, AgreedOneSided, Backends, EndpointOffer, FabricOffer, MAX_LANES, MemoryOffer, NoCommonBackend,
    OneSidedOffer, SEND_RQ_DEPTH,
};
use baton_fabric::{EndpointConfig, EndpointId, Fabric, PeerView};
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

/// The part of an offer that endpoints here can answer.
pub(crate) fn offered(offer: &FabricOffer) -> Result<&OneSidedOffer> {
    offer.one_sided.as_ref().ok_or_else(|| no_common_backend(offer.backends()))
}

/// What both sides agreed on for it.
pub(crate) fn settled(agreed: &Agreed) -> Result<&AgreedOneSided> {
    agreed.one_sided.as_ref().ok_or_else(|| no_common_backend(agreed.backends()))
}

fn no_common_backend(theirs: Backends) -> Error {
    err!(
        RemoteDisconnect,
        "{}",
        NoCommonBackend { ours: Backends { one_sided: true, two_sided: false }, theirs }
    )
}

/// Endpoints of one fabric: control first, then the lanes.
pub(crate) struct EndpointSet {
    pub fabric: Arc<dyn Fabric>,
    pub fabric_index: usize,
    pub endpoints: Vec<EndpointId>,
    pub memory: Arc<EpochMemory>,
    pub offer: FabricOffer,
}

/// Which side of the handshake makes endpoints, and what it knows of the other.
#[derive(Clone, Copy)]
pub(crate) enum Side<'a> {
    /// HELLO's: the address of the peer's fabric, if its connection information has it.
    Active(Option<&'a Value>),
    /// REPLY's: what the peer offers.
    Passive(&'a FabricOffer),
}

impl Side<'_> {
    /// What to ask the fabric for: control first, then as many lanes as make sense. Never deeper and no more than the peer offers.
    fn configs(&self, fabric: &dyn Fabric, immediate: bool) -> Result<Vec<EndpointConfig>> {
        let caps = fabric.caps();
        let (lanes, theirs) = match self {
            Side::Active(address) => (fabric.lanes_for(*address), None),
            Side::Passive(offer) => (fabric.lanes_for(Some(&offer.address)), Some(offered(offer)?)),
        };
        let lanes = usize::from(lanes).clamp(1, MAX_LANES);
        let lanes = lanes.min(theirs.map_or(MAX_LANES, |offer| offer.lanes.len()));
        let config = |index: usize| {
            let control = index == 0;
            let (sq, rq) =
                if control { (CONTROL_SQ_DEPTH, CONTROL_RQ_DEPTH) } else { (LANE_SQ_DEPTH, LANE_RQ_DEPTH) };
            let rq = if immediate { rq } else { rq.min(SEND_RQ_DEPTH) };
            let limit = theirs.map(|offer| if control { &offer.control } else { &offer.lanes[index - 1] });
            EndpointConfig {
                sq_depth: sq.min(caps.max_sq_depth).min(limit.map_or(u32::MAX, |l| l.sq_depth)),
                rq_depth: rq.min(caps.max_rq_depth).min(limit.map_or(u32::MAX, |l| l.rq_depth)),
                active: theirs.is_none(),
                control,
                max_sge: 1,
            }
        };
        Ok((0..=lanes).map(config).collect())
    }

    fn create_endpoints(
        &self,
        fabric: &dyn Fabric,
        configs: &[EndpointConfig],
    ) -> Result<Vec<(EndpointId, Value)>> {
        let made = match self {
            Side::Active(None) => fabric.create_endpoints(configs, PeerView::Unknown),
            Side::Active(Some(address)) => fabric.create_endpoints(configs, PeerView::Fabric(address)),
            Side::Passive(offer) => {
                let part = offered(offer)?;
                let offered = std::iter::once(&part.control).chain(&part.lanes).take(configs.len());
                let addresses: Vec<Value> = offered.map(|endpoint| endpoint.address.clone()).collect();
                fabric.create_endpoints(configs, PeerView::Endpoints(&addresses))
            }
        }?;
        if made.len() == configs.len() {
            return Ok(made);
        }
        let count = made.len();
        take_down(fabric, made.iter().map(|(endpoint, _)| *endpoint));
        Err(err!(
            Local,
            "fabric {} made {count} endpoints where {} were wanted",
            fabric.name(),
            configs.len()
        ))
    }
}

impl EndpointSet {
    /// Creates and fills everything: endpoints first, because their rails decide which keys of the rings the peer needs.
    pub fn create(
        fabric: &Arc<dyn Fabric>,
        fabric_index: usize,
        side: Side<'_>,
        notify: NotifyMode,
    ) -> Result<EndpointSet> {
        let immediate = notify == NotifyMode::Immediate && fabric.caps().immediate;
        let configs = side.configs(&**fabric, immediate)?;
        let (endpoints, addresses): (Vec<_>, Vec<_>) =
            side.create_endpoints(&**fabric, &configs)?.into_iter().unzip();
        let rails: Vec<u8> = endpoints.iter().map(|endpoint| fabric.rail(*endpoint)).collect();
        let memory = match EpochMemory::new(fabric, &rails) {
            Ok(memory) => Arc::new(memory),
            Err(e) => {
                take_down(&**fabric, endpoints.into_iter());
                return Err(e.into());
            }
        };
        let offered = configs.iter().zip(addresses).zip(&rails);
        let mut offered = offered.map(|((config, address), rail)| EndpointOffer {
            address,
            sq_depth: config.sq_depth,
            rq_depth: config.rq_depth,
            rail: *rail,
        });
        let control = offered.next().ok_or_else(|| err!(Local, "no control endpoint"))?;
        let lanes: Vec<_> = offered.collect();
        let (addr, key) = memory.credit_page();
        let one_sided = OneSidedOffer {
            immediate,
            control,
            control_ring: ring_offer(&memory, RingId::Control),
            rings: (0..lanes.len())
                .map(|lane| ring_offer(&memory, RingId::Lane(LaneId(lane as u8))))
                .collect(),
            lanes,
            credit_page: MemoryOffer { addr, key, bytes: CREDIT_PAGE_BYTES as u64 },
        };
        let offer = FabricOffer {
            fabric: fabric.name().to_owned(),
            address: fabric.address(),
            max_message_bytes: u64::from(fabric.caps().max_message_bytes),
            one_sided: Some(one_sided),
            two_sided: None,
        };
        Ok(EndpointSet { fabric: Arc::clone(fabric), fabric_index, endpoints, memory, offer })
    }

    /// Posts the RECVs that both sides agreed on. They stand before the endpoint can receive anything.
    pub fn post_recvs(&self, agreed: &Agreed) -> Result<()> {
        let agreed = settled(agreed)?;
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

    /// Connects every endpoint that both sides use to the peer's.
    pub fn connect(&self, theirs: &FabricOffer, agreed: &Agreed, deadline: Instant) -> Result<()> {
        let (theirs, agreed) = (offered(theirs)?, settled(agreed)?);
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
        let (theirs, agreed) = (offered(theirs)?, settled(agreed)?);
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
    pub fn lane_rails(&self, theirs: &FabricOffer, agreed: &Agreed) -> Box<[LaneRails]> {
        let (own, theirs) = (self.offer.one_sided.iter(), theirs.one_sided.iter());
        let lanes = agreed.one_sided.as_ref().map_or(0, |agreed| agreed.lanes.len());
        let pairs = own.flat_map(|own| &own.lanes).zip(theirs.flat_map(|theirs| &theirs.lanes));
        pairs.take(lanes).map(|(own, peer)| LaneRails { own: own.rail, peer: peer.rail }).collect()
    }

    /// Takes everything down again; nothing of it was ever used.
    pub fn discard(self) {
        let deadline = take_down(&*self.fabric, self.endpoints.iter().copied());
        if let Err(e) = self.memory.deregister(deadline + DISCARD_WAIT) {
            tracing::error!("rings of an abandoned connect attempt stay registered: {e}");
            std::mem::forget(self.memory);
        }
    }
}

/// Frees endpoints that never carried anything; answers until when it would have waited for them.
fn take_down(fabric: &dyn Fabric, endpoints: impl Iterator<Item = EndpointId> + Clone) -> Instant {
    endpoints.clone().for_each(|endpoint| fabric.fence(endpoint));
    let deadline = Instant::now() + DISCARD_WAIT;
    for endpoint in endpoints {
        while !fabric.is_quiet(endpoint) && Instant::now() < deadline {
            crate::epoch::wait_for_event(fabric);
        }
        fabric.destroy_endpoint(endpoint);
    }
    deadline
}

fn ring_offer(memory: &EpochMemory, ring: RingId) -> MemoryOffer {
    let (addr, key) = memory.ring(ring);
    MemoryOffer { addr, key, bytes: u64::from(RING_BYTES) }
}
