//! The machine of one session and epoch, one-sided path.
//!
//! Calls go in (submit, completions, time), [`Action`]s and [`Event`]s come out; nothing is done behind the caller's back.
//! The order of what [`Session::next_action`] yields is the protocol's order: RECVs before the credit that announces them, all tails of a
//! transfer before anything else, standalone notifications and tails before data.

mod carrier;
mod control;
mod inbound;
mod port;
mod setup;
mod stats;
mod violation;

pub use control::{CREDIT_SLOT_BYTES, CREDIT_SLOTS};
pub use setup::*;
pub use violation::Violation;

pub(crate) use port::{Cargo, Flight, Port};

use std::collections::VecDeque;
use std::sync::Arc;

use baton_fabric::{Batch, Completion, CompletionKind, EndpointId, Extra, ExtraOp, WcStatus};

use crate::credit::CreditPage;
use crate::ids::{LaneId, Nanos};
use crate::notify::{Carry, Inbound, NotifyWindow, RECORD_HEADER_BYTES, Reassembly, SEND_HEADER_BYTES, Tell};
use crate::one_sided::{TailRun, Transfers};
use crate::prepared::Prepared;
use control::{CreditOut, Outbox};
use inbound::Unpopped;

/// Most that one record of a ring of that length carries; what is longer goes in fragments.
pub fn record_limit(ring_bytes: u32) -> usize {
    (ring_bytes as usize / 4).saturating_sub(RECORD_HEADER_BYTES)
}

/// Length of a RECV slot in send mode: header and the largest record of a ring of that length.
pub const fn slot_bytes(ring_bytes: u32) -> u32 {
    SEND_HEADER_BYTES as u32 + ring_bytes / 4
}

/// Messages whose memory is kept for those that arrive next: as many as a driver takes completions at once.
const SPARE_MESSAGES: usize = 64;

/// One session and epoch.
#[derive(Debug)]
pub struct Session {
    pub(crate) setup: SessionSetup,
    pub(crate) page: CreditPage,
    /// Most that one record carries.
    pub(crate) record_limit: usize,
    pub(crate) control: Port,
    pub(crate) lanes: Vec<Port>,
    /// Of control, then of the lanes.
    endpoints: Box<[EndpointId]>,
    pub(crate) transfers: Transfers,
    /// Lane that data looks at first.
    pub(crate) next_lane: usize,
    /// Transfers whose data is posted and whose tails are not; they hold nothing.
    pub(crate) tails: VecDeque<u32>,
    /// The transfer whose tails are just being handed out; nothing comes between them.
    pub(crate) tail_run: Option<TailRun>,
    /// Of a transfer's message: the lane, and how many of its RECVs were used by then.
    pub(crate) last_fragment: Option<(LaneId, u64)>,
    pub(crate) next_xfer_seq: u64,
    /// Notified transfers with a number and not yet done.
    pub(crate) incomplete: u64,
    /// Bytes posted and not completed.
    pub(crate) outstanding_bytes: u64,
    /// Batches in flight that will complete.
    pub(crate) signaled_flights: u32,
    last_progress: Nanos,
    pub(crate) outbox: Outbox,
    pub(crate) credit_out: CreditOut,
    pub(crate) inbound: Inbound,
    pub(crate) seen: NotifyWindow,
    /// The peer's message that is coming over the control endpoint in fragments, and the one over the lanes.
    pub(crate) control_parts: Reassembly,
    pub(crate) lane_parts: Reassembly,
    pub(crate) unpopped: Unpopped,
    /// Bytes of the extra work request that is just being handed out.
    pub(crate) scratch: Vec<u8>,
    last_post: Option<(RingId, u32)>,
    pub(crate) events: VecDeque<Event>,
    /// Memory for short messages that arrive.
    pub(crate) spare_messages: Vec<Vec<u8>>,
    pub(crate) ended: Option<EndReason>,
    /// The peer broke the protocol: nothing it sends is looked at any more.
    pub(crate) deaf: bool,
    pub(crate) counters: Counters,
}

/// An action without borrows.
#[derive(Debug)]
pub(crate) enum Step {
    /// See [`Action::Post`].
    Post(PostStep),
    /// See [`Action::Recv`].
    Recv { endpoint: EndpointId, first: u64, count: u32 },
}

/// A batch without borrows.
#[derive(Debug)]
pub(crate) struct PostStep {
    pub(crate) ring: RingId,
    /// Transfer and its templates `start .. end`.
    pub(crate) work: Option<(u32, u32, u32)>,
    pub(crate) imm: Option<u32>,
    /// Its bytes are in the scratch buffer.
    pub(crate) extra: Option<ExtraStep>,
    pub(crate) bytes: u64,
    pub(crate) signaled: bool,
    pub(crate) what: Cargo,
}

