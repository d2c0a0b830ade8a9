//! What the peer sends: immediates and the records behind them, or SENDs that bring both.

use super::{EndReason, Event, RingId, SPARE_MESSAGES, Session, SessionMemory, Violation, slot_bytes};
use crate::ids::{LaneId, XferSeq};
use crate::notify::{
    Arrival, Body, BodyFlags, ID_BYTES, PlainRecord, RECORD_HEADER_BYTES, Record, RecordError, RecordHeader,
    RecordScope, SEND_HEADER_BYTES, SendError, SendHeader,
};
use crate::sequence::{Imm, ImmError, ImmKind};

/// Longer memory of a message is not kept for another.
const SPARE_MESSAGE_BYTES: usize = 256;

/// Messages held for the host.
#[derive(Debug)]
pub(crate) struct Unpopped {
    /// Delivered and not popped; moves to the next epoch.
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
    /// Of transfers that are not complete yet.
    partial_messages: u64,
    partial_bytes: u64,
}

impl Unpopped {
    pub(crate) fn new(messages: u64, bytes: u64) -> Unpopped {
        Unpopped { messages, bytes, partial_messages: 0, partial_bytes: 0 }
    }

    pub(crate) fn held_messages(&self) -> u64 {
        self.messages + self.partial_messages
    }

    pub(crate) fn held_bytes(&self) -> u64 {
        self.bytes + self.partial_bytes
    }
}

/// What brought a word.
#[derive(Clone, Copy, Debug)]
enum Carrier {
    /// An immediate: its record lies in the ring.
    Immediate,
    /// A SEND of so many bytes, header included, in that slot.
    Send { slot: u32, len_bytes: u32 },
}

impl Carrier {
    /// The payload is as long as the header and what it announces. An immediate has none.
    fn expect_length(self, ring: RingId, record_bytes: u32) -> Result<(), Violation> {
        let announced = SEND_HEADER_BYTES as u32 + record_bytes;
        match self {
            Carrier::Send { len_bytes, .. } if len_bytes != announced => {
                Err(Violation::Send { ring, error: SendError::Length { len: len_bytes, announced } })
            }
            _ => Ok(()),
        }
    }

    /// The payload has at least so many bytes behind its header.
    fn expect_room(self, ring: RingId, record_bytes: u32, most: u32) -> Result<(), Violation> {
        let least = SEND_HEADER_BYTES as u32 + record_bytes;
        match self {
            Carrier::Send { len_bytes, .. } if len_bytes < least => {
                Err(Violation::Send { ring, error: SendError::Size { len: len_bytes, least, most } })
            }
            _ => Ok(()),
        }
    }
}

impl Session {
    /// The host took that many messages of this peer, of that many bytes together. An id that it has read counts as a
    /// message of [`ID_BYTES`]. `true`: there is credit to be told now, which [`Session::next_action`] yields.
    pub fn on_popped(&mut self, messages: u64, bytes: u64) -> bool {
        let withheld = self.withholds();
        self.unpopped.messages = self.unpopped.messages.saturating_sub(messages);
        self.unpopped.bytes = self.unpopped.bytes.saturating_sub(bytes);
        // What was held back is told however little it is: a peer may wait for the last of it, and nothing else would tell it.
        if withheld {
            self.credit_out.check = true;
            if !self.withholds() {
                self.announce_all();
            }
        }
        withheld
    }

    /// A message that was delivered is not needed any more: its memory is for another.
    pub fn reuse(&mut self, mut message: Vec<u8>) {
        let fits = (PlainRecord::MESSAGE_BYTES..=SPARE_MESSAGE_BYTES).contains(&message.capacity());
        if fits && self.spare_messages.len() < SPARE_MESSAGES {
            message.clear();
            self.spare_messages.push(message);
        }
    }

    /// Above the limits the peer gets no more credit until the host pops: back-pressure instead of memory growth.
    pub(crate) fn withholds(&self) -> bool {
        let limits = &self.setup.limits;
        self.unpopped.held_messages() > limits.unpopped_messages
            || self.unpopped.held_bytes() > limits.unpopped_bytes
    }

    pub(crate) fn on_immediate(&mut self, ring: RingId, imm: u32, mem: &dyn SessionMemory) {
        if self.deaf {
            self.counters.late_ignored += 1;
            return;
        }
        if self.sends() {
            return self.violate(Violation::UnexpectedImmediate { imm, ring });
        }
        let outcome = self.take_recv(ring).and_then(|()| self.take_word(ring, imm, Carrier::Immediate, mem));
        self.conclude_receive(ring, outcome);
    }

