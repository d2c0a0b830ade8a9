//! Integer codes: statuses, operations, kinds and flags.

/// What an entry returns: zero or positive is an answer, negative an error whose text `last_error` holds.
pub type BatonStatus = i32;

/// Done.
pub const BATON_OK: BatonStatus = 0;
/// Accepted and under way; ask again with `xfer_status`.
pub const BATON_IN_PROGRESS: BatonStatus = 1;
/// The request exists and has never been posted.
pub const BATON_NOT_POSTED: BatonStatus = 2;

/// An argument is outside its documented domain.
pub const BATON_ERR_INVALID_PARAM: BatonStatus = -1;
/// No such peer, region or request; also a remote region whose owner has withdrawn it.
pub const BATON_ERR_NOT_FOUND: BatonStatus = -2;
/// A blob or connection information of another (usually earlier) instance of the peer.
pub const BATON_ERR_STALE: BatonStatus = -3;
/// The peer is gone, unreachable, or was restarted; usable again after new connection information.
pub const BATON_ERR_REMOTE_DISCONNECT: BatonStatus = -4;
/// The request is still in progress and may not be posted again yet.
pub const BATON_ERR_REPOST_ACTIVE: BatonStatus = -5;
/// Memory of the request may still be touched; the release has become a cancel, try again.
pub const BATON_ERR_BUSY: BatonStatus = -6;
/// This engine, fabric or backend does not offer that.
pub const BATON_ERR_UNSUPPORTED: BatonStatus = -7;
/// A named limit was reached; the text has the limit, its value and the value asked for.
pub const BATON_ERR_LIMIT: BatonStatus = -8;
/// A deadline passed.
pub const BATON_ERR_TIMEOUT: BatonStatus = -9;
/// The request was cancelled.
pub const BATON_ERR_CANCELED: BatonStatus = -10;
/// The local side failed (memory, device, system call).
pub const BATON_ERR_LOCAL: BatonStatus = -11;
/// The buffer is too small; the needed size was written, nothing was consumed.
pub const BATON_ERR_TOO_SMALL: BatonStatus = -12;
/// The peer's proof of identity, or ours in its eyes, is wrong.
pub const BATON_ERR_AUTH: BatonStatus = -13;
/// The peer broke the protocol; its session was ended.
pub const BATON_ERR_PROTOCOL: BatonStatus = -14;
/// The engine is being destroyed.
pub const BATON_ERR_SHUTDOWN: BatonStatus = -15;
/// The engine panicked and refuses further work; all its queue pairs are in error.
pub const BATON_ERR_PANIC: BatonStatus = -16;
/// The caller is a forked child of the process that created the engine; nothing was touched.
pub const BATON_ERR_FORKED: BatonStatus = -17;
/// The interface versions do not fit.
pub const BATON_ERR_VERSION: BatonStatus = -18;

/// Operation of a transfer: remote memory into local memory.
pub const BATON_OP_READ: u32 = 0;
/// Operation of a transfer: local memory into remote memory.
pub const BATON_OP_WRITE: u32 = 1;

/// Host memory.
pub const BATON_MEM_DRAM: u32 = 0;
/// Device memory; `device` is the accelerator's index.
pub const BATON_MEM_VRAM: u32 = 1;

/// Peers may read the region.
pub const BATON_ACCESS_REMOTE_READ: u32 = 1;
/// Peers may write the region.
pub const BATON_ACCESS_REMOTE_WRITE: u32 = 2;

/// `post_xfer_req`: this post carries the message given, which may be empty.
pub const BATON_POST_NOTIFY: u32 = 1;
/// `post_xfer_req_with`: this post carries the id given, for the peer's `inbound_status`; with or without a message.
pub const BATON_POST_ID: u32 = 2;

/// `create`: the engine may run a progress thread.
pub const BATON_CREATE_PROGRESS_THREAD: u32 = 1;

/// Hook event: at least one notification is ready for `get_notifs`.
pub const BATON_EVENT_NOTIFICATION: u32 = 1;
/// Hook event: a peer's session ended by failure.
pub const BATON_EVENT_PEER_FAILED: u32 = 2;

/// Log levels, from the least to the most talkative.
pub const BATON_LOG_ERROR: u32 = 1;
/// See [`BATON_LOG_ERROR`].
pub const BATON_LOG_WARN: u32 = 2;
/// See [`BATON_LOG_ERROR`].
pub const BATON_LOG_INFO: u32 = 3;
/// See [`BATON_LOG_ERROR`].
pub const BATON_LOG_DEBUG: u32 = 4;
/// See [`BATON_LOG_ERROR`].
pub const BATON_LOG_TRACE: u32 = 5;
