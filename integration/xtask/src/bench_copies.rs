//! `cargo xtask bench copies`: the engine's local copies against what the same copies cost without an engine.

use std::path::PathBuf;

use clap::Args;

use crate::artifacts;
use crate::run::{Outcome, cargo, minutes, run, say, target_dir};

#[derive(Args)]
pub struct Options {
    /// Rounds in which everybody takes a turn; the table shows medians.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Bytes of a block, separated by commas.
    #[arg(long, default_value = "65536,1048576")]
    sizes: String,
    /// MiB that everybody moves in each case, all rounds together.
    #[arg(long, default_value_t = 7168, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    mib: u32,
    /// Engines with progress threads; without them the calling thread does the work.
    #[arg(long)]
    progress_thread: bool,
    /// Also writes the rows, as a JSON list.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub fn bench(options: &Options) -> Outcome<()> {
    let engine = artifacts::plugin_dir()?;
    say("building baton-bench in release");
    run(cargo().args(["build", "--quiet", "--release", "--locked", "-p", "baton-bench"]), minutes(20))?;
    let mut bench = std::process::Command::new(target_dir().join("release/baton-bench"));
    bench.args(["run", "--rivals", "--fabric", "local", "--enable-notification", "--batch", "128"]);
    bench.args(["--sizes", &options.sizes, "--mib", &options.mib.to_string()]);
    bench.args(["--rounds", &options.runs.to_string(), "--columns", "baton"]);
    bench.args(options.progress_thread.then_some("--progress-thread"));
    if let Some(path) = &options.json {
        bench.arg("--json").arg(path);
    }
    run(bench.env("BATON_PLUGIN", engine.join(artifacts::ENGINE)), minutes(30))
}
