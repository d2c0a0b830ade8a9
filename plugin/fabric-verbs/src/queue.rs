//! A completion queue and the queue pairs on it.
//!
//! One per session, epoch and device: the completions of a queue pair that was destroyed stay in a queue that it shared, so a
//! queue must not outlive its session.

use crate::endpoint::{Endpoint, WrId};
use crate::flush::{Fate, Flusher};
use baton_fabric::{Completion, CompletionKind, WcStatus};
use baton_verbs::{Channel, Cq, Status, VerbsError, Wc, WcBuffer, WcOpcode};
use parking_lot::{Mutex, RwLock};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Completions taken from the device at once.
const BATCH: usize = 64;
/// Polls in vain after which a queue is looked at rarely.
const HEAT: u32 = 256;

/// Counters of completions.
#[derive(Default)]
pub(crate) struct Counters {
    pub completions: AtomicU64,
    pub errors: AtomicU64,
    pub queue_errors: AtomicU64,
    /// Of endpoints that were destroyed before.
    pub late: AtomicU64,
}

/// A completion queue.
pub(crate) struct Queue {
    pub cq: Arc<Cq>,
    /// Its number in events.
    pub token: u64,
    members: RwLock<Vec<Option<Arc<Endpoint>>>>,
    armed: AtomicBool,
    heat: AtomicU32,
    /// Completions that were taken where they could not be handed out.
    stashed: AtomicBool,
    /// Completions wait for a flush.
    holding: AtomicBool,
    taker: Mutex<Taker>,
    counters: Arc<Counters>,
    flusher: Arc<Flusher>,
    device_index: usize,
}

struct Taker {
    buffer: WcBuffer,
    stash: VecDeque<Completion>,
    /// What was received and waits until memory of accelerators is flushed, and everything behind it. Never more than the device's queue
    /// holds: nothing is posted again for a completion that nobody has seen.
    held: VecDeque<Held>,
    failed: bool,
}

struct Held {
    completion: Completion,
    endpoint: Arc<Endpoint>,
    /// Nothing to wait for but what is in front of it.
    ticket: Option<u64>,
}

impl Queue {
    pub fn new(
        channel: &Arc<Channel>,
        entries: u32,
        token: u64,
        counters: &Arc<Counters>,
        (flusher, device_index): (&Arc<Flusher>, usize),
    ) -> Result<Queue, VerbsError> {
        Ok(Queue {
            cq: Cq::new(channel, entries, token)?,
            token,
            members: RwLock::new(Vec::new()),
            armed: AtomicBool::new(false),
            heat: AtomicU32::new(HEAT),
            stashed: AtomicBool::new(false),
            holding: AtomicBool::new(false),
            taker: Mutex::new(Taker {
                buffer: WcBuffer::new(BATCH),
                stash: VecDeque::new(),
                held: VecDeque::new(),
                failed: false,
            }),
            counters: Arc::clone(counters),
            flusher: Arc::clone(flusher),
            device_index,
        })
    }

    pub fn add(&self, endpoint: &Arc<Endpoint>) {
        let mut members = self.members.write();
        let at = usize::from(endpoint.member);
        if members.len() <= at {
            members.resize(at + 1, None);
        }
        members[at] = Some(Arc::clone(endpoint));
    }

    /// Nothing of it comes out any more. Whether the queue has no other.
    pub fn remove(&self, endpoint: &Endpoint) -> bool {
        // Under the taker's lock, so that no poll is in the middle of one of its completions.
        let mut taker = self.taker.lock();
        let mut members = self.members.write();
        if let Some(member) = members.get_mut(usize::from(endpoint.member)) {
            *member = None;
        }
        taker.stash.retain(|completion| completion.endpoint != endpoint.id);
        taker.held.retain(|held| held.completion.endpoint != endpoint.id);
        members.iter().all(Option::is_none)
    }

    /// Something is to be expected of it.
    pub fn heat(&self) {
        self.heat.store(HEAT, Ordering::Relaxed);
    }

    pub fn is_hot(&self) -> bool {
        self.heat.load(Ordering::Relaxed) > 0 || self.stashed.load(Ordering::Relaxed) || self.is_holding()
    }

    /// Whether completions wait for a flush.
    pub fn is_holding(&self) -> bool {
        self.holding.load(Ordering::Acquire)
    }

