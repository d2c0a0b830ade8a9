//! What must hold. Knows each transfer and each notification from the moment it is submitted.

use crate::Check;
use crate::cells::{CELL, Cells, Run};
use baton_core::peer::XferFailure;
use baton_fabric::Op;
use std::collections::{BTreeMap, VecDeque};

/// A direction of a link: (link, sending side).
pub(crate) type Way = (usize, usize);

/// One descriptor of a transfer: `len` bytes at `offset` of both runs.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub local: Run,
    pub remote: Run,
    pub offset: usize,
    pub len: usize,
    /// What moves.
    pub bytes: Vec<u8>,
    /// What lies around it at the destination.
    pub filler: u8,
}

impl Piece {
    fn destination(&self, op: Op) -> Run {
        if op == Op::Write { self.remote } else { self.local }
    }
}

/// How a transfer stands with its initiator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Pending,
    Done,
    Failed(XferFailure),
}

#[derive(Clone, Debug)]
pub(crate) struct Xfer {
    pub op: Op,
    pub pieces: Vec<Piece>,
    pub notified: bool,
    /// It brings its id.
    pub with_id: bool,
    /// And no message.
    pub silent: bool,
    pub landed: bool,
    /// Posted with a wrong key on purpose.
    pub poisoned: bool,
    pub epoch: u32,
    pub fate: Fate,
    pub delivered: bool,
    /// The initiator's cells are given back.
    pub local_free: bool,
    /// The target's are.
    pub remote_free: bool,
}

/// A message that rides in the control ring.
#[derive(Debug)]
struct Standalone {
    id: u64,
    /// It is a transfer without data, which a failure may swallow.
    xfer: bool,
}

/// Everything that is expected.
#[derive(Default)]
pub(crate) struct Checker {
    next_id: u64,
    xfers: BTreeMap<(Way, u64), Xfer>,
    standalone: BTreeMap<Way, VecDeque<Standalone>>,
    pub delivered: u64,
    pub done: u64,
    pub failed: u64,
    pub bytes: u64,
}

/// A message that names its transfer or notification; the tail is noise that must arrive unchanged.
pub(crate) fn message(id: u64, len: usize) -> Vec<u8> {
    let mut bytes = id.to_le_bytes().to_vec();
    bytes.extend((8..len).map(|i| (id as u8).wrapping_mul(31).wrapping_add(i as u8)));
    bytes
}

impl Checker {
    pub fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    pub fn submitted(&mut self, way: Way, id: u64, xfer: Xfer) {
        if xfer.pieces.is_empty() && xfer.notified {
            self.standalone.entry(way).or_default().push_back(Standalone { id, xfer: true });
        }
        self.xfers.insert((way, id), xfer);
    }

    pub fn notified(&mut self, way: Way, id: u64) {
        self.standalone.entry(way).or_default().push_back(Standalone { id, xfer: false });
    }

    pub fn pending(&self, way: Way) -> Vec<u64> {
        let range = self.xfers.range((way, 0)..=(way, u64::MAX));
        range.filter(|(_, xfer)| xfer.fate == Fate::Pending).map(|((_, id), _)| *id).collect()
    }

    /// The target hears of something.
    pub fn delivered(&mut self, way: Way, bytes: &[u8], cells: &mut [Cells]) -> Check {
        let id =
            bytes.first_chunk().map(|id| u64::from_le_bytes(*id)).ok_or("a message too short to be ours")?;
        if bytes != message(id, bytes.len()) {
            return Err(format!("{way:?}: message {id} arrived changed"));
        }
        if let Some(xfer) = self.xfers.get(&(way, id))
            && (xfer.silent || xfer.with_id != xfer.landed)
        {
            return Err(format!(
                "{way:?}: transfer {id} brings a message without its id, or should bring none"
            ));
        }
        self.arrived(way, id, cells)
    }

    /// The target may ask for a transfer by its id.
    pub fn landed(&mut self, way: Way, id: u64, cells: &mut [Cells]) -> Check {
        let expected = self.xfers.get_mut(&(way, id)).filter(|xfer| xfer.with_id && !xfer.landed);
        let Some(xfer) = expected else {
            return Err(format!("{way:?}: id {id} landed twice, or was never given"));
        };
        xfer.landed = true;
        if xfer.silent { self.arrived(way, id, cells) } else { Ok(()) }
    }

