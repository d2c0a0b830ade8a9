//! Two sessions joined by an in-memory fabric that executes one work request at a time, in an order that a seed decides.
//!
//! The fabric checks what real hardware would punish: a send queue that overflows, an immediate without a RECV, keys and bounds.
#![allow(dead_code)]

mod hostile;
mod mem;
pub mod nics;
#[path = "../seeded/mod.rs"]
mod seeded;

pub use mem::*;
pub use seeded::*;

use std::collections::VecDeque;
use std::sync::Arc;

use baton_core::notify::{Carry, ID_BYTES, NotifyMode, Tell};
use baton_core::peer::*;
use baton_core::plan::{Pair as Span, Plan, PlanLimits};
use baton_core::prepared::{KeyTable, LaneRails, LaneSplit, Prepared};
use baton_core::{Epoch, Instance, Nanos, SessionId};
use baton_fabric::*;

#[derive(Clone, Debug)]
pub struct Config {
    pub lanes: u8,
    pub sq: u32,
    pub rq: u32,
    pub ring: u32,
    pub inline: u32,
    pub notify: NotifyMode,
    pub data_bytes: usize,
    pub epoch: u32,
    pub limits: SessionLimits,
    pub max_chunk: u32,
    pub stripe_min: u64,
    pub reads_behind_fence: bool,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            lanes: 2,
            sq: 64,
            rq: 16,
            ring: 4096,
            inline: 128,
            notify: NotifyMode::Immediate,
            data_bytes: 1 << 20,
            epoch: 1,
            limits: SessionLimits::default(),
            max_chunk: 256,
            stripe_min: 512,
            reads_behind_fence: true,
        }
    }
}

#[derive(Clone, Debug)]
enum Source {
    Memory { key: u64, addr: u64 },
    Inline(Vec<u8>),
}

#[derive(Clone, Debug)]
struct Wr {
    seq: u64,
    read: bool,
    source: Source,
    remote: (u64, u64),
    len: u32,
    imm: Option<u32>,
    /// Into the next RECV slot instead of memory.
    send: bool,
    signaled: bool,
    fenced: bool,
}

/// One queue pair end.
#[derive(Default)]
struct End {
    queue: VecDeque<Wr>,
    recvs: u32,
    /// Number of the RECV that is used next.
    next_recv: u64,
    cq: VecDeque<Completion>,
    posted: u64,
    /// Freed by polled completions.
    retired: u64,
    fenced: bool,
}

pub struct Node {
    pub session: Session,
    pub mem: Mem,
    ends: Vec<End>,
    pub popped_by_itself: bool,
    pub done: Vec<(u64, Result<(), XferFailure>)>,
    pub delivered: Vec<Vec<u8>>,
    /// Ids of transfers that landed.
    pub landed: Vec<u64>,
    pub expired: Vec<u64>,
    pub ended: Option<EndReason>,
    /// Batches refused from now on: how many work requests are still taken.
    pub refuse_after: Option<usize>,
    pub batches: Vec<(EndpointId, usize, bool)>,
}

pub struct World {
    pub config: Config,
    pub nodes: [Node; 2],
    pub now: Nanos,
    pub rng: Rng,
    /// Ends (node, index) that do not execute.
    pub frozen: Vec<(usize, usize)>,
    /// Ends whose completions are not polled.
    pub unpolled: Vec<(usize, usize)>,
    /// Somebody tells of credit that is not there: an immediate or a SEND without a RECV is then no fault of the sender's.
    pub hostile: bool,
}

fn endpoint(index: usize) -> EndpointId {
    EndpointId { slot: index as u32, generation: 7 }
}

fn setup(config: &Config, node: usize, carry: Carry) -> SessionSetup {
    let lane = |n: u64| LaneSetup {
        endpoint: endpoint(n as usize),
        sq_depth: config.sq,
        rq_depth: config.rq,
        peer_ring_addr: RING_BASE + (n << 20),
        peer_ring_key: RING_KEY + n,
        ring_bytes: config.ring,
    };
    SessionSetup {
        own: Instance([node as u8; 16]),
        peer: Instance([1 - node as u8; 16]),
        session: SessionId(99),
        epoch: Epoch(config.epoch),
        control: lane(0),
        lanes: (1..=u64::from(config.lanes)).map(lane).collect(),
        peer_credit_addr: PAGE_BASE,
        peer_credit_key: PAGE_KEY,
        caps: Caps {
            max_sq_depth: 1024,
            max_rq_depth: 1024,
            max_message_bytes: 4 << 20,
            longest_read_bytes: 4 << 20,
            inline_bytes: config.inline,
            max_send_sge: 1,
            default_lanes: config.lanes,
            lane_sq_depth: 1024,
            stripe_min_bytes: config.stripe_min,
            immediate: true,
            owner_revokes: true,
            needs_service: true,
            vram: false,
            reads_behind_fence: config.reads_behind_fence,
            headed_bytes: 0,
            pack_below_bytes: 0,
        },
        notify: config.notify,
        limits: config.limits,
        carry,
    }
}

