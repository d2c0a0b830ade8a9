//! The sending half of a connection: builds frames from the send queue and from what the peer asked for, and hands their
//! headers and the application's memory to the kernel in one gathered call.
//!
//! A batch holds whole frames. While it is on its way nothing else is sent, so a frame is never interrupted; whoever
//! revokes its memory in the middle gets zeros sent in its place (answers) or the connection cut there (own work requests).

use std::net::Shutdown;
use std::sync::atomic::Ordering;

use baton_fabric::{Sge, WcStatus};

use super::endpoint::{Endpoint, State};
use super::frame::{
    self, ACK_LATER, ACK_WANTED, FrameOp, HEAD, Header, MAX_FRAME_BYTES, MAX_PIECES, MORE, Piece, Status,
    TRAILER,
};
use super::guards::{Entry, Guards};
use super::send_queue::{Kind, SendQueue, Wr};
use super::shared::Shared;
use super::sys::{self, MAX_IOV};
use crate::regions::Regions;

/// Payload of one batch, about.
const BATCH_BYTES: usize = 512 * 1024;
static ZERO_PAGE: [u8; 64 * 1024] = [0; 64 * 1024];

/// Where bytes of a batch are.
#[derive(Clone, Copy)]
enum Source {
    /// In `head`, from this offset.
    Head,
    /// In a buffer of the send queue.
    Copied,
    /// In memory of the work request `number`.
    Local { key: u64, number: u64 },
    /// In memory that the peer named; the frame's trailer is at this offset of `head`.
    Answer { key: u64, trailer: u32, number: u64 },
    /// Zeros in place of memory that was revoked or is not mapped.
    Zeros,
}

#[derive(Clone, Copy)]
struct Segment {
    source: Source,
    addr: u64,
    len: u32,
}

/// State of the sending half.
pub(super) struct Transmitter {
    head: Vec<u8>,
    segments: Vec<Segment>,
    /// Segment that goes out next, and how much of it went.
    at: usize,
    off: u32,
    iov: Iov,
    /// The next frame is an answer if there is a choice.
    answers_first: bool,
    /// Nothing comes after the batch: it holds the last word, or ended in the middle of a frame.
    last: bool,
}

/// Segments for which there is room from the start: an acknowledgement, which may be the first that a connection sends and go out on
/// a thread that is not to allocate. More is made room for with the first large batch.
const FIRST_SEGMENTS: usize = 8;

impl Default for Transmitter {
    fn default() -> Transmitter {
        Transmitter {
            head: Vec::with_capacity(FIRST_SEGMENTS * frame::HEADER),
            segments: Vec::with_capacity(FIRST_SEGMENTS),
            at: 0,
            off: 0,
            iov: Iov(Vec::with_capacity(FIRST_SEGMENTS)),
            answers_first: false,
            last: false,
        }
    }
}

#[derive(Default)]
pub(super) struct Iov(pub Vec<libc::iovec>);

// SAFETY: the vector is scratch space of one call under the owner's lock; the pointers in it are not used across calls.
unsafe impl Send for Iov {}

/// Why [`Transmitter::pump`] stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Sent(usize),
    Blocked,
    Over,
}

impl Transmitter {
    /// Sends up to about `budget` bytes. Returns how many.
    pub fn pump(&mut self, shared: &Shared, endpoint: &Endpoint, budget: usize) -> usize {
        let mut sent = 0;
        while matches!(endpoint.state(), State::Open | State::Closing) {
            if self.at == self.segments.len() {
                if self.last {
                    endpoint.tx_work.store(false, Ordering::SeqCst);
                    if let Some(fd) = endpoint.fd() {
                        sys::shutdown(fd, Shutdown::Write);
                    }
                    endpoint.nothing_goes(shared);
                    return sent;
                }
                // Cleared before looking: whoever adds work afterwards sets it again.
                endpoint.tx_work.store(false, Ordering::SeqCst);
                if !self.build(shared, endpoint) {
                    return sent;
                }
            }
            endpoint.tx_work.store(true, Ordering::SeqCst);
            if sent >= budget {
                return sent;
            }
            match self.send(shared, endpoint, budget - sent) {
                Step::Sent(n) => sent += n,
                Step::Blocked | Step::Over => return sent,
            }
        }
        sent
    }

    // ---- building

