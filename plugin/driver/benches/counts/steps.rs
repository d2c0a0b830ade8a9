//! How a step is run.

use std::hint::black_box;
use std::time::Instant;

use crate::wire;

/// How often each step is counted; the middle of the counts is taken.
pub const CALLS: usize = 7;
/// Calls before that.
pub const WARM_UP: usize = 40;

/// Functions that callgrind finds by their names.
macro_rules! counted {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)? $body:block)*) => {
        $($(#[$doc])* #[unsafe(no_mangle)] #[inline(never)]
        extern "Rust" fn $name($($arg: $ty),*) $(-> $out)? $body)*
    };
}

/// Whether the steps are timed and not counted: cargo says so.
pub fn is_timed() -> bool {
    std::env::args().any(|arg| arg == "--bench")
}

/// Nanoseconds of one call.
pub fn timed<R>(run: impl FnOnce() -> R) -> (u64, R) {
    let start = Instant::now();
    let output = wire::counting(run);
    (start.elapsed().as_nanos() as u64, output)
}

/// Runs a step [`CALLS`] times on what `prepare` makes each time, and tells what it took.
pub fn step<T, R>(name: &str, items: u64, mut prepare: impl FnMut() -> T, mut run: impl FnMut(T) -> R) {
    let mut times: Vec<u64> = (0..CALLS)
        .map(|_| {
            let input = prepare();
            let (took, output) = timed(|| run(black_box(input)));
            black_box(output);
            took
        })
        .collect();
    times.sort_unstable();
    let each = times[CALLS / 2] as f64 / items as f64;
    println!("{name:<24} {:>12} ns  at best {:>12} ns  {each:>8.1} ns each", times[CALLS / 2], times[0]);
}
