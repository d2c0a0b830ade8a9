//! Notifications as NOTIFY frames: pieces in order, taken once, handed over when their transfer is complete.
//!
//! The acknowledgement is the byte credit: a sender has at most [`NoteLimits::window_bytes`] unacknowledged, and the receiver
//! withholds it while too much waits for the host. So no counter has to survive an epoch, and a resend costs no credit twice.

use std::collections::{BTreeMap, VecDeque};

use super::codec::notify_bytes;
use crate::ids::{Nanos, NotifySeq};

/// What a notification costs besides its bytes.
pub const NOTE_OVERHEAD: u64 = 64;

/// Sizes and limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoteLimits {
    /// Longest message.
    pub message_bytes: u32,
    /// Bytes, [`NOTE_OVERHEAD`] each included, that may be unacknowledged; at least one longest message.
    pub window_bytes: u32,
    /// Above this many bytes that wait for the host, nothing is acknowledged.
    pub unpopped_bytes: u64,
}

/// When a notification is done for its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resolve {
    /// When its last frame has completed: it lies at the peer.
    Sent,
    /// When the peer has taken it.
    Taken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    Host { token: u64, resolve: Resolve },
    Transfer(u32),
}

#[derive(Debug)]
struct Note {
    seq: u64,
    owner: Owner,
    after: u64,
    message: Vec<u8>,
    deadline: Nanos,
    /// Bytes handed out in this epoch.
    handed: usize,
    resolved: bool,
}

impl Note {
    fn cost(&self) -> u64 {
        self.message.len() as u64 + NOTE_OVERHEAD
    }

    fn host_bytes(&self) -> u64 {
        if matches!(self.owner, Owner::Host { .. }) { self.message.len() as u64 } else { 0 }
    }
}

/// A piece to be sent.
pub(super) struct Piece<'a> {
    pub(super) seq: NotifySeq,
    pub(super) after: u64,
    pub(super) total_len: u32,
    pub(super) offset: u32,
    pub(super) bytes: &'a [u8],
    pub(super) last: bool,
}

/// The sender's half.
#[derive(Debug)]
pub(super) struct NotesOut {
    queue: VecDeque<Note>,
    /// Of the queue, handed out entirely in this epoch.
    whole: usize,
    next_seq: u64,
    /// Highest ever handed out entirely.
    highest: u64,
    unacked_bytes: u64,
    /// Messages of the host's notifications in the queue.
    host_bytes: u64,
    /// No notification that may expire does so before this; looked up anew when it comes, as the queue may be long.
    earliest: Nanos,
}

