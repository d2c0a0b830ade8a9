//! The seam: [`Fabric`] over a node of the world.

use crate::endpoint::*;
use crate::world::{Inner, SimWorld, Slot};
use baton_fabric::*;
use serde_json::{Value, json};
use std::os::fd::RawFd;
use std::time::Instant;

/// The fabric of one node. Deadlines are ignored: nothing here waits.
pub struct SimFabric {
    world: SimWorld,
    node: usize,
}

impl SimFabric {
    pub(crate) fn new(world: SimWorld, node: usize) -> SimFabric {
        SimFabric { world, node }
    }

    /// Which node it belongs to.
    pub fn node(&self) -> usize {
        self.node
    }

    fn not_found(&self, endpoint: EndpointId) -> FabricError {
        FabricError::NotFound(format!("node {} has no endpoint {endpoint:?} (any more)", self.node))
    }
}

/// Node and endpoint of an address, each checked.
fn parse(inner: &Inner, peer: &Value) -> Result<Qp, FabricError> {
    let number = |name: &str, limit: u64| {
        let value = peer.get(name).and_then(Value::as_u64).filter(|value| *value < limit);
        value.ok_or_else(|| {
            FabricError::Invalid(format!("peer address {peer}: \"{name}\" is not a number below {limit}"))
        })
    };
    let world = number("sim", u64::MAX)?;
    if world != inner.seed {
        return Err(FabricError::Peer(format!("the peer lives in world {world}, not {}", inner.seed)));
    }
    let node = number("node", inner.nodes.len() as u64)? as usize;
    let slot = number("slot", 1 << 32)? as u32;
    let generation = number("generation", 1 << 32)? as u32;
    Ok((node, EndpointId { slot, generation }))
}

/// The work requests of a batch.
fn work_requests(batch: &Batch<'_>, inline_bytes: usize) -> Result<Vec<Wr>, FabricError> {
    let wr = |index: usize, kind, fenced| Wr {
        seq: batch.first_seq + index as u64,
        kind,
        signaled: batch.signaled && index + 1 == batch.len(),
        fenced,
        done: None,
        sent: None,
    };
    let mut chain = Vec::with_capacity(batch.len());
    for (index, template) in batch.work.iter().enumerate() {
        let imm = batch.imm.filter(|_| index + 1 == batch.work.len());
        if template.len_bytes == 0 {
            return Err(FabricError::Invalid(format!("work request {index} has length 0")));
        }
        let kind = match template.op {
            Op::Write => WrKind::Write {
                source: Source::Memory(Box::new([Sge {
                    addr: template.local_addr,
                    local_key: template.local_key,
                    len_bytes: template.len_bytes,
                }])),
                remote_addr: template.remote_addr,
                remote_key: template.remote_key,
                imm,
            },
            Op::Read if imm.is_some() => {
                return Err(FabricError::Invalid("a READ cannot carry an immediate".into()));
            }
            Op::Read => WrKind::Read {
                local_addr: template.local_addr,
                local_key: template.local_key,
                len: template.len_bytes as usize,
                remote_addr: template.remote_addr,
                remote_key: template.remote_key,
            },
        };
        chain.push(wr(index, kind, false));
    }
    if let Some(extra) = &batch.extra {
        let source = if extra.bytes.len() <= inline_bytes && extra.gather.is_empty() {
            Source::Inline(extra.bytes.to_vec())
        } else if extra.staged.is_some() || !extra.gather.is_empty() {
            Source::Memory(extra.pieces().collect())
        } else {
            let len = extra.bytes.len();
            return Err(FabricError::Invalid(format!(
                "{len} bytes inline: the limit is {inline_bytes}; stage them"
            )));
        };
        let (remote_addr, remote_key) = (extra.remote_addr, extra.remote_key);
        let kind = match extra.op {
            ExtraOp::Write => WrKind::Write { source, remote_addr, remote_key, imm: None },
            ExtraOp::WriteImm(imm) => WrKind::Write { source, remote_addr, remote_key, imm: Some(imm) },
            ExtraOp::Send => WrKind::Send { source, head: 0 },
            ExtraOp::SendHead => {
                let head = extra.bytes.len();
                let behind = extra.len_bytes() > head as u64;
                WrKind::Send { source, head: if behind { head } else { 0 } }
            }
        };
        chain.push(wr(batch.work.len(), kind, extra.fenced));
    }
    Ok(chain)
}

