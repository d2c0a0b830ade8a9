//! The send queue of an endpoint: a ring of work requests and the order in which they complete.
//!
//! ```text
//!    head            sent             tail        head + depth
//!     |  on the way    |    waiting    |     free      |       head ≤ sent ≤ tail ≤ head + depth
//! ```
//!
//! Numbers are work requests since the endpoint's creation, alike at both ends. A WRITE or SEND below `acked` is placed;
//! a READ is done when its bytes are here. Only the head completes, so completions come in order.

use baton_fabric::{
    Batch, Completion, CompletionKind, EndpointId, Extra, ExtraOp, FabricError, Op, Sge, WcStatus,
};

use super::frame::{MAX_READS, Malformed};
use super::{INLINE_BYTES, MAX_MESSAGE_BYTES};
use crate::lists::Lists;

/// Buffers that are made at once, with the first extra that needs one. Most are never touched.
const BUFFERS_AT_ONCE: usize = 8;
/// With fewer free ones acknowledgements may not come later: what waits for them must not be why more buffers are made, at work.
const FREE_BUFFERS: usize = 4;

/// Of so many work requests in a row one is acknowledged at once.
const MAX_PATIENT_RUN: u64 = 16;

/// What a work request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(super) enum Kind {
    #[default]
    Write,
    Read,
    Send,
}

/// A work request.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wr {
    pub seq: u64,
    pub local_addr: u64,
    pub local_key: u64,
    pub remote_addr: u64,
    pub remote_key: u64,
    pub len: u32,
    pub imm: u32,
    /// Buffer that holds the bytes, if they were copied.
    pub buffer: Option<u32>,
    /// Bytes of a SEND that tell where the rest goes; 0 for none.
    pub head: u32,
    /// List of the pieces, if they are gathered.
    pub list: Option<u32>,
    pub kind: Kind,
    pub has_imm: bool,
    pub signaled: bool,
    /// Its acknowledgement may come later.
    pub patient: bool,
    pub fenced: bool,
    /// A READ whose bytes are all here.
    pub done: bool,
}

/// Part of a READ's destination.
#[derive(Clone, Copy, Debug)]
pub(super) struct Landing {
    pub addr: u64,
    pub key: u64,
    pub len: u32,
}

#[derive(Clone, Copy, Default)]
struct Cursor {
    wr: u64,
    off: u32,
}

pub(super) struct SendQueue {
    id: EndpointId,
    ring: Box<[Wr]>,
    depth: u64,
    head: u64,
    sent: u64,
    tail: u64,
    /// Bytes of the work request `sent` that went out already.
    pub sent_off: u32,
    acked: u64,
    /// Next byte of the answers to place, and to count as good.
    place: Cursor,
    good: Cursor,
    reads: usize,
    /// A work request whose own memory may not be touched: it fails when everything before it is done.
    fault: Option<u64>,
    /// Ask the peer to acknowledge, because a failed work request waits for those before it.
    pub ask: bool,
    /// Work requests since one whose acknowledgement may not come later.
    patient_run: u64,
    /// Flushed: whatever is posted is flushed at once.
    dead: bool,
    // Never freed or resized while the endpoint lives, because a send that is under way reads from them.
    buffers: Vec<Box<[u8]>>,
    free: Vec<u32>,
    lists: Lists,
    max_sge: u32,
    /// Payload bytes between `sent` and `tail`.
    pub waiting_bytes: u64,
}

impl SendQueue {
    pub fn new(id: EndpointId, depth: u32, max_sge: u32) -> SendQueue {
        let slots = u64::from(depth).next_power_of_two() as usize;
        SendQueue {
            id,
            ring: vec![Wr::default(); slots].into(),
            depth: u64::from(depth),
            head: 0,
            sent: 0,
            tail: 0,
            sent_off: 0,
            acked: 0,
            place: Cursor::default(),
            good: Cursor::default(),
            reads: 0,
            fault: None,
            ask: false,
            patient_run: 0,
            dead: false,
            buffers: Vec::new(),
            free: Vec::new(),
            lists: Lists::default(),
            max_sge,
            waiting_bytes: 0,
        }
    }

