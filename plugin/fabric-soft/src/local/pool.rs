//! The copy threads: help with endpoints that have megabytes to pull. Started when first needed.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::door::SlotSet;
use super::inner::{Inner, SLICE_BYTES};
use super::joint::Joint;

/// A thread that has nothing to do for so long looks whether the fabric still exists.
const IDLE: Duration = Duration::from_secs(60);

/// A thread that helped with a pull stays awake for the next one for so long: they follow each other within tens of microseconds, and a
/// thread that is woken often has to wait for the processor of the one that woke it.
const LINGER: Duration = Duration::from_micros(200);

#[derive(Default)]
struct Threads {
    handles: Vec<std::thread::JoinHandle<()>>,
    running: usize,
}

/// See the module's text.
pub struct Pool {
    limit: usize,
    /// Slots that want help.
    heavy: SlotSet,
    /// Help was asked for with a pull before there were threads.
    wanted: AtomicBool,
    /// Threads that sleep.
    idle: AtomicUsize,
    /// Threads that copy.
    busy: AtomicUsize,
    started: AtomicBool,
    stop: AtomicBool,
    threads: Mutex<Threads>,
    wake: Condvar,
    ended: Condvar,
}

impl Pool {
    pub fn new(limit: usize) -> Pool {
        Pool {
            limit,
            heavy: SlotSet::new(),
            wanted: AtomicBool::new(false),
            idle: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            started: AtomicBool::new(limit == 0),
            stop: AtomicBool::new(false),
            threads: Mutex::default(),
            wake: Condvar::new(),
            ended: Condvar::new(),
        }
    }

    /// Asks for help with a slot. A fabric without copy threads ignores it.
    pub fn offer(&self, slot: u32) {
        if self.limit == 0 {
            return;
        }
        self.heavy.add(slot);
        // Pairs with `wait`: either this sees the sleeper or the sleeper sees the slot.
        if self.idle.load(Ordering::SeqCst) != 0 {
            let _threads = self.threads.lock();
            self.wake.notify_one();
        }
    }

    /// Asks for help with the pull at hand.
    pub fn offer_joint(&self, joint: &Joint) {
        if !self.started.load(Ordering::Relaxed) {
            self.wanted.store(true, Ordering::Relaxed);
        }
        // Pairs with `wait`, as above.
        if joint.is_ready() && self.idle.load(Ordering::SeqCst) != 0 {
            let _threads = self.threads.lock();
            self.wake.notify_all();
        }
    }

    /// Whether a thread is copying.
    pub fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed) != 0
    }

    /// Whether help was asked for and no thread exists yet.
    pub fn wants_start(&self) -> bool {
        !self.started.load(Ordering::Relaxed)
            && (self.wanted.load(Ordering::Relaxed) || !self.heavy.is_empty())
    }

    /// Starts the threads, once.
    pub fn start(&self, inner: &Arc<Inner>) {
        if self.started.swap(true, Ordering::SeqCst) {
            return;
        }
        let mut threads = self.threads.lock();
        let restore = block_signals();
        for i in 0..self.limit {
            let weak = Arc::downgrade(inner);
            let name = format!("baton-copy-{i}");
            match std::thread::Builder::new().name(name).spawn(move || run(&weak)) {
                Ok(handle) => {
                    threads.handles.push(handle);
                    threads.running += 1;
                }
                Err(error) => tracing::warn!("no copy thread {i}: {error}; other threads do its work"),
            }
        }
        restore_signals(&restore);
    }

    /// Ends the threads; `false` if some were not through by the deadline.
    pub fn stop(&self, deadline: Instant) -> bool {
        self.stop.store(true, Ordering::SeqCst);
        let mut threads = self.threads.lock();
        self.wake.notify_all();
        while threads.running != 0 {
            if self.ended.wait_until(&mut threads, deadline).timed_out() {
                break;
            }
        }
        let through = threads.running == 0;
        let handles = std::mem::take(&mut threads.handles);
        drop(threads);
        if through {
            for handle in handles {
                let _ = handle.join();
            }
        }
        through
    }

    /// Sleeps until somebody asks for help; `false`: end.
    fn wait(&self, joint: &Joint) -> bool {
        let mut threads = self.threads.lock();
        self.idle.fetch_add(1, Ordering::SeqCst);
        if self.heavy.is_empty() && !joint.is_ready() && !self.stop.load(Ordering::SeqCst) {
            let _ = self.wake.wait_for(&mut threads, IDLE);
        }
        self.idle.fetch_sub(1, Ordering::SeqCst);
        !self.stop.load(Ordering::SeqCst)
    }
}

fn run(weak: &Weak<Inner>) {
    // The fabric stops its threads before it lets go of `inner`, so this reference does not keep it alive for long.
    let Some(inner) = weak.upgrade() else { return };
    let pool = &inner.pool;
    let mut cursor = 0;
    loop {
        join(&inner);
        while let Some(slot) = pool.heavy.pop(cursor) {
            cursor = slot + 1;
            pool.busy.fetch_add(1, Ordering::Relaxed);
            while !pool.stop.load(Ordering::Relaxed) {
                let moved = inner.work_on(slot, SLICE_BYTES);
                inner.stats.copy_slices.add(u64::from(moved.bytes != 0));
                if !moved.more {
                    break;
                }
                join(&inner);
            }
            pool.busy.fetch_sub(1, Ordering::Relaxed);
        }
        if !pool.wait(&inner.joint) {
            break;
        }
    }
    let mut threads = pool.threads.lock();
    threads.running -= 1;
    pool.ended.notify_all();
}

/// Helps with the pull at hand: somebody waits for it.
fn join(inner: &Inner) {
    if !inner.joint.is_ready() {
        return;
    }
    inner.pool.busy.fetch_add(1, Ordering::Relaxed);
    let mut last = Instant::now();
    while last.elapsed() < LINGER && inner.pool.heavy.is_empty() && !inner.pool.stop.load(Ordering::Relaxed) {
        let mut helped = false;
        while inner.joint.help() {
            inner.stats.joined.add(1);
            helped = true;
        }
        if helped {
            last = Instant::now();
        }
        std::thread::yield_now();
    }
    inner.pool.busy.fetch_sub(1, Ordering::Relaxed);
}

/// Signals belong to the application's threads; a thread inherits the mask of the one that starts it.
fn block_signals() -> libc::sigset_t {
    let mut all = std::mem::MaybeUninit::uninit();
    let mut before = std::mem::MaybeUninit::uninit();
    // SAFETY: both sets are ours, and sigfillset and pthread_sigmask initialise them.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

fn restore_signals(mask: &libc::sigset_t) {
    // SAFETY: the mask came from pthread_sigmask.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) };
}
