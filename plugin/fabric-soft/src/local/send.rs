//! The send queue of an endpoint.
//!
//! ```text
//! ordinals:   drained      completed      started       posted         drained ≤ completed ≤ started ≤ posted
//!                | to be told |  under way    | waiting    |            posted ≤ drained + depth
//! ```
//!
//! A work request is one entry of the shared ring, a gathered SEND one for each piece; where the ring has no room for all of
//! them it waits. Work requests start and complete in order. WRITEs and SENDs start by going into the shared ring, READs by being left to
//! whoever pulls. The two kinds are never under way together: a READ starts when everything before it is done, and so does
//! what follows a READ. Hence `completed` is moved by the ring's `done` in a run of WRITEs and by the puller in a run of READs.

use baton_fabric::{Completion, CompletionKind, EndpointId, Sge, WcStatus};

use super::payload::{Payloads, Room};
use super::ring::{self, Entry, Ring, SHORT_BYTES, SHORT_ROOM_BYTES};
use crate::lists::Lists;

/// A posted work request.
#[derive(Clone, Copy, Default)]
pub struct Item {
    pub entry: Entry,
    /// Ledger sequence.
    pub seq: u64,
    /// List of the pieces of a gathered SEND, whose entry says how long they are together.
    pub list: Option<u32>,
}

/// See the module's text.
pub struct SendQueue {
    /// By ordinal, modulo its capacity; it grows to that with the first lap, so that an idle queue costs nothing.
    items: Vec<Item>,
    mask: u64,
    depth: u64,
    posted: u64,
    started: u64,
    completed: u64,
    drained: u64,
    /// Entries ever put into the shared ring, and how many of them are done.
    pushed: u64,
    ring_done: u64,
    /// Of those that are done, how many belong to the work request at `completed`.
    partly: u64,
    payloads: Payloads,
    /// In the shared ring.
    short: Room,
    lists: Lists,
    max_sge: u32,
    /// Bytes of READs posted and not completed.
    read_bytes: u64,
    /// READs, and WRITEs and SENDs, posted and not completed, as [`load`].
    read_load: u64,
    write_load: u64,
    /// What [`SendQueue::changes`] has told of the two.
    told: [u64; 2],
    /// Completions that [`SendQueue::drain`] will hand out.
    ready: u64,
    /// The queue is in error: nothing completes any more. The work request at `completed` ends with this status if it is set.
    ended: Option<Option<WcStatus>>,
}

/// What starting work requests led to.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Started {
    /// Entries are new in the ring: the peer must hear of it.
    pub pushed: bool,
    /// The work request whose turn it is was refused when it was posted.
    pub fault: bool,
}

/// What pieces are to whoever copies them, in bytes of a long one: a short one costs as much as two thousand bytes before the first.
pub fn load(pieces: u64, bytes: u64) -> u64 {
    2048 * pieces + bytes
}

impl SendQueue {
    pub fn new(depth: u64, max_sge: u32) -> std::io::Result<SendQueue> {
        let slots = depth.next_power_of_two();
        Ok(SendQueue {
            items: Vec::with_capacity(slots as usize),
            mask: slots - 1,
            depth,
            posted: 0,
            started: 0,
            completed: 0,
            drained: 0,
            pushed: 0,
            ring_done: 0,
            partly: 0,
            payloads: Payloads::new(slots)?,
            short: Room::with_depth(SHORT_ROOM_BYTES, slots),
            lists: Lists::default(),
            max_sge,
            read_bytes: 0,
            read_load: 0,
            write_load: 0,
            told: [0; 2],
            ready: 0,
            ended: None,
        })
    }

    fn item(&self, ordinal: u64) -> &Item {
        &self.items[(ordinal & self.mask) as usize]
    }

    /// Work requests that may be posted now.
    pub fn room(&mut self) -> u64 {
        // Completed ones that nobody is told of need no slot any more.
        while self.drained < self.completed && !self.item(self.drained).entry.has(ring::SIGNALED) {
            self.drained += 1;
        }
        self.depth - (self.posted - self.drained)
    }

    /// Appends a work request; there is room.
    pub fn push(&mut self, item: Item) {
        debug_assert!(self.posted - self.drained < self.depth, "the caller has asked for room");
        if item.entry.has(ring::READ) {
            self.read_bytes += u64::from(item.entry.len);
            self.read_load += load(1, item.entry.len.into());
        } else {
            self.write_load += load(1, item.entry.len.into());
        }
        let index = (self.posted & self.mask) as usize;
        if index == self.items.len() {
            self.items.push(item);
        } else {
            self.items[index] = item;
        }
        self.posted += 1;
    }

