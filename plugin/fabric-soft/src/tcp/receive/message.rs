//! Messages: the RECV that each needs, and those that are received in two steps.

use std::sync::atomic::Ordering;
use std::time::Instant;

use baton_fabric::{Completion, CompletionKind, RecvSlot, Rest, Untaken, WcStatus};

use super::super::MAX_MESSAGE_BYTES;
use super::super::endpoint::{Endpoint, State};
use super::super::frame::{FrameOp, HEAD, Header, MORE, Malformed, Status};
use super::super::shared::{RECV_PATIENCE, Shared};
use super::super::sys;
use super::{Message, Parsed, Phase, READ_AHEAD, Receiver, Target};

/// So many bytes of rests are acknowledged at once while more of them arrive.
const ACKNOWLEDGE_BYTES: u64 = 512 * 1024;

impl Receiver {
    pub(super) fn message_frame(&mut self, h: &Header) -> Result<Phase, Malformed> {
        if h.message_bytes > MAX_MESSAGE_BYTES {
            return Err(Malformed::PieceLength);
        }
        let filled = self.message.map_or(0, |m| m.filled);
        let end = u64::from(filled) + u64::from(h.len);
        let fits = if h.flags & MORE != 0 {
            h.len > 0 && end < u64::from(h.message_bytes)
        } else {
            end == u64::from(h.message_bytes)
        };
        let late = self.message.is_some() && h.flags & HEAD != 0;
        if !fits || late || self.message.is_some_and(|m| m.total != h.message_bytes) {
            return Err(Malformed::Continuation);
        }
        match self.message {
            None => Ok(Phase::Slot),
            Some(message) => {
                self.target_of(&message);
                Ok(Phase::Payload)
            }
        }
    }

    fn target_of(&mut self, message: &Message) {
        if self.left > 0 {
            let addr = message.slot.addr.wrapping_add(u64::from(message.filled));
            let len = self.left as u32;
            self.targets.push(Target { addr, key: message.slot.local_key, len, remote: false });
        }
    }

    /// `false`: it has waited long enough.
    pub(super) fn wait_for_recv(&mut self, shared: &Shared, endpoint: &Endpoint) -> bool {
        let now = Instant::now();
        let since = *endpoint.stalled_since.lock().get_or_insert(now);
        if now.duration_since(since) >= RECV_PATIENCE {
            *endpoint.stalled_since.lock() = None;
            let h = self.current();
            let number = h.seq + u64::from(h.ends.max(1)) - 1;
            self.refuse(shared, endpoint, number, Status::NoRecv);
            return false;
        }
        if now == since {
            shared.counters.recv_waits.add(1);
        }
        endpoint.rx_stalled.store(true, Ordering::SeqCst);
        // A RECV that was posted before the flag was set did not see it.
        if !endpoint.rq.lock().slots.is_empty() {
            endpoint.rx_stalled.store(false, Ordering::SeqCst);
        }
        shared.tick_soon();
        true
    }

    /// A RECV is there for the message or immediate.
    pub(super) fn received(&mut self, shared: &Shared, endpoint: &Endpoint, slot: RecvSlot) {
        *endpoint.stalled_since.lock() = None;
        let h = self.current();
        if h.op == FrameOp::Imm {
            shared.complete(
                endpoint,
                Completion {
                    endpoint: endpoint.id,
                    kind: CompletionKind::RecvImm(h.imm),
                    status: WcStatus::Success,
                    seq: u64::from(slot.id),
                    len_bytes: h.message_bytes,
                },
            );
            self.phase = Phase::Done;
            return;
        }
        let message = Message { slot, total: h.message_bytes, filled: 0 };
        self.message = Some(message);
        if h.message_bytes > slot.len_bytes {
            self.refuse(shared, endpoint, h.seq, Status::TooLong);
            return;
        }
        if h.flags & HEAD != 0 && endpoint.heads.load(Ordering::Relaxed) {
            self.rest = h.len - h.imm;
            self.left = h.imm as usize;
        }
        self.target_of(&message);
        self.phase = Phase::Payload;
    }

    // ---- in two steps

    /// The head is placed: whoever receives it says where the rest goes.
    pub(super) fn head_is_here(&mut self, shared: &Shared, endpoint: &Endpoint) {
        let message = self.message.take().expect("a head is of a message");
        self.left = self.rest as usize;
        (self.taken, self.dropping, self.asked) = (0, false, false);
        self.phase = Phase::Rest;
        endpoint.rx_held.store(true, Ordering::SeqCst);
        let completion = Completion {
            endpoint: endpoint.id,
            kind: CompletionKind::RecvHead { head_bytes: message.total - self.rest },
            status: WcStatus::Success,
            seq: u64::from(message.slot.id),
            len_bytes: message.total,
        };
        shared.complete(endpoint, completion);
    }

    /// There may be more of a rest. `true`: nothing more is to be done before it is taken.
    pub(super) fn tell_more(&mut self, shared: &Shared, endpoint: &Endpoint) -> bool {
        if self.dropping {
            let nowhere = Rest { to: None, len_bytes: self.rest };
            return self.take_rest(shared, endpoint, &nowhere).is_some();
        }
        endpoint.rx_held.store(true, Ordering::SeqCst);
        if std::mem::take(&mut self.asked) {
            let kind = CompletionKind::RecvMore;
            let status = WcStatus::Success;
            shared
                .complete(endpoint, Completion { endpoint: endpoint.id, kind, status, seq: 0, len_bytes: 0 });
        }
        true
    }

