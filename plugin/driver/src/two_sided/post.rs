//! Carries out what a channel asks for: posts and copies, without any lock.

use std::collections::VecDeque;
use std::sync::Arc;

use baton_core::two_sided::codec::{Direction, append_data_crc};
use baton_core::two_sided::pool::SlotId;
use baton_core::two_sided::setup::{DataSend, Place, PlaceJob, Source, Span, TwoAction, TwoSetup};
use baton_fabric::{Batch, Completion, EndpointId, Extra, ExtraOp, Fabric, FabricError, RecvSlot, Sge};

use super::bounce::Slabs;
use super::copiers::{Copied, Copy, Outcome};
use super::view::{Found, Pin};
use super::{Area, ChannelArea, Held, Regions};

/// An endpoint as it is posted to.
struct End {
    id: EndpointId,
    rail: u8,
    /// Regions that its SENDs read from, each until the one of that sequence has completed; in order.
    held: VecDeque<(u64, Held)>,
}

/// Posts and copies of one channel.
pub(super) struct Post {
    fabric: Arc<dyn Fabric>,
    slabs: Arc<Slabs>,
    area: ChannelArea,
    regions: Arc<dyn Regions>,
    /// Control, then the lanes.
    ends: Vec<End>,
    peer_credit: (u64, u64),
    inline_bytes: usize,
    /// The fabric lets its receivers say where messages go.
    heads: bool,
    // Working space, so that nothing is allocated at work.
    recvs: Vec<RecvSlot>,
    gather: Vec<Sge>,
    prefix: Vec<u8>,
    /// The host's memory of the message handed out last could not be read.
    source_failed: bool,
}

/// From so many bytes of data on the receiver is let say where they go: below, one more step costs as much as one more copy.
const HEAD_FROM_BYTES: u32 = 16 * 1024;

/// What an endpoint sends beside a list of pieces.
struct Wr {
    seq: u64,
    op: ExtraOp,
    remote: (u64, u64),
}

impl Wr {
    fn send(seq: u64) -> Wr {
        Wr { seq, op: ExtraOp::Send, remote: (0, 0) }
    }

    /// A data message. A header of a single block says all that the receiver needs to know.
    fn data(send: &DataSend<'_>) -> Wr {
        let headed = matches!(send.spans, [span] if span.len >= HEAD_FROM_BYTES) && !send.data_crc;
        Wr { op: if headed { ExtraOp::SendHead } else { ExtraOp::Send }, ..Wr::send(send.seq) }
    }
}

impl Post {
    pub fn new(
        fabric: Arc<dyn Fabric>,
        slabs: Arc<Slabs>,
        area: ChannelArea,
        regions: Arc<dyn Regions>,
        setup: &TwoSetup,
        heads: bool,
    ) -> Post {
        let end = |id| End { id, rail: fabric.rail(id), held: VecDeque::new() };
        let lanes = setup.lanes.iter().map(|lane| lane.endpoint);
        let ends = std::iter::once(setup.control).chain(lanes).map(end).collect();
        let peer_credit = (setup.peer_credit_addr, setup.peer_credit_key);
        let inline_bytes = fabric.caps().inline_bytes as usize;
        let (recvs, gather, prefix) = (Vec::new(), Vec::new(), Vec::new());
        Post {
            fabric,
            slabs,
            area,
            regions,
            ends,
            peer_credit,
            inline_bytes,
            heads,
            recvs,
            gather,
            prefix,
            source_failed: false,
        }
    }

    pub fn area(&self) -> &ChannelArea {
        &self.area
    }

    pub fn fabric(&self) -> &dyn Fabric {
        &*self.fabric
    }

    pub fn regions(&self) -> &dyn Regions {
        &*self.regions
    }

    pub fn endpoints(&self) -> impl Iterator<Item = EndpointId> {
        self.ends.iter().map(|end| end.id)
    }

    /// SENDs up to this one read nothing any more.
    pub fn on_sent(&mut self, done: &Completion) {
        let Some(end) = self.ends.iter_mut().find(|end| end.id == done.endpoint) else { return };
        while end.held.front().is_some_and(|(seq, _)| *seq <= done.seq) {
            end.held.pop_front();
        }
    }