    fn at(&self, number: u64) -> &Wr {
        &self.ring[number as usize & (self.ring.len() - 1)]
    }

    fn at_mut(&mut self, number: u64) -> &mut Wr {
        let mask = self.ring.len() - 1;
        &mut self.ring[number as usize & mask]
    }

    /// Nothing waits for its turn to be sent.
    pub fn is_drained(&self) -> bool {
        self.sent == self.tail
    }

    /// Takes a batch, all of it or nothing. Work requests of a dead queue come out at once, flushed.
    pub fn push(&mut self, batch: &Batch<'_>, out: &mut dyn FnMut(Completion)) -> Result<(), FabricError> {
        self.check(batch)?;
        if self.dead {
            for i in 0..batch.len() as u64 {
                out(self.completion(batch.first_seq + i, WcStatus::Flushed));
            }
            return Ok(());
        }
        let may_wait = batch.patient && self.may_wait();
        let mut seq = batch.first_seq;
        let last_template = batch.work.len().wrapping_sub(1);
        for (i, t) in batch.work.iter().enumerate() {
            let has_imm = batch.imm.is_some() && i == last_template;
            let wr = Wr {
                seq,
                local_addr: t.local_addr,
                local_key: t.local_key,
                remote_addr: t.remote_addr,
                remote_key: t.remote_key,
                len: t.len_bytes,
                imm: if has_imm { batch.imm.unwrap_or(0) } else { 0 },
                head: 0,
                buffer: None,
                list: None,
                kind: if t.op == Op::Read { Kind::Read } else { Kind::Write },
                has_imm,
                signaled: batch.signaled && batch.extra.is_none() && i == last_template,
                patient: may_wait,
                fenced: false,
                done: false,
            };
            self.append(wr);
            seq += 1;
        }
        if let Some(extra) = &batch.extra {
            let wr = self.extra(extra, seq, batch.signaled);
            let patient = may_wait && (wr.buffer.is_none() || self.free.len() >= FREE_BUFFERS);
            self.append(Wr { patient, ..wr });
        }
        Ok(())
    }

    /// Whether an acknowledgement may come later: a peer that never has nothing else to do gives one now and then all the same.
    fn may_wait(&mut self) -> bool {
        self.patient_run += 1;
        if self.patient_run < MAX_PATIENT_RUN.min(self.depth / 4) {
            return true;
        }
        self.patient_run = 0;
        false
    }

    fn check(&self, batch: &Batch<'_>) -> Result<(), FabricError> {
        let (used, wanted) = (self.tail - self.head, batch.len() as u64);
        if used + wanted > self.depth {
            return Err(FabricError::Limit(format!(
                "send queue of endpoint {:?}: {used} of {} work requests are outstanding, {wanted} more do not fit",
                self.id, self.depth
            )));
        }
        for t in batch.work {
            if t.len_bytes == 0 || t.len_bytes > MAX_MESSAGE_BYTES {
                return Err(FabricError::Invalid(format!(
                    "a work request of {} bytes; tcp takes 1 to {MAX_MESSAGE_BYTES}",
                    t.len_bytes
                )));
            }
        }
        if batch.imm.is_some() && batch.work.last().is_none_or(|t| t.op != Op::Write) {
            return Err(FabricError::Invalid("an immediate needs a WRITE as the last template".into()));
        }
        if let Some(extra) = &batch.extra {
            extra.check_gather(self.max_sge, MAX_MESSAGE_BYTES)?;
            if extra.bytes.len() > MAX_MESSAGE_BYTES as usize {
                return Err(FabricError::Invalid(format!(
                    "an extra of {} bytes; tcp takes up to {MAX_MESSAGE_BYTES}",
                    extra.bytes.len()
                )));
            }
            if extra.bytes.len() > INLINE_BYTES && extra.staged.is_none() {
                return Err(FabricError::Invalid(format!(
                    "an extra of {} bytes that is not staged; tcp copies up to {INLINE_BYTES}",
                    extra.bytes.len()
                )));
            }
        }
        Ok(())
    }