fn admit(inner: &mut Inner, qp: Qp, batch: &Batch<'_>, not_found: FabricError) -> Result<(), FabricError> {
    let (inline_bytes, max_message) = (inner.cfg.inline_bytes as usize, inner.cfg.max_message_bytes);
    let ep = inner.endpoint(qp).ok_or(not_found)?;
    if ep.state == State::Created {
        return Err(FabricError::Invalid(format!("endpoint {:?} is not connected", qp.1)));
    }
    let lengths = batch.work.iter().map(|template| u64::from(template.len_bytes));
    if let Some(extra) = &batch.extra {
        extra.check_gather(ep.config.max_sge, max_message)?;
    }
    let longest = lengths.chain(batch.extra.map(|extra| extra.len_bytes())).max();
    if let Some(longest) = longest.filter(|longest| *longest > u64::from(max_message)) {
        return Err(FabricError::Limit(format!(
            "{longest} bytes in one work request: the limit is {max_message}"
        )));
    }
    let (used, depth) = (ep.unpolled_sends.len() + batch.len(), ep.config.sq_depth as usize);
    if used > depth {
        return Err(FabricError::Limit(format!(
            "{used} work requests on {:?}: its send queue holds {depth}",
            qp.1
        )));
    }
    let expected = ep.posted.unwrap_or(batch.first_seq);
    if batch.first_seq != expected {
        return Err(FabricError::Invalid(format!(
            "sequence {} follows {expected} on {:?}",
            batch.first_seq, qp.1
        )));
    }
    let chain = work_requests(batch, inline_bytes)?;
    ep.posted = Some(expected + chain.len() as u64);
    ep.unpolled_sends.extend(chain.iter().map(|wr| wr.seq));
    ep.sq.extend(chain);
    let broken = ep.state == State::Error;
    inner.nodes[qp.0].counters.work_requests += batch.len() as u64;
    if broken {
        inner.flush_late(qp)
    } else {
        inner.kick_launch(qp)
    }
    Ok(())
}

impl Fabric for SimFabric {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn caps(&self) -> Caps {
        let inner = self.world.lock();
        Caps {
            max_sq_depth: inner.cfg.max_depth,
            max_rq_depth: inner.cfg.max_depth,
            max_message_bytes: inner.cfg.max_message_bytes,
            longest_read_bytes: inner.cfg.max_message_bytes,
            inline_bytes: inner.cfg.inline_bytes,
            max_send_sge: inner.cfg.max_send_sge,
            default_lanes: inner.cfg.default_lanes,
            lane_sq_depth: 1024,
            stripe_min_bytes: inner.cfg.stripe_min_bytes,
            immediate: true,
            owner_revokes: true,
            needs_service: false,
            vram: false,
            reads_behind_fence: true,
            headed_bytes: inner.cfg.headed_bytes,
            pack_below_bytes: 0,
        }
    }

    fn address(&self) -> Value {
        json!({ "sim": self.world.lock().seed, "node": self.node })
    }

    fn reach(&self, peer: &Value, _deadline: Instant) -> Result<(), String> {
        let inner = self.world.lock();
        let node = peer.get("node").and_then(Value::as_u64).filter(|node| *node < inner.nodes.len() as u64);
        let Some(node) = node.filter(|_| peer.get("sim").and_then(Value::as_u64) == Some(inner.seed)) else {
            return Err(format!("{peer} is not a node of this world"));
        };
        if !inner.nodes[node as usize].alive {
            return Err(format!("node {node} is dead"));
        }
        match inner.link_down_until(self.node, node as usize) {
            Some(until) => Err(format!("no way to node {node} before {until} ns")),
            None => Ok(()),
        }
    }

