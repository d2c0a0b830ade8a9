//! Endpoints from nothing to RTS: rails, completion queues, queue pairs, connections.

use crate::choose::{
    EndpointAddress, FabricAddress, Mtu, PairError, Pairing, PeerRail, Rail, mtu, rails, read_depth,
};
use crate::endpoint::Endpoint;
use crate::fabric::VerbsFabric;
use crate::queue::Queue;
use baton_fabric::{EndpointConfig, EndpointId, FabricError, PeerView};
use baton_verbs::{Connection, PathMtu, Qp, QpCap, QpConfig};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// READs in flight per queue pair and direction that are asked for: what current adapters have.
const READ_DEPTH: u32 = 16;

impl VerbsFabric {
    /// Rails that can be used now, and the index of each among all.
    pub(crate) fn usable(&self) -> Result<(Vec<Rail>, Vec<u8>), FabricError> {
        let up = self.rails.iter().enumerate().filter(|(_, rail)| rail.down().is_none());
        let (facts, indexes): (Vec<_>, Vec<_>) = up.map(|(i, rail)| (rail.facts(), i as u8)).unzip();
        if !facts.is_empty() {
            return Ok((facts, indexes));
        }
        let why: Vec<_> =
            self.rails.iter().filter_map(|rail| Some(format!("{rail}: {}", rail.down()?.why))).collect();
        Err(FabricError::System(format!("no RDMA port is up: {}", why.join("; "))))
    }

    pub(crate) fn pairing(&self, own: &[Rail], peer: Option<&Value>) -> Result<Pairing, FabricError> {
        let Some(peer) = peer else { return Ok(rails::unpaired(own)) };
        let peer = FabricAddress::parse(peer).map_err(|e| FabricError::Peer(e.to_string()))?;
        rails::active(own, &peer.rails).map_err(no_path)
    }

    /// The rail of each endpoint to be created.
    fn rails_for(&self, count: usize, peer: PeerView<'_>) -> Result<Vec<u8>, FabricError> {
        let (own, index) = self.usable()?;
        let chosen: Vec<u8> = match peer {
            PeerView::Endpoints(offered) => {
                let offered: Vec<PeerRail> = offered
                    .iter()
                    .map(|one| EndpointAddress::parse(one).map(|address| address.rail))
                    .collect::<Result<_, _>>()
                    .map_err(|e| FabricError::Peer(e.to_string()))?;
                let mut chosen = rails::passive(&own, &offered).map_err(no_path)?;
                chosen.resize(count, *chosen.first().unwrap_or(&0));
                chosen
            }
            PeerView::Unknown | PeerView::Fabric(_) => {
                let address = if let PeerView::Fabric(address) = peer { Some(address) } else { None };
                let pairing = self.pairing(&own, address)?;
                self.tell_once(&pairing.log);
                let lane = |i: usize| pairing.lane_rail((i - 1) as u8);
                (0..count).map(|i| if i == 0 { pairing.control_rail() } else { lane(i) }).collect()
            }
        };
        Ok(chosen.into_iter().map(|own| index[usize::from(own)]).collect())
    }

    fn tell_once(&self, line: &str) {
        let mut told = self.told.lock();
        if !told.iter().any(|earlier| earlier == line) {
            tracing::info!("verbs: {line}");
            if told.len() < 64 {
                told.push(line.to_owned());
            }
        }
    }

