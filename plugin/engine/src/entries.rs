//! The entries of the table. Each has the contract that `baton_abi::BatonEngineV1` documents: pointers and slices are valid for the
//! call, and `destroy` and `release_xfer_req` are the last use of theirs. That is what the `SAFETY` sentences call "the contract".

use crate::convert::{bytes, fill, name, out};
use crate::guard;
use crate::object::{self, with};
use crate::telling;
use baton_abi::*;
use baton_driver::{Error, HookFn, HostEvent, Status, Taker, err};
use baton_fabric::{Memory, MemoryKind};
use core::ffi::c_void;

pub unsafe extern "C" fn create(
    options: *const BatonCreateOptions,
    out_engine: *mut *mut BatonEngine,
) -> BatonStatus {
    guard::entry(
        || {},
        || {
            if out_engine.is_null() {
                return Err(err!(InvalidParam, "out is null"));
            }
            // SAFETY: the contract.
            unsafe { out(out_engine, Box::into_raw(object::create(options)?).cast(), "out") }
        },
    )
}

pub unsafe extern "C" fn destroy(engine: *mut BatonEngine) -> BatonStatus {
    guard::entry(
        || {},
        || {
            // SAFETY: the contract.
            unsafe {
                object::engine(engine)?;
                object::take_engine(engine).map(|()| BATON_OK)
            }
        },
    )
}

pub unsafe extern "C" fn conn_info(
    engine: *mut BatonEngine,
    buf: *mut u8,
    cap: u64,
    needed: *mut u64,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe { with(engine, |e| fill(e.driver.conn_info(), buf, cap, needed)) }
}

pub unsafe extern "C" fn load_remote(
    engine: *mut BatonEngine,
    peer: BatonSlice,
    info: BatonSlice,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            let expected = if peer.len_bytes == 0 { None } else { Some(name(peer)?) };
            e.driver.load_remote(expected, bytes(info, "connection information")?).map(|()| BATON_OK)
        })
    }
}

pub unsafe extern "C" fn connect(engine: *mut BatonEngine, peer: BatonSlice, timeout_ms: u32) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            let connected = e.driver.connect(name(peer)?, timeout_ms)?;
            Ok(if connected { BATON_OK } else { BATON_IN_PROGRESS })
        })
    }
}

pub unsafe extern "C" fn disconnect(engine: *mut BatonEngine, peer: BatonSlice) -> BatonStatus {
    // SAFETY: the contract.
    unsafe { with(engine, |e| e.driver.disconnect(name(peer)?).map(|()| BATON_OK)) }
}

pub unsafe extern "C" fn register(
    engine: *mut BatonEngine,
    memory: *const BatonMemory,
    region: *mut u64,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            if memory.is_null() || region.is_null() {
                return Err(err!(InvalidParam, "memory or region is null"));
            }
            let memory = checked_memory(&*memory)?;
            out(region, e.driver.register(&memory)?, "region")
        })
    }
}

pub(crate) fn checked_memory(memory: &BatonMemory) -> Result<Memory, Error> {
    let kind = match memory.kind {
        BATON_MEM_DRAM => MemoryKind::Dram,
        // Whether there is any is for the fabrics to say.
        BATON_MEM_VRAM => MemoryKind::Vram,
        other => return Err(err!(InvalidParam, "memory kind {other}: valid are 0 (DRAM) and 1 (VRAM)")),
    };
    if memory.access & !(BATON_ACCESS_REMOTE_READ | BATON_ACCESS_REMOTE_WRITE) != 0 {
        return Err(err!(
            InvalidParam,
            "access {:#x}: known bits are 1 (remote read) and 2 (remote write)",
            memory.access
        ));
    }
    Ok(Memory {
        addr: memory.addr,
        len_bytes: memory.len_bytes,
        kind,
        device: memory.device,
        remote_read: memory.access & BATON_ACCESS_REMOTE_READ != 0,
        remote_write: memory.access & BATON_ACCESS_REMOTE_WRITE != 0,
        ordered: false,
        mapped: false,
    })
}

pub unsafe extern "C" fn deregister(engine: *mut BatonEngine, region: u64) -> BatonStatus {
    // SAFETY: the contract.
    unsafe { with(engine, |e| e.driver.deregister(region).map(|()| BATON_OK)) }
}

pub unsafe extern "C" fn export_region(
    engine: *mut BatonEngine,
    region: u64,
    buf: *mut u8,
    cap: u64,
    needed: *mut u64,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe { with(engine, |e| fill(&e.driver.export(region)?, buf, cap, needed)) }
}

pub unsafe extern "C" fn import_region(
    engine: *mut BatonEngine,
    peer: BatonSlice,
    blob: BatonSlice,
    remote_region: *mut u64,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            if remote_region.is_null() {
                return Err(err!(InvalidParam, "remote_region is null"));
            }
            out(
                remote_region,
                e.driver.import(name(peer)?, bytes(blob, "exported region")?)?,
                "remote_region",
            )
        })
    }
}

