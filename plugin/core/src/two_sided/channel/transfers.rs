//! Own transfers and notifications: from the host and back to it.

use std::sync::Arc;

use super::Channel;
use crate::ids::Nanos;
use crate::two_sided::chunks::{ChunkMap, ChunkSet, Piece};
use crate::two_sided::codec::{Direction, Status};
use crate::two_sided::notes::{Owner, Resolve};
use crate::two_sided::outbox::{Abort, Out};
use crate::two_sided::report::{TwoCancel, TwoEnd, TwoEvent, TwoSubmitError, XferFailure};
use crate::two_sided::setup::Ticket;

impl Channel {
    /// Takes a transfer over. Its pieces are not checked against regions here; the peer does that per chunk. `message` is delivered
    /// at the peer when the bytes are there (WRITE) or were read (READ).
    ///
    /// # Errors
    /// Nothing was taken over.
    pub fn submit(
        &mut self,
        now: Nanos,
        token: u64,
        direction: Direction,
        pieces: Arc<[Piece]>,
        message: Option<&[u8]>,
    ) -> Result<(), TwoSubmitError> {
        self.submit_cut(now, token, direction, ChunkMap::cut(pieces, self.chunk_bytes)?, message)
    }

    /// Bytes of a chunk.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// The same with pieces that were cut before, for [`Channel::chunk_bytes`]; others are cut anew.
    ///
    /// # Errors
    /// Nothing was taken over.
    pub fn submit_cut(
        &mut self,
        now: Nanos,
        token: u64,
        direction: Direction,
        map: ChunkMap,
        message: Option<&[u8]>,
    ) -> Result<(), TwoSubmitError> {
        self.check_message(message.unwrap_or_default())?;
        let (count, limit) = (self.durable.outbox.len() as u64, u64::from(self.setup.limits.max_transfers));
        if count >= limit {
            return Err(TwoSubmitError::TooMany { what: "transfers", count, limit });
        }
        let message_bytes = message.map_or(0, <[u8]>::len) as u64;
        let (bytes, limit) = (self.durable.outbox.message_bytes(), self.setup.limits.max_message_bytes);
        if message_bytes > 0 && bytes > 0 && bytes + message_bytes > limit {
            return Err(TwoSubmitError::TooManyBytes { what: "messages of transfers", bytes, limit });
        }
        let map = if map.chunk_bytes() == self.chunk_bytes {
            map
        } else {
            ChunkMap::cut(Arc::clone(map.pieces()), self.chunk_bytes)?
        };
        let empty = map.total() == 0;
        let small = map.bytes() <= self.setup.limits.small_bytes;
        let out = Out {
            token,
            direction,
            map,
            tells: message.is_some(),
            message_bytes,
            message: message.map(<[u8]>::to_vec),
            id: 0,
            next: 0,
            reached: 0,
            in_flight: 0,
            copying: 0,
            set: ChunkSet::default(),
            placed: 0,
            acked: empty,
            noted: false,
            note_done: false,
            silent: false,
            failure: None,
            told: false,
            abort: Abort::None,
            since: now,
            small,
        };
        let at = self.durable.outbox.insert(out).ok_or(TwoSubmitError::Token(token))?;
        self.counters.transfers_submitted += 1;
        if empty {
            self.queue_note(at, 0);
            self.settle(at);
        }
        Ok(())
    }

    /// Queues a notification; its end is an event. Given up at `deadline` if nothing of it was sent by then.
    ///
    /// # Errors
    /// Nothing was taken over.
    pub fn notify(
        &mut self,
        token: u64,
        message: &[u8],
        resolve: Resolve,
        deadline: Nanos,
    ) -> Result<(), TwoSubmitError> {
        self.check_message(message)?;
        let limit = u64::from(self.setup.limits.max_notifications);
        let count = self.durable.notes_out.len() as u64;
        if count >= limit {
            return Err(TwoSubmitError::TooMany { what: "notifications", count, limit });
        }
        let (bytes, limit) = (self.durable.notes_out.host_bytes(), self.setup.limits.max_notification_bytes);
        if bytes >= limit {
            return Err(TwoSubmitError::TooManyBytes { what: "notifications", bytes, limit });
        }
        self.adopt(token, message, resolve, deadline)
    }