    /// Completion queues for endpoints on one device: one for all, or one for each where all are too many for the device.
    fn make_queues(&self, device_index: usize, needs: &[u32]) -> Result<Vec<Arc<Queue>>, FabricError> {
        let device = &self.devices[device_index];
        let together = needs.iter().fold(0u32, |sum, need| sum.saturating_add(*need));
        let make = |entries: u32| {
            let token = self.next_token.fetch_add(1, Ordering::Relaxed);
            let flusher = (&self.flusher, device_index);
            let queue = Queue::new(&device.channel, entries, token, &self.counters, flusher);
            queue.map(Arc::new).map_err(|e| {
                FabricError::System(format!(
                    "device {}: a completion queue of {entries} entries (limit {} entries, {} queues): {e}",
                    device.name, device.attr.max_cqe, device.attr.max_qp
                ))
            })
        };
        let made = if together <= device.attr.max_cqe {
            let one = make(together)?;
            vec![one; needs.len()]
        } else {
            needs.iter().map(|need| make(*need)).collect::<Result<Vec<_>, _>>()?
        };
        Ok(made)
    }

    fn make_endpoint(
        &self,
        config: &EndpointConfig,
        rail_index: u8,
        queue: &Arc<Queue>,
        member: u16,
    ) -> Result<Arc<Endpoint>, FabricError> {
        let rail = &self.rails[usize::from(rail_index)];
        let device = &rail.device;
        let cap = QpCap {
            // One more for the mark at the end of a fenced queue.
            max_send_wr: config.sq_depth + 1,
            max_recv_wr: config.rq_depth,
            max_send_sge: config.max_sge.max(1),
            ..device.cap
        };
        let failed = |e: baton_verbs::VerbsError| {
            FabricError::System(format!(
                "{rail}: a queue pair with {} sends of {} pieces and {} RECVs (the device's limits: {} queue pairs, {} work requests each, \
                 {} pieces): {e}; BATON_LANES lowers the number of queue pairs per session",
                cap.max_send_wr,
                cap.max_send_sge,
                cap.max_recv_wr,
                device.attr.max_qp,
                device.attr.max_qp_wr,
                device.attr.max_sge
            ))
        };
        let qp =
            Qp::new(&device.pd, &QpConfig { send_cq: &queue.cq, recv_cq: &queue.cq, cap }).map_err(failed)?;
        qp.to_init(rail.port, self.config.pkey_index, config.exposed, config.exposed).map_err(|e| {
            FabricError::System(format!("{rail}, partition key index {}: {e}", self.config.pkey_index))
        })?;
        let reads = READ_DEPTH.min(device.attr.max_qp_rd_atom).min(device.attr.max_qp_init_rd_atom) as u8;
        let psn = random_psn()?;
        let endpoint = self.endpoints.insert(|id| {
            let rail = (Arc::clone(rail), rail_index);
            Endpoint::new(id, qp, Arc::clone(queue), rail, member, psn, reads, config.max_sge)
        })?;
        queue.add(&endpoint);
        Ok(endpoint)
    }

    fn address_of(&self, endpoint: &Endpoint) -> Value {
        EndpointAddress {
            qpn: endpoint.qp.number(),
            psn: endpoint.psn,
            rail: PeerRail::of(endpoint.rail_index, &endpoint.rail.facts()),
            max_message_bytes: endpoint.rail.max_message_bytes,
            read_responder: endpoint.read_depth,
            read_initiator: endpoint.read_depth,
        }
        .to_value()
    }

