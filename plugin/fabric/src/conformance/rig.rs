//! The bench on which the behaviours are tried: two fabrics, their service threads, connected endpoints, guarded memory.

use super::Harness;
use crate::*;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a condition may take to come true.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes around every block that nobody may change.
const MARGIN: usize = 64;
const SENTINEL: u8 = 0xA5;
/// Send and receive queue of [`Rig::pair`].
pub const DEPTH: u32 = 64;

/// What peers may do with a block.
#[derive(Clone, Copy)]
pub enum Access {
    Both,
    ReadOnly,
    WriteOnly,
    None,
}

/// Registered memory between two sentinels.
#[derive(Clone, Copy)]
pub struct Block {
    pub side: usize,
    pub addr: u64,
    pub len: usize,
    pub keys: Keys,
}

/// Everything polled so far, in order.
#[derive(Default)]
pub struct Inbox {
    pub sides: [Vec<Completion>; 2],
}

impl Inbox {
    /// Completions of an endpoint's send queue.
    pub fn sends(&self, side: usize, endpoint: EndpointId) -> Vec<Completion> {
        self.of(side, endpoint, |kind| kind == CompletionKind::Send)
    }

    /// Completions of an endpoint's receive queue.
    pub fn receives(&self, side: usize, endpoint: EndpointId) -> Vec<Completion> {
        self.of(side, endpoint, |kind| kind != CompletionKind::Send)
    }

    fn of(
        &self,
        side: usize,
        endpoint: EndpointId,
        wanted: impl Fn(CompletionKind) -> bool,
    ) -> Vec<Completion> {
        self.sides[side].iter().filter(|c| c.endpoint == endpoint && wanted(c.kind)).copied().collect()
    }

    fn push(&mut self, side: usize, completion: Completion) {
        if completion.kind == CompletionKind::Send {
            let last = self.sends(side, completion.endpoint).last().map(|c| c.seq);
            assert!(
                last.is_none_or(|last| last < completion.seq),
                "side {side}: completion {completion:?} after that of sequence {last:?}"
            );
        }
        self.sides[side].push(completion);
    }
}

pub struct Rig {
    // Before the harness, which owns their memory.
    fabrics: [Arc<dyn Fabric>; 2],
    harness: Box<dyn Harness>,
    inbox: Mutex<Inbox>,
    stop: Arc<AtomicBool>,
    service: Mutex<Vec<JoinHandle<()>>>,
}

impl Rig {
    pub fn new(harness: Box<dyn Harness>) -> Rig {
        let fabrics = [harness.fabric(0), harness.fabric(1)];
        let stop = Arc::new(AtomicBool::new(false));
        let service = fabrics
            .iter()
            .filter(|fabric| fabric.caps().needs_service)
            .map(|fabric| {
                let (fabric, stop) = (Arc::clone(fabric), Arc::clone(&stop));
                std::thread::spawn(move || serve_until(&*fabric, &stop))
            })
            .collect();
        Rig { harness, fabrics, inbox: Mutex::default(), stop, service: Mutex::new(service) }
    }

    pub fn fabric(&self, side: usize) -> &dyn Fabric {
        &*self.fabrics[side]
    }

    pub fn step(&self) {
        self.harness.step();
    }

    /// Ends the service threads; the test serves by itself from here.
    pub fn stop_service(&self) {
        self.stop.store(true, Ordering::Release);
        for thread in self.service.lock().expect("service threads").drain(..) {
            thread.join().expect("the service thread did not panic");
        }
    }

