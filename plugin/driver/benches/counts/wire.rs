//! A fabric between two engines of this process that does as little as possible: no bulk data moves, everything completes at
//! once. What it costs is not counted, so what is counted is ours alone and the same at every run.

use baton_fabric::*;
use serde_json::{Value, json};
use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// One endpoint.
#[derive(Default)]
struct End {
    /// Side and slot of the other.
    peer: Option<(usize, u32)>,
    recvs: VecDeque<RecvSlot>,
}

/// Both sides.
#[derive(Default)]
struct Hub {
    ends: [Vec<End>; 2],
    completions: [VecDeque<Completion>; 2],
}

/// One side.
pub struct Wire {
    side: usize,
    hub: Arc<Mutex<Hub>>,
}

/// The two ends of a wire.
pub fn pair() -> [Arc<Wire>; 2] {
    let hub = Arc::new(Mutex::new(Hub::default()));
    [0, 1].map(|side| Arc::new(Wire { side, hub: Arc::clone(&hub) }))
}

fn id(slot: u32) -> EndpointId {
    EndpointId { slot, generation: 1 }
}

/// Calls of a fabric.
#[derive(Clone, Copy, Default)]
pub struct Calls {
    polls: usize,
    posts: usize,
    recvs: usize,
    /// Completions that polls found.
    pub found: usize,
}

impl Calls {
    pub fn add(&mut self, more: Calls) {
        self.polls += more.polls;
        self.posts += more.posts;
        self.recvs += more.recvs;
        self.found += more.found;
    }

    /// For people.
    pub fn per(&self, rounds: usize) -> String {
        let per = |calls: usize| calls as f64 / rounds as f64;
        format!("{:.2} poll, {:.3} post, {:.3} post_recv", per(self.polls), per(self.posts), per(self.recvs))
    }
}

thread_local! {
    static COUNTING: Cell<bool> = const { Cell::new(false) };
    static CALLS: Cell<Calls> = const { Cell::new(Calls { polls: 0, posts: 0, recvs: 0, found: 0 }) };
}

/// The calls in counted steps of this thread since the last time.
pub fn take_calls() -> Calls {
    CALLS.take()
}

fn note(made: Calls) {
    let mut calls = CALLS.get();
    calls.add(made);
    CALLS.set(calls);
}

/// Runs a step that is counted, if callgrind runs us.
pub fn counting<R>(step: impl FnOnce() -> R) -> R {
    COUNTING.set(true);
    let out = step();
    COUNTING.set(false);
    out
}

/// What a fabric does belongs to no step: entering this function stops the counting, leaving it goes on with it.
#[unsafe(no_mangle)]
#[inline(never)]
extern "Rust" fn uncounted(work: &mut dyn FnMut()) {
    work();
}

fn aside<R>(call: Calls, work: impl FnOnce() -> R) -> R {
    if !COUNTING.get() {
        return work();
    }
    let (mut work, mut out) = (Some(work), None);
    uncounted(&mut || {
        note(call);
        out = work.take().map(|work| work());
    });
    out.expect("it ran")
}

fn carry(wire: &Wire, endpoint: EndpointId, batch: &Batch<'_>) {
    let Wire { side, hub } = wire;
    let mut hub = hub.lock().expect("no panic");
    let (peer_side, peer_slot) = hub.ends[*side][endpoint.slot as usize].peer.expect("connected");
    let mut arrived = batch.imm.map(|imm| (CompletionKind::RecvImm(imm), 0));
    if let Some(extra) = &batch.extra {
        arrived = match extra.op {
            ExtraOp::Send | ExtraOp::SendHead => Some((CompletionKind::RecvSend, extra.len_bytes() as u32)),
            ExtraOp::WriteImm(imm) => Some((CompletionKind::RecvImm(imm), 0)),
            ExtraOp::Write => arrived,
        };
        let to = match extra.op {
            ExtraOp::Send | ExtraOp::SendHead => {
                hub.ends[peer_side][peer_slot as usize].recvs.front().expect("credit").addr
            }
            ExtraOp::Write | ExtraOp::WriteImm(_) => extra.remote_addr,
        };
        // SAFETY: a record's or credit word's place in a ring or page of the other engine, or the slot of a RECV of its own; it lives as
        // long as the session, and the engines give each other only places of that length.
        unsafe { place(extra, to) };
    }
    if let Some((kind, len_bytes)) = arrived {
        let slot = hub.ends[peer_side][peer_slot as usize].recvs.pop_front().expect("credit was kept to");
        hub.completions[peer_side].push_back(Completion {
            endpoint: id(peer_slot),
            kind,
            seq: slot.id.into(),
            len_bytes,
            ..Completion::EMPTY
        });
    }
    if batch.signaled {
        let seq = batch.first_seq + batch.len() as u64 - 1;
        hub.completions[*side].push_back(Completion { endpoint, seq, ..Completion::EMPTY });
    }
}

