//! `cargo xtask bench notify-verbs`: bare notifications over RDMA against Mooncake's two-sided transport, in the guest.

use std::path::PathBuf;

use clap::Args;

use crate::run::{Outcome, cargo, minutes, root, run, say, target_dir, work_dir};
use crate::{artifacts, setup, vm};

#[derive(Args)]
pub struct Options {
    /// Runs of everybody, in turn; the table shows medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Notifications of a stream.
    #[arg(long, default_value_t = 3000)]
    count: u64,
    /// Notifications that are sent back, one at a time.
    #[arg(long, default_value_t = 500)]
    pings: u64,
    /// Also writes the records, as a JSON list.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Words for `baton-bench notify` itself, e.g. `--backend two-sided --look-us 500`.
    #[arg(last = true)]
    more: Vec<String>,
}

pub fn bench(options: &Options) -> Outcome<()> {
    artifacts::build()?;
    say("building baton-bench in release");
    run(cargo().args(["build", "--quiet", "--release", "--locked", "-p", "baton-bench"]), minutes(20))?;
    let results = work_dir("guest")?;
    let json = results.join("notify.json");
    let mut vm = vm::script()?;
    vm.args(["-t", "900", "-w"]).arg(&results).arg("--");
    vm.arg(target_dir().join("release/baton-bench")).args(["notify", "--fabric", "verbs"]);
    vm.args(["--set", "spin_us=0", "--devices", "rxe0", "--target-devices", "rxe1"]);
    vm.args(["--runs", &options.runs.to_string(), "--count", &options.count.to_string()]);
    vm.args(["--pings", &options.pings.to_string()]).arg("--json").arg(&json);
    match setup::mooncake() {
        Ok((python, wheel)) => {
            let script = root().join("integration/bench/python/bench_mooncake_notify.py");
            vm.args(["--mooncake", &format!("{} {}", python.display(), script.display())]);
            vm.env("PYTHONPATH", wheel);
        }
        Err(reason) => say(format!("without Mooncake: {reason}")),
    }
    vm.args(&options.more);
    // Nobody may give up for being emulated, and soft-RoCE sends nothing again that is only late.
    vm.env("BATON_TIMEOUT_SCALE", "10").env("BATON_IB_TIMEOUT", "18");
    run(&mut vm, minutes(20))?;
    if let Some(to) = &options.json {
        std::fs::copy(&json, to).map_err(|error| format!("cannot write {}: {error}", to.display()))?;
    }
    Ok(())
}
