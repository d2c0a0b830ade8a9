//! Plain data of the seam.

/// An endpoint (queue pair) of one fabric. A slot is reused with another generation, so a stale id never names a stranger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId {
    /// Index in the fabric's table.
    pub slot: u32,
    /// How often that slot was used before.
    pub generation: u32,
}

/// What an endpoint is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointConfig {
    /// Work requests outstanding at most.
    pub sq_depth: u32,
    /// RECVs posted and unconsumed at most.
    pub rq_depth: u32,
    /// This side sent HELLO: of the two endpoints of a connection exactly one is active (it dials, where a fabric dials).
    pub active: bool,
    /// The control endpoint of a session: low volume, never behind bulk data.
    pub control: bool,
    /// Pieces of own memory that one of its SENDs is made of at most ([`Extra::gather`]), up to [`Caps::max_send_sge`]; 1 where nothing is gathered.
    pub max_sge: u32,
    /// Its peer may READ and WRITE through it. Without, a fabric refuses that as far as it can, whatever is registered.
    pub exposed: bool,
}

/// Kind of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Host memory.
    Dram,
    /// Memory of an accelerator.
    Vram,
}

/// Memory to register.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// First byte.
    pub addr: u64,
    /// Length.
    pub len_bytes: u64,
    /// Kind.
    pub kind: MemoryKind,
    /// Device index.
    pub device: u64,
    /// Peers may read.
    pub remote_read: bool,
    /// Peers may write.
    pub remote_write: bool,
    /// Writes must become visible in order: words that are polled without a completion. (Bulk memory is faster without.)
    pub ordered: bool,
    /// The engine's own: certainly mapped and writable until [`crate::Fabric::deregister`] has returned `Ok`, and looked at with atomic loads
    /// where something may be arriving. So a fabric may store there itself, word after word. Any other memory may be unmapped at any time,
    /// which is an error of a work request and never a signal.
    pub mapped: bool,
}

/// Keys of a registration on one fabric: `local` for own work requests, `remote` for peers'. Verbs uses the low 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Hash)]
pub struct Keys {
    /// Names the region in [`Template::local_key`].
    pub local: u64,
    /// Names the region in a peer's [`Template::remote_key`]; unguessable.
    pub remote: u64,
}

/// All keys of a registration: one pair per *rail* (a device of a fabric that runs several) and *segment* (a part of the
/// region that a device registers at once, where it cannot register the whole). Most regions have one of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegionKeys {
    /// Length of every segment but the last, which may be shorter, counted from the region's first byte. `u64::MAX`: one segment.
    pub segment_bytes: u64,
    /// How many rails there are, at least 1.
    pub rails: u8,
    /// Keys for own work requests; index `rail * segments + segment`.
    pub local: Box<[u64]>,
    /// Keys for peers' work requests; same index.
    pub remote: Box<[u64]>,
}

impl RegionKeys {
    /// One rail, one segment.
    pub fn whole(keys: Keys) -> RegionKeys {
        RegionKeys {
            segment_bytes: u64::MAX,
            rails: 1,
            local: [keys.local].into(),
            remote: [keys.remote].into(),
        }
    }

    /// Segments per rail.
    pub fn segments(&self) -> usize {
        self.local.len() / usize::from(self.rails.max(1))
    }

    /// Key with which an endpoint on `rail` names `offset .. offset + len_bytes` of the region in its own work requests;
    /// `None`: no such rail, or not inside one segment.
    pub fn local_key(&self, rail: u8, offset: u64, len_bytes: u64) -> Option<u64> {
        self.index(rail, offset, len_bytes).and_then(|index| self.local.get(index).copied())
    }

    /// The same for the peer of such an endpoint.
    pub fn remote_key(&self, rail: u8, offset: u64, len_bytes: u64) -> Option<u64> {
        self.index(rail, offset, len_bytes).and_then(|index| self.remote.get(index).copied())
    }

