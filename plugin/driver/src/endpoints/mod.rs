//! The endpoints and memory of one connect attempt: made before HELLO or REPLY, handed to the session at ACCEPT, or discarded.

mod one_sided;
mod two_sided;

use crate::err;
use crate::error::Result;
use crate::shared::Shared;
use baton_core::wire::{Agreed, Backends, EndpointOffer, FabricOffer, MAX_LANES};
use baton_fabric::{EndpointConfig, EndpointId, Fabric, PeerView};
use serde_json::Value;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) use one_sided::OneSidedSet;
pub(crate) use two_sided::TwoSidedSet;

/// Longest wait for endpoints that never carried anything to become quiet.
const DISCARD_WAIT: Duration = Duration::from_secs(1);

/// Endpoints of one fabric, of each backend that is offered.
pub(crate) struct EndpointSet {
    pub fabric: Arc<dyn Fabric>,
    pub fabric_index: usize,
    pub one_sided: Option<OneSidedSet>,
    pub two_sided: Option<TwoSidedSet>,
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

/// What is known of the other side's endpoints of one backend.
struct Theirs<'a> {
    /// Of its fabric.
    address: Option<&'a Value>,
    /// Its endpoints, control first, once it has offered them.
    offered: Option<Vec<&'a EndpointOffer>>,
}

/// Depths of the queues before negotiation and the fabric's own limit, as (send, receive).
struct QueueDepths {
    control: (u32, u32),
    lane: (u32, u32),
    /// Pieces of a lane's SENDs.
    max_sge: u32,
    /// The peer READs and WRITEs through the lanes.
    exposed: bool,
}

/// Endpoints as they were made, control first, and how they are offered.
struct MadeEndpoints {
    ids: Vec<EndpointId>,
    control: EndpointOffer,
    lanes: Vec<EndpointOffer>,
}

impl Theirs<'_> {
    /// What to ask the fabric for: control first, then as many lanes as make sense. Never deeper and no more than the peer offers.
    fn configs(&self, fabric: &dyn Fabric, depths: &QueueDepths) -> Vec<EndpointConfig> {
        let caps = fabric.caps();
        let lanes = usize::from(fabric.lanes_for(self.address)).clamp(1, MAX_LANES);
        let count = self.offered.as_ref().map_or(1 + lanes, |offered| offered.len().min(1 + lanes));
        let config = |index: usize| {
            let control = index == 0;
            let (sq, rq) = if control { depths.control } else { depths.lane };
            let limit = self.offered.as_ref().map(|offered| offered[index]);
            EndpointConfig {
                sq_depth: sq.min(caps.max_sq_depth).min(limit.map_or(u32::MAX, |l| l.sq_depth)),
                rq_depth: rq.min(caps.max_rq_depth).min(limit.map_or(u32::MAX, |l| l.rq_depth)),
                max_sge: if control { 1 } else { depths.max_sge },
                // Credit is written through the control endpoint.
                exposed: control || depths.exposed,
                active: self.offered.is_none(),
                control,
            }
        };
        (0..count).map(config).collect()
    }

    fn create(&self, fabric: &dyn Fabric, depths: &QueueDepths) -> Result<MadeEndpoints> {
        let configs = self.configs(fabric, depths);
        let addresses: Option<Vec<Value>> = self
            .offered
            .as_ref()
            .map(|offered| offered.iter().take(configs.len()).map(|e| e.address.clone()).collect());
        let view = match (&addresses, self.address) {
            (Some(addresses), _) => PeerView::Endpoints(addresses),
            (None, Some(address)) => PeerView::Fabric(address),
            (None, None) => PeerView::Unknown,
        };
        let made = fabric.create_endpoints(&configs, view)?;
        let ids: Vec<_> = made.iter().map(|(endpoint, _)| *endpoint).collect();
        if made.len() != configs.len() {
            let (count, wanted) = (made.len(), configs.len());
            take_down(fabric, ids.into_iter());
            return Err(err!(
                Local,
                "fabric {} made {count} endpoints where {wanted} were wanted",
                fabric.name()
            ));
        }
        let mut offers = configs.iter().zip(made).map(|(config, (endpoint, address))| EndpointOffer {
            address,
            sq_depth: config.sq_depth,
            rq_depth: config.rq_depth,
            rail: fabric.rail(endpoint),
        });
        let control = offers.next().ok_or_else(|| err!(Local, "no control endpoint"))?;
        Ok(MadeEndpoints { ids, control, lanes: offers.collect() })
    }
}

