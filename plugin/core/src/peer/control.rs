//! The control endpoint: standalone notifications out, credit words out, RECVs reposted.

use std::collections::VecDeque;

use baton_fabric::ExtraOp;

use super::port::Cargo;
use super::{
    Event, ExtraStep, Port, PostStep, RingId, Session, SessionMemory, Step, SubmitError, XferFailure,
};
use crate::credit::{CreditWord, WORD_BYTES};
use crate::ids::{LaneId, Nanos, NotifySeq, XferSeq};
use crate::notify::{
    BodyFlags, Fragment, NotifyMode, RECORD_HEADER_BYTES, Record, RecordScope, Standalone, Tell,
};
use crate::sequence::{Imm, ImmKind};

/// Send-queue entries of the control endpoint that only credit words use.
const CREDIT_ENTRIES: u32 = 8;

/// Staging slots for credit words, where the fabric cannot inline one: as many as can be in flight.
pub const CREDIT_SLOTS: u32 = CREDIT_ENTRIES;

/// Length of such a slot.
pub const CREDIT_SLOT_BYTES: u32 = 64;

/// At the latest every n-th credit write is signaled.
const CREDIT_SIGNAL_EVERY: u32 = 4;

/// Message buffers kept for reuse.
const SPARE_BUFFERS: usize = 64;

/// Longer ones are not kept.
const SPARE_CAPACITY: usize = 64 * 1024;

/// A notification waiting for its turn or its acknowledgement.
#[derive(Debug)]
pub(crate) struct Note {
    one: Standalone,
    /// Of the body; only transfers tell more than a message.
    flags: BodyFlags,
    /// The transfer without bytes that this is.
    pub(crate) xfer: Option<u32>,
    since: Nanos,
}

/// Standalone notifications, first in first out.
///
/// ```text
///   front … posted                posted … back
///     | in flight, acknowledged in order |  waiting  |
/// ```
#[derive(Debug)]
pub(crate) struct Outbox {
    queue: VecDeque<Note>,
    posted: usize,
    /// Bytes of the first waiting one that are posted as fragments.
    sent: usize,
    bytes: u64,
    next_seq: u64,
    spare: Vec<Vec<u8>>,
    /// Not later than the earliest deadline of those waiting.
    earliest: Nanos,
}

impl Outbox {
    pub(crate) fn new(carried: VecDeque<Standalone>, next_seq: u64) -> Outbox {
        let mut outbox = Outbox {
            queue: VecDeque::with_capacity(carried.len().max(64)),
            posted: 0,
            sent: 0,
            bytes: 0,
            next_seq,
            spare: Vec::with_capacity(SPARE_BUFFERS),
            earliest: Nanos(u64::MAX),
        };
        for one in carried {
            outbox.push(Note { one, flags: BodyFlags::MESSAGE, xfer: None, since: Nanos(0) });
        }
        outbox
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.queue.len() - self.posted
    }

    /// First waiting note: (number, since when).
    pub(crate) fn first_waiting(&self) -> Option<(NotifySeq, Nanos)> {
        self.queue.get(self.posted).map(|note| (note.one.seq, note.since))
    }

    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        (self.waiting() > 0 && self.earliest.0 < u64::MAX).then_some(self.earliest)
    }

    /// Everything that no transfer will report, for the next epoch.
    pub(crate) fn carry(&mut self) -> (VecDeque<Standalone>, u64) {
        self.posted = 0;
        self.sent = 0;
        let notes = std::mem::take(&mut self.queue);
        (notes.into_iter().filter(|note| note.xfer.is_none()).map(|note| note.one).collect(), self.next_seq)
    }

    /// A number that no other message of the session has.
    pub(crate) fn draw_seq(&mut self) -> NotifySeq {
        self.next_seq += 1;
        NotifySeq(self.next_seq - 1)
    }

    /// Takes a waiting one out; the peer drops what it has of it when it hears of another.
    fn remove_waiting(&mut self, at: usize) -> Option<Note> {
        if at == self.posted {
            self.sent = 0;
        }
        self.queue.remove(at)
    }

    fn push(&mut self, note: Note) {
        self.bytes += note.one.message.len() as u64;
        self.earliest = self.earliest.min(note.one.deadline);
        self.queue.push_back(note);
    }

    fn release(&mut self, note: Note) {
        self.bytes -= note.one.message.len() as u64;
        if self.spare.len() < SPARE_BUFFERS && note.one.message.capacity() <= SPARE_CAPACITY {
            self.spare.push(note.one.message);
        }
    }

    fn buffer_with(&mut self, tell: Tell<'_>) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_else(|| Vec::with_capacity(512));
        buffer.clear();
        tell.encode(&mut buffer);
        buffer
    }
}