    /// Moves the rest of the message whose head was received. `None`: it is there, or dropped.
    pub fn take_rest(&mut self, shared: &Shared, endpoint: &Endpoint, rest: &Rest) -> Option<Untaken> {
        if endpoint.state() != State::Open || self.phase != Phase::Rest {
            return Some(Untaken::Gone);
        }
        assert_eq!(rest.len_bytes, self.rest, "the rest of the message whose turn it is");
        let to = rest.to.filter(|_| !self.dropping);
        let mut drained = false;
        while self.left > 0 {
            let outcome = if self.start < self.end {
                self.take_buffered(to)
            } else {
                self.take_arrived(shared, endpoint, to, &mut drained)
            };
            match outcome {
                Ok(Some(n)) => (self.taken, self.left) = (self.taken + n as u32, self.left - n),
                Ok(None) => {
                    self.asked = true;
                    endpoint.rx_held.store(false, Ordering::SeqCst);
                    self.acknowledge(endpoint);
                    return Some(Untaken::Later);
                }
                Err(Untaken::Unmapped) => {
                    shared.counters.unmapped.add(1);
                    self.dropping = true;
                    endpoint.rx_held.store(false, Ordering::SeqCst);
                    endpoint.rx_ready.store(true, Ordering::SeqCst);
                    return Some(Untaken::Unmapped);
                }
                Err(other) => return Some(other),
            }
        }
        endpoint.rx_held.store(false, Ordering::SeqCst);
        self.unacknowledged += u64::from(self.rest);
        self.phase = Phase::Done;
        self.taking = true;
        let parsed = self.parse(shared, endpoint);
        self.taking = false;
        let pressing = self.unacknowledged >= ACKNOWLEDGE_BYTES;
        if pressing || !matches!(parsed, Parsed::NeedTake) {
            self.acknowledge(endpoint);
        }
        if !drained || matches!(parsed, Parsed::NeedRecv) {
            endpoint.rx_ready.store(true, Ordering::SeqCst);
        }
        None
    }

    /// What is placed and not yet told goes out with the next frame, or in one of its own.
    fn acknowledge(&mut self, endpoint: &Endpoint) {
        self.unacknowledged = 0;
        if endpoint.ack_due.load(Ordering::SeqCst) {
            endpoint.tx_work.store(true, Ordering::SeqCst);
        }
    }

    /// Where the next byte of the rest goes.
    fn next_at(&self, to: u64, len: usize) -> libc::iovec {
        libc::iovec { iov_base: to.wrapping_add(u64::from(self.taken)) as *mut libc::c_void, iov_len: len }
    }

    /// Bytes that were read along with headers.
    fn take_buffered(&mut self, to: Option<u64>) -> Result<Option<usize>, Untaken> {
        let n = self.left.min(self.end - self.start);
        let from = &self.buffer[self.start..self.start + n];
        let n = match to {
            None => n,
            // SAFETY: the caller of `take` vouches for the target until it returns; the buffer is ours and does not overlap it.
            Some(to) => unsafe { sys::place(from, &[self.next_at(to, n)]) }.map_err(|_| Untaken::Unmapped)?,
        };
        self.start += n;
        Ok(Some(n))
    }

    /// Bytes out of the socket, and what follows them into the buffer. `None`: there are none at the moment.
    fn take_arrived(
        &mut self,
        shared: &Shared,
        endpoint: &Endpoint,
        to: Option<u64>,
        drained: &mut bool,
    ) -> Result<Option<usize>, Untaken> {
        let fd = endpoint.fd().ok_or(Untaken::Gone)?;
        (self.start, self.end) = (0, 0);
        let left = self.left;
        // Cleared before reading: what arrives afterwards is announced again.
        endpoint.rx_ready.store(false, Ordering::SeqCst);
        let result = match to {
            None => sys::discard(fd, left),
            Some(to) => {
                let room = &mut self.buffer[..READ_AHEAD];
                let behind = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
                // SAFETY: the caller of `take` vouches for the target until it returns; the buffer is ours.
                unsafe { sys::receive(fd, &[self.next_at(to, left), behind]) }
            }
        };
        let wanted = if to.is_some() { left + READ_AHEAD } else { left };
        match result {
            Ok(Some(0)) => {
                self.end_of_stream(shared, endpoint);
                Err(Untaken::Gone)
            }
            Err(error) if sys::is_fault(&error) => Err(Untaken::Unmapped),
            Err(error) => {
                self.hung_up(shared, endpoint, &error.to_string());
                Err(Untaken::Gone)
            }
            Ok(None) => Ok(None),
            Ok(Some(n)) => {
                shared.counters.receives.add(1);
                shared.counters.bytes_received.add(n as u64);
                self.end = n.saturating_sub(left);
                // One that stops short inside the rest may have met memory that is not mapped.
                *drained = n >= left && n < wanted && !endpoint.rx_hup.load(Ordering::SeqCst);
                Ok(Some(n.min(left)))
            }
        }
    }
}
