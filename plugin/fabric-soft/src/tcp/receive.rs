//! The receiving half of a connection: parses headers from a small buffer and lets the kernel put payload straight into
//! registered memory, under guards, for the duration of one system call.

mod message;

use std::sync::atomic::Ordering;

use baton_fabric::{Completion, CompletionKind, RecvSlot, WcStatus};

use super::MAX_MESSAGE_BYTES;
use super::endpoint::{Ask, Endpoint, State};
use super::frame::{
    self, ACK_LATER, ACK_WANTED, FrameOp, HEAD, HEADER, Header, MAX_READS, Malformed, PIECE, Piece, Status,
    TRAILER,
};
use super::guards::{Entry, Guards};
use super::send_queue::Landing;
use super::shared::Shared;
use super::sys;
use super::transmit::Iov;
use crate::store;

/// Headers and tables are read into this much.
const BUFFER: usize = 16 * 1024;
/// Pieces of a frame for which there is room from the start.
const FEW_PIECES: usize = 16;
/// Bytes behind a payload, or without one, that are read at once: headers and tables, and a little payload that is then copied.
const READ_AHEAD: usize = 4 * 1024;
/// Bytes thrown away in one call.
const DISCARD: usize = 1 << 20;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Head,
    Table,
    /// A message needs a slot for its bytes.
    Slot,
    Payload,
    /// The head of a message is placed, and whoever receives it says where the rest goes.
    Rest,
    Trailer,
    /// An immediate needs a RECV.
    Recv,
    Done,
}

/// Where payload goes.
#[derive(Clone, Copy)]
struct Target {
    addr: u64,
    key: u64,
    len: u32,
    remote: bool,
}

/// A message that is arriving.
#[derive(Clone, Copy)]
struct Message {
    slot: RecvSlot,
    total: u32,
    filled: u32,
}

/// What parsing came to.
enum Parsed {
    NeedBytes,
    NeedRecv,
    NeedTake,
    /// The endpoint's state changed.
    Ended,
}

enum Got {
    Bytes { n: usize, drained: bool },
    Nothing,
    Ended,
}

/// State of the receiving half.
#[derive(Default)]
pub(super) struct Receiver {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    phase: Phase,
    header: Option<Header>,
    pieces: Vec<Piece>,
    landings: Vec<Landing>,
    targets: Vec<Target>,
    at: usize,
    off: u32,
    /// Payload bytes of the frame that are still to come.
    left: usize,
    /// Number of the peer's next work request.
    next: u64,
    /// Bytes of answers so far.
    answers: u64,
    message: Option<Message>,
    iov: Iov,
    /// Some target of the frame is not mapped: its payload goes through the buffer, to find out which.
    careful: bool,
    /// Payload behind the head of a message.
    rest: u32,
    /// Bytes of the rest that are dealt with.
    taken: u32,
    /// What is left of the rest is not wanted.
    dropping: bool,
    /// Inside of [`Receiver::take_rest`].
    taking: bool,
    /// Whoever takes the rest waits for more of it.
    asked: bool,
    /// Bytes of rests taken and not acknowledged.
    unacknowledged: u64,
    /// An own READ of the frame has nowhere to land: bytes before it. The rest is thrown away.
    spoiled: Option<u32>,
}

impl Receiver {
    /// Once for all: the peer's first WRITE may come in the middle of posts that allocate nothing, and credit words are the first of many.
    fn make_room(&mut self) {
        self.buffer.resize(BUFFER, 0);
        self.pieces.reserve(FEW_PIECES);
        self.targets.reserve(FEW_PIECES);
        self.landings.reserve(FEW_PIECES);
    }

    /// Receives up to about `budget` bytes. Returns how many.
    pub fn pump(&mut self, shared: &Shared, endpoint: &Endpoint, budget: usize) -> usize {
        let (mut moved, mut drained) = (0, false);
        if self.buffer.is_empty() {
            self.make_room();
        }
        loop {
            match endpoint.state() {
                State::Open => {}
                State::Closing => return moved + Self::drain(shared, endpoint, budget - budget.min(moved)),
                State::New | State::Failed => return moved,
            }
            match self.parse(shared, endpoint) {
                Parsed::NeedBytes if drained => return moved,
                Parsed::NeedBytes => {}
                Parsed::NeedRecv => {
                    endpoint.rx_ready.store(true, Ordering::SeqCst);
                    return moved;
                }
                Parsed::NeedTake if self.tell_more(shared, endpoint) => return moved,
                Parsed::NeedTake => continue,
                Parsed::Ended => continue,
            }
            if moved >= budget {
                endpoint.rx_ready.store(true, Ordering::SeqCst);
                return moved;
            }
            match self.read(shared, endpoint) {
                Got::Bytes { n, drained: last } => (moved, drained) = (moved + n, last),
                Got::Nothing => return moved,
                Got::Ended => {}
            }
        }
    }

