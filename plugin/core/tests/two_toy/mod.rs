//! Two channels joined by an in-memory fabric that executes one thing at a time, in an order that a seed decides.
//!
//! The fabric checks what real hardware would punish: queues that overflow, a SEND without a RECV or longer than its slot, and, because
//! bytes are read only when a SEND is executed, memory that is used again before its completion.
#![allow(dead_code, unused_imports)]

mod check;
mod engine;
mod epochs;
mod hostile;
mod mem;
#[path = "../seeded/mod.rs"]
mod seeded;
mod turns;
pub mod writes;

pub use engine::Engine;
use epochs::open;
pub use mem::*;
pub use seeded::*;

use std::collections::VecDeque;
use std::sync::Arc;

use baton_core::two_sided::channel::{Channel, Durable};
use baton_core::two_sided::chunks::Piece;
use baton_core::two_sided::codec::{
    CONTROL_SLOT_BYTES, DATA_HEADER_BYTES, DataHeader, DataKind, Direction, Status, append_data_crc,
};
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::pool::*;
use baton_core::two_sided::report::*;
use baton_core::two_sided::setup::*;
use baton_core::{Epoch, LaneId, Nanos, SessionId};
use baton_fabric::{Completion, CompletionKind, EndpointId, WcStatus};

#[derive(Clone, Debug)]
pub struct Config {
    /// How both sides' pools know the other one.
    pub peer: PeerKey,
    pub lanes: u8,
    pub sq: u32,
    pub rq: u32,
    pub control_sq: u32,
    pub control_rq: u32,
    pub first_recvs: u32,
    pub slot: u32,
    pub send_slots: u32,
    pub max_sge: u32,
    pub gather: bool,
    pub data_crc: bool,
    /// Plain data messages are received in two steps.
    pub heads: bool,
    pub data_bytes: usize,
    pub limits: TwoLimits,
    pub pool: PoolConfig,
}

impl Default for Config {
    fn default() -> Config {
        let slot = 1024;
        Config {
            peer: PeerKey(7),
            lanes: 2,
            sq: 16,
            rq: 16,
            control_sq: 16,
            control_rq: 8,
            first_recvs: 1,
            slot,
            send_slots: 4,
            max_sge: 4,
            gather: true,
            data_crc: false,
            heads: false,
            data_bytes: 1 << 20,
            limits: TwoLimits {
                request_depth: 16,
                notify_window: 8192,
                message_bytes: 4096,
                small_bytes: 4000,
                pack_bytes: 200,
                ..TwoLimits::default()
            },
            pool: PoolConfig { slot_bytes: slot, slab_slots: 4, max_slabs: 16, ..PoolConfig::default() },
        }
    }
}

#[derive(Debug)]
enum Wr {
    Credit {
        word: usize,
        bytes: Vec<u8>,
    },
    Frame(Vec<u8>),
    /// Read when executed.
    Gather {
        prefix: Vec<u8>,
        spans: Vec<Span>,
    },
    Slot {
        slot: SlotId,
        len: usize,
    },
    /// A hostile peer's own bytes.
    Raw(Vec<u8>),
}

#[derive(Clone, Copy, Debug)]
enum Recv {
    Control(u32),
    Data(SlotId),
}

/// One queue pair end.
#[derive(Default)]
pub struct End {
    queue: VecDeque<(u64, Wr)>,
    recvs: VecDeque<(u64, Recv)>,
    cq: VecDeque<Completion>,
    posted: u64,
    retired: u64,
    fenced: bool,
}

pub struct Node {
    pub channel: Channel,
    pub pool: Pool,
    pub mem: Mem,
    ends: Vec<End>,
    pub copies: Vec<PlaceJob>,
    pub pool_jobs: VecDeque<PoolAction>,
    pub done: Vec<(u64, Result<(), XferFailure>)>,
    pub notes: Vec<(u64, bool)>,
    pub delivered: Vec<Vec<u8>>,
    pub popped_by_itself: bool,
    pub ended: Option<TwoEnd>,
    pub placed: u64,
}

