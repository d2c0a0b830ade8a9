//! CPU time, read out of /proc.

use std::time::Duration;

/// The tick in which Linux tells CPU times to programs: USER_HZ, a constant of its interface.
const TICK: Duration = Duration::from_millis(10);

fn ticks(words: &str, fields: impl IntoIterator<Item = usize>) -> Option<u32> {
    let words: Vec<&str> = words.split_whitespace().collect();
    fields.into_iter().map(|at| words.get(at)?.parse::<u32>().ok()).sum()
}

/// CPU time of this process, user and system.
pub fn of_process() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // After the program's name, which may hold anything, come the fields from the third on.
    let rest = stat.rsplit(')').next().unwrap_or_default();
    TICK * ticks(rest, [11, 12]).unwrap_or_default()
}

/// CPU time of the whole machine, interrupts included.
pub fn of_machine() -> Duration {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let line = stat.lines().next().unwrap_or_default();
    // user, nice, system, irq, softirq
    TICK * ticks(line, [1, 2, 3, 6, 7]).unwrap_or_default()
}
