//! Room for the bytes of SENDs that are too long to be inlined: a ring of the sender's own, tied to completions.
//!
//! ```text
//!   done            placed               done + size
//!     | in flight     |      free          |          a SEND that would cross the end begins at the next multiple of the size
//! ```
//! SENDs of an endpoint complete in order, so a completion frees everything up to its end.

use super::RECORD_ALIGN;

/// Cursors of a staging ring.
#[derive(Clone, Copy, Debug)]
pub struct Stage {
    placed: u64,
    done: u64,
    size_bytes: u32,
}

/// A free place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePlace {
    /// From the ring's beginning.
    pub offset: u32,
    /// What [`Stage::complete`] is told when the SEND is done.
    pub end: u64,
}

impl Stage {
    /// All of it is free.
    pub fn new(size_bytes: u32) -> Stage {
        Stage { placed: 0, done: 0, size_bytes }
    }

    /// Where that many bytes could go now; `None` until something completes.
    pub fn place(&self, len_bytes: u32) -> Option<StagePlace> {
        let size = u64::from(self.size_bytes);
        let len = u64::from(len_bytes).next_multiple_of(RECORD_ALIGN);
        assert!(2 * len <= size, "{len_bytes} bytes to stage in {size}: an empty ring might not take them");
        let left = size - self.placed % size;
        let begin = if left < len { self.placed + left } else { self.placed };
        let end = begin + len;
        (end - self.done <= size).then_some(StagePlace { offset: (begin % size) as u32, end })
    }

    /// Takes a place that [`Stage::place`] found.
    pub fn take(&mut self, place: StagePlace) {
        self.placed = place.end;
        assert!(self.placed - self.done <= u64::from(self.size_bytes), "placed ≤ done + size");
    }

    /// Everything up to `end` has left the ring.
    pub fn complete(&mut self, end: u64) {
        assert!(self.done <= end && end <= self.placed, "done ≤ {end} ≤ placed");
        self.done = end;
    }

    /// Bytes in use.
    pub fn in_use(&self) -> u64 {
        self.placed - self.done
    }
}
