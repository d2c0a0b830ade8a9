//! Admission on the one-sided path: data in slices, tails all or nothing.
//!
//! * **Data** needs room in a send queue and nothing else. Each lane serves the transfers that have data for it in turn, one slice each.
//! * **Tails** are posted in one step for all lanes of a transfer, when every lane has room, a RECV at the peer and the record's ring bytes;
//!   only then the transfer gets its number, so the peer never sees a gap. Until then it waits in a queue *holding nothing*;
//!   data and un-notified transfers pass it.
//! * A transfer whose parts fit one slice each does both in one batch per lane (*whole*).
//!
//! With immediates a WRITE holds the last work request of every used lane but the record's back: it carries the TAIL. The record goes over
//! the first used lane, behind its data; an empty message has none, so that lane's last work request is held back too and carries the
//! EMPTY. In send mode a SEND behind the data carries each. A READ that cannot be whole posts a single RECORD or EMPTY once all its data
//! has arrived: nothing is left for other lanes to tell.
//!
//! A message that does not fit one record goes ahead of its record in fragments, while the transfer is the head of the tail queue.

mod fragments;
mod transfers;

use std::sync::Arc;

use baton_fabric::Op;

use crate::ids::{LaneId, Nanos, XferSeq};
use crate::notify::{NotifyMode, RecordScope, Tell};
use crate::peer::{
    CancelOutcome, Cargo, Event, PostStep, RingId, Session, SessionMemory, SubmitError, XferFailure,
};
use crate::prepared::Prepared;
use crate::sequence::{Imm, ImmKind, MAX_INCOMPLETE};
use transfers::Part;
pub(crate) use transfers::{State, Transfer, Transfers};

/// Tails being handed out, lane by lane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TailRun {
    xfer: u32,
    seq: XferSeq,
    /// Part that comes next.
    part: u32,
    /// Parts that take part; the record's is the first.
    parts: u32,
    /// Data goes along.
    whole: bool,
}

/// Why a step cannot be taken now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Blocked {
    /// Send queue of a lane.
    Room(LaneId),
    /// Staging ring of a lane.
    Staging(LaneId),
    /// RECV credit of a lane.
    Recv(LaneId),
    /// Ring bytes of a lane.
    RingBytes(LaneId),
    /// The peer has not taken the last fragment of the message before, which went over that lane.
    Fragments(LaneId),
}

impl Session {
    pub(crate) fn submit_data(
        &mut self,
        now: Nanos,
        token: u64,
        work: Arc<Prepared>,
        tell: Tell<'_>,
    ) -> Result<(), SubmitError> {
        let notified = !tell.is_nothing();
        let whole = notified && tell.body_len() <= self.record_limit && self.fits_one_slice(&work);
        let xfer = self.transfers.take(token, now, if whole { State::Fresh } else { State::Data })?;
        self.transfers.tell(xfer, tell);
        let transfer = &mut self.transfers[xfer];
        // Only an immediate needs a WRITE to ride on.
        let holds_back = notified && work.op() == Op::Write && self.setup.notify == NotifyMode::Immediate;
        for (nth, range) in work.lanes().iter().enumerate() {
            let rides = nth > 0 || tell.is_empty_message();
            let stop = range.end - u32::from(holds_back && rides);
            transfer.parts.push(Part { lane: range.lane, next: range.start, stop, end: range.end });
        }
        transfer.parts_left = transfer.parts.iter().filter(|part| part.next < part.stop).count() as u8;
        transfer.alone = whole && holds_back && work.lanes().len() == 1 && tell.is_empty_message();
        transfer.work = Some(work);
        if whole {
            let lane = transfer.parts[0].lane;
            self.lanes[usize::from(lane.0)].turns.push_back(xfer);
        } else {
            self.queue_parts(xfer, 0);
            self.tail_if_nothing_else(xfer);
        }
        Ok(())
    }

    /// All its data waits for the tail.
    fn tail_if_nothing_else(&mut self, xfer: u32) {
        if self.transfers[xfer].parts_left == 0 {
            self.all_data_posted(xfer);
        }
    }

    fn queue_parts(&mut self, xfer: u32, from: usize) {
        for part in self.transfers[xfer].parts.iter().skip(from) {
            if part.next < part.stop {
                self.lanes[usize::from(part.lane.0)].turns.push_back(xfer);
            }
        }
    }

