//! Data messages to the peer.
//!
//! A message goes out when RECV credit, an entry of the send queue, a send slot or a source that can be gathered and, for each
//! transfer that begins with it, REQUEST credit are all there. Until then nothing is held.

use super::port::{Cargo, Flows};
use super::{Channel, Step};
use crate::ids::Nanos;
use crate::two_sided::chunks::Chunk;
use crate::two_sided::codec::{
    Block, DATA_HEADER_BYTES, DataHeader, DataKind, Direction, PACK_BLOCK_BYTES, Status, encode_message,
    pack_prefix_bytes,
};
use crate::two_sided::outbox::{Flow, Next};
use crate::two_sided::pool::Pool;
use crate::two_sided::setup::{Place, Source, Span, TwoMemory};

/// Blocks of one PACK at most.
const MAX_BLOCKS: usize = 256;
/// Longest PACK, also where slots are longer: it is copied, and what a slot holds of it stays in memory.
const MAX_PACK_BYTES: u32 = 64 * 1024 + DATA_HEADER_BYTES as u32;
/// Longest prefix that a gathered message has.
pub const GATHER_PREFIX_BYTES: usize = 1024;
/// Gathered messages under way at once: the driver keeps a small buffer for the prefix of each.
pub const GATHERS: u32 = 32;

impl Channel {
    pub(super) fn decide_data(&mut self, now: Nanos, mem: &dyn TwoMemory, pool: &mut Pool) -> Option<Step> {
        while self.durable.outbox.has_data() {
            let Some(lane) = self.pick_lane(mem) else {
                self.note_starved(now);
                return None;
            };
            self.starved_since = None;
            let may_begin = self.has_request_credit(mem);
            let (outbox, inbox) = (&mut self.durable.outbox, &mut self.durable.inbox);
            let next = outbox.next(may_begin, self.setup.limits.ring, |outbox, flow| match flow {
                Flow::Own(at) => {
                    let out = outbox.get(at);
                    (!out.is_sent()).then(|| out.map.chunk(out.next).len)
                }
                Flow::Serve(transfer) => {
                    let serving = inbox.serving(transfer)?;
                    (serving.next < serving.map.total()).then(|| serving.map.chunk(serving.next).len)
                }
            });
            match next? {
                Next::Ring(Flow::Serve(transfer)) => {
                    if let Some(step) = self.send_read_chunk(now, lane, transfer, mem, pool) {
                        return step;
                    }
                }
                own => return self.send_write(now, lane, own, mem, pool),
            }
        }
        self.starved_since = None;
        None
    }

    fn note_starved(&mut self, now: Nanos) {
        // A full send queue is not the peer's affair.
        let credit = self.lanes.iter().any(|lane| lane.credit.available() > 0);
        if credit {
            self.starved_since = None;
        } else if self.starved_since.is_none() {
            self.starved_since = Some(now);
            self.next_credit_request = self.next_credit_request.max(now);
            self.credit_request_gap_ms = 1;
        }
    }

    /// `None`: it ended instead; look for something else. `Some(None)`: it has to wait.
    fn send_read_chunk(
        &mut self,
        now: Nanos,
        lane: usize,
        transfer: u64,
        mem: &dyn TwoMemory,
        pool: &mut Pool,
    ) -> Option<Option<Step>> {
        if let Err((status, nth)) = self.choose_read(transfer, mem) {
            self.durable.inbox.stop_serving(transfer, status, nth);
            return None;
        }
        let count = self.work.blocks.len() as u32;
        let table = if count > 1 { count } else { 0 };
        let Some(source) = self.pick_source(pack_prefix_bytes(table), mem, pool) else { return Some(None) };
        let serving = self.durable.inbox.serving(transfer).expect("it was its turn");
        serving.next += count;
        serving.in_flight += 1;
        serving.since = now;
        let bytes: u64 = self.work.blocks.iter().map(|block| u64::from(block.len)).sum();
        let (kind, block) = if count > 1 {
            self.counters.packs_sent += 1;
            self.counters.blocks_packed += u64::from(count);
            (DataKind::ReadPack, Block::of_pack(count, bytes as u32 + count * PACK_BLOCK_BYTES as u32))
        } else {
            (DataKind::ReadResp, self.work.blocks.pop().expect("one was chosen"))
        };
        let flows = Flows::One(Flow::Serve(transfer));
        let step = self.post_data(now, lane, kind, block, flows, source);
        self.durable.outbox.spent(Next::Ring(Flow::Serve(transfer)), bytes);
        Some(Some(step))
    }