    /// As [`Channel::notify`], for what was taken from the host while there was no session: however much waits, it must not be lost.
    ///
    /// # Errors
    /// The channel has ended, or the message is longer than the session permits.
    pub fn adopt(
        &mut self,
        token: u64,
        message: &[u8],
        resolve: Resolve,
        deadline: Nanos,
    ) -> Result<(), TwoSubmitError> {
        self.check_message(message)?;
        self.durable.notes_out.push(Owner::Host { token, resolve }, 0, message.to_vec(), deadline);
        Ok(())
    }

    fn check_message(&self, message: &[u8]) -> Result<(), TwoSubmitError> {
        if self.ended.is_some() {
            return Err(TwoSubmitError::Ended);
        }
        let limit = self.setup.limits.message_bytes;
        if message.len() > limit as usize {
            return Err(TwoSubmitError::MessageTooLong { len: message.len(), limit });
        }
        Ok(())
    }

    /// Gives a transfer up. Its event comes when no byte of it will move any more, here or at the peer.
    pub fn cancel(&mut self, token: u64) -> TwoCancel {
        let Some(at) = self.durable.outbox.find(token) else { return TwoCancel::NotFound };
        let out = self.durable.outbox.get(at);
        if out.failure.is_some() {
            return TwoCancel::Draining;
        }
        let (begun, moved, noted) = (out.id > 0, out.is_moved(), out.noted);
        if moved {
            if !(noted && self.durable.notes_out.withdraw(Owner::Transfer(at))) {
                return TwoCancel::TooLate;
            }
            // That its bytes are there may be told again, after a resend: it stays given up.
            self.durable.outbox.get_mut(at).silent = true;
        }
        self.fail(at, XferFailure::Canceled, begun && !moved);
        if begun && !moved { TwoCancel::Draining } else { TwoCancel::Canceled }
    }

    /// It has failed and sends nothing more; `abort`: the peer must say that no byte of it will land.
    pub(super) fn fail(&mut self, at: u32, failure: XferFailure, abort: bool) {
        self.durable.outbox.unqueue(at);
        let withdrawn = self.durable.notes_out.withdraw(Owner::Transfer(at));
        let out = self.durable.outbox.get_mut(at);
        out.silent |= withdrawn || out.tells && !out.noted;
        out.failure.get_or_insert(failure);
        if !abort {
            out.abort = Abort::Over;
            self.durable.outbox.aborts.retain(|&other| other != at);
        } else if out.abort == Abort::None {
            out.abort = Abort::Due;
            self.durable.outbox.aborts.push_back(at);
        }
        self.settle(at);
    }

    /// All chunks of a WRITE are at the peer.
    pub(super) fn complete_write(&mut self, at: u32) {
        self.durable.outbox.unqueue(at);
        self.durable.outbox.aborts.retain(|&other| other != at);
        let out = self.durable.outbox.get_mut(at);
        out.acked = true;
        out.next = out.map.total();
        let given_up = matches!(out.failure, Some(XferFailure::Canceled | XferFailure::Waited { .. }));
        if given_up && !out.silent && !out.told {
            // Given up too late: the bytes are there, and the peer has the notification or is about to. (Whoever was told already that it
            // failed waits for nothing.)
            out.failure = None;
        }
        if out.failure.is_some() {
            out.abort = Abort::Over;
        } else {
            let id = out.id;
            self.queue_note(at, id);
        }
        self.settle(at);
    }

    /// Its notification may go: the peer holds it until the transfer is complete there.
    pub(super) fn queue_note(&mut self, at: u32, after: u64) {
        let out = self.durable.outbox.get_mut(at);
        if out.noted {
            return;
        }
        if let Some(message) = out.message.take() {
            out.noted = true;
            self.durable.notes_out.push(Owner::Transfer(at), after, message, Nanos(u64::MAX));
        }
    }

