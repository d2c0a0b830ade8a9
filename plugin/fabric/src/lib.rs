//! The fabric seam: queue-pair semantics behind one object-safe trait.
//!
//! A [`Fabric`] moves bytes like an RDMA NIC with reliable connections: work requests of one endpoint (a queue
//! pair) start and complete in order, a completed WRITE is placed and visible at its target, keys and bounds are
//! checked by the owner of the memory, an immediate consumes a RECV of the target. It knows nothing of transfers,
//! notifications or credits; those are `baton-core`'s. Every implementation passes the suite in
//! [`conformance`] (feature `conformance`).

mod types;

pub use types::*;

#[cfg(feature = "conformance")]
pub mod conformance;

use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};

/// A NIC, real, software or simulated. All calls may come from any thread and from several at once;
/// calls that name one endpoint's send queue ([`Fabric::post`]) are serialised per endpoint by the caller.
pub trait Fabric: Send + Sync {
    /// Short name as in `BATON_FABRIC`: `verbs`, `local`, `tcp` or `sim`.
    fn name(&self) -> &'static str;

    /// What this fabric can do, constant after creation.
    fn caps(&self) -> Caps;

    /// What a peer needs in order to judge whether it reaches this fabric and to connect to it; goes into HELLO and REPLY.
    fn address(&self) -> serde_json::Value;

    /// Whether the fabric of a peer, by its [`Fabric::address`], can be used from here (both probes of WIRE §2 are
    /// one call of this on each side). The error is the reason for the log. May block up to `deadline`.
    fn reach(&self, peer: &serde_json::Value, deadline: Instant) -> Result<(), String>;

    /// Registers memory for local use and, as `memory.access` permits, for peers.
    ///
    /// # Safety of use
    /// The memory must stay valid until [`Fabric::deregister`] has returned.
    fn register(&self, memory: &Memory) -> Result<Keys, FabricError>;

    /// Registers memory that is a shared mapping of `file` from its first byte on. `file` is a memfd sealed against shrinking
    /// and growing, which a fabric may let peers on this host map.
    ///
    /// # Safety of use
    /// As [`Fabric::register`]: mapped, readable and writable; and `file` stays open until then.
    fn register_shared(&self, memory: &Memory, file: BorrowedFd<'_>) -> Result<Keys, FabricError> {
        let _ = file;
        self.register(memory)
    }

    /// From now on no new access to the region starts; never blocks.
    fn revoke(&self, keys: Keys);

    /// Revokes and waits until nothing touches the region any more, at most until `deadline`; an error names what still does,
    /// and the region then stays known so that the call can be repeated.
    fn deregister(&self, keys: Keys, deadline: Instant) -> Result<(), FabricError>;

    /// Creates an endpoint that is not yet connected, and the address that its peer endpoint needs.
    fn create_endpoint(
        &self,
        config: &EndpointConfig,
    ) -> Result<(EndpointId, serde_json::Value), FabricError>;

    /// Creates the endpoints of one session, control first: all of them or none. They are used, fenced and destroyed together, so a fabric may
    /// let them share a completion queue; one with several devices chooses each endpoint's rail so that it reaches the peer's.
    fn create_endpoints(
        &self,
        configs: &[EndpointConfig],
        peer: PeerView<'_>,
    ) -> Result<Vec<(EndpointId, serde_json::Value)>, FabricError> {
        let _ = peer;
        let mut made = Vec::with_capacity(configs.len());
        for config in configs {
            match self.create_endpoint(config) {
                Ok(endpoint) => made.push(endpoint),
                Err(e) => {
                    made.iter().for_each(|(endpoint, _)| self.fence(*endpoint));
                    made.iter().for_each(|(endpoint, _)| self.destroy_endpoint(*endpoint));
                    return Err(e);
                }
            }
        }
        Ok(made)
    }

    /// How many data lanes to offer to a peer; `peer` is its [`Fabric::address`] where that is known.
    fn lanes_for(&self, peer: Option<&serde_json::Value>) -> u8 {
        let _ = peer;
        self.caps().default_lanes
    }

    /// The rail of an endpoint, below [`MAX_RAILS`]: which of the keys of [`Fabric::region_keys`] its work requests need.
    fn rail(&self, endpoint: EndpointId) -> u8 {
        let _ = endpoint;
        0
    }

