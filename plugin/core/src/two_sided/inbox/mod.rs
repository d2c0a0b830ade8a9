//! The peer's transfers: WRITEs that arrive, READs that are served, and what became of those that ended.
//!
//! ```text
//!      floor                                            announced
//!  released |  at most `depth` open, the others ended         |  the peer may not have begun it
//! ```
//! Credit comes back when a transfer ends, not when it is released, so a long one does not hold up the many short ones behind it;
//! only the span of numbers is limited as well.
//! It outlives epochs: a chunk of a transfer that has ended is answered with its status again and never placed, so a resend in a
//! later epoch cannot overwrite memory that the host has used for something else meanwhile.

mod reads;

use std::collections::{BTreeMap, VecDeque};

use super::chunks::{ChunkMap, ChunkSet, Piece};
use super::codec::{Block, Direction, Status};
use crate::ids::Nanos;

/// Numbers from the floor on, as a multiple of the depth: so many transfers may end and be remembered while one is open.
pub const SPAN: u64 = 64;

/// Sizes and limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InboxLimits {
    /// Transfers of the peer that are open. Numbers may run ahead of the lowest one not released by [`SPAN`] times as many.
    pub depth: u32,
    /// Bytes of bookkeeping for them.
    pub state_bytes: usize,
}

/// What a peer's transfer cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferViolation {
    /// It was not granted.
    #[error("transfer {transfer} of the peer, granted are those below {granted}")]
    NotGranted {
        /// Told.
        transfer: u64,
        /// First that is not.
        granted: u64,
    },
    /// It releases what it has not begun.
    #[error("the peer releases its transfers below {below}, granted are those below {granted}")]
    Release {
        /// Told.
        below: u64,
        /// First that is not.
        granted: u64,
    },
    /// It releases less than before.
    #[error("the peer releases its transfers below {below} after {floor}")]
    ReleaseFalls {
        /// Told.
        below: u64,
        /// Told before.
        floor: u64,
    },
    /// It has another number of chunks now.
    #[error("transfer {transfer} has {got} chunks after {expected}")]
    Total {
        /// Which.
        transfer: u64,
        /// Told first.
        expected: u32,
        /// Told now.
        got: u32,
    },
    /// A WRITE becomes a READ or the other way.
    #[error("transfer {transfer} changes its direction")]
    Direction {
        /// Which.
        transfer: u64,
    },
    /// Pieces of a READ out of order.
    #[error("READ {transfer} goes on with piece {got} after {expected}")]
    PieceOrder {
        /// Which.
        transfer: u64,
        /// Next.
        expected: u32,
        /// Told.
        got: u32,
    },
}

/// What to do with a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Copy it; then [`Inbox::placed`].
    Place,
    /// It is there already.
    Duplicate,
    /// Its transfer has ended; its status will be told again.
    Ended,
    /// Its transfer was released.
    Released,
    /// Refused now; that will be told.
    Refused,
}

/// A peer's READ that is being answered.
#[derive(Debug)]
pub(in crate::two_sided) struct Serving {
    pub(in crate::two_sided) map: ChunkMap,
    /// Next chunk to send.
    pub(in crate::two_sided) next: u32,
    /// Messages that still read its memory.
    pub(in crate::two_sided) in_flight: u32,
    pub(in crate::two_sided) since: Nanos,
    ending: Option<Ending>,
}

#[derive(Clone, Copy, Debug)]
struct Ending {
    /// `None`: given up by the peer.
    refused: Option<(Status, u32)>,
    aborted: bool,
}

#[derive(Debug)]
struct Arriving {
    total: u32,
    set: ChunkSet,
    placed: u32,
    copying: u32,
    ending: Option<Ending>,
}

#[derive(Debug)]
struct Done {
    direction: Direction,
    status: Status,
    chunks: u32,
    at: u32,
    owes_status: bool,
    owes_abort: bool,
}

#[derive(Debug)]
enum Entry {
    Write(Arriving),
    Collect(Vec<Piece>),
    Serve(Serving),
    Done(Done),
}

/// An answer that is owed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::two_sided) enum Answer {
    /// DATA_ACK.
    Complete { transfer: u64, chunks: u32 },
    /// XFER_NACK.
    Refused { transfer: u64, direction: Direction, status: Status, at: u32 },
    /// ABORT_ACK.
    Aborted { transfer: u64, direction: Direction, status: Status, chunks: u32 },
}

