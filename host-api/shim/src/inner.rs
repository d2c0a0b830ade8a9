//! What everything that belongs to an engine shares: the table, the way to an answer, and the end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use baton_abi::*;

use crate::error::{Error, ErrorCode};
use crate::load::Plugin;
use crate::log::{Level, LogTo, Sink};
use crate::notify::{self, Hook, Notification};
use crate::select::Choice;

/// What everything that belongs to an engine keeps alive.
pub(crate) struct Inner {
    pub(crate) plugin: &'static Plugin,
    pub(crate) raw: *mut BatonEngine,
    pub(crate) choice: Choice,
    pub(crate) choice_json: serde_json::Value,
    pub(crate) sink: Box<Sink>,
    pub(crate) hook: Mutex<Option<Box<Hook>>>,
    pub(crate) inbox: Mutex<Vec<u8>>,
    pub(crate) unreleased: Mutex<Vec<Unreleased>>,
    pub(crate) any_unreleased: AtomicBool,
}

/// A request that was dropped while the engine might still touch its memory.
pub(crate) struct Unreleased(*mut BatonXfer);

// SAFETY: a request may be used by any thread; only the list uses this one.
unsafe impl Send for Unreleased {}
// SAFETY: every entry of the table may be called from any thread and several at once; the rest is locked.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("plugin", &self.plugin).field("raw", &self.raw).finish_non_exhaustive()
    }
}

pub(crate) fn check(table: &BatonEngineV1, code: BatonStatus) -> Result<BatonStatus, Error> {
    if code >= 0 { Ok(code) } else { Err(failure(table, code)) }
}

#[cold]
fn failure(table: &BatonEngineV1, code: BatonStatus) -> Error {
    let text = fill(|buf, cap, needed| {
        // SAFETY: the buffer is `cap` long.
        unsafe { (table.last_error)(buf, cap, needed) }
    });
    let text = text.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    Error { code: ErrorCode::from_raw(code), text }
}

/// Calls an entry that fills a buffer until the buffer is large enough. Answers come from other threads' work and
/// may grow between two calls, but not for ever.
fn fill(mut call: impl FnMut(*mut u8, u64, *mut u64) -> BatonStatus) -> Result<Vec<u8>, BatonStatus> {
    const TRIES: usize = 16;
    let mut buffer = vec![0; 1024];
    for _ in 0..TRIES {
        let mut needed = 0;
        let code = call(buffer.as_mut_ptr(), buffer.len() as u64, &mut needed);
        let needed = usize::try_from(needed).map_err(|_| BATON_ERR_PROTOCOL)?;
        match code {
            BATON_ERR_TOO_SMALL if needed > buffer.len() => buffer.resize(needed + needed / 4, 0),
            code if code < 0 => return Err(code),
            _ if needed > buffer.len() => return Err(BATON_ERR_PROTOCOL),
            _ => {
                buffer.truncate(needed);
                return Ok(buffer);
            }
        }
    }
    Err(BATON_ERR_TOO_SMALL)
}

pub(crate) fn read_text(
    table: &BatonEngineV1,
    call: impl FnMut(*mut u8, u64, *mut u64) -> BatonStatus,
) -> Result<String, Error> {
    let bytes = fill(call).map_err(|code| failure(table, code))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

impl Inner {
    pub(crate) fn table(&self) -> &'static BatonEngineV1 {
        self.plugin.table()
    }

    pub(crate) fn raw(&self) -> *mut BatonEngine {
        self.raw
    }

    pub(crate) fn log(&self, level: Level, target: &str, message: &str) {
        self.sink.log(level, target, message);
    }

    pub(crate) fn check(&self, code: BatonStatus) -> Result<BatonStatus, Error> {
        check(self.table(), code)
    }

    pub(crate) fn read(
        &self,
        call: impl FnMut(*mut u8, u64, *mut u64) -> BatonStatus,
    ) -> Result<Vec<u8>, Error> {
        fill(call).map_err(|code| failure(self.table(), code))
    }

    /// Releases a request, now or, while it is busy, during a later call.
    pub(crate) fn release_or_defer(&self, xfer: *mut BatonXfer) {
        // SAFETY: the engine lives and nobody else uses the request any more.
        if unsafe { (self.table().release_xfer_req)(self.raw, xfer) } == BATON_ERR_BUSY {
            self.unreleased.lock().unwrap_or_else(PoisonError::into_inner).push(Unreleased(xfer));
            self.any_unreleased.store(true, Ordering::Release);
        }
    }

    /// Tries again to release what was busy.
    pub(crate) fn reap(&self) {
        if !self.any_unreleased.load(Ordering::Acquire) {
            return;
        }
        let Ok(mut list) = self.unreleased.try_lock() else { return };
        // SAFETY: as in `release_or_defer`.
        list.retain(|x| unsafe { (self.table().release_xfer_req)(self.raw, x.0) } == BATON_ERR_BUSY);
        self.any_unreleased.store(!list.is_empty(), Ordering::Release);
    }

    /// Takes what fits into the buffer; whether there was anything.
    pub(crate) fn take_notifications(&self, out: &mut Vec<Notification>) -> Result<bool, Error> {
        let mut buffer = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        if buffer.is_empty() {
            buffer.resize(16 << 10, 0);
        }
        let (mut needed, mut count) = (0, 0);
        // SAFETY: the engine lives; the buffer is as long as it says.
        let code = unsafe {
            (self.table().get_notifs)(
                self.raw,
                buffer.as_mut_ptr(),
                buffer.len() as u64,
                &mut needed,
                &mut count,
            )
        };
        if code == BATON_ERR_TOO_SMALL && needed > buffer.len() as u64 {
            buffer.resize(needed as usize, 0);
            return Ok(true);
        }
        self.check(code)?;
        let mut rest = buffer.as_slice();
        for _ in 0..count {
            let (notification, behind) = notify::decode(rest).ok_or_else(|| Error {
                code: ErrorCode::Protocol,
                text: format!("engine {}: broken framing of notifications", self.plugin.path().display()),
            })?;
            out.push(notification);
            rest = behind;
        }
        Ok(count > 0)
    }

    pub(crate) fn unset_hook(&self, place: &mut Option<Box<Hook>>) -> Result<(), Error> {
        if place.is_none() {
            return Ok(());
        }
        // SAFETY: the engine lives; without a function nothing is kept.
        let code = unsafe { (self.table().set_event_hook)(self.raw, 0, None, std::ptr::null_mut()) };
        // Only now does no call of it run any more.
        self.check(code).map(|_| *place = None)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.reap();
        // SAFETY: the last owner; requests that are still busy die with their engine.
        let code = unsafe { (self.table().destroy)(self.raw) };
        if code == BATON_ERR_FORKED {
            // Nothing here is ours: the parent has the engine, and its threads are not in this process.
            return;
        }
        if code != BATON_OK {
            // Its threads may not have ended: what they may call stays.
            let text = format!("destroy: {}", failure(self.table(), code));
            self.log(Level::Warn, "baton_host", &text);
            let hook = self.hook.get_mut().unwrap_or_else(PoisonError::into_inner).take();
            std::mem::forget(hook);
            let quiet = Box::new(Sink::new(LogTo::Stderr, None, true, ""));
            std::mem::forget(std::mem::replace(&mut self.sink, quiet));
        }
    }
}
