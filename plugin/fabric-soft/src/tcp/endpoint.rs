//! One endpoint: its queues, its connection, and how it ends.

use std::collections::VecDeque;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use baton_fabric::{Completion, CompletionKind, EndpointConfig, EndpointId, RecvSlot, WcStatus};
use parking_lot::Mutex;

use super::frame::{MAX_READS, Malformed, Status};
use super::receive::Receiver;
use super::send_queue::SendQueue;
use super::shared::Shared;
use super::sys;
use super::transmit::Transmitter;

/// How long the last word of either side, a refusal or an acknowledgement, is waited for, without a byte of it moving, before the
/// connection is cut.
const LINGER: Duration = Duration::from_secs(4);

/// State of an endpoint; it only moves downwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(super) enum State {
    /// Not connected.
    New = 0,
    /// Connected.
    Open = 1,
    /// The peer did something that is refused, or cannot go on: earlier READs are answered, then the refusal or how far the peer came
    /// goes out, then it ends.
    Closing = 2,
    /// Over.
    Failed = 3,
}

/// The connection, once there is one.
pub(super) struct Connection {
    pub fd: OwnedFd,
    /// Number that all its frames carry.
    pub epoch: u32,
}

/// What the passive side knows of its connection before `connect_endpoint`.
#[derive(Default)]
pub(super) struct Link {
    /// Accepted, with the token of the peer's endpoint.
    pub accepted: Option<(Connection, [u8; 16])>,
    /// A connection was taken; a second one is refused.
    pub taken: bool,
    /// Woken when a connection was accepted or the endpoint ended.
    pub waiter: Option<Arc<sys::WakeUp>>,
}

/// RECVs.
pub(super) struct RecvQueue {
    pub slots: VecDeque<RecvSlot>,
    pub dead: bool,
}

/// A piece that the peer asked for.
#[derive(Clone, Copy)]
pub(super) struct Ask {
    pub number: u64,
    pub key: u64,
    pub addr: u64,
    pub len: u32,
}

/// What is to be answered.
pub(super) struct Inbound {
    pub asks: VecDeque<Ask>,
    /// Bytes of answers so far.
    pub answered: u64,
    /// Comes after the answers.
    pub refusal: Option<(u64, Status)>,
}

pub(super) struct Endpoint {
    pub id: EndpointId,
    pub config: EndpointConfig,
    pub token: [u8; 16],
    state: AtomicU8,
    pub connection: OnceLock<Connection>,
    pub link: Mutex<Link>,
    pub sq: Mutex<SendQueue>,
    pub rq: Mutex<RecvQueue>,
    pub inbound: Mutex<Inbound>,
    pub tx: Mutex<Transmitter>,
    pub rx: Mutex<Receiver>,
    /// The peer's work requests below this number are placed here.
    pub placed: AtomicU64,
    /// An acknowledgement is due with the next frame.
    pub ack_due: AtomicBool,
    /// In the list of those whose acknowledgement waits until there is nothing else to do.
    pub owing: AtomicBool,
    /// There may be something to read.
    pub rx_ready: AtomicBool,
    /// The peer hung up: read to the end whatever a short read says.
    pub rx_hup: AtomicBool,
    /// Reading waits for a RECV.
    pub rx_stalled: AtomicBool,
    /// Messages with a head are received in two steps.
    pub heads: AtomicBool,
    /// Reading waits for [`baton_fabric::Fabric::take`].
    pub rx_held: AtomicBool,
    /// There may be something to send.
    pub tx_work: AtomicBool,
    /// Nothing comes any more, and nothing goes.
    rx_over: AtomicBool,
    tx_over: AtomicBool,
    /// The socket takes no more at the moment.
    pub tx_blocked: AtomicBool,
    /// In the list of ready endpoints.
    pub queued: AtomicBool,
    /// Given to an IO thread.
    pub handed: AtomicBool,
    cause: Mutex<Option<WcStatus>>,
    flushed: AtomicBool,
    pub destroyed: AtomicBool,
    pub stalled_since: Mutex<Option<Instant>>,
    closing_since: Mutex<Option<Instant>>,
}

