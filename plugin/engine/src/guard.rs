//! What every entry goes through: no panic crosses the boundary, a forked child touches nothing, an error leaves its text.

use baton_abi::{BATON_ERR_FORKED, BATON_ERR_PANIC, BatonStatus};
use baton_driver::{Code, Error};
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

thread_local! {
    static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Text of the last error of this thread.
pub fn last_error() -> String {
    LAST_ERROR.with_borrow(String::clone)
}

fn remember(text: &str) {
    LAST_ERROR.with_borrow_mut(|last| {
        last.clear();
        last.push_str(text);
    });
}

/// The code of the ABI for an error of the engine; exhaustive on purpose.
pub fn code(code: Code) -> BatonStatus {
    use baton_abi as abi;
    match code {
        Code::InvalidParam => abi::BATON_ERR_INVALID_PARAM,
        Code::NotFound => abi::BATON_ERR_NOT_FOUND,
        Code::Stale => abi::BATON_ERR_STALE,
        Code::RemoteDisconnect => abi::BATON_ERR_REMOTE_DISCONNECT,
        Code::RepostActive => abi::BATON_ERR_REPOST_ACTIVE,
        Code::Busy => abi::BATON_ERR_BUSY,
        Code::Unsupported => abi::BATON_ERR_UNSUPPORTED,
        Code::Limit => abi::BATON_ERR_LIMIT,
        Code::Timeout => abi::BATON_ERR_TIMEOUT,
        Code::Canceled => abi::BATON_ERR_CANCELED,
        Code::Local => abi::BATON_ERR_LOCAL,
        Code::TooSmall => abi::BATON_ERR_TOO_SMALL,
        Code::Auth => abi::BATON_ERR_AUTH,
        Code::Protocol => abi::BATON_ERR_PROTOCOL,
        Code::Shutdown => abi::BATON_ERR_SHUTDOWN,
        Code::Panic => abi::BATON_ERR_PANIC,
        Code::Version => abi::BATON_ERR_VERSION,
    }
}

/// Notes an error for `last_error` and answers its code.
pub fn fail(error: &Error) -> BatonStatus {
    remember(&error.text);
    code(error.code)
}

/// Whether this process is a forked child of the one that first used the engine. One load: the word lies on a
/// page that the kernel hands to a child zeroed (MADV_WIPEONFORK).
pub fn is_forked() -> bool {
    static WORD: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();
    match WORD.get_or_init(|| fork_word().ok()) {
        Some(word) => word.load(Ordering::Relaxed) == 0,
        None => false,
    }
}

fn fork_word() -> rustix::io::Result<&'static AtomicU32> {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous};
    const LEN: usize = 4096;
    // SAFETY: a fresh private page that is never unmapped; it starts as zeros, a valid atomic.
    let word = unsafe {
        let page =
            mmap_anonymous(std::ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?;
        madvise(page, LEN, Advice::LinuxWipeOnFork)?;
        &*page.cast::<AtomicU32>()
    };
    word.store(1, Ordering::Relaxed);
    Ok(word)
}

/// Runs one entry. `poison` is told of a panic.
pub fn entry(poison: impl FnOnce(), body: impl FnOnce() -> Result<BatonStatus, Error>) -> BatonStatus {
    if is_forked() {
        remember(
            "this process is a forked child of the one that created the engine; create an engine of its own after exec",
        );
        return BATON_ERR_FORKED;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => status,
        Ok(Err(error)) => fail(&error),
        Err(panic) => {
            let text = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "no text".into());
            poison();
            remember(&format!("the engine panicked and refuses further work: {text}"));
            BATON_ERR_PANIC
        }
    }
}
