//! Data messages of the peer: checked, then copied out of their slot by the driver.

use baton_fabric::{Completion, CompletionKind};

use super::Channel;
use crate::ids::Nanos;
use crate::two_sided::codec::{
    Block, DATA_HEADER_BYTES, DataHeader, DataKind, Direction, MessageError, Status, check_crc, decode_blocks,
};
use crate::two_sided::inbox::Verdict;
use crate::two_sided::pool::{Pool, SlotId};
use crate::two_sided::report::{TwoEnd, TwoViolation, XferFailure};
use crate::two_sided::setup::{Place, PlaceJob, RestOf, Ticket, TwoMemory};

/// A data message that is here, or its head.
struct Arrived {
    lane: usize,
    slot: SlotId,
    /// Of all of it.
    len: u32,
    /// If it is only the head: bytes of that.
    head_bytes: Option<u32>,
}

fn head_of(done: &Completion) -> Option<u32> {
    match done.kind {
        CompletionKind::RecvHead { head_bytes } => Some(head_bytes),
        _ => None,
    }
}

impl Channel {
    pub(super) fn on_message(
        &mut self,
        now: Nanos,
        nth: usize,
        done: &Completion,
        mem: &dyn TwoMemory,
        pool: &mut Pool,
    ) -> Result<(), TwoEnd> {
        let lane = &mut self.lanes[nth];
        let expected = u64::from(lane.recv.received() as u32);
        if done.seq != expected {
            return Err(TwoEnd::WrongRecv { endpoint: done.endpoint, got: done.seq, expected });
        }
        let slot = lane.posted.pop_front();
        if !lane.recv.receive(1) {
            if let Some(slot) = slot {
                lane.posted.push_front(slot);
            }
            let (received, announced) = (lane.recv.received() + 1, lane.recv.announced());
            return Err(TwoViolation::TooManyReceives { lane: Some(lane.id), received, announced }.into());
        }
        let slot = slot.expect("announced ≤ granted: what was announced is posted");
        self.counters.messages_received += 1;
        pool.fill(slot);
        let before = self.places.len();
        self.counters.heads_received += u64::from(head_of(done).is_some());
        let arrived = Arrived { lane: nth, slot, len: done.len_bytes, head_bytes: head_of(done) };
        let outcome = self.take_message(now, &arrived, mem);
        if outcome.is_ok() && self.places.len() == before {
            self.drop_rest(&arrived);
        }
        let copies = (self.places.len() - before) as u32;
        self.copies += copies;
        if copies > 0 {
            pool.place(slot, copies);
        } else {
            pool.discard(slot);
            self.slots_came_back();
        }
        Ok(outcome?)
    }

    /// Whatever was sent behind it waits until it is taken.
    fn drop_rest(&mut self, arrived: &Arrived) {
        let Some(head_bytes) = arrived.head_bytes else { return };
        let rest = Some(RestOf { endpoint: self.lanes[arrived.lane].endpoint, wanted: false });
        let (slot, len) = (arrived.slot, arrived.len - head_bytes);
        self.places.push_back(PlaceJob {
            ticket: Ticket::of_none(slot),
            slot,
            at: head_bytes,
            to: Place::Local(0),
            len,
            rest,
        });
    }

    fn take_message(
        &mut self,
        now: Nanos,
        arrived: &Arrived,
        mem: &dyn TwoMemory,
    ) -> Result<(), TwoViolation> {
        let Arrived { lane: nth, slot, len, head_bytes } = *arrived;
        let id = self.lanes[nth].id;
        let wrong = |error| TwoViolation::Message { lane: id, error };
        let slot_bytes = self.setup.slot_bytes;
        if len < DATA_HEADER_BYTES as u32 || len > slot_bytes {
            return Err(wrong(MessageError::Size { len, slot_bytes }));
        }
        if head_bytes.is_some_and(|bytes| bytes != DATA_HEADER_BYTES as u32 || bytes >= len) {
            return Err(wrong(MessageError::Head { bytes: head_bytes.unwrap_or(0) }));
        }
        let mut head = [0; DATA_HEADER_BYTES];
        mem.read_slot(slot, 0, &mut head);
        let header = DataHeader::decode(&head, len, slot_bytes).map_err(wrong)?;
        let plain = matches!(header.kind, DataKind::Write | DataKind::ReadResp) && !header.data_crc;
        if head_bytes.is_some() && !plain {
            return Err(wrong(MessageError::Head { bytes: DATA_HEADER_BYTES as u32 }));
        }
        if header.session != self.setup.session {
            self.counters.stale_session += 1;
            return Ok(());
        }
        if header.epoch != self.setup.epoch {
            self.counters.stale_epoch += 1;
            return Ok(());
        }
        let lane = &mut self.lanes[nth];
        if header.lane_seq != lane.received as u32 {
            let (got, expected) = (header.lane_seq, lane.received as u32);
            return Err(TwoViolation::LaneSeq { lane: id, got, expected });
        }
        lane.received += 1;
        if header.kind == DataKind::Nop {
            self.counters.nops_received += 1;
            return check_crc(&header, &head, |crc| crc).map_err(wrong);
        }
        self.note_use(now, nth);
        let mut blocks = std::mem::take(&mut self.work.blocks);
        let outcome = self.take_blocks(now, arrived, &header, &head, &mut blocks, mem);
        self.work.blocks = blocks;
        outcome
    }