    /// Which chunks of a READ go into the next message, with their places; `Err`: the first of them may not be read any more.
    fn choose_read(&mut self, transfer: u64, mem: &dyn TwoMemory) -> Result<(), (Status, u32)> {
        let pack_bytes = self.setup.limits.pack_bytes;
        let mut room = self.pack_room();
        let (blocks, spans) = (&mut self.work.blocks, &mut self.work.spans);
        blocks.clear();
        spans.clear();
        let serving = self.durable.inbox.serving(transfer).expect("it was its turn");
        for nth in serving.next..serving.map.total() {
            let block = serving.map.block(transfer, nth);
            let cost = u64::from(block.len) + PACK_BLOCK_BYTES as u64;
            let packs = block.len <= pack_bytes && cost <= room && blocks.len() < MAX_BLOCKS;
            if !packs && !blocks.is_empty() {
                break;
            }
            // It may have been withdrawn since it was asked for.
            match mem.check(block.region, block.offset, block.len.into(), Direction::Read) {
                Err(status) if blocks.is_empty() => return Err((status, nth)),
                Err(_) => break,
                Ok(()) => {}
            }
            spans.push(Span { from: Place::Region(block.region, block.offset), len: block.len });
            blocks.push(block);
            if !packs {
                break;
            }
            room -= cost;
        }
        Ok(())
    }

    fn send_write(
        &mut self,
        now: Nanos,
        lane: usize,
        next: Next,
        mem: &dyn TwoMemory,
        pool: &mut Pool,
    ) -> Option<Step> {
        let mut chosen = std::mem::take(&mut self.work.chosen);
        self.choose(next, &mut chosen);
        let step = self.send_chosen(now, lane, next, &chosen, mem, pool);
        self.work.chosen = chosen;
        step
    }

    /// Bytes that blocks and their descriptions have in a PACK.
    fn pack_room(&self) -> u64 {
        u64::from(self.setup.slot_bytes.min(MAX_PACK_BYTES)) - pack_prefix_bytes(0) as u64
    }

    /// Which chunks go into the next message: one that is large, or as many small ones as fit.
    fn choose(&self, next: Next, chosen: &mut Vec<(u32, u32, Chunk)>) {
        chosen.clear();
        let outbox = &self.durable.outbox;
        let first = match next {
            Next::Small => *outbox.small().front().expect("it was its turn"),
            Next::Fresh(at) | Next::Ring(Flow::Own(at)) => at,
            Next::Ring(Flow::Serve(_)) => unreachable!("served elsewhere"),
        };
        let more = (next == Next::Small).then(|| outbox.small().iter().skip(1).copied());
        let mut room = self.pack_room();
        let mut to_begin = self.request.available();
        for at in std::iter::once(first).chain(more.into_iter().flatten()) {
            let out = outbox.get(at);
            if out.id == 0 {
                if to_begin == 0 {
                    return;
                }
                to_begin -= 1;
            }
            for nth in out.next..out.map.total() {
                let chunk = out.map.chunk(nth);
                if chunk.len > self.setup.limits.pack_bytes {
                    // It goes alone, or not now.
                    if chosen.is_empty() {
                        chosen.push((at, nth, chunk));
                    }
                    return;
                }
                let cost = u64::from(chunk.len) + PACK_BLOCK_BYTES as u64;
                if cost > room && chosen.is_empty() {
                    chosen.push((at, nth, chunk));
                    return;
                }
                if cost > room || chosen.len() == MAX_BLOCKS {
                    return;
                }
                room -= cost;
                chosen.push((at, nth, chunk));
            }
        }
    }

    fn send_chosen(
        &mut self,
        now: Nanos,
        lane: usize,
        next: Next,
        chosen: &[(u32, u32, Chunk)],
        mem: &dyn TwoMemory,
        pool: &mut Pool,
    ) -> Option<Step> {
        let spans = &mut self.work.spans;
        spans.clear();
        spans.extend(
            chosen.iter().map(|(_, _, chunk)| Span { from: Place::Local(chunk.local), len: chunk.len }),
        );
        let packed = chosen.len() > 1;
        let table = if packed { chosen.len() as u32 } else { 0 };
        let source = self.pick_source(pack_prefix_bytes(table), mem, pool)?;
        // From here on it goes: numbers are drawn, cursors move.
        self.work.blocks.clear();
        let mut flows: Option<Flows> = None;
        for &(at, nth, _) in chosen {
            if self.durable.outbox.get(at).id == 0 {
                self.request.try_reserve(1).expect("counted before").commit();
                self.durable.outbox.begin(at);
            }
            let out = self.durable.outbox.get_mut(at);
            assert_eq!(out.next, nth, "chunks go in order");
            out.next = nth + 1;
            out.reached = out.reached.max(out.next);
            out.since = now;
            self.work.blocks.push(out.map.block(out.id, nth));
            let whole = out.is_sent().then_some(out.id);
            if flows.as_ref().and_then(|flows| flows.as_slice().last()) != Some(&Flow::Own(at)) {
                out.in_flight += 1;
                flows = Some(Flows::push(flows, Flow::Own(at)));
            }
            if let Some(id) = whole {
                self.queue_note(at, id);
            }
        }
        let flows = flows.expect("something was chosen");
        let bytes: u64 = chosen.iter().map(|(_, _, chunk)| u64::from(chunk.len)).sum();
        let (kind, block) = if packed {
            self.counters.packs_sent += 1;
            self.counters.blocks_packed += chosen.len() as u64;
            (DataKind::Pack, Block::of_pack(table, bytes as u32 + table * PACK_BLOCK_BYTES as u32))
        } else {
            let block = self.work.blocks.pop().expect("something was chosen");
            (DataKind::Write, block)
        };
        let step = self.post_data(now, lane, kind, block, flows, source);
        self.durable.outbox.spent(next, bytes);
        Some(step)
    }