    fn extra(&mut self, extra: &Extra<'_>, seq: u64, signaled: bool) -> Wr {
        let mut wr = Wr {
            seq,
            remote_addr: extra.remote_addr,
            remote_key: extra.remote_key,
            len: extra.len_bytes() as u32,
            signaled,
            fenced: extra.fenced,
            ..Wr::default()
        };
        match extra.op {
            ExtraOp::Write => {}
            ExtraOp::WriteImm(imm) => (wr.has_imm, wr.imm) = (true, imm),
            ExtraOp::Send => wr.kind = Kind::Send,
            ExtraOp::SendHead => (wr.kind, wr.head) = (Kind::Send, extra.bytes.len() as u32),
        }
        if !extra.gather.is_empty() {
            wr.list = Some(self.lists.keep(extra.pieces(), self.max_sge as usize));
        } else if !extra.bytes.is_empty() && extra.bytes.len() <= INLINE_BYTES {
            let index = self.free.pop().unwrap_or_else(|| self.make_buffers());
            let buffer = &mut self.buffers[index as usize];
            buffer[..extra.bytes.len()].copy_from_slice(extra.bytes);
            wr.local_addr = buffer.as_ptr() as u64;
            wr.buffer = Some(index);
        } else if let Some((addr, key)) = extra.staged {
            (wr.local_addr, wr.local_key) = (addr, key);
        }
        wr
    }

    /// Of several new ones the first; the others are free.
    #[cold]
    fn make_buffers(&mut self) -> u32 {
        let first = self.buffers.len();
        self.buffers.extend((0..BUFFERS_AT_ONCE).map(|_| vec![0; INLINE_BYTES].into_boxed_slice()));
        // So that giving back never allocates.
        self.free.reserve(self.buffers.len());
        self.free.extend((first + 1..self.buffers.len()).rev().map(|index| index as u32));
        first as u32
    }

    fn append(&mut self, wr: Wr) {
        if wr.kind != Kind::Read {
            self.waiting_bytes += u64::from(wr.len);
        }
        *self.at_mut(self.tail) = wr;
        self.tail += 1;
    }

    /// The pieces of bytes `off` to `off + len` of a SEND, in order.
    pub fn pieces(&self, wr: &Wr, off: u32, len: u32) -> impl Iterator<Item = Sge> {
        let whole = Sge { addr: wr.local_addr, local_key: wr.local_key, len_bytes: wr.len };
        let list = wr.list.map_or(&[][..], |list| self.lists.get(list));
        let all = wr.list.is_none().then_some(whole).into_iter().chain(list.iter().copied());
        let (mut skip, mut left) = (off, len);
        all.filter_map(move |piece| {
            let skipped = skip.min(piece.len_bytes);
            skip -= skipped;
            let len_bytes = (piece.len_bytes - skipped).min(left);
            left -= len_bytes;
            let addr = piece.addr.wrapping_add(u64::from(skipped));
            (len_bytes > 0).then_some(Sge { addr, len_bytes, ..piece })
        })
    }

    /// The next work request to send, with its number, if it may start now.
    pub fn next(&self) -> Option<(u64, Wr)> {
        if self.sent == self.tail || self.fault.is_some() {
            return None;
        }
        let wr = *self.at(self.sent);
        let waits = match wr.kind {
            Kind::Read => self.reads >= MAX_READS,
            Kind::Write | Kind::Send => wr.fenced && self.reads > 0,
        };
        (!waits).then_some((self.sent, wr))
    }

    /// `len` more bytes of the next work request go out; `true` when that was its end.
    pub fn advance(&mut self, wr: &Wr, len: u32) -> bool {
        if wr.kind == Kind::Read {
            self.reads += 1;
            self.sent += 1;
            return true;
        }
        self.waiting_bytes -= u64::from(len);
        self.sent_off += len;
        if self.sent_off < wr.len {
            return false;
        }
        self.sent_off = 0;
        self.sent += 1;
        true
    }