impl NotesOut {
    pub(super) fn new() -> NotesOut {
        NotesOut {
            queue: VecDeque::new(),
            whole: 0,
            next_seq: 1,
            highest: 0,
            unacked_bytes: 0,
            host_bytes: 0,
            earliest: Nanos(u64::MAX),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Bytes of the host's messages in it.
    pub(super) fn host_bytes(&self) -> u64 {
        self.host_bytes
    }

    /// Not yet handed out.
    pub(super) fn waiting(&self) -> usize {
        self.queue.len() - self.whole
    }

    pub(super) fn push(&mut self, owner: Owner, after: u64, message: Vec<u8>, deadline: Nanos) -> NotifySeq {
        let seq = self.next_seq;
        self.next_seq += 1;
        if matches!(owner, Owner::Host { .. }) {
            self.host_bytes += message.len() as u64;
            self.earliest = self.earliest.min(deadline);
        }
        self.queue.push_back(Note { seq, owner, after, message, deadline, handed: 0, resolved: false });
        NotifySeq(seq)
    }

    /// Whether a piece could go, as far as the window is concerned.
    pub(super) fn may_send(&self, window_bytes: u32) -> bool {
        self.queue
            .get(self.whole)
            .is_some_and(|note| note.handed > 0 || self.unacked_bytes + note.cost() <= window_bytes.into())
    }

    /// The next piece; [`NotesOut::handed`] follows.
    pub(super) fn peek(&self) -> Piece<'_> {
        let note = &self.queue[self.whole];
        let end = (note.handed + notify_bytes()).min(note.message.len());
        Piece {
            seq: NotifySeq(note.seq),
            after: note.after,
            total_len: note.message.len() as u32,
            offset: note.handed as u32,
            bytes: &note.message[note.handed..end],
            last: end == note.message.len(),
        }
    }

    /// That piece is being posted.
    pub(super) fn handed(&mut self) {
        let end = self.peek().offset as usize + self.peek().bytes.len();
        let note = &mut self.queue[self.whole];
        if note.handed == 0 {
            self.unacked_bytes += note.cost();
        }
        note.handed = end;
        if end == note.message.len() {
            self.whole += 1;
            self.highest = self.highest.max(note.seq);
        }
    }

    /// The last frame of a notification has completed; whose it was, the first time.
    pub(super) fn sent(&mut self, seq: u64) -> Option<Owner> {
        let at = self.queue.binary_search_by_key(&seq, |note| note.seq).ok()?;
        let note = &mut self.queue[at];
        if matches!(note.owner, Owner::Host { resolve: Resolve::Taken, .. }) || note.resolved {
            return None;
        }
        note.resolved = true;
        Some(note.owner)
    }

    /// The peer has taken all up to this; `Err`: among them some that it was never sent. Ask until `None`.
    pub(super) fn taken(&mut self, up_to: NotifySeq) -> Result<Option<Owner>, u64> {
        if up_to.0 > self.highest {
            return Err(self.highest);
        }
        while let Some(front) = self.queue.front().filter(|note| note.seq <= up_to.0) {
            let begun = self.whole > 0 || front.handed > 0;
            if self.whole == 0 && begun {
                // Taken in an earlier epoch and half resent in this one: the peer waits for the rest, and will say so again.
                break;
            }
            let note = self.queue.pop_front().expect("just looked at");
            self.host_bytes -= note.host_bytes();
            if begun {
                self.unacked_bytes -= note.cost();
                self.whole -= 1;
            }
            if !note.resolved {
                return Ok(Some(note.owner));
            }
        }
        Ok(None)
    }

    /// Takes out what nothing was sent of yet; `false`: it is under way.
    pub(super) fn withdraw(&mut self, owner: Owner) -> bool {
        let at = self.queue.iter().skip(self.whole).position(|note| note.owner == owner && note.handed == 0);
        // In an earlier epoch it may have been sent: then the peer may have it.
        let at = at.map(|at| self.whole + at).filter(|&at| self.queue[at].seq > self.highest);
        let note = at.and_then(|at| self.queue.remove(at));
        self.host_bytes -= note.as_ref().map_or(0, Note::host_bytes);
        note.is_some()
    }

    /// Whoever it was for has ended; nobody is told of it any more.
    pub(super) fn disown(&mut self, owner: Owner) {
        self.queue.iter_mut().filter(|note| note.owner == owner).for_each(|note| note.resolved = true);
    }

    /// Those of the host that nothing was sent of by their deadline.
    pub(super) fn expire(&mut self, now: Nanos) -> Vec<u64> {
        if now < self.earliest {
            return Vec::new();
        }
        let (whole, highest, host_bytes) = (self.whole, self.highest, &mut self.host_bytes);
        let mut expired = Vec::new();
        let mut nth = 0;
        self.queue.retain(|note| {
            nth += 1;
            match note.owner {
                Owner::Host { token, .. }
                    if nth > whole && note.handed == 0 && note.seq > highest && note.deadline <= now =>
                {
                    expired.push(token);
                    *host_bytes -= note.host_bytes();
                    false
                }
                _ => true,
            }
        });
        self.look_for_earliest();
        expired
    }

    fn look_for_earliest(&mut self) {
        let highest = self.highest;
        let unsent =
            |note: &&Note| matches!(note.owner, Owner::Host { .. }) && note.handed == 0 && note.seq > highest;
        let deadlines = self.queue.iter().skip(self.whole).filter(unsent).map(|note| note.deadline);
        self.earliest = deadlines.min().unwrap_or(Nanos(u64::MAX));
    }

    /// When [`NotesOut::expire`] is due; it may be earlier than anything expires.
    pub(super) fn next_deadline(&self) -> Option<Nanos> {
        (self.waiting() > 0 && self.earliest < Nanos(u64::MAX)).then_some(self.earliest)
    }

    /// The epoch is over: what was not taken is sent again in the next.
    pub(super) fn restart(&mut self) {
        (self.whole, self.unacked_bytes) = (0, 0);
        self.queue.iter_mut().for_each(|note| note.handed = 0);
        // What was begun and not sent whole may expire again.
        self.look_for_earliest();
    }

    /// The session is over: all that were not resolved.
    pub(super) fn abandon(&mut self) -> Vec<(u64, Vec<u8>)> {
        self.host_bytes = 0;
        let unresolved = self.queue.drain(..).filter(|note| !note.resolved);
        let of_host = unresolved.filter_map(|note| match note.owner {
            Owner::Host { token, .. } => Some((token, note.message)),
            Owner::Transfer(_) => None,
        });
        of_host.collect()
    }
}

/// What a NOTIFY frame cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoteViolation {
    /// Pieces out of order.
    #[error(
        "notification {got}: a piece at {offset} where {expected_offset} of notification {expected} follows"
    )]
    Piece {
        /// Told.
        got: u64,
        /// Told.
        offset: u32,
        /// Of which a piece was due (0: of a new one).
        expected: u64,
        /// Where.
        expected_offset: u32,
    },
    /// More than the window.
    #[error("notification {seq} of {len} bytes: {unacked} bytes unacknowledged, the window has {window}")]
    Window {
        /// Which.
        seq: u64,
        /// Its length.
        len: u32,
        /// Before it.
        unacked: u64,
        /// Limit.
        window: u32,
    },
}

#[derive(Debug)]
struct Partial {
    seq: u64,
    after: u64,
    total_len: u32,
    bytes: Vec<u8>,
}