impl Node {
    fn new(config: &Config, node: usize, carry: Carry, mem: Mem) -> Node {
        let ends = (0..=config.lanes).map(|_| End { recvs: config.rq, ..End::default() }).collect();
        Node {
            session: Session::new(setup(config, node, carry), Nanos(0)),
            mem,
            ends,
            popped_by_itself: true,
            done: Vec::new(),
            delivered: Vec::new(),
            landed: Vec::new(),
            expired: Vec::new(),
            ended: None,
            refuse_after: None,
            batches: Vec::new(),
        }
    }

    /// RECVs posted on an end.
    pub fn recvs(&self, index: usize) -> u32 {
        self.ends[index].recvs
    }
}

fn wrs_of(batch: &Batch<'_>) -> Vec<Wr> {
    let mut wrs = Vec::new();
    for (n, template) in batch.work.iter().enumerate() {
        assert!(template.len_bytes > 0, "zero-length data work request");
        wrs.push(Wr {
            seq: batch.first_seq + n as u64,
            read: template.op == Op::Read,
            source: Source::Memory { key: template.local_key, addr: template.local_addr },
            remote: (template.remote_key, template.remote_addr),
            len: template.len_bytes,
            imm: None,
            send: false,
            signaled: false,
            fenced: false,
        });
    }
    if let Some(imm) = batch.imm {
        let last = wrs.last_mut().expect("an immediate needs work");
        assert!(!last.read, "a READ cannot carry an immediate");
        assert!(batch.extra.is_none(), "not both in this protocol");
        last.imm = Some(imm);
    }
    if let Some(extra) = batch.extra {
        let source = match extra.staged {
            Some((addr, key)) => Source::Memory { key, addr },
            None => Source::Inline(extra.bytes.to_vec()),
        };
        wrs.push(Wr {
            seq: batch.first_seq + batch.work.len() as u64,
            read: false,
            source,
            remote: (extra.remote_key, extra.remote_addr),
            len: extra.bytes.len() as u32,
            imm: match extra.op {
                ExtraOp::WriteImm(imm) => Some(imm),
                ExtraOp::Write | ExtraOp::Send | ExtraOp::SendHead => None,
            },
            send: matches!(extra.op, ExtraOp::Send | ExtraOp::SendHead),
            signaled: false,
            fenced: extra.fenced,
        });
    }
    wrs.last_mut().expect("an empty batch").signaled = batch.signaled;
    wrs
}

impl World {
    pub fn new(config: Config, seed: u64) -> World {
        let nodes = [0, 1].map(|node| Node::new(&config, node, Carry::default(), Mem::new(&config)));
        World {
            config,
            nodes,
            now: Nanos(1_000),
            rng: Rng::new(seed),
            frozen: Vec::new(),
            unpolled: Vec::new(),
            hostile: false,
        }
    }

    pub fn setup(&self, n: usize) -> SessionSetup {
        setup(&self.config, n, Carry::default())
    }

    /// Closes both sessions and opens the next epoch with fresh rings and pages; data memory stays.
    pub fn next_epoch(&mut self) -> [Closed; 2] {
        self.config.epoch += 1;
        let config = self.config.clone();
        let closed = [0, 1].map(|n| self.nodes[n].session.close(EndReason::Disconnected));
        for n in [0, 1] {
            let mem = Mem::new(&config);
            let data = self.nodes[n].mem.data(0, config.data_bytes);
            mem.set_data(0, &data);
            let old =
                std::mem::replace(&mut self.nodes[n], Node::new(&config, n, closed[n].carry.clone(), mem));
            let node = &mut self.nodes[n];
            (node.done, node.delivered, node.expired) = (old.done, old.delivered, old.expired);
            node.landed = old.landed;
        }
        self.frozen.clear();
        self.unpolled.clear();
        closed
    }