    /// Keeps a copy of the payload of the next work request to be pushed, which is `entry`: in the ring if it is short.
    /// `false`: it has no room.
    pub fn keep_payload(&mut self, ring: &Ring, entry: &mut Entry, payload: &[u8]) -> bool {
        let rounded = payload.len().next_multiple_of(8) as u64;
        let short = if payload.len() <= SHORT_BYTES { self.short.take(self.posted, rounded) } else { None };
        if let Some(offset) = short {
            entry.own_addr = ring.write_short(offset, payload);
            entry.own_key = offset;
            entry.flags |= ring::INLINE | ring::SHORT;
            return true;
        }
        let Some(addr) = self.payloads.keep(self.posted, payload) else { return false };
        entry.own_addr = addr;
        entry.flags |= ring::INLINE;
        true
    }

    /// Keeps the gather list of the next work request to be pushed.
    pub fn keep_list(&mut self, pieces: impl Iterator<Item = Sge>) -> u32 {
        self.lists.keep(pieces, self.max_sge as usize)
    }

    /// Entries of the ring that a work request takes.
    fn cells(&self, item: &Item) -> u64 {
        item.list.map_or(1, |list| self.lists.get(list).len() as u64)
    }

    /// Writes a work request into the ring.
    fn write(&mut self, ring: &Ring, item: &Item) {
        let Some(list) = item.list else {
            ring.write(self.pushed, item.entry);
            self.pushed += 1;
            return;
        };
        let pieces = self.lists.get(list);
        let mut head = item.entry.flags & ring::HEAD;
        for (left, piece) in (0..pieces.len()).rev().zip(pieces) {
            let last = item.entry.flags & !ring::HEAD;
            let flags = if left > 0 { ring::SEND | ring::MORE | std::mem::take(&mut head) } else { last };
            let (own_addr, own_key, len) = (piece.addr, piece.local_key, piece.len_bytes);
            ring.write(self.pushed, Entry { own_addr, own_key, len, flags, ..item.entry });
            self.pushed += 1;
        }
    }

    /// Starts what may start.
    pub fn start(&mut self, ring: &Ring) -> Started {
        let mut bytes = 0;
        let before = self.pushed;
        while self.started < self.posted && self.ended.is_none() {
            let item = *self.item(self.started);
            let entry = item.entry;
            let idle = self.started == self.completed;
            let reading = !idle && self.item(self.completed).entry.has(ring::READ);
            if entry.has(ring::FAULT) {
                break;
            }
            if entry.has(ring::READ) {
                if !idle && !reading {
                    break;
                }
            } else {
                if reading {
                    break;
                }
                if self.pushed + self.cells(&item) > self.ring_done + ring.depth() {
                    break;
                }
                self.write(ring, &item);
                bytes += u64::from(entry.len);
            }
            self.started += 1;
        }
        let pushed = self.pushed != before;
        if pushed {
            ring.publish(self.pushed, bytes);
        }
        let turn = self.started == self.completed && self.started < self.posted;
        let fault = turn && self.ended.is_none() && self.item(self.started).entry.has(ring::FAULT);
        Started { pushed, fault }
    }

    /// Takes over the ring's `done`; `false` if it is nonsense.
    pub fn absorb(&mut self, done: u64) -> bool {
        if done < self.ring_done || done > self.pushed {
            return false;
        }
        self.partly += done - self.ring_done;
        self.ring_done = done;
        while self.completed < self.started {
            let item = *self.item(self.completed);
            let cells = self.cells(&item);
            if item.entry.has(ring::READ) || self.partly < cells {
                break;
            }
            self.partly -= cells;
            self.complete(1);
        }
        true
    }

    /// The next `count` work requests have completed.
    fn complete(&mut self, count: u64) {
        for ordinal in self.completed..self.completed + count {
            let Item { entry, list, .. } = *self.item(ordinal);
            if let Some(list) = list {
                self.lists.give_back(list);
            }
            self.ready += u64::from(entry.has(ring::SIGNALED));
            if entry.has(ring::READ) {
                self.read_bytes -= u64::from(entry.len);
                self.read_load -= load(1, entry.len.into());
            } else {
                self.write_load -= load(1, entry.len.into());
            }
        }
        self.completed += count;
        self.payloads.free_before(self.completed);
        self.short.free_before(self.completed);
    }

    /// READs that may be pulled now, oldest first.
    pub fn reads(&self) -> impl Iterator<Item = &Entry> {
        let run = if self.ended.is_some() { 0..0 } else { self.completed..self.started };
        run.map(|ordinal| &self.item(ordinal).entry).take_while(|entry| entry.has(ring::READ))
    }

    /// Whether there are READs to pull.
    pub fn has_reads(&self) -> bool {
        self.reads().next().is_some()
    }