    /// Takes completions. `0` also when another thread is at it.
    pub fn poll(&self, out: &mut [Completion]) -> usize {
        let Some(mut taker) = self.taker.try_lock() else { return 0 };
        let mut n = 0;
        while n < out.len()
            && let Some(completion) = taker.stash.pop_front()
        {
            out[n] = completion;
            n += 1;
        }
        if !taker.stash.is_empty() {
            return n;
        }
        self.stashed.store(false, Ordering::Relaxed);
        n += self.take(&mut taker, &mut out[n..]);
        match n {
            0 => {
                let heat = self.heat.load(Ordering::Relaxed);
                self.heat.store(heat.saturating_sub(1), Ordering::Relaxed);
            }
            _ => self.heat(),
        }
        n
    }

    /// Takes completions from the device and keeps them for the next poll: whether there are any.
    pub fn look(&self) -> bool {
        let mut taker = self.taker.lock();
        let mut out = [Completion::EMPTY; BATCH];
        loop {
            let n = self.take(&mut taker, &mut out);
            taker.stash.extend(&out[..n]);
            if n < out.len() {
                break;
            }
        }
        let any = !taker.stash.is_empty();
        self.stashed.store(any, Ordering::Relaxed);
        any
    }

    /// Puts a completion in that no device made.
    pub fn inject(&self, completion: Completion) {
        let mut taker = self.taker.lock();
        taker.stash.push_back(completion);
        self.stashed.store(true, Ordering::Relaxed);
    }

    fn take(&self, taker: &mut Taker, out: &mut [Completion]) -> usize {
        if taker.held.is_empty() && !self.flusher.is_active() {
            return self.take_from_device(taker, out);
        }
        // What was held first: a completion never overtakes another of its queue.
        let mut n = self.release(taker, out);
        let mut taken = [Completion::EMPTY; BATCH];
        loop {
            let got = self.take_from_device(taker, &mut taken);
            self.hold(taker, &taken[..got]);
            if got < taken.len() {
                break;
            }
        }
        n += self.release(taker, &mut out[n..]);
        self.holding.store(!taker.held.is_empty(), Ordering::Release);
        n
    }

    /// Completions that have just been polled.
    fn hold(&self, taker: &mut Taker, taken: &[Completion]) {
        let arrived = |completion: &Completion| {
            matches!(completion.kind, CompletionKind::RecvImm(_) | CompletionKind::RecvSend)
        };
        // One for all of them, drawn after the last was polled.
        let ticket = taken.iter().any(arrived).then(|| self.flusher.ticket(self.device_index));
        let members = self.members.read();
        for completion in taken {
            let endpoint = members.iter().flatten().find(|member| member.id == completion.endpoint);
            let Some(endpoint) = endpoint else { continue };
            let ticket = ticket.filter(|_| arrived(completion));
            self.flusher.held.fetch_add(u64::from(ticket.is_some()), Ordering::Relaxed);
            taker.held.push_back(Held { completion: *completion, endpoint: Arc::clone(endpoint), ticket });
        }
    }

    /// Hands out what has been flushed, in order.
    fn release(&self, taker: &mut Taker, out: &mut [Completion]) -> usize {
        let mut n = 0;
        while n < out.len()
            && let Some(held) = taker.held.front()
        {
            match held.ticket.map(|ticket| self.flusher.fate(ticket)) {
                Some(Fate::Waiting) => break,
                Some(Fate::Failed) => held.endpoint.unflushed.store(true, Ordering::Release),
                Some(Fate::Flushed) | None => {}
            }
            let mut completion = held.completion;
            if held.ticket.is_some() && held.endpoint.unflushed.load(Ordering::Acquire) {
                self.flusher.dropped.fetch_add(1, Ordering::Relaxed);
                completion.kind = CompletionKind::RecvFlushed;
                completion.status = WcStatus::Flushed;
                completion.len_bytes = 0;
            }
            out[n] = completion;
            n += 1;
            taker.held.pop_front();
        }
        n
    }

    fn take_from_device(&self, taker: &mut Taker, out: &mut [Completion]) -> usize {
        let mut n = 0;
        while n < out.len() && !taker.failed {
            let room = out.len() - n;
            let taken = match self.cq.poll(&mut taker.buffer, room) {
                Ok(taken) => taken,
                Err(e) => {
                    // No progress, and it never will be: whoever is on it has to go.
                    tracing::error!("completion queue {}: {e}", self.token);
                    self.fail_locked(taker);
                    break;
                }
            };
            let full = taken.len() == room.min(BATCH);
            let members = self.members.read();
            for wc in taken {
                let Some(Some(endpoint)) = members.get(WrId(wc.wr_id()).member()) else {
                    self.counters.late.fetch_add(1, Ordering::Relaxed);
                    continue;
                };
                if let Some(completion) = self.translate(endpoint, wc) {
                    out[n] = completion;
                    n += 1;
                }
            }
            if !full {
                break;
            }
        }
        self.counters.completions.fetch_add(n as u64, Ordering::Relaxed);
        n
    }

