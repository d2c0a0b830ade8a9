//! What an engine over verbs is measured by: the same blocks over one bare queue pair, without any protocol.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baton_bench::{Counts, Rounds};
use baton_verbs::{
    Access, Channel, Connection, Cq, Library, Mr, Opcode, PathMtu, Pd, Qp, QpCap, QpConfig, RecvChain,
    SendChain, SendFlags, Status, Wc, WcBuffer,
};
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::bare::spin;
use crate::engine::Port;
use crate::loops::{Laps, us};
use crate::memory::{Layout, Pool, WORD};
use crate::options::Notify;
use crate::remote::Remote;
use crate::target::Order;

/// RECVs that the target keeps posted, each with room for one word.
const RECVS: usize = 64;
/// Completions taken at once.
const BATCH: usize = 16;
/// Acknowledgement timeout 4.096 µs · 2ⁿ: a second, so that a busy machine is not taken for a lost packet.
const TIMEOUT: u8 = 18;
const FIRST_PACKET: u32 = 0;
/// The immediate and the message: only that they come is of interest.
const TOLD: u32 = 1;
const MESSAGE: [u8; WORD] = [1; WORD];

/// Where an end is reached.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Address {
    number: u32,
    gid: [u8; 16],
    mtu_bytes: u32,
    /// Its memory.
    rkey: u32,
    base: u64,
}

/// One side: a queue pair, and the memory of a case.
pub struct End {
    qp: Qp,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    mr: Mr,
    slots_mr: Mr,
    /// Where messages land.
    slots: Box<[AtomicU64]>,
    pool: Arc<Pool>,
    port: Port,
    gid: [u8; 16],
    posted: Posted,
}

/// What was handed to the device, and what came out.
#[derive(Default)]
struct Posted {
    sends: AtomicU64,
    receives: AtomicU64,
    doorbells: AtomicU64,
    completions: AtomicU64,
}

impl End {
    /// On the port that an engine uses.
    pub fn new(port: Port, pool: &Arc<Pool>) -> Outcome<End> {
        let said = |error: baton_verbs::VerbsError| format!("a queue pair on {}: {error}", port.device);
        let library = Library::open().map_err(|error| error.to_string())?;
        let context = library.open_device(&port.device).map_err(said)?;
        let gid = context.query_gid(port.number, port.gid_index).map_err(said)?;
        let gid = gid.ok_or_else(|| format!("{} has no GID {}", port.device, port.gid_index))?.gid;
        let pd = Pd::new(&context).map_err(said)?;
        let access =
            Access { local_write: true, remote_read: false, remote_write: true, relaxed_ordering: false };
        let bytes = pool.layout().bytes() as u64;
        let mr = Mr::register(&pd, pool.addr(), bytes, access).map_err(said)?;
        let slots: Box<[AtomicU64]> = (0..RECVS).map(|_| AtomicU64::new(0)).collect();
        let local = Access { remote_write: false, ..access };
        let slots_mr =
            Mr::register(&pd, slots.as_ptr() as u64, (RECVS * WORD) as u64, local).map_err(said)?;
        let channel = Channel::new(&context).map_err(said)?;
        let send_cq = Cq::new(&channel, RECVS as u32, 0).map_err(said)?;
        let recv_cq = Cq::new(&channel, 2 * RECVS as u32, 1).map_err(said)?;
        let cap = QpCap {
            max_send_wr: pool.layout().blocks as u32 + 2,
            max_recv_wr: RECVS as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_bytes: WORD as u32,
        };
        let qp = Qp::new(&pd, &QpConfig { send_cq: &send_cq, recv_cq: &recv_cq, cap }).map_err(said)?;
        qp.to_init(port.number, 0, false, true).map_err(said)?;
        let (pool, posted) = (Arc::clone(pool), Posted::default());
        let end = End { qp, send_cq, recv_cq, mr, slots_mr, slots, pool, port, gid, posted };
        end.receive(0..RECVS)?;
        Ok(end)
    }

    pub fn address(&self) -> Address {
        Address {
            number: self.qp.number(),
            gid: self.gid,
            mtu_bytes: self.port.mtu_bytes,
            rkey: self.mr.rkey(),
            base: self.pool.addr(),
        }
    }

    pub fn connect(&self, peer: &Address) -> Outcome<()> {
        let mtu_bytes = peer.mtu_bytes.min(self.port.mtu_bytes);
        let path_mtu = PathMtu::from_bytes(mtu_bytes).ok_or_else(|| format!("an MTU of {mtu_bytes}"))?;
        let index = u8::try_from(self.port.gid_index).map_err(|error| error.to_string())?;
        let connection = Connection {
            port: self.port.number,
            sgid_index: index,
            dgid: peer.gid,
            dlid: 0,
            global: true,
            dest_qp_num: peer.number,
            path_mtu,
            rq_psn: FIRST_PACKET,
            sq_psn: FIRST_PACKET,
            responder_reads: 1,
            initiator_reads: 1,
            service_level: 0,
            traffic_class: 0,
            hop_limit: 64,
            min_rnr_timer: 12,
            timeout: TIMEOUT,
            retry_cnt: 7,
            rnr_retry: 7,
        };
        self.qp.connect(&connection).map_err(|error| format!("queue pair on {}: {error}", self.port.device))
    }

