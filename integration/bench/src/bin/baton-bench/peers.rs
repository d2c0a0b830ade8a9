//! The same work through Baton, through UCX and through Mooncake, side by side: one table with ratios.
//!
//! Baton and UCX are backends of the stock NIXL wheel, Mooncake is used by its own interface, over TCP. All post one
//! request after the other, each with a notification, and a case ends when the target has heard all of them.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use baton_bench::{Peer, Rivalry, Sample, condense, side_by_side};
use clap::{Args, value_parser};
use indicatif::ProgressBar;

use crate::Outcome;
use crate::options::{OpWord, size};
use crate::output;
use crate::perftest::output_within;

/// One run of one peer takes seconds; a hung one is ended.
const LIMIT: Duration = Duration::from_secs(300);

#[derive(Args)]
pub struct Options {
    /// What runs `bench.py` with the stock NIXL wheel; words of a command. `cargo xtask bench peers` knows all of these.
    #[arg(long, value_name = "COMMAND")]
    nixl: Option<String>,
    /// The folder that holds the wheel, for Python.
    #[arg(long, value_name = "DIR", requires = "nixl")]
    nixl_wheel: Option<PathBuf>,
    /// Where Baton's plugin is.
    #[arg(long, value_name = "DIR", requires = "nixl")]
    plugins: Option<PathBuf>,
    /// Where the wheel's own plugins are.
    #[arg(long, value_name = "DIR", requires = "nixl")]
    stock_plugins: Option<PathBuf>,
    /// What runs `bench_mooncake.py` with Mooncake's wheel; words of a command.
    #[arg(long, value_name = "COMMAND")]
    mooncake: Option<String>,
    /// The folder that holds that wheel, for Python.
    #[arg(long, value_name = "DIR", requires = "mooncake")]
    mooncake_wheel: Option<PathBuf>,
    /// Directions, separated by commas.
    #[arg(long, value_enum, default_value = "write,read", value_delimiter = ',')]
    op: Vec<OpWord>,
    /// Bytes of a block, separated by commas.
    #[arg(long, default_value = "4096,65536,1048576", value_delimiter = ',', value_parser = size)]
    sizes: Vec<u64>,
    /// Blocks of a request; they land in random order.
    #[arg(long, default_value_t = 128, value_parser = value_parser!(u64).range(1..=1 << 20))]
    batch: u64,
    /// How much a case of a peer moves in one run.
    #[arg(long, default_value_t = 512, value_parser = value_parser!(u64).range(1..=1 << 20))]
    mib: u64,
    /// Runs of every peer, in turn; the table shows medians.
    #[arg(long, default_value_t = 5, value_parser = value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Every iteration creates its request instead of posting one that is prepared; Mooncake has no other way.
    #[arg(long)]
    prepare_each: bool,
    /// NIXL agents without progress threads.
    #[arg(long)]
    no_progress_thread: bool,
    /// Only the peers whose name contains this text.
    #[arg(long)]
    only: Option<String>,
    /// Also writes the records, as a JSON list.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A peer with how it is set up; without a backend of NIXL it is Mooncake.
struct Contestant {
    peer: Peer,
    backend: Option<&'static str>,
    environment: &'static [(&'static str, &'static str)],
}

const CONTESTANTS: &[Contestant] = &[
    Contestant {
        peer: Peer { name: "baton", against: Some("ucx") },
        backend: Some("BATON"),
        environment: &[],
    },
    Contestant { peer: Peer { name: "ucx", against: None }, backend: Some("UCX"), environment: &[] },
    Contestant {
        peer: Peer { name: "baton-tcp", against: Some("ucx-tcp") },
        backend: Some("BATON"),
        environment: &[("BATON_FABRIC", "tcp")],
    },
    Contestant {
        peer: Peer { name: "ucx-tcp", against: None },
        backend: Some("UCX"),
        environment: &[("UCX_TLS", "tcp")],
    },
    Contestant { peer: Peer { name: "mooncake-tcp", against: None }, backend: None, environment: &[] },
];

const RIVALRIES: &[Rivalry] = &[
    Rivalry { ours: "baton", theirs: "ucx" },
    Rivalry { ours: "baton-tcp", theirs: "ucx-tcp" },
    Rivalry { ours: "baton-tcp", theirs: "mooncake-tcp" },
];

fn words(text: &str, flag: &str) -> Outcome<Command> {
    let mut words = text.split_whitespace();
    let mut command = Command::new(words.next().ok_or_else(|| format!("{flag} is empty"))?);
    command.args(words);
    Ok(command)
}

fn joined<T: ToString>(list: impl IntoIterator<Item = T>) -> String {
    list.into_iter().map(|one| one.to_string()).collect::<Vec<_>>().join(",")
}

fn samples_in(said: &str) -> Vec<Sample> {
    said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

impl Options {
    fn wanted(&self, one: &Contestant) -> bool {
        let possible = if one.backend.is_some() { self.nixl.is_some() } else { self.mooncake.is_some() };
        possible && self.only.as_ref().is_none_or(|part| one.peer.name.contains(part))
    }

    fn measure(&self, one: &Contestant) -> Outcome<Vec<Sample>> {
        let samples = match one.backend {
            Some(backend) => self.measure_nixl(one, backend)?,
            None => self.measure_mooncake()?,
        };
        let cases = self.sizes.len() * self.op.len();
        if samples.len() != cases {
            return Err(format!("{} of {cases} cases were measured", samples.len()));
        }
        Ok(samples)
    }

    fn measure_nixl(&self, one: &Contestant, backend: &str) -> Outcome<Vec<Sample>> {
        let mut python = words(self.nixl.as_deref().unwrap_or_default(), "--nixl")?;
        python.args(["--sizes", &joined(&self.sizes), "--batch", &self.batch.to_string()]);
        python.args([
            "--ops",
            &joined(self.op.iter().map(|op| op.word())),
            "--budget-mib",
            &self.mib.to_string(),
        ]);
        python.args(self.prepare_each.then_some("--prepare-each"));
        python.args(self.no_progress_thread.then_some("--no-progress-thread"));
        if let Some(wheel) = &self.nixl_wheel {
            python.env("PYTHONPATH", wheel);
        }
        let plugins = if backend == "UCX" { &self.stock_plugins } else { &self.plugins };
        if let Some(plugins) = plugins {
            python.env("NIXL_PLUGIN_DIR", plugins);
        }
        python
            .env("NIXL_TEST_BACKEND", backend)
            .env("NIXL_LOG_LEVEL", "ERROR")
            .env_remove("NIXL_CONFIG_FILE");
        // Debian's rdma-core and the wheel's copy do not get along: a process that opened UCX's efa crashes at exit.
        python.env("UCX_MODULES", "^efa").envs(one.environment.iter().copied());
        Ok(samples_in(&output_within(&mut python, LIMIT)?))
    }

    /// Its script runs one case at a time.
    fn measure_mooncake(&self) -> Outcome<Vec<Sample>> {
        let mut samples = Vec::new();
        for size in &self.sizes {
            for op in &self.op {
                let mut python = words(self.mooncake.as_deref().unwrap_or_default(), "--mooncake")?;
                python.args(["--protocol", "tcp", "--op", &op.word().to_lowercase()]);
                python.args(["--size", &size.to_string(), "--blocks", &self.batch.to_string()]);
                // A tenth of the throughput is measured as well with a tenth of the bytes.
                python.args(["--mib", &(self.mib / 8).max(1).to_string()]);
                python.env("GLOG_minloglevel", "2").env("MC_TRANSFER_TIMEOUT", "120");
                if let Some(wheel) = &self.mooncake_wheel {
                    python.env("PYTHONPATH", wheel);
                }
                samples.extend(samples_in(&output_within(&mut python, LIMIT)?));
            }
        }
        Ok(samples)
    }
}

/// Runs everybody in turn and prints the table.
pub fn run(options: &Options) -> Outcome<()> {
    output::check("--json", options.json.as_deref())?;
    let contestants: Vec<&Contestant> = CONTESTANTS.iter().filter(|one| options.wanted(one)).collect();
    if contestants.is_empty() {
        let how = "give --nixl, --mooncake or both; `cargo xtask bench peers` sets them up and does";
        return Err(format!("nobody to measure: {how}"));
    }
    let mut measured: Vec<(Peer, Vec<Sample>)> =
        contestants.iter().map(|one| (one.peer.clone(), Vec::new())).collect();
    let bar = ProgressBar::new(u64::from(options.runs) * contestants.len() as u64);
    for run in 0..options.runs {
        for (one, (_, samples)) in contestants.iter().zip(&mut measured) {
            // The others still tell something; what is missing is seen in the table.
            match options.measure(one) {
                Ok(some) => samples.extend(some.into_iter().map(|sample| Sample { run, ..sample })),
                Err(reason) => eprintln!("baton-bench: {}: {reason}", one.peer.name),
            }
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let records = condense(&measured, true);
    if records.is_empty() {
        return Err("nothing was measured".to_owned());
    }
    let prepared = if options.prepare_each { "each created anew" } else { "prepared" };
    println!(
        "two processes, {} blocks a request, {prepared}, with notification, one at a time: medians of {} runs in turn",
        options.batch, options.runs
    );
    print!("{}", side_by_side(&measured, &records, RIVALRIES));
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&records).map_err(|error| error.to_string())?;
        output::write(path, &(text + "\n"))?;
    }
    Ok(())
}