/// Copies what an extra carries, inline or gathered.
///
/// # Safety
/// `to` is writable for all of it, what it gathers from readable.
unsafe fn place(extra: &Extra<'_>, to: u64) {
    let mut to = to as *mut u8;
    let mut put = |from: *const u8, len: usize| {
        // SAFETY: the caller's promise.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, len);
            to = to.add(len);
        }
    };
    if !extra.bytes.is_empty() {
        put(extra.bytes.as_ptr(), extra.bytes.len());
    }
    extra.gather.iter().for_each(|sge| put(sge.addr as *const u8, sge.len_bytes as usize));
}

/// One poll that finds one completion: what the times of the steps that poll contain of this fabric, and no count does.
pub struct Alone {
    ends: [Arc<Wire>; 2],
    found: [Completion; 64],
}

impl Alone {
    pub fn new() -> Alone {
        let ends = pair();
        for (side, end) in ends.iter().enumerate() {
            let mut hub = end.lock();
            hub.ends[side].push(End { peer: Some((1 - side, 0)), recvs: VecDeque::new() });
        }
        Alone { ends, found: [Completion::EMPTY; 64] }
    }

    pub fn post(&self) {
        let recv = RecvSlot::default();
        self.ends[1].post_recv(id(0), &[recv]).expect("there is room");
        let extra = Extra {
            op: ExtraOp::WriteImm(1),
            bytes: &[],
            gather: &[],
            staged: None,
            remote_addr: 0,
            remote_key: 0,
            fenced: false,
        };
        let batch =
            Batch { work: &[], imm: None, extra: Some(extra), first_seq: 0, signaled: false, patient: false };
        self.ends[0].post(id(0), &batch).expect("there is room");
    }

    pub fn poll(&mut self) -> usize {
        self.ends[1].poll(&mut self.found)
    }
}

fn take(wire: &Wire, out: &mut [Completion]) -> usize {
    let mut hub = wire.lock();
    let ready = &mut hub.completions[wire.side];
    let n = ready.len().min(out.len());
    out.iter_mut().zip(ready.drain(..n)).for_each(|(out, completion)| *out = completion);
    if COUNTING.get() {
        note(Calls { found: n, ..Calls::default() });
    }
    n
}

impl Wire {
    fn lock(&self) -> MutexGuard<'_, Hub> {
        self.hub.lock().expect("no panic")
    }
}

impl Fabric for Wire {
    fn name(&self) -> &'static str {
        "wire"
    }
    fn caps(&self) -> Caps {
        Caps {
            max_sq_depth: 8192,
            max_rq_depth: 4096,
            max_message_bytes: 4 << 20,
            longest_read_bytes: 4 << 20,
            inline_bytes: 16 << 10,
            max_send_sge: 30,
            default_lanes: 4,
            lane_sq_depth: 1024,
            stripe_min_bytes: 1 << 20,
            immediate: true,
            owner_revokes: true,
            needs_service: false,
            vram: false,
            reads_behind_fence: true,
            headed_bytes: 0,
            pack_below_bytes: 0,
        }
    }
    fn address(&self) -> Value {
        json!({ "side": self.side })
    }
    fn reach(&self, _: &Value, _: Instant) -> Result<(), String> {
        Ok(())
    }
    fn register(&self, memory: &Memory) -> Result<Keys, FabricError> {
        Ok(Keys { local: memory.addr, remote: memory.addr })
    }
    fn revoke(&self, _: Keys) {}
    fn deregister(&self, _: Keys, _: Instant) -> Result<(), FabricError> {
        Ok(())
    }
    fn create_endpoint(&self, _: &EndpointConfig) -> Result<(EndpointId, Value), FabricError> {
        let ends = &mut self.lock().ends[self.side];
        ends.push(End::default());
        let slot = ends.len() as u32 - 1;
        Ok((id(slot), json!({ "side": self.side, "slot": slot })))
    }
    fn connect_endpoint(&self, endpoint: EndpointId, peer: &Value, _: Instant) -> Result<(), FabricError> {
        let number = |key: &str| peer[key].as_u64().expect("what the other side said");
        self.lock().ends[self.side][endpoint.slot as usize].peer =
            Some((number("side") as usize, number("slot") as u32));
        Ok(())
    }
    fn post_recv(&self, endpoint: EndpointId, slots: &[RecvSlot]) -> Result<(), FabricError> {
        let call = Calls { recvs: 1, ..Calls::default() };
        aside(call, || self.lock().ends[self.side][endpoint.slot as usize].recvs.extend(slots));
        Ok(())
    }
    fn post(&self, endpoint: EndpointId, batch: &Batch<'_>) -> Result<(), PostError> {
        aside(Calls { posts: 1, ..Calls::default() }, || carry(self, endpoint, batch));
        Ok(())
    }
    fn poll(&self, out: &mut [Completion]) -> usize {
        aside(Calls { polls: 1, ..Calls::default() }, || take(self, out))
    }
    fn serve(&self, _: usize) -> bool {
        false
    }
    fn event_fd(&self) -> Option<RawFd> {
        None
    }
    fn arm(&self) -> bool {
        true
    }
    fn disarm(&self) {}
    fn fence(&self, _: EndpointId) {}
    fn is_quiet(&self, _: EndpointId) -> bool {
        true
    }
    fn destroy_endpoint(&self, _: EndpointId) {}
    fn stats(&self) -> Value {
        json!({})
    }
}
