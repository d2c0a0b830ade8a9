//! Registered memory of a benchmark: blocks with gaps between them, whose every byte is known.

use std::sync::atomic::{AtomicU64, Ordering};

use baton_host::{Desc, Engine, Region};
use serde::{Deserialize, Serialize};

use crate::Outcome;

/// Bytes between two blocks, before the first and after the last: never written by anybody.
const GAP: usize = 4096;
const WORD: usize = 8;

/// Blocks of one case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Bytes of a block, a multiple of 8.
    pub size: usize,
    /// Blocks of a request.
    pub blocks: usize,
    /// Requests, each with blocks of its own.
    pub requests: usize,
}

impl Layout {
    fn bytes(self) -> usize {
        GAP + self.blocks * self.requests * (self.size + GAP)
    }

    /// Where block `index` of a request starts.
    pub fn offset(self, request: usize, index: usize) -> usize {
        GAP + (request * self.blocks + index) * (self.size + GAP)
    }

    /// What one request moves.
    pub fn request_bytes(self) -> u64 {
        (self.size * self.blocks) as u64
    }

    /// The place at the source of what lands at the byte `at` of the destination; `None` in a gap. Block i of a
    /// request goes to block n-1-i.
    fn origin(self, at: usize) -> Option<usize> {
        let (slot, inside) = (at.checked_sub(GAP)? / (self.size + GAP), (at - GAP) % (self.size + GAP));
        let (request, index) = (slot / self.blocks, slot % self.blocks);
        (inside < self.size).then(|| self.offset(request, self.blocks - 1 - index) + inside)
    }
}

fn pattern(seed: u64, word: usize) -> u64 {
    let mixed = (word as u64 ^ (seed << 40)).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

/// Memory of one side, registered.
pub struct Pool {
    // Dropped before the memory.
    region: Region,
    words: Box<[AtomicU64]>,
    layout: Layout,
}

impl Pool {
    /// Registers memory for the blocks of a case.
    pub fn new(engine: &Engine, layout: Layout) -> Outcome<Pool> {
        if !layout.size.is_multiple_of(WORD) || layout.size == 0 || layout.blocks == 0 || layout.requests == 0
        {
            return Err(format!("{layout:?}: sizes must be multiples of {WORD}, and nothing may be 0"));
        }
        let words: Box<[AtomicU64]> = (0..layout.bytes() / WORD).map(|_| AtomicU64::new(0)).collect();
        let first = words.as_ptr().cast_mut().cast();
        // SAFETY: the words live on the heap until the region, which is dropped first, is gone, and this side
        // accesses them atomically.
        let region = unsafe { engine.register(first, layout.bytes(), Default::default()) };
        Ok(Pool { region: region.map_err(|error| error.to_string())?, words, layout })
    }

    /// The registration.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The blocks of a request in order.
    pub fn blocks(&self, request: usize) -> Vec<Desc> {
        let Layout { size, blocks, .. } = self.layout;
        let block = |index| self.region.desc(self.layout.offset(request, index) as u64, size as u64);
        (0..blocks).map(block).collect()
    }

    /// Fills everything, gaps included.
    pub fn fill(&self, seed: u64) {
        for (index, word) in self.words.iter().enumerate() {
            word.store(pattern(seed, index), Ordering::Relaxed);
        }
    }

    /// Checks that every block has come from a side filled with `source`, and that the gaps are still as `own`
    /// filled them.
    pub fn check(&self, own: u64, source: u64) -> Outcome<()> {
        for (index, word) in self.words.iter().enumerate() {
            let (expected, what) = match self.layout.origin(index * WORD) {
                Some(at) => (pattern(source, at / WORD), "block"),
                None => (pattern(own, index), "gap"),
            };
            let found = word.load(Ordering::Acquire);
            if found != expected {
                let at = index * WORD;
                return Err(format!(
                    "wrong bytes in a {what} at {at}: {found:#018x} instead of {expected:#018x}"
                ));
            }
        }
        Ok(())
    }
}