    pub fn prepare(&mut self, op: Op, spans: &[(usize, usize, usize)]) -> Arc<Prepared> {
        let pairs = spans
            .iter()
            .map(|&(local, remote, len)| Span {
                local_addr: DATA_BASE + local as u64,
                remote_addr: DATA_BASE + remote as u64,
                len_bytes: len as u64,
                local: 0,
                remote: 0,
            })
            .collect();
        let limits = PlanLimits { max_chunk_bytes: self.config.max_chunk, ..PlanLimits::default() };
        let plan = Plan::build(op, pairs, limits).unwrap();
        let split = LaneSplit {
            lanes: &vec![LaneRails::default(); usize::from(self.config.lanes)],
            max_message_bytes: 4 << 20,
            stripe_min_bytes: self.config.stripe_min,
            first_lane: self.rng.next(),
            lane_map_generation: 1,
        };
        let keys = [KeyTable::whole(&DATA_KEY)];
        Arc::new(Prepared::new(&plan, &keys, &keys, &split).unwrap())
    }

    pub fn submit(&mut self, n: usize, token: u64, work: Arc<Prepared>, message: Option<&[u8]>) {
        self.nodes[n].session.submit(self.now, token, work, message).unwrap();
        self.pump(n);
    }

    pub fn submit_telling(&mut self, n: usize, token: u64, work: Arc<Prepared>, tell: Tell<'_>) {
        self.nodes[n].session.submit_telling(self.now, token, work, tell).unwrap();
        self.pump(n);
    }

    pub fn notify(&mut self, n: usize, message: &[u8]) {
        let deadline = self.now.plus_ms(30_000);
        self.nodes[n].session.notify(self.now, message, deadline).unwrap();
        self.pump(n);
    }

    /// Carries out all actions and takes all events of a node, until there are none of either.
    pub fn pump(&mut self, n: usize) {
        loop {
            self.act(n);
            if !self.take_events(n) {
                return;
            }
        }
    }

    fn act(&mut self, n: usize) {
        let now = self.now;
        let config = &self.config;
        let node = &mut self.nodes[n];
        loop {
            let failed = match node.session.next_action(now, &node.mem) {
                None => break,
                Some(Action::Recv { endpoint, first, count }) => {
                    let end = &mut node.ends[endpoint.slot as usize];
                    assert_eq!(first, end.next_recv + u64::from(end.recvs), "RECVs are numbered densely");
                    end.recvs += count;
                    assert!(end.recvs <= config.rq, "receive queue overflow");
                    node.mem.spoil_slots(endpoint.slot.into(), first, count);
                    None
                }
                Some(Action::Post { endpoint, batch }) => {
                    let end = &mut node.ends[endpoint.slot as usize];
                    if let Some(extra) = &batch.extra {
                        let inline = extra.bytes.len() <= config.inline as usize;
                        assert_eq!(inline, extra.staged.is_none(), "staged exactly when too long to inline");
                    }
                    assert_eq!(batch.first_seq, end.posted, "ledger sequences are dense");
                    node.batches.push((endpoint, batch.len(), batch.signaled));
                    let mut wrs = wrs_of(&batch);
                    let fence = end.queue.iter().any(|wr| wr.fenced);
                    let behind_fence = fence && wrs.iter().any(|wr| wr.read);
                    assert!(config.reads_behind_fence || !behind_fence, "a READ behind a fence in flight");
                    let taken = node.refuse_after.map_or(wrs.len(), |after| after.min(wrs.len()));
                    let refused = taken < wrs.len();
                    wrs.truncate(taken);
                    end.posted += wrs.len() as u64;
                    assert!(end.posted - end.retired <= u64::from(config.sq), "send queue overflow");
                    end.queue.extend(wrs);
                    refused.then_some((endpoint, taken))
                }
            };
            if let Some((endpoint, taken)) = failed {
                node.session.on_post_failed(endpoint, taken);
            }
        }
    }

    pub fn take_events(&mut self, n: usize) -> bool {
        let node = &mut self.nodes[n];
        let mut any = false;
        while let Some(event) = node.session.next_event() {
            any = true;
            match event {
                Event::XferDone { token, result } => node.done.push((token, result)),
                Event::Delivered { message } => {
                    if node.popped_by_itself {
                        node.session.on_popped(1, message.len() as u64);
                    }
                    node.delivered.push(message);
                }
                Event::Landed { id } => {
                    if node.popped_by_itself {
                        node.session.on_popped(1, ID_BYTES as u64);
                    }
                    node.landed.push(id);
                }
                Event::NotifyExpired { seq } => node.expired.push(seq.0),
                Event::EndEpoch { reason } => {
                    assert!(node.ended.is_none(), "told twice");
                    node.ended = Some(reason);
                }
            }
        }
        any
    }

