//! One `process_vm_readv` for many pieces, with the peer's stamp as the last one. Pieces between managed regions are copied out of
//! mappings before it.
//!
//! The kernel copies pieces in order, so a stamp that is right was right while everything before it was copied: the process
//! is the peer, its endpoint has not been fenced, the regions of the pieces had not been withdrawn.

use std::sync::Arc;

use super::copy;
use super::peer::Peer;
use super::shared::{Source, stamp_addr};
use super::sys::{self, MAX_PIECES, Piece};

/// Different regions of the peer in one call at most.
pub const MAX_KEYS: usize = 16;
/// Work requests in one call at most.
pub const MAX_PARTS: usize = MAX_PIECES - MAX_KEYS - 1;
/// Instance and token.
const STAMP_WORDS: usize = 3;
const PAGE: u64 = 4096;

/// Where a peer endpoint's stamp is and what must be found there.
#[derive(Clone, Copy, Debug)]
pub struct Stamp {
    pub addr: u64,
    pub words: [u64; STAMP_WORDS],
}

impl Stamp {
    pub fn new(addr: u64, instance: [u8; 16], token: u64) -> Stamp {
        let half = |i: usize| u64::from_ne_bytes(std::array::from_fn(|j| instance[8 * i + j]));
        Stamp { addr, words: [half(0), half(1), token] }
    }
}

/// A work request, or a slice of one.
#[derive(Clone, Copy)]
struct Part {
    own_addr: u64,
    peer_addr: u64,
    key: u64,
    len: usize,
    /// Where the peer's bytes are mapped here; 0 if they come through the kernel.
    mapped: u64,
}

/// Why a pull stopped at a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The peer's region was withdrawn or is not backed by memory.
    PeerMemory,
    /// This side's memory is not writable.
    OwnMemory,
    /// The process has ended, is another one, or has fenced its endpoint.
    Gone,
}

/// Work requests gathered for one call. All buffers are allocated once.
pub struct Batch {
    parts: Vec<Part>,
    own: Vec<Piece>,
    peer: Vec<Piece>,
    keys: Vec<u64>,
    /// Keep what the parts are copied out of mapped.
    sources: Vec<Arc<Source>>,
    found: Box<[u64; STAMP_WORDS + MAX_KEYS]>,
    bytes: usize,
    shared_bytes: usize,
}

impl Batch {
    /// A batch for at most `parts` work requests.
    pub fn new(parts: usize) -> Batch {
        let parts = parts.min(MAX_PARTS);
        Batch {
            parts: Vec::with_capacity(parts),
            own: Vec::with_capacity(parts + 1),
            peer: Vec::with_capacity(parts + 1 + MAX_KEYS),
            keys: Vec::with_capacity(MAX_KEYS),
            sources: Vec::with_capacity(MAX_KEYS),
            found: Box::new([0; STAMP_WORDS + MAX_KEYS]),
            bytes: 0,
            shared_bytes: 0,
        }
    }

    pub fn clear(&mut self) {
        self.parts.clear();
        self.own.clear();
        self.peer.clear();
        self.keys.clear();
        self.sources.clear();
        self.bytes = 0;
        self.shared_bytes = 0;
    }

    /// Bytes of parts that are copied out of mappings.
    pub fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// Bytes of the first `parts` parts.
    pub fn bytes_of_first(&self, parts: usize) -> usize {
        self.parts[..parts].iter().map(|part| part.len).sum()
    }

    /// Whether there is room for so many more parts with these keys; there is for [`MAX_KEYS`] when it is empty.
    pub fn has_room_for(&self, keys: impl Iterator<Item = u64>) -> bool {
        let (mut parts, mut new) = (0, 0);
        for key in keys {
            parts += 1;
            new += usize::from(key != 0 && !self.keys.contains(&key));
        }
        self.parts.len() + parts <= self.parts.capacity().min(MAX_PARTS) && self.keys.len() + new <= MAX_KEYS
    }

    /// System-call pieces on the peer's side, without the stamp.
    pub fn pieces(&self) -> usize {
        self.peer.len()
    }

    /// Adds a part; `false` if the batch has no room for it. A key of 0 says that the peer's memory is in no region. With a
    /// source, which must be that of the key, the part is copied out of it.
    pub fn add(
        &mut self,
        own_addr: u64,
        peer_addr: u64,
        key: u64,
        len: usize,
        source: Option<&Arc<Source>>,
    ) -> bool {
        if self.parts.len() == self.parts.capacity().min(MAX_PARTS) {
            return false;
        }
        if key != 0 && !self.keys.contains(&key) {
            if self.keys.len() == MAX_KEYS {
                return false;
            }
            self.keys.push(key);
        }
        let mapped = source.and_then(|source| Some((source, source.at(peer_addr, len as u64)?)));
        if let Some((source, _)) = mapped {
            self.shared_bytes += len;
            if !self.sources.iter().any(|held| Arc::ptr_eq(held, source)) {
                self.sources.push(Arc::clone(source));
            }
        } else {
            push(&mut self.own, own_addr, len);
            push(&mut self.peer, peer_addr, len);
        }
        self.parts.push(Part { own_addr, peer_addr, key, len, mapped: mapped.map_or(0, |(_, at)| at) });
        self.bytes += len;
        true
    }