impl Endpoint {
    pub fn new(id: EndpointId, config: EndpointConfig, token: [u8; 16]) -> Endpoint {
        Endpoint {
            id,
            config,
            token,
            state: AtomicU8::new(State::New as u8),
            connection: OnceLock::new(),
            link: Mutex::default(),
            sq: Mutex::new(SendQueue::new(id, config.sq_depth, config.max_sge)),
            rq: Mutex::new(RecvQueue {
                slots: VecDeque::with_capacity(config.rq_depth as usize),
                dead: false,
            }),
            inbound: Mutex::new(Inbound {
                asks: VecDeque::with_capacity(MAX_READS),
                answered: 0,
                refusal: None,
            }),
            tx: Mutex::new(Transmitter::default()),
            rx: Mutex::new(Receiver::default()),
            placed: AtomicU64::new(0),
            ack_due: AtomicBool::new(false),
            owing: AtomicBool::new(false),
            rx_ready: AtomicBool::new(false),
            rx_hup: AtomicBool::new(false),
            rx_stalled: AtomicBool::new(false),
            heads: AtomicBool::new(false),
            rx_held: AtomicBool::new(false),
            tx_work: AtomicBool::new(false),
            rx_over: AtomicBool::new(false),
            tx_over: AtomicBool::new(false),
            tx_blocked: AtomicBool::new(false),
            queued: AtomicBool::new(false),
            handed: AtomicBool::new(false),
            cause: Mutex::new(None),
            flushed: AtomicBool::new(false),
            destroyed: AtomicBool::new(false),
            stalled_since: Mutex::new(None),
            closing_since: Mutex::new(None),
        }
    }

    pub fn state(&self) -> State {
        match self.state.load(Ordering::SeqCst) {
            0 => State::New,
            1 => State::Open,
            2 => State::Closing,
            _ => State::Failed,
        }
    }