    /// The slot that a message was arriving in.
    pub fn take_slot(&mut self) -> Option<RecvSlot> {
        self.message.take().map(|m| m.slot)
    }

    /// After a refusal nothing more is taken in; the bytes are read so that the peer gets to read the refusal.
    fn drain(shared: &Shared, endpoint: &Endpoint, budget: usize) -> usize {
        let Some(fd) = endpoint.fd() else { return 0 };
        let mut moved = 0;
        while moved < budget {
            endpoint.rx_ready.store(false, Ordering::SeqCst);
            match sys::discard(fd, DISCARD) {
                Ok(Some(0)) => {
                    endpoint.nothing_comes(shared);
                    return moved;
                }
                Err(_) => {
                    endpoint.fail(shared, None);
                    return moved;
                }
                Ok(Some(n)) => moved += n,
                Ok(None) => return moved,
            }
        }
        endpoint.rx_ready.store(true, Ordering::SeqCst);
        moved
    }

    // ---- bytes

    fn read(&mut self, shared: &Shared, endpoint: &Endpoint) -> Got {
        let Some(fd) = endpoint.fd() else { return Got::Ended };
        let mut guards = Guards::new(&shared.regions);
        self.iov.0.clear();
        let mut payload = 0;
        if self.phase == Phase::Payload && !self.careful {
            payload = match self.gather(&mut guards, self.left) {
                Ok(n) => n,
                Err(status) => {
                    self.no_access(shared, endpoint, status);
                    return Got::Ended;
                }
            };
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let mut wanted = payload;
        if self.phase != Phase::Payload || self.careful || payload == self.left {
            let room = &mut self.buffer[self.end..];
            let n = room.len().min(READ_AHEAD);
            self.iov.0.push(libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: n });
            wanted += n;
        }
        // Cleared before reading: what arrives afterwards is announced again.
        endpoint.rx_ready.store(false, Ordering::SeqCst);
        // SAFETY: the buffers are the free end of `buffer` and registered memory whose guards live until after the call;
        // that peers write there at any time is what registering it for writing means.
        let result = unsafe { sys::receive(fd, &self.iov.0) };
        drop(guards);
        match result {
            Ok(Some(0)) => self.end_of_stream(shared, endpoint),
            // Nothing was taken from the socket.
            Err(error) if payload > 0 && sys::is_fault(&error) => {
                self.careful = true;
                Got::Bytes { n: 0, drained: false }
            }
            Err(error) => self.hung_up(shared, endpoint, &error.to_string()),
            Ok(None) => Got::Nothing,
            Ok(Some(n)) => {
                shared.counters.receives.add(1);
                shared.counters.bytes_received.add(n as u64);
                let placed = n.min(payload);
                self.forward(placed);
                self.end += n - placed;
                // A payload that stops short may have met the end of what was there, or a target that is not mapped.
                let drained = n >= payload && n < wanted && !endpoint.rx_hup.load(Ordering::SeqCst);
                Got::Bytes { n, drained }
            }
        }
    }

    /// A peer that cannot read its own memory in the middle of a request stops there, and wants to hear how far it came.
    fn end_of_stream(&mut self, shared: &Shared, endpoint: &Endpoint) -> Got {
        let placed = match (self.phase, self.header) {
            (Phase::Payload, Some(h)) if matches!(h.op, FrameOp::Write | FrameOp::Imm) => {
                // Each piece in front of the one that is not whole ended a work request.
                h.seq + self.at as u64
            }
            (Phase::Payload | Phase::Rest, Some(h)) if h.op == FrameOp::Send => self.next,
            _ => return self.hung_up(shared, endpoint, "end of stream"),
        };
        tracing::debug!(endpoint = ?endpoint.id, "tcp: peer stopped within its work request {placed}");
        endpoint.placed.store(placed, Ordering::SeqCst);
        endpoint.peer_cannot_go_on(shared);
        Got::Ended
    }

