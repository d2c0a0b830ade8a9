//! `cargo xtask bench verbs`: the engine over RDMA against perftest and Mooncake, in the guest.

use std::path::PathBuf;

use clap::Args;

use crate::run::{Outcome, cargo, minutes, root, run, say, target_dir, work_dir};
use crate::{artifacts, setup, vm};

#[derive(Args)]
pub struct Options {
    /// Runs of every peer; the tables show medians.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Bytes of a block, separated by commas.
    #[arg(long, default_value = "4096,65536,1048576")]
    sizes: String,
    /// Mebibytes that a case moves in one run.
    #[arg(long, default_value_t = 64)]
    mib: u64,
    /// Only the peers whose name contains this text: perftest, baton, baton+imm, mooncake.
    #[arg(long)]
    only: Option<String>,
    /// Also writes the records, as a JSON list.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Words for `baton-bench verbs` itself, e.g. `--look-us 50`.
    #[arg(last = true)]
    more: Vec<String>,
}

pub fn bench(options: &Options) -> Outcome<()> {
    setup::perftest()?;
    artifacts::build()?;
    say("building baton-bench in release");
    run(cargo().args(["build", "--quiet", "--release", "--locked", "-p", "baton-bench"]), minutes(20))?;
    let results = work_dir("guest")?;
    let json = results.join("verbs.json");
    let mut vm = vm::script()?;
    vm.args(["-t", "3000", "-w"]).arg(&results).arg("--");
    vm.arg(target_dir().join("release/baton-bench")).arg("verbs");
    vm.args(["--runs", &options.runs.to_string(), "--sizes", &options.sizes]);
    vm.args(["--mib", &options.mib.to_string()]).arg("--json").arg(&json);
    match setup::mooncake() {
        Ok((python, wheel)) => {
            let script = root().join("integration/bench/python/bench_mooncake.py");
            vm.args(["--mooncake", &format!("{} {}", python.display(), script.display())]);
            vm.env("PYTHONPATH", wheel);
        }
        Err(reason) => say(format!("without Mooncake: {reason}")),
    }
    if let Some(part) = &options.only {
        vm.args(["--only", part]);
    }
    vm.args(&options.more);
    // Nobody may give up for being emulated.
    vm.env("BATON_TIMEOUT_SCALE", "10");
    run(&mut vm, minutes(55))?;
    if let Some(to) = &options.json {
        std::fs::copy(&json, to).map_err(|error| format!("cannot write {}: {error}", to.display()))?;
    }
    Ok(())
}
