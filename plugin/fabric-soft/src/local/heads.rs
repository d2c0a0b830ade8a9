//! Messages that are received in two steps: the head is pulled into its RECV's slot, the rest when its place is known.
//!
//! ```text
//! entries of the peer's ring:   head          head + entries kept here          tail
//!                                | heads are here, rests wait |  nothing yet  |
//! ```
//! What follows them in the ring waits, so `done` and the RECVs go on in order.

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use baton_fabric::{CompletionKind, Rest, Untaken, WcStatus};

use super::endpoint::{Endpoint, Link, Puller};
use super::inbound::{Guards, Stop};
use super::inner::{Inner, SLICE_BYTES};
use super::joint;
use super::pull::{Batch, Fault, MAX_KEYS};
use super::recv::RecvQueue;
use super::ring::{self, Entry, Ring};

/// A message whose head is here.
#[derive(Clone, Copy)]
struct Message {
    /// Entries of it, the head among them.
    cells: usize,
    head_bytes: u32,
    rest_bytes: u32,
}

impl Message {
    fn bytes(&self) -> u64 {
        u64::from(self.head_bytes) + u64::from(self.rest_bytes)
    }
}

/// Messages whose rests wait, oldest first, and their entries.
#[derive(Default)]
pub struct Heads {
    messages: VecDeque<Message>,
    entries: VecDeque<Entry>,
    bytes: u64,
}

