//! `ib_write_bw` and `ib_read_bw`: one run, its throughput, and what the machine spent on it.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use baton_bench::Sample;

use crate::verbs::{Case, LIMIT, Options};
use crate::{Outcome, cpu};

/// Killed when dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It ends by itself after a good run.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a program prints, if it ends well and in time; its errors are shown only otherwise.
pub fn output_within(command: &mut Command, limit: Duration) -> Outcome<String> {
    let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let child = spawned.map_err(|error| format!("cannot start {command:?}: {error}"))?;
    let pid = child.id();
    let (tell, ended) = mpsc::channel();
    let waiter = std::thread::spawn(move || {
        // The receiver is gone only after a time-out, and then nobody wants the answer.
        let _ = tell.send(child.wait_with_output());
    });
    let answer = ended.recv_timeout(limit);
    if answer.is_err() {
        // SAFETY: a plain system call; the child has not been waited for, so the number is still its own.
        unsafe { libc::kill(pid as libc::pid_t, libc::SIGKILL) };
    }
    waiter.join().map_err(|_| "the waiting thread panicked")?;
    let output = answer.map_err(|_| format!("{command:?}: no end within {} s", limit.as_secs()))?;
    let output = output.map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        Ok(said)
    } else {
        Err(format!("{command:?}: {}\n{said}{errors}", output.status))
    }
}

/// A port of its own for every run: the last one's may still be in TIME_WAIT.
fn next_port() -> u16 {
    static PORT: AtomicU16 = AtomicU16::new(18_600);
    PORT.fetch_add(1, Ordering::Relaxed)
}

/// Waits until somebody listens on a TCP port.
fn wait_for_listener(port: u16) -> Outcome<()> {
    const LISTEN: &str = "0A";
    let wanted = format!(":{port:04X}");
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        for file in ["/proc/net/tcp", "/proc/net/tcp6"] {
            let table = std::fs::read_to_string(file).unwrap_or_default();
            let listens = |line: &str| {
                let words: Vec<&str> = line.split_whitespace().collect();
                words.get(1).is_some_and(|local| local.ends_with(&wanted)) && words.get(3) == Some(&LISTEN)
            };
            if table.lines().any(listens) {
                return Ok(());
            }
        }
        if Instant::now() > deadline {
            return Err(format!("perftest's server does not listen on port {port}"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A look at the machine: packets that the devices have sent, and CPU time.
type Look = (u64, Duration);

fn packets(devices: &[&str]) -> u64 {
    let counter = |device: &&str| {
        let path = PathBuf::from(format!("/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts"));
        std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok()
    };
    devices.iter().filter_map(counter).sum()
}

/// CPU time from the first to the last look between which data moved: perftest's start and end cost much under
/// emulation and are no part of what is compared.
fn busy(looks: &[Look]) -> Option<Duration> {
    let steps: Vec<u64> = looks.windows(2).map(|pair| pair[1].0.saturating_sub(pair[0].0)).collect();
    let much = steps.iter().max()? / 20;
    let first = steps.iter().position(|step| *step > much)?;
    let last = steps.iter().rposition(|step| *step > much)?;
    Some(looks[last + 1].1.saturating_sub(looks[first].1))
}

/// One run over all queue pairs, `mib` in all.
pub fn run(options: &Options, case: Case) -> Outcome<Sample> {
    let port = next_port();
    let lanes = u64::from(options.lanes);
    let each = (options.mib << 20).div_ceil(case.size * lanes).max(5);
    let program = if case.op == "write" { "ib_write_bw" } else { "ib_read_bw" };
    let command = |device: &str| {
        let mut command = Command::new(program);
        command.args(["-F", "-N", "-d", device, "-p", &port.to_string()]);
        command.args(["-x", &options.gid_index.to_string(), "-s", &case.size.to_string()]);
        command.args(["-n", &each.to_string(), "-q", &lanes.to_string()]);
        command.args(["-t", &case.tx_depth().to_string()]);
        command.args(["-u", &options.ib_timeout.to_string()]);
        if case.op == "read" {
            // Waiting for events is not offered for WRITE.
            command.arg("-e");
        }
        command
    };
    let server = command(&options.target_device)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let _server = Server(server.map_err(|error| format!("cannot start {program}: {error}"))?);
    wait_for_listener(port)?;
    let devices = [options.device.as_str(), options.target_device.as_str()];
    let over = AtomicBool::new(false);
    let (said, looks) = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut looks: Vec<Look> = Vec::new();
            while !over.load(Ordering::Relaxed) {
                looks.push((packets(&devices), cpu::of_machine()));
                std::thread::sleep(Duration::from_millis(50));
            }
            looks
        });
        let said = output_within(command(&options.device).arg("localhost"), LIMIT);
        over.store(true, Ordering::Relaxed);
        (said, watcher.join().unwrap_or_default())
    });
    let said = said?;
    let mib_per_s = average(&said, case.size).ok_or_else(|| format!("{program} says: {said}"))?;
    let gib = (each * lanes * case.size) as f64 / f64::from(1 << 30);
    Ok(Sample {
        op: case.op.to_uppercase(),
        size_bytes: case.size,
        batch: case.tx_depth() * lanes,
        gbps: mib_per_s * f64::from(1 << 20) * 8.0 / 1e9,
        machine_cpu_s_per_gib: busy(&looks).map(|time| time.as_secs_f64() / gib),
        ..Sample::default()
    })
}

/// The average in MiB/s, fourth in the line that begins with the size.
fn average(said: &str, size: u64) -> Option<f64> {
    let size = size.to_string();
    let lines = said.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let line = lines.into_iter().find(|words| words.first() == Some(&size.as_str()))?;
    line.get(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_average_is_read_from_the_line_of_the_size() {
        let said = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
                    65536      500              82.61              73.88              0.001182\n";
        assert_eq!(average(said, 65_536), Some(73.88));
        assert_eq!(average(said, 500), None);
    }

    #[test]
    fn only_the_time_in_which_data_moved_counts() {
        let looks: Vec<Look> = [(0, 0), (1, 100), (1000, 110), (2000, 120), (2001, 200)]
            .map(|(n, ms)| (n, Duration::from_millis(ms)))
            .into();
        assert_eq!(busy(&looks), Some(Duration::from_millis(20)));
        assert_eq!(busy(&[]), None);
    }
}