impl<'a> Side<'a> {
    /// What it knows of one backend's endpoints, `of` an offer; `None`: the peer does not offer that backend.
    fn theirs(
        &self,
        of: impl FnOnce(&'a FabricOffer) -> Option<Vec<&'a EndpointOffer>>,
    ) -> Option<Theirs<'a>> {
        match self {
            Side::Active(address) => Some(Theirs { address: *address, offered: None }),
            Side::Passive(offer) => Some(Theirs { address: Some(&offer.address), offered: Some(of(offer)?) }),
        }
    }
}

impl EndpointSet {
    /// Creates and fills everything, for those of the backends that the other side may have.
    pub fn create(
        shared: &Shared,
        fabric: &Arc<dyn Fabric>,
        fabric_index: usize,
        side: Side<'_>,
        backends: Backends,
    ) -> Result<EndpointSet> {
        let mut set = EndpointSet {
            fabric: Arc::clone(fabric),
            fabric_index,
            one_sided: None,
            two_sided: None,
            offer: FabricOffer {
                fabric: fabric.name().to_owned(),
                address: fabric.address(),
                max_message_bytes: u64::from(fabric.caps().max_message_bytes),
                one_sided: None,
                two_sided: None,
            },
        };
        match set.fill(shared, side, backends) {
            Ok(()) => Ok(set),
            Err(e) => {
                set.discard(shared);
                Err(e)
            }
        }
    }

    fn fill(&mut self, shared: &Shared, side: Side<'_>, backends: Backends) -> Result<()> {
        if backends.one_sided
            && let Some(theirs) = side.theirs(|offer| offer.one_sided.as_ref().map(one_sided::endpoints))
        {
            let (set, offer) = OneSidedSet::create(&self.fabric, &theirs, shared.config.notify)?;
            (self.one_sided, self.offer.one_sided) = (Some(set), Some(offer));
        }
        if backends.two_sided
            && let Some(theirs) = side.theirs(|offer| offer.two_sided.as_ref().map(two_sided::endpoints))
        {
            let (set, offer) = TwoSidedSet::create(shared, &self.fabric, self.fabric_index, &theirs)?;
            (self.two_sided, self.offer.two_sided) = (Some(set), Some(offer));
        }
        Ok(())
    }

    /// All endpoints.
    pub fn endpoints(&self) -> impl Iterator<Item = EndpointId> + Clone + '_ {
        let one = self.one_sided.iter().flat_map(|set| &set.endpoints);
        let two = self.two_sided.iter().flat_map(|set| &set.endpoints);
        one.chain(two).copied()
    }

    /// Posts the RECVs that both sides agreed on. They stand before the endpoint can receive anything.
    pub fn post_recvs(&mut self, agreed: &Agreed) -> Result<()> {
        if let (Some(set), Some(agreed)) = (&self.one_sided, &agreed.one_sided) {
            set.post_recvs(agreed)?;
        }
        if let (Some(set), Some(agreed)) = (&mut self.two_sided, &agreed.two_sided) {
            set.post_recvs(agreed)?;
        }
        Ok(())
    }

    /// Connects every endpoint that both sides use to the peer's.
    pub fn connect(&self, theirs: &FabricOffer, agreed: &Agreed, deadline: Instant) -> Result<()> {
        let mut pairs = Vec::new();
        if let (Some(set), Some(theirs), Some(agreed)) =
            (&self.one_sided, &theirs.one_sided, &agreed.one_sided)
        {
            let used = 1 + agreed.lanes.len();
            pairs.extend(set.endpoints.iter().zip(one_sided::endpoints(theirs)).take(used));
        }
        if let (Some(set), Some(theirs), Some(agreed)) =
            (&self.two_sided, &theirs.two_sided, &agreed.two_sided)
        {
            let used = 1 + agreed.lanes.len();
            pairs.extend(set.endpoints.iter().zip(two_sided::endpoints(theirs)).take(used));
        }
        for (endpoint, peer) in pairs {
            self.fabric.connect_endpoint(*endpoint, &peer.address, deadline)?;
        }
        Ok(())
    }

    /// Takes down what the peer does not have.
    pub fn keep(&mut self, shared: &Shared, backends: Backends) {
        let one = self.one_sided.take_if(|_| !backends.one_sided);
        one.into_iter().for_each(OneSidedSet::discard);
        let two = self.two_sided.take_if(|_| !backends.two_sided);
        two.into_iter().for_each(|set| set.discard(&shared.bounces));
    }

    /// Takes everything down again; nothing of it was ever used.
    pub fn discard(self, shared: &Shared) {
        if let Some(set) = self.one_sided {
            set.discard();
        }
        if let Some(set) = self.two_sided {
            set.discard(&shared.bounces);
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