/// An [`Extra`] without borrows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExtraStep {
    pub(crate) op: ExtraOp,
    /// `false`: no bytes.
    pub(crate) from_scratch: bool,
    pub(crate) staged: Option<(u64, u64)>,
    /// Where the staging ring stands behind it.
    pub(crate) stage_end: Option<u64>,
    pub(crate) remote_addr: u64,
    pub(crate) remote_key: u64,
    pub(crate) fenced: bool,
}

impl Session {
    /// Starts an epoch. The driver has already posted `rq_depth` RECVs on every endpoint: empty ones, in send mode slots 0 .. `rq_depth`.
    ///
    /// Panics where [`SessionSetup::check`] fails: ask it first about what a peer had a say in.
    pub fn new(mut setup: SessionSetup, now: Nanos) -> Session {
        if let Err(error) = setup.check() {
            panic!("{error}");
        }
        let lane_count = u8::try_from(setup.lanes.len()).expect("at most 64 lanes");
        let page = CreditPage::new(lane_count);
        let port = |ring, lane| Port::new(ring, lane, setup.notify, setup.caps.inline_bytes);
        let control = port(RingId::Control, &setup.control);
        let lanes: Vec<Port> =
            (0..lane_count).zip(&setup.lanes).map(|(n, lane)| port(RingId::Lane(LaneId(n)), lane)).collect();
        let endpoints = [&setup.control].into_iter().chain(&setup.lanes).map(|lane| lane.endpoint).collect();
        let rings = setup.lanes.iter().chain([&setup.control]).map(|lane| lane.ring_bytes);
        let record_limit = record_limit(rings.min().expect("there is a control endpoint"));
        let recv_total = setup.lanes.iter().map(|lane| u64::from(lane.rq_depth)).sum();
        let first = crate::ids::XferSeq(setup.limits.first_xfer_seq);
        let carry = std::mem::take(&mut setup.carry);
        let resent = carry.unacknowledged.len() as u64;
        Session {
            page,
            record_limit,
            endpoints,
            transfers: Transfers::new(setup.limits.max_transfers),
            next_lane: 0,
            tails: VecDeque::with_capacity(64),
            tail_run: None,
            last_fragment: None,
            next_xfer_seq: first.0,
            incomplete: 0,
            outstanding_bytes: 0,
            signaled_flights: 0,
            last_progress: now,
            credit_out: CreditOut::new(control.ledger.depth()),
            outbox: Outbox::new(carry.unacknowledged, carry.next_notify_seq),
            inbound: Inbound::new(first, recv_total),
            seen: carry.seen,
            control_parts: Reassembly::default(),
            lane_parts: Reassembly::default(),
            unpopped: Unpopped::new(carry.unpopped_messages, carry.unpopped_bytes),
            scratch: Vec::with_capacity(record_limit + RECORD_HEADER_BYTES + SEND_HEADER_BYTES + 64),
            last_post: None,
            events: VecDeque::with_capacity(256),
            spare_messages: Vec::with_capacity(SPARE_MESSAGES),
            ended: None,
            deaf: false,
            counters: Counters { notifications_resent: resent, ..Counters::default() },
            control,
            lanes,
            setup,
        }
    }

    /// [`Session::submit_telling`] with a message, or with nothing to tell.
    pub fn submit(
        &mut self,
        now: Nanos,
        token: u64,
        work: Arc<Prepared>,
        message: Option<&[u8]>,
    ) -> Result<(), SubmitError> {
        self.submit_telling(now, token, work, Tell::message(message))
    }

    /// Takes a transfer over; its message is copied. Nothing is posted yet: call [`Session::next_action`].
    pub fn submit_telling(
        &mut self,
        now: Nanos,
        token: u64,
        work: Arc<Prepared>,
        tell: Tell<'_>,
    ) -> Result<(), SubmitError> {
        if self.ended.is_some() {
            return Err(SubmitError::Ended);
        }
        self.check_message(tell.message_len())?;
        self.check_waiting_bytes(tell.body_len())?;
        let lanes = self.lanes.len() as u8;
        if let Some(lane) = work.lanes().iter().map(|range| range.lane.0).find(|&lane| lane >= lanes) {
            return Err(SubmitError::LaneMap { lane, lanes });
        }
        if !work.lanes().is_empty() {
            self.submit_data(now, token, work, tell)?;
        } else if !tell.is_nothing() {
            self.submit_message_only(now, token, tell)?;
        } else {
            self.counters.transfers_done += 1;
            self.events.push_back(Event::XferDone { token, result: Ok(()) });
        }
        self.counters.transfers_submitted += 1;
        Ok(())
    }

