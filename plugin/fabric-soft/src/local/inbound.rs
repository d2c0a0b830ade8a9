//! Serving the peer's ring: its WRITEs and SENDs are pulled into this side's memory.

use std::sync::atomic::Ordering;
use std::time::Instant;

use baton_fabric::{CompletionKind, WcStatus};

use super::endpoint::{Endpoint, Link, Puller};
use super::heads;
use super::inner::{Inner, Moved};
use super::pull::{Batch, Fault, MAX_KEYS};
use super::recv::RecvQueue;
use super::ring::{self, Entry, SHORT_BYTES};
use super::shared::Lookup;
use crate::regions::{Guard, Regions};
use crate::store::store;

/// Guards of one batch: one per region, however many work requests touch it.
pub struct Guards<'a> {
    regions: &'a Regions,
    held: [Option<(u64, Guard<'a>)>; MAX_KEYS],
}

/// What is known of a region that is held.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    /// A sealed file.
    pub shared: bool,
    /// The engine's own memory.
    pub mapped: bool,
}

impl Held {
    fn of(guard: &Guard<'_>) -> Held {
        Held { shared: guard.is_shared(), mapped: guard.is_mapped() }
    }
}

impl<'a> Guards<'a> {
    pub fn new(regions: &'a Regions) -> Guards<'a> {
        Guards { regions, held: [const { None }; MAX_KEYS] }
    }

    /// Holds the region for an access, and tells what it is; `Ok(None)` if the batch has to end first.
    pub fn hold(
        &mut self,
        key: u64,
        addr: u64,
        len: u64,
        write: bool,
        remote: bool,
    ) -> Result<Option<Held>, WcStatus> {
        for slot in &mut self.held {
            match slot {
                Some((held, guard)) if *held == key => {
                    let allowed =
                        if remote { guard.permits(addr, len, write) } else { guard.covers(addr, len) };
                    let refusal = if remote { WcStatus::RemoteAccess } else { WcStatus::LocalAccess };
                    return if allowed { Ok(Some(Held::of(guard))) } else { Err(refusal) };
                }
                Some(_) => {}
                None => {
                    let guard = if remote {
                        self.regions.access_remote(key, addr, len, write)
                    } else {
                        self.regions.access_local(key, addr, len, write)
                    }?;
                    let held = Held::of(&guard);
                    *slot = Some((key, guard));
                    return Ok(Some(held));
                }
            }
        }
        Ok(None)
    }
}

/// Why gathering stopped before the end of the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Enough for one call, or the end of the ring.
    Full,
    /// The next entry waits for a RECV.
    NoRecv,
    /// The next entry is refused.
    Refused(WcStatus),
    /// The ring holds nonsense.
    Nonsense,
}

/// Entries gathered for one call.
struct Gathered {
    stop: Stop,
    /// Bytes of the last entry that stay for the next call.
    cut: u64,
    /// Bytes that were taken out of the ring.
    placed: u64,
}

/// Does up to `budget` bytes of the peer's work.
pub fn serve(inner: &Inner, endpoint: &Endpoint, puller: &mut Puller, budget: usize) -> Moved {
    let Some(link) = endpoint.live_link() else { return Moved::NOTHING };
    if !puller.heads.is_empty() {
        return Moved::NOTHING;
    }
    let tail = link.ring.tail();
    if tail == puller.head {
        return Moved::NOTHING;
    }
    if tail.wrapping_sub(puller.head) > link.ring.depth() {
        inner.stats.violations.add(1);
        inner.fail_inbound(endpoint, link, WcStatus::PeerGone);
        return Moved::NOTHING;
    }
    if !link.ring.begin_pull() {
        return Moved::NOTHING;
    }
    let moved = serve_open(inner, endpoint, link, puller, tail, budget);
    link.ring.end_pull();
    moved
}

/// The ring is announced busy and not closed.
fn serve_open(
    inner: &Inner,
    endpoint: &Endpoint,
    link: &Link,
    puller: &mut Puller,
    tail: u64,
    budget: usize,
) -> Moved {
    let mut guards = Guards::new(&inner.regions);
    let mut sources = Lookup::new(&link.peer, &inner.stats);
    let gathered = gather(endpoint, link, puller, tail, budget, &mut guards, &mut sources);
    let parts = puller.batch.len();
    let (done, fault) = if parts == 0 {
        (0, None)
    } else {
        inner.stats.pulls.add(1);
        inner.stats.pull_pieces.add(puller.batch.pieces() as u64);
        inner.stats.shared_bytes.add(puller.batch.shared_bytes() as u64);
        // SAFETY: `guards` holds every region that the batch writes to until the call is over; those named with a source are
        // managed memory, mapped as long as they are registered.
        unsafe { puller.batch.run(&link.peer, &link.stamp) }
    };
    let bytes = puller.batch.bytes() + gathered.placed as usize;
    let whole = done == parts && fault.is_none();
    let finished = finish(endpoint, link, puller, &gathered, done);
    drop(guards);
    inner.stats.written_bytes.add(if whole { bytes as u64 } else { 0 });
    let Some(finished) = finished else { return Moved::NOTHING };
    inner.tell_done(endpoint, link, puller.head, tail, finished.signaled, finished.received);

    if !whole {
        inner.stats.faults.add(1);
    }
    let failure = match fault {
        Some(Fault::PeerMemory) => Some(WcStatus::LocalAccess),
        Some(Fault::OwnMemory) => Some(WcStatus::RemoteAccess),
        Some(Fault::Gone) => Some(WcStatus::PeerGone),
        // A part of the batch is left: the next call looks at the rest again.
        None if !whole => None,
        None => match gathered.stop {
            Stop::Refused(status) => {
                inner.stats.refused.add(1);
                Some(status)
            }
            Stop::Nonsense => {
                inner.stats.violations.add(1);
                Some(WcStatus::PeerGone)
            }
            Stop::NoRecv => stall(inner, endpoint, puller),
            Stop::Full => None,
        },
    };
    if let Some(status) = failure {
        inner.fail_inbound(endpoint, link, status);
        return Moved { bytes, more: false };
    }
    let more = puller.head != link.ring.tail() && puller.stalled.is_none() && puller.heads.is_empty();
    Moved { bytes, more }
}

