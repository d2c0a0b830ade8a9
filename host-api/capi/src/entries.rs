//! The table's entries as functions, one for one.
//!
//! # Safety
//! For all of them: `host` is one that [`baton_engine_open`](crate::baton_engine_open) gave out and that has not been
//! closed; requests are of this host and not yet released; every other pointer is valid for the call, as long as
//! the size beside it says. Any thread may call, several at once.

use core::ffi::c_void;

use baton_host::abi::{
    BatonDesc, BatonEventFn, BatonIndexSpec, BatonMemory, BatonPostOptions, BatonSlice, BatonStatus,
    BatonXfer, BatonXferSpec,
};

use crate::guard::{BatonHost, entry};

/// Connection information of this engine: opaque bytes, secret (whoever holds them may connect).
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_conn_info(
    host: *mut BatonHost,
    buf: *mut u8,
    cap_bytes: u64,
    needed_bytes: *mut u64,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.conn_info)(engine, buf, cap_bytes, needed_bytes) })
}

/// Takes a peer's connection information and binds its name to that instance, replacing an earlier binding. `name` empty: any name is accepted; else it must be the one inside.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_load_remote(
    host: *mut BatonHost,
    name: BatonSlice,
    info: BatonSlice,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.load_remote)(engine, name, info) })
}

/// Connects now instead of at the first post; waits up to `timeout_ms`, with 0 only starts it (`BATON_IN_PROGRESS`).
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_connect(
    host: *mut BatonHost,
    peer: BatonSlice,
    timeout_ms: u32,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.connect)(engine, peer, timeout_ms) })
}

/// Forgets the binding of a name; its running transfers end. Harmless for an unknown name.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_disconnect(host: *mut BatonHost, peer: BatonSlice) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.disconnect)(engine, peer) })
}

/// Registers memory; repeated and overlapping registrations are independent.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_register(
    host: *mut BatonHost,
    memory: *const BatonMemory,
    region: *mut u64,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.register)(engine, memory, region) })
}

/// Withdraws a registration. When it returns no byte will land in the memory any more; blocks 1 s at most.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_deregister(host: *mut BatonHost, region: u64) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.deregister)(engine, region) })
}

/// Bytes with which a peer can address the region; stable and unique per registration.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_export_region(
    host: *mut BatonHost,
    region: u64,
    buf: *mut u8,
    cap_bytes: u64,
    needed_bytes: *mut u64,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe {
        (table.export_region)(engine, region, buf, cap_bytes, needed_bytes)
    })
}

/// Takes a peer's exported region. May come before the peer's connection information; it is then bound later.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_import_region(
    host: *mut BatonHost,
    peer: BatonSlice,
    blob: BatonSlice,
    remote_region: *mut u64,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.import_region)(engine, peer, blob, remote_region) })
}

/// Forgets an imported region; requests that use it keep what they need.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_release_remote_region(
    host: *mut BatonHost,
    remote_region: u64,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.release_remote_region)(engine, remote_region) })
}

/// Builds a transfer to be posted any number of times.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_create_xfer_req(
    host: *mut BatonHost,
    spec: *const BatonXferSpec,
    out: *mut *mut BatonXfer,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.create_xfer_req)(engine, spec, out) })
}

/// Keeps a list of blocks (local if `peer` is empty, else of that peer) for `create_xfer_from_indices`.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_create_block_list(
    host: *mut BatonHost,
    peer: BatonSlice,
    blocks: *const BatonDesc,
    count: u64,
    list: *mut u64,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.create_block_list)(engine, peer, blocks, count, list) })
}

/// Forgets a block list.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_release_block_list(host: *mut BatonHost, list: u64) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.release_block_list)(engine, list) })
}

/// Builds a transfer from elements of two block lists.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_create_xfer_from_indices(
    host: *mut BatonHost,
    spec: *const BatonIndexSpec,
    out: *mut *mut BatonXfer,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.create_xfer_from_indices)(engine, spec, out) })
}

/// Starts the transfer. `flags`: `BATON_POST_*`; with `BATON_POST_NOTIFY` the peer gets `message` after all data; without, `message` must be empty. Never blocks, never copies bulk data.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_post_xfer_req(
    host: *mut BatonHost,
    xfer: *mut BatonXfer,
    message: BatonSlice,
    flags: u32,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.post_xfer_req)(engine, xfer, message, flags) })
}