    fn fits_one_slice(&self, work: &Prepared) -> bool {
        let limits = &self.setup.limits;
        work.total_bytes() <= limits.outstanding_bytes
            && work.lanes().iter().all(|range| {
                let most = self.lanes[usize::from(range.lane.0)].slice_wrs(limits.slice_wrs);
                range.end - range.start <= most && range.bytes <= limits.slice_bytes
            })
    }

    fn bytes_allow(&self, bytes: u64) -> bool {
        self.outstanding_bytes == 0 || self.outstanding_bytes + bytes <= self.setup.limits.outstanding_bytes
    }

    // ---- data -------------------------------------------------------------------------------------------------

    /// A slice of the transfer whose turn it is, on the first lane that can take one.
    pub(crate) fn decide_data(&mut self, _now: Nanos, mem: &dyn SessionMemory) -> Option<PostStep> {
        let mut passed = false;
        let lanes = self.lanes.len();
        // Starting behind the lane served last, so that none starves when bytes are the limit.
        let first = if self.next_lane < lanes { self.next_lane } else { 0 };
        for lane in (first..lanes).chain(0..first) {
            // A look at the credit page may have ended the epoch.
            if self.ended.is_some() {
                return None;
            }
            while let Some(&xfer) = self.lanes[lane].turns.front() {
                let mut gave_up = false;
                if let Some(step) = self.take_turn(lane, xfer, &mut gave_up, mem) {
                    return Some(step);
                }
                if !gave_up {
                    break;
                }
                passed = true;
            }
        }
        // What gave up its turn may have nothing left but its tail.
        if passed { self.decide_tails(mem) } else { None }
    }

    /// `gave_up`: nothing is left of the transfer on this lane but its tail.
    fn take_turn(
        &mut self,
        lane: usize,
        xfer: u32,
        gave_up: &mut bool,
        mem: &dyn SessionMemory,
    ) -> Option<PostStep> {
        if self.transfers[xfer].state == State::Fresh {
            if let Some(step) = self.try_alone(lane, xfer) {
                return Some(step);
            }
            match self.try_whole(xfer, mem) {
                Whole::Step(step) => return Some(step),
                Whole::Wait => return None,
                Whole::Slices => {
                    // Its other parts take their turns from now on.
                    self.transfers[xfer].state = State::Data;
                    self.queue_parts(xfer, 1);
                    let Part { next, stop, .. } = self.transfers[xfer].parts[0];
                    if next == stop {
                        self.lanes[lane].turns.pop_front();
                        self.tail_if_nothing_else(xfer);
                        *gave_up = true;
                        return None;
                    }
                }
            }
        }
        self.try_slice(lane, xfer)
    }

    fn try_slice(&mut self, lane: usize, xfer: u32) -> Option<PostStep> {
        let limits = self.setup.limits;
        let most = self.lanes[lane].slice_wrs(limits.slice_wrs);
        let transfer = &self.transfers[xfer];
        let nth = transfer.parts.iter().position(|part| usize::from(part.lane.0) == lane);
        let nth = nth.expect("a queued transfer has a part on this lane");
        let Part { next, stop, .. } = transfer.parts[nth];
        let (end, bytes) = slice_end(transfer.work(), next, stop.min(next + most), limits.slice_bytes);
        let behind_fence = transfer.work().op() == Op::Read && self.fence_holds_reads_back(lane);
        if behind_fence || !self.lanes[lane].has_room_for_data(end - next) || !self.bytes_allow(bytes) {
            return None;
        }
        self.lanes[lane].turns.pop_front();
        self.next_lane = lane + 1;
        let transfer = &mut self.transfers[xfer];
        transfer.in_flight += 1;
        transfer.parts[nth].next = end;
        if end < stop {
            self.lanes[lane].turns.push_back(xfer);
        } else {
            transfer.parts_left -= 1;
            if transfer.parts_left == 0 {
                self.all_data_posted(xfer);
            }
        }
        self.counters.sliced_posts += 1;
        Some(PostStep {
            ring: RingId::Lane(LaneId(lane as u8)),
            work: Some((xfer, next, end)),
            imm: None,
            extra: None,
            bytes,
            signaled: true,
            what: Cargo::Transfer { xfer, first_template: next, templates: end - next },
        })
    }

    fn fence_holds_reads_back(&self, lane: usize) -> bool {
        !self.setup.caps.reads_behind_fence && self.lanes[lane].fence_in_flight()
    }

