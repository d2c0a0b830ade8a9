//! Registered memory of a benchmark: blocks with gaps between them, whose every byte is known.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use baton_host::{Desc, Engine, ManagedBuffer, Region};
use serde::{Deserialize, Serialize};

use crate::Outcome;

/// Bytes between two blocks, before the first and after the last: never written by anybody.
const GAP: usize = 4096;
/// Sizes of blocks are multiples of this.
pub const WORD: usize = 8;

/// Blocks of one case. They lie alike on both sides; block i of a request goes to another one, in random order.
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
    /// Bytes of the memory of each side.
    pub fn bytes(self) -> usize {
        let slots = self.blocks.saturating_mul(self.requests);
        slots.saturating_mul(self.size + GAP).saturating_add(GAP)
    }

    /// Where block `index` of a request starts.
    pub fn offset(self, request: usize, index: usize) -> usize {
        GAP + (request * self.blocks + index) * (self.size + GAP)
    }

    fn check(self) -> Outcome<()> {
        if !self.size.is_multiple_of(WORD) || self.size == 0 || self.blocks == 0 || self.requests == 0 {
            return Err(format!("{self:?}: sizes must be multiples of {WORD}, and nothing may be 0"));
        }
        Ok(())
    }

    /// Which block of a request comes to a place.
    fn origin(self) -> Vec<u32> {
        let mut origin = vec![0; self.blocks];
        for (index, place) in self.order().into_iter().enumerate() {
            origin[place as usize] = index as u32;
        }
        origin
    }

    /// Where block i of a request goes: the place in the request's blocks at the destination. The same on every
    /// machine.
    pub fn order(self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.blocks as u32).collect();
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        for last in (1..order.len()).rev() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            order.swap(last, (state % (last as u64 + 1)) as usize);
        }
        order
    }
}

