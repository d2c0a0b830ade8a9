//! The shared ring of one direction of a connection: its owner posts, the peer serves.
//!
//! ```text
//! entry ordinals:   done            tail            done + depth
//!                    |  outstanding  |   free         |       done ≤ tail ≤ done + depth
//! ```
//!
//! The owner writes entries, then `tail`; the peer takes them in order, then writes `done`. Each side checks what the
//! other one writes and copies an entry out before it looks at it: the other process may scribble at any time.
//!
//! Behind the entries lie short payloads, which the peer can take without a system call ([`SHORT`]).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::shm::{Mapping, Plain};
use baton_fabric::WcStatus;

/// Another layout has another magic, and so has the door, at which processes with different layouts part ([`super::door`]).
const RING_MAGIC: u64 = u64::from_le_bytes(*b"BATONRG2");
const HEADER_BYTES: usize = 4096;
const ENTRY_BYTES: usize = 64;
/// Longest payload that lies in the ring: short notifications and credit words.
pub const SHORT_BYTES: usize = 256;
/// Room for such payloads. What does not fit is pulled like longer ones.
pub const SHORT_ROOM_BYTES: u64 = 16 << 10;
const _: () = assert!(SHORT_ROOM_BYTES.is_multiple_of(8) && SHORT_BYTES as u64 <= SHORT_ROOM_BYTES);

/// The payload is the initiator's own copy, in no region: there is no key to look at.
pub const INLINE: u32 = 1;
/// Consumes a RECV and carries an immediate.
pub const IMM: u32 = 2;
/// Goes into the target's next RECV slot.
pub const SEND: u32 = 4;
/// The initiator wants a completion.
pub const SIGNALED: u32 = 8;
/// A READ: executed by the initiator, never in the ring.
pub const READ: u32 = 16;
/// Refused when it was posted: fails when its turn comes; never in the ring.
pub const FAULT: u32 = 32;
/// The next entry is a SEND too, and goes behind this one into the same RECV slot.
pub const MORE: u32 = 64;
/// The initiator's memory is managed: the target may copy out of a mapping of it.
pub const SHARED: u32 = 128;
/// With `MORE`, of the first entry of a message: what is in it tells the target where the others go.
pub const HEAD: u32 = 256;
/// With `INLINE`: the payload lies in the ring's room for short ones, from the offset on that stands in the place of the initiator's key.
pub const SHORT: u32 = 512;
/// Its payload was taken out of the ring: said by the target to itself, never in the ring.
pub const PLACED: u32 = 1024;

const RING_FLAGS: u32 = INLINE | IMM | SEND | SIGNALED | MORE | SHARED | HEAD | SHORT;

/// One work request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Entry {
    /// Address at the initiator.
    pub own_addr: u64,
    /// Address at the target.
    pub peer_addr: u64,
    /// Key at the initiator.
    pub own_key: u64,
    /// Key at the target.
    pub peer_key: u64,
    /// Bytes.
    pub len: u32,
    /// Immediate.
    pub imm: u32,
    /// `INLINE | …`.
    pub flags: u32,
}

impl Entry {
    pub fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    fn to_words(self) -> [u64; 6] {
        [
            self.own_addr,
            self.peer_addr,
            self.own_key,
            self.peer_key,
            u64::from(self.len) | u64::from(self.imm) << 32,
            u64::from(self.flags),
        ]
    }

    fn from_words(words: [u64; 6]) -> Option<Entry> {
        let flags = u32::try_from(words[5]).ok().filter(|flags| flags & !RING_FLAGS == 0)?;
        if flags & MORE != 0 && flags & (SEND | IMM | SIGNALED) != SEND {
            return None;
        }
        if flags & HEAD != 0 && flags & MORE == 0 {
            return None;
        }
        let entry = Entry {
            own_addr: words[0],
            peer_addr: words[1],
            own_key: words[2],
            peer_key: words[3],
            len: words[4] as u32,
            imm: (words[4] >> 32) as u32,
            flags,
        };
        (flags & SHORT == 0 || entry.is_short()).then_some(entry)
    }

