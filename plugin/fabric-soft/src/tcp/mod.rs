//! TCP between any two hosts, with the semantics of reliable connections.
//!
//! One connection per endpoint, one listener per fabric. Frames ([`frame`]) are sent straight from application memory and
//! received straight into registered memory, after the receiver has checked key, bounds and permission; a WRITE is
//! acknowledged only when it is placed. Whoever has a moment moves the bytes: `poll` a little, `serve` more, a few IO
//! threads what is large ([`pump`]).

mod accept;
mod counters;
mod dial;
mod endpoint;
pub mod frame;
mod guards;
mod hello;
pub mod net_addr;
mod pump;
mod receive;
mod send_queue;
mod shared;
mod sys;
mod transmit;
mod workers;

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_fabric::{
    Batch, Caps, Completion, EndpointConfig, EndpointId, Fabric, FabricError, INLINE_PROGRESS_BYTES, Keys,
    Memory, PostError, RecvSlot, Rest, Untaken,
};
use parking_lot::Mutex;
use serde_json::json;

use accept::Acceptor;
use endpoint::{Endpoint, State};
use hello::Address;
use net_addr::{NetAddr, local_candidates};
use shared::Shared;
use sys::Options;
use workers::Workers;

use crate::lists::MAX_SEND_SGE;

/// Longest work request.
pub const MAX_MESSAGE_BYTES: u32 = 16 << 20;
/// Longest [`baton_fabric::Extra`] that `post` copies.
pub const INLINE_BYTES: usize = 8192;
/// Longer messages of two steps gain nothing: what waits for its turn in a socket is in no cache any more when it comes.
const HEADED_BYTES: u32 = 64 * 1024;
/// `post` itself sends no more than this.
const POST_BYTES: u64 = 64 * 1024;
/// From so many queued bytes on an IO thread helps.
const HAND_OVER_BYTES: u64 = 1 << 20;
const MAX_DEPTH: u32 = 1 << 16;
/// Moving so much at once says that more of it is most likely on its way ...
const BULK_BYTES: usize = 16 * 1024;
/// ... and going to sleep and being woken would take longer than the next part of it.
const BULK_LINGER: Duration = Duration::from_micros(40);

/// How a [`TcpFabric`] is set up.
#[derive(Clone, Debug)]
pub struct TcpConfig {
    /// Where to listen; by default at all addresses. Without ports, or with port 0, the kernel chooses the port.
    pub listen: Option<NetAddr>,
    /// Addresses that peers are told instead of those found here; without a port, with the listener's.
    pub advertise: Vec<NetAddr>,
    /// A peer that acknowledges nothing for so long is gone.
    pub user_timeout: Duration,
    /// Buffer of a socket in each direction; 0: as the system sizes it.
    pub socket_buffer_bytes: usize,
    /// Threads that send bulk while the application computes. Without any, a caller that polls sends it, or from a
    /// millisecond on the service thread.
    pub io_threads: usize,
}

impl Default for TcpConfig {
    fn default() -> TcpConfig {
        TcpConfig {
            listen: None,
            advertise: Vec::new(),
            user_timeout: Duration::from_secs(4),
            socket_buffer_bytes: 4 << 20,
            // Callers that wait by polling send as well; a thread beside them would fight them, or the receiver, for a core.
            io_threads: if cpus() <= 2 { 0 } else { 2 },
        }
    }
}

fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The fabric `tcp`.
pub struct TcpFabric {
    shared: Arc<Shared>,
    candidates: Vec<NetAddr>,
    io_threads: Mutex<Vec<JoinHandle<()>>>,
}

impl TcpFabric {
    /// Listens and starts the IO threads.
    pub fn new(config: TcpConfig) -> Result<Arc<TcpFabric>, FabricError> {
        let acceptor = Acceptor::new(config.listen.as_ref())?;
        let candidates = candidates(&config, &acceptor)?;
        let options = Options { buffer_bytes: config.socket_buffer_bytes, user_timeout: config.user_timeout };
        let shared = Arc::new(Shared::new(acceptor, options, Workers::new(config.io_threads > 0))?);
        let io_threads = Mutex::new(workers::start(&shared, config.io_threads)?);
        Ok(Arc::new(TcpFabric { shared, candidates, io_threads }))
    }

    /// Addresses that peers are told, in the order in which they try them.
    pub fn candidates(&self) -> &[NetAddr] {
        &self.candidates
    }

    fn find(&self, id: EndpointId) -> Result<Arc<Endpoint>, FabricError> {
        self.shared
            .endpoint(id)
            .ok_or_else(|| FabricError::NotFound(format!("tcp has no endpoint {id:?} (any more)")))
    }

    fn address_with(&self, token: Option<&[u8; 16]>) -> serde_json::Value {
        serde_json::to_value(Address::new(&self.candidates, token)).expect("plain strings and numbers")
    }
}

