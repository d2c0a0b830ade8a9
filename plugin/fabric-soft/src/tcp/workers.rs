//! IO threads that send bulk while the application computes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use baton_fabric::FabricError;
use parking_lot::{Condvar, Mutex};

use super::endpoint::Endpoint;
use super::pump;
use super::shared::Shared;
use super::sys::system;

/// Bytes of one endpoint before the next one has its turn.
const TURN_BYTES: usize = 1 << 20;

#[derive(Default)]
struct Queue {
    endpoints: VecDeque<Arc<Endpoint>>,
    stop: bool,
}

/// The queue of endpoints that have much to send.
#[derive(Default)]
pub(super) struct Workers {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// There will be a thread.
    exist: bool,
}

impl Workers {
    /// None yet; whether there will be one.
    pub fn new(exist: bool) -> Workers {
        Workers { exist, ..Workers::default() }
    }

    /// Hands an endpoint with much to send to an IO thread, if there is one, once.
    pub fn hand_over(&self, endpoint: &Arc<Endpoint>) {
        if self.exist && !endpoint.handed.swap(true, Ordering::SeqCst) {
            self.queue.lock().endpoints.push_back(Arc::clone(endpoint));
            self.changed.notify_one();
        }
    }

    /// Ends the threads.
    pub fn stop(&self) {
        self.queue.lock().stop = true;
        self.changed.notify_all();
    }

    fn next(&self) -> Option<Arc<Endpoint>> {
        let mut queue = self.queue.lock();
        loop {
            if queue.stop {
                return None;
            }
            if let Some(endpoint) = queue.endpoints.pop_front() {
                endpoint.handed.store(false, Ordering::SeqCst);
                return Some(endpoint);
            }
            self.changed.wait(&mut queue);
        }
    }
}

/// Starts `count` threads that never run a signal handler of the application.
pub(super) fn start(shared: &Arc<Shared>, count: usize) -> Result<Vec<JoinHandle<()>>, FabricError> {
    let _blocked = SignalsBlocked::new();
    (0..count)
        .map(|i| {
            let of_thread = Arc::clone(shared);
            let made =
                std::thread::Builder::new().name(format!("baton-tcp-{i}")).spawn(move || work(&of_thread));
            made.map_err(|e| {
                shared.workers.stop();
                system("cannot start an IO thread", e)
            })
        })
        .collect()
}

fn work(shared: &Shared) {
    while let Some(endpoint) = shared.workers.next() {
        let moved = pump::send(shared, &endpoint, TURN_BYTES);
        // Nothing moved: the socket is full, and the event that it has room again goes to whoever serves; or somebody
        // else is sending.
        if moved > 0 && endpoint.tx_runnable() {
            shared.workers.hand_over(&endpoint);
        }
        if shared.has_completions() {
            shared.wake();
        } else if shared.has_ready() {
            shared.wake_later();
        }
    }
}

/// All signals blocked in this thread, and so in those it starts, until dropped.
struct SignalsBlocked(libc::sigset_t);

impl SignalsBlocked {
    fn new() -> SignalsBlocked {
        // SAFETY: a signal set is plain data; both sets live across the calls.
        unsafe {
            let (mut all, mut before) = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            SignalsBlocked(before)
        }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        // SAFETY: the set that `new` saved.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}