    /// What the next message is sent from; `None`: it has to wait for that.
    fn pick_source(&mut self, prefix_bytes: usize, mem: &dyn TwoMemory, pool: &mut Pool) -> Option<Source> {
        let spans = &self.work.spans;
        let gather = spans.len() < self.setup.max_sge as usize
            && prefix_bytes <= GATHER_PREFIX_BYTES
            && spans.iter().all(|span| mem.can_gather(span));
        if gather {
            return self.prefixes.pop().map(Source::Gather);
        }
        if self.send_starved || self.sending == self.setup.send_slots {
            return None;
        }
        let slot = pool.lend_send(self.setup.peer);
        self.send_starved = slot.is_none();
        self.sending += u32::from(slot.is_some());
        slot.map(Source::Slot)
    }

    fn post_data(
        &mut self,
        now: Nanos,
        lane: usize,
        kind: DataKind,
        block: Block,
        flows: Flows,
        source: Source,
    ) -> Step {
        let data_crc = self.setup.data_crc;
        self.encode_data(lane, kind, block, data_crc);
        let bytes = u64::from(block.len);
        self.last_sent = now;
        self.counters.messages_sent += 1;
        self.counters.messages_gathered += u64::from(matches!(source, Source::Gather(_)));
        self.counters.bytes_sent += bytes;
        let seq = self.lanes[lane].post(Cargo::Data { flows, source, len_bytes: block.len }, bytes);
        Step::Data { lane, seq, source, data_crc }
    }

    fn encode_data(&mut self, lane: usize, kind: DataKind, block: Block, data_crc: bool) {
        let header = DataHeader {
            kind,
            data_crc,
            session: self.setup.session,
            epoch: self.setup.epoch,
            lane_seq: self.lanes[lane].sent as u32,
            block,
        };
        self.work.bytes.clear();
        let blocks: &[Block] = if kind.is_pack() { &self.work.blocks } else { &[] };
        encode_message(&header, blocks, self.setup.slot_bytes, &mut self.work.bytes)
            .expect("own messages keep the limits");
    }

    /// Credit that the peer wants back and nothing else uses.
    pub(super) fn decide_nop(&mut self, mem: &dyn TwoMemory) -> Option<Step> {
        let lane = self.pick_burner(mem)?;
        self.encode_data(lane, DataKind::Nop, Block::NONE, false);
        self.work.spans.clear();
        self.counters.nops_sent += 1;
        let seq = self.lanes[lane].post(Cargo::Nop, 0);
        Some(Step::Data { lane, seq, source: Source::Bare, data_crc: false })
    }

    /// What a transfer waits for, with both sides' counters.
    pub(super) fn why_it_waits(&self, at: u32) -> String {
        let out = self.durable.outbox.get(at);
        if out.is_sent() {
            return match out.direction {
                Direction::Write => "the peer's acknowledgement".into(),
                Direction::Read => {
                    format!("the peer's data, {} of {} chunks are here", out.placed, out.map.total())
                }
            };
        }
        if out.id == 0 && self.request.available() == 0 {
            let credit = &self.request;
            return format!(
                "REQUEST credit: the peer granted {}, consumed are {}",
                credit.known(),
                credit.consumed()
            );
        }
        if out.direction == Direction::Read {
            let credit = &self.control.credit;
            return format!(
                "a control RECV: the peer granted {}, consumed are {}",
                credit.known(),
                credit.consumed()
            );
        }
        if self.lanes.iter().all(|lane| lane.credit.available() == 0) {
            let each = |lane: &super::LanePort| {
                format!(
                    "lane {}: granted {}, consumed {}",
                    lane.id.0,
                    lane.credit.known(),
                    lane.credit.consumed()
                )
            };
            let lanes: Vec<String> = self.lanes.iter().map(each).collect();
            return format!("RECV credit of the peer ({})", lanes.join("; "));
        }
        if self.send_starved {
            return format!("a slot to send from: it has {}, the pool has no more", self.sending);
        }
        if self.sending == self.setup.send_slots || self.prefixes.is_empty() {
            return format!(
                "a SEND to complete: it has {} of {} slots and {} of {GATHERS} prefixes of gathered messages in use",
                self.sending,
                self.setup.send_slots,
                GATHERS - self.prefixes.len() as u32
            );
        }
        let in_flight: u32 = self.lanes.iter().map(|lane| lane.ledger.in_flight()).sum();
        format!("its turn or room in the send queues, {in_flight} messages in flight")
    }
}