    fn register(&self, memory: &Memory) -> Result<Keys, FabricError> {
        let mut inner = self.world.lock();
        let (rails, segment_bytes) = (inner.cfg.rails, inner.cfg.segment_bytes.max(1));
        let segments = memory.len_bytes.div_ceil(segment_bytes).max(1);
        let pairs: Vec<_> = (0..u64::from(rails) * segments)
            .map(|_| Keys { local: inner.rng.bits(), remote: inner.rng.bits() })
            .collect();
        let all = RegionKeys {
            segment_bytes,
            rails,
            local: pairs.iter().map(|keys| keys.local).collect(),
            remote: pairs.iter().map(|keys| keys.remote).collect(),
        };
        if inner.nodes[self.node].memory.register(memory, all) {
            Ok(pairs[0])
        } else {
            let Memory { addr, len_bytes, .. } = memory;
            Err(FabricError::Invalid(format!("node {} has no memory at {addr:#x} + {len_bytes}", self.node)))
        }
    }

    fn region_keys(&self, keys: Keys) -> RegionKeys {
        let inner = self.world.lock();
        let known = inner.nodes[self.node].memory.region_keys(keys).cloned();
        known.unwrap_or_else(|| RegionKeys::whole(keys))
    }

    fn rail(&self, endpoint: EndpointId) -> u8 {
        self.world.lock().endpoint((self.node, endpoint)).map_or(0, |ep| ep.rail)
    }

    fn revoke(&self, keys: Keys) {
        self.world.lock().nodes[self.node].memory.revoke(keys);
    }

    fn deregister(&self, keys: Keys, _deadline: Instant) -> Result<(), FabricError> {
        // Every access checks its key at the instant it happens, so nothing has to be waited for.
        if self.world.lock().nodes[self.node].memory.deregister(keys) {
            Ok(())
        } else {
            Err(FabricError::NotFound(format!(
                "node {} has no region with local key {:#x}",
                self.node, keys.local
            )))
        }
    }

    fn create_endpoint(&self, config: &EndpointConfig) -> Result<(EndpointId, Value), FabricError> {
        let mut inner = self.world.lock();
        let max = inner.cfg.max_depth;
        if config.sq_depth == 0 || config.sq_depth > max || config.rq_depth > max {
            return Err(FabricError::Limit(format!(
                "depths {} and {}: 1..={max}",
                config.sq_depth, config.rq_depth
            )));
        }
        let max_sge = inner.cfg.max_send_sge;
        if config.max_sge > max_sge {
            return Err(FabricError::Limit(format!(
                "{} pieces of a SEND: at most {max_sge}",
                config.max_sge
            )));
        }
        let seed = inner.seed;
        // Any endpoint of any rail reaches any other here, so chance decides.
        let rails = u64::from(inner.cfg.rails);
        let rail = if rails > 1 { inner.rng.below(rails) as u8 } else { 0 };
        let slots = &mut inner.nodes[self.node].slots;
        let free = slots.iter().position(|slot| slot.endpoint.is_none()).unwrap_or_else(|| {
            slots.push(Slot::default());
            slots.len() - 1
        });
        slots[free].endpoint = Some(Endpoint::new(*config, rail));
        let id = EndpointId { slot: free as u32, generation: slots[free].generation };
        let address = json!({ "sim": seed, "node": self.node, "slot": id.slot, "generation": id.generation });
        Ok((id, address))
    }

    fn connect_endpoint(
        &self,
        endpoint: EndpointId,
        peer: &Value,
        _deadline: Instant,
    ) -> Result<(), FabricError> {
        let mut inner = self.world.lock();
        let (me, peer) = ((self.node, endpoint), parse(&inner, peer)?);
        let next_flow = inner.flows.len();
        let other = inner.endpoint(peer).map(|ep| (ep.state, ep.peer, ep.rail));
        let peer_rail = match other {
            Some((State::Created, _, rail)) => rail,
            Some((State::Connected, Some(whose), rail)) if whose == me => rail,
            _ => {
                return Err(FabricError::Peer(format!(
                    "node {} has no endpoint {:?} to connect to",
                    peer.0, peer.1
                )));
            }
        };
        let ep = inner.endpoint(me).ok_or_else(|| self.not_found(endpoint))?;
        if ep.state != State::Created {
            return Err(FabricError::Invalid(format!(
                "endpoint {endpoint:?} was connected or fenced before"
            )));
        }
        ep.state = State::Connected;
        ep.peer = Some(peer);
        ep.flow = next_flow;
        let rail = ep.rail;
        inner.flows.push(Flow::new(me, peer, [rail, peer_rail]));
        Ok(())
    }

