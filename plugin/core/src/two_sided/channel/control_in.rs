//! Control frames of the peer.

use baton_fabric::Completion;

use super::Channel;
use crate::ids::{LaneId, Nanos, NotifySeq};
use crate::two_sided::codec::{
    Ack, CONTROL_SLOT_BYTES, Direction, Frame, FrameError, FrameHeader, Kind, Lists, Status, decode_frame,
};
use crate::two_sided::outbox::Abort;
use crate::two_sided::report::{TwoEnd, TwoViolation, XferFailure};
use crate::two_sided::setup::TwoMemory;

impl Channel {
    pub(super) fn on_control(
        &mut self,
        now: Nanos,
        done: &Completion,
        mem: &dyn TwoMemory,
    ) -> Result<(), TwoEnd> {
        let endpoint = done.endpoint;
        let expected = self.control.recv.received() % u64::from(self.control.depth);
        if done.seq != expected {
            return Err(TwoEnd::WrongRecv { endpoint, got: done.seq, expected });
        }
        if !self.control.recv.receive(1) {
            let (received, announced) = (self.control.recv.received() + 1, self.control.recv.announced());
            return Err(TwoViolation::TooManyReceives { lane: None, received, announced }.into());
        }
        self.counters.frames_received += 1;
        let len = done.len_bytes as usize;
        if len > CONTROL_SLOT_BYTES {
            return Err(TwoViolation::Frame(FrameError::Size { len }).into());
        }
        let mut frame = std::mem::take(&mut self.work.frame);
        let mut lists = std::mem::take(&mut self.work.lists);
        mem.read_control(done.seq as u32, &mut frame[..len]);
        let outcome = self.take_frame(now, &frame[..len], &mut lists, mem);
        (self.work.frame, self.work.lists) = (frame, lists);
        Ok(outcome?)
    }

    fn take_frame(
        &mut self,
        now: Nanos,
        bytes: &[u8],
        lists: &mut Lists,
        mem: &dyn TwoMemory,
    ) -> Result<(), TwoViolation> {
        let (header, frame) = decode_frame(bytes, lists).map_err(TwoViolation::Frame)?;
        if header.session != self.setup.session {
            self.counters.stale_session += 1;
            return Ok(());
        }
        if header.epoch != self.setup.epoch {
            self.counters.stale_epoch += 1;
            return Ok(());
        }
        self.check_order(&header, frame.kind())?;
        self.on_frame(now, frame, mem)
    }

    fn check_order(&mut self, header: &FrameHeader, kind: Kind) -> Result<(), TwoViolation> {
        let FrameHeader { seq, ack, .. } = *header;
        let control = &mut self.control;
        if seq != control.received + 1 {
            return Err(TwoViolation::FrameSeq { got: seq, expected: control.received + 1 });
        }
        if !(control.acked..=control.sent).contains(&ack) {
            return Err(TwoViolation::FrameAck { got: ack, before: control.acked, sent: control.sent });
        }
        if (seq == 1) != (kind == Kind::SessionOpen) {
            return Err(TwoViolation::Opening { kind, seq });
        }
        (control.received, control.acked) = (seq, ack);
        Ok(())
    }

    fn on_frame(&mut self, now: Nanos, frame: Frame<'_>, mem: &dyn TwoMemory) -> Result<(), TwoViolation> {
        match frame {
            Frame::CreditRequest { lane, want, .. } => {
                self.check_lane(lane)?;
                self.on_credit_request(now, lane, want);
            }
            Frame::DataAck { released_below, acks } => {
                self.on_release(released_below)?;
                acks.iter().try_for_each(|ack| self.on_ack(now, ack))?;
            }
            Frame::SessionOpen { .. } => self.on_open(&frame)?,
            Frame::Notify { seq, after_transfer, total_len, offset, bytes } => {
                if let Some((after, message)) =
                    self.durable.notes_in.piece(seq, after_transfer, total_len, offset, bytes)?
                {
                    self.on_note(after, message)?;
                }
            }
            Frame::NotifyAck { up_to } => self.on_note_ack(up_to)?,
            Frame::ReadReq { transfer, first, last, pieces } => {
                let check = |piece: &crate::two_sided::codec::ReadPiece| {
                    mem.check(piece.region, piece.offset, piece.len, Direction::Read)
                };
                let request = (transfer, first, last, pieces);
                if self.durable.inbox.read_request(now, request, self.chunk_bytes, check)? {
                    self.durable.outbox.serve(transfer);
                }
            }
            Frame::XferNack { transfer, direction, status, at } => {
                self.counters.nacks_received += 1;
                self.on_refusal(Kind::XferNack, transfer, direction, status, at)?;
            }
            Frame::Abort { transfer, direction } => {
                self.counters.aborts_received += 1;
                self.durable.inbox.abort(transfer, direction)?;
            }
            Frame::AbortAck { transfer, direction, status, chunks } => {
                let Some(at) = self.own(Kind::AbortAck, transfer, direction)? else { return Ok(()) };
                self.check_chunks(at, chunks)?;
                let out = self.durable.outbox.get_mut(at);
                // It may be over already: an acknowledgement or a refusal was faster.
                if !matches!(out.abort, Abort::Sent | Abort::Over) {
                    return Err(TwoViolation::NotOurs { kind: Kind::AbortAck, transfer, direction });
                }
                if status == Status::Ok && direction == Direction::Write {
                    self.complete_write(at);
                } else {
                    out.abort = Abort::Over;
                    self.settle(at);
                }
            }
            Frame::CreditReclaim { lane, count } => {
                self.check_lane(lane)?;
                self.on_reclaim(lane, count);
            }
        }
        Ok(())
    }

