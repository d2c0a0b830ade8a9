//! Peers' managed regions, mapped here: what is pulled out of one of them into another is copied without the kernel.
//!
//! A region's stamp says that it is managed and by which descriptor its owner holds the file. The file is fetched and checked
//! (sealed against shrinking, large enough), and only then is the stamp looked at again: an owner clears the key before it closes
//! the file, so a key that is still there was that of this file. What is copied counts only under the stamp that every pull ends
//! with, as ever. A mapping outlives its owner and cannot lose pages, so a peer that dies never faults this side; and it can only
//! be read.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use parking_lot::Mutex;

use super::peer::Peer;
use super::shm::ReadMapping;
use super::stats::Stats;
use super::sys::{self, MAX_PIECES, Piece};
use crate::regions::{MAX_REGIONS, SLOT_BYTES, Stamp, index_of};

/// Managed regions of one peer mapped here at most; what is beyond is pulled through the kernel.
pub const MAX_MAPPINGS: usize = 256;
const _: () = assert!(MAX_MAPPINGS <= MAX_PIECES);

/// A managed region of a peer.
pub struct Source {
    /// Its first byte at the peer.
    base: u64,
    len: u64,
    mapping: ReadMapping,
}

impl Source {
    /// Where the peer's bytes are here, if all of them are in the region.
    pub fn at(&self, peer_addr: u64, len: u64) -> Option<u64> {
        let offset = peer_addr.checked_sub(self.base)?;
        let inside = offset <= self.len && len <= self.len - offset;
        inside.then(|| self.mapping.addr() + offset)
    }
}

/// Mappings by key. `None`: that file cannot be mapped, and it is not tried again.
#[derive(Default)]
pub struct Sources {
    table: Mutex<HashMap<u64, Option<Arc<Source>>>>,
}

impl Sources {
    fn get(&self, peer: &Peer, key: u64, stats: &Stats) -> Option<Arc<Source>> {
        let mut table = self.table.lock();
        if let Some(known) = table.get(&key) {
            return known.clone();
        }
        if table.len() >= MAX_MAPPINGS {
            return None;
        }
        match map(peer, key) {
            Ok(source) => {
                stats.mappings_made.add(1);
                let source = Arc::new(source);
                table.insert(key, Some(Arc::clone(&source)));
                Some(source)
            }
            // Withdrawn meanwhile: the pull will find out.
            Err(None) => None,
            Err(Some(why)) => {
                stats.mappings_refused.add(1);
                tracing::warn!(
                    "managed memory {key:#x} of process {} cannot be mapped and is copied through the kernel: {why}",
                    peer.pid
                );
                table.insert(key, None);
                None
            }
        }
    }

    /// Lets go of regions that the peer has withdrawn: all of them if it is gone.
    pub fn drop_withdrawn(&self, peer: &Peer, stats: &Stats) {
        let mut table = self.table.lock();
        let keys: Vec<u64> = table.keys().copied().collect();
        let live = live_keys(peer, &keys);
        for (key, live) in keys.iter().zip(live) {
            if *key != live {
                table.remove(key);
                stats.mappings_dropped.add(1);
            }
        }
    }

    /// Regions mapped.
    pub fn len(&self) -> usize {
        self.table.lock().values().flatten().count()
    }
}

/// The sources of one gathering. Entries mostly stay in one region for long runs.
pub struct Lookup<'a> {
    peer: &'a Peer,
    stats: &'a Stats,
    last: Option<(u64, Option<Arc<Source>>)>,
}

impl<'a> Lookup<'a> {
    pub fn new(peer: &'a Peer, stats: &'a Stats) -> Lookup<'a> {
        Lookup { peer, stats, last: None }
    }

    /// The mapping of a managed region of the peer; without one the bytes come through the kernel, which is counted.
    pub fn source(&mut self, key: u64) -> Option<&Arc<Source>> {
        if self.last.as_ref().is_none_or(|(of, _)| *of != key) {
            self.last = Some((key, self.peer.sources.get(self.peer, key, self.stats)));
        }
        let found = self.last.as_ref().and_then(|(_, source)| source.as_ref());
        if found.is_none() {
            self.stats.shared_fallbacks.add(1);
        }
        found
    }
}

/// The stamp of a peer's region as it is now.
pub fn read_stamp(peer: &Peer, key: u64) -> Option<Stamp> {
    let index = index_of(key);
    if index == 0 || index >= MAX_REGIONS {
        return None;
    }
    let words =
        sys::vm_read_words::<4>(peer.pid, peer.table.wrapping_add((index * SLOT_BYTES) as u64)).ok()?;
    let [key, base, len, flags] = words;
    Some(Stamp { key, base, len, flags })
}

/// What stands now where each of these keys did, read in one call; zeroes if the peer is gone.
fn live_keys(peer: &Peer, keys: &[u64]) -> Vec<u64> {
    let mut found = vec![0u64; keys.len()];
    let bytes = size_of_val(&found[..]);
    if bytes == 0 {
        return found;
    }
    let there: Vec<Piece> = keys.iter().map(|key| Piece::new(stamp_addr(peer, *key), 8)).collect();
    // SAFETY: the only piece of this side is a vector of our own.
    let read = unsafe { sys::vm_read(peer.pid, &[Piece::new(found.as_mut_ptr() as u64, bytes)], &there) };
    if read != Ok(bytes) {
        found.fill(0);
    }
    found
}

/// Where the stamp of a region begins, with its key.
pub fn stamp_addr(peer: &Peer, key: u64) -> u64 {
    peer.table.wrapping_add((index_of(key) * SLOT_BYTES) as u64)
}

/// `Err(None)`: the region is not there any more.
fn map(peer: &Peer, key: u64) -> Result<Source, Option<String>> {
    let live = || read_stamp(peer, key).filter(|stamp| stamp.key == key && key != 0);
    let stamp = live().ok_or(None)?;
    let fd = stamp.file().ok_or_else(|| Some("it is not in a file".to_owned()))?;
    let mapping = peer
        .fetch(fd)
        .map_err(|error| error.to_string())
        .and_then(|file| ReadMapping::open(file.as_fd(), stamp.len).map_err(|error| error.to_string()));
    // Looked at again whether it could be mapped or not: another file may have taken the descriptor's number.
    if live() != Some(stamp) {
        return Err(None);
    }
    Ok(Source { base: stamp.base, len: stamp.len, mapping: mapping.map_err(Some)? })
}
