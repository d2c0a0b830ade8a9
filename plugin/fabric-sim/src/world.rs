//! The world: nodes, clock, events, and the faults that a test may cause.

use crate::config::SimConfig;
use crate::endpoint::{Endpoint, Flow, Qp, State};
use crate::fabric::SimFabric;
use crate::memory::NodeMemory;
use crate::rng::Rng;
use baton_fabric::{Completion, EndpointId};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Something that will happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// The next work request of an endpoint starts.
    Launch(Qp),
    /// The first request of a flow gets on at its target.
    Deliver(usize),
    /// The target of a READ reads a piece of its memory.
    Sample(usize),
    /// The first answer of a flow gets on at its initiator.
    Return(usize),
    /// More of the rests of a flow gets to its target.
    Arrive(usize),
    /// A fenced endpoint becomes quiet.
    Flush(Qp),
    /// An initiator has waited long enough.
    GiveUp(usize),
}

#[derive(Default)]
pub(crate) struct Slot {
    pub generation: u32,
    pub endpoint: Option<Endpoint>,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub work_requests: u64,
    pub completions: u64,
    pub bytes_placed: u64,
    pub refused: u64,
    pub rests_placed: u64,
    pub rests_dropped: u64,
}

pub(crate) struct Node {
    pub alive: bool,
    pub memory: NodeMemory,
    pub slots: Vec<Slot>,
    pub cq: VecDeque<Completion>,
    pub stalled_until: u64,
    pub counters: Counters,
}

pub(crate) struct Inner {
    pub cfg: SimConfig,
    pub rng: Rng,
    pub seed: u64,
    pub now: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
    pub nodes: Vec<Node>,
    pub flows: Vec<Flow>,
    pub links_down: BTreeMap<(usize, usize), u64>,
    digest: u64,
}

impl Inner {
    pub fn schedule(&mut self, delay_ns: u64, event: Event) {
        self.scheduled += 1;
        self.events.push(Reverse((self.now + delay_ns, self.scheduled, event)));
    }

    pub fn draw(&mut self, range: RangeInclusive<u64>) -> u64 {
        self.rng.between(*range.start(), *range.end())
    }

    pub fn endpoint(&mut self, (node, id): Qp) -> Option<&mut Endpoint> {
        let slot = self.nodes[node].slots.get_mut(id.slot as usize)?;
        if slot.generation == id.generation { slot.endpoint.as_mut() } else { None }
    }

    pub fn link_down_until(&self, a: usize, b: usize) -> Option<u64> {
        self.links_down.get(&(a.min(b), a.max(b))).copied().filter(|until| *until > self.now)
    }

    /// Notes something in the digest of the run.
    pub fn note(&mut self, word: u64) {
        self.digest = (self.digest ^ word).wrapping_mul(0x0000_0100_0000_01B3).rotate_left(23);
    }

    fn next_at(&self) -> Option<u64> {
        self.events.peek().map(|Reverse((at, ..))| *at)
    }

    fn step(&mut self) -> bool {
        let Some(Reverse((at, _, event))) = self.events.pop() else { return false };
        self.now = self.now.max(at);
        let (what, which) = match event {
            Event::Launch((node, id)) => (1, node as u64 ^ (u64::from(id.slot) << 32)),
            Event::Deliver(flow) => (2, flow as u64),
            Event::Sample(flow) => (3, flow as u64),
            Event::Return(flow) => (4, flow as u64),
            Event::Flush((node, id)) => (5, node as u64 ^ (u64::from(id.slot) << 32)),
            Event::GiveUp(flow) => (6, flow as u64),
            Event::Arrive(flow) => (7, flow as u64),
        };
        self.note(self.now ^ (what << 56) ^ which.rotate_left(40));
        self.handle(event);
        true
    }
}

/// A simulated world; clones are handles to the same one.
#[derive(Clone)]
pub struct SimWorld(Arc<Mutex<Inner>>);