    /// The endpoint if the fabric does not take it. Of what was `found` it keeps what a SEND reads from until it has completed.
    pub fn carry_out(&mut self, action: &TwoAction<'_>, found: &mut Found) -> Option<EndpointId> {
        let (endpoint, outcome) = match action {
            TwoAction::Place(job) => unreachable!("copies were done before: {job:?}"),
            TwoAction::RecvData { endpoint, first, slots } => {
                (*endpoint, self.recv_data(*endpoint, *first, slots))
            }
            TwoAction::RecvControl { endpoint, first, count } => {
                (*endpoint, self.recv_control(*endpoint, *first, *count))
            }
            TwoAction::Credit { endpoint, seq, word, bytes } => {
                let remote = (self.peer_credit.0 + *word as u64 * 8, self.peer_credit.1);
                (*endpoint, self.control(Wr { seq: *seq, op: ExtraOp::Write, remote }, bytes))
            }
            TwoAction::SendControl { endpoint, seq, bytes } => {
                (*endpoint, self.control(Wr::send(*seq), bytes))
            }
            TwoAction::SendData(send) => (send.endpoint, self.data(send, found)),
        };
        let error = outcome.err()?;
        tracing::error!("two-sided channel on fabric {}: {error}", self.fabric.name());
        Some(endpoint)
    }

    fn at(&self, endpoint: EndpointId) -> usize {
        self.ends.iter().position(|end| end.id == endpoint).expect("an endpoint of the channel")
    }

    fn recv_data(&mut self, endpoint: EndpointId, first: u64, slots: &[SlotId]) -> Result<(), FabricError> {
        let rail = self.ends[self.at(endpoint)].rail;
        self.recvs.clear();
        for (n, &slot) in (first..).zip(slots) {
            self.recvs.push(self.slabs.recv(slot, rail, n as u32)?);
        }
        self.fabric.post_recv(endpoint, &self.recvs)
    }

    fn recv_control(&mut self, endpoint: EndpointId, first: u64, count: u32) -> Result<(), FabricError> {
        let rail = self.ends[0].rail;
        self.recvs.clear();
        for n in first..first + u64::from(count) {
            self.recvs.push(self.area.control_recv(rail, n)?);
        }
        self.fabric.post_recv(endpoint, &self.recvs)
    }

    fn control(&self, wr: Wr, bytes: &[u8]) -> Result<(), FabricError> {
        let at = self.area.control_send(wr.seq);
        self.area.slots.write(at, bytes);
        self.post(&self.ends[0], &wr, (&self.area.slots, at, bytes.len()), &[])
    }

    fn data(&mut self, send: &DataSend<'_>, found: &mut Found) -> Result<(), FabricError> {
        let at = self.at(send.endpoint);
        match send.source {
            Source::Bare => {
                let place = self.area.nop(at - 1, send.seq);
                self.area.slots.write(place, send.prefix);
                let bytes = (&self.area.slots, place, send.prefix.len());
                self.post(&self.ends[at], &Wr::send(send.seq), bytes, &[])
            }
            Source::Gather(prefix) => self.data_gathered(send, at, prefix, found),
            Source::Slot(slot) => self.data_copied(send, at, slot, &found.pins),
        }
    }

    /// Whether the post that failed last did so for the host's memory; asked once.
    pub fn take_source_failed(&mut self) -> bool {
        std::mem::take(&mut self.source_failed)
    }

    fn data_copied(
        &mut self,
        send: &DataSend<'_>,
        at: usize,
        slot: SlotId,
        pins: &[Pin],
    ) -> Result<(), FabricError> {
        let (area, begin) = self.slabs.place(slot);
        self.prefix.clear();
        self.prefix.extend_from_slice(send.prefix);
        let mut to = begin + send.prefix.len();
        let end = begin + self.slabs.slot_bytes();
        for span in send.spans {
            let (from, len) = (address(span, pins), span.len as usize);
            assert!(len <= end - to, "a message fits into its slot");
            // SAFETY: own memory is valid until the transfer was reported (the host's contract), a region is held.
            if !unsafe { area.write_from(to, from, len) } {
                self.source_failed = true;
                return Err(FabricError::Invalid(format!(
                    "{len} bytes at {from:#x} to be sent cannot be read"
                )));
            }
            if send.data_crc {
                append_data_crc(&mut self.prefix, area.bytes(to, len));
            }
            to += len;
        }
        area.write(begin, &self.prefix);
        let (end, wr) = (&self.ends[at], Wr::data(send));
        if wr.op == ExtraOp::SendHead && self.heads {
            let (from, len) = (begin + send.prefix.len(), to - begin - send.prefix.len());
            let local_key = area.local_key(end.rail, from, len)?;
            let rest = Sge { addr: area.addr(from), local_key, len_bytes: len as u32 };
            return self.post(end, &wr, (&area, begin, send.prefix.len()), &[rest]);
        }
        self.post(end, &Wr::send(send.seq), (&area, begin, to - begin), &[])
    }

