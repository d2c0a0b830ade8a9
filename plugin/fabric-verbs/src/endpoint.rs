//! A queue pair in use.

use crate::queue::Queue;
use crate::rail::OpenRail;
use baton_fabric::{Batch, EndpointId, ExtraOp, FabricError, PostError, RecvSlot, Template};
use baton_verbs::{Opcode, PostFailed, Qp, RecvChain, SendChain, SendFlags};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Work requests of one chain; longer batches take several doorbells.
const CHAIN: usize = 320;
/// RECVs of one chain.
const RECV_CHAIN: usize = 64;

/// What a work request's number says: whose it is and which.
///
/// ```text
/// bit 63: RECV   62: SEND operation   61: end of a fenced queue   32..=47: place in the completion queue's list   0..=31: sequence or RECV id
/// ```
#[derive(Clone, Copy)]
pub(crate) struct WrId(pub u64);

impl WrId {
    const RECV: u64 = 1 << 63;
    const SEND_OP: u64 = 1 << 62;
    const END: u64 = 1 << 61;

    pub fn is_recv(self) -> bool {
        self.0 & Self::RECV != 0
    }
    pub fn is_send_op(self) -> bool {
        self.0 & Self::SEND_OP != 0
    }
    pub fn is_end(self) -> bool {
        self.0 & Self::END != 0
    }
    pub fn member(self) -> usize {
        usize::from((self.0 >> 32) as u16)
    }
    pub fn low(self) -> u32 {
        self.0 as u32
    }
}

/// A queue pair of the fabric.
pub(crate) struct Endpoint {
    pub id: EndpointId,
    pub qp: Qp,
    pub queue: Arc<Queue>,
    pub rail: Arc<OpenRail>,
    pub rail_index: u8,
    /// Place in the queue's list.
    pub member: u16,
    /// First packet number that this side sends.
    pub psn: u32,
    /// READs of the peer served at once, READs of its own in flight.
    pub read_depth: u8,
    /// Pieces of one SEND at most.
    pub max_sge: u32,
    /// The GID that it was connected with.
    pub gid: Mutex<Option<crate::choose::Gid>>,
    send: Mutex<Send>,
    recv: Mutex<Receive>,
    /// Sequence behind the last work request handed to the device.
    posted: AtomicU64,
    /// RECVs posted that have not completed.
    recvs_outstanding: AtomicU32,
    fenced: AtomicBool,
    /// The last work request of a fenced queue has come out.
    ended: AtomicBool,
    /// The device is lost: nothing comes out any more, and nothing touches memory.
    pub lost: AtomicBool,
    /// A receive was dropped because nobody knows whether what it tells of is visible; none behind it counts any more.
    pub unflushed: AtomicBool,
}

struct Send {
    chain: SendChain,
    posted: Posted,
}

struct Receive {
    chain: RecvChain,
    posted: Posted,
}

/// What was handed to the device; marks that end a fenced queue are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Posted {
    /// Work requests of send queues.
    pub sends: u64,
    /// RECVs.
    pub receives: u64,
    /// Calls that handed over either.
    pub doorbells: u64,
}

impl std::ops::AddAssign for Posted {
    fn add_assign(&mut self, other: Posted) {
        self.sends += other.sends;
        self.receives += other.receives;
        self.doorbells += other.doorbells;
    }
}