    fn arrived(&mut self, way: Way, id: u64, cells: &mut [Cells]) -> Check {
        self.delivered += 1;
        if let Some(queue) = self.standalone.get_mut(&way)
            && let Some(at) = queue.iter().position(|one| one.id == id)
        {
            // Those passed over must be transfers that failed; kept until their failure is known.
            let passed: Vec<_> = queue.drain(..at).collect();
            queue.pop_front();
            if let Some(lost) = passed.iter().find(|one| !one.xfer) {
                return Err(format!("{way:?}: notification {id} arrived before {}", lost.id));
            }
            for one in passed {
                let fate = self.xfers.get(&(way, one.id)).map(|xfer| &xfer.fate);
                if matches!(fate, Some(Fate::Pending | Fate::Done)) {
                    return Err(format!(
                        "{way:?}: notification {id} arrived before transfer {} without data",
                        one.id
                    ));
                }
            }
            let Some(xfer) = self.xfers.get_mut(&(way, id)) else { return Ok(()) };
            xfer.delivered = true;
            return self.settle(way, id, cells);
        }
        let Some(xfer) = self.xfers.get_mut(&(way, id)) else {
            return Err(format!("{way:?}: message {id} arrived twice, or was never sent"));
        };
        if xfer.delivered || !xfer.notified {
            return Err(format!("{way:?}: transfer {id} was delivered twice, or never notified"));
        }
        if matches!(xfer.fate, Fate::Failed(XferFailure::Canceled)) {
            return Err(format!("{way:?}: transfer {id} was canceled and delivered all the same"));
        }
        xfer.delivered = true;
        let told = format!("{way:?}: transfer {id} was delivered");
        match xfer.op {
            Op::Write => verify(xfer, cells).map_err(|e| format!("{told} before its data: {e}"))?,
            // The target frees its memory: from here on a READ would fetch something else.
            Op::Read => {
                for piece in &xfer.pieces {
                    cells[piece.remote.node].store(piece.remote, &vec![0xDD; piece.remote.count * CELL]);
                }
            }
        }
        self.settle(way, id, cells)
    }

    /// The initiator hears how a transfer ended.
    /// `at_close`: with its epoch, so that its writes may still be under way at the target.
    pub fn ended(
        &mut self,
        way: Way,
        id: u64,
        result: Result<(), XferFailure>,
        at_close: bool,
        cells: &mut [Cells],
    ) -> Check {
        let Some(xfer) = self.xfers.get_mut(&(way, id)) else {
            return Err(format!("{way:?}: transfer {id} ended, but never began"));
        };
        if xfer.fate != Fate::Pending {
            return Err(format!("{way:?}: transfer {id} ended twice: {:?}, then {result:?}", xfer.fate));
        }
        match result {
            Ok(()) if xfer.poisoned => {
                return Err(format!("{way:?}: transfer {id} is done with a wrong key"));
            }
            Ok(()) => {
                xfer.fate = Fate::Done;
                verify(xfer, cells).map_err(|e| format!("{way:?}: transfer {id} is done, but {e}"))?;
                self.done += 1;
                self.bytes += xfer.pieces.iter().map(|piece| piece.len as u64).sum::<u64>();
            }
            Err(failure) => {
                let blames =
                    matches!(failure, XferFailure::RemoteAccess { .. } | XferFailure::LocalAccess { .. });
                if blames && !xfer.poisoned {
                    return Err(format!("{way:?}: transfer {id} is blamed without cause: {failure}"));
                }
                if failure == XferFailure::Canceled && xfer.delivered {
                    return Err(format!("{way:?}: transfer {id} was delivered and then canceled"));
                }
                if failure == XferFailure::Canceled && !at_close {
                    // Nothing of it is on its way any more, on either side.
                    free_remote(xfer, cells);
                }
                xfer.fate = Fate::Failed(failure);
                self.failed += 1;
            }
        }
        self.settle(way, id, cells)
    }