    /// Bytes of READs posted and not completed.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes
    }

    /// The load of READs posted and not completed.
    pub fn read_load(&self) -> u64 {
        self.read_load
    }

    /// By how much the outstanding load of WRITEs and of READs has changed since the last call, modulo 2^64.
    pub fn changes(&mut self) -> [u64; 2] {
        let now = if self.ended.is_some() { [0; 2] } else { [self.write_load, self.read_load] };
        let before = std::mem::replace(&mut self.told, now);
        [now[0].wrapping_sub(before[0]), now[1].wrapping_sub(before[1])]
    }

    /// The first `count` of [`SendQueue::reads`] are done.
    pub fn reads_done(&mut self, count: u64) {
        if self.ended.is_none() {
            self.complete(count);
        }
    }

    /// Whether anything is posted and not completed.
    pub fn is_outstanding(&self) -> bool {
        self.completed != self.posted
    }

    /// Nothing completes any more: the work request whose turn it is ends with `status`, all others are flushed.
    pub fn end(&mut self, status: Option<WcStatus>) {
        if self.ended.is_none() {
            self.ended = Some(status);
            self.ready += self.posted - self.completed;
        }
    }

    /// Whether [`SendQueue::drain`] has something.
    pub fn is_ready(&self) -> bool {
        self.ready != 0
    }

    /// Hands out completions.
    pub fn drain(&mut self, endpoint: EndpointId, out: &mut [Completion]) -> usize {
        let mut n = 0;
        while n < out.len() && self.ready != 0 {
            let item = *self.item(self.drained);
            let status = match self.ended {
                _ if self.drained < self.completed => WcStatus::Success,
                Some(Some(status)) if self.drained == self.completed => status,
                _ => WcStatus::Flushed,
            };
            if status != WcStatus::Success || item.entry.has(ring::SIGNALED) {
                out[n] =
                    Completion { endpoint, kind: CompletionKind::Send, status, seq: item.seq, len_bytes: 0 };
                n += 1;
                self.ready -= 1;
            }
            self.drained += 1;
        }
        n
    }

    /// Numbers for `stats`: posted, started, completed.
    pub fn counts(&self) -> (u64, u64, u64) {
        (self.posted, self.started, self.completed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: EndpointId = EndpointId { slot: 1, generation: 2 };

    fn item(seq: u64, flags: u32) -> Item {
        Item { entry: Entry { flags, len: 10, ..Entry::default() }, seq, list: None }
    }

    fn drained(queue: &mut SendQueue) -> Vec<(u64, WcStatus)> {
        let mut out = [Completion::EMPTY; 32];
        let n = queue.drain(ENDPOINT, &mut out);
        out[..n].iter().map(|c| (c.seq, c.status)).collect()
    }

    #[test]
    fn reads_and_writes_are_never_under_way_together() {
        let (_fd, ring) = Ring::create(16, 1).unwrap();
        let mut queue = SendQueue::new(16, 1).unwrap();
        for (seq, flags) in [0, 0, ring::READ, ring::READ, ring::SIGNALED].into_iter().enumerate() {
            queue.push(item(seq as u64, flags));
        }
        assert_eq!(queue.start(&ring), Started { pushed: true, fault: false });
        assert_eq!((ring.tail(), queue.has_reads()), (2, false));
        assert!(queue.absorb(1));
        queue.start(&ring);
        assert!(!queue.has_reads());
        assert!(queue.absorb(2));
        queue.start(&ring);
        assert_eq!((ring.tail(), queue.reads().count()), (2, 2));
        queue.reads_done(1);
        assert!(!queue.start(&ring).pushed);
        queue.reads_done(1);
        assert!(queue.start(&ring).pushed);
        assert!(drained(&mut queue).is_empty());
        assert!(queue.absorb(3) && !queue.absorb(4) && !queue.absorb(2));
        assert_eq!(drained(&mut queue), [(4, WcStatus::Success)]);
        assert_eq!((queue.room(), queue.read_bytes()), (16, 0));
    }

    #[test]
    fn an_error_completes_its_own_request_and_flushes_the_rest() {
        let (_fd, ring) = Ring::create(8, 1).unwrap();
        let mut queue = SendQueue::new(8, 1).unwrap();
        for (seq, flags) in [ring::SIGNALED, 0, 0, ring::READ, ring::SIGNALED].into_iter().enumerate() {
            queue.push(item(seq as u64, flags));
        }
        queue.start(&ring);
        assert!(queue.absorb(2));
        queue.end(Some(WcStatus::RemoteAccess));
        queue.end(None);
        let expected = [
            (0, WcStatus::Success),
            (2, WcStatus::RemoteAccess),
            (3, WcStatus::Flushed),
            (4, WcStatus::Flushed),
        ];
        assert_eq!(drained(&mut queue), expected);
        assert!(!queue.is_ready());
    }

    #[test]
    fn a_refused_request_waits_for_its_turn() {
        let (_fd, ring) = Ring::create(8, 1).unwrap();
        let mut queue = SendQueue::new(8, 1).unwrap();
        queue.push(item(0, 0));
        queue.push(item(1, ring::FAULT));
        queue.push(item(2, 0));
        assert_eq!(queue.start(&ring), Started { pushed: true, fault: false });
        assert!(queue.absorb(1));
        assert_eq!(queue.start(&ring), Started { pushed: false, fault: true });
        assert_eq!(ring.tail(), 1);
    }
}