    fn data_gathered(
        &mut self,
        send: &DataSend<'_>,
        at: usize,
        prefix: u32,
        found: &mut Found,
    ) -> Result<(), FabricError> {
        let rail = self.ends[at].rail;
        self.prefix.clear();
        self.prefix.extend_from_slice(send.prefix);
        self.gather.clear();
        let Found { pins, keys } = found;
        let known = keys.len().checked_sub(send.spans.len()).and_then(|first| keys.get(first..));
        for (n, span) in send.spans.iter().enumerate() {
            let addr = address(span, pins);
            let key = match known {
                Some(keys) => Some(keys[n]),
                None => self.regions.local_key(span.from, span.len, rail),
            };
            let local_key = key.ok_or_else(|| {
                FabricError::NotFound(format!(
                    "a key on rail {rail} for {} bytes at {:?}",
                    span.len, span.from
                ))
            })?;
            if send.data_crc {
                let from = std::ptr::with_exposed_provenance::<u8>(addr as usize);
                // SAFETY: as for the source of a copy. The host does not write to what it has posted.
                let bytes = unsafe { std::slice::from_raw_parts(from, span.len as usize) };
                append_data_crc(&mut self.prefix, bytes);
            }
            self.gather.push(Sge { addr, local_key, len_bytes: span.len });
        }
        let place = self.area.prefix(prefix);
        self.area.slots.write(place, &self.prefix);
        let bytes = (&self.area.slots, place, self.prefix.len());
        self.post(&self.ends[at], &Wr::data(send), bytes, &self.gather)?;
        // What it reads stays until it has completed.
        let mut last = None;
        for span in send.spans {
            let Place::Region(region, _) = span.from else { continue };
            if last != Some(region) {
                let pin = pins.iter().position(|pin| pin.region == region).expect("it was held");
                self.ends[at].held.push_back((send.seq, pins.swap_remove(pin).held));
                last = Some(region);
            }
        }
        Ok(())
    }

    /// Bytes of engine memory, and pieces behind them.
    fn post(
        &self,
        end: &End,
        wr: &Wr,
        (area, at, len): (&Area, usize, usize),
        gather: &[Sge],
    ) -> Result<(), FabricError> {
        let key = area.local_key(end.rail, at, len)?;
        // Short ones are copied by `post`, if nothing follows them.
        let staged = len > self.inline_bytes || !gather.is_empty();
        let extra = Extra {
            op: wr.op,
            bytes: area.bytes(at, len),
            staged: staged.then(|| (area.addr(at), key)),
            gather,
            remote_addr: wr.remote.0,
            remote_key: wr.remote.1,
            fenced: false,
        };
        // Control messages have answers of their own.
        let patient = end.id == self.ends[0].id;
        let batch =
            Batch { work: &[], imm: None, extra: Some(extra), first_seq: wr.seq, signaled: true, patient };
        let posted = self.fabric.post(end.id, &batch);
        posted.map_err(|e| FabricError::System(format!("post on {:?}: {e:?}", end.id)))
    }

    /// A copy out of a slot, with all that it touches; `Err`: its place may not be written to.
    pub fn prepare(&self, job: &PlaceJob) -> Result<Copy, Copied> {
        let (area, begin) = self.slabs.place(job.slot);
        let (to, held) = match job.to {
            Place::Local(addr) => (addr, None),
            Place::Region(region, offset) => {
                // Once more: it may have been withdrawn since the chunk was checked.
                let held = self.regions.hold(region, offset, job.len.into(), Direction::Write);
                let held = held.map_err(|status| (job.ticket, job.len, Outcome::Failed(status)))?;
                (held.addr(), Some(held))
            }
        };
        Ok(Copy { ticket: job.ticket, area, at: begin + job.at as usize, to, len: job.len, held })
    }
}

/// Where the bytes of a span are.
fn address(span: &Span, pins: &[Pin]) -> u64 {
    match span.from {
        Place::Local(addr) => addr,
        Place::Region(region, offset) => {
            let pin = pins.iter().find(|pin| pin.region == region && pin.offset == offset);
            pin.expect("what the channel found readable is held").held.addr()
        }
    }
}
