//! What came of work requests and of copies.

use std::collections::VecDeque;

use baton_fabric::{Completion, CompletionKind, WcStatus};

use super::Channel;
use super::port::Cargo;
use crate::ids::Nanos;
use crate::ledger::Ledger;
use crate::two_sided::codec::{Direction, Status};
use crate::two_sided::outbox::Flow;
use crate::two_sided::pool::Pool;
use crate::two_sided::report::{TwoEnd, TwoEvent, TwoViolation, XferFailure};
use crate::two_sided::setup::{Source, Ticket, TwoMemory};

impl Channel {
    /// A completion of one of the channel's endpoints; others are counted and ignored. Still to be called while the epoch is being
    /// drained: what succeeded on the way counts.
    pub fn on_completion(&mut self, now: Nanos, done: &Completion, mem: &dyn TwoMemory, pool: &mut Pool) {
        if done.kind == CompletionKind::RecvMore {
            return;
        }
        let lane = self.lanes.iter().position(|lane| lane.endpoint == done.endpoint);
        if lane.is_none() && done.endpoint != self.control.endpoint {
            self.counters.late_completions += 1;
            return;
        }
        if done.status == WcStatus::Success {
            self.last_progress = now;
        }
        match (done.kind, lane) {
            (CompletionKind::Send, lane) => self.on_sent(now, lane, done, pool),
            (CompletionKind::RecvSend | CompletionKind::RecvHead { .. }, lane)
                if done.status == WcStatus::Success =>
            {
                if self.deaf {
                    self.counters.late_completions += 1;
                    return;
                }
                let outcome = match lane {
                    Some(lane) => self.on_message(now, lane, done, mem, pool),
                    None => self.on_control(now, done, mem),
                };
                match outcome {
                    Ok(()) => self.after_arrival(),
                    Err(TwoEnd::Violation(violation)) => self.violate(violation),
                    Err(other) => self.end(other),
                }
            }
            (CompletionKind::RecvImm(_), _) if done.status == WcStatus::Success => {
                self.violate(TwoViolation::Immediate { endpoint: done.endpoint });
            }
            _ => self.end(TwoEnd::WorkFailed { endpoint: done.endpoint, status: done.status }),
        }
    }

    /// WRITEs of the peer have ended: what waited for them is delivered or dropped.
    pub(super) fn after_arrival(&mut self) {
        let mut ended = std::mem::take(&mut self.durable.inbox.ended);
        for (transfer, well) in ended.drain(..) {
            for message in self.durable.notes_in.ended(transfer, well) {
                self.deliver(message);
            }
        }
        // Its room is used again.
        self.durable.inbox.ended = ended;
    }

    pub(super) fn deliver(&mut self, message: Vec<u8>) {
        self.durable.notes_in.waits(1, message.len() as u64);
        self.counters.notes_delivered += 1;
        self.events.push_back(TwoEvent::Delivered { message });
    }

    fn on_sent(&mut self, now: Nanos, lane: Option<usize>, done: &Completion, pool: &mut Pool) {
        let retired = match self.send_queue(lane).0.retire(done.seq) {
            Ok(n) => n,
            Err(error) => return self.end(TwoEnd::BadCompletion { endpoint: done.endpoint, error }),
        };
        for nth in 1..=retired {
            let cargo = self.send_queue(lane).1.pop_front().expect("one flight per entry");
            if let (Some(lane), Cargo::Data { len_bytes, .. }) = (lane, &cargo) {
                self.lanes[lane].flight_bytes -= u64::from(*len_bytes);
            }
            // RC completes in order: only the last one can have failed.
            let status = if nth == retired { done.status } else { WcStatus::Success };
            self.on_cargo(now, cargo, status, pool);
        }
        if done.status != WcStatus::Success {
            self.end(TwoEnd::WorkFailed { endpoint: done.endpoint, status: done.status });
        }
    }

