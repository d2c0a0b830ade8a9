//! Software fabric between two processes of one host (or two fabrics of one process).
//!
//! Only the owner of the memory being written copies into it, with `process_vm_readv`: a WRITE is pulled by the target, a
//! READ by the initiator; nothing is ever pushed into another process. Work requests of one side go through a ring in shared
//! memory that the other side serves. Every pull ends with the peer's stamp (see `pull.rs`), so what was copied from a process
//! that is not the peer any more, from a fenced endpoint or from a withdrawn region is never reported as done.
//!
//! | file | what |
//! |---|---|
//! | `sys`, `shm` | system calls, mappings |
//! | `peer` | probing and knowing another process |
//! | `door` | which endpoints have news, and who sleeps |
//! | `ring`, `send`, `payload`, `recv` | the queues of an endpoint |
//! | `pull`, `inbound`, `outbound` | moving bytes |
//! | `heads` | messages whose receiver says where they go |
//! | `joint` | … several threads of which pull |
//! | `shared`, `copy` | managed memory of peers, mapped and copied without the kernel |
//! | `inner`, `pool` | who does the work, and when |

mod copy;
mod door;
mod endpoint;
mod heads;
mod inbound;
mod inner;
mod joint;
mod outbound;
mod payload;
mod peer;
mod pool;
mod pull;
mod recv;
mod ring;
mod send;
mod shared;
mod shm;
mod stats;
mod sys;

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_fabric::{
    Batch, Caps, Completion, EndpointConfig, EndpointId, ExtraOp, Fabric, FabricError, INLINE_PROGRESS_BYTES,
    Keys, Memory, Op, PostError, RecvSlot, Rest, Untaken,
};

use door::MAX_SLOTS;
use endpoint::{Endpoint, Link, State, ring_depth};
use heads::Heads;
use inner::Inner;
use payload::INLINE_BYTES;
use peer::{EndpointAddress, FabricAddress};
use pull::Stamp;
use ring::{Entry, Ring};
use send::{Item, SendQueue};

use crate::lists::MAX_SEND_SGE;

/// Deepest queues.
const MAX_DEPTH: u32 = 4096;
/// Longest work request.
const MAX_MESSAGE_BYTES: u32 = 64 << 20;
/// A message of two steps costs its receiver some microseconds, as much as to copy a few ten thousand bytes.
const HEADED_BYTES: u32 = 1 << 20;
/// How long dropping the fabric waits for its copy threads.
const JOIN_LIMIT: Duration = Duration::from_secs(2);

/// Settings of the fabric.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// Where Yama restricts reading other processes, let every process of this user read this one (`BATON_PTRACE=any`).
    pub ptrace_any: bool,
    /// Threads that help with large copies; 0 for none.
    pub copy_threads: usize,
    /// How long a peer's immediate or message waits for a RECV before it is refused.
    pub rnr_wait: Duration,
}

impl Default for LocalConfig {
    fn default() -> LocalConfig {
        LocalConfig {
            ptrace_any: false,
            copy_threads: cpus().saturating_sub(1).clamp(1, 4),
            rnr_wait: Duration::from_millis(100),
        }
    }
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The local fabric. Cheap to share; its threads end when the last reference goes.
pub struct LocalFabric {
    inner: Arc<Inner>,
}

impl LocalFabric {
    /// Opens the fabric.
    pub fn new(config: LocalConfig) -> Result<Arc<LocalFabric>, FabricError> {
        if config.ptrace_any
            && let Err(error) = sys::allow_any_tracer()
        {
            return Err(FabricError::System(format!("prctl(PR_SET_PTRACER) for BATON_PTRACE=any: {error}")));
        }
        Ok(Arc::new(LocalFabric { inner: Arc::new(Inner::new(config)?) }))
    }

    fn known(&self, id: EndpointId) -> Result<Arc<Endpoint>, FabricError> {
        self.inner.endpoint(id).ok_or_else(|| {
            FabricError::NotFound(format!("no endpoint {} of generation {}", id.slot, id.generation))
        })
    }

