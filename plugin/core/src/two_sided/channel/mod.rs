//! The machine of one two-sided session and epoch: a control endpoint and data lanes, SEND and RECV only.
//!
//! Calls go in, [`TwoAction`]s and [`TwoEvent`]s come out. What outlives the epoch is the [`Durable`] part. Handling what arrives
//! needs only a copy, never a send: answers are state, told when there is credit and room, so nothing here can deadlock.

mod completions;
mod control_in;
mod control_out;
mod credit;
mod data_in;
mod data_out;
mod port;
mod stats;
mod transfers;

use std::collections::VecDeque;

use baton_fabric::WcStatus;

use super::chunks::Chunk;
use super::codec::{Ack, Block, CONTROL_SLOT_BYTES, DATA_HEADER_BYTES, Lists, ReadPiece, Status};
use super::inbox::Inbox;
use super::notes::{NotesIn, NotesOut, Owner};
use super::outbox::{Flow, Outbox};
use super::pool::{Pool, SlotId};
use super::report::{TwoCounters, TwoEnd, TwoEvent, TwoViolation, XferFailure};
use super::setup::{
    DataSend, PlaceJob, Source, Span, TwoAction, TwoLimits, TwoMemory, TwoSetup, TwoSetupError,
};
use crate::credit::SendCredit;
use crate::ids::{LaneId, Nanos};
use port::{Cargo, ControlPort, LanePort};

pub use data_out::{GATHER_PREFIX_BYTES, GATHERS};
pub use stats::{LaneStats, TwoStats};

/// So much may be missing from the time after which the watchdog bites.
const WATCH_GRAIN_NS: u64 = 100_000_000;

/// What outlives an epoch: transfers, notifications, what was granted of them.
#[derive(Debug)]
pub struct Durable {
    limits: TwoLimits,
    outbox: Outbox,
    inbox: Inbox,
    notes_out: NotesOut,
    notes_in: NotesIn,
    /// Highest count of REQUEST credit seen.
    request_known: u64,
}

impl Durable {
    /// For a session that begins.
    pub fn new(limits: TwoLimits) -> Durable {
        Durable {
            limits,
            outbox: Outbox::default(),
            inbox: Inbox::new(limits.inbox()),
            notes_out: NotesOut::new(),
            notes_in: NotesIn::new(limits.notes()),
            request_known: limits.request_depth.into(),
        }
    }

    /// Whether a next epoch may be begun with what was agreed for it: a session keeps what its transfers and notifications began
    /// with. A peer has a say in it, so ask before [`Channel::new`].
    ///
    /// # Errors
    /// The first number that is another.
    pub fn check(&self, limits: &TwoLimits) -> Result<(), TwoSetupError> {
        let had = &self.limits;
        let numbers = [
            ("the request depth of a resumed session", had.request_depth, limits.request_depth),
            ("the notification window of a resumed session", had.notify_window, limits.notify_window),
            ("the longest notification of a resumed session", had.message_bytes, limits.message_bytes),
        ];
        match numbers.into_iter().find(|(_, had, now)| had != now) {
            None => Ok(()),
            Some((what, _, now)) => {
                Err(TwoSetupError { what, value: now.into(), need: "what it was in the epochs before" })
            }
        }
    }

    /// The session is not resumed.
    pub fn abandon(mut self, reason: &TwoEnd) -> Abandoned {
        let ended = XferFailure::Ended(reason.clone());
        let transfers = self.outbox.abandon().into_iter().filter(|out| !out.told);
        let failed = transfers.map(|out| (out.token, out.failure.unwrap_or_else(|| ended.clone())));
        Abandoned { transfers: failed.collect(), notes: self.notes_out.abandon() }
    }

    /// Fails all transfers while there is no epoch, token by token. The session may still be resumed, and keeps its notifications; what had
    /// begun is then given up at the peer before anything else.
    pub fn fail_transfers(&mut self, reason: &TwoEnd) -> Vec<(u64, XferFailure)> {
        let why = XferFailure::Ended(reason.clone());
        let all: Vec<u32> = self.outbox.live().filter(|(_, out)| !out.told).map(|(at, _)| at).collect();
        let mut failed = Vec::with_capacity(all.len());
        for at in all {
            let silenced = self.notes_out.withdraw(Owner::Transfer(at));
            if !self.outbox.get(at).is_moved() {
                self.notes_out.disown(Owner::Transfer(at));
            }
            failed.push(self.outbox.disown(at, &why, silenced));
        }
        failed
    }

