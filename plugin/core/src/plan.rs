//! Descriptors → [`Plan`]: drop, sort, merge, cut. Pure; keys and lanes come later, in [`crate::prepared`].
//!
//! Order. RDMA promises nothing about the order inside a transfer, so a plan is free to sort by the address that bytes come
//! from, which makes neighbours meet and lets them merge; whoever collects the bytes of several pieces at once finds them
//! in as few places as possible. The one thing a host could observe is which of two pieces that overlap at
//! their *destination* (remote for WRITE, local for READ) comes last. Where destinations overlap the plan keeps the host's order
//! and asks for one lane ([`Plan::is_ordered`]): then the later piece is also placed later.

mod blocks;
mod order;
mod overlap;

use baton_fabric::Op;

use crate::spare::Spare;

pub use blocks::{Block, BlockTable, IndexError, Picked, Selection};

/// One descriptor pair: a span of local memory and the span of remote memory it moves from or to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// Local address.
    pub local_addr: u64,
    /// Remote address.
    pub remote_addr: u64,
    /// Length; 0 is legal and dropped.
    pub len_bytes: u64,
    /// Index of the local region in the key table given to [`crate::prepared::Prepared::new`].
    pub local: u32,
    /// Index of the remote region in the key table given to [`crate::prepared::Prepared::new`].
    pub remote: u32,
}

impl Pair {
    fn destination(&self, op: Op) -> (u32, u64) {
        match op {
            Op::Write => (self.remote, self.remote_addr),
            Op::Read => (self.local, self.local_addr),
        }
    }

    fn source(&self, op: Op) -> (u32, u64) {
        match op {
            Op::Write => (self.local, self.local_addr),
            Op::Read => (self.remote, self.remote_addr),
        }
    }

    /// Whether `next` continues this pair on both sides.
    fn touches(&self, next: &Pair) -> bool {
        self.local == next.local
            && self.remote == next.remote
            && self.local_addr + self.len_bytes == next.local_addr
            && self.remote_addr + self.len_bytes == next.remote_addr
    }
}

/// Limits of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanLimits {
    /// Longest piece, 1 ..= 4 MiB and at most the fabric's longest message.
    pub max_chunk_bytes: u32,
    /// Most pieces of one transfer.
    pub max_pieces: usize,
}

/// Longest chunk that the protocol allows: one work request never holds up a lane for longer than this takes.
pub const MAX_CHUNK_BYTES: u32 = 4 << 20;

impl Default for PlanLimits {
    fn default() -> Self {
        PlanLimits { max_chunk_bytes: MAX_CHUNK_BYTES, max_pieces: 1 << 22 }
    }
}

/// Why no plan was made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// An address plus length leaves the address space.
    #[error("descriptor {index}: {side} address {addr:#x} + length {len_bytes} overflows 64 bits")]
    Overflow {
        /// Position in the host's list.
        index: usize,
        /// `local` or `remote`.
        side: &'static str,
        /// Address.
        addr: u64,
        /// Length.
        len_bytes: u64,
    },
    /// More pieces than the limit.
    #[error(
        "the transfer needs {pieces} work requests of at most {max_chunk_bytes} bytes; the limit is {limit}: split it"
    )]
    TooManyPieces {
        /// Needed.
        pieces: usize,
        /// Allowed.
        limit: usize,
        /// Length that pieces were cut at.
        max_chunk_bytes: u32,
    },
}

/// A checked, merged and cut list of pieces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    op: Op,
    pieces: Spare<Pair>,
    total_bytes: u64,
    longest_bytes: u64,
    max_pieces: usize,
    ordered: bool,
}

impl Plan {
    /// Makes a plan. `pairs` are already checked against their regions ([`check_span`]); overflow is checked again here.
    pub fn build(op: Op, pairs: Vec<Pair>, limits: PlanLimits) -> Result<Plan, PlanError> {
        Plan::build_from(op, pairs.into(), limits)
    }

    /// The same of pairs in memory that the next transfer may have.
    pub fn build_from(op: Op, mut pairs: Spare<Pair>, limits: PlanLimits) -> Result<Plan, PlanError> {
        if survey(&pairs)? {
            pairs.retain(|pair| pair.len_bytes != 0);
        }
        let ordered = match arrange(op, &pairs) {
            Arranged::AsListed => false,
            Arranged::Sorted(order) => {
                pairs = gather(pairs.len(), order.positions().map(|position| pairs[position]));
                return Plan::cut(op, pairs, false, limits);
            }
            Arranged::Overlapping => true,
        };
        merge(&mut pairs);
        Plan::cut(op, pairs, ordered, limits)
    }

