//! The one clock of the engine.

use baton_core::Nanos;

/// Monotonic time since the engine was created.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start_ns: u64,
}

impl Clock {
    /// A clock that starts now (at 1 ns, so that 0 can mean "never").
    pub fn start() -> Clock {
        Clock { start_ns: monotonic_ns() }
    }

    /// Now.
    pub fn now(&self) -> Nanos {
        Nanos(monotonic_ns() - self.start_ns + 1)
    }
}

/// One read of the clock and one multiplication: it is read at every post and every completion.
fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the only pointer is to a local. This clock exists everywhere, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