    pub fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().expect("the inbox")
    }

    // ---- endpoints

    pub fn pair(&self) -> [EndpointId; 2] {
        self.pair_with(DEPTH, false, |_, _| {})
    }

    /// Two endpoints connected with each other; `before` runs for each one after its creation and before connecting.
    pub fn pair_with(
        &self,
        depth: u32,
        control: bool,
        before: impl Fn(usize, EndpointId),
    ) -> [EndpointId; 2] {
        let made = [0, 1].map(|side| {
            let max_sge = self.fabric(side).caps().max_send_sge;
            let config = EndpointConfig {
                sq_depth: depth,
                rq_depth: depth,
                active: side == 0,
                control,
                max_sge,
                exposed: true,
            };
            let made = self.fabric(side).create_endpoint(&config).expect("create an endpoint");
            before(side, made.0);
            made
        });
        let deadline = Instant::now() + PATIENCE;
        std::thread::scope(|scope| {
            let other = scope.spawn(|| self.fabric(1).connect_endpoint(made[1].0, &made[0].1, deadline));
            self.fabric(0)
                .connect_endpoint(made[0].0, &made[1].1, deadline)
                .expect("connect the active side");
            other.join().expect("no panic").expect("connect the passive side");
        });
        [made[0].0, made[1].0]
    }

    pub fn recvs(&self, side: usize, endpoint: EndpointId, ids: std::ops::Range<u32>) {
        let slots: Vec<RecvSlot> = ids.map(|id| RecvSlot { id, ..RecvSlot::default() }).collect();
        self.fabric(side).post_recv(endpoint, &slots).expect("post RECVs");
    }

    // ---- memory

    pub fn block(&self, side: usize, len: usize) -> Block {
        self.block_for(side, len, Access::Both)
    }

    pub fn block_for(&self, side: usize, len: usize, access: Access) -> Block {
        self.block_in(side, len, |addr| self.register(side, addr, len, access))
    }

    /// A block as the engine's own memory is.
    pub fn own_block(&self, side: usize, len: usize) -> Block {
        self.block_in(side, len, |addr| {
            let memory = Memory { ordered: true, mapped: true, ..memory(addr, len, Access::Both) };
            self.fabric(side).register(&memory).expect("register memory")
        })
    }

    fn block_in(&self, side: usize, len: usize, register: impl FnOnce(u64) -> Keys) -> Block {
        let base = self.harness.alloc(side, len + 2 * MARGIN);
        self.harness.store(side, base, &vec![SENTINEL; len + 2 * MARGIN]);
        let addr = base + MARGIN as u64;
        let keys = register(addr);
        Block { side, addr, len, keys }
    }

    pub fn register(&self, side: usize, addr: u64, len: usize, access: Access) -> Keys {
        self.fabric(side).register(&memory(addr, len, access)).expect("register memory")
    }

    pub fn deregister(&self, block: &Block) {
        self.fabric(block.side).deregister(block.keys, Instant::now() + PATIENCE).expect("deregister");
    }

    pub fn fill(&self, block: &Block, seed: u64) {
        self.harness.store(block.side, block.addr, &pattern(seed, block.len));
    }

    pub fn store(&self, block: &Block, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= block.len);
        self.harness.store(block.side, block.addr + offset as u64, bytes);
    }

    pub fn bytes(&self, block: &Block) -> Vec<u8> {
        let mut bytes = vec![0; block.len];
        self.harness.load(block.side, block.addr, &mut bytes);
        bytes
    }

    /// Every byte of the block, and the sentinels around it.
    pub fn expect(&self, block: &Block, expected: &[u8]) {
        let found = self.bytes(block);
        if let Some(at) = (0..block.len).find(|&i| found[i] != expected[i]) {
            panic!(
                "side {}: byte {at} of {} is {:#04x}, not {:#04x}",
                block.side, block.len, found[at], expected[at]
            );
        }
        self.expect_sentinels(block);
    }

    pub fn expect_sentinels(&self, block: &Block) {
        for (name, addr) in
            [("before", block.addr - MARGIN as u64), ("behind", block.addr + block.len as u64)]
        {
            let mut bytes = [0; MARGIN];
            self.harness.load(block.side, addr, &mut bytes);
            assert_eq!(bytes, [SENTINEL; MARGIN], "side {}: bytes {name} the block were written", block.side);
        }
    }

    /// What a block holds before anybody writes it.
    pub fn untouched(len: usize) -> Vec<u8> {
        vec![SENTINEL; len]
    }

    // ---- progress

    /// Polls both sides until the condition holds.
    pub fn wait<T>(&self, what: &str, condition: impl FnMut(&Inbox) -> Option<T>) -> T {
        self.wait_polling(&[0, 1], what, condition)
    }

    /// Polls only the given sides until the condition holds.
    pub fn wait_polling<T>(
        &self,
        sides: &[usize],
        what: &str,
        mut condition: impl FnMut(&Inbox) -> Option<T>,
    ) -> T {
        let patience = PATIENCE * super::timeout_scale();
        let give_up = Instant::now() + patience;
        loop {
            self.poll_once(sides);
            let inbox = self.inbox();
            if let Some(value) = condition(&inbox) {
                return value;
            }
            assert!(
                Instant::now() < give_up,
                "waited {patience:?} in vain for {what}; polled so far: {:?}",
                inbox.sides
            );
            drop(inbox);
            self.step();
        }
    }

    /// Waits for `count` completions of an endpoint's send queue and returns all of them.
    pub fn wait_sends(&self, side: usize, endpoint: EndpointId, count: usize) -> Vec<Completion> {
        self.wait(&format!("{count} send completions"), |inbox| {
            let sends = inbox.sends(side, endpoint);
            (sends.len() >= count).then_some(sends)
        })
    }

    /// Waits for `count` completions of an endpoint's receive queue and returns all of them.
    pub fn wait_receives(&self, side: usize, endpoint: EndpointId, count: usize) -> Vec<Completion> {
        self.wait(&format!("{count} receive completions"), |inbox| {
            let receives = inbox.receives(side, endpoint);
            (receives.len() >= count).then_some(receives)
        })
    }

    /// Gives anything that is still on its way a fair chance to show.
    pub fn settle(&self) {
        for _ in 0..400 {
            self.poll_once(&[0, 1]);
            self.step();
        }
    }

    pub fn poll_once(&self, sides: &[usize]) {
        let mut out = [Completion::EMPTY; 32];
        for &side in sides {
            // Under the inbox lock, so that threads that wait at the same time record in the order of polling.
            let mut inbox = self.inbox();
            let n = self.fabric(side).poll(&mut out);
            out[..n].iter().for_each(|completion| inbox.push(side, *completion));
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        for thread in self.service.get_mut().map(std::mem::take).unwrap_or_default() {
            let _ = thread.join();
        }
    }
}

