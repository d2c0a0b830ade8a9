//! Two sessions that talk to each other, and their driver: what `plugin/driver` does, without threads.

use crate::Check;
use crate::memory::{EpochMemory, Sizes};
use baton_core::credit::CreditPage;
use baton_core::notify::{Carry, NotifyMode};
use baton_core::peer::{
    Action, EndReason, EndpointStats, Event, LaneSetup, RingId, Session, SessionLimits, SessionSetup,
    record_limit,
};
use baton_core::prepared::LaneRails;
use baton_core::{Epoch, Instance, LaneId, Nanos, SessionId};
use baton_fabric::{EndpointConfig, EndpointId, Fabric};
use baton_fabric_sim::{Rng, SimFabric, SimWorld};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Sizes of a link, the same on both sides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub lanes: u8,
    pub sq_depth: u32,
    pub rq_depth: u32,
    pub ring_bytes: u32,
    pub notify: NotifyMode,
    /// What both sides agree on for data.
    pub max_message_bytes: u64,
    pub limits: SessionLimits,
}

impl Shape {
    /// Mostly small, so that every limit is met all the time.
    pub fn random(rng: &mut Rng) -> Shape {
        let ring_bytes = [512, 768, 1024, 4096, 16384][rng.below(5) as usize];
        let limits = SessionLimits {
            // Up to six fragments.
            max_message_bytes: record_limit(ring_bytes) as u32 * rng.between(1, 6) as u32,
            max_waiting_message_bytes: rng.between(8192, 65536),
            max_transfers: rng.between(2, 24) as u32,
            max_notifications: rng.between(4, 40) as u32,
            max_notification_bytes: rng.between(8192, 65536),
            slice_wrs: rng.between(1, 16) as u32,
            slice_bytes: rng.between(512, 16384),
            outstanding_bytes: rng.between(1024, 65536),
            unpopped_messages: rng.between(1, 20),
            unpopped_bytes: rng.between(64, 4096),
            stall_ms: 5_000,
            stall_bytes_per_second: 2_000_000,
            // Around the wrap of the 24 bits on the wire, sometimes.
            first_xfer_seq: if rng.chance(1, 3) { (1 << 24) - rng.between(1, 12) } else { 0 },
        };
        Shape {
            lanes: rng.between(1, 4) as u8,
            sq_depth: rng.between(4, 64) as u32,
            rq_depth: rng.between(1, 24) as u32,
            ring_bytes,
            notify: if rng.chance(1, 2) { NotifyMode::Send } else { NotifyMode::Immediate },
            max_message_bytes: if rng.chance(1, 3) { rng.between(100, 2000) } else { 4096 },
            limits,
        }
    }
}

/// One side of an open epoch.
pub(crate) struct Open {
    pub session: Session,
    pub memory: EpochMemory,
    /// Control, then the lanes.
    pub endpoints: Vec<EndpointId>,
    /// Rails of the lanes.
    pub lanes: Vec<LaneRails>,
    /// Fenced.
    pub ending: bool,
}

/// One side of a link.
#[derive(Default)]
pub(crate) struct Side {
    pub open: Option<Open>,
    pub carry: Carry,
    /// Lengths of the messages that the host has not popped.
    pub inbox: VecDeque<usize>,
}

pub(crate) struct Link {
    pub nodes: [usize; 2],
    pub shape: Shape,
    pub epoch: u32,
    pub sides: [Side; 2],
    /// The present epoch may end.
    pub faulted: bool,
    /// It may end until then (a partition).
    pub suspect_until: u64,
}

impl Link {
    pub fn is_open(&self) -> bool {
        self.sides.iter().all(|side| side.open.is_some())
    }