pub struct World {
    pub config: Config,
    pub epoch: u32,
    pub nodes: Vec<Node>,
    pub now: Nanos,
    pub rng: Rng,
    /// Ends (node, index) that do not execute.
    pub frozen: Vec<(usize, usize)>,
    /// Ends whose completions are not polled.
    pub unpolled: Vec<(usize, usize)>,
    /// Whatever a hostile peer sends on a lane is received in two steps, with so long a head.
    pub false_heads: Option<usize>,
    /// Nodes whose copies do not run.
    pub no_copies: Vec<usize>,
    /// The peer may be hostile: a SEND without a RECV is its own fault. What crossed last is kept, by end.
    pub hostile: bool,
    pub tap: Vec<(usize, Vec<u8>)>,
    pub steps: u64,
    /// Node 1's pool is not its own.
    shares_pool: bool,
    /// The next copy of that node fails so.
    pub fail_copy: Option<(usize, Status)>,
}

/// When worlds begin.
pub const START: Nanos = Nanos(1_000);
pub const SESSION: SessionId = SessionId(0x5E55);

pub fn endpoint(index: usize) -> EndpointId {
    EndpointId { slot: index as u32, generation: 3 }
}

fn serve_pool(pool: &mut Pool, mem: &Mem, now: Nanos) {
    while let Some(action) = pool.next_action(now) {
        match action {
            PoolAction::Allocate(slab) => {
                mem.add_slab(slab);
                pool.on_allocated(now, slab, true);
            }
            PoolAction::Release(slab) => {
                mem.drop_slab(slab);
                pool.on_released(slab);
            }
        }
    }
}

impl Node {
    fn feed_hungry(&mut self) {
        while self.pool.next_hungry().is_some() {
            self.channel.on_pool_changed();
        }
    }
}

impl World {
    pub fn new(config: Config, seed: u64) -> World {
        let pool = Pool::new(config.pool, START);
        World { shares_pool: false, ..World::with_pool(config, seed, pool, Slabs::default()) }
    }

    /// Node 1 uses a pool that others use too.
    pub fn with_pool(config: Config, seed: u64, mut pool: Pool, slabs: Slabs) -> World {
        let mut own = Pool::new(config.pool, START);
        own.join(config.peer);
        pool.join(config.peer);
        let part = |pool, slabs| (Durable::new(config.limits), pool, Mem::new(&config, slabs));
        let parts = vec![part(own, Slabs::default()), part(pool, slabs)];
        let nodes = open(&config, 1, parts, START).into_iter().map(Node::new).collect();
        World {
            epoch: 1,
            nodes,
            now: START,
            rng: Rng::new(seed),
            frozen: Vec::new(),
            unpolled: Vec::new(),
            false_heads: None,
            no_copies: Vec::new(),
            hostile: false,
            tap: Vec::new(),
            steps: 0,
            shares_pool: true,
            fail_copy: None,
            config,
        }
    }

    /// A transfer of pieces (offset here, offset there, length) in the data region.
    pub fn submit(
        &mut self,
        n: usize,
        token: u64,
        direction: Direction,
        spans: &[(usize, usize, usize)],
        message: Option<&[u8]>,
    ) {
        let pieces = pieces(spans);
        self.nodes[n].channel.submit(self.now, token, direction, pieces, message).unwrap();
        self.pump(n);
    }

    pub fn notify(&mut self, n: usize, token: u64, message: &[u8], resolve: Resolve) {
        let deadline = self.now.plus_ms(30_000);
        self.nodes[n].channel.notify(token, message, resolve, deadline).unwrap();
        self.pump(n);
    }

    /// Carries out all actions and takes all events of a node, until there are none of either.
    pub fn pump(&mut self, n: usize) -> bool {
        let mut any = false;
        loop {
            let acted = self.act(n);
            self.pool_turn(n);
            let told = self.take_events(n);
            any |= acted || told;
            if !acted && !told {
                return any;
            }
        }
    }

    fn pool_turn(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        while let Some(action) = node.pool.next_action(self.now) {
            node.pool_jobs.push_back(action);
        }
        // Where others use it too, whoever owns it tells them.
        if !(self.shares_pool && n == 1) {
            node.feed_hungry();
        }
    }