fn memory(addr: u64, len: usize, access: Access) -> Memory {
    Memory {
        addr,
        len_bytes: len as u64,
        kind: MemoryKind::Dram,
        device: 0,
        remote_read: matches!(access, Access::Both | Access::ReadOnly),
        remote_write: matches!(access, Access::Both | Access::WriteOnly),
        ordered: false,
        mapped: false,
    }
}

fn serve_until(fabric: &dyn Fabric, stop: &AtomicBool) {
    while !stop.load(Ordering::Acquire) {
        if fabric.serve(1 << 20) {
            continue;
        }
        match fabric.event_fd() {
            Some(fd) if fabric.arm() => {
                sleep_on(fd, Duration::from_millis(5));
            }
            Some(_) => std::thread::yield_now(),
            None => std::thread::park_timeout(Duration::from_micros(100)),
        }
    }
}

/// Sleeps until the descriptor is readable; `false` when that took longer than `limit`.
pub fn sleep_on(fd: RawFd, limit: Duration) -> bool {
    // SAFETY: the descriptor belongs to the fabric, which keeps it open for its whole life, and the caller holds the fabric.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
    let limit = rustix::event::Timespec::try_from(limit).expect("a short limit");
    loop {
        match rustix::event::poll(&mut fds, Some(&limit)) {
            Ok(n) => return n > 0,
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => panic!("poll(2) on the fabric's event descriptor: {error}"),
        }
    }
}