    /// What was taken is owed to the peer. Only of the endpoint that received can more have become worth telling.
    fn conclude_receive(&mut self, ring: RingId, outcome: Result<(), Violation>) {
        if self.port(ring).owes_credit() {
            self.credit_out.check = true;
        }
        if let Err(violation) = outcome {
            self.violate(violation);
        }
    }

    /// A SEND of `len_bytes` lies in a RECV slot.
    pub(crate) fn on_send(&mut self, ring: RingId, slot: u64, len_bytes: u32, mem: &dyn SessionMemory) {
        if self.deaf {
            self.counters.late_ignored += 1;
            return;
        }
        if !self.sends() {
            return self.violate(Violation::UnexpectedSend { ring, len_bytes });
        }
        let port = self.port(ring);
        let (endpoint, expected) = (port.endpoint, port.next_slot());
        if slot != expected {
            return self.end(EndReason::WrongSlot { endpoint, slot, expected });
        }
        let outcome = self.take_recv(ring).and_then(|()| self.take_send(ring, slot as u32, len_bytes, mem));
        self.conclude_receive(ring, outcome);
    }

    fn take_send(
        &mut self,
        ring: RingId,
        slot: u32,
        len_bytes: u32,
        mem: &dyn SessionMemory,
    ) -> Result<(), Violation> {
        let bad = |error| Violation::Send { ring, error };
        let (least, most) = (SEND_HEADER_BYTES as u32, slot_bytes(self.port(ring).ring_in.size_bytes()));
        if !(least..=most).contains(&len_bytes) {
            return Err(bad(SendError::Size { len: len_bytes, least, most }));
        }
        let mut bytes = [0; SEND_HEADER_BYTES];
        mem.read_slot(ring, slot, 0, &mut bytes);
        let SendHeader { imm, epoch } = SendHeader::decode(bytes);
        if epoch != self.setup.epoch {
            return Err(bad(SendError::Epoch { got: epoch.0, expected: self.setup.epoch.0 }));
        }
        self.take_word(ring, imm, Carrier::Send { slot, len_bytes }, mem)
    }

    fn take_recv(&mut self, ring: RingId) -> Result<(), Violation> {
        let recv = &mut self.port_mut(ring).recv_in;
        if recv.receive(1) {
            return Ok(());
        }
        Err(Violation::TooManyReceives { ring, received: recv.received() + 1, granted: recv.announced() })
    }

    fn take_word(
        &mut self,
        ring: RingId,
        imm: u32,
        carrier: Carrier,
        mem: &dyn SessionMemory,
    ) -> Result<(), Violation> {
        let wrong = |error| Violation::Immediate { imm, ring, error };
        let decoded = match Imm::decode(imm) {
            Ok(decoded) => decoded,
            Err(error) => return Err(wrong(error)),
        };
        let RingId::Lane(lane) = ring else {
            if decoded.kind != ImmKind::Record {
                return Err(Violation::TailOnControl { imm });
            }
            if (decoded.lanes, decoded.seq_low) != (1, 0) {
                return Err(wrong(ImmError::Standalone));
            }
            return self.take_standalone(carrier, mem);
        };
        let limit = self.lanes.len() as u8;
        if decoded.lanes > limit {
            return Err(wrong(ImmError::Lanes { lanes: decoded.lanes, limit }));
        }
        let (seq, arrival) = match decoded.kind {
            ImmKind::Tail => {
                carrier.expect_length(ring, 0)?;
                (self.inbound.unwrap(decoded.seq_low, lane)?, Arrival::Tail)
            }
            ImmKind::Empty => {
                carrier.expect_length(ring, 0)?;
                let seq = self.inbound.unwrap(decoded.seq_low, lane)?;
                // The common case.
                if decoded.lanes == 1 && self.inbound.pass(seq) {
                    self.deliver_short(&[]);
                    return Ok(());
                }
                self.unpopped.partial_messages += 1;
                (seq, Arrival::Record(Body::EMPTY))
            }
            ImmKind::Record => {
                let mut copy = PlainRecord::default();
                let taken = match self.take_plain(ring, lane, decoded, carrier, mem, &mut copy)? {
                    // As above: the common case.
                    Some((seq, message)) if decoded.lanes == 1 && self.inbound.pass(seq) => {
                        self.deliver_short(message);
                        return Ok(());
                    }
                    Some((seq, message)) => {
                        Some((seq, Body { flags: BodyFlags::MESSAGE, bytes: message.to_vec() }))
                    }
                    None => self.take_record(ring, lane, decoded, imm, carrier, mem)?,
                };
                // The last fragment completes the body.
                let Some((seq, body)) = taken else { return Ok(()) };
                self.unpopped.partial_messages += 1;
                self.unpopped.partial_bytes += body.bytes.len() as u64;
                (seq, Arrival::Record(body))
            }
        };
        if let Some(body) = self.inbound.arrive(seq, decoded.lanes, lane, arrival)? {
            self.unpopped.partial_messages -= 1;
            self.unpopped.partial_bytes -= body.bytes.len() as u64;
            self.deliver(body);
        }
        Ok(())
    }