    fn send_queue(&mut self, lane: Option<usize>) -> (&mut Ledger, &mut VecDeque<Cargo>) {
        match lane.map(|lane| &mut self.lanes[lane]) {
            Some(lane) => (&mut lane.ledger, &mut lane.flights),
            None => (&mut self.control.ledger, &mut self.control.flights),
        }
    }

    pub(super) fn on_cargo(&mut self, now: Nanos, cargo: Cargo, status: WcStatus, pool: &mut Pool) {
        match cargo {
            Cargo::Credit => self.control.credit_in_flight -= 1,
            Cargo::Frame | Cargo::Nop => {}
            Cargo::Note { seq } if status == WcStatus::Success => {
                if let Some(owner) = self.durable.notes_out.sent(seq) {
                    self.on_note_done(owner);
                }
            }
            Cargo::Note { .. } => {}
            Cargo::Data { flows, source, .. } => {
                self.give_back(source, pool);
                for &flow in flows.as_slice() {
                    self.on_message_done(now, flow, status);
                }
            }
        }
    }

    fn give_back(&mut self, source: Source, pool: &mut Pool) {
        match source {
            Source::Slot(slot) => {
                pool.sent(slot);
                self.sending -= 1;
                self.send_starved = false;
                self.slots_came_back();
            }
            Source::Gather(prefix) => self.prefixes.push(prefix),
            Source::Bare => {}
        }
    }

    fn on_message_done(&mut self, now: Nanos, flow: Flow, status: WcStatus) {
        match flow {
            Flow::Serve(transfer) => {
                if status == WcStatus::LocalAccess {
                    self.durable.inbox.stop_serving(transfer, Status::CopyFailed, u32::MAX);
                }
                self.durable.inbox.served(transfer);
            }
            Flow::Own(at) => {
                let out = self.durable.outbox.get_mut(at);
                out.in_flight -= 1;
                out.since = now;
                if status == WcStatus::LocalAccess {
                    let failure = XferFailure::CopyFailed { status: Status::CopyFailed, chunk: u32::MAX };
                    self.fail(at, failure, true);
                } else {
                    self.settle(at);
                }
            }
        }
    }

    /// A copy has ended.
    pub fn on_placed(
        &mut self,
        now: Nanos,
        ticket: Ticket,
        len: u32,
        outcome: Result<(), Status>,
        pool: &mut Pool,
    ) {
        self.copies -= 1;
        if pool.placed(ticket.slot) {
            self.slots_came_back();
        }
        if outcome.is_ok() {
            self.counters.bytes_placed += u64::from(len);
        }
        match ticket.direction {
            Direction::Write => {
                self.durable.inbox.placed(ticket.transfer, ticket.chunk, outcome);
                self.after_arrival();
            }
            Direction::Read => self.on_read_placed(now, ticket, outcome),
        }
    }

    /// The rest of a message was not wanted any more, or will not come because its endpoint is in error: what it belongs to is as if it had
    /// not been sent.
    pub fn on_lost(&mut self, ticket: Ticket, pool: &mut Pool) {
        self.copies -= 1;
        self.counters.rests_lost += 1;
        if pool.placed(ticket.slot) {
            self.slots_came_back();
        }
        match ticket.direction {
            Direction::Write => {
                self.durable.inbox.lost(ticket.transfer, ticket.chunk);
                self.after_arrival();
            }
            Direction::Read => self.on_read_lost(ticket),
        }
    }

    /// Whether a rest that was handed out and has not come is still wanted: its transfer may have failed meanwhile, or been given up.
    #[must_use]
    pub fn wants(&self, ticket: &Ticket) -> bool {
        match ticket.direction {
            Direction::Write => self.durable.inbox.wants(ticket.transfer),
            Direction::Read => {
                let outbox = &self.durable.outbox;
                outbox.of_id(ticket.transfer).is_some_and(|at| outbox.get(at).failure.is_none())
            }
        }
    }
}