    /// Whether the payload is one that lies in the ring.
    fn is_short(&self) -> bool {
        let (offset, len) = (self.own_key, u64::from(self.len));
        self.flags & (INLINE | MORE | SHARED) == INLINE
            && (1..=SHORT_BYTES as u64).contains(&len)
            && offset.is_multiple_of(8)
            && offset <= SHORT_ROOM_BYTES - len
    }
}

#[repr(C, align(64))]
struct Line<T>(T);

#[repr(C)]
struct Header {
    magic: AtomicU64,
    depth: AtomicU64,
    /// Random word of the owner's endpoint.
    token: AtomicU64,
    owner: Line<OwnerWords>,
    peer: Line<PeerWords>,
}

#[repr(C)]
struct OwnerWords {
    tail: AtomicU64,
    /// Bulk bytes ever pushed: a hint for how much work waits.
    bulk: AtomicU64,
    /// The owner takes everything back that is not done.
    closed: AtomicU32,
    /// The owner is pulling a READ out of the peer's memory.
    reading: AtomicU32,
}

#[repr(C)]
struct PeerWords {
    done: AtomicU64,
    /// Status code with which entry `done` failed, 0 if none did.
    failure: AtomicU64,
    /// The peer takes nothing more, and lets nothing more be read.
    refused: AtomicU32,
    /// The peer is pulling entries of this ring.
    busy: AtomicU32,
}

#[repr(C, align(64))]
struct Cell([AtomicU64; 8]);

// SAFETY: atomics and padding.
unsafe impl Plain for Header {}
// SAFETY: atomics.
unsafe impl Plain for Cell {}

/// A mapped ring, on either side.
pub struct Ring {
    mapping: Mapping,
    depth: u64,
}

fn ring_bytes(depth: u64) -> usize {
    (short_room(depth) + SHORT_ROOM_BYTES as usize).next_multiple_of(4096)
}

/// Where the room for short payloads begins.
fn short_room(depth: u64) -> usize {
    HEADER_BYTES + depth as usize * ENTRY_BYTES
}

impl Ring {
    /// A new ring; `depth` is a power of two.
    pub fn create(depth: u64, token: u64) -> io::Result<(OwnedFd, Ring)> {
        let (fd, mapping) = Mapping::create("baton-ring", ring_bytes(depth))?;
        let ring = Ring { mapping, depth };
        ring.header().depth.store(depth, Ordering::Relaxed);
        ring.header().token.store(token, Ordering::Relaxed);
        ring.header().magic.store(RING_MAGIC, Ordering::Release);
        Ok((fd, ring))
    }

    /// Maps a peer's ring and checks that it is the one expected.
    pub fn open(fd: &OwnedFd, depth: u64, token: u64) -> io::Result<Ring> {
        let ring = Ring { mapping: Mapping::open(fd.as_fd(), ring_bytes(depth))?, depth };
        let header = ring.header();
        let magic = header.magic.load(Ordering::Acquire);
        let found = (header.depth.load(Ordering::Relaxed), header.token.load(Ordering::Relaxed));
        if magic != RING_MAGIC || found != (depth, token) {
            return Err(io::Error::other(
                "the shared ring is not that of the endpoint, or of another version",
            ));
        }
        Ok(ring)
    }

    fn header(&self) -> &Header {
        self.mapping.at(0)
    }

    fn cell(&self, ordinal: u64) -> &Cell {
        let index = (ordinal & (self.depth - 1)) as usize;
        self.mapping.at(HEADER_BYTES + index * ENTRY_BYTES)
    }

    pub fn depth(&self) -> u64 {
        self.depth
    }

    // ---- the owner's side

    /// Writes an entry that [`Ring::publish`] will announce.
    pub fn write(&self, ordinal: u64, entry: Entry) {
        for (cell, word) in self.cell(ordinal).0.iter().zip(entry.to_words()) {
            cell.store(word, Ordering::Relaxed);
        }
    }