    /// Transfers not finished.
    pub fn transfers(&self) -> usize {
        self.outbox.len()
    }

    /// Nothing of it has to go to the peer any more.
    pub fn is_idle(&self) -> bool {
        self.outbox.len() == 0 && self.notes_out.len() == 0
    }

    /// The host took that many messages of an earlier epoch, of that many bytes together.
    pub fn on_popped(&mut self, count: u64, bytes: u64) {
        self.notes_in.popped(count, bytes);
    }
}

/// What is left of an epoch.
#[derive(Debug)]
pub struct TwoClosed {
    /// For the next epoch, or to be abandoned.
    pub durable: Durable,
    /// Transfers that were only waiting for completions which do not come any more; their memory is quiet now.
    pub done: Vec<(u64, Result<(), XferFailure>)>,
    /// Counters.
    pub counters: TwoCounters,
}

/// What ended with a session.
#[derive(Debug)]
pub struct Abandoned {
    /// Token and failure of every unfinished transfer.
    pub transfers: Vec<(u64, XferFailure)>,
    /// Token and message of every unresolved notification.
    pub notes: Vec<(u64, Vec<u8>)>,
}

/// One session and epoch.
#[derive(Debug)]
pub struct Channel {
    setup: TwoSetup,
    chunk_bytes: u32,
    durable: Durable,
    control: ControlPort,
    lanes: Vec<LanePort>,
    request: SendCredit,
    /// Slots of the pool in use for SENDs, and whether it had no more; it is not asked again before something came back.
    sending: u32,
    send_starved: bool,
    /// Buffers for the prefixes of gathered messages that are not in use.
    prefixes: Vec<u32>,
    next_lane: usize,
    /// Copies to be handed out, and all that have not ended.
    places: VecDeque<PlaceJob>,
    copies: u32,
    flush: bool,
    /// Since when data waits and no lane has credit.
    starved_since: Option<Nanos>,
    next_credit_request: Nanos,
    credit_request_gap_ms: u64,
    last_credit_request_in: Option<Nanos>,
    notes_turn: bool,
    next_wait_check: Nanos,
    /// When data last went out.
    last_sent: Nanos,
    last_progress: Nanos,
    events: VecDeque<TwoEvent>,
    ended: Option<TwoEnd>,
    /// The peer broke the protocol: nothing it sends is looked at any more.
    deaf: bool,
    counters: TwoCounters,
    work: Work,
}

/// Working space, so that nothing is allocated at work.
#[derive(Debug, Default)]
struct Work {
    bytes: Vec<u8>,
    frame: Vec<u8>,
    lists: Lists,
    acks: Vec<Ack>,
    pieces: Vec<ReadPiece>,
    spans: Vec<Span>,
    slots: Vec<SlotId>,
    blocks: Vec<Block>,
    chosen: Vec<(u32, u32, Chunk)>,
}

/// An action without borrows; bytes, spans and slots are in the working space.
#[derive(Debug)]
enum Step {
    Place(PlaceJob),
    RecvData { lane: usize, first: u64 },
    RecvControl { first: u64, count: u32 },
    Credit { seq: u64, word: usize },
    Frame { seq: u64 },
    Data { lane: usize, seq: u64, source: Source, data_crc: bool },
}

impl Channel {
    /// Begins an epoch, the first of a session with [`Durable::new`]. The limits must be the same in all its epochs.
    ///
    /// Panics where [`TwoSetup::check`] or [`Durable::check`] fails: ask them first about what a peer had a say in.
    pub fn new(setup: TwoSetup, durable: Durable, now: Nanos) -> Channel {
        let limits = setup.limits;
        if let Err(error) = setup.check().and_then(|()| durable.check(&limits)) {
            panic!("{error}");
        }
        let begun = durable.outbox.next_id() - 1;
        let lanes = (0..).zip(&setup.lanes).map(|(n, lane)| LanePort::new(LaneId(n), lane, &limits, now));
        Channel {
            chunk_bytes: setup.slot_bytes - DATA_HEADER_BYTES as u32,
            control: ControlPort::new(&setup),
            lanes: lanes.collect(),
            request: SendCredit::resumed(limits.request_depth.into(), durable.request_known, begun),
            sending: 0,
            send_starved: false,
            prefixes: (0..GATHERS).rev().collect(),
            next_lane: 0,
            places: VecDeque::new(),
            copies: 0,
            flush: false,
            starved_since: None,
            next_credit_request: now,
            credit_request_gap_ms: 1,
            last_credit_request_in: None,
            notes_turn: false,
            next_wait_check: now.plus_ms(limits.wait_ms / 8),
            last_sent: now,
            last_progress: now,
            events: VecDeque::new(),
            ended: None,
            deaf: false,
            counters: TwoCounters::default(),
            work: Work { frame: vec![0; CONTROL_SLOT_BYTES], ..Work::default() },
            setup,
            durable,
        }
    }

