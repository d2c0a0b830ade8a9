//! What every transfer and notification must come to.

use crate::Check;
use crate::cells::{Cells, Run};
use baton_core::two_sided::codec::{Direction, Status};
use baton_core::two_sided::report::XferFailure;
use std::collections::{BTreeMap, VecDeque};

/// A link and the side that began something.
pub(super) type Way = (usize, usize);

/// One piece of a transfer: `len` bytes at `offset` of both runs.
pub(super) struct Piece {
    pub local: Run,
    pub remote: Run,
    pub offset: usize,
    pub bytes: Vec<u8>,
    pub filler: u8,
}

impl std::fmt::Debug for Piece {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Piece { local, remote, offset, bytes, .. } = self;
        write!(f, "{} bytes at {offset} of {local:?} and {remote:?}", bytes.len())
    }
}

/// A transfer that was begun.
#[derive(Debug)]
pub(super) struct Xfer {
    pub way: Way,
    pub direction: Direction,
    pub pieces: Vec<Piece>,
    pub message: bool,
    /// It names a region that is not there.
    pub poisoned: bool,
    pub canceled: bool,
    /// How it was reported.
    pub ended: Option<bool>,
    /// It was failed for want of a session: whether the peer hears of it nobody knows.
    pub lost: bool,
    pub delivered: bool,
}

/// A notification that has not come to its end for its sender.
#[derive(Debug)]
struct Unresolved {
    way: Way,
    /// It has a deadline.
    expires: bool,
}

#[derive(Default)]
pub(super) struct Checker {
    xfers: BTreeMap<u64, Xfer>,
    /// Ids in the order of sending, by the side that sends.
    notes: BTreeMap<Way, VecDeque<u64>>,
    unresolved: BTreeMap<u64, Unresolved>,
    /// Sources of READs that are over, and the side that served them: its own until nothing of it is outstanding.
    pub sources: Vec<(Way, Run)>,
    next_id: u64,
    pub done: u64,
    pub failed: u64,
    pub delivered: u64,
}

/// The bytes that tell of `id`.
pub(super) fn message(id: u64, len: usize) -> Vec<u8> {
    let mut bytes = id.to_le_bytes().to_vec();
    bytes.resize(len.max(8), id as u8);
    bytes
}

impl Checker {
    pub fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub fn submitted(&mut self, id: u64, xfer: Xfer) {
        self.xfers.insert(id, xfer);
    }

    pub fn notified(&mut self, way: Way, id: u64, expires: bool) {
        self.notes.entry(way).or_default().push_back(id);
        self.unresolved.insert(id, Unresolved { way, expires });
    }

    /// Transfers of that side that are not over.
    pub fn pending(&self, way: Way) -> Vec<u64> {
        let of = self.xfers.iter().filter(|(_, xfer)| xfer.way == way && xfer.ended.is_none());
        of.map(|(id, _)| *id).collect()
    }

    pub fn canceled(&mut self, id: u64) {
        if let Some(xfer) = self.xfers.get_mut(&id) {
            xfer.canceled = true;
        }
    }

    /// A transfer was reported: nothing of it touches memory from now on, so its cells are anybody's.
    pub fn ended(
        &mut self,
        way: Way,
        id: u64,
        result: Result<(), XferFailure>,
        cells: &mut [Cells],
    ) -> Check {
        let xfer = self.reported(way, id)?;
        match &result {
            Ok(()) if !xfer.poisoned => {}
            Err(XferFailure::Canceled) if xfer.canceled => {}
            Err(XferFailure::Refused { status: Status::NoRegion, .. }) if xfer.poisoned => {}
            other => return Err(format!("{way:?}: transfer {id} came to {other:?}: {xfer:?}")),
        }
        self.over(way, id, result.is_ok(), cells)
    }

    /// A transfer was failed because there is no session: as if it had ended by itself, but its message may still come.
    pub fn lost(&mut self, way: Way, id: u64, failure: &XferFailure, cells: &mut [Cells]) -> Check {
        let xfer = self.reported(way, id)?;
        let right = match failure {
            XferFailure::Ended(_) => true,
            XferFailure::Canceled => xfer.canceled,
            XferFailure::Refused { status: Status::NoRegion, .. } => xfer.poisoned,
            _ => false,
        };
        if !right {
            return Err(format!("{way:?}: without a session transfer {id} came to {failure:?}: {xfer:?}"));
        }
        xfer.lost = true;
        self.over(way, id, false, cells)
    }

    fn reported(&mut self, way: Way, id: u64) -> Result<&mut Xfer, String> {
        let xfer = self.xfers.get_mut(&id).ok_or_else(|| format!("{way:?}: {id} is reported, unasked"))?;
        if xfer.way != way || xfer.ended.is_some() {
            return Err(format!("{way:?}: transfer {id} is reported twice or elsewhere"));
        }
        Ok(xfer)
    }

    fn over(&mut self, way: Way, id: u64, done: bool, cells: &mut [Cells]) -> Check {
        let xfer = self.reported(way, id)?;
        xfer.ended = Some(done);
        xfer.check(id, done, cells)?;
        let xfer = &self.xfers[&id];
        for piece in &xfer.pieces {
            cells[piece.local.node].give(piece.local);
            match xfer.direction {
                Direction::Write => cells[piece.remote.node].give(piece.remote),
                // Its owner may still be sending what nobody places any more.
                Direction::Read => self.sources.push(((way.0, 1 - way.1), piece.remote)),
            }
        }
        if done {
            self.done += 1
        } else {
            self.failed += 1
        }
        self.forget(id);
        Ok(())
    }

