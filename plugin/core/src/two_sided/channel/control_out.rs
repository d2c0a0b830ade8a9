//! Control frames to the peer. They are made from state when there is credit and room, never queued.

use super::port::Cargo;
use super::{Channel, Step};
use crate::ids::{LaneId, Nanos};
use crate::two_sided::codec::{
    Ack, Direction, Frame, FrameHeader, MAX_ACKS, MAX_READ_PIECES, ReadPiece, Status, encode_frame,
};
use crate::two_sided::inbox::Answer;
use crate::two_sided::outbox::Abort;
use crate::two_sided::setup::TwoMemory;

/// Longest pause between two CREDIT_REQUESTs while nothing comes.
const MAX_REQUEST_GAP_MS: u64 = 64;

impl Channel {
    pub(super) fn decide_frame(&mut self, now: Nanos, mem: &dyn TwoMemory) -> Option<Step> {
        if !self.control.has_room() || !self.frame_due(now) || !self.has_control_credit(mem) {
            return None;
        }
        self.work.bytes.clear();
        let cargo = self.build_frame(now, mem)?;
        self.control.credit.try_reserve(1).expect("credit was checked").commit();
        self.control.sent += 1;
        self.counters.frames_sent += 1;
        let seq = self.control.post(cargo, self.work.bytes.len());
        Some(Step::Frame { seq })
    }

    /// Whether anything might be to say; cheap.
    fn frame_due(&self, now: Nanos) -> bool {
        let (inbox, outbox) = (&self.durable.inbox, &self.durable.outbox);
        self.control.sent == 0
            || inbox.owes_abort_acks()
            || inbox.owes_refusals()
            || self.ack_due()
            || self.durable.notes_in.ack_due(self.flush)
            || !outbox.aborts.is_empty()
            || !outbox.reads.is_empty()
            || self.durable.notes_out.may_send(self.setup.limits.notify_window)
            || self.credit_request_due(now)
            || self.lanes.iter().any(|lane| lane.reclaim > 0)
    }

    fn ack_due(&self) -> bool {
        let outbox = &self.durable.outbox;
        let untold = outbox.untold_releases();
        let depth = u64::from(self.setup.limits.request_depth);
        // Released numbers are what REQUEST credit comes back for.
        let wanted = self.request.available() == 0 || untold * 4 >= depth || self.flush;
        self.durable.inbox.owes_completes() || !outbox.read_acks.is_empty() || untold > 0 && wanted
    }

    fn build_frame(&mut self, now: Nanos, mem: &dyn TwoMemory) -> Option<Cargo> {
        if self.control.sent == 0 {
            return Some(self.build_open());
        }
        if let Some(answer) =
            self.durable.inbox.next_abort_ack().or_else(|| self.durable.inbox.next_refusal())
        {
            return Some(self.build_answer(answer));
        }
        if self.ack_due()
            && let Some(cargo) = self.build_acks()
        {
            return Some(cargo);
        }
        if self.durable.notes_in.ack_due(self.flush) {
            let up_to = self.durable.notes_in.ack();
            return Some(self.encode(&Frame::NotifyAck { up_to }));
        }
        if let Some(at) = self.durable.outbox.aborts.pop_front() {
            return Some(self.build_abort(now, at));
        }
        // A long READ_REQ and many notifications take turns.
        self.notes_turn = !self.notes_turn;
        let mut cargo = None;
        for notes in [self.notes_turn, !self.notes_turn] {
            cargo = cargo.or_else(|| if notes { self.build_note() } else { self.build_read(now, mem) });
        }
        cargo.or_else(|| self.build_credit_request(now)).or_else(|| self.build_reclaim())
    }

    fn encode(&mut self, frame: &Frame<'_>) -> Cargo {
        let header = FrameHeader {
            session: self.setup.session,
            epoch: self.setup.epoch,
            seq: self.control.sent + 1,
            ack: self.control.received,
        };
        encode_frame(header, frame, &mut self.work.bytes).expect("own frames keep the limits");
        Cargo::Frame
    }

    fn build_open(&mut self) -> Cargo {
        let limits = &self.setup.limits;
        let frame = Frame::SessionOpen {
            slot_bytes: self.setup.slot_bytes,
            request_depth: limits.request_depth,
            notify_window: limits.notify_window,
            lanes: self.lanes.len() as u8,
            released_below: self.durable.outbox.tell_release(),
        };
        self.encode(&frame)
    }

    fn build_answer(&mut self, answer: Answer) -> Cargo {
        let frame = match answer {
            Answer::Refused { transfer, direction, status, at } => {
                self.counters.nacks_sent += 1;
                Frame::XferNack { transfer, direction, status, at }
            }
            Answer::Aborted { transfer, direction, status, chunks } => {
                Frame::AbortAck { transfer, direction, status, chunks }
            }
            Answer::Complete { .. } => unreachable!("completions go in DATA_ACK"),
        };
        self.encode(&frame)
    }