fn candidates(config: &TcpConfig, acceptor: &Acceptor) -> Result<Vec<NetAddr>, FabricError> {
    let at = acceptor.address();
    let with_port = |addr: &NetAddr| match addr.ports {
        Some(p) if p.first == p.last && p.first != 0 => Ok(addr.clone()),
        None => Ok(addr.with_port(at.port())),
        Some(_) => Err(FabricError::Invalid(format!(
            "advertised address {addr}: one port, or none for the listener's"
        ))),
    };
    if !config.advertise.is_empty() {
        return config.advertise.iter().map(with_port).collect();
    }
    if let Some(listen) = config.listen.as_ref().filter(|l| !l.ip.is_unspecified()) {
        return Ok(vec![listen.with_port(at.port())]);
    }
    let found = local_candidates().into_iter().filter(|a| at.is_ipv6() || a.ip.is_ipv4());
    let found: Vec<NetAddr> = found.map(|a| a.with_port(at.port())).collect();
    if found.is_empty() {
        return Err(FabricError::System(
            "no interface of this host is up; name an address to advertise".into(),
        ));
    }
    Ok(found)
}

impl Fabric for TcpFabric {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn caps(&self) -> Caps {
        Caps {
            max_sq_depth: MAX_DEPTH,
            max_rq_depth: MAX_DEPTH,
            max_message_bytes: MAX_MESSAGE_BYTES,
            longest_read_bytes: MAX_MESSAGE_BYTES,
            inline_bytes: INLINE_BYTES as u32,
            max_send_sge: MAX_SEND_SGE,
            default_lanes: if cpus() <= 2 { 1 } else { 2 },
            lane_sq_depth: 1024,
            stripe_min_bytes: 8 << 20,
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
        self.address_with(None)
    }

    fn reach(&self, peer: &serde_json::Value, deadline: Instant) -> Result<(), String> {
        let address = Address::parse(peer)?;
        dial::probe(&self.shared, &address, deadline).map_err(|e| format!("tcp: {e}"))
    }

    fn register(&self, memory: &Memory) -> Result<Keys, FabricError> {
        self.shared.regions.register(memory)
    }

    fn revoke(&self, keys: Keys) {
        self.shared.regions.revoke(keys);
    }

    fn deregister(&self, keys: Keys, deadline: Instant) -> Result<(), FabricError> {
        self.shared.regions.deregister(keys, deadline)
    }

    fn create_endpoint(
        &self,
        config: &EndpointConfig,
    ) -> Result<(EndpointId, serde_json::Value), FabricError> {
        for (what, depth) in [("send queue", config.sq_depth), ("receive queue", config.rq_depth)] {
            if depth == 0 || depth > MAX_DEPTH {
                return Err(FabricError::Invalid(format!(
                    "{what} of depth {depth}; tcp takes 1 to {MAX_DEPTH}"
                )));
            }
        }
        if !(1..=MAX_SEND_SGE).contains(&config.max_sge) {
            return Err(FabricError::Invalid(format!(
                "SENDs of {} pieces; tcp takes 1 to {MAX_SEND_SGE}",
                config.max_sge
            )));
        }
        let endpoint = self.shared.create(config)?;
        Ok((endpoint.id, self.address_with(Some(&endpoint.token))))
    }

    fn connect_endpoint(
        &self,
        endpoint: EndpointId,
        peer: &serde_json::Value,
        deadline: Instant,
    ) -> Result<(), FabricError> {
        dial::connect(&self.shared, &self.find(endpoint)?, peer, deadline)
    }

    fn post_recv(&self, endpoint: EndpointId, slots: &[RecvSlot]) -> Result<(), FabricError> {
        let endpoint = self.find(endpoint)?;
        let mut rq = endpoint.rq.lock();
        if rq.dead {
            for slot in slots {
                self.shared.complete(&endpoint, endpoint::flushed_recv(endpoint.id, slot.id));
            }
            drop(rq);
            self.shared.wake();
            return Ok(());
        }
        let (used, depth) = (rq.slots.len(), endpoint.config.rq_depth as usize);
        if used + slots.len() > depth {
            return Err(FabricError::Limit(format!(
                "receive queue of endpoint {:?}: {used} of {depth} RECVs are posted, {} more do not fit",
                endpoint.id,
                slots.len()
            )));
        }
        rq.slots.extend(slots);
        drop(rq);
        if endpoint.rx_stalled.swap(false, Ordering::SeqCst) {
            self.shared.push_ready(&endpoint);
            self.shared.wake();
        }
        Ok(())
    }

    fn receive_heads(&self, endpoint: EndpointId) -> bool {
        let Some(endpoint) = self.shared.endpoint(endpoint) else { return false };
        endpoint.heads.store(true, Ordering::SeqCst);
        true
    }

    fn take(&self, endpoint: EndpointId, rests: &[Rest]) -> (usize, Option<Untaken>) {
        let Some(endpoint) = self.shared.endpoint(endpoint) else { return (0, Some(Untaken::Gone)) };
        let outcome = pump::take(&self.shared, &endpoint, rests);
        if self.shared.has_completions() {
            self.shared.wake();
        } else if self.shared.has_ready() {
            self.shared.wake_later();
        }
        outcome
    }