    fn all_data_posted(&mut self, xfer: u32) {
        let transfer = &mut self.transfers[xfer];
        transfer.state = match (transfer.notified, transfer.work().op()) {
            (false, _) => State::Posted,
            (true, Op::Read) => State::Arriving,
            (true, Op::Write) => State::Tail,
        };
        if transfer.state == State::Tail {
            self.tails.push_back(xfer);
        }
    }

    // ---- tails ------------------------------------------------------------------------------------------------

    /// The tails of the transfer at the head of the queue, if everything they need is there.
    pub(crate) fn decide_tails(&mut self, mem: &dyn SessionMemory) -> Option<PostStep> {
        let &xfer = self.tails.front().filter(|_| self.ended.is_none())?;
        let parts = self.tail_parts(xfer);
        if self.tail_blocked_now(xfer, parts, mem).is_some() {
            return None;
        }
        if self.has_fragments_to_go(xfer) {
            return Some(self.post_fragment(xfer, mem));
        }
        self.tails.pop_front();
        Some(self.start_tails(xfer, parts, false, mem))
    }

    fn tail_parts(&self, xfer: u32) -> u32 {
        let transfer = &self.transfers[xfer];
        match transfer.work().op() {
            // A fragment goes over the record's lane only.
            _ if self.has_fragments_to_go(xfer) => 1,
            Op::Write => transfer.parts.len() as u32,
            // Its data has arrived: one record says so for all lanes.
            Op::Read => 1,
        }
    }

    fn try_whole(&mut self, xfer: u32, mem: &dyn SessionMemory) -> Whole {
        let transfer = &self.transfers[xfer];
        let work = transfer.work();
        let room = |part: &Part| self.lanes[usize::from(part.lane.0)].has_room_for_data(part.end - part.next);
        if !room(&transfer.parts[0]) || !self.bytes_allow(work.total_bytes()) {
            return Whole::Wait;
        }
        // A fence behind other READs would stall the lane.
        let fence_is_free = work.op() == Op::Write
            || transfer.parts.iter().all(|part| self.port(part.ring()).ledger.in_flight() == 0);
        let parts = transfer.parts.len() as u32;
        if !self.tails.is_empty() || !fence_is_free || !transfer.parts.iter().all(room) {
            return Whole::Slices;
        }
        if self.tail_blocked_now(xfer, parts, mem).is_some() {
            return if self.ended.is_some() { Whole::Wait } else { Whole::Slices };
        }
        let lane = usize::from(self.transfers[xfer].parts[0].lane.0);
        let front = self.lanes[lane].turns.pop_front();
        self.next_lane = lane + 1;
        assert_eq!(front, Some(xfer), "a whole transfer is posted in its turn");
        self.counters.whole_posts += 1;
        Whole::Step(self.start_tails(xfer, parts, true, mem))
    }

    /// The commonest whole transfer, and what has to be asked of it only: an immediate alone tells it, on its only lane. `None`:
    /// something is in the way.
    #[inline]
    fn try_alone(&mut self, lane: usize, xfer: u32) -> Option<PostStep> {
        let transfer = &self.transfers[xfer];
        if !transfer.alone || !self.tails.is_empty() {
            return None;
        }
        let (bytes, Part { next: start, end, .. }) = (transfer.work().total_bytes(), transfer.parts[0]);
        if !self.bytes_allow(bytes) || !self.lanes[lane].has_room_for_data(end - start) {
            return None;
        }
        let port = &mut self.lanes[lane];
        port.recv_out.try_reserve(1)?.commit();
        port.turns.pop_front();
        let ring = port.ring_id;
        let transfer = &mut self.transfers[xfer];
        transfer.parts[0] = Part { next: end, stop: end, ..transfer.parts[0] };
        transfer.in_flight += 1;
        transfer.parts_left = 0;
        transfer.state = State::Posted;
        self.next_lane = lane + 1;
        self.counters.whole_posts += 1;
        let seq = self.draw_number(xfer);
        Some(PostStep {
            ring,
            work: Some((xfer, start, end)),
            imm: Some(Imm::of(ImmKind::Empty, 1, seq).encode()),
            extra: None,
            bytes,
            signaled: true,
            what: Cargo::Transfer { xfer, first_template: start, templates: end - start },
        })
    }