impl Endpoint {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        id: EndpointId,
        qp: Qp,
        queue: Arc<Queue>,
        (rail, rail_index): (Arc<OpenRail>, u8),
        member: u16,
        psn: u32,
        read_depth: u8,
        max_sge: u32,
    ) -> Endpoint {
        Endpoint {
            id,
            qp,
            queue,
            rail,
            rail_index,
            member,
            psn,
            read_depth,
            max_sge,
            gid: Mutex::new(None),
            send: Mutex::new(Send { chain: SendChain::with_capacity(CHAIN), posted: Posted::default() }),
            recv: Mutex::new(Receive {
                chain: RecvChain::with_capacity(RECV_CHAIN),
                posted: Posted::default(),
            }),
            posted: AtomicU64::new(0),
            recvs_outstanding: AtomicU32::new(0),
            fenced: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            unflushed: AtomicBool::new(false),
        }
    }

    fn wr_id(&self, low: u32) -> u64 {
        u64::from(self.member) << 32 | u64::from(low)
    }

    /// The whole sequence number of a work request: the one at or before the last posted that ends in these bits.
    pub fn sequence(&self, low: u32) -> u64 {
        let posted = self.posted.load(Ordering::Acquire);
        posted.wrapping_sub(u64::from((posted as u32).wrapping_sub(low)))
    }

    /// Sequence of the last work request posted.
    pub fn last_sequence(&self) -> u64 {
        self.posted.load(Ordering::Acquire).saturating_sub(1)
    }

    pub fn is_fenced(&self) -> bool {
        self.fenced.load(Ordering::Acquire)
    }

    pub fn on_end(&self) {
        self.ended.store(true, Ordering::Release);
    }

    pub fn on_recv_completed(&self) {
        self.recvs_outstanding.fetch_sub(1, Ordering::AcqRel);
    }

    /// Nothing of it is with the device any more.
    pub fn is_drained(&self) -> bool {
        let drained =
            self.ended.load(Ordering::Acquire) && self.recvs_outstanding.load(Ordering::Acquire) == 0;
        self.is_fenced() && (drained || self.lost.load(Ordering::Acquire))
    }

    /// What it has handed to the device so far.
    pub fn posted_so_far(&self) -> Posted {
        let mut all = self.send.lock().posted;
        all += self.recv.lock().posted;
        all
    }

    /// Posts a batch in order.
    pub fn post(&self, batch: &Batch<'_>) -> Result<(), PostError> {
        let mut send = self.send.lock();
        if self.is_fenced() {
            let error = FabricError::Invalid(format!("{:?} on {}: it is fenced", self.id, self.rail));
            return Err(PostError { taken: 0, error });
        }
        if let Some(extra) = &batch.extra {
            let checked = extra.check_gather(self.max_sge, self.rail.max_message_bytes);
            checked.map_err(|error| PostError { taken: 0, error })?;
        }
        let Send { chain, posted } = &mut *send;
        let mut left = batch.work;
        let mut seq = batch.first_seq;
        // Before the doorbell: a completion may come at once and is unwrapped by it.
        self.posted.store(batch.first_seq + batch.len() as u64, Ordering::Release);
        loop {
            chain.clear();
            let fits = left.len().min(chain.capacity() - 1);
            let (now, later) = left.split_at(fits);
            for template in now {
                self.push(chain, seq, template);
                seq += 1;
            }
            left = later;
            let last = left.is_empty();
            let before = (seq - batch.first_seq) as usize - now.len();
            if last {
                if let Some(imm) = batch.imm {
                    chain.set_last_imm(imm);
                }
                if let Some(extra) = &batch.extra {
                    let pushed = self.push_extra(chain, seq, extra);
                    pushed.map_err(|error| PostError { taken: before, error })?;
                }
                if batch.signaled {
                    chain.signal_last();
                }
            }
            // SAFETY: the caller keeps the memory of templates and staged extras until completion or the endpoint's destruction; inline bytes are copied in the call.
            let answer = unsafe { self.qp.post_send(chain) };
            posted.sends += answer.as_ref().map_or_else(|e| e.taken, |()| chain.len()) as u64;
            posted.doorbells += 1;
            answer.map_err(|e| self.post_failed(before, &e))?;
            if last {
                break;
            }
        }
        self.queue.heat();
        Ok(())
    }

    fn post_failed(&self, before: usize, e: &PostFailed) -> PostError {
        let text = format!("queue pair {} on {}: {e}", self.qp.number(), self.rail);
        PostError { taken: before + e.taken, error: FabricError::System(text) }
    }

    fn push(&self, chain: &mut SendChain, seq: u64, template: &Template) {
        let op = match template.op {
            baton_fabric::Op::Read => Opcode::Read,
            baton_fabric::Op::Write => Opcode::Write,
        };
        let local = (template.local_addr, template.local_key as u32, template.len_bytes);
        let target = (template.remote_addr, template.remote_key as u32);
        chain.push(self.wr_id(seq as u32), op, SendFlags::default(), local, target);
    }

    fn push_extra(
        &self,
        chain: &mut SendChain,
        seq: u64,
        extra: &baton_fabric::Extra<'_>,
    ) -> Result<(), FabricError> {
        let (op, mark) = match extra.op {
            ExtraOp::Write => (Opcode::Write, 0),
            ExtraOp::WriteImm(imm) => (Opcode::WriteWithImm(imm), 0),
            ExtraOp::Send | ExtraOp::SendHead => (Opcode::Send, WrId::SEND_OP),
        };
        let wr_id = self.wr_id(seq as u32) | mark;
        let flags = SendFlags { signaled: false, fenced: extra.fenced };
        let target = (extra.remote_addr, extra.remote_key as u32);
        if !extra.gather.is_empty() {
            let pieces = extra.pieces().map(|sge| (sge.addr, sge.local_key as u32, sge.len_bytes));
            chain.push_gathered(wr_id, flags, pieces);
            return Ok(());
        }
        if extra.bytes.len() <= self.qp.cap().max_inline_bytes as usize {
            // SAFETY: posted before this call returns, and within the inline limit.
            unsafe { chain.push_inline(wr_id, op, flags, extra.bytes, target) };
            return Ok(());
        }
        let Some((addr, key)) = extra.staged else {
            let text = format!(
                "{} bytes that are not staged: the inline limit of {} is {} bytes",
                extra.bytes.len(),
                self.rail,
                self.qp.cap().max_inline_bytes
            );
            return Err(FabricError::Invalid(text));
        };
        chain.push(wr_id, op, flags, (addr, key as u32, extra.bytes.len() as u32), target);
        Ok(())
    }

    /// Posts RECVs in order.
    pub fn post_recv(&self, slots: &[RecvSlot]) -> Result<(), FabricError> {
        let mut recv = self.recv.lock();
        if self.is_fenced() {
            return Err(FabricError::Invalid(format!("{:?} on {}: it is fenced", self.id, self.rail)));
        }
        let Receive { chain, posted } = &mut *recv;
        for part in slots.chunks(RECV_CHAIN) {
            chain.clear();
            for slot in part {
                let wr_id = self.wr_id(slot.id) | WrId::RECV;
                chain.push(wr_id, (slot.addr, slot.local_key as u32, slot.len_bytes));
            }
            // Before the doorbell, as one may be consumed at once.
            self.recvs_outstanding.fetch_add(part.len() as u32, Ordering::AcqRel);
            // SAFETY: the caller keeps the slots' memory until completion or the endpoint's destruction.
            let answer = unsafe { self.qp.post_recv(chain) };
            posted.receives += answer.as_ref().map_or_else(|e| e.taken, |()| part.len()) as u64;
            posted.doorbells += 1;
            if let Err(e) = answer {
                self.recvs_outstanding.fetch_sub((part.len() - e.taken) as u32, Ordering::AcqRel);
                let text = format!("RECVs of queue pair {} on {}: {e}", self.qp.number(), self.rail);
                return Err(FabricError::System(text));
            }
        }
        Ok(())
    }

    /// Moves the queue pair to ERR and marks the end of its send queue: what is in front of the mark has come out when the mark does.
    pub fn fence(&self) {
        let mut send = self.send.lock();
        let recv = self.recv.lock();
        if self.fenced.swap(true, Ordering::AcqRel) {
            return;
        }
        drop(recv);
        if let Err(e) = self.qp.to_error() {
            tracing::warn!(
                "queue pair {} on {}: {e}; it becomes quiet when it is destroyed",
                self.qp.number(),
                self.rail
            );
            return;
        }
        if self.posted.load(Ordering::Acquire) == 0 {
            return self.on_end();
        }
        let flags = SendFlags { signaled: true, fenced: false };
        let chain = &mut send.chain;
        chain.clear();
        chain.push(self.wr_id(0) | WrId::END, Opcode::Write, flags, (0, 0, 0), (0, 0));
        // SAFETY: it moves no bytes.
        if let Err(e) = unsafe { self.qp.post_send(chain) } {
            tracing::debug!("queue pair {} on {} takes no mark in ERR: {e}", self.qp.number(), self.rail);
        }
        self.queue.heat();
    }
}
