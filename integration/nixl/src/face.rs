//! The boundary to the C++ glue: the other half of `cpp/face.hpp`.
//!
//! The glue reaches Rust through one table of function pointers, so the library exports nothing but NIXL's two entry
//! points. Every function here turns raw arguments into Rust ones, lets no panic out and answers a NIXL status.

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use baton_host::MemoryKind;

use crate::agent::{Agent, Operation, Piece, Refused};
use crate::status::Status;
use crate::{log, options};

/// Bytes that the other side lends for the length of a call.
#[repr(C)]
#[derive(Clone, Copy)]
struct Bytes {
    ptr: *const u8,
    len: u64,
}

#[repr(C)]
struct Setting {
    key: Bytes,
    value: Bytes,
}

type PutBytes = unsafe extern "C" fn(user: *mut c_void, bytes: Bytes) -> bool;
type PutPair = unsafe extern "C" fn(user: *mut c_void, first: Bytes, second: Bytes) -> bool;

/// `Face` in `cpp/face.hpp`, entry by entry.
#[repr(C)]
struct Face {
    size: u64,
    create: unsafe extern "C" fn(Bytes, *const Setting, u64, c_int) -> *mut Agent,
    destroy: unsafe extern "C" fn(*mut Agent),
    options: unsafe extern "C" fn(*mut c_void, PutPair),
    version: unsafe extern "C" fn() -> *const c_char,
    complain: unsafe extern "C" fn(Bytes),
    takes_vram: unsafe extern "C" fn(*mut Agent) -> c_int,
    register_memory: unsafe extern "C" fn(*mut Agent, u64, u64, u64, c_int, *mut u64) -> c_int,
    deregister_memory: unsafe extern "C" fn(*mut Agent, u64) -> c_int,
    export_memory: unsafe extern "C" fn(*mut Agent, u64, *mut c_void, PutBytes) -> c_int,
    import_memory: unsafe extern "C" fn(*mut Agent, Bytes, Bytes, *mut u64) -> c_int,
    import_own: unsafe extern "C" fn(*mut Agent, u64, *mut u64) -> c_int,
    unload_memory: unsafe extern "C" fn(*mut Agent, u64) -> c_int,
    conn_info: unsafe extern "C" fn(*mut Agent, *mut c_void, PutBytes) -> c_int,
    load_remote: unsafe extern "C" fn(*mut Agent, Bytes, Bytes) -> c_int,
    connect: unsafe extern "C" fn(*mut Agent, Bytes) -> c_int,
    disconnect: unsafe extern "C" fn(*mut Agent, Bytes) -> c_int,
    prep: unsafe extern "C" fn(
        *mut Agent,
        c_int,
        Bytes,
        *const Piece,
        u64,
        *const Piece,
        u64,
        *mut *mut c_void,
    ) -> c_int,
    post: unsafe extern "C" fn(*mut Agent, *mut c_void, c_int, Bytes) -> c_int,
    check: unsafe extern "C" fn(*mut Agent, *mut c_void) -> c_int,
    release: unsafe extern "C" fn(*mut Agent, *mut c_void) -> c_int,
    send_notification: unsafe extern "C" fn(*mut Agent, Bytes, Bytes) -> c_int,
    take_notifications: unsafe extern "C" fn(*mut Agent, *mut c_void, PutPair) -> c_int,
}

static FACE: Face = Face {
    size: size_of::<Face>() as u64,
    create,
    destroy,
    options: list_options,
    version,
    complain,
    takes_vram,
    register_memory,
    deregister_memory,
    export_memory,
    import_memory,
    import_own,
    unload_memory,
    conn_info,
    load_remote,
    connect,
    disconnect,
    prep,
    post,
    check,
    release,
    send_notification,
    take_notifications,
};

unsafe extern "C" {
    fn baton_nixl_plugin(face: *const Face) -> *mut c_void;
    #[cfg(test)]
    fn baton_nixl_layout_error() -> *const c_char;
}

/// NIXL's description of this plugin, or null when this build does not have NIXL's layout.
pub(crate) fn plugin() -> *mut c_void {
    // SAFETY: `FACE` is a static; the C++ side checks its size and keeps the pointer.
    unsafe { baton_nixl_plugin(&FACE) }
}

