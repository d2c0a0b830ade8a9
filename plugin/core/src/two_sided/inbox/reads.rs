//! READs of the peer.

use super::{Ending, Entry, Inbox, Serving, TransferViolation};
use crate::ids::Nanos;
use crate::two_sided::chunks::{ChunkMap, Piece};
use crate::two_sided::codec::{Direction, ReadPiece, Status};

impl Inbox {
    /// Pieces of a READ. `true`: they are all here, and it can be served.
    ///
    /// # Errors
    /// The peer broke the protocol.
    pub(in crate::two_sided) fn read_request(
        &mut self,
        now: Nanos,
        request: (u64, u32, bool, &[ReadPiece]),
        chunk_bytes: u32,
        check: impl Fn(&ReadPiece) -> Result<(), Status>,
    ) -> Result<bool, TransferViolation> {
        let (transfer, first, last, pieces) = request;
        if !self.permit(transfer)? {
            return Ok(false);
        }
        let mut known = match self.entries.get_mut(&transfer) {
            Some(Entry::Collect(known)) => std::mem::take(known),
            Some(Entry::Done(done)) if done.direction == Direction::Read => {
                // More pieces of one that was refused or given up meanwhile; or it is asked for anew in a later epoch, because
                // the refusal was lost with the one before.
                if first == 0 && done.status != Status::Ok {
                    self.owe_status(transfer);
                }
                return Ok(false);
            }
            Some(_) => return Err(TransferViolation::Direction { transfer }),
            None => Vec::new(),
        };
        // Its bytes were counted with the entry.
        self.state_bytes -= known.capacity() * size_of::<Piece>();
        if first as usize != known.len() {
            let expected = known.len() as u32;
            self.replace(transfer, Entry::Collect(known));
            return Err(TransferViolation::PieceOrder { transfer, expected, got: first });
        }
        let needed = (known.len() + pieces.len()) * size_of::<Piece>();
        let mut refused =
            (self.state_bytes + needed > self.limits.state_bytes).then_some((Status::TooMany, first));
        for (nth, piece) in (first..).zip(pieces) {
            refused = refused.or_else(|| check(piece).err().map(|status| (status, nth)));
            known.push(Piece { local: 0, region: piece.region, offset: piece.offset, len: piece.len });
        }
        let mut map = None;
        if refused.is_none() && last {
            match ChunkMap::cut(std::mem::take(&mut known).into(), chunk_bytes) {
                Ok(cut) => map = Some(cut),
                Err(_) => refused = Some((Status::TooMany, u32::MAX)),
            }
        }
        if refused.is_some() {
            self.replace(transfer, Entry::Collect(Vec::new()));
            self.finish(transfer, Direction::Read, Some(Ending { refused, aborted: false }), 0);
            return Ok(false);
        }
        let ready = map.is_some();
        self.replace(
            transfer,
            match map {
                Some(map) => Entry::Serve(Serving { map, next: 0, in_flight: 0, since: now, ending: None }),
                None => Entry::Collect(known),
            },
        );
        Ok(ready)
    }

    /// A READ that is being served and not about to end.
    pub(in crate::two_sided) fn serving(&mut self, transfer: u64) -> Option<&mut Serving> {
        match self.entries.get_mut(&transfer) {
            Some(Entry::Serve(serving)) if serving.ending.is_none() => Some(serving),
            _ => None,
        }
    }

    /// A message of a READ no longer reads its memory.
    pub(in crate::two_sided) fn served(&mut self, transfer: u64) {
        if let Some(Entry::Serve(serving)) = self.entries.get_mut(&transfer) {
            serving.in_flight -= 1;
            self.settle_read(transfer);
        }
    }

    /// A READ cannot be served any further.
    pub(in crate::two_sided) fn stop_serving(&mut self, transfer: u64, status: Status, at: u32) {
        if let Some(Entry::Serve(serving)) = self.entries.get_mut(&transfer) {
            serving.ending = Some(Ending { refused: Some((status, at)), aborted: false });
            self.settle_read(transfer);
        }
    }

    /// The peer has all of a READ.
    ///
    /// # Errors
    /// The peer broke the protocol.
    pub(in crate::two_sided) fn read_done(&mut self, transfer: u64) -> Result<(), TransferViolation> {
        if !self.permit(transfer)? {
            return Ok(());
        }
        match self.entries.get(&transfer) {
            Some(Entry::Serve(serving)) => {
                let chunks = serving.next;
                self.finish(transfer, Direction::Read, None, chunks);
                Ok(())
            }
            Some(Entry::Done(done)) if done.direction == Direction::Read => Ok(()),
            // Read in an epoch before this one.
            None => Ok(()),
            Some(_) => Err(TransferViolation::Direction { transfer }),
        }
    }

    pub(super) fn settle_read(&mut self, transfer: u64) {
        let Some(Entry::Serve(serving)) = self.entries.get(&transfer) else { return };
        if serving.in_flight == 0 && serving.ending.is_some() {
            let (ending, chunks) = (serving.ending, serving.next);
            self.finish(transfer, Direction::Read, ending, chunks);
        }
    }

    /// READs that have waited since before `since`.
    pub(in crate::two_sided) fn stale_reads(&self, since: Nanos) -> Vec<u64> {
        let stale =
            |entry: &Entry| matches!(entry, Entry::Serve(s) if s.ending.is_none() && s.since <= since);
        self.entries.iter().filter(|(_, entry)| stale(entry)).map(|(id, _)| *id).collect()
    }

    /// When the READ that waits longest began to.
    pub(in crate::two_sided) fn oldest_read(&self) -> Option<Nanos> {
        let since = |entry: &Entry| match entry {
            Entry::Serve(s) if s.ending.is_none() => Some(s.since),
            _ => None,
        };
        self.entries.values().filter_map(since).min()
    }
}
