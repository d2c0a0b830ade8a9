//! Lists of blocks that a host registers once, and plans made of their elements by index.
//!
//! What can be known of a list is worked out when it is made: which region each block lies in, the order of addresses, whether
//! blocks overlap. A plan of indices then compares no addresses: indices that ascend are taken as they come, others
//! are put in order by their rank.

use baton_fabric::Op;

use super::{Pair, Plan, PlanError, PlanLimits, gather, merge, order};
use crate::spare::Spare;

/// One block of a list, inside its region and the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// First byte.
    pub addr: u64,
    /// Length.
    pub len_bytes: u64,
    /// Index of its region in the list's own table.
    pub region: u32,
}

/// An immutable list of blocks.
#[derive(Debug)]
pub struct BlockTable {
    /// By (region, address).
    sorted: Box<[Block]>,
    /// Place in `sorted` of each block of the host's list; empty: every block is at its own.
    rank: Box<[u32]>,
    /// No two share a byte.
    disjoint: bool,
    regions: u32,
}

impl BlockTable {
    /// Works out what a list's plans need. Blocks are at most `u32::MAX`, and none leaves the address space: the caller
    /// has checked each against its region.
    pub fn new(mut blocks: Vec<Block>) -> BlockTable {
        let key = |block: &Block| (block.region, block.addr);
        let regions = blocks.iter().map(|block| block.region + 1).max().unwrap_or(0);
        let mut rank = Vec::new();
        if !blocks.is_sorted_by_key(key) {
            let order = order::ascending(blocks.len(), |at| key(&blocks[at]));
            rank = vec![0; blocks.len()];
            order.positions().enumerate().for_each(|(place, position)| rank[position] = place as u32);
            blocks = order.positions().map(|position| blocks[position]).collect();
        }
        let apart = |w: &[Block]| w[0].region != w[1].region || w[0].addr + w[0].len_bytes <= w[1].addr;
        let disjoint = blocks.windows(2).all(apart);
        BlockTable { sorted: blocks.into(), rank: rank.into(), disjoint, regions }
    }

    /// How many blocks there are.
    pub fn len(&self) -> usize {
        self.sorted.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.sorted.is_empty()
    }

    /// Place of a block of the host's list in the order of addresses.
    fn rank(&self, index: u32) -> u32 {
        if self.rank.is_empty() { index } else { self.rank[index as usize] }
    }
}

/// Elements of a list.
#[derive(Clone, Copy, Debug)]
pub struct Selection<'a> {
    /// The list.
    pub table: &'a BlockTable,
    /// Which of its blocks, in the order of pairing; any may repeat.
    pub indices: &'a [u32],
}

/// A plan of blocks picked from two lists.
#[derive(Debug)]
pub struct Picked {
    /// The plan.
    pub plan: Plan,
    /// The local list's regions that it uses: [`Pair::local`] counts in this.
    pub locals: Vec<u32>,
    /// The remote list's regions that it uses: [`Pair::remote`] counts in this.
    pub remotes: Vec<u32>,
}

/// Why indices make no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IndexError {
    /// Two lists of indices that are not equally long.
    #[error("{local} local and {remote} remote indices: the lists must be equally long")]
    Count {
        /// Local ones.
        local: usize,
        /// Remote ones.
        remote: usize,
    },
    /// No such block.
    #[error(
        "index {position}: the {side} block list has no block {index}, its {len} blocks are numbered from 0"
    )]
    Range {
        /// Position in the host's list of indices.
        position: usize,
        /// `local` or `remote`.
        side: &'static str,
        /// The index.
        index: u32,
        /// Blocks in the list.
        len: usize,
    },
    /// Two blocks that are not equally long.
    #[error(
        "index {position}: local block {local} has {local_bytes} bytes and remote block {remote} {remote_bytes}; both must be equal"
    )]
    Length {
        /// Position in the host's list of indices.
        position: usize,
        /// Index of the local block.
        local: u32,
        /// Its length.
        local_bytes: u64,
        /// Index of the remote block.
        remote: u32,
        /// Its length.
        remote_bytes: u64,
    },
    /// No plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl Plan {
    /// Makes a plan of blocks, pair by pair.
    ///
    /// # Errors
    /// Lists of different lengths, an index without a block, blocks of different lengths, or too many pieces.
    pub fn from_blocks(
        op: Op,
        local: Selection<'_>,
        remote: Selection<'_>,
        limits: PlanLimits,
    ) -> Result<Picked, IndexError> {
        let mut paired = pair_up(local, remote)?;
        let locals = renumber(&mut paired.pairs, &paired.locals, |pair| &mut pair.local);
        let remotes = renumber(&mut paired.pairs, &paired.remotes, |pair| &mut pair.remote);
        let Paired { mut pairs, .. } = paired;
        let (local, remote) = ((local, paired.local_ascends), (remote, paired.remote_ascends));
        let ((from, from_ascends), (to, to_ascends)) = match op {
            Op::Write => (local, remote),
            Op::Read => (remote, local),
        };
        // Overlapping or repeated destinations, and blocks of length 0, take the general way: they are rare.
        let simple = to.table.disjoint && pairs.len() == to.indices.len() && (to_ascends || are_distinct(to));
        let plan = if simple && from_ascends {
            merge(&mut pairs);
            Plan::cut(op, pairs, false, limits)?
        } else if simple && let Some(sorted) = by_rank(from, &pairs) {
            Plan::cut(op, sorted, false, limits)?
        } else {
            Plan::build_from(op, pairs, limits)?
        };
        Ok(Picked { plan, locals, remotes })
    }
}