/// Copies entries out of the ring, checks them, and puts what must be pulled into the batch.
fn gather(
    endpoint: &Endpoint,
    link: &Link,
    puller: &mut Puller,
    tail: u64,
    budget: usize,
    guards: &mut Guards<'_>,
    sources: &mut Lookup<'_>,
) -> Gathered {
    puller.batch.clear();
    puller.entries.clear();
    // A little more than the budget is taken when that saves the next call.
    let waiting = link.ring.bulk().wrapping_sub(puller.bulk_done);
    let budget = if waiting <= 2 * budget as u64 { 2 * budget } else { budget };
    let recv = endpoint.recv.lock();
    let mut recvs = 0;
    let mut message = puller.message;
    let mut ordinal = puller.head;
    let (mut cut, mut placed) = (0, 0);
    let takes_heads = endpoint.heads.load(Ordering::Relaxed);
    let stop = loop {
        let bytes = puller.batch.bytes() as u64 + placed + puller.heads.bytes();
        let spent = bytes >= budget as u64 || puller.entries.len() == puller.entries.capacity();
        if ordinal == tail || spent || cut != 0 {
            break Stop::Full;
        }
        let Some(mut entry) = link.ring.read(ordinal) else { break Stop::Nonsense };
        let offset = if ordinal == puller.head { puller.head_offset } else { 0 };
        let no_message = !entry.has(ring::SEND) || entry.has(ring::HEAD);
        if offset > u64::from(entry.len) || message.is_some() && no_message {
            break Stop::Nonsense;
        }
        if entry.has(ring::HEAD) && takes_heads {
            match heads::gather((link, ordinal, tail), (&recv, recvs), puller, guards) {
                Ok(Some(cells)) => {
                    (ordinal, recvs) = (ordinal + cells, recvs + 1);
                    continue;
                }
                Ok(None) => {}
                Err(stop) => break stop,
            }
        }
        if !puller.heads.is_empty() {
            // It comes after their rests.
            break Stop::Full;
        }
        let held = match aim(&mut entry, (&recv, recvs), message.unwrap_or(0), guards) {
            Ok(held) => held,
            Err(stop) => break stop,
        };
        if let Some(held) = held {
            let left = u64::from(entry.len) - offset;
            if offset == 0 && puller.batch.len() == 0 && place_short(link, &mut entry, held) {
                placed += left;
            } else {
                let take = left.min(budget as u64 - bytes);
                let mapped = held.shared && entry.has(ring::SHARED);
                if !pull_later(&mut puller.batch, &entry, (offset, take), sources, mapped) {
                    break Stop::Full;
                }
                cut = left - take;
            }
        }
        message = entry.has(ring::MORE).then(|| message.unwrap_or(0) + u64::from(entry.len));
        recvs += usize::from(entry.has(ring::IMM | ring::SEND) && message.is_none());
        puller.entries.push(entry);
        ordinal += 1;
    };
    let waits = stop == Stop::NoRecv && puller.entries.is_empty() && puller.heads.is_empty();
    if !waits {
        puller.stalled = None;
    }
    // Under the lock of the RECVs, so that one that comes now finds the mark.
    endpoint.stalled.store(waits, Ordering::SeqCst);
    Gathered { stop, cut, placed }
}

/// Finds out where an entry goes and holds that memory; nothing if it has no bytes.
fn aim(
    entry: &mut Entry,
    (recv, ahead): (&RecvQueue, usize),
    begun: u64,
    guards: &mut Guards<'_>,
) -> Result<Option<Held>, Stop> {
    let remote = destination(entry, recv, ahead, begun)?;
    if entry.len == 0 {
        return Ok(None);
    }
    match guards.hold(entry.peer_key, entry.peer_addr, u64::from(entry.len), true, remote) {
        Ok(Some(held)) => Ok(Some(held)),
        Ok(None) => Err(Stop::Full),
        Err(_) => Err(Stop::Refused(WcStatus::RemoteAccess)),
    }
}