    /// Moves downwards; `false` when it is there or below already.
    fn lower(&self, to: State) -> bool {
        self.state.fetch_max(to as u8, Ordering::SeqCst) < to as u8
    }

    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.connection.get().map(|c| c.fd.as_fd())
    }

    pub fn epoch(&self) -> u32 {
        self.connection.get().map_or(0, |c| c.epoch)
    }

    /// From now on frames flow.
    pub fn open(&self) -> bool {
        self.lower(State::Open)
    }

    /// Reading makes sense now.
    pub fn rx_runnable(&self) -> bool {
        self.rx_ready.load(Ordering::SeqCst) && self.may_read()
    }

    /// It would if there was something.
    pub fn may_read(&self) -> bool {
        !self.rx_stalled.load(Ordering::SeqCst)
            && !self.rx_held.load(Ordering::SeqCst)
            && matches!(self.state(), State::Open | State::Closing)
    }

    /// Sending makes sense now.
    pub fn tx_runnable(&self) -> bool {
        self.tx_work.load(Ordering::SeqCst)
            && !self.tx_blocked.load(Ordering::SeqCst)
            && matches!(self.state(), State::Open | State::Closing)
    }

    /// The peer's work request `number` is refused: everything before it is answered, then the refusal goes out.
    pub fn refuse(&self, shared: &Shared, number: u64, status: Status) {
        self.close(shared, number, status, false);
    }

    /// Like [`Endpoint::refuse`] for a READ that was taken in already: it comes before any refusal that waits.
    pub fn refuse_instead(&self, shared: &Shared, number: u64, status: Status) {
        self.close(shared, number, status, true);
    }

    fn close(&self, shared: &Shared, number: u64, status: Status, instead: bool) {
        {
            let mut inbound = self.inbound.lock();
            if inbound.refusal.is_some() && !instead {
                return;
            }
            inbound.refusal = Some((number, status));
            self.lower(State::Closing);
        }
        shared.counters.refusals_sent.add(1);
        self.last_word_is_due(shared);
    }

    /// The peer stopped in the middle of a request, because it cannot read its own memory any more: everything before that is answered and
    /// acknowledged, then it ends.
    pub fn peer_cannot_go_on(&self, shared: &Shared) {
        {
            let mut cause = self.cause.lock();
            if !self.lower(State::Closing) {
                return;
            }
            *cause = Some(WcStatus::PeerGone);
        }
        self.last_word_is_due(shared);
    }

    fn last_word_is_due(&self, shared: &Shared) {
        self.rx_stalled.store(false, Ordering::SeqCst);
        self.rx_held.store(false, Ordering::SeqCst);
        // What is on its way has to be read, or closing would cut off the refusal.
        self.rx_ready.store(true, Ordering::SeqCst);
        self.tx_work.store(true, Ordering::SeqCst);
        self.give_up_later(shared);
    }

    /// The connection is cut unless it ends by itself soon.
    pub fn give_up_later(&self, shared: &Shared) {
        self.closing_since.lock().get_or_insert_with(Instant::now);
        shared.tick_soon();
    }

    /// The peer says nothing more, and wants nothing more than the last word.
    pub fn nothing_comes(&self, shared: &Shared) {
        self.rx_over.store(true, Ordering::SeqCst);
        if self.tx_over.load(Ordering::SeqCst) {
            self.fail(shared, None);
        }
    }

    /// The last word went out, or cannot.
    pub fn nothing_goes(&self, shared: &Shared) {
        self.tx_over.store(true, Ordering::SeqCst);
        if self.rx_over.load(Ordering::SeqCst) {
            self.fail(shared, None);
        }
    }

    /// Bytes went out; a peer that takes them is not given up.
    pub fn keep_closing(&self) {
        if self.state() == State::Closing {
            *self.closing_since.lock() = Some(Instant::now());
        }
    }

    /// The socket said so; the reader finds out what the peer said before.
    pub fn peer_hung_up(&self) {
        self.rx_hup.store(true, Ordering::SeqCst);
        self.rx_ready.store(true, Ordering::SeqCst);
    }

    /// What the peer sent is no frame: the connection ends.
    pub fn malformed(&self, shared: &Shared, reason: Malformed) {
        shared.counters.malformed[reason as usize].add(1);
        tracing::warn!(endpoint = ?self.id, "tcp: {reason}; connection closed");
        self.fail(shared, Some(WcStatus::PeerGone));
    }

    /// Ends the endpoint; the oldest work request gets `culprit` (see [`SendQueue::flush`]), the others are flushed as soon as nobody moves
    /// bytes.
    pub fn fail(&self, shared: &Shared, culprit: Option<WcStatus>) {
        {
            let mut cause = self.cause.lock();
            if self.state() < State::Closing {
                *cause = culprit;
            }
            if !self.lower(State::Failed) {
                return;
            }
        }
        if let Some(fd) = self.fd() {
            sys::shutdown(fd, Shutdown::Both);
        }
        if let Some(waiter) = self.link.lock().waiter.as_ref() {
            waiter.wake();
        }
        shared.counters.endpoints_failed.add(1);
    }

    /// Once the endpoint has failed and nobody is inside a system call for it: hands out what is outstanding.
    /// Everybody who lets go of `tx` or `rx` calls this afterwards, so the last one does it.
    pub fn try_flush(&self, shared: &Shared) {
        while self.state() == State::Failed && !self.is_quiet() && !self.flush(shared) {
            // Two that each hold one lock at this moment must not both leave it to the other.
            fence(Ordering::SeqCst);
            if self.tx.is_locked() || self.rx.is_locked() {
                return;
            }
        }
    }

    fn flush(&self, shared: &Shared) -> bool {
        let Some(_tx) = self.tx.try_lock() else { return false };
        let Some(mut rx) = self.rx.try_lock() else { return false };
        if self.flushed.load(Ordering::SeqCst) {
            return true;
        }
        if let Some(fd) = self.fd() {
            shared.epoll.remove(fd);
        }
        let culprit = *self.cause.lock();
        self.sq.lock().flush(culprit, &mut |c| shared.complete(self, c));
        {
            let mut rq = self.rq.lock();
            rq.dead = true;
            for slot in rx.take_slot().into_iter().chain(rq.slots.drain(..)) {
                shared.complete(self, flushed_recv(self.id, slot.id));
            }
        }
        self.flushed.store(true, Ordering::SeqCst);
        true
    }

    /// Whether nothing touches memory on behalf of this endpoint any more.
    pub fn is_quiet(&self) -> bool {
        self.flushed.load(Ordering::SeqCst)
    }

    /// Deadlines: a RECV that does not come, a last word that is not taken or does not come. `true`: look again.
    pub fn tick(&self, shared: &Shared, now: Instant, patience: Duration) -> bool {
        let mut again = false;
        if let Some(since) = *self.stalled_since.lock() {
            again = true;
            if now.duration_since(since) >= patience {
                self.rx_stalled.store(false, Ordering::SeqCst);
            }
        }
        let closing_since = *self.closing_since.lock();
        if let Some(since) = closing_since
            && self.state() != State::Failed
        {
            again = true;
            if now.duration_since(since) >= LINGER {
                self.fail(shared, None);
            }
        }
        again
    }
}

/// The completion of a RECV that nothing arrived for.
pub(super) fn flushed_recv(endpoint: EndpointId, id: u32) -> Completion {
    Completion {
        endpoint,
        kind: CompletionKind::RecvFlushed,
        status: WcStatus::Flushed,
        seq: u64::from(id),
        len_bytes: 0,
    }
}
