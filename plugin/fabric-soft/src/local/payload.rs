//! Copies of small payloads, so that the caller of `post` may overwrite its own. The target pulls them like any other memory.

use std::collections::VecDeque;
use std::io;

use super::shm::Mapping;

/// Longest payload that is copied: a whole notification record with its header, and some.
pub const INLINE_BYTES: usize = 8192 + 256;

/// Room for payloads of the work requests under way: first in, first out, each in one piece.
pub struct Room {
    bytes: u64,
    /// Offset of the next payload.
    next: u64,
    /// Payloads outstanding, as (ordinal, offset), oldest first: bounded by the depth of the queue.
    used: VecDeque<(u64, u64)>,
}

impl Room {
    /// So many bytes, for a queue of that depth; each payload is at least eight of them.
    pub fn with_depth(bytes: u64, depth: u64) -> Room {
        let most = depth.min(bytes / 8);
        Room { bytes, next: 0, used: VecDeque::with_capacity(most as usize) }
    }

    /// Takes `len` bytes for work request `ordinal`, at least one; their offset. `None` if there are none.
    pub fn take(&mut self, ordinal: u64, len: u64) -> Option<u64> {
        // While nothing is outstanding it starts over, so that quiet queues keep to a few warm pages.
        let start = match self.used.front() {
            None => 0,
            Some(&(_, oldest)) => self.fit(oldest, len)?,
        };
        self.used.push_back((ordinal, start));
        self.next = start + len;
        Some(start)
    }

    /// Where `len` bytes fit, with the oldest outstanding payload at `oldest`.
    fn fit(&self, oldest: u64, len: u64) -> Option<u64> {
        if self.next > oldest {
            if self.next + len <= self.bytes {
                return Some(self.next);
            }
            return (len < oldest).then_some(0);
        }
        (self.next + len < oldest).then_some(self.next)
    }

    /// Gives back the room of all work requests before `ordinal`.
    pub fn free_before(&mut self, ordinal: u64) {
        while self.used.front().is_some_and(|&(of, _)| of < ordinal) {
            self.used.pop_front();
        }
    }
}

/// Payloads that are longer than those in the shared ring.
pub struct Payloads {
    memory: Mapping,
    room: Room,
}

impl Payloads {
    /// Room for as many payloads as the send queue is deep. Memory is used only as far as it is written.
    pub fn new(depth: u64) -> io::Result<Payloads> {
        // Plus the part that stays empty before a wrap.
        let bytes = (depth + 1) * INLINE_BYTES as u64;
        let memory = Mapping::private(bytes as usize)?;
        Ok(Payloads { memory, room: Room::with_depth(bytes, depth) })
    }

    /// Copies a payload for work request `ordinal` and returns where it is. `None` only if more are outstanding than there is
    /// room for.
    pub fn keep(&mut self, ordinal: u64, payload: &[u8]) -> Option<u64> {
        let start = self.room.take(ordinal, payload.len() as u64)? as usize;
        let to = self.memory.bytes(start, payload.len());
        // SAFETY: the range is inside the mapping and nobody else on this side uses it until it is freed; peers only
        // read it, with system calls.
        unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), to, payload.len()) };
        Some(to as u64)
    }

    /// Gives back the room of all work requests before `ordinal`.
    pub fn free_before(&mut self, ordinal: u64) {
        self.room.free_before(ordinal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_full_payloads_fit_as_the_queue_is_deep() {
        let depth = 8;
        let mut room = Payloads::new(depth).unwrap().room;
        let mut live: VecDeque<(u64, u64, u64)> = Default::default();
        for ordinal in 0..10_000u64 {
            let len = match ordinal % 5 {
                0 => 1,
                1 => 1 + ordinal % 100,
                _ => INLINE_BYTES as u64,
            };
            let start = room.take(ordinal, len).expect("room for the whole depth");
            assert!(start + len <= room.bytes);
            for &(_, other, other_len) in &live {
                assert!(start + len <= other || other + other_len <= start);
            }
            live.push_back((ordinal, start, len));
            if live.len() as u64 == depth {
                let keep = (ordinal * 7 % depth) as usize;
                while live.len() > keep {
                    live.pop_front();
                }
                room.free_before(ordinal + 1 - keep as u64);
            }
        }
    }
}