/// Pairs in the host's order, without empty ones; regions are still the lists'.
struct Paired {
    pairs: Spare<Pair>,
    locals: Vec<bool>,
    remotes: Vec<bool>,
    /// Every block stands behind the one before it in its list's order of addresses.
    local_ascends: bool,
    remote_ascends: bool,
}

fn pair_up(local: Selection<'_>, remote: Selection<'_>) -> Result<Paired, IndexError> {
    if local.indices.len() != remote.indices.len() {
        return Err(IndexError::Count { local: local.indices.len(), remote: remote.indices.len() });
    }
    let mut locals = vec![false; local.table.regions as usize];
    let mut remotes = vec![false; remote.table.regions as usize];
    let mut pairs = Spare::with_capacity(local.indices.len());
    let (mut local_ascends, mut remote_ascends) = (true, true);
    let (mut next_local, mut next_remote) = (0, 0);
    for (position, (&l, &r)) in local.indices.iter().zip(remote.indices).enumerate() {
        for (side, index, len) in
            [("local", l, local.table.sorted.len()), ("remote", r, remote.table.sorted.len())]
        {
            if index as usize >= len {
                return Err(IndexError::Range { position, side, index, len });
            }
        }
        let (local_rank, remote_rank) = (local.table.rank(l), remote.table.rank(r));
        let (from, to) =
            (&local.table.sorted[local_rank as usize], &remote.table.sorted[remote_rank as usize]);
        if from.len_bytes != to.len_bytes {
            return Err(IndexError::Length {
                position,
                local: l,
                local_bytes: from.len_bytes,
                remote: r,
                remote_bytes: to.len_bytes,
            });
        }
        if from.len_bytes == 0 {
            continue;
        }
        local_ascends &= local_rank >= next_local;
        remote_ascends &= remote_rank >= next_remote;
        (next_local, next_remote) = (local_rank + 1, remote_rank + 1);
        locals[from.region as usize] = true;
        remotes[to.region as usize] = true;
        pairs.push(Pair {
            local_addr: from.addr,
            remote_addr: to.addr,
            len_bytes: from.len_bytes,
            local: from.region,
            remote: to.region,
        });
    }
    Ok(Paired { pairs, locals, remotes, local_ascends, remote_ascends })
}

/// Numbers the regions in use from 0, in the list's order; the list's numbers of those.
fn renumber(pairs: &mut [Pair], used: &[bool], field: impl Fn(&mut Pair) -> &mut u32) -> Vec<u32> {
    let list: Vec<u32> = (0..used.len() as u32).filter(|region| used[*region as usize]).collect();
    // Otherwise the first ones are in use, and keep their numbers.
    if list.last().is_some_and(|last| *last as usize >= list.len()) {
        let mut number = vec![0; used.len()];
        list.iter().zip(0..).for_each(|(region, n)| number[*region as usize] = n);
        for pair in pairs {
            let region = field(pair);
            *region = number[*region as usize];
        }
    }
    list
}

/// Whether no block is picked twice.
fn are_distinct(picked: Selection<'_>) -> bool {
    let mut seen = vec![0u64; picked.table.len().div_ceil(64)];
    picked.indices.iter().all(|&index| {
        let (word, bit) = (&mut seen[index as usize / 64], 1u64 << (index % 64));
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh
    })
}

/// The pairs by rank of the blocks that they come from, merged; `None` if a block repeats.
fn by_rank(from: Selection<'_>, pairs: &[Pair]) -> Option<Spare<Pair>> {
    /// Below one index in so many blocks, sorting is cheaper than a look at every block's place.
    const DENSE: usize = 8;
    const FREE: u32 = u32::MAX;
    let table = from.table;
    if pairs.len() < table.len() / DENSE {
        let ranks: Vec<u32> = from.indices.iter().map(|&index| table.rank(index)).collect();
        let order = order::ascending(ranks.len(), |at| (0, u64::from(ranks[at])));
        let repeats = order.spans_overlap(1)?;
        return (!repeats).then(|| gather(pairs.len(), order.positions().map(|at| pairs[at])));
    }
    let mut places = vec![FREE; table.len()];
    for (position, &index) in from.indices.iter().enumerate() {
        let place = &mut places[table.rank(index) as usize];
        if *place != FREE {
            return None;
        }
        *place = position as u32;
    }
    let in_order = places.iter().filter(|place| **place != FREE);
    Some(gather(pairs.len(), in_order.map(|place| pairs[*place as usize])))
}

#[cfg(test)]
mod tests;
