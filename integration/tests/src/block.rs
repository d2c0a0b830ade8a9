//! Registered memory with sentinels around it, whose every byte is known.

use std::sync::atomic::{AtomicU64, Ordering};

use baton_host::{Desc, Engine, Error, Region};

/// Words on either side of a block that nobody may touch.
const MARGIN: usize = 512;
const SENTINEL: u64 = 0xa5a5_a5a5_a5a5_a5a5;
/// Bytes of a word.
const WORD: usize = 8;

/// A block of registered memory. Engines and other processes write it at any time, so it is read and written by
/// atomic words only.
pub struct Block {
    // Dropped before the memory.
    region: Option<Region>,
    words: Box<[AtomicU64]>,
}

/// The word at `index` of the pattern with that seed.
pub fn pattern(seed: u64, index: usize) -> u64 {
    let mixed = (index as u64 ^ (seed << 40)).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ (mixed >> 29)
}

impl Block {
    /// Registers `bytes` bytes, a multiple of 8, filled with the pattern of `seed`.
    pub fn new(engine: &Engine, bytes: usize, seed: u64) -> Result<Block, Error> {
        let mut block = Block::unregistered(bytes, seed);
        block.register(engine)?;
        Ok(block)
    }

    /// As `new`, but nobody knows it yet.
    pub fn unregistered(bytes: usize, seed: u64) -> Block {
        assert!(bytes.is_multiple_of(WORD) && bytes > 0, "{bytes} bytes are no whole words");
        let words = (0..bytes / WORD + 2 * MARGIN).map(|_| AtomicU64::new(SENTINEL)).collect();
        let block = Block { region: None, words };
        block.fill(seed);
        block
    }

    /// Registers the memory (again).
    pub fn register(&mut self, engine: &Engine) -> Result<(), Error> {
        let first = self.inside().as_ptr().cast_mut().cast();
        // SAFETY: the words live on the heap until the region, which is dropped first, is gone, and this side
        // accesses them atomically.
        self.region = Some(unsafe { engine.register(first, self.bytes(), Default::default())? });
        Ok(())
    }

    /// Deregisters: no byte lands there any more, whatever the answer is.
    pub fn deregister(&mut self) -> Result<(), Error> {
        match self.region.take().map(Region::deregister) {
            None | Some(Ok(())) => Ok(()),
            Some(Err((region, error))) => {
                self.region = Some(region);
                Err(error)
            }
        }
    }

    /// For an engine that was destroyed under it: the registration is gone already, the memory stays.
    pub fn forget_region(&mut self) {
        std::mem::forget(self.region.take());
    }

    /// The registration.
    ///
    /// # Panics
    /// After `deregister`.
    pub fn region(&self) -> &Region {
        self.region.as_ref().expect("the block is registered")
    }

    /// Length.
    pub fn bytes(&self) -> usize {
        self.inside().len() * WORD
    }

    fn inside(&self) -> &[AtomicU64] {
        &self.words[MARGIN..self.words.len() - MARGIN]
    }

    /// The whole block in pieces, as the local side of a transfer.
    pub fn pieces(&self, piece: usize) -> Vec<Desc> {
        let region = self.region();
        (0..self.bytes() / piece).map(|i| region.desc((i * piece) as u64, piece as u64)).collect()
    }

    /// Fills it with a pattern.
    pub fn fill(&self, seed: u64) {
        self.inside()
            .iter()
            .enumerate()
            .for_each(|(i, word)| word.store(pattern(seed, i), Ordering::Relaxed));
    }

    /// Whether the first word of any piece is no longer that of a pattern: bytes have begun to land.
    pub fn touched(&self, seed: u64, piece: usize) -> bool {
        let firsts = self.inside().iter().enumerate().step_by(piece / WORD);
        firsts.into_iter().any(|(i, word)| word.load(Ordering::Acquire) != pattern(seed, i))
    }

    /// The first byte that differs from what each word should be.
    pub fn differs(&self, expected: impl Fn(usize) -> u64) -> Option<usize> {
        let wrong = |(i, word): (usize, &AtomicU64)| {
            let difference = (word.load(Ordering::Acquire) ^ expected(i)).to_ne_bytes();
            difference.iter().position(|byte| *byte != 0).map(|byte| i * WORD + byte)
        };
        self.inside().iter().enumerate().find_map(wrong)
    }

    /// The first byte of the range that differs from the pattern of `seed`, which starts with the range.
    pub fn part_differs(&self, offset: usize, bytes: usize, seed: u64) -> Option<usize> {
        let part = &self.inside()[offset / WORD..(offset + bytes) / WORD];
        part.iter()
            .enumerate()
            .find(|(i, word)| word.load(Ordering::Acquire) != pattern(seed, *i))
            .map(|(i, _)| offset + i * WORD)
    }

    /// The first byte that differs from the pattern of `seed` with its pieces in reverse order.
    pub fn differs_reversed(&self, seed: u64, piece: usize) -> Option<usize> {
        let (per_piece, pieces) = (piece / WORD, self.bytes() / piece);
        self.differs(|i| pattern(seed, (pieces - 1 - i / per_piece) * per_piece + i % per_piece))
    }

    /// Whether the memory around it is as it was.
    pub fn sentinels_stand(&self) -> bool {
        let after = &self.words[self.words.len() - MARGIN..];
        self.words[..MARGIN].iter().chain(after).all(|word| word.load(Ordering::Acquire) == SENTINEL)
    }

    /// Panics unless every byte is that of the pattern and the sentinels stand.
    pub fn assert_holds(&self, seed: u64, when: &str) {
        assert_eq!(self.differs(|i| pattern(seed, i)), None, "first wrong byte {when}");
        assert!(self.sentinels_stand(), "sentinels {when}");
    }

    /// As `assert_holds` for a pattern whose pieces arrived in reverse order.
    pub fn assert_holds_reversed(&self, seed: u64, piece: usize, when: &str) {
        assert_eq!(self.differs_reversed(seed, piece), None, "first wrong byte {when}");
        assert!(self.sentinels_stand(), "sentinels {when}");
    }
}