    /// The record of a transfer: number and body, once all of the body is there.
    fn take_record(
        &mut self,
        ring: RingId,
        lane: LaneId,
        word: Imm,
        imm: u32,
        carrier: Carrier,
        mem: &dyn SessionMemory,
    ) -> Result<Option<(XferSeq, Body)>, Violation> {
        let (record, part) = self.copy_record(ring, carrier, mem)?;
        if record.scope == RecordScope::Part {
            if (word.lanes, word.seq_low) != (1, 0) {
                return Err(Violation::Immediate { imm, ring, error: ImmError::Standalone });
            }
            return self.put_together(ring, record, part).map(|_| None);
        }
        let seq = self.inbound.unwrap(word.seq_low, lane)?;
        if record.scope != (RecordScope::Transfer { seq, lanes: word.lanes }) {
            return Err(misplaced(ring, record));
        }
        Ok(self.put_together(ring, record, part)?.map(|body| (seq, body)))
    }

    /// Number and message, if the record at the reader's cursor is like nearly all; its bytes are free then. What else it is, or what
    /// is wrong with it, is for [`Session::copy_record`] to say, which copies it out again.
    fn take_plain<'a>(
        &mut self,
        ring: RingId,
        lane: LaneId,
        word: Imm,
        carrier: Carrier,
        mem: &dyn SessionMemory,
        copy: &'a mut PlainRecord,
    ) -> Result<Option<(XferSeq, &'a [u8])>, Violation> {
        let Carrier::Immediate = carrier else { return Ok(None) };
        let Ok(seq) = self.inbound.unwrap(word.seq_low, lane) else { return Ok(None) };
        // The longest record is a quarter of a ring, which has 512 bytes at least, and so much lies behind a cursor.
        mem.read_record(ring, self.port(ring).ring_in.next_offset(), copy.bytes());
        let Some(message) = copy.message(self.setup.epoch, seq, word.lanes) else { return Ok(None) };
        self.free_record(ring, (RECORD_HEADER_BYTES + message.len()) as u32)?;
        Ok(Some((seq, message)))
    }

    fn take_standalone(&mut self, carrier: Carrier, mem: &dyn SessionMemory) -> Result<(), Violation> {
        let (record, part) = self.copy_record(RingId::Control, carrier, mem)?;
        let RecordScope::Standalone { seq } = record.scope else {
            return Err(misplaced(RingId::Control, record));
        };
        let Some(body) = self.put_together(RingId::Control, record, part)? else { return Ok(()) };
        if self.seen.insert(seq) {
            self.deliver(body);
        } else {
            self.counters.duplicates_dropped += 1;
        }
        Ok(())
    }

    /// The body once it is complete: at once without fragments, else with the last one.
    fn put_together(
        &mut self,
        ring: RingId,
        record: Record,
        part: Vec<u8>,
    ) -> Result<Option<Body>, Violation> {
        let on_control = ring == RingId::Control;
        if record.fragment.is_some() {
            // The sender may wait until it was taken, whatever credit it has.
            self.announce_all();
        }
        let parts = if on_control { &mut self.control_parts } else { &mut self.lane_parts };
        // Over the control endpoint messages come one after the other, so what is unfinished then was given up. Other lanes may
        // bring the record of another transfer meanwhile.
        let given_up = match &record.fragment {
            None => on_control && parts.give_up(None),
            next => parts.give_up(next.as_ref()),
        };
        self.counters.partial_messages_dropped += u64::from(given_up);
        let Some(fragment) = record.fragment else {
            return Ok(Some(Body { flags: record.flags, bytes: part }));
        };
        self.counters.fragments_received += 1;
        let whole = parts.add(fragment, record.flags, &part);
        let whole = whole.map_err(|error| Violation::Fragment { ring, error })?;
        Ok(whole.map(|bytes| Body { flags: record.flags, bytes }))
    }

    /// At the end of the epoch: what is unfinished is sent again from its beginning, or not at all.
    pub(crate) fn give_up_partial(&mut self) {
        let dropped = [self.control_parts.give_up(None), self.lane_parts.give_up(None)];
        self.counters.partial_messages_dropped += dropped.into_iter().map(u64::from).sum::<u64>();
    }

    /// Copies a record out of the slot or, at the reader's cursor, of the ring, *then* checks it, then its bytes are free.
    fn copy_record(
        &mut self,
        ring: RingId,
        carrier: Carrier,
        mem: &dyn SessionMemory,
    ) -> Result<(Record, Vec<u8>), Violation> {
        let epoch = self.setup.epoch;
        let port = self.port_mut(ring);
        let limit = port.ring_in.max_record_bytes() - RECORD_HEADER_BYTES as u32;
        let in_ring = port.ring_in.next_offset();
        let read = |at: usize, out: &mut [u8]| match carrier {
            Carrier::Immediate => mem.read_record(ring, in_ring + at as u32, out),
            Carrier::Send { slot, .. } => mem.read_slot(ring, slot, (SEND_HEADER_BYTES + at) as u32, out),
        };
        carrier.expect_room(ring, RECORD_HEADER_BYTES as u32, slot_bytes(port.ring_in.size_bytes()))?;
        let bad = |error| Violation::Record { ring, error };
        let mut bytes = [0; RECORD_HEADER_BYTES];
        read(0, &mut bytes);
        let header = RecordHeader::decode(&bytes, epoch, ring, limit).map_err(bad)?;
        carrier.expect_length(ring, RECORD_HEADER_BYTES as u32 + header.len)?;
        let mut part = vec![0; header.len as usize];
        if !part.is_empty() {
            read(RECORD_HEADER_BYTES, &mut part);
        }
        header.check(&bytes, &part).map_err(bad)?;
        if let Carrier::Immediate = carrier {
            self.free_record(ring, RECORD_HEADER_BYTES as u32 + header.len)?;
        }
        Ok((header.record, part))
    }

    /// Passes the record at the reader's cursor.
    fn free_record(&mut self, ring: RingId, record_bytes: u32) -> Result<(), Violation> {
        let port = self.port_mut(ring);
        let placement = port.ring_in.place(record_bytes);
        let ring_bytes = &mut port.bytes_in;
        if !ring_bytes.receive(placement.charge) {
            let received = ring_bytes.received() + placement.charge;
            return Err(Violation::TooManyReceives { ring, received, granted: ring_bytes.announced() });
        }
        ring_bytes.grant(placement.charge);
        port.ring_in.advance(placement);
        Ok(())
    }

    /// The id first: who hears of the message may ask for it at once.
    fn deliver(&mut self, body: Body) {
        let (id, message) = body.open();
        if let Some(id) = id {
            self.unpopped.messages += 1;
            self.unpopped.bytes += ID_BYTES as u64;
            self.counters.ids_received += 1;
            self.events.push_back(Event::Landed { id });
        }
        if let Some(message) = message {
            self.deliver_message(message);
        }
    }

    fn deliver_short(&mut self, bytes: &[u8]) {
        let spare = self.spare_messages.pop();
        let mut message = spare.unwrap_or_else(|| Vec::with_capacity(PlainRecord::MESSAGE_BYTES));
        message.extend_from_slice(bytes);
        self.deliver_message(message);
    }

    #[inline]
    fn deliver_message(&mut self, message: Vec<u8>) {
        self.unpopped.messages += 1;
        self.unpopped.bytes += message.len() as u64;
        self.counters.messages_received += 1;
        self.events.push_back(Event::Delivered { message });
    }
}

fn misplaced(ring: RingId, record: Record) -> Violation {
    let key = record.fragment.map_or(0, |fragment| fragment.key);
    let (lanes, seq, notify_seq) = match record.scope {
        RecordScope::Transfer { seq, lanes } => (lanes, seq.0, key),
        RecordScope::Standalone { seq } => (1, 0, seq.0),
        RecordScope::Part => (1, 0, key),
    };
    Violation::Record { ring, error: RecordError::Scope { lanes, seq, notify_seq } }
}