impl SimWorld {
    /// A world with `config.nodes` nodes, in which everything follows from the seed.
    pub fn new(seed: u64, config: SimConfig) -> SimWorld {
        let node = |index| Node {
            alive: true,
            memory: NodeMemory::new(index),
            slots: Vec::new(),
            cq: VecDeque::new(),
            stalled_until: 0,
            counters: Counters::default(),
        };
        SimWorld(Arc::new(Mutex::new(Inner {
            nodes: (0..config.nodes).map(node).collect(),
            cfg: config,
            rng: Rng::new(seed),
            seed,
            now: 0,
            events: BinaryHeap::new(),
            scheduled: 0,
            flows: Vec::new(),
            links_down: BTreeMap::new(),
            digest: 0,
        })))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The fabric of a node.
    pub fn fabric(&self, node: usize) -> Arc<SimFabric> {
        assert!(node < self.lock().nodes.len(), "node {node} of {}", self.lock().nodes.len());
        Arc::new(SimFabric::new(self.clone(), node))
    }

    /// An independent generator for the workload, derived from the world's.
    pub fn fork_rng(&self) -> Rng {
        self.lock().rng.fork()
    }

    // ---- time

    /// Virtual time in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.lock().now
    }

    /// When the next event is due; `None` when nothing is on its way.
    pub fn next_event_ns(&self) -> Option<u64> {
        self.lock().next_at()
    }

    /// Lets the next event happen. `false`: there is none.
    pub fn step(&self) -> bool {
        self.lock().step()
    }

    /// Lets everything happen that is due by then, and moves the clock there.
    pub fn advance_to_ns(&self, at: u64) {
        let mut inner = self.lock();
        while inner.next_at().is_some_and(|next| next <= at) {
            inner.step();
        }
        inner.now = inner.now.max(at);
    }

    /// A number that two runs share only if the same things happened at the same times.
    pub fn digest(&self) -> u64 {
        self.lock().digest
    }

    // ---- memory

    /// New zeroed memory of a node, at an odd address when chance wills it.
    pub fn alloc(&self, node: usize, len_bytes: usize) -> u64 {
        let mut inner = self.lock();
        let misalign = inner.rng.below(64);
        inner.nodes[node].memory.alloc(len_bytes, misalign)
    }

    /// The same at an address that is a multiple of 64.
    pub fn alloc_aligned(&self, node: usize, len_bytes: usize) -> u64 {
        self.lock().nodes[node].memory.alloc(len_bytes, 0)
    }

    /// Gives memory back; whoever touches it now has a bug, and panics.
    pub fn free(&self, node: usize, addr: u64) {
        self.lock().nodes[node].memory.free(addr);
    }

    /// Writes a node's memory as its owner.
    pub fn store(&self, node: usize, addr: u64, bytes: &[u8]) {
        let mut inner = self.lock();
        let target = inner.nodes[node].memory.bytes_mut(addr, bytes.len());
        target.unwrap_or_else(|| panic!("node {node} has no memory at {addr:#x}")).copy_from_slice(bytes);
    }

    /// Reads a node's memory as its owner.
    pub fn load(&self, node: usize, addr: u64, bytes: &mut [u8]) {
        let inner = self.lock();
        let source = inner.nodes[node].memory.bytes(addr, bytes.len());
        bytes.copy_from_slice(source.unwrap_or_else(|| panic!("node {node} has no memory at {addr:#x}")));
    }

    // ---- faults

    /// The node's NIC is gone at once and for good: it answers nothing, its completions are lost.
    pub fn kill_node(&self, node: usize) {
        self.lock().kill_node(node);
    }

    /// An endpoint breaks by itself: its outstanding work is flushed. Its peer is not told.
    pub fn kill_endpoint(&self, node: usize, endpoint: EndpointId) {
        self.lock().fence((node, endpoint));
    }

    /// Nothing passes between two nodes for so long. Longer than the retry time-out is fatal to what is on its way.
    pub fn partition(&self, a: usize, b: usize, duration_ns: u64) {
        let mut inner = self.lock();
        let until = inner.now + duration_ns;
        inner.links_down.insert((a.min(b), a.max(b)), until);
    }

    /// A node's NIC handles nothing inbound for so long.
    pub fn stall(&self, node: usize, duration_ns: u64) {
        let mut inner = self.lock();
        inner.nodes[node].stalled_until = inner.now + duration_ns;
    }

    /// Whether an endpoint works.
    pub fn is_connected(&self, node: usize, endpoint: EndpointId) -> bool {
        self.lock().endpoint((node, endpoint)).is_some_and(|ep| ep.state == State::Connected)
    }
}
