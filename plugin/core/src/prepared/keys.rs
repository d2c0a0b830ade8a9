//! Keys by rail and segment, and where pieces are cut because of them.

use std::borrow::Cow;

use crate::ids::LaneId;
use crate::plan::{MAX_CHUNK_BYTES, Pair, Plan};

/// The keys of one region on the session's fabric: own ones for the local side, the peer's for the remote side.
#[derive(Clone, Copy, Debug)]
pub struct KeyTable<'a> {
    /// First byte of the region.
    pub base: u64,
    /// Length of every segment but the last, at least 1; one segment: at least the region's length.
    pub segment_bytes: u64,
    /// Rails, at least 1.
    pub rails: u8,
    /// One per rail and segment; index `rail * segments + segment`.
    pub keys: &'a [u64],
}

impl<'a> KeyTable<'a> {
    /// One rail, one segment.
    pub fn whole(key: &'a u64) -> KeyTable<'a> {
        KeyTable { base: 0, segment_bytes: u64::MAX, rails: 1, keys: std::slice::from_ref(key) }
    }

    fn segments(&self) -> usize {
        self.keys.len() / usize::from(self.rails.max(1))
    }

    /// Bytes from `addr` to the end of its segment.
    fn border_in(&self, addr: u64) -> u64 {
        if self.segments() <= 1 {
            return u64::MAX;
        }
        self.segment_bytes - (addr - self.base) % self.segment_bytes
    }
}

/// Why a plan cannot go over a session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrepareError {
    /// A region without keys for a rail.
    #[error(
        "lane {lane} is on rail {rail} of the {side} side, but {side} region {region} of the transfer has keys for {rails} rails only"
    )]
    Rail {
        /// `local` or `remote`.
        side: &'static str,
        /// Position in the transfer's table of regions.
        region: usize,
        /// The lane.
        lane: u8,
        /// Its rail.
        rail: u8,
        /// Rails of the region.
        rails: u8,
    },
    /// More pieces than the limit once they are cut for this session.
    #[error(
        "cut at {max_message_bytes} bytes and where segments of its regions end, the transfer needs more than {limit} work requests: split it"
    )]
    TooManyPieces {
        /// Allowed.
        limit: usize,
        /// Longest work request of the session.
        max_message_bytes: u64,
    },
}

/// The keys of a region for one rail.
pub(super) struct OnRail<'a> {
    base: u64,
    segment_bytes: u64,
    /// By segment.
    keys: &'a [u64],
}

impl OnRail<'_> {
    pub(super) fn key(&self, addr: u64) -> u64 {
        match self.keys {
            [key] => *key,
            keys => keys[((addr - self.base) / self.segment_bytes) as usize],
        }
    }
}

/// Every region's keys for the rail of a lane.
pub(super) fn on_rail<'a>(
    side: &'static str,
    tables: &[KeyTable<'a>],
    rail: u8,
    lane: LaneId,
) -> Result<Vec<OnRail<'a>>, PrepareError> {
    let pick = |(region, table): (usize, &KeyTable<'a>)| {
        let (segments, rails) = (table.segments(), table.rails);
        let from = usize::from(rail) * segments;
        match table.keys.get(from..from + segments) {
            Some(keys) if rail < rails => {
                Ok(OnRail { base: table.base, segment_bytes: table.segment_bytes, keys })
            }
            _ => Err(PrepareError::Rail { side, region, lane: lane.0, rail, rails }),
        }
    };
    tables.iter().enumerate().map(pick).collect()
}

/// The plan's pieces, none longer than `max_message_bytes` and none across a border between segments. The common case, in
/// which that is so already, copies nothing, and where all regions are whole it does not even look at the pieces.
pub(super) fn cut<'p>(
    plan: &'p Plan,
    locals: &[KeyTable<'_>],
    remotes: &[KeyTable<'_>],
    max_message_bytes: u64,
) -> Result<Cow<'p, [Pair]>, PrepareError> {
    let max_message_bytes = max_message_bytes.clamp(1, u64::from(MAX_CHUNK_BYTES));
    let whole = locals.iter().chain(remotes).all(|table| table.segments() <= 1);
    if whole && plan.longest_bytes() <= max_message_bytes {
        return Ok(Cow::Borrowed(plan.pieces()));
    }
    let room = |piece: &Pair, done: u64| {
        let local = locals[piece.local as usize].border_in(piece.local_addr + done);
        let remote = remotes[piece.remote as usize].border_in(piece.remote_addr + done);
        max_message_bytes.min(local).min(remote)
    };
    let fits = |piece: &Pair| piece.len_bytes <= room(piece, 0);
    let Some(first) = plan.pieces().iter().position(|piece| !fits(piece)) else {
        return Ok(Cow::Borrowed(plan.pieces()));
    };
    let limit = plan.max_pieces();
    let mut out = Vec::with_capacity((plan.piece_count() + plan.piece_count() / 2 + 8).min(limit));
    out.extend_from_slice(&plan.pieces()[..first]);
    for piece in &plan.pieces()[first..] {
        let mut done = 0;
        while done < piece.len_bytes {
            if out.len() == limit {
                return Err(PrepareError::TooManyPieces { limit, max_message_bytes });
            }
            let len_bytes = room(piece, done).min(piece.len_bytes - done);
            out.push(Pair {
                local_addr: piece.local_addr + done,
                remote_addr: piece.remote_addr + done,
                len_bytes,
                ..*piece
            });
            done += len_bytes;
        }
    }
    Ok(Cow::Owned(out))
}
