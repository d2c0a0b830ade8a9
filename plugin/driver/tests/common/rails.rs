//! A software fabric dressed up as one with several devices: endpoints on rails, memory in segments, a key per rail and
//! segment, and a check of every key against the rails of its endpoint. With faults that a device may have.

use baton_fabric::*;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Instant;

/// Rail of every key of the process: what two engines tell each other is checked here.
static RAIL_OF_KEY: LazyLock<Mutex<HashMap<u64, u8>>> = LazyLock::new(Mutex::default);

/// What the fabric is like.
#[derive(Clone)]
pub struct Dress {
    pub rails: u8,
    pub segment_bytes: u64,
    pub max_message_bytes: u32,
    pub longest_read_bytes: u32,
    pub lanes: u8,
    /// Why no endpoints can be made.
    pub no_endpoints: Option<&'static str>,
    /// Why no endpoint can be connected.
    pub no_connection: Option<&'static str>,
    /// Why RECVs cannot be posted.
    pub no_recvs: Option<&'static str>,
    /// Why device memory cannot be registered; where it can, it is host memory really.
    pub no_vram: Option<&'static str>,
}

impl Default for Dress {
    fn default() -> Dress {
        Dress {
            rails: 1,
            segment_bytes: u64::MAX,
            max_message_bytes: 4 << 20,
            longest_read_bytes: 4 << 20,
            lanes: 2,
            no_endpoints: None,
            no_connection: None,
            no_recvs: None,
            no_vram: None,
        }
    }
}

pub struct Railed {
    inner: Arc<dyn Fabric>,
    dress: Dress,
    /// By first local key: every key, and the registrations behind them.
    regions: Mutex<HashMap<u64, (RegionKeys, Vec<Keys>)>>,
    /// Rail here and, once connected, at the peer.
    endpoints: Mutex<HashMap<EndpointId, (u8, Option<u8>)>>,
    /// What `create_endpoints` was told.
    pub views: Mutex<Vec<Value>>,
    pub tended: AtomicU64,
    pub longest: AtomicU64,
}

impl Railed {
    pub fn new(inner: Arc<dyn Fabric>, dress: Dress) -> Arc<Railed> {
        Arc::new(Railed {
            inner,
            dress,
            regions: Mutex::default(),
            endpoints: Mutex::default(),
            views: Mutex::default(),
            tended: AtomicU64::new(0),
            longest: AtomicU64::new(0),
        })
    }

    /// Registrations that exist.
    pub fn region_count(&self) -> usize {
        self.regions.lock().unwrap().len()
    }

    pub fn endpoint_count(&self) -> usize {
        self.endpoints.lock().unwrap().len()
    }

    fn check(&self, endpoint: EndpointId, key: u64, at_peer: bool) -> Result<(), FabricError> {
        let (own, peer) = self.endpoints.lock().unwrap()[&endpoint];
        let rail = if at_peer { peer } else { Some(own) };
        match RAIL_OF_KEY.lock().unwrap().get(&key) {
            found if found.copied() == rail => Ok(()),
            found => Err(FabricError::Invalid(format!(
                "key {key:#x} of rail {found:?} on an endpoint whose rail is {rail:?} (peer: {at_peer})"
            ))),
        }
    }

    fn check_batch(&self, endpoint: EndpointId, batch: &Batch<'_>) -> Result<(), FabricError> {
        for template in batch.work {
            self.check(endpoint, template.local_key, false)?;
            self.check(endpoint, template.remote_key, true)?;
            let len = u64::from(template.len_bytes);
            self.longest.fetch_max(len, Ordering::Relaxed);
            if len > u64::from(self.dress.max_message_bytes) {
                return Err(FabricError::Limit(format!("{len} bytes in one work request")));
            }
        }
        let Some(extra) = &batch.extra else { return Ok(()) };
        if let Some((_, key)) = extra.staged {
            self.check(endpoint, key, false)?;
        }
        match extra.op {
            ExtraOp::Send | ExtraOp::SendHead => Ok(()),
            _ if extra.bytes.is_empty() && extra.remote_key == 0 => Ok(()),
            _ => self.check(endpoint, extra.remote_key, true),
        }
    }

    fn segments(&self, memory: &Memory) -> Vec<Memory> {
        let step = self.dress.segment_bytes.min(memory.len_bytes);
        let count = memory.len_bytes.div_ceil(step);
        let segment = |n: u64| Memory {
            addr: memory.addr + n * step,
            len_bytes: step.min(memory.len_bytes - n * step),
            kind: MemoryKind::Dram,
            ..*memory
        };
        (0..count).map(segment).collect()
    }
}

impl Fabric for Railed {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn caps(&self) -> Caps {
        let caps = self.inner.caps();
        let Dress { max_message_bytes, longest_read_bytes, .. } = self.dress;
        Caps { max_message_bytes, longest_read_bytes, stripe_min_bytes: 4096, ..caps }
    }

    fn address(&self) -> Value {
        json!({ "rails": self.dress.rails, "inner": self.inner.address() })
    }

    fn reach(&self, peer: &Value, deadline: Instant) -> Result<(), String> {
        self.inner.reach(&peer["inner"], deadline)
    }