    fn start_pool(&self) {
        if self.inner.pool.wants_start() {
            self.inner.pool.start(&self.inner);
        }
    }
}

impl Drop for LocalFabric {
    fn drop(&mut self) {
        for slot in 0..self.inner.slots.len() {
            let taken = self.inner.slots[slot].write().endpoint.take();
            if let Some(endpoint) = taken {
                self.inner.end(&endpoint, None);
            }
        }
        if !self.inner.pool.stop(Instant::now() + JOIN_LIMIT) {
            tracing::warn!("copy threads of the local fabric are still running {JOIN_LIMIT:?} after its end");
        }
    }
}

fn parse<T: serde::de::DeserializeOwned>(what: &str, value: &serde_json::Value) -> Result<T, FabricError> {
    T::deserialize(value).map_err(|e| FabricError::Invalid(format!("{what} of a peer: {e}")))
}

impl Fabric for LocalFabric {
    fn name(&self) -> &'static str {
        "local"
    }

    fn caps(&self) -> Caps {
        Caps {
            max_sq_depth: MAX_DEPTH,
            max_rq_depth: MAX_DEPTH,
            max_message_bytes: MAX_MESSAGE_BYTES,
            longest_read_bytes: MAX_MESSAGE_BYTES,
            inline_bytes: INLINE_BYTES as u32,
            max_send_sge: MAX_SEND_SGE,
            default_lanes: cpus().clamp(1, 2) as u8,
            lane_sq_depth: MAX_DEPTH,
            stripe_min_bytes: 1 << 20,
            immediate: true,
            owner_revokes: true,
            needs_service: true,
            vram: false,
            reads_behind_fence: true,
            headed_bytes: HEADED_BYTES,
            pack_below_bytes: 0,
        }
    }

    fn address(&self) -> serde_json::Value {
        serde_json::to_value(&self.inner.address).expect("plain data")
    }

    fn reach(&self, peer: &serde_json::Value, _deadline: Instant) -> Result<(), String> {
        let address: FabricAddress = parse("the address", peer).map_err(|e| e.to_string())?;
        self.inner.peer(&address).map(drop)
    }

    fn register(&self, memory: &Memory) -> Result<Keys, FabricError> {
        self.inner.regions.register(memory)
    }

    fn register_shared(&self, memory: &Memory, file: BorrowedFd<'_>) -> Result<Keys, FabricError> {
        self.inner.regions.register_with(memory, Some(file.as_raw_fd()))
    }

    fn revoke(&self, keys: Keys) {
        self.inner.regions.revoke(keys);
    }

    fn deregister(&self, keys: Keys, deadline: Instant) -> Result<(), FabricError> {
        let shared = self.inner.regions.is_shared(keys);
        let done = self.inner.regions.deregister(keys, deadline);
        if shared {
            self.inner.tell_withdrawn();
        }
        done
    }