    /// Gives back what is over, and forgets what is over on both sides.
    fn settle(&mut self, way: Way, id: u64, cells: &mut [Cells]) -> Check {
        let Some(xfer) = self.xfers.get_mut(&(way, id)) else { return Ok(()) };
        if xfer.fate != Fate::Pending {
            free_local(xfer, cells);
        }
        if xfer.fate == Fate::Done && (xfer.delivered || !xfer.notified) {
            free_remote(xfer, cells);
        }
        let over = xfer.fate != Fate::Pending && xfer.local_free && xfer.remote_free;
        if over && (xfer.delivered || !xfer.notified) {
            self.xfers.remove(&(way, id));
        }
        Ok(())
    }

    /// An epoch is closed on both sides: what failed in it can no more arrive, what was done must have.
    pub fn epoch_closed(
        &mut self,
        link: usize,
        epoch: u32,
        survivors: [bool; 2],
        cells: &mut [Cells],
    ) -> Check {
        for side in [0, 1] {
            let way = (link, side);
            let ids: Vec<u64> =
                self.xfers.range((way, 0)..=(way, u64::MAX)).map(|((_, id), _)| *id).collect();
            for id in ids {
                let Some(xfer) = self.xfers.get_mut(&(way, id)).filter(|xfer| xfer.epoch <= epoch) else {
                    continue;
                };
                if xfer.fate == Fate::Done && xfer.notified && !xfer.delivered && survivors[1 - side] {
                    return Err(format!("{way:?}: transfer {id} is done, but was never delivered"));
                }
                if xfer.fate == Fate::Pending && survivors[side] {
                    return Err(format!("{way:?}: transfer {id} outlived its epoch"));
                }
                free_local(xfer, cells);
                free_remote(xfer, cells);
                self.xfers.remove(&(way, id));
            }
            // Transfers without data end with their epoch.
            let known: Vec<u64> =
                self.xfers.range((way, 0)..=(way, u64::MAX)).map(|((_, id), _)| *id).collect();
            if let Some(queue) = self.standalone.get_mut(&way) {
                queue.retain(|one| !one.xfer || known.contains(&one.id));
            }
        }
        Ok(())
    }

    /// At rest, with everything connected: nothing is owed to anybody.
    pub fn at_rest(&self, alive: impl Fn(Way) -> bool) -> Check {
        for ((way, id), xfer) in self.xfers.iter().filter(|((way, _), _)| alive(*way)) {
            let failed = matches!(xfer.fate, Fate::Failed(_));
            if !failed && (xfer.fate == Fate::Pending || xfer.notified && !xfer.delivered) {
                let Xfer { fate, delivered, epoch, .. } = xfer;
                return Err(format!(
                    "{way:?}: transfer {id} of epoch {epoch} at rest: {fate:?}, delivered: {delivered}"
                ));
            }
        }
        for (way, queue) in self.standalone.iter().filter(|(way, _)| alive(**way)) {
            if let Some(lost) = queue.iter().find(|one| !one.xfer) {
                return Err(format!(
                    "{way:?}: notification {} and {} more never arrived",
                    lost.id,
                    queue.len() - 1
                ));
            }
        }
        Ok(())
    }
}

/// Compares each destination with what must be there, and all around it.
fn verify(xfer: &Xfer, cells: &[Cells]) -> Check {
    for (index, piece) in xfer.pieces.iter().enumerate() {
        let run = piece.destination(xfer.op);
        let found = cells[run.node].load(run);
        let mut expected = vec![piece.filler; found.len()];
        expected[piece.offset..piece.offset + piece.len].copy_from_slice(&piece.bytes);
        if let Some(at) = (0..found.len()).find(|&at| found[at] != expected[at]) {
            let inside = at >= piece.offset && at < piece.offset + piece.len;
            let place = if inside { "of" } else { "outside" };
            return Err(format!(
                "byte {at} {place} piece {index} ({} bytes at {}) is {:#04x}, not {:#04x}",
                piece.len, piece.offset, found[at], expected[at]
            ));
        }
    }
    Ok(())
}

fn free_local(xfer: &mut Xfer, cells: &mut [Cells]) {
    if !std::mem::replace(&mut xfer.local_free, true) {
        xfer.pieces.iter().for_each(|piece| cells[piece.local.node].give(piece.local));
    }
}

fn free_remote(xfer: &mut Xfer, cells: &mut [Cells]) {
    if !std::mem::replace(&mut xfer.remote_free, true) {
        xfer.pieces.iter().for_each(|piece| cells[piece.remote.node].give(piece.remote));
    }
}