    fn hung_up(&mut self, shared: &Shared, endpoint: &Endpoint, why: &str) -> Got {
        tracing::debug!(endpoint = ?endpoint.id, "tcp: peer gone: {why}");
        endpoint.fail(shared, Some(WcStatus::PeerGone));
        Got::Ended
    }

    /// Fills `iov` with the targets of what is left of the payload, as many as may be touched and are needed for `wanted`
    /// bytes. Returns how many they hold.
    fn gather<'a>(&mut self, guards: &mut Guards<'a>, wanted: usize) -> Result<usize, WcStatus> {
        let (mut off, mut bytes) = (self.off, 0);
        for target in &self.targets[self.at..] {
            if bytes >= wanted {
                break;
            }
            let (addr, len) = (target.addr.wrapping_add(u64::from(off)), target.len - off);
            match Self::enter(guards, target, addr, len) {
                Entry::Yes => {}
                Entry::Full => break,
                Entry::No(_) if bytes > 0 => break,
                Entry::No(status) => return Err(status),
            }
            self.iov.0.push(libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: len as usize });
            bytes += len as usize;
            off = 0;
        }
        Ok(bytes)
    }

    fn enter(guards: &mut Guards<'_>, target: &Target, addr: u64, len: u32) -> Entry {
        if target.remote {
            guards.remote(target.key, addr, len, true)
        } else {
            guards.local(target.key, addr, len, true)
        }
    }

    /// `n` bytes of payload are placed.
    fn forward(&mut self, n: usize) {
        self.left -= n;
        let mut n = n as u32;
        while n > 0 {
            let rest = self.targets[self.at].len - self.off;
            if n < rest {
                self.off += n;
                return;
            }
            n -= rest;
            (self.at, self.off) = (self.at + 1, 0);
        }
    }

    /// Payload that was read along with headers is copied to where it belongs.
    fn place_buffered(&mut self, shared: &Shared) -> Result<(), WcStatus> {
        while self.left > 0 && self.start < self.end {
            let mut guards = Guards::new(&shared.regions);
            self.iov.0.clear();
            let n = self.left.min(self.end - self.start);
            if self.spoiled.is_some() {
                (self.start, self.left) = (self.start + n, self.left - n);
                return Ok(());
            }
            self.gather(&mut guards, n)?;
            let from = &self.buffer[self.start..self.start + n];
            let placed = if guards.are_mapped() {
                // SAFETY: the guards vouch for the targets until they are dropped, and for their being mapped.
                Ok(unsafe { store::scatter(from, &self.iov.0) })
            } else {
                // SAFETY: the guards vouch for the targets until they are dropped; the buffer is ours and does not overlap them.
                unsafe { sys::place(from, &self.iov.0) }
            };
            let n = placed.map_err(|error| self.unmapped(shared, &error))?;
            self.start += n;
            self.forward(n);
        }
        Ok(())
    }

    /// The next byte's target cannot be written.
    fn unmapped(&self, shared: &Shared, error: &std::io::Error) -> WcStatus {
        shared.counters.unmapped.add(1);
        let target = self.targets[self.at];
        tracing::warn!(
            "tcp: cannot write {} registered bytes at {:#x}: {error}; register memory that is read-only without \
             remote_write, and deregister it before unmapping it",
            target.len,
            target.addr
        );
        if target.remote { WcStatus::RemoteAccess } else { WcStatus::LocalAccess }
    }

    /// Memory may not be touched: the peer's, and its work request is refused; or that of a work request of this side.
    fn no_access(&mut self, shared: &Shared, endpoint: &Endpoint, status: WcStatus) {
        let h = self.header.expect("payload follows a header");
        match h.op {
            FrameOp::ReadResp => {
                shared.counters.aborted.add(1);
                // READs before it are good or not once the trailer is here.
                if self.at > 0 && status == WcStatus::LocalAccess {
                    self.spoiled = Some(self.targets[..self.at].iter().map(|t| t.len).sum());
                    self.careful = true;
                } else {
                    endpoint.fail(shared, Some(status));
                }
            }
            FrameOp::Send => self.refuse(shared, endpoint, h.seq, Status::Access),
            _ => self.refuse(shared, endpoint, h.seq + self.at as u64, Status::Access),
        }
    }

    fn refuse(&mut self, shared: &Shared, endpoint: &Endpoint, number: u64, status: Status) {
        // Everything before it is placed.
        endpoint.placed.store(number, Ordering::SeqCst);
        endpoint.refuse(shared, number, status);
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = self.buffer[self.start..self.end].first_chunk::<N>().copied()?;
        self.start += N;
        Some(bytes)
    }

    // ---- frames

    /// Handles everything that is in the buffer.
    fn parse(&mut self, shared: &Shared, endpoint: &Endpoint) -> Parsed {
        loop {
            let step = match self.phase {
                Phase::Head => match self.take::<HEADER>() {
                    None => return Parsed::NeedBytes,
                    Some(bytes) => self.head(shared, endpoint, &bytes),
                },
                Phase::Table => {
                    let len = usize::from(self.current().count) * PIECE;
                    if self.end - self.start < len {
                        return Parsed::NeedBytes;
                    }
                    self.start += len;
                    self.table(shared, endpoint, self.start - len)
                }
                Phase::Payload => {
                    if let Err(status) = self.place_buffered(shared) {
                        self.no_access(shared, endpoint, status);
                        return Parsed::Ended;
                    }
                    if self.left > 0 {
                        return Parsed::NeedBytes;
                    }
                    if self.rest > 0 {
                        self.head_is_here(shared, endpoint);
                        return Parsed::NeedTake;
                    }
                    self.phase = match self.current().op {
                        FrameOp::ReadResp => Phase::Trailer,
                        FrameOp::Imm => Phase::Recv,
                        _ => Phase::Done,
                    };
                    Ok(())
                }
                Phase::Rest => return Parsed::NeedTake,
                Phase::Trailer => match self.take::<TRAILER>() {
                    None => return Parsed::NeedBytes,
                    Some(bytes) => self.trailer(shared, endpoint, &bytes),
                },
                Phase::Slot | Phase::Recv => {
                    let slot = endpoint.rq.lock().slots.pop_front();
                    match slot {
                        Some(slot) => self.received(shared, endpoint, slot),
                        None if self.wait_for_recv(shared, endpoint) => return Parsed::NeedRecv,
                        None => return Parsed::Ended,
                    }
                    Ok(())
                }
                Phase::Done => {
                    self.done(shared, endpoint);
                    Ok(())
                }
            };
            if let Err(reason) = step {
                endpoint.malformed(shared, reason);
            }
            if endpoint.state() != State::Open {
                return Parsed::Ended;
            }
        }
    }

    fn current(&self) -> Header {
        self.header.expect("a phase after the header")
    }

    fn head(&mut self, shared: &Shared, endpoint: &Endpoint, bytes: &[u8; HEADER]) -> Result<(), Malformed> {
        let h = frame::decode(bytes, endpoint.epoch())?;
        self.header = Some(h);
        self.acknowledged(shared, endpoint, h.ack)?;
        (self.at, self.off, self.left) = (0, 0, h.len as usize);
        (self.careful, self.spoiled, self.rest) = (false, None, 0);
        self.targets.clear();
        let request = matches!(h.op, FrameOp::Write | FrameOp::Imm | FrameOp::ReadReq | FrameOp::Send);
        if request && h.seq != self.next {
            return Err(Malformed::Sequence);
        }
        if request && h.op != FrameOp::Send && self.message.is_some() {
            return Err(Malformed::Continuation);
        }
        self.phase = match h.op {
            FrameOp::Write | FrameOp::Imm | FrameOp::ReadReq if h.count > 0 => Phase::Table,
            FrameOp::Imm => Phase::Recv,
            FrameOp::Write | FrameOp::ReadReq => Phase::Done,
            FrameOp::Send => self.message_frame(&h)?,
            FrameOp::ReadResp => {
                if h.seq != self.answers {
                    return Err(Malformed::Sequence);
                }
                endpoint.sq.lock().land(h.len, &mut self.landings)?;
                let local = |l: &Landing| Target { addr: l.addr, key: l.key, len: l.len, remote: false };
                self.targets.extend(self.landings.iter().map(local));
                Phase::Payload
            }
            FrameOp::Ack => {
                self.ack_if_wanted(shared, endpoint, &h);
                Phase::Head
            }
            FrameOp::Nak => {
                shared.counters.refusals_received.add(1);
                if !endpoint.sq.lock().is_head(h.seq) {
                    return Err(Malformed::Refusal);
                }
                endpoint.fail(shared, Some(h.status.completion()));
                Phase::Head
            }
        };
        Ok(())
    }

    fn acknowledged(&mut self, shared: &Shared, endpoint: &Endpoint, ack: u64) -> Result<(), Malformed> {
        let mut sq = endpoint.sq.lock();
        sq.acknowledge(ack, &mut |c| shared.complete(endpoint, c))?;
        let due = sq.fault_is_due();
        drop(sq);
        if due {
            endpoint.fail(shared, Some(WcStatus::LocalAccess));
        }
        Ok(())
    }

    fn table(&mut self, shared: &Shared, endpoint: &Endpoint, at: usize) -> Result<(), Malformed> {
        let h = self.current();
        let bytes = &self.buffer[at..at + usize::from(h.count) * PIECE];
        frame::decode_pieces(bytes, &h, MAX_MESSAGE_BYTES, &mut self.pieces)?;
        if h.op != FrameOp::ReadReq {
            let remote = |p: &Piece| Target { addr: p.addr, key: p.key, len: p.len, remote: true };
            self.targets.extend(self.pieces.iter().map(remote));
            self.phase = Phase::Payload;
            return Ok(());
        }
        self.asked(shared, endpoint, &h)
    }

    /// Takes in what the peer wants to read. What it may not read is refused here and not when its turn to be answered
    /// comes, because nothing that was posted behind it may be executed.
    fn asked(&mut self, shared: &Shared, endpoint: &Endpoint, h: &Header) -> Result<(), Malformed> {
        let mut inbound = endpoint.inbound.lock();
        if inbound.asks.len() + self.pieces.len() > MAX_READS {
            return Err(Malformed::TooManyReads);
        }
        self.phase = Phase::Done;
        endpoint.tx_work.store(true, Ordering::SeqCst);
        let mut guards = Guards::new(&shared.regions);
        for (number, p) in (h.seq..).zip(&self.pieces) {
            let mut entry = guards.remote(p.key, p.addr, p.len, false);
            if entry == Entry::Full {
                guards = Guards::new(&shared.regions);
                entry = guards.remote(p.key, p.addr, p.len, false);
            }
            if entry != Entry::Yes {
                drop(inbound);
                self.refuse(shared, endpoint, number, Status::Access);
                return Ok(());
            }
            inbound.asks.push_back(Ask { number, key: p.key, addr: p.addr, len: p.len });
        }
        Ok(())
    }

    fn trailer(
        &mut self,
        shared: &Shared,
        endpoint: &Endpoint,
        bytes: &[u8; TRAILER],
    ) -> Result<(), Malformed> {
        let h = self.current();
        self.phase = Phase::Head;
        if !frame::decode_trailer(bytes)? {
            // The refusal follows; what it names is not counted as done.
            return Ok(());
        }
        self.answers += u64::from(h.len);
        let mut sq = endpoint.sq.lock();
        sq.landed(self.spoiled.unwrap_or(h.len), &mut |c| shared.complete(endpoint, c))?;
        // Room for more READs, and a fence may be gone.
        if !sq.is_drained() {
            endpoint.tx_work.store(true, Ordering::SeqCst);
        }
        let due = sq.fault_is_due() || self.spoiled.is_some();
        drop(sq);
        if due {
            endpoint.fail(shared, Some(WcStatus::LocalAccess));
        }
        Ok(())
    }

    /// The frame is placed.
    fn done(&mut self, shared: &Shared, endpoint: &Endpoint) {
        let h = self.current();
        // One that was received in two steps was told of before.
        if let (FrameOp::Send, Some(message)) = (h.op, self.message.as_mut()) {
            message.filled += h.len;
            if h.ends == 1 {
                let completion = Completion {
                    endpoint: endpoint.id,
                    kind: CompletionKind::RecvSend,
                    status: WcStatus::Success,
                    seq: u64::from(message.slot.id),
                    len_bytes: message.total,
                };
                self.message = None;
                shared.complete(endpoint, completion);
            }
        }
        self.next += u64::from(h.ends);
        endpoint.placed.store(self.next, Ordering::SeqCst);
        self.ack_if_wanted(shared, endpoint, &h);
        self.phase = Phase::Head;
    }

    fn ack_if_wanted(&self, shared: &Shared, endpoint: &Endpoint, h: &Header) {
        if h.flags & ACK_WANTED != 0 {
            endpoint.ack_due.store(true, Ordering::SeqCst);
            // Whoever takes messages one by one tells of several at once.
            if h.flags & HEAD == 0 || !self.taking {
                endpoint.tx_work.store(true, Ordering::SeqCst);
            }
        } else if h.flags & ACK_LATER != 0 {
            endpoint.ack_due.store(true, Ordering::SeqCst);
            shared.owe(endpoint);
        }
    }
}