/// The send side of an endpoint: counts sequences.
pub struct Sender<'a> {
    rig: &'a Rig,
    pub side: usize,
    pub endpoint: EndpointId,
    pub next_seq: u64,
}

impl<'a> Sender<'a> {
    pub fn new(rig: &'a Rig, side: usize, endpoint: EndpointId) -> Sender<'a> {
        Sender { rig, side, endpoint, next_seq: 0 }
    }

    /// Posts a chain and returns the sequence of its last work request.
    pub fn post(
        &mut self,
        work: &[Template],
        imm: Option<u32>,
        extra: Option<Extra<'_>>,
        signaled: bool,
    ) -> u64 {
        self.try_post(work, imm, extra, signaled).expect("post");
        self.next_seq - 1
    }

    pub fn try_post(
        &mut self,
        work: &[Template],
        imm: Option<u32>,
        extra: Option<Extra<'_>>,
        signaled: bool,
    ) -> Result<(), PostError> {
        let batch = Batch { work, imm, extra, first_seq: self.next_seq, signaled, patient: false };
        self.post_batch(&batch)
    }

    /// One signaled work request that nobody waits for; its sequence.
    pub fn post_patiently(&mut self, extra: Extra<'_>) -> u64 {
        let first_seq = self.next_seq;
        let batch =
            Batch { work: &[], imm: None, extra: Some(extra), first_seq, signaled: true, patient: true };
        self.post_batch(&batch).expect("post");
        first_seq
    }

    fn post_batch(&mut self, batch: &Batch<'_>) -> Result<(), PostError> {
        self.next_seq += batch.len() as u64;
        self.rig.fabric(self.side).post(self.endpoint, batch)
    }

    /// Posts plain work, signaled, and waits for its success.
    pub fn run(&mut self, work: &[Template]) {
        let seq = self.post(work, None, None, true);
        self.wait_done(seq);
    }

    /// Waits for the completion of `seq`, which must be a success.
    pub fn wait_done(&self, seq: u64) {
        let last = self.rig.wait(&format!("completion {seq}"), |inbox| {
            let sends = inbox.sends(self.side, self.endpoint);
            sends.last().filter(|c| c.seq >= seq || c.status != WcStatus::Success).copied()
        });
        assert_eq!((last.status, last.seq), (WcStatus::Success, seq));
    }
}

/// A work request between two blocks.
pub fn template(
    op: Op,
    local: &Block,
    local_offset: usize,
    remote: &Block,
    remote_offset: usize,
    len: usize,
) -> Template {
    Template {
        local_addr: local.addr + local_offset as u64,
        remote_addr: remote.addr + remote_offset as u64,
        local_key: local.keys.local,
        remote_key: remote.keys.remote,
        len_bytes: len as u32,
        op,
        reserved: [0; 3],
    }
}

/// An extra that writes to a block.
pub fn extra<'a>(op: ExtraOp, bytes: &'a [u8], remote: &Block, remote_offset: usize) -> Extra<'a> {
    Extra {
        op,
        bytes,
        staged: None,
        gather: &[],
        remote_addr: remote.addr + remote_offset as u64,
        remote_key: remote.keys.remote,
        fenced: false,
    }
}

/// An extra that sends.
pub fn send(bytes: &[u8]) -> Extra<'_> {
    Extra {
        op: ExtraOp::Send,
        bytes,
        staged: None,
        gather: &[],
        remote_addr: 0,
        remote_key: 0,
        fenced: false,
    }
}

/// Bytes that depend on the seed and their position.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len + 8);
    let mut word = 0u64;
    while bytes.len() < len {
        word += 1;
        let mixed = (word ^ seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        bytes.extend_from_slice(&(mixed ^ (mixed >> 29)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
