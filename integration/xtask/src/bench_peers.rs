//! `cargo xtask bench peers`: Baton beside UCX and Mooncake, each from its stock wheel.

use clap::Args;

use crate::run::{Outcome, cargo, minutes, root, run, say, target_dir};
use crate::setup::{NIXL, mooncake, nixl_python, wheel, wheel_libraries};
use crate::{artifacts, wheel::scripts};

#[derive(Args)]
pub struct Options {
    /// Words for `baton-bench peers` itself, e.g. `--runs 7 --sizes 4096 --json FILE`.
    #[arg(last = true)]
    more: Vec<String>,
}

pub fn bench(options: &Options) -> Outcome<()> {
    let ours = artifacts::plugin_dir()?;
    say("building baton-bench in release");
    run(cargo().args(["build", "--quiet", "--release", "--locked", "-p", "baton-bench"]), minutes(20))?;
    let mut bench = std::process::Command::new(target_dir().join("release/baton-bench"));
    let python = nixl_python(NIXL, &ours)?.get_program().to_string_lossy().into_owned();
    bench.args(["peers", "--nixl", &format!("{python} {}", scripts().join("bench.py").display())]);
    bench.arg("--nixl-wheel").arg(wheel(NIXL)?).arg("--plugins").arg(&ours);
    bench.arg("--stock-plugins").arg(wheel_libraries(NIXL)?.join("plugins"));
    match mooncake() {
        Ok((python, wheel)) => {
            let script = root().join("integration/bench/python/bench_mooncake.py");
            bench.args(["--mooncake", &format!("{} {}", python.display(), script.display())]);
            bench.arg("--mooncake-wheel").arg(wheel);
        }
        Err(reason) => say(format!("without Mooncake: {reason}")),
    }
    run(bench.env("PYTHONUNBUFFERED", "1").args(&options.more), minutes(60))
}