    /// Fills an empty batch. `false`: there is nothing to send.
    fn build(&mut self, shared: &Shared, endpoint: &Endpoint) -> bool {
        self.head.clear();
        self.segments.clear();
        (self.at, self.off) = (0, 0);
        // Every header acknowledges, so whatever goes out pays the debt. Taken before any header reads `placed`.
        let due = endpoint.ack_due.swap(false, Ordering::SeqCst);
        let mut bytes = 0;
        while bytes < BATCH_BYTES && self.segments.len() + 2 * MAX_PIECES < MAX_IOV {
            let first = self.answers_first;
            let frame = match self.frame(shared, endpoint, first) {
                None => self.frame(shared, endpoint, !first),
                some => {
                    self.answers_first = !first;
                    some
                }
            };
            match frame {
                Some(n) => bytes += n,
                None => break,
            }
        }
        if self.segments.is_empty() && !self.last {
            self.last_word(endpoint);
        }
        if self.segments.is_empty() {
            let ask = std::mem::take(&mut endpoint.sq.lock().ask);
            if !due && !ask {
                return false;
            }
            shared.counters.acknowledgements_sent.add(1);
            let h = self.header(endpoint, FrameOp::Ack);
            self.push_header(&Header { flags: if ask { ACK_WANTED } else { 0 }, ..h });
        }
        true
    }

    fn frame(&mut self, shared: &Shared, endpoint: &Endpoint, answer: bool) -> Option<usize> {
        if answer {
            return self.answer(shared, endpoint);
        }
        if endpoint.state() != State::Open {
            return None;
        }
        let mut sq = endpoint.sq.lock();
        let (number, wr) = sq.next()?;
        let sent = match wr.kind {
            Kind::Read => self.ask(&shared.regions, endpoint, &mut sq, number),
            Kind::Write => self.write(&shared.regions, endpoint, &mut sq, number),
            Kind::Send => self.message(&shared.regions, endpoint, &mut sq, number, &wr),
        };
        if sent.is_none() && sq.set_fault() {
            drop(sq);
            endpoint.fail(shared, Some(WcStatus::LocalAccess));
        }
        sent
    }

    fn header(&self, endpoint: &Endpoint, op: FrameOp) -> Header {
        Header { op, ..Header::ack(endpoint.epoch(), endpoint.placed.load(Ordering::SeqCst)) }
    }

    fn push_header(&mut self, header: &Header) {
        let at = self.head.len();
        frame::encode(&mut self.head, header);
        self.push_head(at);
    }

    /// What was appended to `head` since `at` goes out.
    fn push_head(&mut self, at: usize) {
        let len = (self.head.len() - at) as u32;
        self.segments.push(Segment { source: Source::Head, addr: at as u64, len });
    }

    /// Room for a header that is known only after its pieces.
    fn reserve_header(&mut self) -> usize {
        let at = self.head.len();
        self.head.resize(at + frame::HEADER, 0);
        at
    }

    fn fill_header(&mut self, at: usize, header: &Header) {
        let mut bytes = [0; frame::HEADER];
        frame::encode_to(&mut bytes, header);
        self.head[at..at + frame::HEADER].copy_from_slice(&bytes);
    }

    fn source(wr: &Wr, key: u64, number: u64) -> Source {
        if wr.buffer.is_some() { Source::Copied } else { Source::Local { key, number } }
    }

    /// A frame of WRITEs: ends at 256 pieces, 256 KiB or an immediate. `None`: the first one may not touch its own memory.
    fn write(
        &mut self,
        regions: &Regions,
        endpoint: &Endpoint,
        sq: &mut SendQueue,
        first: u64,
    ) -> Option<usize> {
        let mut guards = Guards::new(regions);
        let mut h = self.header(endpoint, FrameOp::Write);
        h.seq = first;
        let at = self.reserve_header();
        let table = self.segments.len();
        self.segments.push(Segment { source: Source::Head, addr: at as u64, len: 0 });
        while let Some((number, wr)) = sq.next() {
            let room = MAX_FRAME_BYTES as u32 - h.len;
            if wr.kind != Kind::Write || usize::from(h.count) == MAX_PIECES || (room == 0 && wr.len > 0) {
                break;
            }
            if wr.len == 0 {
                // A WRITE of nothing is a frame of its own.
                if h.count == 0 {
                    if wr.has_imm {
                        (h.op, h.imm) = (FrameOp::Imm, wr.imm);
                    }
                    h.ends = 1;
                    h.flags |= ack_flag(&wr);
                    sq.advance(&wr, 0);
                }
                break;
            }
            let off = sq.sent_off;
            let len = room.min(wr.len - off);
            let source = Self::source(&wr, wr.local_key, number);
            if let Source::Local { key, .. } = source
                && guards.local(key, wr.local_addr + u64::from(off), len, false) != Entry::Yes
            {
                break;
            }
            let remote = Piece { key: wr.remote_key, addr: wr.remote_addr.wrapping_add(u64::from(off)), len };
            frame::encode_piece(&mut self.head, &remote);
            self.segments.push(Segment { source, addr: wr.local_addr + u64::from(off), len });
            h.len += len;
            h.count += 1;
            if sq.advance(&wr, len) {
                h.ends += 1;
                h.flags |= ack_flag(&wr);
                if wr.has_imm {
                    (h.op, h.imm, h.message_bytes) = (FrameOp::Imm, wr.imm, wr.len);
                    break;
                }
            }
        }
        if h.count == 0 && h.ends == 0 {
            self.segments.truncate(table);
            self.head.truncate(at);
            return None;
        }
        self.fill_header(at, &h);
        self.segments[table].len = (self.head.len() - at) as u32;
        Some(h.len as usize + frame::HEADER)
    }

