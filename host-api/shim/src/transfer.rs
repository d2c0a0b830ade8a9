//! A prepared transfer and several of them at once.

use std::sync::Arc;

use baton_abi::{
    BATON_ERR_BUSY, BATON_POST_ID, BATON_POST_NOTIFY, BatonPostOptions, BatonSlice, BatonStatus, BatonXfer,
};

use crate::engine::Engine;
use crate::error::{Error, ErrorCode, Status};
use crate::inner::Inner;

/// A transfer, prepared once and posted any number of times. Any thread may use it.
///
/// Dropping it releases it; while the engine may still touch its memory, that is a cancel and the engine's other
/// calls finish the release later.
pub struct Transfer {
    inner: Arc<Inner>,
    raw: *mut BatonXfer,
}

// SAFETY: the interface lets every thread call every entry; the last call, release, consumes the value.
unsafe impl Send for Transfer {}
// SAFETY: as above.
unsafe impl Sync for Transfer {}

impl Transfer {
    pub(crate) fn new(inner: Arc<Inner>, raw: *mut BatonXfer) -> Transfer {
        Transfer { inner, raw }
    }

    /// Starts it. With a message, which may be empty, the peer is notified after all data. Allocates nothing
    /// unless it fails.
    pub fn post(&self, message: Option<&[u8]>) -> Result<Status, Error> {
        let (slice, flags) = match message {
            Some(bytes) => (BatonSlice::of(bytes), BATON_POST_NOTIFY),
            None => (BatonSlice::EMPTY, 0),
        };
        let inner = &self.inner;
        // SAFETY: engine and request live; the slice is borrowed for the call.
        let code = unsafe { (inner.table().post_xfer_req)(inner.raw(), self.raw, slice, flags) };
        inner.check(code).map(Status::from_raw)
    }

    /// [`Transfer::post`] with an id: the peer's [`Engine::inbound_status`] says when the transfer has landed there,
    /// with or without a message.
    pub fn post_with_id(&self, message: Option<&[u8]>, id: u64) -> Result<Status, Error> {
        let options = BatonPostOptions {
            size_bytes: size_of::<BatonPostOptions>() as u32,
            flags: BATON_POST_ID | message.map_or(0, |_| BATON_POST_NOTIFY),
            message: message.map_or(BatonSlice::EMPTY, BatonSlice::of),
            id,
        };
        let inner = &self.inner;
        // SAFETY: engine and request live; options and message are borrowed for the call.
        let code = unsafe { (inner.table().post_xfer_req_with)(inner.raw(), self.raw, &options) };
        inner.check(code).map(Status::from_raw)
    }

    /// State of the last post; its error in full.
    pub fn status(&self) -> Result<Status, Error> {
        let code = self.status_raw();
        if code < 0 {
            return Err(Error { code: ErrorCode::from_raw(code), text: self.error_text() });
        }
        Ok(Status::from_raw(code))
    }

    /// State of the last post as the interface's integer: the cheapest way to ask.
    pub fn status_raw(&self) -> BatonStatus {
        // SAFETY: engine and request live.
        unsafe { (self.inner.table().xfer_status)(self.inner.raw(), self.raw) }
    }

    /// Text of the error of the last post; empty without one.
    pub fn error_text(&self) -> String {
        let inner = &self.inner;
        let text = inner.read(|buf, cap, needed| {
            // SAFETY: engine and request live; the buffer is `cap` long.
            unsafe { (inner.table().xfer_error)(inner.raw(), self.raw, buf, cap, needed) }
        });
        text.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    }

    /// Stops it as soon as possible; ask `status` until it is no longer under way.
    pub fn cancel(&self) -> Result<(), Error> {
        // SAFETY: engine and request live.
        let code = unsafe { (self.inner.table().xfer_cancel)(self.inner.raw(), self.raw) };
        self.inner.check(code).map(drop)
    }

    /// Frees it, or gives it back, cancelled, while its memory may still be touched. Never blocks.
    pub fn release(self) -> Result<(), Transfer> {
        // SAFETY: engine and request live; whatever the answer but BUSY, the request is not used again.
        let code = unsafe { (self.inner.table().release_xfer_req)(self.inner.raw(), self.raw) };
        if code == BATON_ERR_BUSY {
            return Err(self);
        }
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: read out once, and `this` is never dropped.
        drop(unsafe { std::ptr::read(&this.inner) });
        Ok(())
    }

    /// The engine's own handle, for hosts that call the table themselves.
    pub fn raw(&self) -> *mut BatonXfer {
        self.raw
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.inner.release_or_defer(self.raw);
    }
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transfer").field("raw", &self.raw).finish_non_exhaustive()
    }
}

impl Engine {
    /// Asks for many transfers in one go: writes the interface's integer of each, returns how many are still
    /// under way. Both slices are equally long. Allocates nothing.
    pub fn poll_many(&self, transfers: &[&Transfer], statuses: &mut [BatonStatus]) -> Result<usize, Error> {
        const AT_ONCE: usize = 64;
        assert_eq!(transfers.len(), statuses.len(), "as many statuses as transfers");
        let mut pending = 0;
        for (group, out) in transfers.chunks(AT_ONCE).zip(statuses.chunks_mut(AT_ONCE)) {
            let mut raw = [std::ptr::null_mut(); AT_ONCE];
            for (slot, transfer) in raw.iter_mut().zip(group) {
                *slot = transfer.raw;
            }
            let inner = self.inner();
            // SAFETY: engine and requests live; both arrays have `group.len()` elements.
            let code = unsafe {
                (inner.table().poll_many)(inner.raw(), raw.as_ptr(), group.len() as u64, out.as_mut_ptr())
            };
            pending += inner.check(code)? as usize;
        }
        Ok(pending)
    }
}
