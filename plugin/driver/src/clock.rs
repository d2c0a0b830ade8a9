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
        Clock { start_ns: read_ns(libc::CLOCK_MONOTONIC) }
    }

    /// Now.
    pub fn now(&self) -> Nanos {
        Nanos(read_ns(libc::CLOCK_MONOTONIC) - self.start_ns + 1)
    }

    /// [`Clock::now`], up to a tick of the kernel (10 ms) late. It is a fifth of the price, so whoever only watches for seconds of
    /// silence looks at this one.
    pub fn lately(&self) -> Nanos {
        Nanos(read_ns(libc::CLOCK_MONOTONIC_COARSE).saturating_sub(self.start_ns) + 1)
    }
}

/// One read of a clock and one multiplication: it is read at every post.
fn read_ns(clock: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the only pointer is to a local. These clocks exist everywhere, so the call cannot fail.
    unsafe { libc::clock_gettime(clock, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