    /// What keeps the tails from being posted, after a look at the credit page.
    fn tail_blocked_now(&mut self, xfer: u32, parts: u32, mem: &dyn SessionMemory) -> Option<Blocked> {
        loop {
            let blocked = self.tail_blocked(xfer, parts)?;
            let raised = match blocked {
                Blocked::Recv(lane) | Blocked::RingBytes(lane) | Blocked::Fragments(lane) => {
                    self.refresh(RingId::Lane(lane), mem)
                }
                Blocked::Room(_) | Blocked::Staging(_) => false,
            };
            if !raised {
                return Some(blocked);
            }
        }
    }

    pub(crate) fn tail_blocked(&self, xfer: u32, parts: u32) -> Option<Blocked> {
        let transfer = &self.transfers[xfer];
        if let Some(lane) = self.fragments_blocked(xfer) {
            return Some(Blocked::Fragments(lane));
        }
        for (nth, part) in transfer.parts[..parts as usize].iter().enumerate() {
            let port = self.port(part.ring());
            if port.ledger.free() < 1 {
                return Some(Blocked::Room(part.lane));
            }
            if port.recv_out.available() < 1 {
                return Some(Blocked::Recv(part.lane));
            }
            let has_record = nth == 0 && !transfer.tells_empty_message();
            let record_bytes = if has_record { self.next_record_bytes(xfer) } else { 0 };
            if !port.can_stage(record_bytes) {
                return Some(Blocked::Staging(part.lane));
            }
            if has_record && !port.has_credit_for_record(record_bytes) {
                return Some(Blocked::RingBytes(part.lane));
            }
        }
        None
    }

    /// What the head of the tail queue waits for.
    pub(crate) fn head_blocked(&self) -> Option<Blocked> {
        let &xfer = self.tails.front()?;
        self.tail_blocked(xfer, self.tail_parts(xfer))
    }

    /// Draws the number and hands out the first tail; the others follow before anything else.
    fn start_tails(&mut self, xfer: u32, parts: u32, whole: bool, mem: &dyn SessionMemory) -> PostStep {
        let seq = self.draw_number(xfer);
        self.counters.tails_waited += u64::from(!whole);
        self.continue_tails(TailRun { xfer, seq, part: 0, parts, whole }, mem)
    }

    /// The number of a transfer whose tails are handed out.
    fn draw_number(&mut self, xfer: u32) -> XferSeq {
        assert!(self.incomplete < MAX_INCOMPLETE, "the table of transfers is not larger");
        let seq = XferSeq(self.next_xfer_seq);
        self.next_xfer_seq += 1;
        self.incomplete += 1;
        self.transfers[xfer].numbered = true;
        seq
    }

    #[inline]
    pub(crate) fn continue_tails(&mut self, run: TailRun, mem: &dyn SessionMemory) -> PostStep {
        let TailRun { xfer, seq, part: nth, parts, whole } = run;
        let lanes = parts as u8;
        let transfer = &mut self.transfers[xfer];
        let op = transfer.work().op();
        let part = &mut transfer.parts[nth as usize];
        let (start, end, ring, lane) = (part.next, part.end, part.ring(), part.lane);
        part.next = end;
        part.stop = end;
        transfer.in_flight += 1;
        if nth + 1 == parts {
            transfer.state = State::Posted;
            transfer.parts_left = 0;
        } else {
            self.tail_run = Some(TailRun { part: nth + 1, ..run });
        }
        let bytes = match parts {
            1 if whole => transfer.work().total_bytes(),
            _ => sum_bytes(transfer.work(), start, end),
        };
        let fenced = op == Op::Read && whole;
        let (is_first, is_empty) = (nth == 0, transfer.tells_empty_message());
        let tail = Imm::of(if is_first { ImmKind::Empty } else { ImmKind::Tail }, lanes, seq);
        let (imm, extra) = if is_first && !is_empty {
            let imm = Imm::of(ImmKind::Record, lanes, seq);
            self.begin_payload(imm);
            self.encode_part(xfer, RecordScope::Transfer { seq, lanes });
            let extra = self.carry_record(ring, imm, fenced, mem);
            self.note_fragment(xfer, lane);
            (None, Some(extra))
        } else if op == Op::Write && !self.sends() {
            self.port_mut(ring).recv_out.try_reserve(1).expect("a RECV was checked").commit();
            (Some(tail.encode()), None)
        } else {
            (None, Some(self.carry_tail(ring, tail, fenced, mem)))
        };
        PostStep {
            ring,
            work: (start < end).then_some((xfer, start, end)),
            imm,
            extra,
            bytes,
            signaled: true,
            what: Cargo::Transfer { xfer, first_template: start, templates: end - start },
        }
    }