    fn build_acks(&mut self) -> Option<Cargo> {
        let mut acks = std::mem::take(&mut self.work.acks);
        acks.clear();
        let ack =
            |transfer, direction, chunks_done| Ack { transfer, direction, status: Status::Ok, chunks_done };
        while acks.len() < MAX_ACKS {
            if let Some(Answer::Complete { transfer, chunks }) = self.durable.inbox.next_complete() {
                acks.push(ack(transfer, Direction::Write, chunks));
            } else if let Some((transfer, chunks)) = self.durable.outbox.read_acks.pop_front() {
                acks.push(ack(transfer, Direction::Read, chunks));
            } else {
                break;
            }
        }
        // What was owed may have been released meanwhile.
        let useful = !acks.is_empty() || self.durable.outbox.untold_releases() > 0;
        let cargo = useful.then(|| {
            let released_below = self.durable.outbox.tell_release();
            self.encode(&Frame::DataAck { released_below, acks: &acks })
        });
        self.work.acks = acks;
        cargo
    }

    fn build_abort(&mut self, now: Nanos, at: u32) -> Cargo {
        let out = self.durable.outbox.get_mut(at);
        out.abort = Abort::Sent;
        out.since = now;
        let (transfer, direction) = (out.id, out.direction);
        self.counters.aborts_sent += 1;
        self.encode(&Frame::Abort { transfer, direction })
    }

    fn build_note(&mut self) -> Option<Cargo> {
        if !self.durable.notes_out.may_send(self.setup.limits.notify_window) {
            return None;
        }
        let piece = self.durable.notes_out.peek();
        let header = FrameHeader {
            session: self.setup.session,
            epoch: self.setup.epoch,
            seq: self.control.sent + 1,
            ack: self.control.received,
        };
        let frame = Frame::Notify {
            seq: piece.seq,
            after_transfer: piece.after,
            total_len: piece.total_len,
            offset: piece.offset,
            bytes: piece.bytes,
        };
        encode_frame(header, &frame, &mut self.work.bytes).expect("own frames keep the limits");
        let cargo = if piece.last { Cargo::Note { seq: piece.seq.0 } } else { Cargo::Frame };
        self.counters.notes_sent += u64::from(piece.last);
        self.durable.notes_out.handed();
        Some(cargo)
    }

    fn build_read(&mut self, now: Nanos, mem: &dyn TwoMemory) -> Option<Cargo> {
        let at = self.durable.outbox.reads.front().copied()?;
        if self.durable.outbox.get(at).id == 0 {
            if !self.has_request_credit(mem) {
                return None;
            }
            self.request.try_reserve(1).expect("credit was checked").commit();
            self.durable.outbox.begin(at);
        }
        let mut pieces = std::mem::take(&mut self.work.pieces);
        pieces.clear();
        let out = self.durable.outbox.get_mut(at);
        let first = out.next;
        let rest = &out.map.pieces()[first as usize..];
        pieces.extend(rest.iter().take(MAX_READ_PIECES).map(|piece| ReadPiece {
            region: piece.region,
            offset: piece.offset,
            len: piece.len,
        }));
        out.next += pieces.len() as u32;
        out.since = now;
        let (transfer, last) = (out.id, out.is_sent());
        if last {
            self.durable.outbox.reads.pop_front();
        }
        let cargo = self.encode(&Frame::ReadReq { transfer, first, last, pieces: &pieces });
        self.work.pieces = pieces;
        Some(cargo)
    }

    fn credit_request_due(&self, now: Nanos) -> bool {
        self.starved_since.is_some() && now >= self.next_credit_request
    }

    /// "I am waiting", for the lane that waits with the fewest RECVs; less and less often while nothing comes of it.
    fn build_credit_request(&mut self, now: Nanos) -> Option<Cargo> {
        let since = self.starved_since.filter(|_| now >= self.next_credit_request)?;
        self.next_credit_request = now.plus_ms(self.credit_request_gap_ms);
        self.credit_request_gap_ms = (self.credit_request_gap_ms * 2).min(MAX_REQUEST_GAP_MS);
        let lane = self.next_lane % self.lanes.len();
        self.next_lane = lane + 1;
        let (want, waiting_bytes) = self.durable.outbox.demand(self.chunk_bytes);
        self.counters.credit_requests_sent += 1;
        let frame = Frame::CreditRequest {
            lane: LaneId(lane as u8),
            want,
            waiting_bytes,
            oldest_wait_us: now.since(since) / 1000,
        };
        Some(self.encode(&frame))
    }

    fn build_reclaim(&mut self) -> Option<Cargo> {
        let lane = self.lanes.iter_mut().find(|lane| lane.reclaim > 0)?;
        let (id, count) = (lane.id, std::mem::take(&mut lane.reclaim));
        self.counters.reclaims_sent += 1;
        Some(self.encode(&Frame::CreditReclaim { lane: id, count }))
    }
}