/// The receiver's half.
#[derive(Debug)]
pub(super) struct NotesIn {
    limits: NoteLimits,
    partial: Option<Partial>,
    /// Highest taken.
    taken: u64,
    acked: u64,
    unacked_bytes: u64,
    /// Of transfers that are not complete.
    held: BTreeMap<u64, Vec<Vec<u8>>>,
    held_bytes: u64,
    unpopped_bytes: u64,
    pub(super) duplicates: u64,
    pub(super) orphans: u64,
}

impl NotesIn {
    pub(super) fn new(limits: NoteLimits) -> NotesIn {
        NotesIn {
            limits,
            partial: None,
            taken: 0,
            acked: 0,
            unacked_bytes: 0,
            held: BTreeMap::new(),
            held_bytes: 0,
            unpopped_bytes: 0,
            duplicates: 0,
            orphans: 0,
        }
    }

    /// A piece; `Some`: (transfer that it waits for, message), whole and new.
    pub(super) fn piece(
        &mut self,
        seq: NotifySeq,
        after: u64,
        total_len: u32,
        offset: u32,
        bytes: &[u8],
    ) -> Result<Option<(u64, Vec<u8>)>, NoteViolation> {
        let seq = seq.0;
        let expected = self.partial.as_ref().map_or((0, 0), |p| (p.seq, p.bytes.len() as u32));
        let wrong =
            NoteViolation::Piece { got: seq, offset, expected: expected.0, expected_offset: expected.1 };
        let mut partial = match self.partial.take() {
            Some(p) if (p.seq, p.after, p.total_len, expected.1) == (seq, after, total_len, offset) => p,
            Some(_) => return Err(wrong),
            None if offset != 0 => return Err(wrong),
            None => {
                let cost = u64::from(total_len) + NOTE_OVERHEAD;
                // A duplicate was counted when it came first.
                let fits = seq <= self.taken || self.unacked_bytes + cost <= self.limits.window_bytes.into();
                if !fits || total_len > self.limits.message_bytes {
                    let (unacked, window) = (self.unacked_bytes, self.limits.window_bytes);
                    return Err(NoteViolation::Window { seq, len: total_len, unacked, window });
                }
                Partial { seq, after, total_len, bytes: Vec::with_capacity(total_len as usize) }
            }
        };
        partial.bytes.extend_from_slice(bytes);
        if partial.bytes.len() < total_len as usize {
            self.partial = Some(partial);
            return Ok(None);
        }
        if seq <= self.taken {
            self.duplicates += 1;
            // Its acknowledgement was lost with the epoch.
            self.acked = self.acked.min(seq - 1);
            return Ok(None);
        }
        self.taken = seq;
        self.unacked_bytes += u64::from(total_len) + NOTE_OVERHEAD;
        Ok(Some((after, partial.bytes)))
    }

    /// Keeps a message until its transfer ends.
    pub(super) fn hold(&mut self, transfer: u64, message: Vec<u8>) {
        self.held_bytes += message.len() as u64 + NOTE_OVERHEAD;
        self.held.entry(transfer).or_default().push(message);
    }

    /// A transfer has ended: its messages, to be delivered or (it failed) dropped.
    pub(super) fn ended(&mut self, transfer: u64, well: bool) -> Vec<Vec<u8>> {
        let Some(messages) = self.held.remove(&transfer) else { return Vec::new() };
        self.held_bytes -= messages.iter().map(|m| m.len() as u64 + NOTE_OVERHEAD).sum::<u64>();
        if well {
            return messages;
        }
        self.orphans += messages.len() as u64;
        Vec::new()
    }

    /// Transfers below were released: nothing waits for them any more.
    pub(super) fn release(&mut self, below: u64) {
        while let Some((&transfer, _)) = self.held.first_key_value().filter(|(id, _)| **id < below) {
            self.ended(transfer, false);
        }
    }

    /// So many messages, of that many bytes together, wait for the host.
    pub(super) fn waits(&mut self, count: u64, bytes: u64) {
        self.unpopped_bytes += bytes + count * NOTE_OVERHEAD;
    }

    /// The host took them.
    pub(super) fn popped(&mut self, count: u64, bytes: u64) {
        self.unpopped_bytes = self.unpopped_bytes.saturating_sub(bytes + count * NOTE_OVERHEAD);
    }

    pub(super) fn withholds(&self) -> bool {
        self.unpopped_bytes + self.held_bytes > self.limits.unpopped_bytes
    }

    /// Whether an acknowledgement is due; `flush`: however little it tells.
    pub(super) fn ack_due(&self, flush: bool) -> bool {
        let enough = flush || self.unacked_bytes * 4 >= self.limits.window_bytes.into();
        self.acked < self.taken && enough && !self.withholds()
    }

    /// The acknowledgement is being sent.
    pub(super) fn ack(&mut self) -> NotifySeq {
        self.acked = self.taken;
        self.unacked_bytes = 0;
        NotifySeq(self.taken)
    }

    /// The epoch is over: the sender starts its window anew and resends what was not acknowledged.
    pub(super) fn restart(&mut self) {
        self.partial = None;
        self.unacked_bytes = 0;
    }
}