    /// A message came out at the peer of `way`.
    pub fn delivered(&mut self, way: Way, bytes: &[u8], cells: &[Cells]) -> Check {
        let head: [u8; 8] = bytes[..8].try_into().map_err(|_| "a message without an id".to_owned())?;
        let id = u64::from_le_bytes(head);
        if bytes != message(id, bytes.len()) {
            return Err(format!("{way:?}: message {id} has wrong bytes"));
        }
        self.delivered += 1;
        if self.notes.get(&way).is_some_and(|queue| queue.contains(&id)) {
            let first = self.notes.get_mut(&way).and_then(VecDeque::pop_front);
            return if first == Some(id) {
                Ok(())
            } else {
                Err(format!("{way:?}: notification {id} came before {first:?}"))
            };
        }
        let xfer =
            self.xfers.get_mut(&id).ok_or_else(|| format!("{way:?}: {id} is told of twice or never was"))?;
        let given_up = xfer.ended == Some(false) && !xfer.lost;
        let wrong = xfer.way != way || !xfer.message || xfer.delivered || given_up;
        if wrong {
            return Err(format!("{way:?}: message of {id}, which is {xfer:?}"));
        }
        xfer.delivered = true;
        if xfer.ended.is_none() && xfer.direction == Direction::Write {
            xfer.check(id, true, cells)?;
        }
        self.forget(id);
        Ok(())
    }

    pub fn note_done(&mut self, way: Way, id: u64, sent: bool) -> Check {
        match self.unresolved.remove(&id) {
            Some(of) if of.way == way && sent => Ok(()),
            // Nothing of it was sent, so it must never come.
            Some(of) if of.way == way && of.expires => self.strike(way, id),
            other => Err(format!("{way:?}: notification {id} resolves as {sent}, it was {other:?}")),
        }
    }

    fn strike(&mut self, way: Way, id: u64) -> Check {
        let queue = self.notes.entry(way).or_default();
        match queue.iter().position(|other| *other == id) {
            Some(at) => {
                queue.remove(at);
                Ok(())
            }
            None => Err(format!("{way:?}: notification {id} expired and was delivered")),
        }
    }

    /// A notification was given up with its session.
    pub fn note_lost(&mut self, way: Way, id: u64, bytes: &[u8]) -> Check {
        match self.unresolved.remove(&id) {
            Some(of) if of.way == way && bytes == message(id, bytes.len()) => Ok(()),
            other => Err(format!("{way:?}: notification {id} is lost, it was {other:?}")),
        }
    }

    /// The session of a side is over and so is its peer: everything was reported, and nothing can come of it any more.
    pub fn session_over(&mut self, way: Way) -> Check {
        if let Some((id, xfer)) = self.xfers.iter().find(|(_, x)| x.way == way && x.ended.is_none()) {
            return Err(format!("{way:?}: transfer {id} was not reported with its session: {xfer:?}"));
        }
        if let Some((id, _)) = self.unresolved.iter().find(|(_, note)| note.way == way) {
            return Err(format!("{way:?}: notification {id} was not resolved with its session"));
        }
        self.forget_way(way);
        Ok(())
    }

    /// Whoever began these is dead, and the other side has closed its epoch: no byte of them can land there any more.
    pub fn initiator_died(&mut self, way: Way, cells: &mut [Cells]) -> Check {
        for (id, xfer) in self.xfers.iter().filter(|(_, xfer)| xfer.way == way && xfer.ended.is_none()) {
            xfer.check(*id, false, cells)?;
            xfer.pieces.iter().for_each(|piece| cells[piece.remote.node].give(piece.remote));
        }
        self.forget_way(way);
        Ok(())
    }

    pub fn forget_way(&mut self, way: Way) {
        self.xfers.retain(|_, xfer| xfer.way != way);
        self.unresolved.retain(|_, note| note.way != way);
        self.notes.remove(&way);
    }

    fn forget(&mut self, id: u64) {
        let over = |xfer: &Xfer| match xfer.ended {
            Some(true) => xfer.delivered || !xfer.message,
            // A canceled one stays known, to notice a message that comes after all.
            Some(false) | None => false,
        };
        if self.xfers.get(&id).is_some_and(over) {
            self.xfers.remove(&id);
        }
    }

    /// Everything is over, everything was told.
    pub fn at_rest(&self) -> Check {
        if let Some((id, xfer)) = self.xfers.iter().find(|(_, xfer)| xfer.ended != Some(false)) {
            return Err(format!("transfer {id} is not over, or its message never came: {xfer:?}"));
        }
        if let Some((way, queue)) = self.notes.iter().find(|(_, queue)| !queue.is_empty()) {
            return Err(format!("{way:?}: notifications {queue:?} never came"));
        }
        match self.unresolved.first_key_value() {
            None => Ok(()),
            Some((id, note)) => Err(format!("{:?}: notification {id} never resolved", note.way)),
        }
    }
}

impl Xfer {
    /// All bytes are there (if it is done), and nothing around them was touched.
    fn check(&self, id: u64, done: bool, cells: &[Cells]) -> Check {
        for piece in &self.pieces {
            let target = if self.direction == Direction::Write { piece.remote } else { piece.local };
            if cells[target.node].gone {
                continue;
            }
            let found = cells[target.node].load(target);
            let end = piece.offset + piece.bytes.len();
            if done && found[piece.offset..end] != piece.bytes {
                return Err(format!("transfer {id} is done or told of, but bytes are missing: {self:?}"));
            }
            let around = found[..piece.offset].iter().chain(&found[end..]);
            if around.into_iter().any(|byte| *byte != piece.filler) {
                return Err(format!("transfer {id} touched what is not its own: {self:?}"));
            }
        }
        Ok(())
    }
}