    fn create_endpoint(
        &self,
        config: &EndpointConfig,
    ) -> Result<(EndpointId, serde_json::Value), FabricError> {
        for (what, depth) in [("send", config.sq_depth), ("receive", config.rq_depth)] {
            if !(1..=MAX_DEPTH).contains(&depth) {
                return Err(FabricError::Invalid(format!(
                    "a {what} queue of {depth}; 1 to {MAX_DEPTH} are possible"
                )));
            }
        }
        if !(1..=MAX_SEND_SGE).contains(&config.max_sge) {
            return Err(FabricError::Invalid(format!(
                "SENDs of {} pieces; 1 to {MAX_SEND_SGE} are possible",
                config.max_sge
            )));
        }
        let mut noise = [0u8; 8];
        getrandom::fill(&mut noise).map_err(|e| FabricError::System(format!("no random bytes: {e}")))?;
        let token = u64::from_ne_bytes(noise) | 1;
        let depth = ring_depth(config);
        let (fd, ring) = Ring::create(depth, token)
            .map_err(|e| FabricError::System(format!("a shared ring of {depth} entries: {e}")))?;
        for (index, place) in self.inner.slots.iter().enumerate() {
            let mut place = place.write();
            if place.endpoint.is_some() {
                continue;
            }
            let slot = index as u32;
            let id = EndpointId { slot, generation: place.generation };
            place.generation = place.generation.wrapping_add(1);
            let address = EndpointAddress {
                fabric: self.inner.address.clone(),
                slot,
                depth,
                ring_fd: fd.as_raw_fd(),
                stamp: self.inner.stamp_addr(slot),
                token,
            };
            self.inner.set_stamp(slot, token);
            let endpoint = Endpoint::new(id, config, fd, ring)
                .map_err(|e| FabricError::System(format!("room for payloads: {e}")))?;
            place.endpoint = Some(Arc::new(endpoint));
            return Ok((id, serde_json::to_value(&address).expect("plain data")));
        }
        Err(FabricError::Limit(format!("{MAX_SLOTS} endpoints exist, the most one fabric holds")))
    }

    fn connect_endpoint(
        &self,
        id: EndpointId,
        peer: &serde_json::Value,
        _deadline: Instant,
    ) -> Result<(), FabricError> {
        let endpoint = self.known(id)?;
        let address: EndpointAddress = parse("the endpoint address", peer)?;
        let sane = address.depth.is_power_of_two()
            && address.depth <= 2 * u64::from(MAX_DEPTH)
            && (address.slot as usize) < MAX_SLOTS
            && address.ring_fd >= 0
            && address.token != 0;
        if !sane {
            return Err(FabricError::Invalid(format!("nonsense in a peer's endpoint address: {address:?}")));
        }
        let process = self.inner.peer(&address.fabric).map_err(FabricError::Peer)?;
        let fd = process.fetch(address.ring_fd)?;
        let ring = Ring::open(&fd, address.depth, address.token)
            .map_err(|e| FabricError::Peer(format!("the ring of process {}: {e}", process.pid)))?;
        let stamp = Stamp::new(address.stamp, process.instance, address.token);
        let link = Link { peer: process, ring, slot: address.slot, stamp };
        if endpoint.state() != State::Created || endpoint.link.set(link).is_err() {
            return Err(FabricError::Invalid(format!("endpoint {} was connected or fenced before", id.slot)));
        }
        if !endpoint.set_connected() {
            return Err(FabricError::Invalid(format!("endpoint {} was fenced meanwhile", id.slot)));
        }
        // The peer may have posted already.
        self.inner.look_again(id.slot);
        Ok(())
    }

    fn post_recv(&self, id: EndpointId, slots: &[RecvSlot]) -> Result<(), FabricError> {
        let endpoint = self.known(id)?;
        let mut recv = endpoint.recv.lock();
        if endpoint.state() == State::Ended {
            return Err(FabricError::Peer(format!("endpoint {} is in error", id.slot)));
        }
        recv.post(slots)?;
        let awaited = endpoint.stalled.swap(false, Ordering::SeqCst);
        drop(recv);
        if awaited {
            self.inner.add_work(id.slot);
        }
        Ok(())
    }

    fn receive_heads(&self, id: EndpointId) -> bool {
        let Some(endpoint) = self.inner.endpoint(id) else { return false };
        let depth = endpoint.recv.lock().depth();
        endpoint.pull.lock().heads = Heads::with_room(depth);
        endpoint.heads.store(true, Ordering::SeqCst);
        true
    }

    fn take(&self, id: EndpointId, rests: &[Rest]) -> (usize, Option<Untaken>) {
        match self.inner.endpoint(id) {
            Some(endpoint) => heads::take(&self.inner, &endpoint, rests),
            None => (0, Some(Untaken::Gone)),
        }
    }