    pub(super) fn on_note_done(&mut self, owner: Owner) {
        match owner {
            Owner::Host { token, .. } => self.events.push_back(TwoEvent::NoteDone { token, sent: true }),
            Owner::Transfer(at) => {
                self.durable.outbox.get_mut(at).note_done = true;
                self.settle(at);
            }
        }
    }

    /// Reports a transfer of which nothing is left to happen.
    pub(super) fn settle(&mut self, at: u32) {
        if !self.durable.outbox.get(at).is_over() {
            return;
        }
        let out = self.durable.outbox.remove(at);
        if out.failure.is_some() && out.noted {
            // The peer drops it with the transfer.
            self.durable.notes_out.disown(Owner::Transfer(at));
        }
        let result = out.failure.map_or(Ok(()), Err);
        match &result {
            Ok(()) => self.counters.transfers_done += 1,
            Err(_) => self.counters.transfers_failed += 1,
        }
        if !out.told {
            self.events.push_back(TwoEvent::XferDone { token: out.token, result });
        }
    }

    /// A chunk of an own READ was copied.
    pub(super) fn on_read_placed(&mut self, now: Nanos, ticket: Ticket, outcome: Result<(), Status>) {
        // It cannot end while a copy is under way.
        let at = self.durable.outbox.of_id(ticket.transfer).expect("a READ lives as long as its copies");
        let out = self.durable.outbox.get_mut(at);
        out.copying -= 1;
        out.since = now;
        match outcome {
            Err(status) => self.fail(at, XferFailure::CopyFailed { status, chunk: ticket.chunk }, true),
            Ok(()) => {
                out.placed += 1;
                if out.is_moved() && out.failure.is_none() {
                    let (id, total) = (out.id, out.map.total());
                    self.durable.outbox.read_acks.push_back((id, total));
                    self.queue_note(at, 0);
                }
                self.settle(at);
            }
        }
    }

    /// A chunk of an own READ did not come.
    pub(super) fn on_read_lost(&mut self, ticket: Ticket) {
        let at = self.durable.outbox.of_id(ticket.transfer).expect("a READ lives as long as its copies");
        let out = self.durable.outbox.get_mut(at);
        out.copying -= 1;
        out.set.remove(ticket.chunk);
        self.settle(at);
    }

    /// Fails what nothing happened to for too long, and says why.
    pub(super) fn check_waits(&mut self, now: Nanos) {
        let limit_ms = self.setup.limits.wait_ms;
        // Who waits for its turn behind others is not late as long as they get on.
        let since = |out: &Out| if out.id == 0 { out.since.max(self.last_sent) } else { out.since };
        let live = self.durable.outbox.live().map(|(at, out)| (at, now.since(since(out)) / 1_000_000));
        let late: Vec<(u32, u64)> = live.filter(|(_, waited_ms)| *waited_ms >= limit_ms).collect();
        for (at, waited_ms) in late {
            let out = self.durable.outbox.get(at);
            if out.failure.is_some() {
                let transfer = out.id;
                if out.abort == Abort::Sent {
                    self.end(TwoEnd::AbortUnanswered { transfer, waited_ms });
                }
                continue;
            }
            if out.is_moved() {
                continue;
            }
            let (begun, why) = (out.id > 0, self.why_it_waits(at));
            self.counters.waits_timed_out += 1;
            self.durable.outbox.get_mut(at).since = now;
            self.fail(at, XferFailure::Waited { waited_ms, why }, begun);
        }
        let since = Nanos(now.0.saturating_sub(limit_ms * 1_000_000));
        for transfer in self.durable.inbox.stale_reads(since) {
            self.counters.reads_timed_out += 1;
            self.durable.inbox.stop_serving(transfer, Status::Timeout, u32::MAX);
        }
    }
}
