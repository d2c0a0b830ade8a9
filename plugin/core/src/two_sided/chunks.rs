//! Pieces cut into chunks of one message each, and which chunks are in.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::codec::{Block, MAX_CHUNKS, MAX_PIECES};
use crate::ids::RegionId;

/// A run of bytes here and there. What `local` means is the driver's business.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// On the side that cut it.
    pub local: u64,
    /// Region of the other side, or the own one where a peer reads.
    pub region: RegionId,
    /// From the region's first byte.
    pub offset: u64,
    /// Never 0.
    pub len: u64,
}

/// Why pieces make no transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// Too many pieces.
    #[error("{0} pieces, at most {MAX_PIECES} make one transfer of the two-sided backend: split it")]
    Pieces(usize),
    /// Too many chunks.
    #[error("{0} chunks, at most {MAX_CHUNKS} make one transfer of the two-sided backend: split it")]
    Chunks(u64),
    /// No bytes, or more than there are addresses.
    #[error("piece {nth}: {len} bytes at offset {offset:#x}")]
    Span {
        /// Which.
        nth: usize,
        /// Of it.
        offset: u64,
        /// Of it.
        len: u64,
    },
}

/// How a transfer's pieces are cut. Both sides cut alike: a chunk never crosses a piece and has at most `chunk_bytes`. Copies share
/// everything, so one that is kept is submitted again without an allocation.
#[derive(Clone, Debug)]
pub struct ChunkMap {
    pieces: Arc<[Piece]>,
    /// First chunk of each piece.
    first: Arc<[u32]>,
    total: u32,
    chunk_bytes: u32,
    bytes: u64,
}

/// One chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Where its bytes are on the side that cut it.
    pub local: u64,
    /// Its place at the other side.
    pub region: RegionId,
    /// From the region's first byte.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

impl ChunkMap {
    /// Cuts pieces.
    ///
    /// # Errors
    /// [`CutError`].
    pub fn cut(pieces: Arc<[Piece]>, chunk_bytes: u32) -> Result<ChunkMap, CutError> {
        assert!(chunk_bytes > 0, "a chunk has bytes");
        if pieces.len() > MAX_PIECES as usize {
            return Err(CutError::Pieces(pieces.len()));
        }
        let (mut total, mut bytes) = (0u64, 0u64);
        let mut first = Vec::with_capacity(pieces.len());
        for (nth, piece) in pieces.iter().enumerate() {
            let span = CutError::Span { nth, offset: piece.offset, len: piece.len };
            if piece.len == 0 || piece.offset.checked_add(piece.len).is_none() {
                return Err(span);
            }
            first.push(total as u32);
            total += piece.len.div_ceil(chunk_bytes.into());
            if total > MAX_CHUNKS.into() {
                return Err(CutError::Chunks(total));
            }
            bytes += piece.len;
        }
        Ok(ChunkMap { pieces, first: first.into(), total: total as u32, chunk_bytes, bytes })
    }

    /// Chunks.
    pub fn total(&self) -> u32 {
        self.total
    }

    /// Bytes of all of them.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of a chunk at most.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_bytes
    }

    /// The pieces.
    pub fn pieces(&self) -> &Arc<[Piece]> {
        &self.pieces
    }

    /// One chunk; `nth` is below [`ChunkMap::total`].
    pub fn chunk(&self, nth: u32) -> Chunk {
        assert!(nth < self.total, "chunk {nth} of {}", self.total);
        let at = self.first.partition_point(|&first| first <= nth) - 1;
        let piece = self.pieces[at];
        let skip = u64::from(nth - self.first[at]) * u64::from(self.chunk_bytes);
        Chunk {
            local: piece.local.wrapping_add(skip),
            region: piece.region,
            offset: piece.offset + skip,
            len: (piece.len - skip).min(self.chunk_bytes.into()) as u32,
        }
    }

    /// What a message says of a chunk.
    pub fn block(&self, transfer: u64, nth: u32) -> Block {
        let Chunk { region, offset, len, .. } = self.chunk(nth);
        Block { transfer, region, offset, chunk: nth, total: self.total, len }
    }
}

