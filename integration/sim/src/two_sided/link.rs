//! Two channels that talk to each other, and what a driver does for them.

use super::memory::{Bounce, ChannelMemory, View};
use super::rests::Rests;
use crate::Check;
use crate::cells::Cells;
use baton_core::two_sided::channel::{Channel, Durable, TwoStats};
use baton_core::two_sided::codec::append_data_crc;
use baton_core::two_sided::pool::{Holder, PeerKey};
use baton_core::two_sided::setup::{DataSend, PlaceJob, Source, TwoAction, TwoLane, TwoLimits, TwoSetup};
use baton_core::{Epoch, LaneId, Nanos, SessionId};
use baton_fabric::{Batch, EndpointConfig, EndpointId, Extra, ExtraOp, Fabric, Sge};
use baton_fabric_sim::{Rng, SimFabric, SimWorld};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Sizes of a link, the same on both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub lanes: u8,
    pub sq: u32,
    pub rq: u32,
    pub control: (u32, u32),
    pub first_recvs: u32,
    pub send_slots: u32,
    pub max_sge: u32,
    pub gather: bool,
    pub data_crc: bool,
    /// Single blocks of so many bytes and more are sent with a head.
    pub head_from: Option<u32>,
    /// Whether each side receives them in two steps.
    pub heads: [bool; 2],
    pub limits: TwoLimits,
}

impl Shape {
    /// Mostly small, so that every limit is met all the time.
    pub fn random(rng: &mut Rng) -> Shape {
        let message_bytes = rng.between(8, 3000) as u32;
        let rq = rng.between(1, 24) as u32;
        Shape {
            lanes: rng.between(1, 4) as u8,
            sq: rng.between(2, 32) as u32,
            rq,
            control: (rng.between(8, 32) as u32, rng.between(2, 32) as u32),
            first_recvs: (rng.below(3) as u32).min(rq),
            send_slots: rng.between(1, 6) as u32,
            max_sge: rng.between(2, 16) as u32,
            gather: rng.chance(1, 2),
            data_crc: rng.chance(1, 2),
            limits: TwoLimits {
                request_depth: rng.between(1, 24) as u32,
                notify_window: message_bytes + 64 + rng.below(4000) as u32,
                message_bytes,
                max_transfers: rng.between(2, 40) as u32,
                max_notifications: rng.between(4, 40) as u32,
                unpopped_bytes: rng.between(100, 8000),
                small_bytes: [0, 1000, 100_000][rng.below(3) as usize],
                pack_bytes: [0, 100, 1000][rng.below(3) as usize],
                ring: rng.between(1, 8) as usize,
                lane_idle_ms: rng.between(1, 50),
                reclaim_ms: rng.between(1, 20),
                ..TwoLimits::default()
            },
            head_from: rng.chance(2, 3).then(|| rng.between(1, 800) as u32),
            heads: [rng.chance(3, 4), rng.chance(3, 4)],
        }
    }
}

/// One side of an open epoch.
pub(super) struct Open {
    pub channel: Channel,
    pub memory: ChannelMemory,
    /// Control, then the lanes.
    pub endpoints: Vec<EndpointId>,
    /// Copies that were handed out and have not ended.
    pub copies: Vec<PlaceJob>,
    /// Rests that were not taken.
    pub rests: Rests,
    /// Fenced.
    pub ending: bool,
}

/// One side of a link.
#[derive(Default)]
pub(super) struct Side {
    pub open: Option<Open>,
    pub durable: Option<Durable>,
    /// Lengths of the messages that the host has not taken.
    pub inbox: VecDeque<usize>,
    /// The host knows that another instance has taken the peer's place: its session will not be resumed.
    pub unbound: bool,
}

pub(super) struct Link {
    pub nodes: [usize; 2],
    pub peer: PeerKey,
    pub shape: Shape,
    pub epoch: u32,
    pub sides: [Side; 2],
    /// The present epoch may end.
    pub faulted: bool,
    /// It may end until then (a partition).
    pub suspect_until: u64,
    /// The link of the instance whose place one of the nodes took.
    pub replaces: Option<usize>,
}

/// What one side has before it is connected.
struct Prepared {
    memory: ChannelMemory,
    endpoints: Vec<(EndpointId, serde_json::Value)>,
    lanes: Vec<TwoLane>,
}

impl Link {
    pub fn new(nodes: [usize; 2], peer: PeerKey, shape: Shape) -> Link {
        let sides = [Side::default(), Side::default()];
        Link { nodes, peer, shape, epoch: 0, sides, faulted: false, suspect_until: 0, replaces: None }
    }

