//! How a step is run.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::wire;

/// How often each step is counted; the middle of the counts is taken.
const CALLS: usize = 7;
/// Calls before that.
pub const WARM_UP: usize = 40;

/// Functions that callgrind finds by their names.
macro_rules! counted {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) $(-> $out:ty)? $body:block)*) => {
        $($(#[$doc])* #[unsafe(no_mangle)] #[inline(never)]
        extern "Rust" fn $name($($arg: $ty),*) $(-> $out)? $body)*
    };
}

/// Runs a step [`CALLS`] times on what `prepare` makes each time, and tells what it took.
pub fn step<T, R>(name: &str, items: u64, mut prepare: impl FnMut() -> T, mut run: impl FnMut(T) -> R) {
    let mut times: Vec<Duration> = (0..CALLS)
        .map(|_| {
            let input = prepare();
            let start = Instant::now();
            let output = wire::counting(|| run(black_box(input)));
            let took = start.elapsed();
            black_box(output);
            took
        })
        .collect();
    times.sort_unstable();
    let each = times[CALLS / 2].as_secs_f64() * 1e9 / items as f64;
    println!("{name:<24} {:>12.3?}  at best {:>12.3?}  {each:>8.1} ns each", times[CALLS / 2], times[0]);
}
