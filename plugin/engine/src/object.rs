//! What the opaque pointers of the ABI point at.

use crate::guard;
use crate::logging::{self, SinkHandle};
use crate::settings::Settings;
use baton_abi::{BatonCreateOptions, BatonEngine, BatonStatus, BatonXfer};
use baton_driver::{Config, Driver, Error, ThreadStart, Xfer, err};
use parking_lot::Mutex;
use std::sync::Arc;

const ENGINE_MAGIC: u64 = u64::from_le_bytes(*b"BATONENG");
const XFER_MAGIC: u64 = u64::from_le_bytes(*b"BATONXFR");
const DEAD: u64 = 0;

/// Behind `*mut BatonEngine`.
pub struct EngineObject {
    magic: u64,
    pub driver: Driver,
    log_id: u64,
    pub sink: Mutex<Option<SinkHandle>>,
}

/// Behind `*mut BatonXfer`.
pub struct XferObject {
    magic: u64,
    pub xfer: Arc<Xfer>,
}

/// Checks the options and makes an engine.
///
/// # Safety
/// `options` must point to options whose slices are readable.
pub unsafe fn create(options: *const BatonCreateOptions) -> Result<Box<EngineObject>, Error> {
    if options.is_null() {
        return Err(err!(InvalidParam, "options is null"));
    }
    // SAFETY: not null; the first field alone is read before the size is known.
    let size = unsafe { (&raw const (*options).size_bytes).read() };
    if (size as usize) < size_of::<BatonCreateOptions>() {
        let needed = size_of::<BatonCreateOptions>();
        return Err(err!(InvalidParam, "options.size_bytes is {size}; this engine needs at least {needed}"));
    }
    // SAFETY: the caller's structure is at least as large as ours.
    let options = unsafe { options.read() };
    let known = baton_abi::BATON_CREATE_PROGRESS_THREAD;
    if options.flags & !known != 0 || options.reserved != 0 {
        return Err(err!(
            InvalidParam,
            "options: flags {:#x} (known {known:#x}) or reserved {} is not valid",
            options.flags,
            options.reserved
        ));
    }
    // SAFETY: the caller's promise.
    let name = unsafe { crate::convert::name(options.agent_name)? };
    let sink = options.log.map(|log| crate::logging::add(log, options.log_user, options.log_level));
    let log_id = sink.as_ref().map_or(0, SinkHandle::id);
    let _scope = logging::scope(log_id);
    // SAFETY: the caller's promise.
    let settings: Settings = unsafe { crate::settings::read(&options)? };
    let fabrics = settings.fabrics()?;
    let thread_start = Some(ThreadStart(Arc::new(move || logging::enter(log_id))));
    let notify_only = fabrics.notify_only;
    let config = Config { thread_start, notify_only, ..settings.config(name, options.flags, fabrics.notes) };
    let driver = Driver::create(config, fabrics.list)?;
    Ok(Box::new(EngineObject { magic: ENGINE_MAGIC, driver, log_id, sink: Mutex::new(sink) }))
}

/// The engine behind a pointer.
///
/// # Safety
/// The pointer is null or one that `create` gave and `destroy` has not taken.
pub unsafe fn engine<'a>(engine: *mut BatonEngine) -> Result<&'a EngineObject, Error> {
    let object = engine.cast::<EngineObject>();
    if object.is_null() || !object.is_aligned() {
        return Err(err!(InvalidParam, "the engine pointer is null or misaligned"));
    }
    // SAFETY: the caller's promise; the magic word catches most broken ones.
    let object = unsafe { &*object };
    if object.magic != ENGINE_MAGIC {
        return Err(err!(InvalidParam, "the engine pointer does not point at an engine of this library"));
    }
    Ok(object)
}

/// The transfer behind a pointer.
///
/// # Safety
/// The pointer is null or one that a create entry gave and `release_xfer_req` has not taken.
pub unsafe fn xfer<'a>(xfer: *mut BatonXfer) -> Result<&'a XferObject, Error> {
    let object = xfer.cast::<XferObject>();
    if object.is_null() || !object.is_aligned() {
        return Err(err!(InvalidParam, "the transfer pointer is null or misaligned"));
    }
    // SAFETY: the caller's promise; the magic word catches most broken ones.
    let object = unsafe { &*object };
    if object.magic != XFER_MAGIC {
        return Err(err!(InvalidParam, "the transfer pointer does not point at a transfer of this library"));
    }
    Ok(object)
}

/// Hands a transfer to the host.
pub fn give_xfer(xfer: Arc<Xfer>) -> *mut BatonXfer {
    Box::into_raw(Box::new(XferObject { magic: XFER_MAGIC, xfer })).cast()
}

/// Takes a transfer back from the host and frees it.
///
/// # Safety
/// As [`xfer`], and nobody uses the pointer any more.
pub unsafe fn take_xfer(xfer: *mut BatonXfer) {
    // SAFETY: it was made by `give_xfer`, the caller gives it up.
    let mut object = unsafe { Box::from_raw(xfer.cast::<XferObject>()) };
    object.magic = DEAD;
}

/// Takes an engine back from the host: joins its threads, then frees it.
///
/// # Safety
/// As [`engine`], and nobody uses the pointer any more.
pub unsafe fn take_engine(engine: *mut BatonEngine) -> Result<(), Error> {
    // SAFETY: it was made by `create`, the caller gives it up.
    let mut object = unsafe { Box::from_raw(engine.cast::<EngineObject>()) };
    let _scope = logging::scope(object.log_id);
    let outcome = object.driver.destroy();
    if outcome.is_err() {
        // A thread that does not end may still use the driver: losing the memory is the lesser evil.
        std::mem::forget(object);
        return outcome;
    }
    object.sink.lock().take();
    object.magic = DEAD;
    Ok(())
}

/// Runs an entry that works on an engine.
///
/// # Safety
/// As [`engine`].
pub unsafe fn with(
    engine_ptr: *mut BatonEngine,
    body: impl FnOnce(&EngineObject) -> Result<BatonStatus, Error>,
) -> BatonStatus {
    let poison = || {
        // SAFETY: the caller's promise.
        if let Ok(object) = unsafe { engine(engine_ptr) } {
            object.driver.poison();
        }
    };
    guard::entry(poison, || {
        // SAFETY: the caller's promise.
        let object = unsafe { engine(engine_ptr)? };
        let _scope = logging::scope(object.log_id);
        body(object)
    })
}