    /// Copies a short payload to an offset of its room, for an entry that is not published yet. Returns where that is in this process.
    pub fn write_short(&self, offset: u64, payload: &[u8]) -> u64 {
        let words = payload.len().div_ceil(8);
        let at = short_room(self.depth) + offset as usize;
        for (word, bytes) in self.mapping.slice::<AtomicU64>(at, words).iter().zip(payload.chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(whole), Ordering::Relaxed);
        }
        self.mapping.addr(at)
    }

    /// Entries before `tail` are there; `bulk` bytes were added to them.
    pub fn publish(&self, tail: u64, bulk: u64) {
        let owner = &self.header().owner.0;
        owner.bulk.store(owner.bulk.load(Ordering::Relaxed).wrapping_add(bulk), Ordering::Relaxed);
        owner.tail.store(tail, Ordering::Release);
    }

    pub fn done(&self) -> u64 {
        self.header().peer.0.done.load(Ordering::Acquire)
    }

    /// The status with which entry [`Ring::done`] failed. Look at it first and at `done` second.
    pub fn failure(&self) -> Option<WcStatus> {
        decode(self.header().peer.0.failure.load(Ordering::Acquire))
    }

    /// The peer takes nothing more.
    pub fn is_refused(&self) -> bool {
        self.header().peer.0.refused.load(Ordering::Acquire) != 0
    }

    pub fn close(&self) {
        self.header().owner.0.closed.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Whether the peer pulls entries of this ring at the moment.
    pub fn is_busy(&self) -> bool {
        self.header().peer.0.busy.load(Ordering::SeqCst) != 0
    }

    /// Announces a READ out of the peer's memory; `false` if the peer has taken that back.
    pub fn begin_reading(&self) -> bool {
        self.header().owner.0.reading.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let open = !self.is_refused();
        if !open {
            self.end_reading();
        }
        open
    }

    pub fn end_reading(&self) {
        self.header().owner.0.reading.store(0, Ordering::Release);
    }

    // ---- the peer's side

    pub fn tail(&self) -> u64 {
        self.header().owner.0.tail.load(Ordering::Acquire)
    }

    pub fn bulk(&self) -> u64 {
        self.header().owner.0.bulk.load(Ordering::Relaxed)
    }

    /// A copy of an entry, or `None` if it is not one.
    pub fn read(&self, ordinal: u64) -> Option<Entry> {
        let cell = self.cell(ordinal);
        Entry::from_words(std::array::from_fn(|i| cell.0[i].load(Ordering::Relaxed)))
    }

    /// A copy of the payload of a `SHORT` entry that [`Ring::read`] has returned.
    pub fn read_short<'a>(&self, entry: &Entry, copy: &'a mut [u8; SHORT_BYTES]) -> &'a [u8] {
        let len = entry.len as usize;
        let at = short_room(self.depth) + entry.own_key as usize;
        let words = self.mapping.slice::<AtomicU64>(at, len.div_ceil(8));
        for (word, bytes) in words.iter().zip(copy.chunks_exact_mut(8)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        &copy[..len]
    }

    /// Announces that entries are about to be pulled; `false` if the owner has taken them back.
    pub fn begin_pull(&self) -> bool {
        self.header().peer.0.busy.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let open = !self.is_closed();
        if !open {
            self.end_pull();
        }
        open
    }

    pub fn end_pull(&self) {
        self.header().peer.0.busy.store(0, Ordering::Release);
    }

    pub fn is_closed(&self) -> bool {
        self.header().owner.0.closed.load(Ordering::SeqCst) != 0
    }

    /// Everything before `done` is placed and visible.
    pub fn set_done(&self, done: u64) {
        self.header().peer.0.done.store(done, Ordering::Release);
    }

    pub fn set_failure(&self, status: WcStatus) {
        self.header().peer.0.failure.store(encode(status), Ordering::Release);
    }

    pub fn refuse(&self) {
        self.header().peer.0.refused.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Whether the owner is pulling a READ out of this side's memory.
    pub fn is_reading(&self) -> bool {
        self.header().owner.0.reading.load(Ordering::SeqCst) != 0
    }
}