    /// A frame that asks for READs.
    fn ask(
        &mut self,
        regions: &Regions,
        endpoint: &Endpoint,
        sq: &mut SendQueue,
        first: u64,
    ) -> Option<usize> {
        let mut guards = Guards::new(regions);
        let mut h = self.header(endpoint, FrameOp::ReadReq);
        h.seq = first;
        let at = self.reserve_header();
        while let Some((_, wr)) = sq.next() {
            let full = usize::from(h.count) == MAX_PIECES;
            if wr.kind != Kind::Read
                || full
                || guards.local(wr.local_key, wr.local_addr, wr.len, true) != Entry::Yes
            {
                break;
            }
            let piece = Piece { key: wr.remote_key, addr: wr.remote_addr, len: wr.len };
            frame::encode_piece(&mut self.head, &piece);
            h.count += 1;
            h.ends += 1;
            sq.advance(&wr, wr.len);
        }
        if h.count == 0 {
            self.head.truncate(at);
            return None;
        }
        self.fill_header(at, &h);
        self.push_head(at);
        Some(self.head.len() - at)
    }

    /// One frame of a message.
    fn message(
        &mut self,
        regions: &Regions,
        endpoint: &Endpoint,
        sq: &mut SendQueue,
        number: u64,
        wr: &Wr,
    ) -> Option<usize> {
        let off = sq.sent_off;
        let len = (wr.len - off).min(MAX_FRAME_BYTES as u32);
        if wr.buffer.is_none() && !permitted(regions, sq.pieces(wr, off, len)) {
            return None;
        }
        let mut h = self.header(endpoint, FrameOp::Send);
        (h.seq, h.len, h.message_bytes) = (number, len, wr.len);
        let at = self.reserve_header();
        self.push_head(at);
        for piece in sq.pieces(wr, off, len) {
            let source = Self::source(wr, piece.local_key, number);
            self.segments.push(Segment { source, addr: piece.addr, len: piece.len_bytes });
        }
        if sq.advance(wr, len) {
            h.ends = 1;
            h.flags = ack_flag(wr);
            if off == 0 && wr.head > 0 && wr.head < len {
                h.flags |= HEAD;
                h.imm = wr.head;
            }
        } else {
            h.flags = MORE;
        }
        self.fill_header(at, &h);
        Some(frame::HEADER + len as usize)
    }

    /// One frame of bytes that the peer asked for.
    fn answer(&mut self, shared: &Shared, endpoint: &Endpoint) -> Option<usize> {
        let mut inbound = endpoint.inbound.lock();
        let number = inbound.asks.front()?.number;
        let mut guards = Guards::new(&shared.regions);
        let mut h = self.header(endpoint, FrameOp::ReadResp);
        h.seq = inbound.answered;
        let at = self.reserve_header();
        self.push_head(at);
        let trailer = self.head.len() as u32;
        let mut pieces = 0;
        let mut refused = false;
        while let Some(ask) = inbound.asks.front_mut() {
            let len = ask.len.min(MAX_FRAME_BYTES as u32 - h.len);
            if len == 0 || pieces == MAX_PIECES {
                break;
            }
            match guards.remote(ask.key, ask.addr, len, false) {
                Entry::Yes => {}
                Entry::Full => break,
                Entry::No(_) => {
                    refused = pieces == 0;
                    break;
                }
            }
            let source = Source::Answer { key: ask.key, trailer, number };
            self.segments.push(Segment { source, addr: ask.addr, len });
            h.len += len;
            pieces += 1;
            (ask.addr, ask.len) = (ask.addr + u64::from(len), ask.len - len);
            if ask.len == 0 {
                inbound.asks.pop_front();
            }
        }
        if refused {
            self.segments.pop();
            self.head.truncate(at);
            inbound.asks.clear();
            drop(inbound);
            endpoint.refuse_instead(shared, number, Status::Access);
            return None;
        }
        inbound.answered += u64::from(h.len);
        self.fill_header(at, &h);
        let at = self.head.len();
        self.head.extend_from_slice(&frame::trailer(false));
        self.push_head(at);
        Some(h.len as usize + frame::HEADER + TRAILER)
    }