/// What credit is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Urgency {
    /// What is enough to be worth a WRITE, and what a peer that waits cannot be without: half of the RECVs, a quarter of a ring.
    Worthwhile,
    /// Everything, however little.
    All,
}

impl Urgency {
    /// Whether `count` that the peer does not have are to be given, where `threshold` are worth it.
    fn gives(self, count: u64, threshold: u64) -> bool {
        count > 0 && (self == Urgency::All || count >= threshold)
    }
}

/// Credit on its way to the peer.
#[derive(Debug)]
pub(crate) struct CreditOut {
    /// Something changed that may be worth telling.
    pub(crate) check: bool,
    urgency: Urgency,
    /// Credit writes ever posted. In flight are the last `in_flight` of them, fewer than there are slots before each.
    posted: u64,
    /// Credit writes in flight.
    pub(crate) in_flight: u32,
    entries: u32,
    signal_every: u32,
    unsignaled: u32,
}

impl CreditOut {
    pub(crate) fn new(sq_depth: u32) -> CreditOut {
        let entries = CREDIT_ENTRIES.min(sq_depth / 2);
        CreditOut {
            check: false,
            urgency: Urgency::Worthwhile,
            posted: 0,
            in_flight: 0,
            entries,
            // Half of the entries at most, so that a completion is always on its way before they run out.
            signal_every: CREDIT_SIGNAL_EVERY.min(entries / 2).max(1),
            unsignaled: 0,
        }
    }
}

impl Session {
    /// Queues a standalone notification; given up at `deadline` if it has not been posted by then.
    pub fn notify(&mut self, now: Nanos, message: &[u8], deadline: Nanos) -> Result<NotifySeq, SubmitError> {
        if self.ended.is_some() {
            return Err(SubmitError::Ended);
        }
        self.check_message(message.len())?;
        self.queue_note(now, Tell::message(Some(message)), deadline, None)
    }

    /// A transfer without bytes is a standalone notification whose acknowledgement completes it.
    pub(crate) fn submit_message_only(
        &mut self,
        now: Nanos,
        token: u64,
        tell: Tell<'_>,
    ) -> Result<(), SubmitError> {
        let xfer = self.transfers.take_message_only(token, now)?;
        let queued = self.queue_note(now, tell, Nanos(u64::MAX), Some(xfer));
        if queued.is_err() {
            self.transfers.release(xfer);
        }
        queued.map(drop)
    }

    fn queue_note(
        &mut self,
        now: Nanos,
        tell: Tell<'_>,
        deadline: Nanos,
        xfer: Option<u32>,
    ) -> Result<NotifySeq, SubmitError> {
        let (limits, outbox) = (&self.setup.limits, &mut self.outbox);
        let count = outbox.queue.len() as u32;
        if count >= limits.max_notifications || outbox.bytes >= limits.max_notification_bytes {
            return Err(SubmitError::TooManyNotifications {
                count,
                bytes: outbox.bytes,
                max_count: limits.max_notifications,
                max_bytes: limits.max_notification_bytes,
            });
        }
        let seq = outbox.draw_seq();
        let message = outbox.buffer_with(tell);
        let one = Standalone { seq, message, deadline };
        outbox.push(Note { one, flags: tell.flags(), xfer, since: now });
        Ok(seq)
    }