    fn check_lane(&self, lane: LaneId) -> Result<(), TwoViolation> {
        let lanes = self.lanes.len() as u8;
        if lane.0 < lanes { Ok(()) } else { Err(TwoViolation::Lane { lane, lanes }) }
    }

    fn on_open(&mut self, frame: &Frame<'_>) -> Result<(), TwoViolation> {
        let Frame::SessionOpen { slot_bytes, request_depth, notify_window, lanes, released_below } = *frame
        else {
            return Ok(());
        };
        let limits = &self.setup.limits;
        let agreed = [
            ("slot_bytes", slot_bytes, self.setup.slot_bytes),
            ("request_depth", request_depth, limits.request_depth),
            ("notify_window", notify_window, limits.notify_window),
            ("lanes", lanes.into(), self.lanes.len() as u32),
        ];
        if let Some(&(what, got, agreed)) = agreed.iter().find(|(_, got, agreed)| got != agreed) {
            return Err(TwoViolation::Parameters { what, got: got.into(), agreed: agreed.into() });
        }
        self.on_release(released_below)
    }

    fn on_release(&mut self, below: u64) -> Result<(), TwoViolation> {
        self.durable.inbox.release(below)?;
        // Those that had ended well were delivered with their end.
        self.after_arrival();
        self.durable.notes_in.release(below);
        Ok(())
    }

    /// An own transfer by its number; `None`: it has ended, and this comes late.
    fn own(&mut self, kind: Kind, transfer: u64, direction: Direction) -> Result<Option<u32>, TwoViolation> {
        let not_ours = TwoViolation::NotOurs { kind, transfer, direction };
        if transfer >= self.durable.outbox.next_id() {
            return Err(not_ours);
        }
        let Some(at) = self.durable.outbox.of_id(transfer) else {
            self.counters.late_answers += 1;
            return Ok(None);
        };
        if self.durable.outbox.get(at).direction != direction {
            return Err(not_ours);
        }
        Ok(Some(at))
    }

    fn check_chunks(&self, at: u32, got: u32) -> Result<(), TwoViolation> {
        let out = self.durable.outbox.get(at);
        // A READ's sender counts what it sent, in this epoch.
        let total = if out.direction == Direction::Write { out.reached } else { out.map.total() };
        if got > total { Err(TwoViolation::Chunks { transfer: out.id, got, total }) } else { Ok(()) }
    }

    fn on_ack(&mut self, now: Nanos, ack: &Ack) -> Result<(), TwoViolation> {
        if ack.direction == Direction::Read {
            return Ok(self.durable.inbox.read_done(ack.transfer)?);
        }
        if ack.status != Status::Ok {
            return self.on_refusal(Kind::DataAck, ack.transfer, ack.direction, ack.status, u32::MAX);
        }
        let Some(at) = self.own(Kind::DataAck, ack.transfer, ack.direction)? else { return Ok(()) };
        self.check_chunks(at, ack.chunks_done)?;
        let out = self.durable.outbox.get_mut(at);
        out.since = now;
        if ack.chunks_done == out.map.total() {
            self.complete_write(at);
        }
        Ok(())
    }

    fn on_refusal(
        &mut self,
        kind: Kind,
        transfer: u64,
        direction: Direction,
        status: Status,
        chunk: u32,
    ) -> Result<(), TwoViolation> {
        let Some(at) = self.own(kind, transfer, direction)? else { return Ok(()) };
        self.fail(at, XferFailure::Refused { status, chunk }, false);
        Ok(())
    }

    fn on_note(&mut self, after: u64, message: Vec<u8>) -> Result<(), TwoViolation> {
        if after == 0 {
            self.deliver(message);
            return Ok(());
        }
        let inbox = &self.durable.inbox;
        if after > inbox.announced() {
            let granted = inbox.announced() + 1;
            let not = crate::two_sided::inbox::TransferViolation::NotGranted { transfer: after, granted };
            return Err(not.into());
        }
        match inbox.outcome(after) {
            Some(true) => self.deliver(message),
            None if after >= inbox.floor() => self.durable.notes_in.hold(after, message),
            Some(false) | None => self.durable.notes_in.orphans += 1,
        }
        Ok(())
    }

    fn on_note_ack(&mut self, up_to: NotifySeq) -> Result<(), TwoViolation> {
        loop {
            match self.durable.notes_out.taken(up_to) {
                Ok(Some(owner)) => self.on_note_done(owner),
                Ok(None) => return Ok(()),
                Err(sent) => return Err(TwoViolation::NoteAck { got: up_to.0, sent }),
            }
        }
    }
}