    fn post(&self, id: EndpointId, batch: &Batch<'_>) -> Result<(), PostError> {
        let refuse = |error| PostError { taken: 0, error };
        let endpoint = self.known(id).map_err(refuse)?;
        check(batch, endpoint.max_sge).map_err(refuse)?;
        let mut send = endpoint.send.lock();
        let Some(link) = endpoint.live_link() else {
            let text = format!("endpoint {} is not connected or in error", id.slot);
            return Err(refuse(FabricError::Peer(text)));
        };
        let room = send.room();
        if room < batch.len() as u64 {
            let text = format!("{} work requests, and room for {room} in the send queue", batch.len());
            return Err(refuse(FabricError::Limit(text)));
        }
        append(&self.inner, &endpoint.ring, &mut send, batch);
        let started = send.start(&endpoint.ring);
        self.inner.count_bytes(&endpoint, &mut send);
        let (reads, ready) = (send.has_reads(), send.is_ready());
        drop(send);
        self.inner.tell_started(&endpoint, started, ready);
        if reads {
            self.inner.add_work(id.slot);
        }
        if endpoint.ring.is_refused() || link.peer.is_known_dead() {
            self.inner.look_again(id.slot);
        }
        Ok(())
    }

    fn poll(&self, out: &mut [Completion]) -> usize {
        let n = self.inner.poll(out, INLINE_PROGRESS_BYTES);
        self.start_pool();
        n
    }

    fn serve(&self, budget_bytes: usize) -> bool {
        let more = self.inner.serve(budget_bytes);
        self.start_pool();
        more
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.inner.event_fd().as_raw_fd())
    }

    fn arm(&self) -> bool {
        self.inner.arm()
    }

    fn disarm(&self) {
        self.inner.door.awake();
    }

    fn fence(&self, id: EndpointId) {
        if let Some(endpoint) = self.inner.endpoint(id) {
            self.inner.end(&endpoint, None);
        }
    }

    fn is_quiet(&self, id: EndpointId) -> bool {
        let Some(endpoint) = self.inner.endpoint(id) else { return true };
        // Whoever takes the pull lock after the end sees the end.
        if endpoint.state() != State::Ended || endpoint.pull.try_lock().is_none() {
            return false;
        }
        let Some(link) = endpoint.link.get() else { return true };
        (!endpoint.ring.is_busy() && !link.ring.is_reading()) || link.peer.is_dead()
    }

    fn destroy_endpoint(&self, id: EndpointId) {
        let Some(endpoint) = self.inner.endpoint(id) else { return };
        self.inner.end(&endpoint, None);
        let mut place = self.inner.slots[id.slot as usize].write();
        if place.endpoint.as_ref().is_some_and(|there| there.id == id) {
            place.endpoint = None;
            self.inner.forget(id.slot);
        }
        drop((place, endpoint));
        self.inner.forget_unused_peers();
    }

    fn stats(&self) -> serde_json::Value {
        let mut endpoints = Vec::new();
        for place in &self.inner.slots {
            let Some(endpoint) = place.read().endpoint.clone() else { continue };
            let (posted, started, completed) = endpoint.send.lock().counts();
            endpoints.push(serde_json::json!({
                "slot": endpoint.id.slot,
                "generation": endpoint.id.generation,
                "control": endpoint.control,
                "state": format!("{:?}", endpoint.state()).to_lowercase(),
                "peer_pid": endpoint.link.get().map(|link| link.peer.pid),
                "posted": posted,
                "started": started,
                "completed": completed,
                "recvs": endpoint.recv.lock().available(),
                "waits_for_recv": endpoint.stalled.load(Ordering::Relaxed),
            }));
        }
        serde_json::json!({ "counters": self.inner.stats.to_json(), "mappings": self.inner.mappings(), "endpoints": endpoints })
    }
}

