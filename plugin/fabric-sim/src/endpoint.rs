//! Endpoints and the flows between them.

use baton_fabric::{Completion, CompletionKind, EndpointConfig, EndpointId, RecvSlot, Sge, WcStatus};
use std::collections::VecDeque;

/// An endpoint of a node.
pub(crate) type Qp = (usize, EndpointId);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Not yet connected.
    Created,
    /// Working.
    Connected,
    /// Fenced, not yet quiet: starts nothing more, but what is on its way goes on.
    Draining,
    /// Touches nothing any more.
    Error,
}

/// Where the bytes of a work request come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// Copied by `post`.
    Inline(Vec<u8>),
    /// Read from here, piece by piece, when it starts.
    Memory(Box<[Sge]>),
}

#[derive(Debug)]
pub(crate) enum WrKind {
    Write {
        source: Source,
        remote_addr: u64,
        remote_key: u64,
        imm: Option<u32>,
    },
    /// The first `head` bytes may be received by themselves; 0: none.
    Send {
        source: Source,
        head: usize,
    },
    Read {
        local_addr: u64,
        local_key: u64,
        len: usize,
        remote_addr: u64,
        remote_key: u64,
    },
}

#[derive(Debug)]
pub(crate) struct Wr {
    pub seq: u64,
    pub kind: WrKind,
    pub signaled: bool,
    pub fenced: bool,
    pub done: Option<WcStatus>,
    /// Digest of what was read from memory when it started; it must still lie there when the work request completes.
    pub sent: Option<u64>,
}

impl Wr {
    /// The memory that it reads until it completes.
    pub fn source(&self) -> Option<&[Sge]> {
        match &self.kind {
            WrKind::Write { source: Source::Memory(pieces), .. }
            | WrKind::Send { source: Source::Memory(pieces), .. } => Some(pieces),
            _ => None,
        }
    }

    pub fn is_read(&self) -> bool {
        matches!(self.kind, WrKind::Read { .. })
    }
}

pub(crate) struct Endpoint {
    pub config: EndpointConfig,
    pub rail: u8,
    pub state: State,
    pub peer: Option<Qp>,
    /// Flow towards the peer.
    pub flow: usize,
    /// Posted and not completed, in order; the first `launched` have started.
    pub sq: VecDeque<Wr>,
    pub launched: usize,
    pub launch_scheduled: bool,
    /// A local fault stands in the queue: nothing behind it starts.
    pub launch_blocked: bool,
    /// Sequence of the next work request.
    pub posted: Option<u64>,
    /// Send-queue slots in use until a completion that covers them is polled.
    pub unpolled_sends: VecDeque<u64>,
    pub rq: VecDeque<RecvSlot>,
    /// RECVs posted and not yet polled.
    pub unpolled_recvs: u32,
    /// Its owner wants to say where messages go of which it has the head.
    pub heads: bool,
}

impl Endpoint {
    pub fn new(config: EndpointConfig, rail: u8) -> Endpoint {
        Endpoint {
            config,
            rail,
            state: State::Created,
            peer: None,
            flow: usize::MAX,
            sq: VecDeque::new(),
            launched: 0,
            launch_scheduled: false,
            launch_blocked: false,
            posted: None,
            unpolled_sends: VecDeque::new(),
            rq: VecDeque::new(),
            unpolled_recvs: 0,
            heads: false,
        }
    }

    /// Frees what a completion frees, once the owner has seen it.
    pub fn on_polled(&mut self, completion: &Completion) {
        if completion.kind == CompletionKind::Send {
            while self.unpolled_sends.front().is_some_and(|seq| *seq <= completion.seq) {
                self.unpolled_sends.pop_front();
            }
        } else if completion.kind != CompletionKind::RecvMore {
            self.unpolled_recvs -= 1;
        }
    }
}

/// A request on its way to the target, or being placed there.
#[derive(Debug)]
pub(crate) enum Request {
    Write { addr: u64, key: u64, bytes: Vec<u8>, imm: Option<u32> },
    Send { bytes: Vec<u8>, head: usize },
    Read { addr: u64, key: u64, len: usize },
}

#[derive(Debug)]
pub(crate) struct InFlight {
    pub seq: u64,
    pub request: Request,
    /// Bytes placed so far.
    pub placed: usize,
    /// The target has its immediate.
    pub heard: bool,
    /// Virtual time of the first attempt to deliver it.
    pub since: Option<u64>,
    pub rnr: u32,
}

/// The rest of a message whose head was received.
#[derive(Debug)]
pub(crate) struct Head {
    pub seq: u64,
    pub rest: Vec<u8>,
    /// It stays at its sender until it is taken, and ends with the sender's endpoint.
    pub stays: bool,
    /// Bytes that can be taken.
    pub here: usize,
    /// Bytes that were.
    pub placed: usize,
    /// Its receiver was told that it is not all here, and hears when there is more.
    pub asked: bool,
}

/// An answer on its way back. They return in the order of the requests.
#[derive(Debug)]
pub(crate) enum Answer {
    /// Acknowledged, or refused.
    Status(WcStatus),
    /// A READ that the target has still to sample: where it is, what it has.
    Sampling { addr: u64, key: u64, len: usize, bytes: Vec<u8> },
    /// Sampled; `placed` bytes of it are in the initiator's memory.
    Data { bytes: Vec<u8>, placed: usize },
}

/// One direction of a connection.
pub(crate) struct Flow {
    pub from: Qp,
    pub to: Qp,
    /// Of `from` and of `to`.
    pub rails: [u8; 2],
    pub requests: VecDeque<InFlight>,
    /// Messages of which the target has the head; what is behind them waits.
    pub heads: VecDeque<Head>,
    pub answers: VecDeque<(u64, Answer)>,
    pub arrive_scheduled: bool,
    pub deliver_scheduled: bool,
    pub return_scheduled: bool,
    pub sample_scheduled: bool,
    /// Nothing gets through any more; the initiator finds out by waiting.
    pub dead: bool,
    pub give_up_scheduled: bool,
}

impl Flow {
    pub fn new(from: Qp, to: Qp, rails: [u8; 2]) -> Flow {
        Flow {
            from,
            to,
            rails,
            requests: VecDeque::new(),
            heads: VecDeque::new(),
            answers: VecDeque::new(),
            arrive_scheduled: false,
            deliver_scheduled: false,
            return_scheduled: false,
            sample_scheduled: false,
            dead: false,
            give_up_scheduled: false,
        }
    }
}