    fn post(&self, endpoint: EndpointId, batch: &Batch<'_>) -> Result<(), PostError> {
        let refuse = |error| PostError { taken: 0, error };
        let endpoint = self.find(endpoint).map_err(refuse)?;
        if endpoint.state() == State::New {
            return Err(refuse(FabricError::Invalid(format!("endpoint {:?} is not connected", endpoint.id))));
        }
        let waiting = {
            let mut sq = endpoint.sq.lock();
            sq.push(batch, &mut |c| self.shared.complete(&endpoint, c)).map_err(refuse)?;
            sq.waiting_bytes
        };
        endpoint.tx_work.store(true, Ordering::SeqCst);
        if waiting <= POST_BYTES {
            pump::send(&self.shared, &endpoint, POST_BYTES as usize);
        } else {
            pump::settle(&self.shared, &endpoint);
            if waiting > HAND_OVER_BYTES {
                self.shared.workers.hand_over(&endpoint);
            }
        }
        if self.shared.has_completions() {
            self.shared.wake();
        } else if self.shared.has_ready() {
            self.shared.wake_later();
        }
        Ok(())
    }

    fn poll(&self, out: &mut [Completion]) -> usize {
        let n = self.shared.take_completions(out);
        if n > 0 || out.is_empty() || !self.shared.is_look_due() {
            return n;
        }
        let Some(_poller) = self.shared.poller.try_lock() else { return 0 };
        let moved = match self.shared.warm() {
            Some(endpoint) => pump::look(&self.shared, &endpoint, INLINE_PROGRESS_BYTES),
            None => {
                self.shared.collect();
                0
            }
        };
        self.shared.pay_when_idle(moved == 0 && !self.shared.has_ready());
        pump::run_ready(&self.shared, INLINE_PROGRESS_BYTES);
        let n = self.shared.take_completions(out);
        if self.shared.has_ready() || self.shared.has_debts() {
            self.shared.wake_later();
        }
        n
    }

    fn serve(&self, budget_bytes: usize) -> bool {
        let mut left = budget_bytes;
        // Rests are taken between two calls, and those that are not all here are awaited like other bulk.
        let mut bulk = self.shared.awaited.swap(false, Ordering::Relaxed).then(Instant::now);
        loop {
            self.shared.collect();
            if !self.shared.has_ready() {
                self.shared.pay();
            }
            if self.shared.has_ready() {
                let moved = pump::run_ready(&self.shared, left.max(1));
                left = left.saturating_sub(moved);
                if left == 0 {
                    return true;
                }
                if moved >= BULK_BYTES {
                    bulk = Some(Instant::now());
                }
            } else if bulk.is_none_or(|since| since.elapsed() >= BULK_LINGER) {
                return false;
            }
        }
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.shared.epoll.as_fd().as_raw_fd())
    }

    fn arm(&self) -> bool {
        self.shared.arm()
    }

    fn disarm(&self) {
        self.shared.disarm();
    }

    fn fence(&self, endpoint: EndpointId) {
        if let Some(endpoint) = self.shared.endpoint(endpoint) {
            endpoint.fail(&self.shared, None);
            endpoint.try_flush(&self.shared);
            self.shared.wake();
        }
    }

    fn is_quiet(&self, endpoint: EndpointId) -> bool {
        let Some(endpoint) = self.shared.endpoint(endpoint) else { return true };
        endpoint.try_flush(&self.shared);
        endpoint.is_quiet()
    }

    fn destroy_endpoint(&self, endpoint: EndpointId) {
        if let Some(endpoint) = self.shared.endpoint(endpoint) {
            endpoint.fail(&self.shared, None);
            self.shared.forget(&endpoint);
            endpoint.try_flush(&self.shared);
        }
    }

    fn stats(&self) -> serde_json::Value {
        let endpoints: Vec<_> = self.shared.all_endpoints().iter().map(|e| describe(e)).collect();
        json!({
            "fabric": "tcp",
            "candidates": self.candidates.iter().map(NetAddr::to_string).collect::<Vec<_>>(),
            "half_open": self.shared.acceptor.half_open(),
            "counters": self.shared.counters.to_json(),
            "endpoints": endpoints,
        })
    }
}

fn describe(endpoint: &Endpoint) -> serde_json::Value {
    let (outstanding, unsent, reads) = endpoint.sq.lock().counts();
    json!({
        "slot": endpoint.id.slot,
        "generation": endpoint.id.generation,
        "state": format!("{:?}", endpoint.state()),
        "control": endpoint.config.control,
        "outstanding": outstanding,
        "unsent": unsent,
        "reads": reads,
        "recvs": endpoint.rq.lock().slots.len(),
        "placed": endpoint.placed.load(Ordering::Relaxed),
        "waits_for_recv": endpoint.stalled_since.lock().map(|since| since.elapsed().as_micros() as u64),
        "waits_for_socket": endpoint.tx_blocked.load(Ordering::Relaxed),
    })
}

impl Drop for TcpFabric {
    fn drop(&mut self) {
        self.shared.workers.stop();
        for thread in self.io_threads.get_mut().drain(..) {
            // It ended or it panicked; either way it is gone.
            let _ = thread.join();
        }
        for endpoint in self.shared.all_endpoints() {
            endpoint.fail(&self.shared, None);
            self.shared.forget(&endpoint);
        }
    }
}