    /// The next work request may not touch its own memory; it fails once those before it are done. `true`: that is now.
    pub fn set_fault(&mut self) -> bool {
        self.fault = Some(self.sent);
        self.ask = self.head != self.sent;
        !self.ask
    }

    /// A part of `number` went out and the rest cannot be read; nothing behind it has gone out. It fails once those before it are done.
    /// `true`: that is now.
    pub fn cut(&mut self, number: u64) -> bool {
        (self.fault, self.ask) = (Some(number), false);
        (self.sent, self.sent_off) = (number + 1, 0);
        self.fault_is_due()
    }

    /// The peer has placed everything below `ack`.
    pub fn acknowledge(&mut self, ack: u64, out: &mut dyn FnMut(Completion)) -> Result<(), Malformed> {
        if ack > self.fault.unwrap_or(self.sent) {
            return Err(Malformed::Ack);
        }
        if ack > self.acked {
            self.acked = ack;
            self.retire(out);
        }
        Ok(())
    }

    fn retire(&mut self, out: &mut dyn FnMut(Completion)) {
        while self.head < self.sent {
            let wr = *self.at(self.head);
            let done = if wr.kind == Kind::Read { wr.done } else { self.head < self.acked };
            if !done {
                break;
            }
            if wr.signaled {
                out(self.completion(wr.seq, WcStatus::Success));
            }
            self.drop_head(&wr);
        }
    }

    fn drop_head(&mut self, wr: &Wr) {
        self.free.extend(wr.buffer);
        if let Some(list) = wr.list {
            self.lists.give_back(list);
        }
        self.head += 1;
    }

    /// Whether the faulty work request is the oldest one now.
    pub fn fault_is_due(&self) -> bool {
        self.fault == Some(self.head)
    }

    /// Whether `number` is the oldest one outstanding, of which at least a part went out.
    pub fn is_head(&self, number: u64) -> bool {
        self.head == number && (self.head < self.sent || self.sent_off > 0)
    }

    /// Where the next `len` bytes of answers go.
    pub fn land(&mut self, mut len: u32, out: &mut Vec<Landing>) -> Result<(), Malformed> {
        out.clear();
        while len > 0 {
            let (wr, off) = self.reading(self.place)?;
            let n = len.min(wr.len - off);
            out.push(Landing { addr: wr.local_addr + u64::from(off), key: wr.local_key, len: n });
            len -= n;
            (self.place, _) = step(self.place_number(self.place)?, &wr, off + n);
        }
        Ok(())
    }

    /// The next `len` bytes of answers are here and good.
    pub fn landed(&mut self, mut len: u32, out: &mut dyn FnMut(Completion)) -> Result<(), Malformed> {
        while len > 0 {
            let (wr, off) = self.reading(self.good)?;
            let number = self.place_number(self.good)?;
            let n = len.min(wr.len - off);
            len -= n;
            let ended;
            (self.good, ended) = step(number, &wr, off + n);
            if ended {
                self.at_mut(number).done = true;
                self.reads -= 1;
            }
        }
        self.retire(out);
        Ok(())
    }

    /// Number of the READ at or after a cursor.
    fn place_number(&self, cursor: Cursor) -> Result<u64, Malformed> {
        // Below the head nothing waits for an answer.
        let from = cursor.wr.max(self.head);
        (from..self.sent).find(|n| self.at(*n).kind == Kind::Read).ok_or(Malformed::UnexpectedAnswer)
    }

    fn reading(&self, cursor: Cursor) -> Result<(Wr, u32), Malformed> {
        let number = self.place_number(cursor)?;
        Ok((*self.at(number), if number == cursor.wr { cursor.off } else { 0 }))
    }