    /// The next thing to do; call until `None` after every other call that takes `&mut self`. Each action must be carried
    /// out before the next is asked for.
    #[must_use]
    pub fn next_action<'a>(&'a mut self, now: Nanos, mem: &dyn SessionMemory) -> Option<Action<'a>> {
        let step = self.decide(now, mem)?;
        Some(match step {
            Step::Recv { endpoint, first, count } => Action::Recv { endpoint, first, count },
            Step::Post(post) => self.commit(now, post),
        })
    }

    fn decide(&mut self, now: Nanos, mem: &dyn SessionMemory) -> Option<Step> {
        if self.ended.is_some() {
            return None;
        }
        if let Some(run) = self.tail_run.take() {
            return Some(Step::Post(self.continue_tails(run, mem)));
        }
        if let Some(step) = self.decide_credit(mem) {
            return Some(step);
        }
        if self.has_nothing_to_post() {
            return None;
        }
        let post = self
            .decide_note(mem)
            .or_else(|| self.decide_tails(mem))
            .or_else(|| self.decide_data(now, mem))
            .or_else(|| self.decide_leftovers());
        post.map(Step::Post)
    }

    /// The common case after a completion: no transfer, tail, notification or credit word waits.
    fn has_nothing_to_post(&self) -> bool {
        !self.credit_out.check
            && self.outbox.waiting() == 0
            && (self.transfers.live() == 0
                || self.tails.is_empty() && self.lanes.iter().all(|lane| lane.turns.is_empty()))
    }

    /// Takes room for a decided batch and turns it into an action. That there is room was part of the decision.
    fn commit(&mut self, now: Nanos, post: PostStep) -> Action<'_> {
        let work_len = post.work.map_or(0, |(_, start, end)| end - start);
        let n = work_len + u32::from(post.extra.is_some());
        let patient = match post.what {
            Cargo::Note { awaited } => !awaited,
            Cargo::NotePart | Cargo::Credit => true,
            Cargo::Transfer { .. } | Cargo::Leftover => false,
        };
        let port = self.port_mut(post.ring);
        let endpoint = port.endpoint;
        let reservation = port.ledger.reserve(n).expect("room was checked when the batch was decided");
        let first_seq = reservation.commit(post.bytes, post.signaled);
        port.flights.push_back(Flight {
            first_seq,
            last_seq: first_seq + u64::from(n) - 1,
            bytes: post.bytes,
            signaled: post.signaled,
            fenced: post.extra.is_some_and(|extra| extra.fenced),
            stage_end: post.extra.and_then(|extra| extra.stage_end),
            what: post.what,
        });
        if post.signaled {
            if self.signaled_flights == 0 {
                self.last_progress = now;
            }
            self.signaled_flights += 1;
        }
        self.outstanding_bytes += post.bytes;
        self.counters.batches_posted += 1;
        self.counters.work_requests_posted += u64::from(n);
        self.last_post = Some((post.ring, n));
        let work = match post.work {
            Some((xfer, start, end)) => &self.transfers.work(xfer).templates()[start as usize..end as usize],
            None => &[],
        };
        let extra = post.extra.map(|extra| Extra {
            op: extra.op,
            bytes: if extra.from_scratch { &self.scratch } else { &[] },
            staged: extra.staged,
            gather: &[],
            remote_addr: extra.remote_addr,
            remote_key: extra.remote_key,
            fenced: extra.fenced,
        });
        Action::Post {
            endpoint,
            batch: Batch { work, imm: post.imm, extra, first_seq, signaled: post.signaled, patient },
        }
    }

    /// The fabric took only the first `taken` work requests of the batch just handed out. The epoch ends.
    pub fn on_post_failed(&mut self, endpoint: EndpointId, taken: usize) {
        let Some((ring, offered)) = self.last_post.take() else { return };
        let port = self.port_mut(ring);
        assert_eq!(port.endpoint, endpoint, "only the last batch can be reported as failed");
        let taken = u32::try_from(taken).unwrap_or(u32::MAX).min(offered);
        port.ledger.took_only(offered, taken);
        let mut flight = port.flights.pop_back().expect("the last batch is in flight");
        // The last of a batch is the one that completes: not taken, no completion comes for the rest either.
        let lost_signal = flight.signaled && taken < offered;
        flight.signaled &= !lost_signal;
        let bytes = flight.bytes;
        if taken > 0 {
            flight.last_seq = flight.first_seq + u64::from(taken) - 1;
            port.flights.push_back(flight);
        } else {
            self.outstanding_bytes -= bytes;
        }
        self.signaled_flights -= u32::from(lost_signal);
        self.end(EndReason::PostFailed { endpoint, taken: taken as usize, offered: offered as usize });
    }

    /// A completion of one of the session's endpoints; others are counted and ignored. Still to be called while the epoch is being drained:
    /// what succeeded on the way counts.
    pub fn on_completion(&mut self, now: Nanos, completion: &Completion, mem: &dyn SessionMemory) {
        match self.endpoints.iter().position(|other| *other == completion.endpoint) {
            Some(nth) => self.on_completion_of(now, nth, completion, mem),
            None => self.counters.late_ignored += 1,
        }
    }

    /// [`Session::on_completion`] of the `nth` of the session's endpoints, which are control and then the lanes, for those who know it.
    pub fn on_completion_of(
        &mut self,
        now: Nanos,
        nth: usize,
        completion: &Completion,
        mem: &dyn SessionMemory,
    ) {
        assert!(self.endpoints[nth] == completion.endpoint, "endpoint {nth} of the session");
        let ring = nth.checked_sub(1).map_or(RingId::Control, |lane| RingId::Lane(LaneId(lane as u8)));
        if completion.status == WcStatus::Success {
            self.last_progress = now;
        }
        match (completion.kind, completion.status) {
            (CompletionKind::Send, WcStatus::Success) => self.on_sent(now, ring, completion.seq),
            (CompletionKind::Send, status) => self.on_send_error(ring, completion.seq, status),
            (CompletionKind::RecvImm(imm), WcStatus::Success) => self.on_immediate(ring, imm, mem),
            (CompletionKind::RecvSend, WcStatus::Success) => {
                self.on_send(ring, completion.seq, completion.len_bytes, mem);
            }
            (_, status) => {
                self.counters.flushed += 1;
                self.end(EndReason::WorkFailed { endpoint: completion.endpoint, status });
            }
        }
    }

    fn on_sent(&mut self, now: Nanos, ring: RingId, seq: u64) {
        let port = self.port_mut(ring);
        if let Err(error) = port.ledger.retire(seq) {
            let endpoint = port.endpoint;
            self.end(EndReason::BadCompletion { endpoint, error });
            return;
        }
        while let Some(flight) = self.port_mut(ring).take_flight(seq) {
            self.signaled_flights -= u32::from(flight.signaled);
            self.outstanding_bytes -= flight.bytes;
            match flight.what {
                Cargo::Transfer { xfer, .. } => self.on_batch_done(now, xfer),
                Cargo::Note { .. } => self.on_note_done(),
                Cargo::NotePart => {}
                Cargo::Credit => self.credit_out.in_flight -= 1,
                Cargo::Leftover => {}
            }
        }
    }

    fn on_send_error(&mut self, ring: RingId, seq: u64, status: WcStatus) {
        let endpoint = self.port(ring).endpoint;
        if status == WcStatus::Flushed {
            self.counters.flushed += 1;
        } else {
            self.name_culprit(ring, seq, status);
        }
        self.end(EndReason::WorkFailed { endpoint, status });
    }

    /// Notes at the transfer whose work request failed which of its descriptors it was.
    fn name_culprit(&mut self, ring: RingId, seq: u64, status: WcStatus) {
        let Some(flight) = self.port(ring).flights.iter().find(|flight| flight.last_seq >= seq).copied()
        else {
            return;
        };
        let Cargo::Transfer { xfer, first_template, templates } = flight.what else { return };
        let Some(nth) = seq.checked_sub(flight.first_seq).filter(|&nth| nth < u64::from(templates)) else {
            return;
        };
        let template = self.transfers.work(xfer).templates()[first_template as usize + nth as usize];
        let (local_addr, remote_addr, len_bytes) =
            (template.local_addr, template.remote_addr, template.len_bytes);
        let failure = match status {
            WcStatus::LocalAccess => XferFailure::LocalAccess { local_addr, remote_addr, len_bytes },
            WcStatus::RemoteAccess => XferFailure::RemoteAccess { local_addr, remote_addr, len_bytes },
            // What another lane told of it stands.
            _ => return,
        };
        self.transfers[xfer].failure = Some(failure);
    }

    /// The next thing to tell.
    #[must_use]
    #[inline]
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// What [`Session::next_event`] gives next, where it lies: reading a little of it costs less than moving it.
    #[must_use]
    #[inline]
    pub fn peek_event(&self) -> Option<&Event> {
        self.events.front()
    }

    /// Nothing is queued, posted or untold (unsignaled credit words may still be on their way).
    pub fn is_idle(&self) -> bool {
        self.transfers.live() == 0
            && self.outbox.is_empty()
            && self.signaled_flights == 0
            && self.events.is_empty()
    }

    /// A completion is on its way.
    pub fn has_outstanding(&self) -> bool {
        self.signaled_flights > 0
    }

    /// When [`Session::on_timeout`] is due; may move with every other call.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Nanos> {
        if self.ended.is_some() {
            return None;
        }
        let stall = (self.signaled_flights > 0).then(|| self.stall_deadline());
        [stall, self.outbox.next_deadline()].into_iter().flatten().min()
    }

    /// Deadlines of notifications and the watchdog.
    pub fn on_timeout(&mut self, now: Nanos) {
        if self.ended.is_some() {
            return;
        }
        self.expire_notes(now);
        if self.signaled_flights > 0 && now >= self.stall_deadline() {
            let waited_ms = now.since(self.last_progress) / 1_000_000;
            self.end(EndReason::Stalled { waited_ms, outstanding_bytes: self.outstanding_bytes });
        }
    }

    fn stall_deadline(&self) -> Nanos {
        let limits = &self.setup.limits;
        let rate = limits.stall_bytes_per_second.max(1);
        let transfer_ms = self.outstanding_bytes.saturating_mul(1000) / rate;
        self.last_progress.plus_ms(limits.stall_ms.max(transfer_ms))
    }

    /// Ends it, after the endpoints were fenced and drained and all events were taken. `reason` is told to unfinished
    /// transfers unless the session knows a better one.
    pub fn close(&mut self, reason: EndReason) -> Closed {
        if self.ended.as_ref().is_none_or(EndReason::is_consequence) {
            self.ended = Some(reason.clone());
        }
        let reason = self.ended.clone().unwrap_or(reason);
        self.deaf = true;
        let failed = self.transfers.fail_all(&reason);
        self.counters.transfers_failed += failed.len() as u64;
        self.give_up_partial();
        let (unacknowledged, next_notify_seq) = self.outbox.carry();
        let carry = Carry {
            next_notify_seq,
            unacknowledged,
            seen: self.seen.clone(),
            unpopped_messages: self.unpopped.messages,
            unpopped_bytes: self.unpopped.bytes,
        };
        Closed { failed, partial_seqs: self.inbound.partial().collect(), carry, counters: self.counters }
    }

    /// Longest message of a transfer or a standalone notification.
    pub fn message_limit(&self) -> usize {
        self.setup.limits.max_message_bytes as usize
    }

    /// Why it ended, once it has.
    pub fn end_reason(&self) -> Option<&EndReason> {
        self.ended.as_ref()
    }

    /// What the handshake settled.
    pub fn setup(&self) -> &SessionSetup {
        &self.setup
    }

    /// Layout of the credit pages.
    pub fn credit_page(&self) -> CreditPage {
        self.page
    }

    pub(crate) fn check_message(&self, len: usize) -> Result<(), SubmitError> {
        let limit = self.message_limit();
        if len > limit {
            return Err(SubmitError::MessageTooLong { len, limit });
        }
        Ok(())
    }

    /// What unfinished transfers tell is kept until they end.
    fn check_waiting_bytes(&self, len: usize) -> Result<(), SubmitError> {
        let (waiting, limit) = (self.transfers.body_bytes(), self.setup.limits.max_waiting_message_bytes);
        if waiting > 0 && waiting + len as u64 > limit {
            return Err(SubmitError::TooManyMessageBytes { waiting, len, limit });
        }
        Ok(())
    }

    pub(crate) fn end(&mut self, reason: EndReason) {
        match &self.ended {
            None => {
                self.events.push_back(Event::EndEpoch { reason: reason.clone() });
                self.ended = Some(reason);
            }
            Some(known) if known.is_consequence() => self.ended = Some(reason),
            Some(_) => {}
        }
    }

    pub(crate) fn violate(&mut self, violation: Violation) {
        self.deaf = true;
        self.end(EndReason::Violation(violation));
    }

    pub(crate) fn port(&self, ring: RingId) -> &Port {
        match ring {
            RingId::Control => &self.control,
            RingId::Lane(LaneId(lane)) => &self.lanes[usize::from(lane)],
        }
    }

    pub(crate) fn port_mut(&mut self, ring: RingId) -> &mut Port {
        match ring {
            RingId::Control => &mut self.control,
            RingId::Lane(LaneId(lane)) => &mut self.lanes[usize::from(lane)],
        }
    }
}