    /// The next thing to do; call until `None` after every other call that takes `&mut self`. Each action must be carried out, or
    /// begun where it is a copy, before the next is asked for.
    #[must_use]
    pub fn next_action(&mut self, now: Nanos, mem: &dyn TwoMemory, pool: &mut Pool) -> Option<TwoAction<'_>> {
        let step = self.decide(now, mem, pool)?;
        let work = &self.work;
        Some(match step {
            Step::Place(job) => TwoAction::Place(job),
            Step::RecvData { lane, first } => {
                TwoAction::RecvData { endpoint: self.lanes[lane].endpoint, first, slots: &work.slots }
            }
            Step::RecvControl { first, count } => {
                TwoAction::RecvControl { endpoint: self.control.endpoint, first, count }
            }
            Step::Credit { seq, word } => {
                TwoAction::Credit { endpoint: self.control.endpoint, seq, word, bytes: &work.bytes }
            }
            Step::Frame { seq } => {
                TwoAction::SendControl { endpoint: self.control.endpoint, seq, bytes: &work.bytes }
            }
            Step::Data { lane, seq, source, data_crc } => TwoAction::SendData(DataSend {
                endpoint: self.lanes[lane].endpoint,
                seq,
                prefix: &work.bytes,
                spans: &work.spans,
                source,
                data_crc,
            }),
        })
    }

    /// The next copy to be done or begun; [`Channel::next_action`] yields them as well, before anything else.
    #[must_use]
    pub fn next_place(&mut self) -> Option<PlaceJob> {
        self.places.pop_front()
    }

    fn decide(&mut self, now: Nanos, mem: &dyn TwoMemory, pool: &mut Pool) -> Option<Step> {
        // Also when the epoch has ended: what arrived before counts.
        if let Some(job) = self.places.pop_front() {
            return Some(Step::Place(job));
        }
        if self.ended.is_some() {
            return None;
        }
        // While nothing is outstanding nothing stalls: the watch begins with what is posted next.
        if now.since(self.last_progress) > WATCH_GRAIN_NS && !self.has_outstanding() {
            self.last_progress = now;
        }
        let step = self
            .decide_recv(pool)
            .or_else(|| self.decide_credit_words(now))
            .or_else(|| self.decide_frame(now, mem))
            .or_else(|| self.decide_data(now, mem, pool))
            .or_else(|| self.decide_nop(mem));
        if step.is_none() {
            self.flush = false;
        }
        step
    }

    /// The source of the message just handed out cannot be read: all that it belongs to fails. [`Channel::on_post_failed`] follows, since
    /// the message was promised to its lane.
    pub fn on_source_failed(&mut self, endpoint: baton_fabric::EndpointId) {
        let lane = self.lanes.iter().find(|lane| lane.endpoint == endpoint);
        let flows: Vec<Flow> = match lane.and_then(|lane| lane.flights.back()) {
            Some(Cargo::Data { flows, .. }) => flows.as_slice().to_vec(),
            _ => return,
        };
        for flow in flows {
            match flow {
                Flow::Serve(transfer) => {
                    self.durable.inbox.stop_serving(transfer, Status::CopyFailed, u32::MAX);
                }
                Flow::Own(at) => {
                    let failure = XferFailure::CopyFailed { status: Status::CopyFailed, chunk: u32::MAX };
                    self.fail(at, failure, true);
                }
            }
        }
    }

    /// The fabric did not take the work request just handed out. The epoch ends.
    pub fn on_post_failed(&mut self, endpoint: baton_fabric::EndpointId) {
        self.end(TwoEnd::PostFailed { endpoint });
    }

    /// The pool has slots again, or wants some back.
    pub fn on_pool_changed(&mut self) {
        self.send_starved = false;
        self.lanes.iter_mut().for_each(|lane| lane.pool_changed = true);
        self.slots_came_back();
    }

    fn slots_came_back(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.starved = false);
    }

    /// The next thing to tell.
    #[must_use]
    pub fn next_event(&mut self) -> Option<TwoEvent> {
        self.events.pop_front()
    }

    /// The host took that many messages, of that many bytes together.
    pub fn on_popped(&mut self, count: u64, bytes: u64) {
        self.durable.on_popped(count, bytes);
    }

    /// What was delivered as one waits for the host as something else: so many, of so many bytes, in place of `len`.
    pub fn on_opened(&mut self, len: usize, count: u64, bytes: u64) {
        self.durable.on_popped(1, len as u64);
        self.durable.notes_in.waits(count, bytes);
    }

    /// Tells everything that is worth telling, before the receiver idles: [`Channel::next_action`] then yields it.
    pub fn flush(&mut self) {
        self.flush = true;
    }

    /// Ends the epoch for a reason from outside.
    pub fn shut(&mut self, reason: &str) {
        self.end(TwoEnd::Closed(reason.to_owned()));
    }

    /// When [`Channel::on_timeout`] is due; may move with every other call.
    #[must_use]
    pub fn next_timeout(&self) -> Option<Nanos> {
        if self.ended.is_some() {
            return None;
        }
        let waits = self.durable.outbox.len() > 0 || self.durable.inbox.oldest_read().is_some();
        let stall = self.has_outstanding().then(|| self.last_progress.plus_ms(self.setup.limits.stall_ms));
        // Without credit or room for the frame, time alone changes nothing.
        let can_ask = self.control.has_room() && self.control.credit.available() > 0;
        let request = (can_ask && self.starved_since.is_some()).then_some(self.next_credit_request);
        [
            waits.then_some(self.next_wait_check),
            stall,
            request,
            self.durable.notes_out.next_deadline(),
            self.next_lane_timeout(),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Deadlines, idle lanes and the watchdog.
    pub fn on_timeout(&mut self, now: Nanos, pool: &Pool) {
        if self.ended.is_some() {
            return;
        }
        for token in self.durable.notes_out.expire(now) {
            self.counters.notes_expired += 1;
            self.events.push_back(TwoEvent::NoteDone { token, sent: false });
        }
        if now >= self.next_wait_check {
            self.next_wait_check = now.plus_ms(self.setup.limits.wait_ms / 8);
            self.check_waits(now);
        }
        self.check_lanes(now, pool);
        if self.has_outstanding() && now >= self.last_progress.plus_ms(self.setup.limits.stall_ms) {
            self.end(TwoEnd::Stalled { waited_ms: now.since(self.last_progress) / 1_000_000 });
        }
    }

    /// A completion is on its way.
    pub fn has_outstanding(&self) -> bool {
        self.control.ledger.in_flight() > 0 || self.lanes.iter().any(|lane| lane.ledger.in_flight() > 0)
    }

    /// Copies that have not ended; the channel must not be closed before they have.
    pub fn copies(&self) -> u32 {
        self.copies
    }

    /// Why it ended, once it has.
    pub fn end_reason(&self) -> Option<&TwoEnd> {
        self.ended.as_ref()
    }

    /// Counters.
    pub fn counters(&self) -> &TwoCounters {
        &self.counters
    }

    /// Ends it: endpoints are destroyed, all copies have ended, all events were taken. Its RECVs go back to the pool.
    pub fn close(mut self, now: Nanos, pool: &mut Pool) -> TwoClosed {
        assert_eq!(self.copies, 0, "copies end before their epoch is closed");
        assert!(self.events.is_empty(), "events are taken before their epoch is closed");
        self.deaf = true;
        for lane in 0..self.lanes.len() {
            while let Some(slot) = self.lanes[lane].posted.pop_front() {
                pool.flushed(slot);
            }
            for cargo in std::mem::take(&mut self.lanes[lane].flights) {
                self.on_cargo(now, cargo, WcStatus::Flushed, pool);
            }
        }
        self.durable.request_known = self.request.known();
        self.durable.outbox.restart(now);
        self.durable.inbox.restart();
        self.durable.notes_out.restart();
        self.durable.notes_in.restart();
        let done = self.events.into_iter().filter_map(|event| match event {
            TwoEvent::XferDone { token, result } => Some((token, result)),
            _ => None,
        });
        TwoClosed { done: done.collect(), durable: self.durable, counters: self.counters }
    }

    fn end(&mut self, reason: TwoEnd) {
        if self.ended.is_none() {
            self.events.push_back(TwoEvent::EndEpoch { reason: reason.clone() });
            self.ended = Some(reason);
        }
    }

    fn violate(&mut self, violation: TwoViolation) {
        self.deaf = true;
        self.counters.violations += 1;
        self.end(TwoEnd::Violation(violation));
    }
}