/// What is wrong with the layout of the C++ half, if anything.
#[cfg(test)]
pub(crate) fn layout_error() -> Option<String> {
    // SAFETY: the function takes nothing and answers null or a static string.
    let text = unsafe { baton_nixl_layout_error() };
    // SAFETY: as above; a static string ends in NUL.
    (!text.is_null()).then(|| unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

impl Bytes {
    fn of(bytes: &[u8]) -> Bytes {
        Bytes { ptr: bytes.as_ptr(), len: bytes.len() as u64 }
    }

    /// # Safety
    /// The bytes must be readable for as long as the answer is used: that is, during the call that lent them.
    unsafe fn get<'call>(self) -> &'call [u8] {
        // SAFETY: promised by the caller; an empty slice may come with any pointer.
        unsafe { slice(self.ptr, self.len) }
    }

    /// # Safety
    /// As [`Bytes::get`].
    unsafe fn text<'call>(self, what: &str) -> Result<&'call str, Refused> {
        // SAFETY: promised by the caller.
        std::str::from_utf8(unsafe { self.get() })
            .map_err(|_| Refused::new(Status::InvalidParam, format!("{what} is not UTF-8")))
    }
}

/// # Safety
/// With `count` > 0, `ptr` must point at that many readable values for as long as the answer is used.
unsafe fn slice<'call, T>(ptr: *const T, count: u64) -> &'call [T] {
    if count == 0 || ptr.is_null() {
        return &[];
    }
    // SAFETY: not null, and the rest is promised by the caller.
    unsafe { std::slice::from_raw_parts(ptr, count as usize) }
}

/// Runs `body` on behalf of the agent's function `what`. A refusal is said in the log, a panic becomes `Backend`.
fn answer(what: &str, body: impl FnOnce() -> Result<Status, Refused>) -> c_int {
    let status = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => status,
        Ok(Err(refused)) => {
            log::refused(what, &refused);
            refused.status
        }
        Err(_) => {
            log::say(&format!("{what}: internal error (panic); the call was abandoned"));
            Status::Backend
        }
    };
    status as c_int
}

/// As [`answer`], for functions whose success says nothing more.
fn done(what: &str, body: impl FnOnce() -> Result<(), Refused>) -> c_int {
    answer(what, || body().map(|()| Status::Success))
}

fn out_of_memory() -> Refused {
    Refused::new(Status::Backend, "the agent's container could not grow: out of memory")
}

unsafe extern "C" fn create(
    name: Bytes,
    settings: *const Setting,
    count: u64,
    progress: c_int,
) -> *mut Agent {
    let made = catch_unwind(|| {
        // SAFETY: the glue lends `count` settings and their bytes for this call.
        let (name, settings) = unsafe { (name.text("the agent name")?, slice(settings, count)) };
        let mut given = Vec::with_capacity(settings.len());
        for setting in settings {
            // SAFETY: as above.
            let (key, value) =
                unsafe { (setting.key.text("a parameter")?, setting.value.text("a parameter")?) };
            given.push((key.to_owned(), value.to_owned()));
        }
        Agent::create(name, given, progress != 0)
    });
    match made {
        Ok(Ok(agent)) => Box::into_raw(Box::new(agent)),
        Ok(Err(refused)) => {
            log::say(&format!("backend BATON cannot be created: {}", refused.reason));
            std::ptr::null_mut()
        }
        Err(_) => {
            log::say("backend BATON cannot be created: internal error (panic)");
            std::ptr::null_mut()
        }
    }
}

unsafe extern "C" fn destroy(agent: *mut Agent) {
    // SAFETY: made by `create`; NIXL destroys an engine once, after every other call on it.
    let agent = unsafe { Box::from_raw(agent) };
    if catch_unwind(AssertUnwindSafe(|| drop(agent))).is_err() {
        log::say("destroy_engine: internal error (panic)");
    }
}

unsafe extern "C" fn list_options(user: *mut c_void, put: PutPair) {
    for (key, value) in options::with_defaults() {
        // SAFETY: `put` and `user` are the glue's and belong together; the bytes live during the call.
        unsafe { put(user, Bytes::of(key.as_bytes()), Bytes::of(value.as_bytes())) };
    }
}

unsafe extern "C" fn version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

unsafe extern "C" fn complain(message: Bytes) {
    // SAFETY: the glue lends the bytes for this call.
    log::say(&String::from_utf8_lossy(unsafe { message.get() }));
}

unsafe extern "C" fn takes_vram(agent: *mut Agent) -> c_int {
    // SAFETY: a live engine.
    let takes = catch_unwind(AssertUnwindSafe(|| unsafe { &*agent }.takes_vram()));
    takes.unwrap_or(false).into()
}

unsafe extern "C" fn register_memory(
    agent: *mut Agent,
    addr: u64,
    len: u64,
    device: u64,
    vram: c_int,
    region: *mut u64,
) -> c_int {
    done("registerMem", || {
        let kind = if vram != 0 { MemoryKind::Vram } else { MemoryKind::Dram };
        // SAFETY: NIXL calls this on a live engine with a place for the answer.
        unsafe { *region = (*agent).register(addr, len, device, kind)? };
        Ok(())
    })
}

unsafe extern "C" fn deregister_memory(agent: *mut Agent, region: u64) -> c_int {
    // SAFETY: a live engine.
    done("deregisterMem", || unsafe { &*agent }.deregister(region))
}

unsafe extern "C" fn export_memory(
    agent: *mut Agent,
    region: u64,
    user: *mut c_void,
    put: PutBytes,
) -> c_int {
    done("getPublicData", || {
        // SAFETY: a live engine.
        let blob = unsafe { &*agent }.export(region)?;
        // SAFETY: `put` and `user` belong together; the bytes live during the call.
        if unsafe { put(user, Bytes::of(&blob)) } { Ok(()) } else { Err(out_of_memory()) }
    })
}

unsafe extern "C" fn import_memory(agent: *mut Agent, peer: Bytes, blob: Bytes, region: *mut u64) -> c_int {
    done("loadRemoteMD", || {
        // SAFETY: a live engine, bytes lent for this call and a place for the answer.
        unsafe { *region = (*agent).import(peer.text("the remote agent's name")?, blob.get())? };
        Ok(())
    })
}

unsafe extern "C" fn import_own(agent: *mut Agent, region: u64, remote_region: *mut u64) -> c_int {
    done("loadLocalMD", || {
        // SAFETY: a live engine and a place for the answer.
        unsafe { *remote_region = (*agent).import_own(region)? };
        Ok(())
    })
}

unsafe extern "C" fn unload_memory(agent: *mut Agent, remote_region: u64) -> c_int {
    // SAFETY: a live engine.
    done("unloadMD", || unsafe { &*agent }.unload(remote_region))
}

unsafe extern "C" fn conn_info(agent: *mut Agent, user: *mut c_void, put: PutBytes) -> c_int {
    done("getConnInfo", || {
        // SAFETY: a live engine.
        let info = unsafe { &*agent }.conn_info()?;
        // SAFETY: `put` and `user` belong together; the bytes live during the call.
        if unsafe { put(user, Bytes::of(&info)) } { Ok(()) } else { Err(out_of_memory()) }
    })
}

unsafe extern "C" fn load_remote(agent: *mut Agent, peer: Bytes, info: Bytes) -> c_int {
    // SAFETY: a live engine, bytes lent for this call.
    done("loadRemoteConnInfo", || unsafe {
        (*agent).load_remote(peer.text("the remote agent's name")?, info.get())
    })
}

unsafe extern "C" fn connect(agent: *mut Agent, peer: Bytes) -> c_int {
    // SAFETY: a live engine, bytes lent for this call.
    done("connect", || unsafe { (*agent).connect(peer.text("the remote agent's name")?) })
}

unsafe extern "C" fn disconnect(agent: *mut Agent, peer: Bytes) -> c_int {
    // SAFETY: a live engine, bytes lent for this call.
    done("disconnect", || unsafe { (*agent).disconnect(peer.text("the remote agent's name")?) })
}

unsafe extern "C" fn prep(
    agent: *mut Agent,
    op: c_int,
    peer: Bytes,
    local: *const Piece,
    local_count: u64,
    remote: *const Piece,
    remote_count: u64,
    request: *mut *mut c_void,
) -> c_int {
    done("prepXfer", || {
        let op = match op {
            0 => Operation::Read,
            1 => Operation::Write,
            other => {
                let reason = format!("operation {other} is neither READ (0) nor WRITE (1)");
                return Err(Refused::new(Status::InvalidParam, reason));
            }
        };
        // SAFETY: a live engine; lists and bytes are lent for this call; `request` is a place for the answer.
        unsafe {
            let (local, remote) = (slice(local, local_count), slice(remote, remote_count));
            *request = (*agent).prepare(op, peer.text("the remote agent's name")?, local, remote)?;
        }
        Ok(())
    })
}

unsafe extern "C" fn post(
    agent: *mut Agent,
    request: *mut c_void,
    has_message: c_int,
    message: Bytes,
) -> c_int {
    answer("postXfer", || {
        // SAFETY: a live engine, bytes lent for this call, a request of `prep` that was not released.
        unsafe {
            let message = (has_message != 0).then(|| message.get());
            (*agent).post(request, message)
        }
    })
}

unsafe extern "C" fn check(agent: *mut Agent, request: *mut c_void) -> c_int {
    // SAFETY: a live engine, a request of `prep` that was not released.
    answer("checkXfer", || unsafe { (*agent).check(request) })
}

unsafe extern "C" fn release(agent: *mut Agent, request: *mut c_void) -> c_int {
    // SAFETY: a live engine, a request of `prep`; the glue forgets it when this succeeds.
    answer("releaseReqH", || unsafe { (*agent).release(request) })
}

unsafe extern "C" fn send_notification(agent: *mut Agent, peer: Bytes, message: Bytes) -> c_int {
    // SAFETY: a live engine, bytes lent for this call.
    done("genNotif", || unsafe {
        (*agent).send_notification(peer.text("the remote agent's name")?, message.get())
    })
}

unsafe extern "C" fn take_notifications(agent: *mut Agent, user: *mut c_void, put: PutPair) -> c_int {
    done("getNotifs", || {
        // SAFETY: a live engine.
        unsafe { &*agent }.take_notifications(|peer, message| {
            // SAFETY: `put` and `user` belong together; the bytes live during the call.
            if unsafe { put(user, Bytes::of(peer), Bytes::of(message)) } {
                Ok(())
            } else {
                Err(out_of_memory())
            }
        })
    })
}
