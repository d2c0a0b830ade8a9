//! Descriptors → [`Plan`]: drop, sort, merge, cut. Pure; keys and lanes come later, in [`crate::prepared`].
//!
//! Order. RDMA promises nothing about the order inside a transfer, so a plan is free to sort by remote address, which
//! makes neighbours meet and lets them merge. The one thing a host could observe is which of two pieces that overlap at
//! their *destination* (remote for WRITE, local for READ) comes last. Where destinations overlap the plan keeps the host's order
//! and asks for one lane ([`Plan::is_ordered`]): then the later piece is also placed later.

mod order;

use baton_fabric::Op;

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
    pieces: Vec<Pair>,
    total_bytes: u64,
    longest_bytes: u64,
    max_pieces: usize,
    ordered: bool,
}

impl Plan {
    /// Makes a plan. `pairs` are already checked against their regions ([`check_span`]); overflow is checked again here.
    pub fn build(op: Op, mut pairs: Vec<Pair>, limits: PlanLimits) -> Result<Plan, PlanError> {
        check_overflow(&pairs)?;
        pairs.retain(|pair| pair.len_bytes != 0);
        let ordered = !arrange(op, &mut pairs);
        merge(&mut pairs);
        let pieces = cut(pairs, limits)?;
        let (total_bytes, longest_bytes) = pieces.iter().fold((0, 0), |(sum, longest): (u64, u64), piece| {
            (sum + piece.len_bytes, longest.max(piece.len_bytes))
        });
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

fn check_overflow(pairs: &[Pair]) -> Result<(), PlanError> {
    for (index, pair) in pairs.iter().enumerate() {
        for (side, addr) in [("local", pair.local_addr), ("remote", pair.remote_addr)] {
            if addr.checked_add(pair.len_bytes).is_none() {
                return Err(PlanError::Overflow { index, side, addr, len_bytes: pair.len_bytes });
            }
        }
    }
    Ok(())
}

/// Sorts by (remote region, remote address) unless destinations overlap; says whether they do not.
fn arrange(op: Op, pairs: &mut Vec<Pair>) -> bool {
    let ascending = |key: fn(&Pair) -> (u32, u64)| {
        pairs.windows(2).all(|w| {
            let ((ra, aa), (rb, ab)) = (key(&w[0]), key(&w[1]));
            ra < rb || (ra == rb && aa + w[0].len_bytes <= ab)
        })
    };
    let by_remote: fn(&Pair) -> (u32, u64) = |p| (p.remote, p.remote_addr);
    let by_local: fn(&Pair) -> (u32, u64) = |p| (p.local, p.local_addr);
    let remote_ascends = ascending(by_remote);
    match op {
        Op::Write if remote_ascends => return true,
        Op::Write => {
            let order = order::ascending(pairs, by_remote);
            if overlaps(pairs, &order, op) {
                return false;
            }
            *pairs = gather(pairs, &order);
        }
        Op::Read => {
            if !ascending(by_local) && overlaps(pairs, &order::ascending(pairs, by_local), op) {
                return false;
            }
            // Sources may overlap or repeat; the order of equal ones stays the host's.
            if !remote_ascends {
                let order = order::ascending(pairs, by_remote);
                *pairs = gather(pairs, &order);
            }
        }
    }
    true
}

fn gather(pairs: &[Pair], order: &[u32]) -> Vec<Pair> {
    order.iter().map(|&position| pairs[position as usize]).collect()
}

fn overlaps(pairs: &[Pair], order: &[u32], op: Op) -> bool {
    order.windows(2).any(|w| {
        let (a, b) = (&pairs[w[0] as usize], &pairs[w[1] as usize]);
        let ((region_a, addr_a), (region_b, addr_b)) = (a.destination(op), b.destination(op));
        region_a == region_b && addr_a + a.len_bytes > addr_b
    })
}

fn merge(pairs: &mut Vec<Pair>) {
    pairs.dedup_by(|next, kept| {
        let joins = kept.touches(next);
        if joins {
            kept.len_bytes += next.len_bytes;
        }
        joins
    });
}

fn cut(pairs: Vec<Pair>, limits: PlanLimits) -> Result<Vec<Pair>, PlanError> {
    let max_chunk_bytes = limits.max_chunk_bytes.clamp(1, MAX_CHUNK_BYTES);
    let chunk = u64::from(max_chunk_bytes);
    let pieces = pairs.iter().fold(0u64, |n, pair| n.saturating_add(pair.len_bytes.div_ceil(chunk)));
    if pieces > limits.max_pieces as u64 {
        return Err(PlanError::TooManyPieces {
            pieces: usize::try_from(pieces).unwrap_or(usize::MAX),
            limit: limits.max_pieces,
            max_chunk_bytes,
        });
    }
    if pieces == pairs.len() as u64 {
        return Ok(pairs);
    }
    let mut out = Vec::with_capacity(pieces as usize);
    for pair in pairs {
        let mut done = 0;
        while done < pair.len_bytes {
            let len_bytes = chunk.min(pair.len_bytes - done);
            out.push(Pair {
                local_addr: pair.local_addr + done,
                remote_addr: pair.remote_addr + done,
                len_bytes,
                ..pair
            });
            done += len_bytes;
        }
    }
    Ok(out)
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
