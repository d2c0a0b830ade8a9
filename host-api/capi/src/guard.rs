//! What stands between a foreign caller and Rust: handles, panics, texts of errors.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use baton_host::Engine;
use baton_host::abi::{
    BATON_ERR_INVALID_PARAM, BATON_ERR_PANIC, BATON_ERR_TOO_SMALL, BATON_OK, BatonEngine, BatonEngineV1,
    BatonSlice, BatonStatus,
};

/// An open engine with what chose and loaded it; only ever behind a pointer.
pub struct BatonHost {
    pub(crate) engine: Engine,
}

/// Who has the text of this thread's last error.
enum LastError {
    Ours(String),
    Engines(&'static BatonEngineV1),
}

thread_local!(static LAST_ERROR: RefCell<LastError> = const { RefCell::new(LastError::Ours(String::new())) });

pub(crate) type Failure = (BatonStatus, String);

/// Runs what may fail with a text of ours.
pub(crate) fn guard(call: impl FnOnce() -> Result<BatonStatus, Failure>) -> BatonStatus {
    let panicked = |_| Err((BATON_ERR_PANIC, "libbaton panicked; this is a defect".to_owned()));
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(panicked).unwrap_or_else(|(code, text)| {
        LAST_ERROR.set(LastError::Ours(text));
        code
    })
}

/// Runs one entry of the engine's table.
pub(crate) fn entry(
    host: *mut BatonHost,
    call: impl FnOnce(&'static BatonEngineV1, *mut BatonEngine) -> BatonStatus,
) -> BatonStatus {
    guard(|| {
        let engine = engine(host)?;
        let table = engine.plugin().table();
        let code = call(table, engine.raw());
        if code < 0 {
            LAST_ERROR.set(LastError::Engines(table));
        }
        Ok(code)
    })
}

pub(crate) fn engine<'a>(host: *mut BatonHost) -> Result<&'a Engine, Failure> {
    // SAFETY: a handle is null or one that open gave out and close has not taken back.
    let host = unsafe { host.as_ref() };
    host.map(|h| &h.engine).ok_or((BATON_ERR_INVALID_PARAM, "the host handle is null".to_owned()))
}

pub(crate) fn text(slice: BatonSlice, what: &str) -> Result<String, Failure> {
    // SAFETY: the caller lends the bytes for the call.
    let bytes = unsafe { slice.bytes() };
    let bytes =
        bytes.ok_or_else(|| (BATON_ERR_INVALID_PARAM, format!("{what}: a length without a pointer")))?;
    let text = std::str::from_utf8(bytes).map_err(|e| (BATON_ERR_INVALID_PARAM, format!("{what}: {e}")))?;
    Ok(text.to_owned())
}

/// Writes bytes into the caller's buffer and their number into `needed`.
///
/// # Safety
/// `buf` must be writable for `cap` bytes, `needed` must be null or valid.
pub(crate) unsafe fn give(
    bytes: &[u8],
    buf: *mut u8,
    cap: u64,
    needed: *mut u64,
) -> Result<BatonStatus, Failure> {
    // SAFETY: the caller's promise.
    unsafe {
        if !needed.is_null() {
            needed.write(bytes.len() as u64);
        }
        if bytes.len() as u64 > cap || (buf.is_null() && !bytes.is_empty()) {
            return Err((BATON_ERR_TOO_SMALL, format!("{} bytes needed, {cap} given", bytes.len())));
        }
        if !bytes.is_empty() {
            buf.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }
    Ok(BATON_OK)
}

/// Text of the last error that a function of this library returned on this thread; not NUL-terminated.
///
/// # Safety
/// `buf` must be writable for `cap_bytes` bytes, `needed_bytes` must be null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_last_error(
    buf: *mut u8,
    cap_bytes: u64,
    needed_bytes: *mut u64,
) -> BatonStatus {
    let call = || {
        LAST_ERROR.with_borrow(|last| match last {
            // SAFETY: the caller's promise.
            LastError::Ours(text) => unsafe { give(text.as_bytes(), buf, cap_bytes, needed_bytes) },
            LastError::Engines(table) => {
                let mut unwanted = 0;
                let needed = if needed_bytes.is_null() { &raw mut unwanted } else { needed_bytes };
                // SAFETY: the caller's promise.
                Ok(unsafe { (table.last_error)(buf, cap_bytes, needed) })
            }
        })
    };
    // The text asked for stays the last one: an answer about the buffer does not replace it.
    catch_unwind(AssertUnwindSafe(call))
        .map_or(BATON_ERR_PANIC, |answer| answer.unwrap_or_else(|(code, _)| code))
}
