//! One end of a connection.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use baton_fabric::{EndpointConfig, EndpointId};
use parking_lot::Mutex;

use super::heads::Heads;
use super::peer::Peer;
use super::pull::{Batch, MAX_PARTS, Stamp};
use super::recv::RecvQueue;
use super::ring::{Entry, Ring};
use super::send::SendQueue;
use crate::regions;

/// Entries of the ring of such an endpoint: a work request that gathers takes one for each piece, most of them two.
pub fn ring_depth(config: &EndpointConfig) -> u64 {
    let depth = u64::from(config.sq_depth) * u64::from(config.max_sge.clamp(1, 2));
    depth.max(config.max_sge.into()).next_power_of_two()
}

/// Where an endpoint is in its life; it only ever moves on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum State {
    Created = 0,
    Connected = 1,
    /// In error: fenced, or something failed.
    Ended = 2,
}

/// The peer's end.
pub struct Link {
    pub peer: Arc<Peer>,
    /// What the peer posts.
    pub ring: Ring,
    /// The peer endpoint's slot in its door.
    pub slot: u32,
    pub stamp: Stamp,
}

/// What only the thread that pulls uses.
pub struct Puller {
    pub batch: Batch,
    /// Entries of the batch, copied out of the peer's ring.
    pub entries: Vec<Entry>,
    /// Next entry of the peer's ring.
    pub head: u64,
    /// Bytes of that entry that are placed already.
    pub head_offset: u64,
    /// In the middle of a SEND of several entries: bytes of those before `head`.
    pub message: Option<u64>,
    /// Bulk bytes of all entries before `head` and of `head_offset`.
    pub bulk_done: u64,
    /// Bytes of the oldest READ that are here already.
    pub read_offset: u64,
    /// Messages from `head` on of which only the beginning was pulled.
    pub heads: Heads,
    /// Since when entry `head` waits for a RECV.
    pub stalled: Option<Instant>,
    /// Stamps of the peer's regions by index, for the bounds of READs.
    pub known: [regions::Stamp; 16],
}

/// See the module's text. Lock order: `pull` → `send` → `recv`; each is held for moments, only `pull` during a copy.
pub struct Endpoint {
    pub id: EndpointId,
    pub control: bool,
    pub max_sge: u32,
    /// What this side posts.
    pub ring: Ring,
    /// The peer fetches the ring through it.
    _ring_fd: OwnedFd,
    state: AtomicU32,
    pub send: Mutex<SendQueue>,
    pub recv: Mutex<RecvQueue>,
    pub pull: Mutex<Puller>,
    /// Somebody found `pull` taken: its holder must look again.
    pub again: AtomicBool,
    /// Entry `head` waits for a RECV. Written under `recv`.
    pub stalled: AtomicBool,
    /// Messages with a head are received in two steps.
    pub heads: AtomicBool,
    /// Rests wait for [`baton_fabric::Fabric::take`]. Written under `pull`.
    pub held: AtomicBool,
    /// Mirrors `Puller::head`.
    pub served: AtomicU64,
    pub link: OnceLock<Link>,
}

impl Endpoint {
    pub fn new(
        id: EndpointId,
        config: &EndpointConfig,
        ring_fd: OwnedFd,
        ring: Ring,
    ) -> std::io::Result<Endpoint> {
        let parts = MAX_PARTS.min(ring_depth(config) as usize);
        Ok(Endpoint {
            id,
            control: config.control,
            max_sge: config.max_sge,
            ring,
            _ring_fd: ring_fd,
            state: AtomicU32::new(State::Created as u32),
            send: Mutex::new(SendQueue::new(u64::from(config.sq_depth), config.max_sge)?),
            recv: Mutex::new(RecvQueue::new(config.rq_depth)),
            pull: Mutex::new(Puller {
                batch: Batch::new(parts),
                entries: Vec::with_capacity(parts),
                head: 0,
                head_offset: 0,
                message: None,
                bulk_done: 0,
                read_offset: 0,
                heads: Heads::default(),
                stalled: None,
                known: Default::default(),
            }),
            again: AtomicBool::new(false),
            stalled: AtomicBool::new(false),
            heads: AtomicBool::new(false),
            held: AtomicBool::new(false),
            served: AtomicU64::new(0),
            link: OnceLock::new(),
        })
    }

    pub fn state(&self) -> State {
        match self.state.load(Ordering::SeqCst) {
            0 => State::Created,
            1 => State::Connected,
            _ => State::Ended,
        }
    }

    pub fn is_connected(&self) -> bool {
        self.state() == State::Connected
    }

    /// Created → connected; `false` if it was fenced meanwhile.
    pub fn set_connected(&self) -> bool {
        let (from, to) = (State::Created as u32, State::Connected as u32);
        self.state.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Moves to the end; `true` for the one caller that did.
    pub fn set_ended(&self) -> bool {
        self.state.swap(State::Ended as u32, Ordering::SeqCst) != State::Ended as u32
    }

    /// The peer's end, of a connected endpoint.
    pub fn live_link(&self) -> Option<&Link> {
        if self.is_connected() { self.link.get() } else { None }
    }

    /// Whether the pulling side has something to do.
    pub fn has_work(&self) -> bool {
        let Some(link) = self.live_link() else { return false };
        let waiting = link.ring.tail() != self.served.load(Ordering::Acquire) && !link.ring.is_closed();
        let blocked = self.stalled.load(Ordering::SeqCst) || self.held.load(Ordering::SeqCst);
        (waiting && !blocked) || self.send.lock().has_reads()
    }

    /// Whether [`Endpoint::drain`](super::Fabric) would hand out something.
    pub fn is_ready(&self) -> bool {
        self.send.lock().is_ready() || self.recv.lock().is_ready(self.state() == State::Ended)
    }
}