    /// Ends the queue: one work request fails, the others are flushed. It is the one that may not touch its own memory, and those in front
    /// of it that are not acknowledged bear no blame; without one, or if the peer refused the oldest, it is the oldest, with `culprit`.
    pub fn flush(&mut self, culprit: Option<WcStatus>, out: &mut dyn FnMut(Completion)) {
        self.retire(out);
        let refused = culprit.is_some_and(|s| !matches!(s, WcStatus::LocalAccess | WcStatus::PeerGone));
        let (failed, failure) = match self.fault {
            Some(number) if !refused => (number, WcStatus::LocalAccess),
            _ => (self.head, culprit.unwrap_or(WcStatus::Flushed)),
        };
        while self.head < self.tail {
            let wr = *self.at(self.head);
            let status = if self.head == failed { failure } else { WcStatus::Flushed };
            out(self.completion(wr.seq, status));
            self.drop_head(&wr);
        }
        (self.sent, self.sent_off, self.waiting_bytes) = (self.tail, 0, 0);
        self.dead = true;
    }

    fn completion(&self, seq: u64, status: WcStatus) -> Completion {
        Completion { endpoint: self.id, kind: CompletionKind::Send, status, seq, len_bytes: 0 }
    }

    /// For `stats`: outstanding, waiting to be sent, READs under way.
    pub fn counts(&self) -> (u64, u64, usize) {
        (self.tail - self.head, self.tail - self.sent, self.reads)
    }
}

