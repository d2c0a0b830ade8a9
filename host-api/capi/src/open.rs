//! Opening, closing, and what the host side knows better than the engine.

use core::ffi::{c_char, c_void};
use std::collections::BTreeMap;

use baton_host::abi::{
    BATON_CREATE_PROGRESS_THREAD, BATON_ERR_INVALID_PARAM, BATON_LOG_TRACE, BATON_OK, BatonCreateOptions,
    BatonSetting, BatonSlice, BatonStatus,
};
use baton_host::{Engine, EngineOptions, Environment, Error, Level, LogFn, LogTo, OpenError};

use crate::guard::{BatonHost, Failure, engine, give, guard, text};

type CLog = unsafe extern "C" fn(*mut c_void, u32, BatonSlice, BatonSlice);

/// Chooses an engine by the settings (`options` before environment before file before default), loads it and
/// creates it. Without a log function records go to stderr. `log_level` 0 leaves the level to the setting `log`.
///
/// # Safety
/// `options` and all it points at must be valid for the call, `log` and `log_user` until the host is closed; `out`
/// must be valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_engine_open(
    options: *const BatonCreateOptions,
    out: *mut *mut BatonHost,
) -> BatonStatus {
    guard(|| {
        // SAFETY: null or valid by the caller's promise.
        let (options, out) = unsafe { (options.as_ref(), out.as_mut()) };
        let (Some(options), Some(out)) = (options, out) else {
            return Err(invalid("options or out is null"));
        };
        let engine = Engine::open(translate(options)?).map_err(failure)?;
        *out = Box::into_raw(Box::new(BatonHost { engine }));
        Ok(BATON_OK)
    })
}

/// Destroys the engine and frees the handle. Requests not released die with it.
///
/// # Safety
/// `host` must come from `baton_engine_open` and is not used again, by no thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_engine_close(host: *mut BatonHost) -> BatonStatus {
    guard(|| {
        engine(host)?;
        // SAFETY: not null, and made by `baton_engine_open`.
        drop(unsafe { Box::from_raw(host) });
        Ok(BATON_OK)
    })
}

/// Counters and sessions: one JSON object; its key `choice` says what was chosen and why.
///
/// # Safety
/// `buf` must be writable for `cap_bytes` bytes, `needed_bytes` must be null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_stats(
    host: *mut BatonHost,
    buf: *mut u8,
    cap_bytes: u64,
    needed_bytes: *mut u64,
) -> BatonStatus {
    guard(|| {
        let json = engine(host)?.stats().map_err(refused)?;
        // SAFETY: the caller's promise.
        unsafe { give(json.as_bytes(), buf, cap_bytes, needed_bytes) }
    })
}

/// Changes the level of the log; 0 ends it.
///
/// # Safety
/// `host` must be an open one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_set_log_level(host: *mut BatonHost, level: u32) -> BatonStatus {
    guard(|| {
        let level = level_of(level)?;
        engine(host)?.set_log_level(level).map_err(refused).map(|()| BATON_OK)
    })
}

/// Which fabrics and devices this machine offers to the engine that the settings choose: one JSON object.
///
/// # Safety
/// `settings` must have `settings_count` valid elements; `buf` must be writable for `cap_bytes` bytes, `needed_bytes`
/// must be null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_probe(
    settings: *const BatonSetting,
    settings_count: u64,
    buf: *mut u8,
    cap_bytes: u64,
    needed_bytes: *mut u64,
) -> BatonStatus {
    guard(|| {
        let params = params(settings, settings_count)?;
        let json = baton_host::probe(&params, &Environment::Process).map_err(failure)?;
        // SAFETY: the caller's promise.
        unsafe { give(json.as_bytes(), buf, cap_bytes, needed_bytes) }
    })
}

/// Version of this library, NUL-terminated and static.
#[unsafe(no_mangle)]
pub extern "C" fn baton_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

fn translate(options: &BatonCreateOptions) -> Result<EngineOptions, Failure> {
    let expected = size_of::<BatonCreateOptions>() as u32;
    if options.size_bytes < expected {
        return Err(invalid(&format!(
            "options.size_bytes is {}, at least {expected} needed",
            options.size_bytes
        )));
    }
    if options.reserved != 0 || options.flags & !BATON_CREATE_PROGRESS_THREAD != 0 {
        return Err(invalid(&format!("options: flags {:#x}, reserved {}", options.flags, options.reserved)));
    }
    let mut params = params(options.settings, options.settings_count)?;
    if let Some(level) = level_of(options.log_level)? {
        params.entry("log".to_owned()).or_insert_with(|| level.word().to_owned());
    }
    let log =
        options.log.map_or(LogTo::Stderr, |function| LogTo::Function(foreign(function, options.log_user)));
    Ok(EngineOptions::new(text(options.agent_name, "agent_name")?)
        .params(params)
        .progress_thread(options.flags & BATON_CREATE_PROGRESS_THREAD != 0)
        .log(log))
}

fn params(settings: *const BatonSetting, count: u64) -> Result<BTreeMap<String, String>, Failure> {
    if count > 0 && settings.is_null() {
        return Err(invalid("settings is null and settings_count is not 0"));
    }
    // SAFETY: as many as the caller says; none need no pointer.
    let list = if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(settings, count as usize) } };
    let mut params = BTreeMap::new();
    for setting in list {
        let key = text(setting.key, "key of a setting")?;
        let value = text(setting.value, &key)?;
        if params.insert(key.clone(), value).is_some() {
            return Err(invalid(&format!("setting {key:?} is given twice")));
        }
    }
    Ok(params)
}

/// A foreign log function as one of ours.
fn foreign(function: CLog, user: *mut c_void) -> LogFn {
    struct User(*mut c_void);
    // SAFETY: the interface says that the function is called on any thread, with this argument.
    unsafe impl Send for User {}
    // SAFETY: as above.
    unsafe impl Sync for User {}
    let user = User(user);
    Box::new(move |level: Level, target: &str, message: &str| {
        let user = &user;
        let (target, message) = (BatonSlice::of(target.as_bytes()), BatonSlice::of(message.as_bytes()));
        // SAFETY: the caller of open promised that both stay valid; the slices are borrowed for the call.
        unsafe { function(user.0, level as u32, target, message) }
    })
}

fn level_of(level: u32) -> Result<Option<Level>, Failure> {
    match level {
        0 => Ok(None),
        1..=BATON_LOG_TRACE => Ok(Some(Level::from_raw(level))),
        _ => Err(invalid(&format!("log level {level}, at most {BATON_LOG_TRACE} expected"))),
    }
}

fn invalid(text: &str) -> Failure {
    (BATON_ERR_INVALID_PARAM, text.to_owned())
}

fn failure(error: OpenError) -> Failure {
    (error.code().raw(), error.to_string())
}

fn refused(error: Error) -> Failure {
    (error.code.raw(), error.to_string())
}