    /// The next standalone notification: ring bytes, then a RECV, then an entry that credit does not need.
    pub(crate) fn decide_note(&mut self, mem: &dyn SessionMemory) -> Option<PostStep> {
        let record_bytes = self.first_waiting_bytes()?;
        if !self.has_room_for_note(record_bytes) {
            return None;
        }
        if !self.control.has_credit_for_record(record_bytes) {
            self.refresh(RingId::Control, mem);
            if !self.control.has_credit_for_record(record_bytes) {
                return None;
            }
        }
        let imm = Imm::of(ImmKind::Record, 1, XferSeq(0));
        self.begin_payload(imm);
        let what = self.encode_note();
        let extra = self.carry_record(RingId::Control, imm, false, mem);
        Some(PostStep {
            ring: RingId::Control,
            work: None,
            imm: None,
            extra: Some(extra),
            bytes: 0,
            signaled: true,
            what,
        })
    }

    /// Appends the record of what is next of the first waiting note to the scratch buffer.
    fn encode_note(&mut self) -> Cargo {
        let (limit, outbox) = (self.record_limit, &mut self.outbox);
        let note = &outbox.queue[outbox.posted];
        let (seq, body, sent) = (note.one.seq, &note.one.message, outbox.sent);
        let record = Record {
            epoch: self.setup.epoch,
            scope: RecordScope::Standalone { seq },
            fragment: Fragment::of(seq.0, sent, body.len(), limit),
            flags: note.flags,
        };
        let end = body.len().min(sent + limit);
        record.encode(&body[sent..end], &mut self.scratch);
        self.counters.fragments_sent += u64::from(record.fragment.is_some());
        if end < body.len() {
            outbox.sent = end;
            return Cargo::NotePart;
        }
        let awaited = note.xfer.is_some();
        outbox.sent = 0;
        outbox.posted += 1;
        self.counters.notifications_sent += 1;
        Cargo::Note { awaited }
    }

    fn has_room_for_note(&self, record_bytes: u32) -> bool {
        let for_credit = self.credit_out.entries.saturating_sub(self.credit_out.in_flight);
        self.control.ledger.free() > for_credit && self.control.can_stage(record_bytes)
    }

    /// Record of the first waiting note.
    fn first_waiting_bytes(&self) -> Option<u32> {
        let note = self.outbox.queue.get(self.outbox.posted)?;
        let left = note.one.message.len() - self.outbox.sent;
        Some((RECORD_HEADER_BYTES + left.min(self.record_limit)) as u32)
    }

    pub(crate) fn note_waits_for_credit(&self) -> bool {
        let Some(record_bytes) = self.first_waiting_bytes() else { return false };
        self.has_room_for_note(record_bytes) && !self.control.has_credit_for_record(record_bytes)
    }

    /// The oldest notification in flight has reached the peer.
    pub(crate) fn on_note_done(&mut self) {
        let note = self.outbox.queue.pop_front().expect("a note in flight is in the queue");
        self.outbox.posted -= 1;
        if let Some(xfer) = note.xfer {
            self.finish(xfer);
        }
        self.outbox.release(note);
    }

    /// Takes the waiting note of a canceled transfer out; `false` when it is in flight already.
    pub(crate) fn cancel_note(&mut self, xfer: u32) -> bool {
        let posted = self.outbox.posted;
        let at = self.outbox.queue.iter().skip(posted).position(|note| note.xfer == Some(xfer));
        let Some(note) = at.and_then(|at| self.outbox.remove_waiting(posted + at)) else { return false };
        self.outbox.release(note);
        true
    }