pub unsafe extern "C" fn release_remote_region(engine: *mut BatonEngine, remote_region: u64) -> BatonStatus {
    // SAFETY: the contract.
    unsafe { with(engine, |e| e.driver.release_remote(remote_region).map(|()| BATON_OK)) }
}

pub unsafe extern "C" fn post_xfer_req(
    engine: *mut BatonEngine,
    xfer: *mut BatonXfer,
    message: BatonSlice,
    flags: u32,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            if flags & !BATON_POST_NOTIFY != 0 {
                return Err(err!(InvalidParam, "flags {flags:#x}: known is 1 (notify)"));
            }
            let message = telling::message(message, flags, "message")?;
            let xfer = &object::xfer(xfer)?.xfer;
            e.driver.post(xfer, message)?;
            status(xfer.status())
        })
    }
}

/// The code of a state; a failed transfer's text goes where `last_error` finds it.
pub(crate) fn status(status: Status) -> Result<BatonStatus, Error> {
    match status {
        Status::Done => Ok(BATON_OK),
        Status::InProgress => Ok(BATON_IN_PROGRESS),
        Status::NotPosted => Ok(BATON_NOT_POSTED),
        Status::Failed(error) => Err(error),
    }
}

pub unsafe extern "C" fn xfer_status(engine: *mut BatonEngine, xfer: *mut BatonXfer) -> BatonStatus {
    // SAFETY: the contract.
    unsafe { with(engine, |e| status(e.driver.status(&object::xfer(xfer)?.xfer))) }
}

pub unsafe extern "C" fn xfer_error(
    engine: *mut BatonEngine,
    xfer: *mut BatonXfer,
    buf: *mut u8,
    cap: u64,
    needed: *mut u64,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |_| {
            let text = match object::xfer(xfer)?.xfer.status() {
                Status::Failed(error) => error.text,
                _ => String::new(),
            };
            fill(text.as_bytes(), buf, cap, needed)
        })
    }
}

pub unsafe extern "C" fn xfer_cancel(engine: *mut BatonEngine, xfer: *mut BatonXfer) -> BatonStatus {
    // SAFETY: the contract.
    unsafe { with(engine, |e| e.driver.cancel(&object::xfer(xfer)?.xfer).map(|()| BATON_OK)) }
}

pub unsafe extern "C" fn release_xfer_req(engine: *mut BatonEngine, xfer: *mut BatonXfer) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            e.driver.release(&object::xfer(xfer)?.xfer)?;
            object::take_xfer(xfer);
            Ok(BATON_OK)
        })
    }
}

pub unsafe extern "C" fn poll_many(
    engine: *mut BatonEngine,
    xfers: *const *mut BatonXfer,
    count: u64,
    statuses: *mut BatonStatus,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            if count > 0 && (xfers.is_null() || statuses.is_null()) {
                return Err(err!(InvalidParam, "xfers or statuses is null with a count of {count}"));
            }
            e.driver.progress()?;
            let mut pending = 0;
            for i in 0..count as usize {
                let state = e.driver.peek(&object::xfer(*xfers.add(i))?.xfer);
                pending += BatonStatus::from(matches!(state, Status::InProgress));
                statuses.add(i).write(status(state).unwrap_or_else(|error| guard::fail(&error)));
            }
            Ok(pending)
        })
    }
}

pub unsafe extern "C" fn gen_notif(
    engine: *mut BatonEngine,
    peer: BatonSlice,
    message: BatonSlice,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe { with(engine, |e| e.driver.notify(name(peer)?, bytes(message, "message")?).map(|()| BATON_OK)) }
}

/// Bytes of a notification in the caller's buffer.
fn framed_bytes(name: &str, message: &[u8]) -> u64 {
    (size_of::<BatonNotifHeader>() + name.len() + message.len()).next_multiple_of(8) as u64
}

pub unsafe extern "C" fn get_notifs(
    engine: *mut BatonEngine,
    buf: *mut u8,
    cap: u64,
    needed: *mut u64,
    count: *mut u64,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            if count.is_null() || (buf.is_null() && cap > 0) {
                return Err(err!(InvalidParam, "count is null, or buf is null with a capacity of {cap}"));
            }
            let mut frames = Frames { buf, cap, used: 0, written: 0, too_long: None };
            let taken = e.driver.hand_over(&mut frames)?;
            let Frames { used, too_long, .. } = frames;
            count.write(taken);
            if !needed.is_null() {
                needed.write(too_long.filter(|_| taken == 0).unwrap_or(used));
            }
            if let (0, Some(bytes)) = (taken, too_long) {
                return Err(err!(
                    TooSmall,
                    "the buffer has {cap} bytes, the first notification needs {bytes}"
                ));
            }
            Ok(BATON_OK)
        })
    }
}

/// The caller's buffer.
struct Frames {
    buf: *mut u8,
    cap: u64,
    /// Of what was admitted.
    used: u64,
    /// Of what was written; at most `used`, which is at most `cap`.
    written: u64,
    /// Bytes of the first that found no room.
    too_long: Option<u64>,
}