    /// Nothing comes out of it any more: its sessions hear that they are over.
    pub fn fail(&self) {
        let mut taker = self.taker.lock();
        // What is in it came before that, and is handed out first.
        let mut out = [Completion::EMPTY; BATCH];
        loop {
            let n = self.take(&mut taker, &mut out);
            taker.stash.extend(&out[..n]);
            if n < out.len() {
                break;
            }
        }
        if !taker.failed {
            self.fail_locked(&mut taker);
        }
    }

    fn fail_locked(&self, taker: &mut Taker) {
        self.counters.queue_errors.fetch_add(1, Ordering::Relaxed);
        taker.failed = true;
        for endpoint in self.members.read().iter().flatten() {
            endpoint.lost.store(true, Ordering::Release);
            taker.stash.push_back(lost(endpoint));
        }
        self.stashed.store(true, Ordering::Relaxed);
    }

    /// `None` for what the fabric itself posted.
    fn translate(&self, endpoint: &Endpoint, wc: &Wc) -> Option<Completion> {
        let wr_id = WrId(wc.wr_id());
        let status = status(endpoint, wr_id, wc.status());
        if !matches!(status, WcStatus::Success | WcStatus::Flushed) {
            self.counters.errors.fetch_add(1, Ordering::Relaxed);
            tracing::debug!(
                "queue pair {} on {}: {:?}, vendor error {:#x}",
                endpoint.qp.number(),
                endpoint.rail,
                wc.status(),
                wc.vendor_err()
            );
        }
        if wr_id.is_end() {
            endpoint.on_end();
            return None;
        }
        if !wr_id.is_recv() {
            let seq = endpoint.sequence(wr_id.low());
            return Some(Completion {
                endpoint: endpoint.id,
                kind: CompletionKind::Send,
                status,
                seq,
                len_bytes: 0,
            });
        }
        endpoint.on_recv_completed();
        // Once one is lost those behind it tell of an order that is not there any more.
        let status = if endpoint.unflushed.load(Ordering::Relaxed) { WcStatus::Flushed } else { status };
        let (kind, len_bytes) = match (status, wc.opcode(), wc.imm()) {
            (WcStatus::Success, WcOpcode::RecvWriteWithImm, Some(imm)) => {
                (CompletionKind::RecvImm(imm), wc.byte_len())
            }
            (WcStatus::Success, ..) => (CompletionKind::RecvSend, wc.byte_len()),
            _ => (CompletionKind::RecvFlushed, 0),
        };
        Some(Completion { endpoint: endpoint.id, kind, status, seq: wr_id.low().into(), len_bytes })
    }

    /// Asks for an event unless it has been asked for: whether a completion waits already.
    pub fn arm(&self) -> bool {
        if self.armed.swap(true, Ordering::AcqRel) {
            return self.stashed.load(Ordering::Relaxed);
        }
        if let Err(e) = self.cq.arm() {
            tracing::error!("completion queue {}: {e}", self.token);
        }
        self.look()
    }

    /// Its event came.
    pub fn on_event(&self) {
        self.armed.store(false, Ordering::Release);
        self.heat();
    }
}

/// What a session hears of an endpoint whose device does not speak any more.
pub(crate) fn lost(endpoint: &Endpoint) -> Completion {
    Completion {
        endpoint: endpoint.id,
        kind: CompletionKind::Send,
        status: WcStatus::PeerGone,
        seq: endpoint.last_sequence(),
        len_bytes: 0,
    }
}

fn status(endpoint: &Endpoint, wr_id: WrId, status: Status) -> WcStatus {
    match status {
        Status::Success => WcStatus::Success,
        Status::Flushed => WcStatus::Flushed,
        // Some devices answer so when the link is down; then nobody's memory is at fault.
        Status::LocalQpOperation | Status::LocalProtection if !endpoint.rail.is_active() => {
            WcStatus::PeerGone
        }
        Status::LocalQpOperation | Status::LocalProtection | Status::LocalLength => WcStatus::LocalAccess,
        // The peer refuses a SEND for its length alone; the names differ between devices.
        Status::RemoteInvalidRequest | Status::RemoteOperation if wr_id.is_send_op() => {
            WcStatus::RemoteLength
        }
        Status::RemoteAccess | Status::RemoteInvalidRequest | Status::RemoteOperation => {
            WcStatus::RemoteAccess
        }
        Status::RnrRetryExceeded => WcStatus::RnrExceeded,
        Status::RetryExceeded | Status::Other(_) => WcStatus::PeerGone,
    }
}