    /// Creates the endpoints of a session: rails, then completion queues, then queue pairs.
    pub(crate) fn create_all(
        &self,
        configs: &[EndpointConfig],
        peer: PeerView<'_>,
    ) -> Result<Vec<(EndpointId, Value)>, FabricError> {
        self.flusher.ready()?;
        let chosen = self.rails_for(configs.len(), peer)?;
        let mut in_use: Vec<u8> = chosen.clone();
        in_use.sort_unstable();
        in_use.dedup();
        for rail in in_use {
            let rail = &self.rails[usize::from(rail)];
            rail.refresh(&self.config).map_err(|why| FabricError::System(format!("{rail}: {why}")))?;
        }
        let needs: Vec<u32> = configs.iter().map(|config| config.sq_depth + 1 + config.rq_depth).collect();
        let mut queues: Vec<Option<(Arc<Queue>, u16)>> = vec![None; configs.len()];
        for index in 0..self.devices.len() {
            let of_device: Vec<usize> = (0..configs.len())
                .filter(|at| self.rails[usize::from(chosen[*at])].device_index == index)
                .collect();
            let needs: Vec<u32> = of_device.iter().map(|at| needs[*at]).collect();
            let made = if needs.is_empty() { Vec::new() } else { self.make_queues(index, &needs)? };
            for (member, (at, queue)) in of_device.into_iter().zip(made).enumerate() {
                queues[at] = Some((queue, member as u16));
            }
        }
        let mut made = Vec::with_capacity(configs.len());
        for ((config, rail), queue) in configs.iter().zip(&chosen).zip(&queues) {
            let (queue, member) = queue.as_ref().ok_or_else(|| FabricError::System("no queue".to_owned()))?;
            match self.make_endpoint(config, *rail, queue, *member) {
                Ok(endpoint) => made.push(endpoint),
                Err(e) => {
                    self.take_down(made);
                    return Err(e);
                }
            }
        }
        let mut all = self.queues.write();
        for (queue, _) in queues.into_iter().flatten() {
            if !all.iter().any(|known| Arc::ptr_eq(known, &queue)) {
                all.push(queue);
            }
        }
        drop(all);
        Ok(made.iter().map(|endpoint| (endpoint.id, self.address_of(endpoint))).collect())
    }

    /// Takes an endpoint to RTS towards a peer's.
    pub(crate) fn connect(&self, endpoint: &Endpoint, peer: &Value) -> Result<(), FabricError> {
        let peer = EndpointAddress::parse(peer).map_err(|e| FabricError::Peer(e.to_string()))?;
        let rail = endpoint.rail.facts();
        let refused = |why: String| FabricError::Peer(format!("{rail}: {why}"));
        let path: Mtu = mtu(rail.mtu, peer.rail.mtu, self.config.mtu);
        let path_mtu = PathMtu::from_bytes(path.bytes());
        let path_mtu =
            path_mtu.ok_or_else(|| refused(format!("path MTU {path} is none of {}", Mtu::LIST)))?;
        let initiator_reads = read_depth(endpoint.read_depth, peer.read_responder).map_err(refused)?;
        let connection = Connection {
            port: endpoint.rail.port,
            sgid_index: rail.gid.index,
            dgid: peer.rail.gid.0,
            dlid: peer.rail.lid,
            global: peer.rail.lid == 0 || rail.gid.gid.subnet_prefix() != peer.rail.gid.subnet_prefix(),
            dest_qp_num: peer.qpn,
            path_mtu,
            rq_psn: peer.psn,
            sq_psn: endpoint.psn,
            responder_reads: endpoint.read_depth,
            initiator_reads,
            service_level: self.config.sl,
            traffic_class: self.config.tc,
            hop_limit: self.config.hop_limit,
            min_rnr_timer: self.config.min_rnr,
            timeout: self.config.ib_timeout,
            retry_cnt: self.config.ib_retry,
            rnr_retry: self.config.rnr_retry,
        };
        *endpoint.gid.lock() = Some(rail.gid.gid);
        endpoint.qp.connect(&connection).map_err(|e| {
            let route = match e.errno {
                libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ETIMEDOUT => {
                    "; there is no route between the two, or no answer on it"
                }
                _ => "",
            };
            let text = format!(
                "{rail}, GID index {}: connecting to {} (queue pair {}): {e}{route}",
                rail.gid.index,
                peer.rail.gid.ip(),
                peer.qpn
            );
            FabricError::System(text)
        })
    }
}

fn no_path(e: PairError) -> FabricError {
    FabricError::Peer(e.to_string())
}

fn random_psn() -> Result<u32, FabricError> {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).map_err(|e| FabricError::System(format!("random numbers: {e}")))?;
    Ok(u32::from_ne_bytes(bytes) & 0xff_ffff)
}