    fn register(&self, memory: &Memory) -> Result<Keys, FabricError> {
        if let (MemoryKind::Vram, Some(why)) = (memory.kind, self.dress.no_vram) {
            return Err(FabricError::Unsupported(why.to_owned()));
        }
        let mut made = Vec::new();
        for rail in 0..self.dress.rails {
            for segment in self.segments(memory) {
                let keys = self.inner.register(&segment)?;
                RAIL_OF_KEY.lock().unwrap().extend([(keys.local, rail), (keys.remote, rail)]);
                made.push(keys);
            }
        }
        let all = RegionKeys {
            segment_bytes: self.dress.segment_bytes,
            rails: self.dress.rails,
            local: made.iter().map(|keys| keys.local).collect(),
            remote: made.iter().map(|keys| keys.remote).collect(),
        };
        let first = made[0];
        self.regions.lock().unwrap().insert(first.local, (all, made));
        Ok(first)
    }

    fn region_keys(&self, keys: Keys) -> RegionKeys {
        self.regions.lock().unwrap()[&keys.local].0.clone()
    }

    fn revoke(&self, keys: Keys) {
        let made = self.regions.lock().unwrap()[&keys.local].1.clone();
        made.into_iter().for_each(|keys| self.inner.revoke(keys));
    }

    fn deregister(&self, keys: Keys, deadline: Instant) -> Result<(), FabricError> {
        let made = self.regions.lock().unwrap().remove(&keys.local).expect("a registration").1;
        made.into_iter().try_for_each(|keys| self.inner.deregister(keys, deadline))
    }

    fn create_endpoint(&self, _config: &EndpointConfig) -> Result<(EndpointId, Value), FabricError> {
        panic!("a session's endpoints are created together")
    }

    fn create_endpoints(
        &self,
        configs: &[EndpointConfig],
        peer: PeerView<'_>,
    ) -> Result<Vec<(EndpointId, Value)>, FabricError> {
        let first = configs[0];
        assert!(first.control && configs[1..].iter().all(|config| !config.control), "control comes first");
        self.views.lock().unwrap().push(match peer {
            PeerView::Unknown => json!("unknown"),
            PeerView::Fabric(address) => json!({ "fabric": address }),
            PeerView::Endpoints(offered) => {
                assert_eq!(offered.len(), configs.len(), "one address per endpoint");
                json!({ "endpoints": offered })
            }
        });
        if let Some(why) = self.dress.no_endpoints {
            return Err(FabricError::Limit(why.to_owned()));
        }
        let made: Result<Vec<_>, _> =
            configs.iter().map(|config| self.inner.create_endpoint(config)).collect();
        let dress = |(n, (endpoint, address)): (usize, (EndpointId, Value))| {
            // The active side counts down, so that the two sides' rails meet in many ways.
            let n = if first.active { configs.len() - n } else { n };
            let rail = (n % usize::from(self.dress.rails)) as u8;
            self.endpoints.lock().unwrap().insert(endpoint, (rail, None));
            (endpoint, json!({ "rail": rail, "inner": address }))
        };
        Ok(made?.into_iter().enumerate().map(dress).collect())
    }

    fn lanes_for(&self, peer: Option<&Value>) -> u8 {
        assert!(peer.is_none_or(|address| address["rails"].is_u64()), "the address of such a fabric");
        self.dress.lanes
    }

    fn rail(&self, endpoint: EndpointId) -> u8 {
        self.endpoints.lock().unwrap()[&endpoint].0
    }

    fn tend(&self) {
        self.tended.fetch_add(1, Ordering::Relaxed);
    }

    fn connect_endpoint(
        &self,
        endpoint: EndpointId,
        peer: &Value,
        deadline: Instant,
    ) -> Result<(), FabricError> {
        if let Some(why) = self.dress.no_connection {
            return Err(FabricError::System(why.to_owned()));
        }
        let rail = peer["rail"].as_u64().expect("a rail") as u8;
        self.endpoints.lock().unwrap().get_mut(&endpoint).expect("an endpoint").1 = Some(rail);
        self.inner.connect_endpoint(endpoint, &peer["inner"], deadline)
    }

    fn post_recv(&self, endpoint: EndpointId, slots: &[RecvSlot]) -> Result<(), FabricError> {
        if let Some(why) = self.dress.no_recvs {
            return Err(FabricError::Limit(why.to_owned()));
        }
        let filled = slots.iter().filter(|slot| slot.len_bytes > 0);
        filled.into_iter().try_for_each(|slot| self.check(endpoint, slot.local_key, false))?;
        self.inner.post_recv(endpoint, slots)
    }

    fn post(&self, endpoint: EndpointId, batch: &Batch<'_>) -> Result<(), PostError> {
        self.check_batch(endpoint, batch).map_err(|error| PostError { taken: 0, error })?;
        self.inner.post(endpoint, batch)
    }

    fn poll(&self, out: &mut [Completion]) -> usize {
        self.inner.poll(out)
    }

    fn serve(&self, budget_bytes: usize) -> bool {
        self.inner.serve(budget_bytes)
    }

    fn event_fd(&self) -> Option<RawFd> {
        self.inner.event_fd()
    }

    fn arm(&self) -> bool {
        self.inner.arm()
    }

    fn disarm(&self) {
        self.inner.disarm();
    }

    fn fence(&self, endpoint: EndpointId) {
        self.inner.fence(endpoint);
    }

    fn is_quiet(&self, endpoint: EndpointId) -> bool {
        self.inner.is_quiet(endpoint)
    }

    fn destroy_endpoint(&self, endpoint: EndpointId) {
        self.endpoints.lock().unwrap().remove(&endpoint);
        self.inner.destroy_endpoint(endpoint);
    }

    fn stats(&self) -> Value {
        self.inner.stats()
    }
}