    /// Opens the next epoch on both sides, as HELLO to ACCEPT would.
    pub fn open(&mut self, world: &SimWorld, fabrics: [&Arc<SimFabric>; 2], bounces: &mut [Bounce]) -> Check {
        self.epoch += 1;
        // What ends the epoch may be seen long after it happened.
        self.faulted = self.suspect_until > world.now_ns();
        let mut made = Vec::new();
        for (side, fabric) in fabrics.iter().enumerate() {
            made.push(self.prepare(world, fabric, side == 0, &mut bounces[self.nodes[side]])?);
        }
        let far = Instant::now() + std::time::Duration::from_secs(1);
        for side in [0, 1] {
            let pairs: Vec<_> = made[side].endpoints.iter().zip(&made[1 - side].endpoints).collect();
            for ((own, _), (_, address)) in pairs {
                let connected = fabrics[side].connect_endpoint(*own, address, far);
                connected.map_err(|e| format!("{:?}: connect: {e}", self.nodes))?;
            }
        }
        let told: Vec<Vec<u32>> = made
            .iter()
            .map(|side| side.lanes.iter().map(|lane| lane.posted.len() as u32).collect())
            .collect();
        let pages = [made[0].memory.page(), made[1].memory.page()];
        for (side, mut prepared) in made.into_iter().enumerate() {
            for (lane, told) in prepared.lanes.iter_mut().zip(&told[1 - side]) {
                lane.peer_posted = *told;
            }
            let endpoints: Vec<_> = prepared.endpoints.into_iter().map(|(id, _)| id).collect();
            let setup = self.setup(
                endpoints[0],
                prepared.lanes,
                pages[1 - side],
                bounces[self.nodes[side]].pool.config().slot_bytes,
            );
            let state = &mut self.sides[side];
            let durable = state.durable.take().unwrap_or_else(|| Durable::new(self.shape.limits));
            let channel = Channel::new(setup, durable, Nanos(world.now_ns()));
            state.open = Some(Open {
                channel,
                memory: prepared.memory,
                endpoints,
                copies: Vec::new(),
                rests: Rests::default(),
                ending: false,
            });
        }
        Ok(())
    }

    fn prepare(
        &self,
        world: &SimWorld,
        fabric: &SimFabric,
        active: bool,
        bounce: &mut Bounce,
    ) -> Result<Prepared, String> {
        let Shape { lanes, sq, rq, control, first_recvs, .. } = self.shape;
        let node = fabric.node();
        bounce.pool.join(self.peer);
        let memory = ChannelMemory::new(world, fabric, control, (lanes.into(), sq))?;
        let max_sge = self.shape.max_sge;
        let config = |control, sq_depth, rq_depth| EndpointConfig {
            sq_depth,
            rq_depth,
            active,
            control,
            max_sge,
            exposed: control,
        };
        let make = |config| fabric.create_endpoint(&config).map_err(|e| format!("create an endpoint: {e}"));
        let mut endpoints = vec![make(config(true, control.0, control.1))?];
        let recvs: Vec<_> = (0..u64::from(control.1)).map(|n| memory.control_recv(world, node, n)).collect();
        fabric.post_recv(endpoints[0].0, &recvs).map_err(|e| format!("control RECVs: {e}"))?;
        let mut two = Vec::new();
        for lane in 0..lanes {
            let made = make(config(false, sq, rq))?;
            if self.shape.heads[usize::from(!active)] && !fabric.receive_heads(made.0) {
                return Err("no heads are received here".into());
            }
            let holder = Holder { peer: self.peer, lane: LaneId(lane) };
            let posted: Vec<_> = (0..first_recvs).filter_map(|_| bounce.pool.lend(holder)).collect();
            let recvs: Vec<_> =
                (0..).zip(&posted).map(|(id, slot)| bounce.slabs.recv(world, node, *slot, id)).collect();
            fabric.post_recv(made.0, &recvs).map_err(|e| format!("RECVs: {e}"))?;
            two.push(TwoLane { endpoint: made.0, sq_depth: sq, rq_depth: rq, posted, peer_posted: 0 });
            endpoints.push(made);
        }
        Ok(Prepared { memory, endpoints, lanes: two })
    }