    /// The refusal, or how far a peer came that cannot go on, once everything before it is answered.
    fn last_word(&mut self, endpoint: &Endpoint) {
        let closing = endpoint.state() == State::Closing;
        let inbound = endpoint.inbound.lock();
        let (answered, refusal) = (inbound.asks.is_empty(), inbound.refusal);
        drop(inbound);
        match refusal {
            Some((number, status)) if answered => {
                let h = self.header(endpoint, FrameOp::Nak);
                self.push_header(&Header { seq: number, status, ..h });
            }
            None if answered && closing => self.push_header(&self.header(endpoint, FrameOp::Ack)),
            _ => return,
        }
        self.last = true;
    }

    // ---- sending

    fn send(&mut self, shared: &Shared, endpoint: &Endpoint, budget: usize) -> Step {
        let Some(fd) = endpoint.fd() else { return Step::Over };
        let mut guards = Guards::new(&shared.regions);
        if !self.gather(shared, endpoint, &mut guards, budget) {
            return Step::Sent(0);
        }
        // SAFETY: the buffers are `head`, buffers of the send queue (which stay until the endpoint is dropped), the zero
        // page, and registered memory whose guards live until after the call.
        let mut result = unsafe { sys::send(fd, &self.iov.0) };
        if matches!(&result, Err(error) if sys::is_fault(error)) && self.iov.0.len() > 1 {
            // Some buffer is not mapped and nothing went out. By itself the first one goes, or is found to be it.
            self.iov.0.truncate(1);
            // SAFETY: as above.
            result = unsafe { sys::send(fd, &self.iov.0) };
        }
        if matches!(result, Ok(None)) {
            // Announced before the second try, so that the event that ends the wait cannot be missed.
            endpoint.tx_blocked.store(true, Ordering::SeqCst);
            // SAFETY: as above.
            result = unsafe { sys::send(fd, &self.iov.0) };
            if !matches!(result, Ok(None)) {
                endpoint.tx_blocked.store(false, Ordering::SeqCst);
            }
        }
        drop(guards);
        match result {
            Ok(Some(n)) => {
                shared.counters.sends.add(1);
                shared.counters.bytes_sent.add(n as u64);
                self.forward(n);
                endpoint.keep_closing();
                Step::Sent(n)
            }
            Ok(None) => {
                shared.counters.sends_blocked.add(1);
                Step::Blocked
            }
            Err(error) if sys::is_fault(&error) => self.unreadable(shared, endpoint),
            Err(error) => {
                tracing::debug!(endpoint = ?endpoint.id, "tcp: send: {error}");
                endpoint.nothing_goes(shared);
                // What the peer said before it went may tell why; the reader decides.
                endpoint.tx_blocked.store(true, Ordering::SeqCst);
                endpoint.peer_hung_up();
                Step::Over
            }
        }
    }