/// Refuses batches that no fabric could execute.
fn check(batch: &Batch<'_>, max_sge: u32) -> Result<(), FabricError> {
    if batch.imm.is_some() && batch.work.last().is_none_or(|last| last.op != Op::Write) {
        return Err(FabricError::Invalid("an immediate needs a WRITE as the last template".into()));
    }
    if let Some(extra) = &batch.extra {
        extra.check_gather(max_sge, MAX_MESSAGE_BYTES)?;
    }
    if let Some(extra) = &batch.extra
        && extra.bytes.len() > INLINE_BYTES
        && (extra.staged.is_none() || u32::try_from(extra.bytes.len()).is_err())
    {
        return Err(FabricError::Invalid(format!(
            "an extra of {} bytes must be staged in registered memory; up to {INLINE_BYTES} are copied by post",
            extra.bytes.len()
        )));
    }
    Ok(())
}

/// Puts a batch into the send queue. Faults of this side's memory show when their turn comes.
fn append(inner: &Inner, shared: &Ring, send: &mut SendQueue, batch: &Batch<'_>) {
    let last = batch.len().wrapping_sub(1);
    let mut source: Option<(u64, crate::regions::Guard<'_>)> = None;
    let mut readable = |key: u64, addr: u64, len: u64| {
        if source.as_ref().is_none_or(|(held, _)| *held != key) {
            source = inner.regions.access_local(key, addr, 0, false).ok().map(|guard| (key, guard));
        }
        let (_, guard) = source.as_ref()?;
        guard.covers(addr, len).then(|| guard.is_shared())
    };
    let signaled = |i: usize| if batch.signaled && i == last { ring::SIGNALED } else { 0 };
    for (i, work) in batch.work.iter().enumerate() {
        let mut flags = signaled(i);
        if work.op == Op::Read {
            flags |= ring::READ;
        } else {
            flags |= match readable(work.local_key, work.local_addr, u64::from(work.len_bytes)) {
                Some(true) => ring::SHARED,
                Some(false) => 0,
                None => ring::FAULT,
            };
        }
        let mut entry = Entry {
            own_addr: work.local_addr,
            peer_addr: work.remote_addr,
            own_key: work.local_key,
            peer_key: work.remote_key,
            len: work.len_bytes,
            imm: 0,
            flags,
        };
        if let (Some(imm), true) = (batch.imm, i + 1 == batch.work.len()) {
            entry.imm = imm;
            entry.flags |= ring::IMM;
        }
        send.push(Item { entry, seq: batch.first_seq + i as u64, list: None });
    }
    let Some(extra) = &batch.extra else { return };
    let mut entry = Entry {
        peer_addr: extra.remote_addr,
        peer_key: extra.remote_key,
        len: extra.len_bytes() as u32,
        flags: signaled(last),
        ..Entry::default()
    };
    match extra.op {
        ExtraOp::Write => {}
        ExtraOp::WriteImm(imm) => {
            entry.imm = imm;
            entry.flags |= ring::IMM;
        }
        ExtraOp::Send => entry.flags |= ring::SEND,
        ExtraOp::SendHead if extra.bytes.is_empty() || extra.pieces().nth(1).is_none() => {
            entry.flags |= ring::SEND;
        }
        ExtraOp::SendHead => entry.flags |= ring::SEND | ring::HEAD,
    }
    let mut list = None;
    if entry.len != 0 && !extra.gather.is_empty() {
        if !extra.pieces().all(|sge| readable(sge.local_key, sge.addr, u64::from(sge.len_bytes)).is_some()) {
            entry.flags |= ring::FAULT;
        }
        list = Some(send.keep_list(extra.pieces()));
    } else if entry.len != 0 {
        let kept = extra.bytes.len() <= INLINE_BYTES && send.keep_payload(shared, &mut entry, extra.bytes);
        if !kept {
            (entry.own_addr, entry.own_key) = extra.staged.unwrap_or_default();
            if readable(entry.own_key, entry.own_addr, u64::from(entry.len)).is_none() {
                entry.flags |= ring::FAULT;
            }
        }
    }
    send.push(Item { entry, seq: batch.first_seq + last as u64, list });
}

const _: () = assert!(INLINE_PROGRESS_BYTES <= inner::SLICE_BYTES);