    fn index(&self, rail: u8, offset: u64, len_bytes: u64) -> Option<usize> {
        let last = offset.checked_add(len_bytes.max(1) - 1)?;
        let segment = offset / self.segment_bytes.max(1);
        let inside = rail < self.rails
            && segment == last / self.segment_bytes.max(1)
            && segment < self.segments() as u64;
        inside.then(|| usize::from(rail) * self.segments() + segment as usize)
    }
}

/// Most rails of a fabric.
pub const MAX_RAILS: u8 = 16;

/// What a fabric knows of the peer when it creates the endpoints of a session.
#[derive(Clone, Copy, Debug)]
pub enum PeerView<'a> {
    /// Nothing.
    Unknown,
    /// The peer fabric's [`crate::Fabric::address`], from its connection information.
    Fabric(&'a serde_json::Value),
    /// The addresses of the endpoints that it offers: the n-th one created here will be connected to the n-th of these.
    Endpoints(&'a [serde_json::Value]),
}

/// Operation of a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Op {
    /// Remote into local memory.
    Read = 0,
    /// Local into remote memory.
    Write = 1,
}

/// One work request of a prepared transfer, keys baked in; immutable, shared by all posts of the request.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Template {
    /// Local address.
    pub local_addr: u64,
    /// Remote address.
    pub remote_addr: u64,
    /// [`Keys::local`] of the local region.
    pub local_key: u64,
    /// [`Keys::remote`] of the remote region.
    pub remote_key: u64,
    /// Length, never 0.
    pub len_bytes: u32,
    /// Operation.
    pub op: Op,
    /// Zero.
    pub reserved: [u8; 3],
}

const _: () = assert!(size_of::<Template>() == 40);

/// A piece of own registered memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// First byte.
    pub addr: u64,
    /// [`Keys::local`] of that memory.
    pub local_key: u64,
    /// Length.
    pub len_bytes: u32,
}

/// One more work request behind the templates of a batch: a record, a bare tail, a credit word, a control frame or a data message.
#[derive(Clone, Copy, Debug)]
pub struct Extra<'a> {
    /// What it is.
    pub op: ExtraOp,
    /// Its bytes; may be empty. Up to [`Caps::inline_bytes`] they are copied by `post`; longer ones are read from `staged` later.
    pub bytes: &'a [u8],
    /// The same bytes in registered memory that stays untouched until completion. Required when `bytes` is longer than the inline limit.
    pub staged: Option<(u64, u64)>,
    /// `Send` only: what follows `bytes`, in order, read from where it lies until completion. With it `bytes`, if there are any, must be
    /// staged, however short. Pieces without length are left out, and their keys are not looked at.
    pub gather: &'a [Sge],
    /// Target address (not for `Send`).
    pub remote_addr: u64,
    /// Target key (not for `Send`).
    pub remote_key: u64,
    /// Start only after all earlier READs of this endpoint have completed.
    pub fenced: bool,
}

impl Extra<'_> {
    /// Bytes in all.
    pub fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64 + self.gather.iter().map(|sge| u64::from(sge.len_bytes)).sum::<u64>()
    }

    /// What it is made of where something is gathered: the staged bytes, then the pieces, without those that are empty.
    pub fn pieces(&self) -> impl Iterator<Item = Sge> {
        let (addr, local_key) = self.staged.unwrap_or_default();
        let prefix = Sge { addr, local_key, len_bytes: self.bytes.len() as u32 };
        std::iter::once(prefix).chain(self.gather.iter().copied()).filter(|sge| sge.len_bytes > 0)
    }

    /// Whether the gather list is one that an endpoint with so many pieces and messages of so many bytes at most can send.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check_gather(&self, max_sge: u32, max_message_bytes: u32) -> Result<(), FabricError> {
        if self.gather.is_empty() {
            return Ok(());
        }
        if !matches!(self.op, ExtraOp::Send | ExtraOp::SendHead) {
            return Err(FabricError::Invalid(format!(
                "{:?} with a gather list: only a SEND has one",
                self.op
            )));
        }
        if !self.bytes.is_empty() && self.staged.is_none() {
            return Err(FabricError::Invalid(format!(
                "{} bytes in front of a gather list must be staged in registered memory",
                self.bytes.len()
            )));
        }
        let (pieces, len) = (self.pieces().count(), self.len_bytes());
        if pieces > max_sge as usize {
            return Err(FabricError::Limit(format!(
                "a SEND of {pieces} pieces: the endpoint was made for {max_sge}"
            )));
        }
        if len > u64::from(max_message_bytes) {
            return Err(FabricError::Limit(format!(
                "a SEND of {len} bytes in {pieces} pieces: the limit is {max_message_bytes}"
            )));
        }
        Ok(())
    }
}