/// `post_xfer_req` with options: also with an id by which the peer may ask whether the transfer has landed.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_post_xfer_req_with(
    host: *mut BatonHost,
    xfer: *mut BatonXfer,
    options: *const BatonPostOptions,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.post_xfer_req_with)(engine, xfer, options) })
}

/// State of the last post: `BATON_OK`, `BATON_IN_PROGRESS`, `BATON_NOT_POSTED` or its error. Stable until the next post.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_xfer_status(host: *mut BatonHost, xfer: *mut BatonXfer) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.xfer_status)(engine, xfer) })
}

/// Text of the error of the last post.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_xfer_error(
    host: *mut BatonHost,
    xfer: *mut BatonXfer,
    buf: *mut u8,
    cap_bytes: u64,
    needed_bytes: *mut u64,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.xfer_error)(engine, xfer, buf, cap_bytes, needed_bytes) })
}

/// Stops the transfer as soon as possible; its status becomes `BATON_ERR_CANCELED` once no memory is touched any more, or `BATON_OK` if it was too late.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_xfer_cancel(host: *mut BatonHost, xfer: *mut BatonXfer) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.xfer_cancel)(engine, xfer) })
}

/// Frees the request. Never blocks: `BATON_ERR_BUSY` while memory may be touched, and then it is a cancel and the request still exists.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_release_xfer_req(host: *mut BatonHost, xfer: *mut BatonXfer) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.release_xfer_req)(engine, xfer) })
}

/// `xfer_status` of many requests in one call; returns how many are still in progress, or an error.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_poll_many(
    host: *mut BatonHost,
    xfers: *const *mut BatonXfer,
    count: u64,
    statuses: *mut BatonStatus,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.poll_many)(engine, xfers, count, statuses) })
}

/// Sends a message without a transfer; the sender keeps it until it is acknowledged or its deadline passes.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_gen_notif(
    host: *mut BatonHost,
    peer: BatonSlice,
    message: BatonSlice,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.gen_notif)(engine, peer, message) })
}

/// Takes notifications, each behind a `BatonNotifHeader`, oldest first per peer. As many as fit; `count` tells how many. If not even the first fits, `BATON_ERR_TOO_SMALL` and `needed_bytes`.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_get_notifs(
    host: *mut BatonHost,
    buf: *mut u8,
    cap_bytes: u64,
    needed_bytes: *mut u64,
    count: *mut u64,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.get_notifs)(engine, buf, cap_bytes, needed_bytes, count) })
}

/// Whether the transfer that a peer posted with `id` has landed here (`BATON_OK`, then forgotten) or not yet
/// (`BATON_IN_PROGRESS`, also for a peer that is not known yet). Ids that nobody reads hold their sender back like messages.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_inbound_status(
    host: *mut BatonHost,
    peer: BatonSlice,
    id: u64,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.inbound_status)(engine, peer, id) })
}

/// Sets or, with no function, unsets the hook for the kinds in `event_mask`. Unsetting returns after a running call has ended.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_set_event_hook(
    host: *mut BatonHost,
    event_mask: u32,
    hook: Option<BatonEventFn>,
    user: *mut c_void,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.set_event_hook)(engine, event_mask, hook, user) })
}

/// An eventfd that is readable while notifications wait; owned by the engine.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_notify_fd(host: *mut BatonHost, fd: *mut i32) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.notify_fd)(engine, fd) })
}

/// Allocates `memory.len_bytes` of zeroed, page-aligned host memory, registers it as `memory.access` says and writes its address (which must be 0 before) and its region, which is used like any other. On huge pages where the machine has some; peers on this host may map it instead of copying through the kernel. Takes as long as zeroing takes. A forked child does not have it.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_alloc_managed(
    host: *mut BatonHost,
    memory: *mut BatonMemory,
    region: *mut u64,
) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.alloc_managed)(engine, memory, region) })
}

/// Withdraws managed memory like `deregister`, which refuses it, and unmaps it. After an error it is still mapped, as something may still touch it, and the call can be repeated. `destroy` frees what is left.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_free_managed(host: *mut BatonHost, region: u64) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.free_managed)(engine, region) })
}

/// Lets the calling thread move work for a moment; returns 1 if it found any.
///
/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_progress(host: *mut BatonHost) -> BatonStatus {
    // SAFETY: the caller keeps the rules of the module, which are the entry's own.
    entry(host, |table, engine| unsafe { (table.progress)(engine) })
}