    fn act(&mut self, n: usize) -> bool {
        let (now, config) = (self.now, &self.config);
        let node = &mut self.nodes[n];
        let mut any = false;
        while let Some(action) = node.channel.next_action(now, &node.mem, &mut node.pool) {
            any = true;
            match action {
                TwoAction::RecvData { endpoint, first, slots } => {
                    let end = &mut node.ends[endpoint.slot as usize];
                    for (nth, &slot) in (first..).zip(slots) {
                        assert!(matches!(node.pool.state(slot), SlotState::Posted(_)), "only lent slots");
                        node.mem.spoil(slot);
                        end.recvs.push_back((nth, Recv::Data(slot)));
                    }
                    assert!(end.recvs.len() <= config.rq as usize, "receive queue overflow");
                }
                TwoAction::RecvControl { endpoint, first, count } => {
                    let end = &mut node.ends[endpoint.slot as usize];
                    for nth in first..first + u64::from(count) {
                        let slot = (nth % u64::from(config.control_rq)) as u32;
                        node.mem.spoil_control(slot);
                        end.recvs.push_back((u64::from(slot), Recv::Control(slot)));
                    }
                    assert!(end.recvs.len() <= config.control_rq as usize, "control receive queue overflow");
                }
                TwoAction::Credit { endpoint, seq, word, bytes } => {
                    let wr = Wr::Credit { word, bytes: bytes.to_vec() };
                    node.ends[endpoint.slot as usize].post(endpoint.slot, seq, wr, config.control_sq);
                }
                TwoAction::SendControl { endpoint, seq, bytes } => {
                    assert!(bytes.len() <= CONTROL_SLOT_BYTES);
                    node.ends[endpoint.slot as usize].post(
                        endpoint.slot,
                        seq,
                        Wr::Frame(bytes.to_vec()),
                        config.control_sq,
                    );
                }
                TwoAction::SendData(send) => {
                    let wr = data_wr(config, &node.mem, &send);
                    node.ends[send.endpoint.slot as usize].post(send.endpoint.slot, send.seq, wr, config.sq);
                }
                TwoAction::Place(job) => {
                    assert!(matches!(node.pool.state(job.slot), SlotState::Placing(..)));
                    node.copies.push(job);
                }
            }
        }
        any
    }

    pub fn take_events(&mut self, n: usize) -> bool {
        let node = &mut self.nodes[n];
        let mut any = false;
        while let Some(event) = node.channel.next_event() {
            any = true;
            match event {
                TwoEvent::XferDone { token, result } => node.done.push((token, result)),
                TwoEvent::NoteDone { token, sent } => node.notes.push((token, sent)),
                TwoEvent::Delivered { message } => {
                    if node.popped_by_itself {
                        node.channel.on_popped(1, message.len() as u64);
                    }
                    node.delivered.push(message);
                }
                TwoEvent::EndEpoch { reason } => {
                    assert!(node.ended.is_none(), "told twice");
                    node.ended = Some(reason);
                }
            }
        }
        any
    }

    /// Executes the oldest work request of an end.
    pub fn execute(&mut self, n: usize, index: usize) {
        let (seq, wr) = self.nodes[n].ends[index].queue.pop_front().expect("something to execute");
        let status = if self.nodes[1 - n].ends[index].fenced {
            WcStatus::PeerGone
        } else {
            self.move_bytes(n, index, wr);
            WcStatus::Success
        };
        self.nodes[n].ends[index].cq.push_back(completion(index, CompletionKind::Send, status, seq, 0));
        if status != WcStatus::Success {
            self.fence(n, index);
        }
    }

    fn move_bytes(&mut self, n: usize, index: usize, wr: Wr) {
        let own = &self.nodes[n].mem;
        let bytes = match wr {
            Wr::Credit { word, bytes } => {
                self.nodes[1 - n].mem.set_credit(word, &bytes);
                return;
            }
            Wr::Frame(bytes) | Wr::Raw(bytes) => bytes,
            Wr::Gather { mut prefix, spans } => {
                spans.iter().for_each(|span| prefix.extend(own.read(span)));
                prefix
            }
            Wr::Slot { slot, len } => own.send_slot(slot, len),
        };
        if self.hostile {
            self.tap.push((index, bytes.clone()));
            if self.tap.len() > 64 {
                self.tap.remove(0);
            }
            if self.nodes[1 - n].ends[index].recvs.is_empty() {
                return self.fence(n, index);
            }
        }
        let head = match self.false_heads {
            Some(len) => Some(len).filter(|len| *len < bytes.len()),
            None => Some(DATA_HEADER_BYTES).filter(|_| self.config.heads && index > 0 && is_plain(&bytes)),
        };
        let peer = &mut self.nodes[1 - n];
        let (id, recv) = peer.ends[index].recvs.pop_front().expect("a SEND met no RECV: credit is broken");
        match recv {
            Recv::Control(slot) => peer.mem.fill_control(slot, &bytes),
            Recv::Data(slot) => peer.mem.fill_with(slot, &bytes, head),
        }
        let kind = match head {
            Some(len) => CompletionKind::RecvHead { head_bytes: len as u32 },
            None => CompletionKind::RecvSend,
        };
        let len = bytes.len() as u32;
        let id = u64::from(id as u32);
        peer.ends[index].cq.push_back(completion(index, kind, WcStatus::Success, id, len));
    }

