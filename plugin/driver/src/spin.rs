//! The progress thread, where the host permits one: spins for a while after the last work, so that a host that sleeps
//! still gets low latency; never while the host itself polls.

use crate::host_calls::HostWatch;
use crate::shared::Shared;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Where the progress thread rests.
#[derive(Default)]
pub(crate) struct Spinner {
    rests: AtomicBool,
    work: Mutex<bool>,
    arrived: Condvar,
}

impl Spinner {
    /// Something was posted or arrived; costs one load while the thread spins or does not exist.
    pub fn kick(&self) {
        if self.rests.load(Ordering::SeqCst) {
            self.stop();
        }
    }

    /// Wakes the thread in any case: under the lock, so that it cannot go to rest in between.
    pub fn stop(&self) {
        *self.work.lock() = true;
        self.arrived.notify_one();
    }

    fn wait_for_work(&self, shared: &Shared) {
        let mut work = self.work.lock();
        self.rests.store(true, Ordering::SeqCst);
        while !*work && !shared.is_stopping() {
            self.arrived.wait(&mut work);
        }
        *work = false;
        self.rests.store(false, Ordering::Release);
    }
}

impl Shared {
    pub(crate) fn spin(self: &Arc<Self>) {
        let spin = Duration::from_micros(u64::from(self.config.spin_us));
        let mut host = HostWatch::default();
        while !self.is_stopping() {
            self.spinner.wait_for_work(self);
            let mut last_work = Instant::now();
            while last_work.elapsed() < spin
                && !self.is_stopping()
                // Spinning would only fight it for the core.
                && !host.host_is_at_it(&self.host_calls, self.clock.now())
            {
                if self.poll() {
                    last_work = Instant::now();
                }
                std::hint::spin_loop();
            }
        }
    }
}
