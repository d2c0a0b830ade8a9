//! `cargo xtask bench nixl`: Baton against stock UCX through the stock NIXL API.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use baton_bench::{Peer, Sample, condense, table};
use clap::Args;
use indicatif::ProgressBar;
use serde::Deserialize;

use crate::artifacts;
use crate::run::{Outcome, spell, wait};
use crate::setup::{NIXL, nixl_python, wheel_libraries};
use crate::wheel::scripts;

#[derive(Args)]
pub struct Options {
    /// Also writes the records, as a JSON list.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Runs of every peer; the table shows medians.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Bytes of one descriptor, separated by commas.
    #[arg(long, default_value = "4096,65536,1048576")]
    sizes: String,
    /// Agents without progress threads, where NIXL's default is with: UCX's takes a core of two from its own host.
    #[arg(long)]
    no_progress_thread: bool,
    /// Only the peers whose name contains this text.
    #[arg(long)]
    only: Option<String>,
}

/// A peer with how it is set up.
struct Contestant {
    peer: Peer,
    backend: &'static str,
    environment: &'static [(&'static str, &'static str)],
}

const CONTESTANTS: &[Contestant] = &[
    Contestant { peer: Peer { name: "baton", against: Some("ucx") }, backend: "BATON", environment: &[] },
    Contestant { peer: Peer { name: "ucx", against: None }, backend: "UCX", environment: &[] },
    Contestant {
        peer: Peer { name: "baton-tcp", against: Some("ucx-tcp") },
        backend: "BATON",
        environment: &[("BATON_FABRIC", "tcp")],
    },
    Contestant {
        peer: Peer { name: "ucx-tcp", against: None },
        backend: "UCX",
        environment: &[("UCX_TLS", "tcp")],
    },
];

/// One run of one peer takes seconds; a hung one is ended.
const LIMIT: Duration = Duration::from_secs(300);

pub fn run(options: &Options) -> Outcome<()> {
    let ours = artifacts::plugin_dir()?;
    let stock = wheel_libraries(NIXL)?.join("plugins");
    let wanted = |one: &&Contestant| options.only.as_ref().is_none_or(|part| one.peer.name.contains(part));
    let contestants: Vec<&Contestant> = CONTESTANTS.iter().filter(wanted).collect();
    let folders: Vec<&Path> =
        contestants.iter().map(|one| if one.backend == "UCX" { &*stock } else { &*ours }).collect();
    let mut measured: Vec<(Peer, Vec<Sample>)> =
        contestants.iter().map(|one| (one.peer.clone(), Vec::new())).collect();
    let bar = ProgressBar::new(u64::from(options.runs) * contestants.len() as u64);
    for _ in 0..options.runs {
        // In turn, so that a change of the machine's mood hits everybody.
        for ((one, plugins), (_, samples)) in contestants.iter().zip(&folders).zip(&mut measured) {
            samples.extend(measure(one, plugins, options)?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let records = condense(&measured, true);
    let threads =
        if options.no_progress_thread { "without progress threads" } else { "with progress threads" };
    println!(
        "two processes {threads}, 128 descriptors a transfer with notification, medians of {} runs",
        options.runs
    );
    print!("{}", table(&records));
    for (one, plugins) in contestants.iter().zip(&folders) {
        println!("idle target, {}: {:.2} % of a core", one.peer.name, 100.0 * idle(one, plugins, options)?);
    }
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&records).map_err(|error| error.to_string())?;
        std::fs::write(path, text + "\n")
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    Ok(())
}

fn measure(one: &Contestant, plugins: &Path, options: &Options) -> Outcome<Vec<Sample>> {
    let mut python = script(one, plugins, options)?;
    python.args(["--sizes", &options.sizes]);
    let lines = lines_of(&mut python)?;
    let samples: Vec<Sample> = lines.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
    if samples.is_empty() { Err(format!("`{}` measured nothing", spell(&python))) } else { Ok(samples) }
}

/// CPU time of a connected target that has nothing to do, as a share of one core.
fn idle(one: &Contestant, plugins: &Path, options: &Options) -> Outcome<f64> {
    #[derive(Deserialize)]
    struct Idle {
        idle_core_share: f64,
    }
    // One size, so that there is a session.
    let mut python = script(one, plugins, options)?;
    python.args(["--sizes", "4096", "--budget-mib", "1", "--idle", "3"]);
    let lines = lines_of(&mut python)?;
    let share = lines.iter().find_map(|line| serde_json::from_str::<Idle>(line).ok());
    Ok(share.ok_or_else(|| format!("`{}` measured nothing", spell(&python)))?.idle_core_share)
}

fn script(one: &Contestant, plugins: &Path, options: &Options) -> Outcome<Command> {
    let mut python = nixl_python(NIXL, plugins)?;
    python.arg(scripts().join("bench.py"));
    if options.no_progress_thread {
        python.arg("--no-progress-thread");
    }
    python.env("NIXL_TEST_BACKEND", one.backend).env("NIXL_LOG_LEVEL", "ERROR");
    python.envs(one.environment.iter().copied());
    Ok(python)
}

/// Standard output of a run, line by line. UCX may crash at exit after all its work; what counts is what was printed.
fn lines_of(command: &mut Command) -> Outcome<Vec<String>> {
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::CommandExt;

    let what = spell(command);
    let spawned = command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child: Child = spawned.map_err(|error| format!("cannot start `{what}`: {error}"))?;
    let stdout = child.stdout.take().ok_or("no pipe")?;
    let reader = std::thread::spawn(move || BufReader::new(stdout).lines().map_while(Result::ok).collect());
    wait(child, &format!("`{what}`"), LIMIT)?;
    reader.join().map_err(|_| format!("`{what}`: reading its output failed"))
}