    fn setup(&self, control: EndpointId, lanes: Vec<TwoLane>, page: (u64, u64), slot_bytes: u32) -> TwoSetup {
        TwoSetup {
            peer: self.peer,
            session: SessionId(u64::from(self.peer.0) + 1),
            epoch: Epoch(self.epoch),
            control,
            control_sq_depth: self.shape.control.0,
            control_rq_depth: self.shape.control.1,
            lanes,
            slot_bytes,
            peer_credit_addr: page.0,
            peer_credit_key: page.1,
            send_slots: self.shape.send_slots,
            max_sge: self.shape.max_sge,
            data_crc: self.shape.data_crc,
            limits: self.shape.limits,
        }
    }

    pub fn is_open(&self) -> bool {
        self.sides.iter().all(|side| side.open.as_ref().is_some_and(|open| !open.ending))
    }

    fn stats(&self) -> Option<[TwoStats; 2]> {
        let [a, b] = &self.sides;
        Some([a.open.as_ref()?.channel.stats(), b.open.as_ref()?.channel.stats()])
    }

    /// What a sender knows was granted, what a receiver took was sent, and a RECV stands for every credit that is out.
    pub fn check_credit(&self, at_rest: bool) -> Check {
        let Some(stats) = self.stats().filter(|_| self.is_open()) else { return Ok(()) };
        for sender in [0, 1] {
            let (s, r) = (&stats[sender], &stats[1 - sender]);
            let wrong = |what: &str| Err(format!("{:?} side {sender}: {what}: {s:#?} / {r:#?}", self.nodes));
            for (out, inn) in s.lanes.iter().zip(&r.lanes) {
                let holds = out.consumed <= out.known
                    && out.known <= inn.announced
                    && inn.announced <= inn.granted
                    && inn.received <= out.consumed
                    && inn.granted - inn.received == u64::from(inn.posted_recvs);
                if !holds {
                    return wrong("credit of a lane");
                }
                let whole = out.consumed == inn.received
                    && out.known == inn.granted
                    && out.known - out.consumed == u64::from(inn.posted_recvs);
                if at_rest && !whole {
                    return wrong("credit of a lane is missing at rest");
                }
            }
            let control = s.control_consumed <= s.control_known
                && s.control_known <= r.control_granted
                && r.control_received <= s.control_consumed;
            let request = s.request_consumed <= s.request_known && s.request_known <= r.request_granted;
            if !control || !request {
                return wrong("credit for frames or transfers");
            }
            let (depth, requests) =
                (u64::from(self.shape.control.1), u64::from(self.shape.limits.request_depth));
            let whole = s.control_known - s.control_consumed == depth
                && s.control_consumed == r.control_received
                && s.request_known == r.request_granted
                && s.request_known - s.request_consumed == requests
                && (r.peer_transfers, r.inbox_bytes, s.send_slots, s.gathers) == (0, 0, 0, 0);
            if at_rest && !whole {
                return wrong("something is missing at rest");
            }
        }
        Ok(())
    }
}

impl Open {
    /// Carries out what the channel wants; whether there was anything.
    #[allow(clippy::too_many_arguments)]
    pub fn act(
        &mut self,
        now: Nanos,
        world: &SimWorld,
        fabric: &SimFabric,
        bounce: &mut Bounce,
        cells: &Cells,
        peer_page: (u64, u64),
        (gather, head_from): (bool, Option<u32>),
    ) -> Result<bool, String> {
        let node = fabric.node();
        let Bounce { pool, slabs, .. } = bounce;
        let view = View { world, node, memory: &self.memory, slabs, cells, gather };
        let post = Post { fabric, view: &view, endpoints: &self.endpoints };
        let mut acted = false;
        while let Some(action) = self.channel.next_action(now, &view, pool) {
            acted = true;
            match action {
                TwoAction::Place(job) => match job.rest {
                    Some(rest) => self.rests.push(rest, job),
                    None => self.copies.push(job),
                },
                TwoAction::RecvData { endpoint, first, slots } => {
                    let recvs: Vec<_> = (first..)
                        .zip(slots)
                        .map(|(n, slot)| view.slabs.recv(world, node, *slot, n as u32))
                        .collect();
                    fabric.post_recv(endpoint, &recvs).map_err(|e| format!("RECVs: {e}"))?;
                }
                TwoAction::RecvControl { endpoint, first, count } => {
                    let recvs: Vec<_> = (first..first + u64::from(count))
                        .map(|n| self.memory.control_recv(world, node, n))
                        .collect();
                    fabric.post_recv(endpoint, &recvs).map_err(|e| format!("control RECVs: {e}"))?;
                }
                TwoAction::Credit { endpoint, seq, word, bytes } => {
                    let remote = (peer_page.0 + word as u64 * 8, peer_page.1);
                    let at = self.memory.control_send(seq, bytes.len());
                    post.bytes(endpoint, seq, ExtraOp::Write, remote, at, bytes, &[])?;
                }
                TwoAction::SendControl { endpoint, seq, bytes } => {
                    let at = self.memory.control_send(seq, bytes.len());
                    post.bytes(endpoint, seq, ExtraOp::Send, (0, 0), at, bytes, &[])?;
                }
                TwoAction::SendData(send) => post.data(&send, head_from)?,
            }
        }
        Ok(acted)
    }