/// Chunks of a word of a [`ChunkSet`].
const WORD_CHUNKS: u32 = u64::BITS;
/// Bytes of one more word that is kept aside, its share of a tree whose nodes are all as empty as they may be.
const WORD_BYTES: usize = 36;
/// Bytes of the root of that tree, which stays.
const ROOT_BYTES: usize = 256;

/// Which chunks are in. Those that come in order, or almost, need no memory of their own, and none costs more than
/// [`ChunkSet::MOST_BYTES_A_CHUNK`], wherever it is: what a peer announces costs nothing, only what it sends.
///
/// ```text
///   0            front                    total
///   |  all in   |  word  |  none in         |     but for the words aside
/// ```
#[derive(Clone, Debug, Default)]
pub struct ChunkSet {
    /// Number of the lowest word that was never full.
    front: u32,
    word: u64,
    /// Other words: those before the front that are not full, as chunks were taken out, and those behind it that are not empty.
    aside: BTreeMap<u32, u64>,
    has_root: bool,
    count: u32,
}

impl ChunkSet {
    /// That its own bytes grow by for one chunk.
    pub const MOST_BYTES_A_CHUNK: usize = ROOT_BYTES + WORD_BYTES;

    /// How many are in.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of its own that it would have at most with chunk `nth` in it.
    pub fn bytes_with(&self, nth: u32) -> usize {
        let at = nth / WORD_CHUNKS;
        if at <= self.front || self.aside.contains_key(&at) {
            return self.bytes();
        }
        ROOT_BYTES + (self.aside.len() + 1) * WORD_BYTES
    }

    /// Bytes of its own, at most.
    pub fn bytes(&self) -> usize {
        if self.has_root { ROOT_BYTES + self.aside.len() * WORD_BYTES } else { 0 }
    }

    /// Whether it is in.
    pub fn contains(&self, nth: u32) -> bool {
        let at = nth / WORD_CHUNKS;
        let word =
            if at == self.front { self.word } else { self.aside.get(&at).copied().unwrap_or(self.usual(at)) };
        word >> (nth % WORD_CHUNKS) & 1 == 1
    }

    /// A word that is neither aside nor at the front.
    fn usual(&self, at: u32) -> u64 {
        if at < self.front { u64::MAX } else { 0 }
    }

    /// `true` the first time.
    pub fn insert(&mut self, nth: u32) -> bool {
        let (at, bit) = (nth / WORD_CHUNKS, 1 << (nth % WORD_CHUNKS));
        if at != self.front {
            return self.insert_aside(at, bit);
        }
        let first = self.word & bit == 0;
        self.word |= bit;
        self.count += u32::from(first);
        while self.word == u64::MAX {
            self.front += 1;
            self.word = self.aside.remove(&self.front).unwrap_or(0);
        }
        first
    }

    fn insert_aside(&mut self, at: u32, bit: u64) -> bool {
        let before = self.aside.get(&at).copied().unwrap_or(self.usual(at));
        if before & bit != 0 {
            return false;
        }
        self.count += 1;
        self.put_aside(at, before | bit);
        true
    }

    /// Takes it out again; `false`: it was not in.
    pub fn remove(&mut self, nth: u32) -> bool {
        if !self.contains(nth) {
            return false;
        }
        let (at, bit) = (nth / WORD_CHUNKS, 1 << (nth % WORD_CHUNKS));
        self.count -= 1;
        if at == self.front {
            self.word &= !bit;
        } else {
            let before = self.aside.get(&at).copied().unwrap_or(self.usual(at));
            self.put_aside(at, before & !bit);
        }
        true
    }

