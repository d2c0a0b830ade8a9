//! The one clock of the engine.

use baton_core::Nanos;
use std::time::Instant;

/// Monotonic time since the engine was created.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// A clock that starts now (at 1 ns, so that 0 can mean "never").
    pub fn start() -> Clock {
        Clock { start: Instant::now() }
    }

    /// Now.
    pub fn now(&self) -> Nanos {
        Nanos(self.start.elapsed().as_nanos() as u64 + 1)
    }
}