    /// Steps 1 and 2 of the end of an epoch.
    pub fn fence(&mut self, fabric: &SimFabric) {
        self.ending = true;
        self.endpoints.iter().for_each(|endpoint| fabric.fence(*endpoint));
    }

    pub fn is_quiet(&self, fabric: &SimFabric) -> bool {
        self.endpoints.iter().all(|endpoint| fabric.is_quiet(*endpoint))
    }
}

/// Work requests of one side.
struct Post<'a> {
    fabric: &'a SimFabric,
    view: &'a View<'a>,
    endpoints: &'a [EndpointId],
}

impl Post<'_> {
    fn data(&self, send: &DataSend<'_>, head_from: Option<u32>) -> Check {
        let mut prefix = send.prefix.to_vec();
        let spans = send.spans.iter();
        let parts: Vec<(u64, Vec<u8>)> = spans
            .map(|span| {
                let addr = self.view.address(span.from);
                (addr, self.view.load(addr, span.len as usize))
            })
            .collect();
        if send.data_crc {
            parts.iter().for_each(|(_, bytes)| append_data_crc(&mut prefix, bytes));
        }
        let lane = self.endpoints.iter().position(|endpoint| *endpoint == send.endpoint).unwrap_or(1) - 1;
        // The header of a single block says all that the receiver needs to know.
        let single = matches!(send.spans, [span] if head_from.is_some_and(|from| span.len >= from));
        let headed = single && !send.data_crc;
        let op = if headed { ExtraOp::SendHead } else { ExtraOp::Send };
        match send.source {
            Source::Bare => {
                let at = self.view.memory.nop(lane, send.seq);
                self.bytes(send.endpoint, send.seq, ExtraOp::Send, (0, 0), at, &prefix, &[])
            }
            Source::Slot(slot) => {
                let head = prefix.len();
                let whole: Vec<u8> =
                    prefix.into_iter().chain(parts.into_iter().flat_map(|(_, bytes)| bytes)).collect();
                let at = self.view.slabs.place(slot, 0, whole.len());
                if headed {
                    let (addr, local_key) = self.view.slabs.place(slot, head, whole.len() - head);
                    self.view.world.store(self.view.node, addr, &whole[head..]);
                    let rest = Sge { addr, local_key, len_bytes: (whole.len() - head) as u32 };
                    return self.bytes(send.endpoint, send.seq, op, (0, 0), at, &whole[..head], &[rest]);
                }
                self.bytes(send.endpoint, send.seq, ExtraOp::Send, (0, 0), at, &whole, &[])
            }
            Source::Gather(n) => {
                let gather: Option<Vec<Sge>> = parts
                    .iter()
                    .map(|(addr, bytes)| {
                        let local_key = self.view.cells.local_key(*addr, bytes.len())?;
                        Some(Sge { addr: *addr, local_key, len_bytes: bytes.len() as u32 })
                    })
                    .collect();
                let gather = gather.ok_or("a span without a key is gathered")?;
                let at = self.view.memory.prefix(n, prefix.len());
                self.bytes(send.endpoint, send.seq, op, (0, 0), at, &prefix, &gather)
            }
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn bytes(
        &self,
        endpoint: EndpointId,
        first_seq: u64,
        op: ExtraOp,
        remote: (u64, u64),
        at: (u64, u64),
        bytes: &[u8],
        gather: &[Sge],
    ) -> Check {
        self.view.world.store(self.view.node, at.0, bytes);
        let staged = bytes.len() > self.fabric.caps().inline_bytes as usize || !gather.is_empty();
        let extra = Extra {
            op,
            bytes,
            staged: staged.then_some(at),
            gather,
            remote_addr: remote.0,
            remote_key: remote.1,
            fenced: false,
        };
        let batch =
            Batch { work: &[], imm: None, extra: Some(extra), first_seq, signaled: true, patient: false };
        self.fabric.post(endpoint, &batch).map(drop).map_err(|e| format!("post on {endpoint:?}: {e}"))
    }
}