    fn next_slot(&self, n: usize, index: usize) -> u32 {
        match self.config.notify {
            NotifyMode::Immediate => 0,
            NotifyMode::Send => (self.nodes[n].ends[index].next_recv % u64::from(self.config.rq)) as u32,
        }
    }

    /// Uses the oldest RECV of an end; its slot.
    fn take_recv(&mut self, n: usize, index: usize) -> u32 {
        let slot = self.next_slot(n, index);
        let end = &mut self.nodes[n].ends[index];
        assert!(end.recvs > 0, "an immediate or a SEND met no RECV: credit is broken");
        end.recvs -= 1;
        end.next_recv += 1;
        slot
    }

    /// Executes the oldest work request of an end.
    pub fn execute(&mut self, n: usize, index: usize) {
        let wr = self.nodes[n].ends[index].queue.pop_front().expect("something to execute");
        let peer = 1 - n;
        let fenced = |end: &World, n: usize| end.nodes[n].ends[index].fenced;
        let kind = if wr.send { Some(CompletionKind::RecvSend) } else { wr.imm.map(CompletionKind::RecvImm) };
        let no_recv = self.hostile && kind.is_some() && self.nodes[peer].recvs(index) == 0;
        let status = if fenced(self, n) {
            WcStatus::Flushed
        } else if fenced(self, peer) || no_recv {
            WcStatus::PeerGone
        } else {
            self.move_bytes(n, index, &wr)
        };
        if let (WcStatus::Success, Some(kind)) = (status, kind) {
            let seq = u64::from(self.take_recv(peer, index));
            let completion = Completion { endpoint: endpoint(index), kind, status, seq, len_bytes: wr.len };
            self.nodes[peer].ends[index].cq.push_back(completion);
        }
        let end = &mut self.nodes[n].ends[index];
        if wr.signaled || status != WcStatus::Success {
            end.cq.push_back(sent(index, wr.seq, status));
        }
        if status != WcStatus::Success {
            self.fence(n, index);
        }
    }

    fn move_bytes(&mut self, n: usize, index: usize, wr: &Wr) -> WcStatus {
        let (own, other) = (&self.nodes[n].mem, &self.nodes[1 - n].mem);
        let (key, addr) = wr.remote;
        if wr.read {
            let Source::Memory { key: local, addr: at } = wr.source else { panic!("READ into nowhere") };
            let Some(bytes) = other.read(key, addr, wr.len as usize) else { return WcStatus::RemoteAccess };
            return match own.write(local, at, &bytes) {
                Some(()) => WcStatus::Success,
                None => WcStatus::LocalAccess,
            };
        }
        let bytes = match &wr.source {
            Source::Inline(bytes) => bytes.clone(),
            Source::Memory { key, addr } => match own.read(*key, *addr, wr.len as usize) {
                Some(bytes) => bytes,
                None => return WcStatus::LocalAccess,
            },
        };
        if wr.send {
            let slot = self.next_slot(1 - n, index);
            assert!(bytes.len() <= slot_bytes(self.config.ring) as usize, "a SEND longer than its slot");
            other.fill_slot(index as u64, slot, &bytes);
            return WcStatus::Success;
        }
        match other.write(key, addr, &bytes) {
            Some(()) => WcStatus::Success,
            None => WcStatus::RemoteAccess,
        }
    }

    /// Flushes an end: what was not executed comes out as flushed.
    pub fn fence(&mut self, n: usize, index: usize) {
        let end = &mut self.nodes[n].ends[index];
        end.fenced = true;
        while let Some(wr) = end.queue.pop_front() {
            end.cq.push_back(sent(index, wr.seq, WcStatus::Flushed));
        }
        end.next_recv += u64::from(end.recvs);
        for _ in 0..std::mem::take(&mut end.recvs) {
            end.cq.push_back(Completion {
                kind: CompletionKind::RecvFlushed,
                ..sent(index, 0, WcStatus::Flushed)
            });
        }
    }