impl Heads {
    /// For at most so many messages, most of them of two entries.
    pub fn with_room(messages: usize) -> Heads {
        Heads {
            messages: VecDeque::with_capacity(messages),
            entries: VecDeque::with_capacity(2 * messages + MAX_KEYS),
            bytes: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Bytes of the messages.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn push(&mut self, message: Message, entries: &[Entry]) {
        self.entries.extend(entries);
        self.bytes += message.bytes();
        self.messages.push_back(message);
    }

    fn pop(&mut self) -> Option<(Message, Entry)> {
        let message = self.messages.pop_front()?;
        let last = self.entries.drain(..message.cells).next_back().expect("a message has entries");
        self.bytes -= message.bytes();
        Some((message, last))
    }

    /// Keeps the first `count`, whose heads were pulled; completes their RECVs.
    pub fn finish(&mut self, count: usize, endpoint: &Endpoint, recv: &mut RecvQueue) {
        while self.messages.len() > count {
            let message = self.messages.pop_back().expect("it was counted");
            self.entries.truncate(self.entries.len() - message.cells);
            self.bytes -= message.bytes();
        }
        for message in &self.messages {
            let kind = CompletionKind::RecvHead { head_bytes: message.head_bytes };
            recv.complete(endpoint.id, kind, message.bytes() as u32);
        }
    }
}

/// The entries of the message that begins at `ordinal`. `None`: they are too many for one pull.
fn read(
    ring: &Ring,
    ordinal: u64,
    tail: u64,
    entries: &mut [Entry; MAX_KEYS],
) -> Result<Option<usize>, Stop> {
    for (n, place) in entries.iter_mut().enumerate() {
        // A message is published whole.
        if ordinal + n as u64 == tail {
            return Err(Stop::Nonsense);
        }
        let entry = ring.read(ordinal + n as u64).ok_or(Stop::Nonsense)?;
        if !entry.has(ring::SEND) || n > 0 && entry.has(ring::HEAD) {
            return Err(Stop::Nonsense);
        }
        *place = entry;
        if !entry.has(ring::MORE) {
            return Ok(Some(n + 1));
        }
    }
    Ok(None)
}

/// Puts the head of the message that begins at `ordinal` into the batch, if it is one that is received in two steps: the entries that it
/// has then. `None`: it is received like any other.
pub fn gather(
    (link, ordinal, tail): (&Link, u64, u64),
    (recv, ahead): (&RecvQueue, usize),
    puller: &mut Puller,
    guards: &mut Guards<'_>,
) -> Result<Option<u64>, Stop> {
    let mut entries = [Entry::default(); MAX_KEYS];
    let Some(cells) = read(&link.ring, ordinal, tail, &mut entries)? else { return Ok(None) };
    let bytes: u64 = entries[..cells].iter().map(|entry| u64::from(entry.len)).sum();
    let slot = recv.peek(ahead).ok_or(Stop::NoRecv)?;
    if bytes > u64::from(slot.len_bytes) {
        return Err(Stop::Refused(WcStatus::RemoteLength));
    }
    let head = entries[0];
    let rest_bytes = (bytes - u64::from(head.len)) as u32;
    if head.len == 0 || rest_bytes == 0 {
        return Ok(None);
    }
    match guards.hold(slot.local_key, slot.addr, u64::from(head.len), true, false) {
        Ok(Some(_)) => {}
        Ok(None) => return Err(Stop::Full),
        Err(_) => return Err(Stop::Refused(WcStatus::RemoteAccess)),
    }
    if !puller.batch.add(slot.addr, head.own_addr, key_of(&head), head.len as usize, None) {
        return Err(Stop::Full);
    }
    puller.heads.push(Message { cells, head_bytes: head.len, rest_bytes }, &entries[..cells]);
    Ok(Some(cells as u64))
}

fn key_of(entry: &Entry) -> u64 {
    if entry.has(ring::INLINE) { 0 } else { entry.own_key }
}

/// See [`baton_fabric::Fabric::take`].
pub fn take(inner: &Inner, endpoint: &Endpoint, rests: &[Rest]) -> (usize, Option<Untaken>) {
    let mut puller = endpoint.pull.lock();
    let outcome = match endpoint.live_link() {
        Some(link) if link.ring.begin_pull() => {
            let outcome = take_open(inner, endpoint, link, &mut puller, rests);
            link.ring.end_pull();
            outcome
        }
        _ => (0, Some(Untaken::Gone)),
    };
    endpoint.held.store(!puller.heads.is_empty(), Ordering::SeqCst);
    drop(puller);
    fence(Ordering::SeqCst);
    if endpoint.again.swap(false, Ordering::SeqCst) || endpoint.has_work() {
        inner.add_work(endpoint.id.slot);
    }
    outcome
}

/// The ring is announced busy and not closed.
fn take_open(
    inner: &Inner,
    endpoint: &Endpoint,
    link: &Link,
    puller: &mut Puller,
    rests: &[Rest],
) -> (usize, Option<Untaken>) {
    let Puller { batch, heads, .. } = puller;
    let bytes: usize =
        rests.iter().filter(|rest| rest.to.is_some()).map(|rest| rest.len_bytes as usize).sum();
    let (whole, fault) = match inner.joint.begin(bytes, &link.peer, &link.stamp) {
        Some(pull) => pull_jointly(inner, pull, heads, rests),
        None => pull_alone(inner, link, batch, heads, rests),
    };
    let dropped = fault == Some(Fault::OwnMemory);
    if !advance(inner, endpoint, link, puller, whole + usize::from(dropped)) {
        return (0, Some(Untaken::Gone));
    }
    let Some(fault) = fault else { return (whole, None) };
    inner.stats.faults.add(1);
    let why = match fault {
        Fault::OwnMemory => return (whole, Some(Untaken::Unmapped)),
        Fault::PeerMemory => WcStatus::LocalAccess,
        Fault::Gone => WcStatus::PeerGone,
    };
    inner.fail_inbound(endpoint, link, why);
    (whole, Some(Untaken::Gone))
}

/// In one call, on this thread. Returns how many messages are dealt with, and what is wrong with the next.
fn pull_alone(
    inner: &Inner,
    link: &Link,
    batch: &mut Batch,
    heads: &Heads,
    rests: &[Rest],
) -> (usize, Option<Fault>) {
    batch.clear();
    let mut asked = Asked::new(heads, rests);
    asked.fill(batch, SLICE_BYTES);
    let (done, fault) = if batch.len() == 0 {
        (0, None)
    } else {
        inner.stats.pulls.add(1);
        inner.stats.pull_pieces.add(batch.pieces() as u64);
        // SAFETY: the caller of `take` lets the places be overwritten until it returns; no part has a source.
        unsafe { batch.run(&link.peer, &link.stamp) }
    };
    let mut settled = Asked::new(heads, rests);
    settled.settle(asked.messages, done);
    (settled.messages, fault)
}

/// In several calls, which copy threads join in; as [`pull_alone`].
fn pull_jointly(
    inner: &Inner,
    mut pull: joint::Pull<'_>,
    heads: &Heads,
    rests: &[Rest],
) -> (usize, Option<Fault>) {
    let mut asked = Asked::new(heads, rests);
    'messages: while let Some((rest, entries)) = asked.peek() {
        if let Some(mut to) = rest.to {
            for entry in entries {
                // SAFETY: the caller of `take` lets the places be overwritten until it returns, which is after `finish`.
                if !unsafe { pull.add(to, entry.own_addr, key_of(entry), entry.len as usize) } {
                    break 'messages;
                }
                to = to.wrapping_add(u64::from(entry.len));
            }
        }
        pull.end_message();
        asked.step();
    }
    inner.stats.joint_pulls.add(1);
    let pulled = pull.finish(|| inner.pool.offer_joint(&inner.joint));
    inner.stats.pulls.add(pulled.calls as u64);
    inner.stats.pull_pieces.add(pulled.pieces as u64);
    (pulled.messages, pulled.fault)
}

/// Goes through messages and the rests that are asked for, in step.
struct Asked<'a> {
    heads: &'a Heads,
    rests: &'a [Rest],
    /// Those behind us, and their entries.
    messages: usize,
    entries: usize,
}