fn encode(status: WcStatus) -> u64 {
    match status {
        WcStatus::Success => 0,
        WcStatus::Flushed => 1,
        WcStatus::LocalAccess => 2,
        WcStatus::RemoteAccess => 3,
        WcStatus::RnrExceeded => 4,
        WcStatus::RemoteLength => 5,
        WcStatus::PeerGone => 6,
    }
}

fn decode(code: u64) -> Option<WcStatus> {
    match code {
        0 => None,
        2 => Some(WcStatus::LocalAccess),
        3 => Some(WcStatus::RemoteAccess),
        4 => Some(WcStatus::RnrExceeded),
        5 => Some(WcStatus::RemoteLength),
        _ => Some(WcStatus::PeerGone),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_survive_the_ring_and_nonsense_is_refused() {
        let (fd, ring) = Ring::create(8, 77).unwrap();
        let peer = Ring::open(&fd, 8, 77).unwrap();
        assert!(Ring::open(&fd, 8, 78).is_err() && Ring::open(&fd, 16, 77).is_err());
        let entry = Entry {
            own_addr: 1,
            peer_addr: u64::MAX,
            own_key: 3,
            peer_key: 4,
            len: u32::MAX,
            imm: 0xabcd_ef01,
            flags: IMM | SIGNALED,
        };
        ring.write(9, entry);
        ring.publish(10, 5);
        assert_eq!((peer.tail(), peer.bulk(), peer.read(9)), (10, 5, Some(entry)));
        for bad in [
            Entry { flags: READ, ..entry },
            Entry { flags: 1 << 31, ..entry },
            Entry { flags: FAULT | SEND, ..entry },
            Entry { flags: MORE, ..entry },
            Entry { flags: MORE | SEND | IMM, ..entry },
            Entry { flags: MORE | SEND | SIGNALED, ..entry },
            Entry { flags: HEAD | SEND, ..entry },
            Entry { flags: PLACED, ..entry },
        ] {
            ring.write(9, bad);
            assert_eq!(peer.read(9), None, "{bad:?}");
        }
        for status in [WcStatus::LocalAccess, WcStatus::RemoteAccess, WcStatus::RnrExceeded] {
            peer.set_failure(status);
            assert_eq!(ring.failure(), Some(status));
        }
    }

    #[test]
    fn short_payloads_survive_the_ring_and_no_entry_reaches_beyond_their_room() {
        let (fd, ring) = Ring::create(8, 77).unwrap();
        let peer = Ring::open(&fd, 8, 77).unwrap();
        let payload: Vec<u8> = (0..SHORT_BYTES).map(|i| i as u8 ^ 0x5A).collect();
        let last = SHORT_ROOM_BYTES - SHORT_BYTES as u64;
        let short = |own_key: u64, len: usize| Entry {
            own_key,
            len: len as u32,
            flags: INLINE | SHORT,
            ..Entry::default()
        };
        for (offset, len) in [(0, 1), (8, 13), (64, 200), (last, SHORT_BYTES), (SHORT_ROOM_BYTES - 8, 7)] {
            ring.write_short(offset, &payload[..len]);
            ring.write(0, short(offset, len));
            let entry = peer.read(0).expect("an entry");
            assert_eq!(peer.read_short(&entry, &mut [0; SHORT_BYTES]), &payload[..len]);
        }
        let forged = [
            short(0, 0),
            short(0, SHORT_BYTES + 1),
            short(0, u32::MAX as usize),
            short(4, 8),
            short(last + 8, SHORT_BYTES),
            short(SHORT_ROOM_BYTES, 1),
            short(u64::MAX - 7, 8),
            Entry { flags: SHORT, ..short(0, 8) },
            Entry { flags: SHORT | INLINE | SHARED, ..short(0, 8) },
            Entry { flags: SHORT | INLINE | SEND | MORE, ..short(0, 8) },
        ];
        for bad in forged {
            ring.write(0, bad);
            assert_eq!(peer.read(0), None, "{bad:?}");
        }
    }
}