    /// Fills `iov` with what is left of the batch. `false`: it was cut.
    fn gather<'a>(
        &mut self,
        shared: &'a Shared,
        endpoint: &Endpoint,
        guards: &mut Guards<'a>,
        budget: usize,
    ) -> bool {
        self.iov.0.clear();
        let (mut at, mut off, mut bytes) = (self.at, self.off, 0);
        while at < self.segments.len() && self.iov.0.len() < MAX_IOV && bytes < budget {
            let segment = self.segments[at];
            let (addr, len) = (segment.addr + u64::from(off), segment.len - off);
            let base = match segment.source {
                Source::Head => self.head[addr as usize..].as_ptr() as u64,
                Source::Copied => addr,
                Source::Zeros => ZERO_PAGE.as_ptr() as u64,
                Source::Local { key, number } => match guards.local(key, addr, len, false) {
                    Entry::Yes => addr,
                    Entry::Full => return true,
                    Entry::No(_) if bytes > 0 => return true,
                    Entry::No(_) => {
                        self.cut(shared, endpoint, number);
                        return false;
                    }
                },
                Source::Answer { key, trailer, number } => match guards.remote(key, addr, len, false) {
                    Entry::Yes => addr,
                    Entry::Full => return true,
                    Entry::No(_) => {
                        self.abort_answer(shared, endpoint, at, trailer, number);
                        continue;
                    }
                },
            };
            // Segments are not cut at the budget: a call for a small rest costs more than it is worth.
            let take =
                if matches!(segment.source, Source::Zeros) { len.min(ZERO_PAGE.len() as u32) } else { len };
            self.iov.0.push(libc::iovec { iov_base: base as *mut libc::c_void, iov_len: take as usize });
            bytes += take as usize;
            off += take;
            if off == segment.len {
                (at, off) = (at + 1, 0);
            }
        }
        true
    }

    /// The next bytes are in registered memory that is not mapped or not readable.
    fn unreadable(&mut self, shared: &Shared, endpoint: &Endpoint) -> Step {
        shared.counters.unmapped.add(1);
        let segment = self.segments[self.at];
        tracing::warn!(
            endpoint = ?endpoint.id,
            "tcp: cannot read {} registered bytes at {:#x}; deregister memory before unmapping it",
            segment.len,
            segment.addr
        );
        match segment.source {
            Source::Answer { trailer, number, .. } => {
                self.abort_answer(shared, endpoint, self.at, trailer, number)
            }
            Source::Local { number, .. } => self.cut(shared, endpoint, number),
            Source::Head | Source::Copied | Source::Zeros => endpoint.fail(shared, None),
        }
        Step::Sent(0)
    }

    /// The memory of an own work request was revoked or is not mapped. Half a WRITE can neither be taken back nor be made whole: this
    /// direction ends in the middle of the frame, and from that the peer knows to acknowledge everything before. With what it says, or
    /// soon without, the connection ends, and only this work request failed.
    fn cut(&mut self, shared: &Shared, endpoint: &Endpoint, number: u64) {
        shared.counters.aborted.add(1);
        self.segments.clear();
        (self.at, self.off, self.last) = (0, 0, true);
        if endpoint.sq.lock().cut(number) {
            endpoint.fail(shared, Some(WcStatus::LocalAccess));
        } else {
            endpoint.give_up_later(shared);
        }
    }

    /// The memory of an answer was revoked or is not mapped: zeros take the place of what is left of the frame, its trailer says so, and
    /// the batch ends with it.
    fn abort_answer(&mut self, shared: &Shared, endpoint: &Endpoint, at: usize, trailer: u32, number: u64) {
        shared.counters.zero_filled.add(1);
        let mut end = at;
        while !matches!(self.segments[end].source, Source::Head) {
            self.segments[end].source = Source::Zeros;
            end += 1;
        }
        let trailer_at = self.segments[end].addr as usize;
        debug_assert!(trailer_at >= trailer as usize);
        self.head[trailer_at..trailer_at + TRAILER].copy_from_slice(&frame::trailer(true));
        self.segments.truncate(end + 1);
        endpoint.inbound.lock().asks.clear();
        endpoint.refuse_instead(shared, number, Status::Access);
    }

    fn forward(&mut self, mut n: usize) {
        while n > 0 {
            let left = (self.segments[self.at].len - self.off) as usize;
            if n < left {
                self.off += n as u32;
                return;
            }
            n -= left;
            (self.at, self.off) = (self.at + 1, 0);
        }
    }
}

/// How the completion of a work request is asked for.
fn ack_flag(wr: &Wr) -> u8 {
    match (wr.signaled, wr.patient) {
        (false, _) => 0,
        (true, false) => ACK_WANTED,
        (true, true) => ACK_LATER,
    }
}

/// Whether the keys permit to read all of the pieces, now. Each call that sends them asks again.
fn permitted(regions: &Regions, pieces: impl Iterator<Item = Sge>) -> bool {
    let mut guards = Guards::new(regions);
    for piece in pieces {
        let mut entry = guards.local(piece.local_key, piece.addr, piece.len_bytes, false);
        if entry == Entry::Full {
            guards = Guards::new(regions);
            entry = guards.local(piece.local_key, piece.addr, piece.len_bytes, false);
        }
        if entry != Entry::Yes {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_frame_of_a_connection_finds_room() {
        let mut fresh = Transmitter::default();
        let places = |t: &Transmitter| (t.head.as_ptr(), t.segments.as_ptr());
        let before = places(&fresh);
        for _ in 0..FIRST_SEGMENTS {
            fresh.push_header(&Header::ack(1, 0));
        }
        assert_eq!(places(&fresh), before, "nothing was allocated anew");
        assert!(fresh.iov.0.capacity() >= FIRST_SEGMENTS);
    }
}
