//! Room for what is too long to be inlined: a ring of the sender's own, tied to completions.
//!
//! ```text
//!   done            placed               done + size
//!     | in flight     |      free          |          a SEND that would cross the end begins at the next multiple of the size
//! ```
//! Work requests of an endpoint complete in order, so a completion frees everything up to its end. Records for the peer's ring lie at
//! the same places here as there: the ring's cursor decides, and only whether a place is free is asked here.

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

    /// Whether a record that ends where a mirrored ring's cursor will be `end` overwrites nothing in flight.
    pub fn is_free_up_to(&self, end: u64) -> bool {
        end - self.done <= u64::from(self.size_bytes)
    }

    /// The mirrored ring's cursor passed a record, staged or not.
    pub fn pass(&mut self, end: u64) {
        self.placed = end;
    }

    /// Takes a place that [`Stage::place`] found.
    pub fn take(&mut self, place: StagePlace) {
        self.placed = place.end;
        assert!(self.placed - self.done <= u64::from(self.size_bytes), "placed ≤ done + size");
    }

    /// Everything up to `end` has completed.
    pub fn complete(&mut self, end: u64) {
        assert!(self.done <= end && end <= self.placed, "done ≤ {end} ≤ placed");
        self.done = end;
    }

    /// Bytes in use.
    pub fn in_use(&self) -> u64 {
        self.placed - self.done
    }
}