    // ---- the way back -----------------------------------------------------------------------------------------

    /// A batch of the transfer has completed.
    pub(crate) fn on_batch_done(&mut self, _now: Nanos, xfer: u32) {
        let transfer = &mut self.transfers[xfer];
        transfer.in_flight -= 1;
        if transfer.in_flight > 0 {
            return;
        }
        match transfer.state {
            State::Posted => self.finish(xfer),
            State::Draining => self.fail(xfer, XferFailure::Canceled),
            State::Arriving => {
                transfer.state = State::Tail;
                self.tails.push_back(xfer);
            }
            State::Fresh | State::Data | State::Tail => {}
            State::Free | State::MessageOnly => unreachable!("nothing of it is posted on a lane"),
        }
    }

    /// Tells that a transfer is done and frees its entry.
    pub(crate) fn finish(&mut self, xfer: u32) {
        let transfer = &self.transfers[xfer];
        self.counters.transfers_done += 1;
        self.counters.bytes_done += transfer.work.as_ref().map_or(0, |work| work.total_bytes());
        self.incomplete -= u64::from(transfer.numbered);
        self.events.push_back(Event::XferDone { token: transfer.token, result: Ok(()) });
        self.transfers.release(xfer);
    }

    /// Tells why a transfer failed and frees its entry.
    pub(crate) fn fail(&mut self, xfer: u32, failure: XferFailure) {
        let transfer = &self.transfers[xfer];
        match &failure {
            XferFailure::Canceled => self.counters.transfers_canceled += 1,
            _ => self.counters.transfers_failed += 1,
        }
        self.incomplete -= u64::from(transfer.numbered);
        self.events.push_back(Event::XferDone { token: transfer.token, result: Err(failure) });
        self.transfers.release(xfer);
    }

    /// Stops a transfer where that is still possible.
    pub fn cancel(&mut self, token: u64) -> CancelOutcome {
        let Some(xfer) = self.transfers.find(token) else { return CancelOutcome::NotFound };
        let state = self.transfers[xfer].state;
        match state {
            State::Posted | State::Draining => return CancelOutcome::TooLate,
            // In the middle of its tails: the peer hears of it.
            _ if self.tail_run.is_some_and(|run| run.xfer == xfer) => return CancelOutcome::TooLate,
            State::MessageOnly if !self.cancel_note(xfer) => return CancelOutcome::TooLate,
            _ => {}
        }
        self.tails.retain(|&other| other != xfer);
        for lane in &mut self.lanes {
            lane.turns.retain(|&other| other != xfer);
        }
        if self.transfers[xfer].in_flight > 0 {
            self.transfers[xfer].state = State::Draining;
            return CancelOutcome::Draining;
        }
        self.fail(xfer, XferFailure::Canceled);
        CancelOutcome::Canceled
    }

    /// Something waits for credit of the peer: poll the credit page.
    pub fn waits_for_credit(&self) -> bool {
        self.ended.is_none()
            && (matches!(
                self.head_blocked(),
                Some(Blocked::Recv(_) | Blocked::RingBytes(_) | Blocked::Fragments(_))
            ) || self.note_waits_for_credit())
    }
}

enum Whole {
    Step(PostStep),
    /// Its lane or the byte limit is full: it keeps its turn.
    Wait,
    /// Something only the tails need is missing: its data goes ahead.
    Slices,
}

fn sum_bytes(work: &Prepared, start: u32, end: u32) -> u64 {
    work.templates()[start as usize..end as usize].iter().map(|template| u64::from(template.len_bytes)).sum()
}

/// End of a slice that starts at `start`: at most `end`, at most `limit` bytes, at least one template.
fn slice_end(work: &Prepared, start: u32, end: u32, limit: u64) -> (u32, u64) {
    let mut bytes = 0;
    for at in start..end {
        let len_bytes = u64::from(work.templates()[at as usize].len_bytes);
        if at > start && bytes + len_bytes > limit {
            return (at, bytes);
        }
        bytes += len_bytes;
    }
    (end, bytes)
}