    pub(crate) fn expire_notes(&mut self, now: Nanos) {
        if self.outbox.waiting() == 0 || now < self.outbox.earliest {
            return;
        }
        let mut at = self.outbox.posted;
        let mut earliest = Nanos(u64::MAX);
        while let Some(note) = self.outbox.queue.get(at) {
            if note.one.deadline > now {
                earliest = earliest.min(note.one.deadline);
                at += 1;
                continue;
            }
            let note = self.outbox.remove_waiting(at).expect("just looked at");
            self.counters.notifications_expired += 1;
            self.events.push_back(Event::NotifyExpired { seq: note.one.seq });
            if let Some(xfer) = note.xfer {
                self.fail(xfer, XferFailure::Expired);
            }
            self.outbox.release(note);
        }
        self.outbox.earliest = earliest;
    }

    /// Announces everything, also what would not stop the peer from sending: [`Session::next_action`] then yields RECVs and credit
    /// words.
    pub fn announce_all(&mut self) {
        self.credit_out.urgency = Urgency::All;
        self.credit_out.check = true;
    }

    /// Re-reads the credit page where something may wait for it; `true`: there is more credit.
    pub fn poll_credit(&mut self, _now: Nanos, mem: &dyn SessionMemory) -> bool {
        if self.ended.is_some() {
            return false;
        }
        let lanes = (0..self.lanes.len() as u8).map(|lane| RingId::Lane(LaneId(lane)));
        let mut raised = self.refresh(RingId::Control, mem);
        for ring in lanes {
            raised |= self.refresh(ring, mem);
        }
        raised
    }

    /// Re-reads the credit words of one endpoint; `true`: there is more credit.
    pub(crate) fn refresh(&mut self, ring: RingId, mem: &dyn SessionMemory) -> bool {
        let (page, epoch) = (self.page, self.setup.epoch);
        match self.port_mut(ring).refresh_credit(page, epoch, mem) {
            Ok(refreshed) => {
                self.counters.credit_words_stale += refreshed.stale;
                refreshed.raised
            }
            Err(error) => {
                self.violate(super::Violation::Credit { ring, error });
                false
            }
        }
    }

    /// RECVs first, then the words that announce them.
    pub(crate) fn decide_credit(&mut self, mem: &dyn SessionMemory) -> Option<Step> {
        if !self.credit_out.check {
            return None;
        }
        if let Some(step) = self.decide_recv() {
            return Some(step);
        }
        if self.first_due().is_none() {
            self.credit_out.check = false;
            self.credit_out.urgency = Urgency::Worthwhile;
            return None;
        }
        let out = &self.credit_out;
        if out.in_flight >= out.entries || self.control.ledger.free() == 0 {
            return None;
        }
        Some(Step::Post(self.credit_words(mem)))
    }

    fn decide_recv(&mut self) -> Option<Step> {
        let urgency = self.credit_out.urgency;
        for port in self.lanes.iter_mut().chain([&mut self.control]) {
            let n = port.recv_in.to_grant();
            if urgency.gives(n, port.recv_threshold()) {
                let first = port.recv_in.granted();
                port.recv_in.grant(n);
                self.counters.receives_reposted += n;
                return Some(Step::Recv { endpoint: port.endpoint, first, count: n as u32 });
            }
        }
        None
    }

    fn ring_of_word(word: usize) -> RingId {
        if word < 2 { RingId::Control } else { RingId::Lane(LaneId((word / 2 - 1) as u8)) }
    }

    /// Whether a word may be told at all, and whether it should be. `withheld`: credit is held back from the peer.
    fn word_due(&self, port: &Port, which: usize, withheld: bool) -> (bool, bool) {
        let (credit, threshold) = if which == 0 {
            (&port.recv_in, port.recv_threshold())
        } else {
            (&port.bytes_in, port.bytes_threshold())
        };
        let unannounced = credit.unannounced();
        if unannounced == 0 {
            return (false, false);
        }
        // With immediates RECVs of the control endpoint are never withheld: frames need them too, and ring bytes hold records back.
        let always = which == 0
            && matches!(port.ring_id, RingId::Control)
            && self.setup.notify == NotifyMode::Immediate;
        let may = always || !withheld;
        (may, may && self.credit_out.urgency.gives(unannounced, threshold))
    }

