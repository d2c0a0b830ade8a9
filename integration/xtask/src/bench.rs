//! `cargo xtask bench nixl`: Baton against stock UCX through the stock NIXL API.

use std::path::PathBuf;

use baton_bench::{Sample, condense, table};
use clap::Args;
use serde::Deserialize;

use crate::contest::{Contest, Contestant, write_json};
use crate::run::Outcome;

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

const SCRIPT: &str = "bench.py";

pub fn run(options: &Options) -> Outcome<()> {
    let contest = Contest::new(options.only.as_deref())?;
    let mut words = vec!["--sizes", &options.sizes];
    words.extend(options.no_progress_thread.then_some("--no-progress-thread"));
    let measured = contest.take_turns::<Sample>(options.runs, SCRIPT, &words)?;
    let records = condense(&measured, true);
    let threads =
        if options.no_progress_thread { "without progress threads" } else { "with progress threads" };
    println!(
        "two processes {threads}, 128 descriptors a transfer with notification, medians of {} runs",
        options.runs
    );
    print!("{}", table(&records));
    for one in &contest.contestants {
        println!("idle target, {}: {:.2} % of a core", one.peer.name, 100.0 * idle(&contest, one, options)?);
    }
    write_json(options.json.as_deref(), &records)
}

/// CPU time of a connected target that has nothing to do, as a share of one core.
fn idle(contest: &Contest, one: &Contestant, options: &Options) -> Outcome<f64> {
    #[derive(Deserialize)]
    struct Idle {
        idle_core_share: f64,
    }
    // One size, so that there is a session.
    let mut words = vec!["--sizes", "4096", "--budget-mib", "1", "--idle", "3"];
    words.extend(options.no_progress_thread.then_some("--no-progress-thread"));
    let said = contest.records::<Idle>(one, SCRIPT, &words)?;
    said.first().map(|idle| idle.idle_core_share).ok_or_else(|| format!("{}: no answer", one.peer.name))
}