    /// All keys of a registration that [`Fabric::register`] made.
    fn region_keys(&self, keys: Keys) -> RegionKeys {
        RegionKeys::whole(keys)
    }

    /// How long an unanswered work request may take at most until the fabric itself reports it; zero where nothing is sent again.
    fn retry_time(&self) -> Duration {
        Duration::ZERO
    }

    /// Looks after what is not bound to an endpoint, such as events of the device. Called by the service thread in every turn; never blocks.
    fn tend(&self) {}

    /// Connects an endpoint to the one that `peer` describes. After it returns `Ok`, the endpoint may post, and receives what the peer posts.
    /// May block up to `deadline`; the caller is an executor thread.
    fn connect_endpoint(
        &self,
        endpoint: EndpointId,
        peer: &serde_json::Value,
        deadline: Instant,
    ) -> Result<(), FabricError>;

    /// Adds RECVs in order. An empty slot (`len_bytes` 0) serves immediates and zero-length messages only.
    fn post_recv(&self, endpoint: EndpointId, slots: &[RecvSlot]) -> Result<(), FabricError>;

    /// From now on SENDs of the peer that have a head ([`ExtraOp::SendHead`]) are received in two steps, [`CompletionKind::RecvHead`] and
    /// [`Fabric::take`]: the rest needs no place in the RECV's slot, and one copy less. `false`: this fabric puts
    /// every message into its slot.
    fn receive_heads(&self, endpoint: EndpointId) -> bool {
        let _ = endpoint;
        false
    }

    /// Moves the rests of the oldest messages of which only the head was received, in order, each to where it is told to: on the caller's
    /// thread, and not after this call. Returns how many are there or dropped, counted from the first, and why the next is not; without a
    /// reason it was enough for one call. Never blocks. A message that is taken completes at its sender.
    ///
    /// # Safety of use
    /// Nothing else uses the places meanwhile. Whether they are there is found out.
    fn take(&self, endpoint: EndpointId, rests: &[Rest]) -> (usize, Option<Untaken>) {
        let _ = (endpoint, rests);
        (0, Some(Untaken::Gone))
    }

    /// Posts a batch. The caller has made sure (ledger) that the send queue has room for all of it; everything is taken or
    /// the error tells how many work requests were, and the endpoint must then be fenced. Never blocks, never copies bulk data.
    fn post(&self, endpoint: EndpointId, batch: &Batch<'_>) -> Result<(), PostError>;

    /// Takes completions, never blocks. May move a bounded amount of bulk data ([`INLINE_PROGRESS_BYTES`]) on the caller's thread.
    /// Returns how many of `out` were written. When another thread is already polling it may return 0 at once.
    fn poll(&self, out: &mut [Completion]) -> usize;

    /// Software fabrics: does up to `budget_bytes` of the NIC's own work, inbound and outbound. `true`: there is more.
    /// Hardware fabrics do nothing and return `false`.
    fn serve(&self, budget_bytes: usize) -> bool;

    /// File descriptor that becomes readable when, after [`Fabric::arm`], there is something to serve or to poll. One per fabric, for its whole life.
    fn event_fd(&self) -> Option<RawFd>;

    /// Announces that the caller is about to sleep on [`Fabric::event_fd`]. `false`: something is waiting already, do not sleep.
    /// Consumes earlier wake-ups. One thread (the service thread) arms.
    fn arm(&self) -> bool;

    /// Takes back [`Fabric::arm`]: peers need not wake anybody while a caller polls.
    fn disarm(&self);

    /// Moves the endpoint to the error state: nothing more is posted or accepted; outstanding work requests and RECVs come out of
    /// [`Fabric::poll`] as `Flushed` (those that did succeed, or are at fault, as that), in order. Never blocks.
    fn fence(&self, endpoint: EndpointId);

    /// Whether a fenced endpoint touches no memory any more, here or through a peer that pulls from here.
    fn is_quiet(&self, endpoint: EndpointId) -> bool;

    /// Frees a fenced endpoint. Completions not yet polled are dropped; none of it is ever seen again.
    fn destroy_endpoint(&self, endpoint: EndpointId);

    /// Counters and per-endpoint facts for `stats`.
    fn stats(&self) -> serde_json::Value;
}

/// Bulk bytes that one [`Fabric::poll`] may move on the caller's thread.
pub const INLINE_PROGRESS_BYTES: usize = 256 * 1024;