    /// Opens the next epoch on both sides, as HELLO to ACCEPT would.
    pub fn open(&mut self, world: &SimWorld, fabrics: [&Arc<SimFabric>; 2]) -> Check {
        self.epoch += 1;
        self.faulted = false;
        let shape = self.shape;
        let sizes = Sizes {
            ring_bytes: shape.ring_bytes,
            page_bytes: CreditPage::new(shape.lanes).bytes(),
            slots: if shape.notify == NotifyMode::Send { shape.rq_depth } else { 0 },
        };
        let deadline = Instant::now();
        let mut made = Vec::new();
        for fabric in fabrics {
            let mut endpoints = Vec::new();
            for nth in 0..=shape.lanes {
                let config = EndpointConfig {
                    sq_depth: shape.sq_depth,
                    rq_depth: shape.rq_depth,
                    active: made.is_empty(),
                    control: nth == 0,
                    max_sge: 1,
                    exposed: true,
                };
                let (id, address) = fabric.create_endpoint(&config).map_err(|e| e.to_string())?;
                endpoints.push((id, address));
            }
            let ids: Vec<_> = endpoints.iter().map(|(id, _)| *id).collect();
            let memory = EpochMemory::new(world, fabric, &ids, sizes)?;
            for (nth, id) in ids.into_iter().enumerate() {
                post_recvs(fabric, id, &memory, nth, 0, shape.rq_depth)?;
            }
            made.push((memory, endpoints));
        }
        for (side, fabric) in fabrics.into_iter().enumerate() {
            for ((mine, _), (_, peer)) in made[side].1.iter().zip(&made[1 - side].1) {
                fabric.connect_endpoint(*mine, peer, deadline).map_err(|e| e.to_string())?;
            }
        }
        let rails = [0, 1].map(|side| -> Vec<u8> {
            made[side].1.iter().skip(1).map(|(endpoint, _)| fabrics[side].rail(*endpoint)).collect()
        });
        let setups = [self.setup(&made, 0, fabrics[0]), self.setup(&made, 1, fabrics[1])];
        for (which, ((side, setup), (memory, endpoints))) in
            self.sides.iter_mut().zip(setups).zip(made).enumerate()
        {
            let endpoints = endpoints.into_iter().map(|(id, _)| id).collect();
            let pairs = rails[which].iter().zip(&rails[1 - which]);
            let lanes = pairs.map(|(own, peer)| LaneRails { own: *own, peer: *peer }).collect();
            let session = Session::new(setup, Nanos(world.now_ns()));
            side.open = Some(Open { session, memory, endpoints, lanes, ending: false });
        }
        Ok(())
    }

    fn setup(
        &mut self,
        made: &[(EpochMemory, Vec<(EndpointId, serde_json::Value)>)],
        side: usize,
        fabric: &SimFabric,
    ) -> SessionSetup {
        let (own, peer) = (&made[side], &made[1 - side].0);
        let shape = self.shape;
        let lane = |ring: RingId, endpoint: EndpointId| {
            let (peer_ring_addr, peer_ring_key) = peer.ring(ring);
            let Shape { sq_depth, rq_depth, ring_bytes, .. } = shape;
            LaneSetup { endpoint, sq_depth, rq_depth, peer_ring_addr, peer_ring_key, ring_bytes }
        };
        let (peer_credit_addr, peer_credit_key) = peer.page();
        let instance = |node: usize| Instance([node as u8 + 1; 16]);
        SessionSetup {
            own: instance(self.nodes[side]),
            peer: instance(self.nodes[1 - side]),
            session: SessionId(1),
            epoch: Epoch(self.epoch),
            control: lane(RingId::Control, own.1[0].0),
            lanes: (0..shape.lanes)
                .map(|n| lane(RingId::Lane(LaneId(n)), own.1[usize::from(n) + 1].0))
                .collect(),
            peer_credit_addr,
            peer_credit_key,
            caps: fabric.caps(),
            notify: shape.notify,
            limits: shape.limits,
            carry: std::mem::take(&mut self.sides[side].carry),
        }
    }

    /// Above the limits a peer is left with the credit that it had: so much may still come, and no more.
    pub fn check_inbox(&self, side: usize) -> Check {
        let Shape { lanes, rq_depth, ring_bytes, notify, limits, .. } = self.shape;
        let standalone = match notify {
            NotifyMode::Immediate => u64::from(ring_bytes) / 64,
            NotifyMode::Send => u64::from(rq_depth),
        };
        // Each may bring an id and a message.
        let granted = 2 * (u64::from(lanes) * u64::from(rq_depth) + standalone);
        let most = limits.unpopped_messages + granted * u64::from(self.epoch) + 1;
        let held = self.sides[side].inbox.len() as u64;
        if held > most {
            return Err(format!("{:?} side {side}: {held} messages are held, {most} can be", self.nodes));
        }
        Ok(())
    }