    /// Fences every end of both nodes, and polls everything.
    pub fn fence_and_drain(&mut self) {
        for n in [0, 1] {
            for index in 0..self.nodes[n].ends.len() {
                self.fence(n, index);
            }
        }
        self.unpolled.clear();
        for n in [0, 1] {
            for index in 0..self.nodes[n].ends.len() {
                while !self.nodes[n].ends[index].cq.is_empty() {
                    self.poll(n, index);
                }
            }
        }
    }

    /// Hands the oldest completion of an end to its session.
    pub fn poll(&mut self, n: usize, index: usize) {
        let node = &mut self.nodes[n];
        let completion = node.ends[index].cq.pop_front().expect("something to poll");
        if completion.kind == CompletionKind::Send && completion.status == WcStatus::Success {
            node.ends[index].retired = completion.seq + 1;
        }
        node.session.on_completion(self.now, &completion, &node.mem);
        self.pump(n);
    }

    fn choices(&self) -> Vec<(usize, usize, bool)> {
        let mut choices = Vec::new();
        for n in [0, 1] {
            for (index, end) in self.nodes[n].ends.iter().enumerate() {
                if !end.queue.is_empty() && !self.frozen.contains(&(n, index)) {
                    choices.push((n, index, true));
                }
                if !end.cq.is_empty() && !self.unpolled.contains(&(n, index)) {
                    choices.push((n, index, false));
                }
            }
        }
        choices
    }

    /// One random step; `false`: the fabric has nothing to do.
    pub fn step(&mut self) -> bool {
        let choices = self.choices();
        if choices.is_empty() {
            return false;
        }
        let (n, index, execute) = self.rng.pick(&choices);
        if execute {
            self.execute(n, index)
        } else {
            self.poll(n, index)
        }
        true
    }

    /// Runs until nothing moves any more, re-reading credit pages and announcing credit as a driver would before it sleeps.
    pub fn settle(&mut self) {
        for _ in 0..10_000_000u64 {
            if self.step() {
                continue;
            }
            let mut moved = false;
            for n in [0, 1] {
                if self.nodes[n].session.waits_for_credit() {
                    let node = &mut self.nodes[n];
                    moved |= node.session.poll_credit(self.now, &node.mem);
                    self.pump(n);
                }
            }
            if !moved && self.choices().is_empty() {
                return;
            }
        }
        panic!("the world does not come to rest: {:#?}", self.nodes[0].session.stats());
    }

    /// So many random steps.
    pub fn settle_for(&mut self, steps: u32) {
        for _ in 0..steps {
            self.step();
        }
    }

    pub fn flush(&mut self) {
        for n in [0, 1] {
            self.nodes[n].session.announce_all();
            self.pump(n);
        }
        self.settle();
    }

    /// At rest, after a flush: no credit is lost and nothing is in flight that matters.
    pub fn audit(&mut self) {
        self.flush();
        for n in [0, 1] {
            let node = &mut self.nodes[n];
            node.session.poll_credit(self.now, &node.mem);
            assert!(node.session.is_idle(), "node {n} is not idle: {:#?}", node.session.stats());
        }
        let [a, b] = [0, 1].map(|n| self.nodes[n].session.stats());
        for (sender, receiver) in [(&a, &b), (&b, &a)] {
            for (s, r) in sender.endpoints.iter().zip(&receiver.endpoints) {
                let (rq, ring) = (u64::from(self.config.rq), u64::from(self.config.ring));
                assert_eq!(s.recv_consumed, r.recv_received, "{}: consumed = received", s.name);
                assert_eq!(s.recv_known, r.recv_granted, "{}: known = granted", s.name);
                assert_eq!(s.recv_known - s.recv_consumed, rq, "{}: all RECVs are back", s.name);
                assert_eq!(s.ring_known, r.ring_freed, "{}: ring bytes known = freed", s.name);
                assert_eq!(s.ring_known - s.ring_consumed, ring, "{}: all ring bytes are back", s.name);
            }
        }
    }

    pub fn result_of(&self, n: usize, token: u64) -> Option<&Result<(), XferFailure>> {
        let mut found = self.nodes[n].done.iter().filter(|(t, _)| *t == token);
        let first = found.next();
        assert!(found.next().is_none(), "token {token} was reported twice");
        first.map(|(_, result)| result)
    }
}

fn sent(index: usize, seq: u64, status: WcStatus) -> Completion {
    Completion { endpoint: endpoint(index), kind: CompletionKind::Send, status, seq, len_bytes: 0 }
}