impl Taker for Frames {
    fn admits(&mut self, name: &str, message: &[u8]) -> bool {
        let bytes = framed_bytes(name, message);
        let fits = self.used + bytes <= self.cap;
        if fits {
            self.used += bytes;
        } else {
            self.too_long.get_or_insert(bytes);
        }
        fits
    }

    fn take(&mut self, name: &str, message: &[u8]) {
        let total = framed_bytes(name, message);
        assert!(total <= self.used - self.written, "only what was admitted is taken");
        let header = BatonNotifHeader {
            total_bytes: total,
            message_len_bytes: message.len() as u64,
            name_len_bytes: name.len() as u32,
            reserved: 0,
        };
        let head = size_of::<BatonNotifHeader>();
        let end = head + name.len() + message.len();
        // SAFETY: everything lies inside the `total` bytes behind `written`, which are inside `used` (checked above) and so inside
        // the caller's `cap` bytes; `write_unaligned` needs no alignment.
        unsafe {
            let at = self.buf.add(self.written as usize);
            at.cast::<BatonNotifHeader>().write_unaligned(header);
            std::ptr::copy_nonoverlapping(name.as_ptr(), at.add(head), name.len());
            std::ptr::copy_nonoverlapping(message.as_ptr(), at.add(head + name.len()), message.len());
            at.add(end).write_bytes(0, total as usize - end);
        }
        self.written += total;
    }
}

/// The host's user pointer; the host promises that its hook may be called from any thread.
struct User(*mut c_void);
// SAFETY: it is only handed back to the host.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl User {
    fn get(&self) -> *mut c_void {
        self.0
    }
}

pub unsafe extern "C" fn set_event_hook(
    engine: *mut BatonEngine,
    mask: u32,
    hook: Option<BatonEventFn>,
    user: *mut c_void,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            if mask & !(BATON_EVENT_NOTIFICATION | BATON_EVENT_PEER_FAILED) != 0 {
                return Err(err!(
                    InvalidParam,
                    "event mask {mask:#x}: known bits are 1 (notification) and 2 (peer failed)"
                ));
            }
            let user = User(user);
            let hook =
                hook.map(|hook| -> HookFn { Box::new(move |event| call_hook(hook, user.get(), event)) });
            e.driver.set_hook(mask, hook);
            Ok(BATON_OK)
        })
    }
}

fn call_hook(hook: BatonEventFn, user: *mut c_void, event: &HostEvent) {
    let (kind, peer, instance, partial): (_, _, &[u8], &[u64]) = match event {
        HostEvent::Notification { name } => (BATON_EVENT_NOTIFICATION, name, &[], &[]),
        HostEvent::PeerFailed { name, instance, partial_seqs } => {
            (BATON_EVENT_PEER_FAILED, name, instance, partial_seqs)
        }
    };
    let event = BatonEvent {
        size_bytes: size_of::<BatonEvent>() as u32,
        kind,
        peer: BatonSlice::of(peer.as_bytes()),
        instance: BatonSlice::of(instance),
        partial_seqs: partial.as_ptr(),
        partial_count: partial.len() as u64,
    };
    // SAFETY: the host's function is callable until it is unset, which waits for this call.
    unsafe { hook(user, &event) };
}

pub unsafe extern "C" fn notify_fd(engine: *mut BatonEngine, fd: *mut i32) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            out(fd, e.driver.inbox().notify_fd().map_err(|e| err!(Local, "eventfd: {e}"))?, "fd")
        })
    }
}

pub unsafe extern "C" fn progress(engine: *mut BatonEngine) -> BatonStatus {
    // SAFETY: the contract.
    unsafe { with(engine, |e| e.driver.progress().map(BatonStatus::from)) }
}

pub unsafe extern "C" fn stats(
    engine: *mut BatonEngine,
    buf: *mut u8,
    cap: u64,
    needed: *mut u64,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe { with(engine, |e| fill(e.driver.stats().as_bytes(), buf, cap, needed)) }
}

pub unsafe extern "C" fn set_log_level(engine: *mut BatonEngine, level: u32) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            if level > BATON_LOG_TRACE {
                return Err(err!(
                    InvalidParam,
                    "log level {level}: valid are 0 (off) to {BATON_LOG_TRACE} (trace)"
                ));
            }
            match &*e.sink.lock() {
                Some(sink) => sink.set_level(level),
                None => return Err(err!(InvalidParam, "the engine was created without a log callback")),
            }
            Ok(BATON_OK)
        })
    }
}

pub unsafe extern "C" fn probe(buf: *mut u8, cap: u64, needed: *mut u64) -> BatonStatus {
    // SAFETY: the contract.
    guard::entry(|| {}, || unsafe { fill(crate::settings::probe().as_bytes(), buf, cap, needed) })
}

pub unsafe extern "C" fn last_error(buf: *mut u8, cap: u64, needed: *mut u64) -> BatonStatus {
    let text = guard::last_error();
    // SAFETY: the contract. Not through `entry`: reading the text must not replace it.
    match unsafe { fill(text.as_bytes(), buf, cap, needed) } {
        Ok(status) => status,
        Err(error) => guard::code(error.code),
    }
}