    fn post_recv(&self, endpoint: EndpointId, slots: &[RecvSlot]) -> Result<(), FabricError> {
        let mut inner = self.world.lock();
        let ep = inner.endpoint((self.node, endpoint)).ok_or_else(|| self.not_found(endpoint))?;
        let (used, depth) = (ep.unpolled_recvs as usize + slots.len(), ep.config.rq_depth as usize);
        if used > depth {
            return Err(FabricError::Limit(format!(
                "{used} RECVs on {endpoint:?}: its receive queue holds {depth}"
            )));
        }
        ep.unpolled_recvs += slots.len() as u32;
        ep.rq.extend(slots);
        if ep.state == State::Error {
            inner.flush_late((self.node, endpoint));
        }
        Ok(())
    }

    fn receive_heads(&self, endpoint: EndpointId) -> bool {
        let mut inner = self.world.lock();
        let offered = inner.cfg.headed_bytes != 0;
        let Some(ep) = inner.endpoint((self.node, endpoint)) else { return false };
        ep.heads = offered;
        offered
    }

    fn take(&self, endpoint: EndpointId, rests: &[Rest]) -> (usize, Option<Untaken>) {
        self.world.lock().take((self.node, endpoint), rests)
    }

    fn post(&self, endpoint: EndpointId, batch: &Batch<'_>) -> Result<(), PostError> {
        let mut inner = self.world.lock();
        admit(&mut inner, (self.node, endpoint), batch, self.not_found(endpoint))
            .map_err(|error| PostError { taken: 0, error })
    }

    fn poll(&self, out: &mut [Completion]) -> usize {
        let mut inner = self.world.lock();
        let n = out.len().min(inner.nodes[self.node].cq.len());
        for slot in &mut out[..n] {
            let Some(completion) = inner.nodes[self.node].cq.pop_front() else { break };
            if let Some(ep) = inner.endpoint((self.node, completion.endpoint)) {
                ep.on_polled(&completion);
            }
            inner.note(
                completion.seq ^ (completion.status as u64) << 48 ^ u64::from(completion.endpoint.slot) << 56,
            );
            *slot = completion;
        }
        n
    }

    fn serve(&self, _budget_bytes: usize) -> bool {
        false
    }

    fn event_fd(&self) -> Option<RawFd> {
        None
    }

    fn arm(&self) -> bool {
        self.world.lock().nodes[self.node].cq.is_empty()
    }

    fn disarm(&self) {}

    fn fence(&self, endpoint: EndpointId) {
        self.world.lock().fence((self.node, endpoint));
    }

    fn is_quiet(&self, endpoint: EndpointId) -> bool {
        self.world.lock().endpoint((self.node, endpoint)).is_none_or(|ep| ep.state == State::Error)
    }

    fn destroy_endpoint(&self, endpoint: EndpointId) {
        let mut inner = self.world.lock();
        if inner.endpoint((self.node, endpoint)).is_none() {
            return;
        }
        let node = &mut inner.nodes[self.node];
        let slot = &mut node.slots[endpoint.slot as usize];
        slot.endpoint = None;
        slot.generation += 1;
        node.cq.retain(|completion| completion.endpoint != endpoint);
    }

    fn stats(&self) -> Value {
        let inner = self.world.lock();
        let node = &inner.nodes[self.node];
        json!({
            "node": self.node,
            "work_requests": node.counters.work_requests,
            "completions": node.counters.completions,
            "bytes_placed": node.counters.bytes_placed,
            "refused": node.counters.refused,
            "rests_placed": node.counters.rests_placed,
            "rests_dropped": node.counters.rests_dropped,
            "regions": node.memory.region_count(),
            "endpoints": node.slots.iter().filter(|slot| slot.endpoint.is_some()).count(),
        })
    }
}