    /// Cuts merged pairs into pieces.
    fn cut(op: Op, merged: Spare<Pair>, ordered: bool, limits: PlanLimits) -> Result<Plan, PlanError> {
        let (pieces, longest_bytes) = cut(merged, limits)?;
        let total_bytes = pieces.iter().map(|piece| piece.len_bytes).sum();
        Ok(Plan { op, pieces, total_bytes, longest_bytes, max_pieces: limits.max_pieces, ordered })
    }

    /// Direction.
    pub fn op(&self) -> Op {
        self.op
    }

    /// Bytes moved.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Work requests needed.
    pub fn piece_count(&self) -> usize {
        self.pieces.len()
    }

    /// The pieces, each at most the chunk limit long.
    pub fn pieces(&self) -> &[Pair] {
        &self.pieces
    }

    /// Length of the longest piece.
    pub fn longest_bytes(&self) -> u64 {
        self.longest_bytes
    }

    /// [`PlanLimits::max_pieces`], which holds for whatever is made of the plan.
    pub fn max_pieces(&self) -> usize {
        self.max_pieces
    }

    /// Destinations overlap: the pieces stand in the host's order and must stay on one lane.
    pub fn is_ordered(&self) -> bool {
        self.ordered
    }
}

/// Checks for overflow; whether there are empty pairs.
fn survey(pairs: &[Pair]) -> Result<bool, PlanError> {
    let mut empty = false;
    for (index, pair) in pairs.iter().enumerate() {
        for (side, addr) in [("local", pair.local_addr), ("remote", pair.remote_addr)] {
            if addr.checked_add(pair.len_bytes).is_none() {
                return Err(PlanError::Overflow { index, side, addr, len_bytes: pair.len_bytes });
            }
        }
        empty |= pair.len_bytes == 0;
    }
    Ok(empty)
}

/// In which order pairs become pieces.
enum Arranged {
    /// They ascend by (region, address) of where bytes come from already.
    AsListed,
    /// They do in this order.
    Sorted(order::Order),
    /// Their destinations overlap: in the host's order.
    Overlapping,
}

fn arrange(op: Op, pairs: &[Pair]) -> Arranged {
    let to = |pair: &Pair| pair.destination(op);
    let from = |pair: &Pair| pair.source(op);
    if !ascends(pairs, to) && !have_own_cells(pairs, op) && overlaps(pairs, &sort(pairs, to), op) {
        Arranged::Overlapping
    } else if ascends(pairs, from) {
        Arranged::AsListed
    } else {
        // Sources may overlap or repeat; the order of equal ones stays the host's.
        Arranged::Sorted(sort(pairs, from))
    }
}

/// Whether every destination is a cell of its own in a grid of equal cells. Equal blocks usually are, and seeing that
/// takes no sorting; where they are not, they may be apart all the same.
fn have_own_cells(pairs: &[Pair], op: Op) -> bool {
    /// The map is at most this many cells large for each pair.
    const SPARSE: u64 = 64;
    let cell = pairs.first().map_or(0, |first| first.len_bytes);
    let (mut low, mut high) = (u64::MAX, 0);
    for pair in pairs {
        let (_, addr) = pair.destination(op);
        (low, high) = (low.min(addr), high.max(addr));
        if pair.len_bytes != cell {
            return false;
        }
    }
    if cell == 0 || (high - low) / cell >= SPARSE * pairs.len() as u64 {
        return pairs.is_empty();
    }
    let mut seen = vec![0u64; ((high - low) / cell) as usize / 64 + 1];
    pairs.iter().all(|pair| {
        let offset = pair.destination(op).1 - low;
        let at = if cell.is_power_of_two() { offset >> cell.trailing_zeros() } else { offset / cell };
        let (word, bit) = (&mut seen[at as usize / 64], 1 << (at % 64));
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh && at * cell == offset
    })
}

/// Whether every pair lies behind the one before it.
fn ascends(pairs: &[Pair], key: impl Fn(&Pair) -> (u32, u64)) -> bool {
    pairs.windows(2).all(|w| {
        let ((ra, aa), (rb, ab)) = (key(&w[0]), key(&w[1]));
        ra < rb || (ra == rb && aa + w[0].len_bytes <= ab)
    })
}