    /// What a sender knows was granted, and what a receiver took was sent.
    pub fn check_credit(&self, at_rest: bool) -> Check {
        let [Some(a), Some(b)] = [&self.sides[0].open, &self.sides[1].open] else { return Ok(()) };
        let stats = [a.session.stats().endpoints, b.session.stats().endpoints];
        for sender in [0, 1] {
            for (out, inn) in stats[sender].iter().zip(&stats[1 - sender]) {
                let who = |what: &str| {
                    Err(format!("{:?} side {sender} {}: {what}: {out:?} / {inn:?}", self.nodes, out.name))
                };
                if out.recv_consumed > out.recv_known || out.ring_consumed > out.ring_known {
                    return who("more consumed than known");
                }
                if out.recv_known > inn.recv_announced || out.ring_known > inn.ring_announced {
                    return who("more known than announced");
                }
                if inn.recv_received > out.recv_consumed {
                    return who("more received than consumed");
                }
                if at_rest {
                    self.check_rest(out, inn).or_else(who)?;
                }
            }
        }
        Ok(())
    }

    fn check_rest(&self, out: &EndpointStats, inn: &EndpointStats) -> Result<(), &'static str> {
        let (depth, ring) = (u64::from(self.shape.rq_depth), u64::from(self.shape.ring_bytes));
        if inn.recv_received != out.recv_consumed {
            return Err("not everything consumed was received");
        }
        if out.recv_known != inn.recv_granted || out.recv_known - out.recv_consumed != depth {
            return Err("RECV credit is missing at rest");
        }
        if out.ring_known != inn.ring_freed || out.ring_known - out.ring_consumed != ring {
            return Err("ring bytes are missing at rest");
        }
        if out.posted - out.retired >= u64::from(out.sq_depth) {
            return Err("the send queue is full at rest");
        }
        Ok(())
    }
}

fn post_recvs(
    fabric: &SimFabric,
    endpoint: EndpointId,
    memory: &EpochMemory,
    index: usize,
    first: u64,
    count: u32,
) -> Check {
    if count > fabric.caps().max_rq_depth {
        return Err(format!("{count} RECVs at once on {endpoint:?}"));
    }
    let slots: Vec<_> = (first..first + u64::from(count)).map(|n| memory.recv(index, n)).collect();
    fabric.post_recv(endpoint, &slots).map_err(|e| format!("post {count} RECVs on {endpoint:?}: {e}"))
}

impl Open {
    /// Carries out what the session wants; whether there was anything.
    pub fn act(&mut self, now: Nanos, fabric: &SimFabric) -> Result<bool, String> {
        let mut acted = false;
        while !self.ending {
            let Some(action) = self.session.next_action(now, &self.memory) else { break };
            acted = true;
            match action {
                Action::Recv { endpoint, first, count } => {
                    let index = self.endpoints.iter().position(|other| *other == endpoint);
                    let index = index.ok_or_else(|| format!("RECVs for {endpoint:?} of nobody"))?;
                    post_recvs(fabric, endpoint, &self.memory, index, first, count)?;
                }
                // The ledger has made room, so the simulator takes everything.
                Action::Post { endpoint, batch } => {
                    fabric.post(endpoint, &batch).map_err(|e| format!("post on {endpoint:?}: {e}"))?;
                }
            }
        }
        Ok(acted)
    }

    pub fn next_event(&mut self) -> Option<Event> {
        self.session.next_event()
    }

    /// Steps 1 and 2 of the end of an epoch.
    pub fn fence(&mut self, fabric: &SimFabric) {
        self.ending = true;
        self.endpoints.iter().for_each(|endpoint| fabric.fence(*endpoint));
    }

    /// Nothing is touched any more.
    pub fn is_quiet(&self, fabric: &SimFabric) -> bool {
        self.endpoints.iter().all(|endpoint| fabric.is_quiet(*endpoint))
    }

    /// Steps 4 to 6, once it is quiet and all completions were taken.
    pub fn close(
        mut self,
        fabric: &SimFabric,
        reason: EndReason,
    ) -> Result<baton_core::peer::Closed, String> {
        self.endpoints.iter().for_each(|endpoint| fabric.destroy_endpoint(*endpoint));
        let closed = self.session.close(reason);
        self.memory.free(fabric)?;
        Ok(closed)
    }
}
