//! Threads of the engine: named, with all signals blocked, counted, and joined with a deadline.

use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Instant;

/// What every thread of an engine does first, e.g. to tell the log whose it is.
#[derive(Clone)]
pub struct ThreadStart(pub Arc<dyn Fn() + Send + Sync>);

impl std::fmt::Debug for ThreadStart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ThreadStart")
    }
}

/// Counts the engine's running threads.
#[derive(Default)]
pub(crate) struct Threads {
    start: Option<ThreadStart>,
    running: Mutex<Vec<String>>,
    ended: Condvar,
}

impl Threads {
    pub fn new(start: Option<ThreadStart>) -> Threads {
        Threads { start, ..Threads::default() }
    }

    /// Starts a thread. The host's signal handlers never run on it.
    pub fn spawn(self: &Arc<Self>, name: &str, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let threads = Arc::clone(self);
        let own_name = name.to_owned();
        self.running.lock().push(own_name.clone());
        let spawned = with_signals_blocked(|| {
            std::thread::Builder::new().name(name.to_owned()).spawn(move || {
                if let Some(ThreadStart(start)) = &threads.start {
                    start();
                }
                let _leave = Leave { threads, name: own_name };
                body();
            })
        });
        if spawned.is_err() {
            self.leave(name);
        }
        spawned.map(drop)
    }

    fn leave(&self, name: &str) {
        let mut running = self.running.lock();
        if let Some(at) = running.iter().position(|other| other == name) {
            running.swap_remove(at);
        }
        self.ended.notify_all();
    }

    /// Threads running now.
    pub fn names(&self) -> Vec<String> {
        self.running.lock().clone()
    }

    /// Waits until at most the calling thread is left; the names of those that still run at `deadline` otherwise.
    pub fn join(&self, deadline: Instant) -> Result<(), Vec<String>> {
        let mut running = self.running.lock();
        while !running.is_empty() {
            if self.ended.wait_until(&mut running, deadline).timed_out() && !running.is_empty() {
                return Err(running.clone());
            }
        }
        Ok(())
    }
}

/// Takes the thread off the list also when its body panics.
struct Leave {
    threads: Arc<Threads>,
    name: String,
}

impl Drop for Leave {
    fn drop(&mut self) {
        self.threads.leave(&self.name);
    }
}

// A new thread inherits its creator's mask, so the mask is set around the creation.
fn with_signals_blocked<T>(create: impl FnOnce() -> T) -> T {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are valid for writes; `sigfillset` initialises the first, `pthread_sigmask` the second.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
    }
    let made = create();
    // SAFETY: `before` was filled by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    made
}