    /// What it has done so far.
    pub fn counts(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            sends: read(&self.posted.sends),
            receives: read(&self.posted.receives),
            doorbells: read(&self.posted.doorbells),
            completions: read(&self.posted.completions),
            // Those of its port are counted with the engine's.
            packets: 0,
        }
    }

    fn receive(&self, slots: impl ExactSizeIterator<Item = usize>) -> Outcome<()> {
        let count = slots.len();
        let mut chain = RecvChain::with_capacity(count);
        for slot in slots {
            let addr = (&raw const self.slots[slot]) as u64;
            chain.push(slot as u64, (addr, self.slots_mr.lkey(), WORD as u32));
        }
        // SAFETY: the slots live longer than the queue pair, and are accessed atomically only.
        unsafe { self.qp.post_recv(&mut chain) }.map_err(|error| format!("RECVs: {error}"))?;
        self.posted.receives.fetch_add(count as u64, Ordering::Relaxed);
        self.posted.doorbells.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn poll<'a>(&self, cq: &Cq, buffer: &'a mut WcBuffer) -> Outcome<&'a [Wc]> {
        let done = cq.poll(buffer, BATCH).map_err(|error| error.to_string())?;
        if let Some(wc) = done.iter().find(|wc| wc.status() != Status::Success) {
            return Err(format!("work request {} on {}: {:?}", wc.wr_id(), self.port.device, wc.status()));
        }
        self.posted.completions.fetch_add(done.len() as u64, Ordering::Relaxed);
        Ok(done)
    }

    /// What takes what tells this side of blocks, and answers how many it took.
    pub fn taker(self: &Arc<Self>) -> impl FnMut() -> Outcome<u64> + Send + use<> {
        let (end, mut buffer) = (Arc::clone(self), WcBuffer::new(BATCH));
        move || {
            let taken = end.poll(&end.recv_cq, &mut buffer)?;
            if !taken.is_empty() {
                let slots: Vec<usize> = taken.iter().map(|wc| wc.wr_id() as usize).collect();
                end.receive(slots.into_iter())?;
            }
            Ok(taken.len() as u64)
        }
    }

    /// Posts the blocks of a request, each from here to there, with what tells the peer that they have come.
    fn post(
        &self,
        chain: &mut SendChain,
        moves: &[(usize, usize)],
        peer: &Address,
        notify: Notify,
    ) -> Outcome<()> {
        let Layout { size, .. } = self.pool.layout();
        chain.clear();
        for (at, (from, to)) in moves.iter().enumerate() {
            let local = (self.pool.at(*from) as u64, self.mr.lkey(), size as u32);
            let target = (peer.base + *to as u64, peer.rkey);
            chain.push(at as u64, Opcode::Write, SendFlags::default(), local, target);
        }
        match notify {
            Notify::Off => {}
            Notify::Imm => chain.set_last_imm(TOLD),
            Notify::Send => {
                let (number, flags) = (moves.len() as u64, SendFlags::default());
                // SAFETY: constant bytes, as many as the queue pair was made for.
                unsafe { chain.push_inline(number, Opcode::Send, flags, &MESSAGE, (0, 0)) };
            }
        }
        chain.signal_last();
        // SAFETY: the pool lives longer than the queue pair, and both sides access it atomically while blocks travel.
        unsafe { self.qp.post_send(chain) }.map_err(|error| error.to_string())?;
        self.posted.sends.fetch_add(chain.len() as u64, Ordering::Relaxed);
        self.posted.doorbells.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// A queue pair that takes turns with engines.
pub struct Bout<'a> {
    pub end: &'a End,
    pub peer: &'a Address,
    pub notify: Notify,
    /// Iterations so far: the next one goes on with the next request.
    pub begun: u64,
    pub patience: Duration,
}

impl Bout<'_> {
    pub fn label(&self) -> String {
        format!("qp {}", self.notify.word())
    }

    /// Readies the target for a round.
    pub fn begin(&self, remote: &mut Remote) -> Outcome<()> {
        remote.tell(&Order::ListenToQueuePair)
    }

    /// Ends what `begin` began, after so many iterations.
    pub fn end(&self, remote: &mut Remote, iterations: u64) -> Outcome<()> {
        let told = if self.notify == Notify::Off { 0 } else { iterations };
        remote.tell(&Order::Heard(told))
    }

    /// `count` iterations, one after the other.
    pub fn run(&mut self, count: u64) -> Outcome<Laps> {
        let (pool, layout) = (&self.end.pool, self.end.pool.layout());
        let order = pool.layout().order();
        let place = |request: usize, index: usize| {
            (layout.offset(request, index), layout.offset(request, order[index] as usize))
        };
        let moves: Vec<Vec<(usize, usize)>> = (0..layout.requests)
            .map(|request| (0..layout.blocks).map(|index| place(request, index)).collect())
            .collect();
        let mut chain = SendChain::with_capacity(layout.blocks + 1);
        let mut buffer = WcBuffer::new(BATCH);
        let mut times = Rounds::default();
        times.latency_us.reserve(count as usize);
        let started = Instant::now();
        let mut before = started;
        for n in 0..count {
            let request = ((self.begun + n) % layout.requests as u64) as usize;
            self.end.post(&mut chain, &moves[request], self.peer, self.notify)?;
            times.post_us.push(us(before.elapsed()));
            self.wait(&mut buffer, before)?;
            let now = Instant::now();
            times.latency_us.push(us(now - before));
            before = now;
        }
        self.begun += count;
        Ok(Laps { started, ended: before, times })
    }

    /// Until the last work request has completed.
    fn wait(&self, buffer: &mut WcBuffer, since: Instant) -> Outcome<()> {
        let mut looks = 0u32;
        while self.end.poll(&self.end.send_cq, buffer)?.is_empty() {
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(1024) && since.elapsed() > self.patience {
                return Err(format!("nothing completed within {} s", self.patience.as_secs()));
            }
            spin(looks);
        }
        Ok(())
    }
}
