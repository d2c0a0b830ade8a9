//! CPU time, of this process and of the whole machine.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// The tick in which Linux tells the machine's CPU times to programs: USER_HZ, a constant of its interface.
const TICK: Duration = Duration::from_millis(10);

/// CPU time of this process, user and system.
pub fn of_process() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// CPU time of the whole machine, interrupts included.
pub fn of_machine() -> Duration {
    let stat = std::fs::read_to_string("/proc/stat").expect("Linux has /proc/stat");
    let words: Vec<&str> = stat.lines().next().into_iter().flat_map(str::split_whitespace).collect();
    // user, nice, system, irq, softirq
    let ticks = [1, 2, 3, 6, 7].into_iter().map(|at| words.get(at)?.parse::<u32>().ok()).sum::<Option<u32>>();
    TICK * ticks.expect("its first line holds the CPU times of the whole machine")
}