    /// A hostile peer sends bytes of its own making: they take a RECV like any others.
    pub fn inject(&mut self, from: usize, index: usize, bytes: &[u8]) {
        self.move_bytes(from, index, Wr::Raw(bytes.to_vec()));
    }

    /// A copy of that node ends.
    pub fn copy(&mut self, n: usize, which: usize) {
        let fail = self.fail_copy.take_if(|(node, _)| *node == n).map(|(_, status)| status);
        let node = &mut self.nodes[n];
        let job = node.copies.swap_remove(which);
        if let Some(rest) = job.rest {
            // What arrived before the end of an epoch may be there or not.
            let gone = node.channel.end_reason().is_some() && self.rng.below(2) == 0;
            if gone || !rest.wanted || !node.channel.wants(&job.ticket) {
                node.mem.take_rest(&job);
                node.channel.on_lost(job.ticket, &mut node.pool);
                self.pump(n);
                return;
            }
        }
        let outcome = match fail {
            Some(status) => {
                // A rest is taken all the same.
                drop(job.rest.map(|_| node.mem.take_rest(&job)));
                Err(status)
            }
            None => {
                node.mem.place(&job);
                node.placed += u64::from(job.len);
                Ok(())
            }
        };
        node.channel.on_placed(self.now, job.ticket, job.len, outcome, &mut node.pool);
        self.pump(n);
    }

    fn pool_job(&mut self, n: usize) {
        let node = &mut self.nodes[n];
        match node.pool_jobs.pop_front().expect("a job") {
            PoolAction::Allocate(slab) => {
                node.mem.add_slab(slab);
                node.pool.on_allocated(self.now, slab, true);
                if !(self.shares_pool && n == 1) {
                    node.feed_hungry();
                }
            }
            PoolAction::Release(slab) => {
                node.mem.drop_slab(slab);
                node.pool.on_released(slab);
            }
        }
        node.pool.audit();
        self.pump(n);
    }

    pub fn poll(&mut self, n: usize, index: usize) {
        let node = &mut self.nodes[n];
        let done = node.ends[index].cq.pop_front().expect("something to poll");
        if done.kind == CompletionKind::Send && done.status == WcStatus::Success {
            node.ends[index].retired = done.seq + 1;
        }
        node.channel.on_completion(self.now, &done, &node.mem, &mut node.pool);
        self.pump(n);
    }

    /// One random step; `false`: there is nothing to do.
    pub fn step(&mut self) -> bool {
        let mut choices: Vec<(usize, usize, u8)> = Vec::new();
        for n in [0, 1] {
            for (index, end) in self.nodes[n].ends.iter().enumerate() {
                if !end.queue.is_empty() && !self.frozen.contains(&(n, index)) {
                    choices.push((n, index, 0));
                }
                if !end.cq.is_empty() && !self.unpolled.contains(&(n, index)) {
                    choices.push((n, index, 1));
                }
            }
            if !self.nodes[n].copies.is_empty() && !self.no_copies.contains(&n) {
                choices.push((n, 0, 2));
            }
            if !self.nodes[n].pool_jobs.is_empty() {
                choices.push((n, 0, 3));
            }
        }
        if choices.is_empty() {
            return false;
        }
        self.now = Nanos(self.now.0 + 1_000);
        self.steps += 1;
        if self.steps.is_multiple_of(32) {
            self.check_credit();
        }
        match self.rng.pick(&choices) {
            (n, index, 0) => self.execute(n, index),
            (n, index, 1) => self.poll(n, index),
            (n, _, 2) => {
                let which = self.rng.below(self.nodes[n].copies.len() as u64) as usize;
                self.copy(n, which);
            }
            (n, ..) => self.pool_job(n),
        }
        true
    }