/// See the module.
#[derive(Debug)]
pub struct Inbox {
    limits: InboxLimits,
    floor: u64,
    announced: u64,
    /// What was told in this epoch; what was told before may not have arrived.
    told: u64,
    entries: BTreeMap<u64, Entry>,
    /// Of the entries, those that ended.
    ended_entries: u64,
    state_bytes: usize,
    completes: VecDeque<u64>,
    refusals: VecDeque<u64>,
    abort_acks: VecDeque<u64>,
    /// WRITEs that came to an end, for notifications that wait for them.
    pub(in crate::two_sided) ended: Vec<(u64, bool)>,
}

const ENTRY_BYTES: usize = size_of::<(u64, Entry)>();

impl Inbox {
    /// For a peer that has begun nothing yet.
    pub fn new(limits: InboxLimits) -> Inbox {
        assert!(limits.depth > 0, "a depth of 0 takes no transfer");
        Inbox {
            limits,
            floor: 1,
            announced: 1 + u64::from(limits.depth),
            told: limits.depth.into(),
            entries: BTreeMap::new(),
            ended_entries: 0,
            state_bytes: 0,
            completes: VecDeque::new(),
            refusals: VecDeque::new(),
            abort_acks: VecDeque::new(),
            ended: Vec::new(),
        }
    }

    /// The peer has begun, or may begin, those from here on.
    pub fn floor(&self) -> u64 {
        self.floor
    }

    /// Transfers ever granted, as the credit word counts them. Numbers are drawn in order, so this is also the highest that the peer
    /// may have begun.
    pub fn granted(&self) -> u64 {
        let depth = u64::from(self.limits.depth);
        self.floor - 1 + (depth + self.ended_entries).min(SPAN * depth)
    }

    /// Of those, told to the peer.
    pub fn announced(&self) -> u64 {
        self.announced - 1
    }

    /// Granted and not told in this epoch.
    pub fn untold(&self) -> u64 {
        self.granted() - self.told
    }

    /// Everything granted is being told; the count.
    pub fn announce(&mut self) -> u64 {
        self.announced = self.granted() + 1;
        self.told = self.granted();
        self.granted()
    }

    /// Bytes of bookkeeping.
    pub fn state_bytes(&self) -> usize {
        self.state_bytes
    }