/// Operation of an [`Extra`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtraOp {
    /// RDMA WRITE of `bytes`.
    Write,
    /// RDMA WRITE of `bytes` that also consumes a RECV of the target, which sees this immediate.
    WriteImm(u32),
    /// SEND of `bytes` and what is gathered into the target's next RECV slot.
    Send,
    /// The same, and `bytes` are enough for the target to know where the rest goes: it may take it there at once ([`crate::Fabric::take`]).
    /// Fabrics without that send it like any other.
    SendHead,
}

/// A chain of work requests for one doorbell: `work` in order, then `extra`.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Plain READs or WRITEs.
    pub work: &'a [Template],
    /// The last of `work`, a WRITE, carries this immediate.
    pub imm: Option<u32>,
    /// One more work request.
    pub extra: Option<Extra<'a>>,
    /// Ledger sequence of the first work request; the others follow on.
    pub first_seq: u64,
    /// Request a completion for the last work request of this batch. (Errors complete in any case.)
    pub signaled: bool,
    /// Nobody waits for that completion: where the peer has to send something for it, it may come along with what the peer sends next,
    /// or once the peer has nothing else to do.
    pub patient: bool,
}

impl Batch<'_> {
    /// Work requests in the chain.
    pub fn len(&self) -> usize {
        self.work.len() + usize::from(self.extra.is_some())
    }
    /// Whether there is nothing to post.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A RECV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RecvSlot {
    /// Where a SEND's bytes go.
    pub addr: u64,
    /// [`Keys::local`] of that memory.
    pub local_key: u64,
    /// Room in bytes; 0 for a RECV that only serves immediates.
    pub len_bytes: u32,
    /// Comes back in [`Completion::seq`].
    pub id: u32,
}

/// Which queue a completion is from, and what arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionKind {
    /// All work requests of the endpoint up to `seq` are done (or, with an error, this one failed).
    Send,
    /// An immediate arrived; its WRITE is placed and visible.
    RecvImm(u32),
    /// A SEND of `len_bytes` arrived in slot `seq`.
    RecvSend,
    /// Of a SEND of `len_bytes` the first `head_bytes` arrived in slot `seq`. The rest waits for [`crate::Fabric::take`], and so does whatever
    /// was sent behind it.
    RecvHead {
        /// Bytes that are there.
        head_bytes: u32,
    },
    /// More of the rest that [`crate::Fabric::take`] has found incomplete is here.
    RecvMore,
    /// A RECV was flushed.
    RecvFlushed,
}

/// Where the rest of a message goes whose head was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    /// Its first byte, in any memory of this process; `None`: nowhere, it is not wanted.
    pub to: Option<u64>,
    /// Bytes: those of the message without its head.
    pub len_bytes: u32,
}

/// Why a rest was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Untaken {
    /// It is not all here: [`CompletionKind::RecvMore`] tells when to ask again, for the same place or for none.
    Later,
    /// Memory at its place cannot be written. What is left of it is dropped, as if it was not wanted.
    Unmapped,
    /// The endpoint is in error.
    Gone,
}