    /// Flushes an end: what was not executed comes out as flushed.
    pub fn fence(&mut self, n: usize, index: usize) {
        let end = &mut self.nodes[n].ends[index];
        end.fenced = true;
        for (seq, _) in std::mem::take(&mut end.queue) {
            end.cq.push_back(completion(index, CompletionKind::Send, WcStatus::Flushed, seq, 0));
        }
        for (id, _) in std::mem::take(&mut end.recvs) {
            end.cq.push_back(completion(index, CompletionKind::RecvFlushed, WcStatus::Flushed, id, 0));
        }
    }

    /// Fences every end, polls everything, ends all copies.
    pub fn drain(&mut self) {
        for n in [0, 1] {
            (0..self.nodes[n].ends.len()).for_each(|index| self.fence(n, index));
        }
        self.unpolled.clear();
        self.frozen.clear();
        self.no_copies.clear();
        for n in [0, 1] {
            for index in 0..self.nodes[n].ends.len() {
                while !self.nodes[n].ends[index].cq.is_empty() {
                    self.poll(n, index);
                }
            }
            self.nodes[n].channel.shut("drained");
            self.pump(n);
            while !self.nodes[n].copies.is_empty() {
                self.copy(n, 0);
            }
            self.take_events(n);
        }
    }
}

impl Node {
    fn new((channel, pool, mem, ends): (Channel, Pool, Mem, Vec<End>)) -> Node {
        Node {
            channel,
            pool,
            mem,
            ends,
            copies: Vec::new(),
            pool_jobs: VecDeque::new(),
            done: Vec::new(),
            notes: Vec::new(),
            delivered: Vec::new(),
            popped_by_itself: true,
            ended: None,
            placed: 0,
        }
    }

    /// RECVs posted on an end.
    pub fn recvs(&self, index: usize) -> usize {
        self.ends[index].recvs.len()
    }
}

/// Whether its header is enough to know where it goes.
fn is_plain(bytes: &[u8]) -> bool {
    let Some(head) = bytes.first_chunk() else { return false };
    let header = DataHeader::decode(head, bytes.len() as u32, u32::MAX);
    header.is_ok_and(|h| matches!(h.kind, DataKind::Write | DataKind::ReadResp) && !h.data_crc)
}

impl End {
    fn post(&mut self, index: u32, seq: u64, wr: Wr, depth: u32) {
        assert_eq!(seq, self.posted, "sequences are dense");
        self.posted += 1;
        assert!(self.posted - self.retired <= u64::from(depth), "send queue overflow");
        if self.fenced {
            // Its poster has not heard yet.
            return self.cq.push_back(completion(
                index as usize,
                CompletionKind::Send,
                WcStatus::Flushed,
                seq,
                0,
            ));
        }
        self.queue.push_back((seq, wr));
    }
}

fn data_wr(config: &Config, mem: &Mem, send: &DataSend<'_>) -> Wr {
    let mut prefix = send.prefix.to_vec();
    if send.data_crc {
        for span in send.spans {
            append_data_crc(&mut prefix, &mem.read(span));
        }
    }
    let Source::Slot(slot) = send.source else {
        assert!(send.spans.len() < config.max_sge as usize, "gather list too long");
        assert!(send.spans.is_empty() || config.gather, "this memory is not registered");
        return Wr::Gather { prefix, spans: send.spans.to_vec() };
    };
    send.spans.iter().for_each(|span| prefix.extend(mem.read(span)));
    assert!(prefix.len() <= config.slot as usize);
    mem.fill(slot, &prefix);
    Wr::Slot { slot, len: prefix.len() }
}

pub fn pieces(spans: &[(usize, usize, usize)]) -> Arc<[Piece]> {
    let piece = |&(local, remote, len): &(usize, usize, usize)| Piece {
        local: LOCAL_BASE + local as u64,
        region: REGION,
        offset: remote as u64,
        len: len as u64,
    };
    spans.iter().filter(|span| span.2 > 0).map(piece).collect()
}

fn completion(index: usize, kind: CompletionKind, status: WcStatus, seq: u64, len_bytes: u32) -> Completion {
    Completion { endpoint: endpoint(index), kind, status, seq, len_bytes }
}