    /// Transfers open, or ended and not released.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Nothing is open or remembered.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn permit(&self, transfer: u64) -> Result<bool, TransferViolation> {
        if transfer >= self.announced {
            return Err(TransferViolation::NotGranted { transfer, granted: self.announced });
        }
        Ok(transfer >= self.floor)
    }

    /// A chunk of a WRITE is here. `checked`: what the owner of the memory says of its place.
    ///
    /// # Errors
    /// The peer broke the protocol.
    pub fn take(
        &mut self,
        block: &Block,
        checked: impl FnOnce() -> Result<(), Status>,
    ) -> Result<Verdict, TransferViolation> {
        let transfer = block.transfer;
        if !self.permit(transfer)? {
            return Ok(Verdict::Released);
        }
        let fresh = || {
            Entry::Write(Arriving {
                total: block.total,
                set: ChunkSet::default(),
                placed: 0,
                copying: 0,
                ending: None,
            })
        };
        let mut entry_bytes = 0;
        let entry = self.entries.entry(transfer).or_insert_with(|| {
            entry_bytes = ENTRY_BYTES;
            fresh()
        });
        self.state_bytes += entry_bytes;
        let write = match entry {
            Entry::Done(done) if done.direction == Direction::Write => {
                self.owe_status(transfer);
                return Ok(Verdict::Ended);
            }
            Entry::Done(_) | Entry::Collect(_) | Entry::Serve(_) => {
                return Err(TransferViolation::Direction { transfer });
            }
            Entry::Write(write) => write,
        };
        if write.total != block.total {
            return Err(TransferViolation::Total { transfer, expected: write.total, got: block.total });
        }
        if write.ending.is_some() {
            return Ok(Verdict::Ended);
        }
        if write.set.contains(block.chunk) {
            return Ok(Verdict::Duplicate);
        }
        let before = write.set.bytes();
        let growth = write.set.bytes_with(block.chunk) - before;
        let room = || {
            if self.state_bytes + growth > self.limits.state_bytes { Err(Status::TooMany) } else { Ok(()) }
        };
        if let Err(status) = checked().and_then(|()| room()) {
            write.ending = Some(Ending { refused: Some((status, block.chunk)), aborted: false });
            self.settle_write(transfer);
            return Ok(Verdict::Refused);
        }
        write.set.insert(block.chunk);
        write.copying += 1;
        // What it brings into order frees more than it takes.
        self.state_bytes = self.state_bytes + write.set.bytes() - before;
        Ok(Verdict::Place)
    }

    /// The bytes of these chunks are not what they should be.
    pub(in crate::two_sided) fn refuse(
        &mut self,
        block: &Block,
        status: Status,
    ) -> Result<Verdict, TransferViolation> {
        self.take(block, || Err(status))
    }

    /// A copy that [`Inbox::take`] asked for has ended.
    pub fn placed(&mut self, transfer: u64, chunk: u32, outcome: Result<(), Status>) {
        // Only a peer that releases what it was not answered gets here without an entry.
        let Some(Entry::Write(write)) = self.entries.get_mut(&transfer) else { return };
        write.copying -= 1;
        match outcome {
            Ok(()) => write.placed += 1,
            Err(status) if write.ending.is_none() => {
                write.ending = Some(Ending { refused: Some((status, chunk)), aborted: false });
            }
            Err(_) => {}
        }
        self.settle_write(transfer);
    }

    /// The bytes of a chunk that was to be copied did not come after all: it is not there, and will be sent again.
    pub fn lost(&mut self, transfer: u64, chunk: u32) {
        let Some(Entry::Write(write)) = self.entries.get_mut(&transfer) else { return };
        write.copying -= 1;
        let before = write.set.bytes();
        write.set.remove(chunk);
        // Over the limit perhaps, by what a message costs for each that is on its way.
        self.state_bytes = self.state_bytes + write.set.bytes() - before;
        self.settle_write(transfer);
    }

    /// Whether chunks of a WRITE that are being copied still matter.
    pub(in crate::two_sided) fn wants(&self, transfer: u64) -> bool {
        matches!(self.entries.get(&transfer), Some(Entry::Write(write)) if write.ending.is_none())
    }

    fn settle_write(&mut self, transfer: u64) {
        let Some(Entry::Write(write)) = self.entries.get(&transfer) else { return };
        if write.copying > 0 {
            return;
        }
        let (ending, chunks) = (write.ending, write.placed);
        if ending.is_none() && chunks < write.total {
            return;
        }
        self.finish(transfer, Direction::Write, ending, chunks);
        self.ended.push((transfer, ending.is_none()));
    }

    fn finish(&mut self, transfer: u64, direction: Direction, ending: Option<Ending>, chunks: u32) {
        let refused = ending.and_then(|ending| ending.refused);
        let aborted = ending.is_some_and(|ending| ending.aborted);
        let (status, at) = match (refused, aborted) {
            (Some(refused), _) => refused,
            (None, true) => (Status::Aborted, u32::MAX),
            (None, false) => (Status::Ok, u32::MAX),
        };
        let done = Done { direction, status, chunks, at, owes_status: false, owes_abort: false };
        self.replace(transfer, Entry::Done(done));
        // Of a READ that ended well its reader has told us.
        if refused.is_some() || ending.is_none() && direction == Direction::Write {
            self.owe_status(transfer);
        }
        if aborted {
            self.owe_abort(transfer);
        }
    }

    fn replace(&mut self, transfer: u64, entry: Entry) {
        self.ended_entries += u64::from(matches!(entry, Entry::Done(_)));
        self.state_bytes += ENTRY_BYTES + own_bytes(&entry);
        if let Some(before) = self.entries.insert(transfer, entry) {
            assert!(!matches!(before, Entry::Done(_)), "what has ended stays so");
            self.state_bytes -= ENTRY_BYTES + own_bytes(&before);
        }
    }

    fn owe_status(&mut self, transfer: u64) {
        let Some(Entry::Done(done)) = self.entries.get_mut(&transfer) else { return };
        if std::mem::replace(&mut done.owes_status, true) {
            return;
        }
        if done.status == Status::Ok {
            self.completes.push_back(transfer);
        } else {
            self.refusals.push_back(transfer);
        }
    }

    fn owe_abort(&mut self, transfer: u64) {
        let Some(Entry::Done(done)) = self.entries.get_mut(&transfer) else { return };
        if !std::mem::replace(&mut done.owes_abort, true) {
            self.abort_acks.push_back(transfer);
        }
    }

    /// The peer gives up one of its transfers.
    ///
    /// # Errors
    /// The peer broke the protocol.
    pub fn abort(&mut self, transfer: u64, direction: Direction) -> Result<(), TransferViolation> {
        if !self.permit(transfer)? {
            return Ok(());
        }
        let give_up =
            |ending: Option<Ending>| Some(Ending { refused: ending.and_then(|e| e.refused), aborted: true });
        let wrong = Err(TransferViolation::Direction { transfer });
        match self.entries.get_mut(&transfer) {
            Some(Entry::Done(done)) if done.direction != direction => return wrong,
            Some(Entry::Write(_)) if direction == Direction::Read => return wrong,
            Some(Entry::Collect(_) | Entry::Serve(_)) if direction == Direction::Write => return wrong,
            Some(Entry::Done(_)) => self.owe_abort(transfer),
            Some(Entry::Write(write)) => {
                write.ending = give_up(write.ending);
                self.settle_write(transfer);
            }
            Some(Entry::Serve(serving)) => {
                serving.ending = give_up(serving.ending);
                self.settle_read(transfer);
            }
            // It may not be known: its chunks are on other queue pairs, and must not be placed when they come.
            Some(Entry::Collect(_)) | None => self.finish(transfer, direction, give_up(None), 0),
        }
        if direction == Direction::Write && matches!(self.entries.get(&transfer), Some(Entry::Done(_))) {
            self.ended.push((transfer, self.outcome(transfer) == Some(true)));
        }
        Ok(())
    }

    /// Whether a WRITE ended well; `None`: it has not ended.
    pub(in crate::two_sided) fn outcome(&self, transfer: u64) -> Option<bool> {
        match self.entries.get(&transfer) {
            Some(Entry::Done(done)) => Some(done.status == Status::Ok),
            _ => None,
        }
    }

    /// The peer will not name its transfers below this any more.
    ///
    /// # Errors
    /// The peer broke the protocol.
    pub fn release(&mut self, below: u64) -> Result<(), TransferViolation> {
        if below < self.floor {
            return Err(TransferViolation::ReleaseFalls { below, floor: self.floor });
        }
        if below > self.announced {
            return Err(TransferViolation::Release { below, granted: self.announced });
        }
        while let Some(first) = self.entries.first_entry().filter(|first| *first.key() < below) {
            let (transfer, entry) = first.remove_entry();
            self.ended_entries -= u64::from(matches!(entry, Entry::Done(_)));
            self.state_bytes -= ENTRY_BYTES + own_bytes(&entry);
            if matches!(entry, Entry::Write(_)) {
                self.ended.push((transfer, false));
            }
        }
        self.floor = below;
        Ok(())
    }

    /// The next answer of a kind that is owed: completions, then refusals, then ends of aborted ones.
    pub(in crate::two_sided) fn next_complete(&mut self) -> Option<Answer> {
        while let Some(transfer) = self.completes.pop_front() {
            if let Some(Entry::Done(done)) = self.entries.get_mut(&transfer)
                && std::mem::take(&mut done.owes_status)
            {
                return Some(Answer::Complete { transfer, chunks: done.chunks });
            }
        }
        None
    }

    pub(in crate::two_sided) fn next_refusal(&mut self) -> Option<Answer> {
        while let Some(transfer) = self.refusals.pop_front() {
            if let Some(Entry::Done(done)) = self.entries.get_mut(&transfer)
                && std::mem::take(&mut done.owes_status)
            {
                let Done { direction, status, at, .. } = *done;
                return Some(Answer::Refused { transfer, direction, status, at });
            }
        }
        None
    }

    pub(in crate::two_sided) fn next_abort_ack(&mut self) -> Option<Answer> {
        while let Some(transfer) = self.abort_acks.pop_front() {
            if let Some(Entry::Done(done)) = self.entries.get_mut(&transfer)
                && std::mem::take(&mut done.owes_abort)
            {
                let Done { direction, status, chunks, .. } = *done;
                return Some(Answer::Aborted { transfer, direction, status, chunks });
            }
        }
        None
    }

    pub(in crate::two_sided) fn owes_completes(&self) -> bool {
        !self.completes.is_empty()
    }

    pub(in crate::two_sided) fn owes_refusals(&self) -> bool {
        !self.refusals.is_empty()
    }

    pub(in crate::two_sided) fn owes_abort_acks(&self) -> bool {
        !self.abort_acks.is_empty()
    }

    /// The epoch is over, and no copy is under way: what the peer will resend is forgotten, what was placed is not.
    pub(in crate::two_sided) fn restart(&mut self) {
        for queue in [&mut self.completes, &mut self.refusals, &mut self.abort_acks] {
            queue.clear();
        }
        self.told = 0;
        let mut freed = 0;
        self.entries.retain(|_, entry| match entry {
            Entry::Write(write) => {
                assert_eq!(write.copying, 0, "copies end before their epoch is closed");
                true
            }
            Entry::Done(done) => {
                (done.owes_status, done.owes_abort) = (false, false);
                true
            }
            Entry::Collect(_) | Entry::Serve(_) => {
                freed += ENTRY_BYTES + own_bytes(entry);
                false
            }
        });
        self.state_bytes -= freed;
    }
}

fn own_bytes(entry: &Entry) -> usize {
    match entry {
        Entry::Write(write) => write.set.bytes(),
        Entry::Collect(pieces) => pieces.capacity() * size_of::<Piece>(),
        Entry::Serve(serving) => serving.map.pieces().len() * size_of::<Piece>(),
        Entry::Done(_) => 0,
    }
}