fn pattern(seed: u64, word: usize) -> u64 {
    let mixed = (word as u64 ^ (seed << 40)).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

/// Where the words of a pool are, and as what engines know them.
enum Backing {
    /// Memory of this process, registered with several engines; the regions are dropped before it.
    Own { regions: Vec<Region>, words: Box<[AtomicU64]> },
    /// Memory of one engine's own.
    Managed(ManagedBuffer),
}

/// Memory of one side, known to one or several engines.
pub struct Pool {
    backing: Backing,
    layout: Layout,
    /// Which block of a request comes to a place.
    origin: Vec<u32>,
}

impl Pool {
    /// Makes memory for the blocks of a case and registers it with every engine.
    pub fn new(engines: &[&Engine], layout: Layout) -> Outcome<Pool> {
        layout.check()?;
        let words: Box<[AtomicU64]> = (0..layout.bytes() / WORD).map(|_| AtomicU64::new(0)).collect();
        let first: *mut u8 = words.as_ptr().cast_mut().cast();
        let register = |engine: &&Engine| {
            // SAFETY: the words live on the heap until the regions, which are dropped first, are gone, and this side
            // accesses them atomically.
            let region = unsafe { engine.register(first, layout.bytes(), Default::default()) };
            region.map_err(|error| error.to_string())
        };
        let regions = engines.iter().map(register).collect::<Outcome<Vec<_>>>()?;
        Ok(Pool { backing: Backing::Own { regions, words }, layout, origin: layout.origin() })
    }

    /// Has an engine make memory for the blocks of a case.
    pub fn managed(engine: &Engine, layout: Layout) -> Outcome<Pool> {
        layout.check()?;
        let buffer = engine.alloc_managed(layout.bytes(), Default::default()).map_err(|e| e.to_string())?;
        Ok(Pool { backing: Backing::Managed(buffer), layout, origin: layout.origin() })
    }

    fn words(&self) -> &[AtomicU64] {
        match &self.backing {
            Backing::Own { words, .. } => words,
            // SAFETY: the buffer is page-aligned, as long as the layout says, zeroed and there as long as `self`; atomics may
            // be changed by others.
            Backing::Managed(buffer) => unsafe {
                std::slice::from_raw_parts(buffer.as_ptr().cast(), self.layout.bytes() / WORD)
            },
        }
    }

    /// Its first byte.
    pub fn addr(&self) -> u64 {
        self.words().as_ptr().addr() as u64
    }

    /// What a peer of the n-th of its engines imports.
    pub fn export(&self, engine: usize) -> Outcome<Vec<u8>> {
        let bytes = match &self.backing {
            Backing::Own { regions, .. } => regions[engine].export(),
            Backing::Managed(buffer) => buffer.export(),
        };
        bytes.map_err(|error| error.to_string())
    }

    /// The blocks of a request in order, for the n-th of its engines.
    pub fn blocks(&self, engine: usize, request: usize) -> Vec<Desc> {
        let Layout { size, blocks, .. } = self.layout;
        let block = |index| {
            let (offset, size) = (self.layout.offset(request, index) as u64, size as u64);
            match &self.backing {
                Backing::Own { regions, .. } => regions[engine].desc(offset, size),
                Backing::Managed(buffer) => buffer.desc(offset, size),
            }
        };
        (0..blocks).map(block).collect()
    }

    /// How blocks lie in it.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The address of a byte.
    pub fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.layout.bytes(), "{offset} is not in {:?}", self.layout);
        // SAFETY: within the words, which the assertion says.
        unsafe { self.words().as_ptr().cast_mut().cast::<u8>().add(offset) }
    }

    /// Copies a block from other memory of this process, while nobody else accesses either block.
    pub fn copy_from(&self, other: &Pool, to: usize, from: usize, size: usize) {
        let ends = to.checked_add(size).zip(from.checked_add(size));
        let fits = ends.is_some_and(|(to, from)| to <= self.layout.bytes() && from <= other.layout.bytes());
        assert!(fits && !std::ptr::eq(self, other), "{size} bytes from {from} to {to} do not fit");
        // SAFETY: both ranges are within the words of two pools, which do not overlap; words may be written through
        // a shared reference, and the caller sees to it that nobody accesses them meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(other.at(from), self.at(to), size) };
    }

    /// Fills everything, gaps included.
    pub fn fill(&self, seed: u64) {
        for (index, word) in self.words().iter().enumerate() {
            word.store(pattern(seed, index), Ordering::Relaxed);
        }
    }

    /// Checks that every block has come from a side filled with `source`, and that the gaps are still as `own`
    /// filled them. `Write`: block i of the source is at place `order[i]` here; a READ brings block `order[i]` of the
    /// source to place i.
    pub fn check(&self, own: u64, source: u64, written: bool) -> Outcome<()> {
        let order = self.layout.order();
        let from = if written { &self.origin } else { &order };
        for (index, word) in self.words().iter().enumerate() {
            let (expected, what) = match self.origin_of(index * WORD, from) {
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

    /// The place at the source of what lands at the byte `at` here; `None` in a gap.
    fn origin_of(&self, at: usize, from: &[u32]) -> Option<usize> {
        let Layout { size, blocks, .. } = self.layout;
        let (slot, inside) = (at.checked_sub(GAP)? / (size + GAP), (at - GAP) % (size + GAP));
        let (request, index) = (slot / blocks, slot % blocks);
        (inside < size).then(|| self.layout.offset(request, from[index] as usize) + inside)
    }
}

/// The memory of one side in a case: what the host registers once with all engines that take it, and one pool for each engine
/// that makes its own.
pub struct Pools {
    pools: Vec<Arc<Pool>>,
    /// For each engine: its pool, and which of that pool's engines it is.
    of: Vec<(usize, usize)>,
}

impl Pools {
    /// `managed`: for each engine, whether it makes its own.
    pub fn new(engines: &[Engine], managed: &[bool], layout: Layout) -> Outcome<Pools> {
        let sharing: Vec<&Engine> =
            engines.iter().zip(managed).filter(|(_, managed)| !**managed).map(|(engine, _)| engine).collect();
        let (mut pools, mut of, mut shared) = (Vec::new(), Vec::new(), 0);
        if !sharing.is_empty() {
            pools.push(Arc::new(Pool::new(&sharing, layout)?));
        }
        for (engine, managed) in engines.iter().zip(managed) {
            if *managed {
                pools.push(Arc::new(Pool::managed(engine, layout)?));
                of.push((pools.len() - 1, 0));
            } else {
                of.push((0, shared));
                shared += 1;
            }
        }
        Ok(Pools { pools, of })
    }

    /// The memory of the n-th engine, and which of that memory's engines it is.
    pub fn of(&self, engine: usize) -> (&Arc<Pool>, usize) {
        let (pool, place) = self.of[engine];
        (&self.pools[pool], place)
    }

    /// One engine for each memory.
    pub fn first_engines(&self) -> impl Iterator<Item = usize> {
        let of = &self.of;
        (0..of.len()).filter(|engine| of[*engine].1 == 0)
    }

    /// Fills all of it.
    pub fn fill(&self, seed: u64) {
        self.pools.iter().for_each(|pool| pool.fill(seed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { size: 64, blocks: 5, requests: 3 };

    fn pool() -> Pool {
        Pool::new(&[], LAYOUT).unwrap()
    }

    /// Moves every block as the transfers do.
    fn move_all(from: &Pool, to: &Pool, written: bool) {
        for request in 0..LAYOUT.requests {
            for (index, place) in LAYOUT.order().into_iter().enumerate() {
                let (source, target) =
                    if written { (index, place as usize) } else { (place as usize, index) };
                for word in 0..LAYOUT.size / WORD {
                    let at = |index| LAYOUT.offset(request, index) / WORD + word;
                    let value = from.words()[at(source)].load(Ordering::Relaxed);
                    to.words()[at(target)].store(value, Ordering::Relaxed);
                }
            }
        }
    }

    #[test]
    fn blocks_that_came_pass_and_one_wrong_byte_anywhere_does_not() {
        for written in [true, false] {
            let (source, target) = (pool(), pool());
            source.fill(1);
            target.fill(2);
            assert!(target.check(2, 1, written).unwrap_err().contains("in a block at 4096"));
            move_all(&source, &target, written);
            target.check(2, 1, written).unwrap();
            for word in (0..target.words().len()).step_by(11) {
                let value = target.words()[word].load(Ordering::Relaxed);
                target.words()[word].store(value ^ (1 << 63), Ordering::Relaxed);
                assert!(target.check(2, 1, written).is_err(), "the word {word}");
                target.words()[word].store(value, Ordering::Relaxed);
            }
        }
    }

    #[test]
    fn the_order_visits_every_place_once_and_is_no_order() {
        let mut order = Layout { size: 8, blocks: 1000, requests: 1 }.order();
        assert!(order.windows(2).filter(|pair| pair[1] == pair[0] + 1).count() < 10);
        order.sort_unstable();
        assert!(order.iter().enumerate().all(|(at, place)| at as u32 == *place));
    }

    #[test]
    fn absurd_layouts_have_absurd_sizes_and_do_not_wrap() {
        let layout = Layout { size: 1 << 40, blocks: 1 << 30, requests: 1 << 30 };
        assert_eq!(layout.bytes(), usize::MAX);
    }
}