impl<'a> Asked<'a> {
    fn new(heads: &'a Heads, rests: &'a [Rest]) -> Asked<'a> {
        Asked { heads, rests, messages: 0, entries: 0 }
    }

    /// The next one, and the entries of its rest that hold bytes.
    fn peek(&self) -> Option<(&'a Rest, impl Iterator<Item = &'a Entry> + Clone + use<'a>)> {
        let (rest, message) = (self.rests.get(self.messages)?, self.heads.messages.get(self.messages)?);
        assert_eq!(rest.len_bytes, message.rest_bytes, "the rest of the message whose turn it is");
        let entries = self.heads.entries.range(self.entries + 1..self.entries + message.cells);
        Some((rest, entries.filter(|entry| entry.len != 0)))
    }

    fn step(&mut self) {
        self.entries += self.heads.messages[self.messages].cells;
        self.messages += 1;
    }

    /// Puts rests into the batch until it has so many bytes or no room.
    fn fill(&mut self, batch: &mut Batch, bytes: usize) {
        while batch.bytes() < bytes
            && let Some((rest, entries)) = self.peek()
        {
            if let Some(mut to) = rest.to {
                if !batch.has_room_for(entries.clone().map(key_of)) {
                    return;
                }
                for entry in entries {
                    let added = batch.add(to, entry.own_addr, key_of(entry), entry.len as usize, None);
                    assert!(added, "there was room for a message");
                    to = to.wrapping_add(u64::from(entry.len));
                }
            }
            self.step();
        }
    }

    /// Moves on to `end`, as far as messages are dealt with once `parts` have been copied; `false`: not so far.
    fn settle(&mut self, end: usize, mut parts: usize) -> bool {
        while self.messages < end
            && let Some((rest, entries)) = self.peek()
        {
            let needed = if rest.to.is_some() { entries.count() } else { 0 };
            if needed > parts {
                return false;
            }
            parts -= needed;
            self.step();
        }
        true
    }
}

/// Moves on behind `count` messages and tells the peer; `false`: either side has ended the connection, and nothing of it counts.
fn advance(inner: &Inner, endpoint: &Endpoint, link: &Link, puller: &mut Puller, count: usize) -> bool {
    let recv = endpoint.recv.lock();
    if !endpoint.is_connected() || link.ring.is_closed() {
        return false;
    }
    let mut signaled = false;
    for _ in 0..count {
        let (message, last) = puller.heads.pop().expect("it was counted");
        puller.head += message.cells as u64;
        puller.bulk_done = puller.bulk_done.wrapping_add(message.bytes());
        inner.stats.written_bytes.add(message.bytes());
        signaled |= last.has(ring::SIGNALED);
    }
    endpoint.served.store(puller.head, Ordering::Release);
    drop(recv);
    inner.tell_done(endpoint, link, puller.head, link.ring.tail(), signaled, false);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_all_there_and_has_one_head_in_front_or_it_is_nonsense() {
        let (_fd, ring) = Ring::create(32, 1).unwrap();
        let head = ring::SEND | ring::MORE | ring::HEAD;
        let more = ring::SEND | ring::MORE;
        let read = |flags: &[u32]| {
            for (n, &flags) in (5..).zip(flags) {
                ring.write(n, Entry { flags, len: 1, ..Entry::default() });
            }
            read(&ring, 5, 5 + flags.len() as u64, &mut [Entry::default(); MAX_KEYS])
        };
        assert_eq!(read(&[head, ring::SEND | ring::SIGNALED]), Ok(Some(2)));
        assert_eq!(read(&[head, more, more, ring::SEND, head]), Ok(Some(4)));
        let mut long = vec![more; MAX_KEYS];
        (long[0], long[MAX_KEYS - 1]) = (head, ring::SEND);
        assert_eq!(read(&long), Ok(Some(MAX_KEYS)));
        long.insert(1, more);
        assert_eq!(read(&long), Ok(None));
        for nonsense in [
            &[head][..],
            &[head, more],
            &[head, head, ring::SEND],
            &[head, more, 0],
            &[head, ring::IMM],
            &[head, ring::HEAD | ring::SEND],
            &[head, 1 << 30],
        ] {
            assert_eq!(read(nonsense), Err(Stop::Nonsense), "{nonsense:?}");
        }
    }
}