/// Outcome of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WcStatus {
    /// Done.
    Success,
    /// Not executed, or not known to be: the endpoint is in error, because of another work request or of something else.
    Flushed,
    /// A local key, bound or memory fault: the fault of this side's request.
    LocalAccess,
    /// The target refused key, bounds or permission.
    RemoteAccess,
    /// The target had no RECV posted.
    RnrExceeded,
    /// A SEND was longer than the RECV slot.
    RemoteLength,
    /// The peer does not answer, or its memory is gone.
    PeerGone,
}

/// What [`crate::Fabric::poll`] hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Whose.
    pub endpoint: EndpointId,
    /// Which.
    pub kind: CompletionKind,
    /// Outcome.
    pub status: WcStatus,
    /// Send: ledger sequence. Receive: id of the RECV slot.
    pub seq: u64,
    /// Bytes received.
    pub len_bytes: u32,
}

impl Completion {
    /// A value to fill buffers with.
    pub const EMPTY: Completion = Completion {
        endpoint: EndpointId { slot: u32::MAX, generation: 0 },
        kind: CompletionKind::Send,
        status: WcStatus::Success,
        seq: 0,
        len_bytes: 0,
    };
}

/// What a fabric can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Largest send queue.
    pub max_sq_depth: u32,
    /// Largest receive queue.
    pub max_rq_depth: u32,
    /// Longest single work request in bytes.
    pub max_message_bytes: u32,
    /// Longest READ that goes well, at most [`Caps::max_message_bytes`]: a longer one is not refused, but slow.
    pub longest_read_bytes: u32,
    /// Longest [`Extra::bytes`] that `post` copies itself.
    pub inline_bytes: u32,
    /// Largest [`EndpointConfig::max_sge`], at least 1.
    pub max_send_sge: u32,
    /// Data lanes that make sense per session by default.
    pub default_lanes: u8,
    /// Send-queue depth of a data lane that reads and writes, by default; at most [`Caps::max_sq_depth`] counts.
    pub lane_sq_depth: u32,
    /// A transfer below this many bytes stays on one lane.
    pub stripe_min_bytes: u64,
    /// WRITE_WITH_IMM exists.
    pub immediate: bool,
    /// The owner of memory alone stops all access to it in `deregister`; peers need not acknowledge a revoke.
    pub owner_revokes: bool,
    /// [`crate::Fabric::serve`] has work to do.
    pub needs_service: bool,
    /// A GPU's memory can be registered.
    pub vram: bool,
    /// READs may stand behind a fenced work request in flight. Where not, it has to complete before the next READ is posted.
    pub reads_behind_fence: bool,
    /// How long messages should be that are received in two steps ([`crate::Fabric::receive_heads`]); 0 where none are.
    pub headed_bytes: u32,
    /// Many blocks that are no longer than this each are faster packed into SENDs, whoever sends; 0 where each is as good by itself.
    pub pack_below_bytes: u32,
}

/// Why [`crate::Fabric::post`] stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error} ({taken} work requests of the batch were taken)")]
pub struct PostError {
    /// Work requests that were taken nevertheless; they will complete.
    pub taken: usize,
    /// Why not more.
    pub error: FabricError,
}

/// An error of a fabric; the text says who, which value, which limit, what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FabricError {
    /// No such endpoint or key (any more).
    #[error("not found: {0}")]
    NotFound(String),
    /// A named limit.
    #[error("limit reached: {0}")]
    Limit(String),
    /// An argument.
    #[error("invalid: {0}")]
    Invalid(String),
    /// Not offered here.
    #[error("not supported: {0}")]
    Unsupported(String),
    /// The deadline passed.
    #[error("timed out: {0}")]
    Timeout(String),
    /// The peer is gone or refused.
    #[error("peer: {0}")]
    Peer(String),
    /// A system call or device failed.
    #[error("{0}")]
    System(String),
}