fn sort(pairs: &[Pair], key: impl Fn(&Pair) -> (u32, u64)) -> order::Order {
    order::ascending(pairs.len(), |at| key(&pairs[at]))
}

/// Whether destinations overlap; `order` is theirs.
fn overlaps(pairs: &[Pair], order: &order::Order, op: Op) -> bool {
    let uniform = pairs.first().map_or(0, |first| first.len_bytes);
    if pairs.iter().all(|pair| pair.len_bytes == uniform)
        && let Some(answer) = order.spans_overlap(uniform)
    {
        return answer;
    }
    let mut before: Option<&Pair> = None;
    order.positions().any(|position| {
        let pair = &pairs[position];
        let (region, addr) = pair.destination(op);
        before.replace(pair).is_some_and(|before| {
            let (region_before, addr_before) = before.destination(op);
            region_before == region && addr_before + before.len_bytes > addr
        })
    })
}

/// Collects pairs, merging neighbours.
fn gather(count: usize, pairs: impl Iterator<Item = Pair>) -> Spare<Pair> {
    let mut out: Spare<Pair> = Spare::with_capacity(count);
    for next in pairs {
        match out.last_mut() {
            Some(kept) if kept.touches(&next) => kept.len_bytes += next.len_bytes,
            _ => out.push(next),
        }
    }
    out
}

fn merge(pairs: &mut Spare<Pair>) {
    pairs.dedup_by(|next, kept| {
        let joins = kept.touches(next);
        if joins {
            kept.len_bytes += next.len_bytes;
        }
        joins
    });
}

/// The pieces, and the length of the longest.
fn cut(pairs: Spare<Pair>, limits: PlanLimits) -> Result<(Spare<Pair>, u64), PlanError> {
    let max_chunk_bytes = limits.max_chunk_bytes.clamp(1, MAX_CHUNK_BYTES);
    let chunk = u64::from(max_chunk_bytes);
    let longest = pairs.iter().map(|pair| pair.len_bytes).max().unwrap_or(0);
    let pieces = if longest <= chunk {
        pairs.len() as u64
    } else {
        pairs.iter().fold(0u64, |n, pair| n.saturating_add(pair.len_bytes.div_ceil(chunk)))
    };
    if pieces > limits.max_pieces as u64 {
        return Err(PlanError::TooManyPieces {
            pieces: usize::try_from(pieces).unwrap_or(usize::MAX),
            limit: limits.max_pieces,
            max_chunk_bytes,
        });
    }
    if pieces == pairs.len() as u64 {
        return Ok((pairs, longest));
    }
    let mut out = Spare::with_capacity(pieces as usize);
    for pair in pairs.iter() {
        let mut done = 0;
        while done < pair.len_bytes {
            let len_bytes = chunk.min(pair.len_bytes - done);
            out.push(Pair {
                local_addr: pair.local_addr + done,
                remote_addr: pair.remote_addr + done,
                len_bytes,
                ..*pair
            });
            done += len_bytes;
        }
    }
    Ok((out, longest.min(chunk)))
}

/// Why a span does not lie in its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpanError {
    /// Address plus length leaves the address space.
    #[error("address {addr:#x} + length {len_bytes} overflows 64 bits")]
    Overflow {
        /// Address.
        addr: u64,
        /// Length.
        len_bytes: u64,
    },
    /// Outside.
    #[error("span {addr:#x} + {len_bytes} bytes is not inside its region {base:#x} + {region_bytes} bytes")]
    Outside {
        /// Address.
        addr: u64,
        /// Length.
        len_bytes: u64,
        /// First byte of the region.
        base: u64,
        /// Length of the region.
        region_bytes: u64,
    },
}

/// Checks that `addr .. addr + len_bytes` lies in the region; a span of length 0 may stand at its end.
pub fn check_span(addr: u64, len_bytes: u64, base: u64, region_bytes: u64) -> Result<(), SpanError> {
    let end = addr.checked_add(len_bytes).ok_or(SpanError::Overflow { addr, len_bytes })?;
    let inside = addr >= base && end - base <= region_bytes;
    if inside { Ok(()) } else { Err(SpanError::Outside { addr, len_bytes, base, region_bytes }) }
}

#[cfg(test)]
mod tests;