    fn first_due(&self) -> Option<usize> {
        let withheld = self.withholds();
        [&self.control].into_iter().chain(&self.lanes).enumerate().find_map(|(nth, port)| {
            (0..2).find(|which| self.word_due(port, *which, withheld).1).map(|which| 2 * nth + which)
        })
    }

    fn may_tell(&self, word: usize) -> bool {
        self.word_due(self.port(Self::ring_of_word(word)), word % 2, self.withholds()).0
    }

    /// One WRITE from the first word that is due to the last one in reach; what lies between goes along.
    fn credit_words(&mut self, mem: &dyn SessionMemory) -> PostStep {
        let first = self.first_due().expect("checked by the caller");
        let inline_words = self.setup.caps.inline_bytes as usize / WORD_BYTES;
        let reach = if inline_words > 0 { inline_words } else { CREDIT_SLOT_BYTES as usize / WORD_BYTES };
        let end = (first + reach).min(self.page.words());
        let last = (first..end).rev().find(|&word| self.may_tell(word)).unwrap_or(first);
        self.scratch.clear();
        for word in first..=last {
            let may = self.may_tell(word);
            let epoch = self.setup.epoch;
            let port = self.port_mut(Self::ring_of_word(word));
            let credit = if word.is_multiple_of(2) { &mut port.recv_in } else { &mut port.bytes_in };
            let count = if may { credit.announce() } else { credit.announced() };
            self.scratch.extend_from_slice(&CreditWord::encode(epoch, count).to_le_bytes());
        }
        let out = &mut self.credit_out;
        // The slot's last write was CREDIT_SLOTS writes ago, more than are in flight: it has retired.
        assert!(out.in_flight < CREDIT_SLOTS, "a slot is overwritten only after its write has retired");
        let slot = (out.posted % u64::from(CREDIT_SLOTS)) as u32;
        let staged = (inline_words == 0).then(|| mem.stage_credit(slot, &self.scratch));
        out.posted += 1;
        out.in_flight += 1;
        let bytes = self.scratch.len() as u64;
        let signaled = out.unsignaled + 1 >= out.signal_every || self.control.ledger.must_signal(1, bytes);
        out.unsignaled = if signaled { 0 } else { out.unsignaled + 1 };
        self.counters.credit_writes += 1;
        PostStep {
            ring: RingId::Control,
            work: None,
            imm: None,
            extra: Some(ExtraStep {
                op: ExtraOp::Write,
                from_scratch: true,
                staged,
                stage_end: None,
                remote_addr: self.setup.peer_credit_addr + (first * WORD_BYTES) as u64,
                remote_key: self.setup.peer_credit_key,
                fenced: false,
            }),
            bytes: 0,
            signaled,
            what: Cargo::Credit,
        }
    }

    /// Where something waits for room and nothing in flight will complete, a signaled zero-length WRITE makes it so.
    pub(crate) fn decide_leftovers(&mut self) -> Option<PostStep> {
        if self.ended.is_some() {
            return None;
        }
        let waits = |session: &Session, port: &Port| match port.ring_id {
            RingId::Control => {
                session.first_waiting_bytes().is_some_and(|bytes| !session.has_room_for_note(bytes))
                    || session.credit_out.check && session.credit_out.in_flight >= session.credit_out.entries
            }
            RingId::Lane(_) => !port.turns.is_empty() || !session.tails.is_empty(),
        };
        let port = self
            .lanes
            .iter()
            .chain([&self.control])
            .find(|port| port.ledger.needs_flush() && port.ledger.free() > 0 && waits(self, port))?;
        let (ring, remote_addr, remote_key) = (port.ring_id, port.peer_ring_addr, port.peer_ring_key);
        self.counters.leftover_flushes += 1;
        Some(PostStep {
            ring,
            work: None,
            imm: None,
            extra: Some(ExtraStep {
                op: ExtraOp::Write,
                from_scratch: false,
                staged: None,
                stage_end: None,
                remote_addr,
                remote_key,
                fenced: false,
            }),
            bytes: 0,
            signaled: true,
            what: Cargo::Leftover,
        })
    }
}
