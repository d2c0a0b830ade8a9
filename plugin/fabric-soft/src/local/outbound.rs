//! Own READs: pulled out of the peer's memory.

use baton_fabric::WcStatus;

use super::endpoint::{Endpoint, Link, Puller};
use super::inbound::Guards;
use super::inner::{Inner, Moved};
use super::peer::Peer;
use super::pull::Fault;
use super::shared::{Lookup, read_stamp};
use crate::regions::{Stamp, index_of};

/// Pulls up to `budget` bytes of READs whose turn it is.
pub fn pull(inner: &Inner, endpoint: &Endpoint, puller: &mut Puller, budget: usize) -> Moved {
    let Some(link) = endpoint.live_link() else { return Moved::NOTHING };
    if !endpoint.send.lock().has_reads() {
        return Moved::NOTHING;
    }
    if !endpoint.ring.begin_reading() {
        inner.end(endpoint, Some(WcStatus::PeerGone));
        return Moved::NOTHING;
    }
    let mut guards = Guards::new(&inner.regions);
    let mut sources = Lookup::new(&link.peer, &inner.stats);
    let (refused, cut) = gather(endpoint, link, puller, budget, &mut guards, &mut sources);
    let parts = puller.batch.len();
    let (done, fault) = if parts == 0 {
        (0, None)
    } else {
        inner.stats.pulls.add(1);
        inner.stats.pull_pieces.add(puller.batch.pieces() as u64);
        if link.peer.reads.is_heavy() {
            link.peer.door.set_pulled(true);
        }
        inner.stats.shared_bytes.add(puller.batch.shared_bytes() as u64);
        // SAFETY: `guards` holds every region that the batch writes to until the call is over; those named with a source are
        // managed memory, mapped as long as they are registered.
        unsafe { puller.batch.run(&link.peer, &link.stamp) }
    };
    drop(guards);
    endpoint.ring.end_reading();
    let bytes = puller.batch.bytes();
    let whole = done == parts && fault.is_none();
    if whole {
        inner.stats.read_bytes.add(bytes as u64);
    } else {
        inner.stats.faults.add(1);
    }
    finish(inner, endpoint, puller, done, if whole { cut } else { 0 });
    let failure = match fault {
        Some(Fault::PeerMemory) => Some(WcStatus::RemoteAccess),
        Some(Fault::OwnMemory) => Some(WcStatus::LocalAccess),
        Some(Fault::Gone) => Some(WcStatus::PeerGone),
        None if !whole => None,
        None => refused,
    };
    if let Some(status) = failure {
        inner.end(endpoint, Some(status));
        return Moved { bytes, more: false };
    }
    Moved { bytes, more: endpoint.send.lock().has_reads() }
}

/// Fills the batch with READs. Returns why the next one may not run, and how many bytes of the last one stay for the next call.
fn gather(
    endpoint: &Endpoint,
    link: &Link,
    puller: &mut Puller,
    budget: usize,
    guards: &mut Guards<'_>,
    sources: &mut Lookup<'_>,
) -> (Option<WcStatus>, u64) {
    puller.batch.clear();
    let send = endpoint.send.lock();
    let budget =
        if send.read_bytes() - puller.read_offset <= 2 * budget as u64 { 2 * budget } else { budget };
    let mut skip = puller.read_offset;
    for entry in send.reads() {
        if puller.batch.bytes() >= budget {
            break;
        }
        let len = u64::from(entry.len);
        let stamp = known_stamp(&mut puller.known, &link.peer, entry.peer_key);
        if !stamp.permits(entry.peer_addr, len, false) {
            return (Some(WcStatus::RemoteAccess), 0);
        }
        let mapped = match guards.hold(entry.own_key, entry.own_addr, len, true, false) {
            Ok(Some(held)) => held.shared && stamp.file().is_some(),
            Ok(None) => break,
            Err(status) => return (Some(status), 0),
        };
        let left = len - skip;
        let take = left.min((budget - puller.batch.bytes()) as u64);
        let (to, from) = (entry.own_addr + skip, entry.peer_addr + skip);
        let source = if mapped { sources.source(entry.peer_key) } else { None };
        if !puller.batch.add(to, from, entry.peer_key, take as usize, source) {
            break;
        }
        if take < left {
            return (None, left - take);
        }
        skip = 0;
    }
    (None, 0)
}

/// The peer's stamp of a region: from memory, or read now. An empty stamp permits nothing.
fn known_stamp(known: &mut [Stamp; 16], peer: &Peer, key: u64) -> Stamp {
    let index = index_of(key);
    let cached = &mut known[index % 16];
    if cached.key != key || key == 0 {
        // Another process or a half written stamp would be told by the stamp that every pull ends with.
        *cached = read_stamp(peer, key).unwrap_or_default();
    }
    if key != 0 && cached.key == key { *cached } else { Stamp::default() }
}

/// Completes what was pulled whole, and starts what waited for it.
fn finish(inner: &Inner, endpoint: &Endpoint, puller: &mut Puller, parts: usize, cut: u64) {
    let mut send = endpoint.send.lock();
    let whole = parts - usize::from(cut != 0);
    if cut != 0 {
        let last = send.reads().nth(whole).map_or(0, |entry| u64::from(entry.len));
        puller.read_offset = last.saturating_sub(cut);
    } else if whole != 0 {
        puller.read_offset = 0;
    }
    send.reads_done(whole as u64);
    let started = send.start(&endpoint.ring);
    inner.count_bytes(endpoint, &mut send);
    let ready = send.is_ready();
    drop(send);
    inner.tell_started(endpoint, started, ready);
}