    /// Copies. Returns how many parts, from the first on, were copied whole from a peer that was in order, and what is
    /// wrong with the next one, if it is known already.
    ///
    /// # Safety
    /// This side's ranges of all parts must be memory whose owner lets it be overwritten until the call returns (held guards); of
    /// parts with a source, memory that is certainly mapped and writable.
    pub unsafe fn run(&mut self, peer: &Peer, stamp: &Stamp) -> (usize, Option<Fault>) {
        // SAFETY: the caller's promise.
        unsafe { self.copy_mapped() };
        let stamp_bytes = self.push_stamp(peer, stamp);
        // SAFETY: the caller's promise for the parts; the last piece is our own buffer.
        let result = unsafe { sys::vm_read(peer.pid, &self.own, &self.peer) };
        match result {
            Ok(n) if n == self.bytes - self.shared_bytes + stamp_bytes && self.stamp_is_right(stamp) => {
                (self.parts.len(), None)
            }
            Err(libc::ESRCH) => (0, Some(Fault::Gone)),
            // SAFETY: as for this function.
            other => unsafe { self.diagnose(peer, stamp, other.unwrap_or(0)) },
        }
    }

    /// Copies the parts that need no kernel, and lets go of what they came from.
    unsafe fn copy_mapped(&mut self) {
        if self.shared_bytes == 0 {
            return;
        }
        for part in self.parts.iter().filter(|part| part.mapped != 0) {
            // SAFETY: `sources` keeps the mapping and has checked the bounds; the caller's promise for the target, which
            // does not overlap a mapping that only this fabric knows.
            unsafe { copy::copy(part.own_addr, part.mapped, part.len) };
        }
        // The stamp is read after the last byte.
        copy::finish_copies();
        self.sources.clear();
    }

    /// Appends the stamp's pieces to the call and returns their bytes.
    fn push_stamp(&mut self, peer: &Peer, stamp: &Stamp) -> usize {
        let bytes = (STAMP_WORDS + self.keys.len()) * 8;
        self.found.fill(0);
        self.own.push(Piece::new(self.found.as_mut_ptr() as u64, bytes));
        self.peer.push(Piece::new(stamp.addr, STAMP_WORDS * 8));
        for &key in &self.keys {
            self.peer.push(Piece::new(stamp_addr(peer, key), 8));
        }
        bytes
    }

    fn stamp_is_right(&self, stamp: &Stamp) -> bool {
        self.found[..STAMP_WORDS] == stamp.words && self.found[STAMP_WORDS..][..self.keys.len()] == self.keys
    }

    /// After anything but a full success: finds out what was copied under a right stamp, and what stopped the rest.
    unsafe fn diagnose(&mut self, peer: &Peer, stamp: &Stamp, copied: usize) -> (usize, Option<Fault>) {
        // SAFETY: no parts are in this call, only our own buffer.
        if unsafe { self.read_stamp(peer, stamp) }.is_err() {
            return (0, Some(Fault::Gone));
        }
        let mut end = 0;
        for (i, part) in self.parts.iter().enumerate() {
            if !self.key_is_live(part.key) {
                return (i, Some(Fault::PeerMemory));
            }
            if part.mapped != 0 {
                continue;
            }
            end += part.len;
            if end > copied {
                let part = *part;
                // SAFETY: the caller's promise for this part.
                return match unsafe { self.copy_one(peer, stamp, part) } {
                    // It works now; the rest is for the next call.
                    Ok(()) => (i + 1, None),
                    Err(fault) => (i, Some(fault)),
                };
            }
        }
        (self.parts.len(), None)
    }

    /// Reads the stamp alone; an error if the peer is gone. Regions are left for [`Batch::key_is_live`].
    unsafe fn read_stamp(&mut self, peer: &Peer, stamp: &Stamp) -> Result<(), Fault> {
        self.own.clear();
        self.peer.clear();
        let bytes = self.push_stamp(peer, stamp);
        // SAFETY: the only piece of this side is our own buffer.
        let result = unsafe { sys::vm_read(peer.pid, &self.own, &self.peer) };
        let right = result == Ok(bytes) && self.found[..STAMP_WORDS] == stamp.words;
        if right { Ok(()) } else { Err(Fault::Gone) }
    }

    fn key_is_live(&self, key: u64) -> bool {
        let index = self.keys.iter().position(|&k| k == key);
        key == 0 || index.is_some_and(|i| self.found[STAMP_WORDS + i] == key)
    }

    /// Copies one part alone and names the side at fault if that fails.
    unsafe fn copy_one(&mut self, peer: &Peer, stamp: &Stamp, part: Part) -> Result<(), Fault> {
        let own = [Piece::new(part.own_addr, part.len)];
        // SAFETY: the caller's promise for this part.
        let result = unsafe { sys::vm_read(peer.pid, &own, &[Piece::new(part.peer_addr, part.len)]) };
        // SAFETY: no parts are in this call.
        unsafe { self.read_stamp(peer, stamp) }?;
        if !self.key_is_live(part.key) || (result != Ok(part.len) && !peer_readable(peer.pid, &part)) {
            return Err(Fault::PeerMemory);
        }
        if result == Ok(part.len) { Ok(()) } else { Err(Fault::OwnMemory) }
    }
}

/// Whether every page of the peer's part can be read.
fn peer_readable(pid: i32, part: &Part) -> bool {
    let mut byte = 0u8;
    let own = [Piece::new(&raw mut byte as u64, 1)];
    let end = part.peer_addr.saturating_add(part.len as u64);
    let mut addr = part.peer_addr;
    while addr < end {
        // SAFETY: `byte` is a local that nobody else uses during the call.
        if unsafe { sys::vm_read(pid, &own, &[Piece::new(addr, 1)]) } != Ok(1) {
            return false;
        }
        let Some(next) = (addr & !(PAGE - 1)).checked_add(PAGE) else { break };
        addr = next;
    }
    true
}

/// Appends a piece, or lengthens the last one when the two touch.
fn push(pieces: &mut Vec<Piece>, addr: u64, len: usize) {
    if !pieces.last_mut().is_some_and(|last| last.extend(addr, len)) {
        pieces.push(Piece::new(addr, len));
    }
}
