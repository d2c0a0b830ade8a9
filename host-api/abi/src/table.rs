//! The table of an engine, version 1.
//!
//! Every entry may be called from any thread, and from several at once, with two exceptions: `destroy` is the last call
//! on an engine, and `release_xfer_req` the last on a request. Text that goes with a negative status is read
//! with `last_error` on the same thread. Entries with `buf`, `cap_bytes`, `needed_bytes` write at most `cap_bytes` and tell
//! the size in `needed_bytes`; if the buffer is too small they answer `BATON_ERR_TOO_SMALL` and consume nothing.

use crate::codes::BatonStatus;
use crate::types::*;

/// The functions of an engine. A newer minor version only adds entries at the end.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct BatonEngineV1 {
    /// [`crate::BATON_TABLE_MAGIC`].
    pub magic: u64,
    /// [`crate::BATON_ABI_MAJOR`] the engine was built with.
    pub abi_major: u32,
    /// [`crate::BATON_ABI_MINOR`] the engine was built with.
    pub abi_minor: u32,
    /// Size of the table in the engine's eyes: entries past it do not exist.
    pub size_bytes: u64,
    /// Name of the engine, e.g. `baton`.
    pub engine_name: BatonSlice,
    /// Version of the engine, e.g. `0.1.0`.
    pub engine_version: BatonSlice,
    /// Description of every field of this interface as the engine was built with it.
    pub fields: *const BatonField,
    /// Number of `fields`.
    pub fields_count: u64,

    /// Creates an engine: opens fabrics, binds the listener, starts the service thread.
    pub create:
        unsafe extern "C" fn(options: *const BatonCreateOptions, out: *mut *mut BatonEngine) -> BatonStatus,
    /// Cancels everything queued, closes every session and joins the threads (at most 5 s). In a forked child it does nothing.
    pub destroy: unsafe extern "C" fn(engine: *mut BatonEngine) -> BatonStatus,
    /// Connection information of this engine: opaque bytes, secret (whoever holds them may connect).
    pub conn_info: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        buf: *mut u8,
        cap_bytes: u64,
        needed_bytes: *mut u64,
    ) -> BatonStatus,
    /// Takes a peer's connection information and binds its name to that instance, replacing an earlier binding. `name` empty: any name is accepted; else it must be the one inside.
    pub load_remote:
        unsafe extern "C" fn(engine: *mut BatonEngine, name: BatonSlice, info: BatonSlice) -> BatonStatus,
    /// Connects now instead of at the first post; waits up to `timeout_ms`, with 0 only starts it (`BATON_IN_PROGRESS`).
    pub connect:
        unsafe extern "C" fn(engine: *mut BatonEngine, peer: BatonSlice, timeout_ms: u32) -> BatonStatus,
    /// Forgets the binding of a name; its running transfers end. Harmless for an unknown name.
    pub disconnect: unsafe extern "C" fn(engine: *mut BatonEngine, peer: BatonSlice) -> BatonStatus,
    /// Registers memory; repeated and overlapping registrations are independent.
    pub register: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        memory: *const BatonMemory,
        region: *mut u64,
    ) -> BatonStatus,
    /// Withdraws a registration. When it has succeeded no byte will land in the memory any more; blocks 1 s at most, 2 s where a session
    /// had to be ended for it. After an error the memory may still be touched and must stay; the call can be repeated.
    pub deregister: unsafe extern "C" fn(engine: *mut BatonEngine, region: u64) -> BatonStatus,
    /// Bytes with which a peer can address the region; stable and unique per registration.
    pub export_region: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        region: u64,
        buf: *mut u8,
        cap_bytes: u64,
        needed_bytes: *mut u64,
    ) -> BatonStatus,
    /// Takes a peer's exported region. May come before the peer's connection information; it is then bound later.
    pub import_region: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        peer: BatonSlice,
        blob: BatonSlice,
        remote_region: *mut u64,
    ) -> BatonStatus,
    /// Forgets an imported region; requests that use it keep what they need.
    pub release_remote_region:
        unsafe extern "C" fn(engine: *mut BatonEngine, remote_region: u64) -> BatonStatus,
    /// Builds a transfer to be posted any number of times.
    pub create_xfer_req: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        spec: *const BatonXferSpec,
        out: *mut *mut BatonXfer,
    ) -> BatonStatus,
    /// Keeps a list of blocks (local if `peer` is empty, else of that peer) for `create_xfer_from_indices`.
    pub create_block_list: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        peer: BatonSlice,
        blocks: *const BatonDesc,
        count: u64,
        list: *mut u64,
    ) -> BatonStatus,
    /// Forgets a block list.
    pub release_block_list: unsafe extern "C" fn(engine: *mut BatonEngine, list: u64) -> BatonStatus,
    /// Builds a transfer from elements of two block lists.
    pub create_xfer_from_indices: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        spec: *const BatonIndexSpec,
        out: *mut *mut BatonXfer,
    ) -> BatonStatus,
    /// Starts the transfer. `flags`: `BATON_POST_*`; with `BATON_POST_NOTIFY` the peer gets `message` after all data; without, `message` must be empty. Never blocks, never copies bulk data.
    pub post_xfer_req: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        xfer: *mut BatonXfer,
        message: BatonSlice,
        flags: u32,
    ) -> BatonStatus,
    /// State of the last post: `BATON_OK`, `BATON_IN_PROGRESS`, `BATON_NOT_POSTED` or its error. Stable until the next post.
    pub xfer_status: unsafe extern "C" fn(engine: *mut BatonEngine, xfer: *mut BatonXfer) -> BatonStatus,
    /// Text of the error of the last post.
    pub xfer_error: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        xfer: *mut BatonXfer,
        buf: *mut u8,
        cap_bytes: u64,
        needed_bytes: *mut u64,
    ) -> BatonStatus,
    /// Stops the transfer as soon as possible; its status becomes `BATON_ERR_CANCELED` once no memory is touched any more, or `BATON_OK` if it was too late.
    pub xfer_cancel: unsafe extern "C" fn(engine: *mut BatonEngine, xfer: *mut BatonXfer) -> BatonStatus,
    /// Frees the request. Never blocks: `BATON_ERR_BUSY` while memory may be touched, and then it is a cancel and the request still exists.
    pub release_xfer_req: unsafe extern "C" fn(engine: *mut BatonEngine, xfer: *mut BatonXfer) -> BatonStatus,
    /// `xfer_status` of many requests in one call; returns how many are still in progress, or an error.
    pub poll_many: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        xfers: *const *mut BatonXfer,
        count: u64,
        statuses: *mut BatonStatus,
    ) -> BatonStatus,
    /// Sends a message without a transfer; the sender keeps it until it is acknowledged or its deadline passes.
    pub gen_notif:
        unsafe extern "C" fn(engine: *mut BatonEngine, peer: BatonSlice, message: BatonSlice) -> BatonStatus,
    /// Takes notifications, each behind a [`BatonNotifHeader`], in the order in which they became complete here (standalone ones of a peer in the order in which it sent them). As many as fit; `count` tells how many. If not even the first fits, `BATON_ERR_TOO_SMALL` and `needed_bytes`.
    pub get_notifs: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        buf: *mut u8,
        cap_bytes: u64,
        needed_bytes: *mut u64,
        count: *mut u64,
    ) -> BatonStatus,
    /// Whether the transfer that a peer posted with `id` has landed here (`BATON_OK`, then forgotten) or not yet
    /// (`BATON_IN_PROGRESS`, also for a peer that is not known yet). Ids that nobody reads hold their sender back like messages.
    pub inbound_status:
        unsafe extern "C" fn(engine: *mut BatonEngine, peer: BatonSlice, id: u64) -> BatonStatus,
    /// Sets or, with no function, unsets the hook for the kinds in `event_mask`. Unsetting returns after a running call has ended.
    pub set_event_hook: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        event_mask: u32,
        hook: Option<BatonEventFn>,
        user: *mut core::ffi::c_void,
    ) -> BatonStatus,
    /// An eventfd that is readable while notifications wait; owned by the engine.
    pub notify_fd: unsafe extern "C" fn(engine: *mut BatonEngine, fd: *mut i32) -> BatonStatus,
    /// Allocates `memory.len_bytes` of zeroed, page-aligned host memory, registers it as `memory.access` says and writes its address (which must be 0 before) and its region, which is used like any other. On huge pages where the machine has some; peers on this host may map it instead of copying through the kernel. Takes as long as zeroing takes. A forked child does not have it.
    pub alloc_managed: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        memory: *mut BatonMemory,
        region: *mut u64,
    ) -> BatonStatus,
    /// Withdraws managed memory like `deregister`, which refuses it, and unmaps it. After an error it is still mapped, as something may still touch it, and the call can be repeated. `destroy` frees what is left.
    pub free_managed: unsafe extern "C" fn(engine: *mut BatonEngine, region: u64) -> BatonStatus,
    /// Lets the calling thread move work for a moment; returns 1 if it found any.
    pub progress: unsafe extern "C" fn(engine: *mut BatonEngine) -> BatonStatus,
    /// What was chosen and why, counters, sessions and what waits for what: one JSON object.
    pub stats: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        buf: *mut u8,
        cap_bytes: u64,
        needed_bytes: *mut u64,
    ) -> BatonStatus,
    /// Changes the log level of the engine.
    pub set_log_level: unsafe extern "C" fn(engine: *mut BatonEngine, level: u32) -> BatonStatus,
    /// Which fabrics and devices this machine offers, and why the others are missing: one JSON object. Needs no engine.
    pub probe: unsafe extern "C" fn(buf: *mut u8, cap_bytes: u64, needed_bytes: *mut u64) -> BatonStatus,
    /// Text of the last error that an entry of this library returned on this thread. Needs no engine.
    pub last_error: unsafe extern "C" fn(buf: *mut u8, cap_bytes: u64, needed_bytes: *mut u64) -> BatonStatus,
    /// `post_xfer_req` with options: also with an id by which the peer may ask whether the transfer has landed.
    pub post_xfer_req_with: unsafe extern "C" fn(
        engine: *mut BatonEngine,
        xfer: *mut BatonXfer,
        options: *const BatonPostOptions,
    ) -> BatonStatus,
}

// SAFETY: the table is immutable data and pointers to immutable statics of the library that exports it.
unsafe impl Sync for BatonEngineV1 {}
// SAFETY: as above.
unsafe impl Send for BatonEngineV1 {}