    fn put_aside(&mut self, at: u32, word: u64) {
        if word == self.usual(at) {
            self.aside.remove(&at);
        } else {
            self.has_root = true;
            self.aside.insert(at, word);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn piece(local: u64, offset: u64, len: u64) -> Piece {
        Piece { local, region: RegionId(1), offset, len }
    }

    #[test]
    fn limits_are_told_by_name() {
        let cut = |pieces: Vec<Piece>, chunk_bytes| ChunkMap::cut(pieces.into(), chunk_bytes).unwrap_err();
        assert_eq!(cut(vec![piece(0, 0, 1); (1 << 17) + 1], 10), CutError::Pieces((1 << 17) + 1));
        assert_eq!(cut(vec![piece(0, 0, (1 << 24) + 1)], 1), CutError::Chunks((1 << 24) + 1));
        assert_eq!(cut(vec![piece(0, 7, 0)], 1), CutError::Span { nth: 0, offset: 7, len: 0 });
        let max = u64::MAX;
        assert_eq!(cut(vec![piece(0, 2, max)], 1), CutError::Span { nth: 0, offset: 2, len: max });
        assert_eq!(ChunkMap::cut(vec![piece(0, 0, 1 << 24)].into(), 1).unwrap().total(), 1 << 24);
    }

    #[test]
    fn a_set_costs_what_is_in_it_and_not_what_was_announced() {
        let mut set = ChunkSet::default();
        assert!(set.insert(MAX_CHUNKS - 1));
        assert_eq!(set.bytes(), ChunkSet::MOST_BYTES_A_CHUNK);
        for n in 0..9 {
            set.insert(n * (MAX_CHUNKS / 9));
        }
        assert_eq!(set.bytes(), ROOT_BYTES + 9 * WORD_BYTES, "chunk 0 is at the front");
    }

    #[test]
    fn chunks_in_order_cost_nothing() {
        let mut set = ChunkSet::default();
        for n in 0..10_000 {
            assert!(set.insert(n) && set.contains(n) && !set.contains(n + 1));
            assert_eq!(set.bytes(), 0);
        }
    }

    proptest! {
        #[test]
        fn chunks_cover_every_byte_once_and_in_order(
            lens in prop::collection::vec(1u64..500, 1..40), chunk_bytes in 1u32..200,
        ) {
            let mut at = 0;
            let pieces: Vec<Piece> = lens.iter().map(|&len| {
                let one = piece(1_000_000 + at, at * 2, len);
                at += len;
                one
            }).collect();
            let map = ChunkMap::cut(pieces.clone().into(), chunk_bytes).unwrap();
            let mut chunks = (0..map.total()).map(|nth| map.chunk(nth));
            for piece in pieces {
                let mut done = 0;
                while done < piece.len {
                    let chunk = chunks.next().unwrap();
                    prop_assert_eq!((chunk.local, chunk.offset), (piece.local + done, piece.offset + done));
                    prop_assert!(chunk.len > 0 && chunk.len <= chunk_bytes);
                    done += u64::from(chunk.len);
                }
                prop_assert_eq!(done, piece.len);
            }
            prop_assert!(chunks.next().is_none());
            prop_assert_eq!(map.bytes(), at);
        }

        #[test]
        fn a_set_counts_each_chunk_once(
            numbers in prop::collection::vec((0u32..1000, prop::bool::weighted(0.2)), 0..200),
        ) {
            let (mut set, mut model) = (ChunkSet::default(), std::collections::BTreeSet::new());
            for (n, out) in numbers {
                prop_assert_eq!(set.contains(n), model.contains(&n));
                if out {
                    prop_assert_eq!(set.remove(n), model.remove(&n));
                    continue;
                }
                let (before, with) = (set.bytes(), set.bytes_with(n));
                prop_assert!(with - before <= ChunkSet::MOST_BYTES_A_CHUNK);
                prop_assert_eq!(set.insert(n), model.insert(n));
                prop_assert!(set.bytes() <= with);
            }
            prop_assert_eq!(set.count() as usize, model.len());
            prop_assert!((0..1100).all(|n| set.contains(n) == model.contains(&n)));
        }

        #[test]
        fn chunks_that_come_almost_in_order_leave_nothing_aside(
            late in prop::collection::vec(0u32..200, 1000), lost in prop::collection::btree_set(0u32..1000, 0..10),
        ) {
            let mut order: Vec<u32> = (0..1000).collect();
            order.sort_by_key(|&n| n + late[n as usize]);
            let mut set = ChunkSet::default();
            for &n in &order {
                prop_assert!(set.insert(n));
                prop_assert!(set.aside.len() <= 5, "{set:?}");
            }
            prop_assert!(lost.iter().all(|&n| set.remove(n) && !set.contains(n)));
            prop_assert_eq!(set.count() as usize, 1000 - lost.len());
            prop_assert!(lost.iter().all(|&n| set.insert(n)));
            prop_assert_eq!((set.count(), set.aside.len()), (1000, 0));
        }
    }
}