/// Takes a short payload of the engine's own memory out of the ring, if it is one. Nothing in front of it may still have to be pulled.
fn place_short(link: &Link, entry: &mut Entry, held: Held) -> bool {
    let short = held.mapped && entry.has(ring::SHORT);
    if short {
        // SAFETY: the engine's own memory, whose guard the caller holds and has asked for these bounds.
        unsafe { store(entry.peer_addr, link.ring.read_short(entry, &mut [0; SHORT_BYTES])) };
        entry.flags |= ring::PLACED;
    }
    short
}

/// Puts `take` bytes of an entry from an offset on into the batch; `false` if it has no room for them.
fn pull_later(
    batch: &mut Batch,
    entry: &Entry,
    (offset, take): (u64, u64),
    sources: &mut Lookup<'_>,
    mapped: bool,
) -> bool {
    let key = if entry.has(ring::INLINE) { 0 } else { entry.own_key };
    let (to, from) = (entry.peer_addr + offset, entry.own_addr.wrapping_add(offset));
    let source = if mapped { sources.source(key) } else { None };
    batch.add(to, from, key, take as usize, source)
}

/// Checks an entry against the RECVs; a SEND is given its slot as target, behind the `begun` bytes of it that are there already.
/// `true`: the target is named by the peer.
fn destination(entry: &mut Entry, recv: &RecvQueue, ahead: usize, begun: u64) -> Result<bool, Stop> {
    if !entry.has(ring::IMM | ring::SEND) {
        return Ok(true);
    }
    let slot = recv.peek(ahead).ok_or(Stop::NoRecv)?;
    if !entry.has(ring::SEND) {
        return Ok(true);
    }
    if begun + u64::from(entry.len) > u64::from(slot.len_bytes) {
        return Err(Stop::Refused(WcStatus::RemoteLength));
    }
    entry.peer_addr = slot.addr + begun;
    entry.peer_key = slot.local_key;
    Ok(false)
}

/// What the entries that are now done mean for others.
struct Finished {
    signaled: bool,
    received: bool,
}

/// Consumes RECVs and moves on, as far as the pull got. Nothing of it happens once either side has ended the connection.
fn finish(
    endpoint: &Endpoint,
    link: &Link,
    puller: &mut Puller,
    gathered: &Gathered,
    parts: usize,
) -> Option<Finished> {
    let mut recv = endpoint.recv.lock();
    if !endpoint.is_connected() || link.ring.is_closed() {
        return None;
    }
    let mut left = parts;
    let mut finished = Finished { signaled: false, received: false };
    let last = puller.entries.len();
    for (i, entry) in puller.entries.iter().enumerate() {
        if entry.has(ring::PLACED) {
            puller.bulk_done = puller.bulk_done.wrapping_add(u64::from(entry.len));
        } else if entry.len != 0 {
            if left == 0 {
                break;
            }
            left -= 1;
            let skipped = puller.head_offset;
            if i + 1 == last && gathered.cut != 0 {
                let taken = u64::from(entry.len) - skipped - gathered.cut;
                puller.head_offset += taken;
                puller.bulk_done = puller.bulk_done.wrapping_add(taken);
                break;
            }
            puller.bulk_done = puller.bulk_done.wrapping_add(u64::from(entry.len) - skipped);
        }
        let len = puller.message.unwrap_or(0) + u64::from(entry.len);
        puller.message = entry.has(ring::MORE).then_some(len);
        if entry.has(ring::MORE) {
            // The slot is full when the last of them is.
        } else if entry.has(ring::SEND) {
            recv.complete(endpoint.id, CompletionKind::RecvSend, len as u32);
        } else if entry.has(ring::IMM) {
            recv.complete(endpoint.id, CompletionKind::RecvImm(entry.imm), entry.len);
        }
        finished.received |= entry.has(ring::SEND | ring::IMM) && puller.message.is_none();
        finished.signaled |= entry.has(ring::SIGNALED);
        puller.head += 1;
        puller.head_offset = 0;
    }
    // Their parts come last.
    let Puller { heads, .. } = puller;
    heads.finish(heads.len().min(left), endpoint, &mut recv);
    finished.received |= !heads.is_empty();
    endpoint.held.store(!heads.is_empty(), Ordering::SeqCst);
    endpoint.served.store(puller.head, Ordering::Release);
    Some(finished)
}

/// The next entry has no RECV: waits a while, then refuses it.
fn stall(inner: &Inner, endpoint: &Endpoint, puller: &mut Puller) -> Option<WcStatus> {
    if !endpoint.stalled.load(Ordering::SeqCst) {
        return None;
    }
    let now = Instant::now();
    let since = *puller.stalled.get_or_insert_with(|| {
        inner.stats.rnr_waits.add(1);
        now
    });
    if now.duration_since(since) >= inner.config.rnr_wait {
        inner.stats.rnr_exceeded.add(1);
        return Some(WcStatus::RnrExceeded);
    }
    inner.wait_for_recv(endpoint.id.slot, inner.config.rnr_wait - now.duration_since(since));
    None
}