/// The cursor after `off` bytes of a READ, and whether that is its end.
fn step(number: u64, wr: &Wr, off: u32) -> (Cursor, bool) {
    if off == wr.len {
        (Cursor { wr: number + 1, off: 0 }, true)
    } else {
        (Cursor { wr: number, off }, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_fabric::Template;

    const ID: EndpointId = EndpointId { slot: 0, generation: 0 };

    fn template(op: Op, len_bytes: u32) -> Template {
        Template {
            local_addr: 0x1000,
            remote_addr: 0x2000,
            local_key: 1,
            remote_key: 2,
            len_bytes,
            op,
            reserved: [0; 3],
        }
    }

    fn batch(work: &[Template], first_seq: u64, signaled: bool) -> Batch<'_> {
        Batch { work, imm: None, extra: None, first_seq, signaled, patient: false }
    }

    fn send_all(queue: &mut SendQueue) {
        while let Some((_, wr)) = queue.next() {
            queue.advance(&wr, wr.len);
        }
    }

    #[test]
    fn of_many_that_can_wait_one_asks_at_once_well_before_the_queue_is_full() {
        for (depth, each) in [(4, 1), (32, 8), (64, 16), (1024, 16)] {
            let mut queue = SendQueue::new(ID, depth, 1);
            let work = [template(Op::Write, 10)];
            let mut urgent = Vec::new();
            for n in 0..u64::from(depth) {
                queue.push(&Batch { patient: true, ..batch(&work, n, true) }, &mut |_| ()).unwrap();
                urgent.extend((!queue.at(n).patient).then_some(n + 1));
            }
            assert_eq!(urgent[..2.min(urgent.len())], [each, 2 * each][..2.min(urgent.len())], "{depth}");
            assert_eq!(urgent.len() as u64, u64::from(depth) / each, "{depth}");
        }
    }

    #[test]
    fn what_waits_for_an_acknowledgement_does_not_take_the_last_buffers() {
        let mut queue = SendQueue::new(ID, 1024, 1);
        let extra = Extra {
            op: ExtraOp::Write,
            bytes: &[7; 80],
            staged: None,
            gather: &[],
            remote_addr: 0x2000,
            remote_key: 2,
            fenced: false,
        };
        let mut patient = Vec::new();
        for n in 0..6 {
            let one = Batch { extra: Some(extra), patient: true, ..batch(&[], n, true) };
            queue.push(&one, &mut |_| ()).unwrap();
            patient.push(queue.at(n).patient);
        }
        assert_eq!(patient, [true, true, true, true, false, false]);
        assert_eq!(queue.buffers.len(), BUFFERS_AT_ONCE);
        send_all(&mut queue);
        queue.acknowledge(5, &mut |_| ()).unwrap();
        assert_eq!(queue.free.len(), BUFFERS_AT_ONCE - 1);
    }

    #[test]
    fn a_read_holds_back_the_completion_of_a_later_write() {
        let mut queue = SendQueue::new(ID, 4, 1);
        let mut out = Vec::new();
        let work = [template(Op::Read, 10), template(Op::Write, 20)];
        queue.push(&batch(&work[..1], 5, true), &mut |c| out.push(c)).unwrap();
        queue.push(&batch(&work[1..], 6, true), &mut |c| out.push(c)).unwrap();
        send_all(&mut queue);
        queue.acknowledge(2, &mut |c| out.push(c)).unwrap();
        assert!(out.is_empty());
        let mut landings = Vec::new();
        queue.land(10, &mut landings).unwrap();
        assert_eq!((landings.len(), landings[0].len), (1, 10));
        queue.landed(10, &mut |c| out.push(c)).unwrap();
        assert_eq!(
            out.iter().map(|c| (c.seq, c.status)).collect::<Vec<_>>(),
            [(5, WcStatus::Success), (6, WcStatus::Success)]
        );
        assert_eq!(queue.counts(), (0, 0, 0));
    }

    #[test]
    fn an_answer_that_nobody_asked_for_is_malformed() {
        let mut queue = SendQueue::new(ID, 4, 1);
        assert_eq!(queue.land(1, &mut Vec::new()), Err(Malformed::UnexpectedAnswer));
        queue.push(&batch(&[template(Op::Read, 10)], 0, true), &mut |_| {}).unwrap();
        assert_eq!(queue.land(1, &mut Vec::new()), Err(Malformed::UnexpectedAnswer), "it was not sent yet");
        send_all(&mut queue);
        assert_eq!(queue.land(11, &mut Vec::new()), Err(Malformed::UnexpectedAnswer));
    }

    #[test]
    fn more_than_the_depth_is_refused_and_taken_again_after_completions() {
        let mut queue = SendQueue::new(ID, 3, 1);
        let work = [template(Op::Write, 1); 3];
        queue.push(&batch(&work, 0, true), &mut |_| {}).unwrap();
        let error = queue.push(&batch(&work[..1], 3, true), &mut |_| {}).unwrap_err();
        assert!(matches!(&error, FabricError::Limit(text) if text.contains("3 of 3")), "{error}");
        send_all(&mut queue);
        queue.acknowledge(3, &mut |_| {}).unwrap();
        queue.push(&batch(&work, 3, true), &mut |_| {}).unwrap();
        assert_eq!(queue.acknowledge(4, &mut |_| {}), Err(Malformed::Ack), "not sent yet");
    }

    #[test]
    fn a_flush_names_the_culprit_first_and_later_posts_come_back_at_once() {
        let mut queue = SendQueue::new(ID, 4, 1);
        let mut out = Vec::new();
        queue.push(&batch(&[template(Op::Write, 1); 3], 7, false), &mut |c| out.push(c)).unwrap();
        queue.flush(Some(WcStatus::RemoteAccess), &mut |c| out.push(c));
        queue.push(&batch(&[template(Op::Write, 1)], 10, false), &mut |c| out.push(c)).unwrap();
        assert_eq!(
            out.iter().map(|c| (c.seq, c.status)).collect::<Vec<_>>(),
            [
                (7, WcStatus::RemoteAccess),
                (8, WcStatus::Flushed),
                (9, WcStatus::Flushed),
                (10, WcStatus::Flushed),
            ]
        );
    }

    #[test]
    fn a_fenced_extra_waits_for_earlier_reads() {
        let mut queue = SendQueue::new(ID, 4, 1);
        let work = [template(Op::Read, 10)];
        let extra = Extra {
            op: ExtraOp::WriteImm(1),
            bytes: &[],
            staged: None,
            gather: &[],
            remote_addr: 0,
            remote_key: 0,
            fenced: true,
        };
        let all = Batch {
            work: &work,
            imm: None,
            extra: Some(extra),
            first_seq: 0,
            signaled: true,
            patient: false,
        };
        queue.push(&all, &mut |_| {}).unwrap();
        send_all(&mut queue);
        assert!(!queue.is_drained());
        queue.land(10, &mut Vec::new()).unwrap();
        queue.landed(10, &mut |_| {}).unwrap();
        send_all(&mut queue);
        assert!(queue.is_drained());
    }
}
