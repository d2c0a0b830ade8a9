//! A local registration with the count of transfers that use it right now.

use baton_core::registry::LocalRegion;
use baton_fabric::Keys;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Instant;

/// A registered region of this engine, on every fabric.
pub struct Mr {
    pub(crate) region: Arc<LocalRegion>,
    /// One entry per fabric, in the engine's order.
    pub(crate) keys: Vec<Keys>,
    pins: Mutex<Pins>,
    unpinned: Condvar,
}

#[derive(Default)]
struct Pins {
    active: u32,
    revoked: bool,
}

impl Mr {
    pub(crate) fn new(region: Arc<LocalRegion>, keys: Vec<Keys>) -> Mr {
        Mr { region, keys, pins: Mutex::new(Pins::default()), unpinned: Condvar::new() }
    }

    /// Counts one more posted transfer; `false` if the region was withdrawn.
    pub(crate) fn pin(&self) -> bool {
        let mut pins = self.pins.lock();
        if !pins.revoked {
            pins.active += 1;
        }
        !pins.revoked
    }

    /// Takes one `pin` back.
    pub(crate) fn unpin(&self) {
        let mut pins = self.pins.lock();
        pins.active -= 1;
        if pins.active == 0 && pins.revoked {
            self.unpinned.notify_all();
        }
    }

    /// No new pins from now on.
    pub(crate) fn revoke(&self) {
        self.pins.lock().revoked = true;
    }

    /// Waits for the last pin to go; `false` when `deadline` came first.
    pub(crate) fn wait_unpinned(&self, deadline: Instant) -> bool {
        let mut pins = self.pins.lock();
        while pins.active > 0 {
            if self.unpinned.wait_until(&mut pins, deadline).timed_out() {
                return pins.active == 0;
            }
        }
        true
    }
}