    /// A lane that uses up all it has gets more.
    fn note_use(&mut self, now: Nanos, nth: usize) {
        let lane = &mut self.lanes[nth];
        lane.last_data = now;
        lane.reclaim_asked = None;
        lane.since_raise += 1;
        if lane.since_raise >= lane.target {
            lane.raise_target(lane.target.saturating_mul(2));
        }
    }

    fn take_blocks(
        &mut self,
        now: Nanos,
        arrived: &Arrived,
        header: &DataHeader,
        head: &[u8; DATA_HEADER_BYTES],
        blocks: &mut Vec<Block>,
        mem: &dyn TwoMemory,
    ) -> Result<(), TwoViolation> {
        let id = self.lanes[arrived.lane].id;
        let slot = arrived.slot;
        let wrong = |error| TwoViolation::Message { lane: id, error };
        let prefix_bytes = header.prefix_bytes();
        let bytes = &mut self.work.bytes;
        bytes.clear();
        bytes.extend_from_slice(head);
        bytes.resize(prefix_bytes, 0);
        mem.read_slot(slot, DATA_HEADER_BYTES as u32, &mut bytes[DATA_HEADER_BYTES..]);
        blocks.clear();
        if header.kind.is_pack() {
            decode_blocks(header, &bytes[DATA_HEADER_BYTES..], blocks).map_err(wrong)?;
        } else {
            blocks.push(header.block);
        }
        let data_bytes = header.block.len - (prefix_bytes - DATA_HEADER_BYTES) as u32;
        let whole = check_crc(header, &self.work.bytes, |crc| {
            mem.crc_slot(slot, prefix_bytes as u32, data_bytes, crc)
        });
        match whole {
            Err(error) if !header.data_crc => return Err(wrong(error)),
            Err(_) => self.counters.crc_errors += 1,
            Ok(()) => {}
        }
        let mut at = prefix_bytes as u32;
        for block in blocks.iter() {
            if matches!(header.kind, DataKind::ReadResp | DataKind::ReadPack) {
                self.take_read_chunk(now, arrived, at, block, whole.is_ok())?;
            } else {
                self.take_write_chunk(arrived, at, block, whole.is_ok(), mem)?;
            }
            at += block.len;
        }
        Ok(())
    }

    fn take_write_chunk(
        &mut self,
        arrived: &Arrived,
        at: u32,
        block: &Block,
        whole: bool,
        mem: &dyn TwoMemory,
    ) -> Result<(), TwoViolation> {
        let Block { region, offset, len, .. } = *block;
        let verdict = if whole {
            self.durable.inbox.take(block, || mem.check(region, offset, len.into(), Direction::Write))?
        } else {
            self.durable.inbox.refuse(block, Status::Crc)?
        };
        match verdict {
            Verdict::Place => {
                self.place(Direction::Write, arrived, at, block, Place::Region(region, offset));
            }
            Verdict::Duplicate => self.counters.duplicate_chunks += 1,
            Verdict::Ended => self.counters.ended_chunks += 1,
            Verdict::Released => self.counters.released_chunks += 1,
            Verdict::Refused => self.counters.refused_chunks += 1,
        }
        Ok(())
    }

    fn take_read_chunk(
        &mut self,
        now: Nanos,
        arrived: &Arrived,
        at: u32,
        block: &Block,
        whole: bool,
    ) -> Result<(), TwoViolation> {
        let Block { transfer, chunk, .. } = *block;
        let wrong = TwoViolation::WrongChunk { transfer, chunk };
        let outbox = &mut self.durable.outbox;
        if transfer >= outbox.next_id() {
            return Err(wrong);
        }
        let Some(own) = outbox.of_id(transfer) else {
            self.counters.late_read_chunks += 1;
            return Ok(());
        };
        let out = outbox.get_mut(own);
        // Only what was asked for, all of which was asked for before anything is sent.
        let asked = out.direction == Direction::Read && (out.is_sent() || out.failure.is_some());
        if !asked || block.total != out.map.total() || out.map.block(transfer, chunk) != *block {
            return Err(wrong);
        }
        if out.failure.is_some() {
            self.counters.late_read_chunks += 1;
            return Ok(());
        }
        if !whole {
            self.fail(own, XferFailure::CopyFailed { status: Status::Crc, chunk }, true);
            return Ok(());
        }
        if !out.set.insert(chunk) {
            self.counters.duplicate_chunks += 1;
            return Ok(());
        }
        (out.copying, out.since) = (out.copying + 1, now);
        let to = Place::Local(out.map.chunk(chunk).local);
        self.place(Direction::Read, arrived, at, block, to);
        Ok(())
    }

    fn place(&mut self, direction: Direction, arrived: &Arrived, at: u32, block: &Block, to: Place) {
        let Block { transfer, chunk, len, .. } = *block;
        let slot = arrived.slot;
        let endpoint = self.lanes[arrived.lane].endpoint;
        let rest = arrived.head_bytes.map(|_| RestOf { endpoint, wanted: true });
        let ticket = Ticket { direction, transfer, chunk, slot };
        self.places.push_back(PlaceJob { ticket, slot, at, to, len, rest });
    }
}
