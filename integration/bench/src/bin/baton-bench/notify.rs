//! Bare notifications between two processes: a stream as fast as the engine takes it, and a ball thrown to and fro.

use std::process::Command;
use std::time::{Duration, Instant};

use baton_bench::{Figures, Peer, condense_figures, percentile, table_of_figures};
use baton_host::{Engine, Status};
use clap::{Args, value_parser};

use crate::engine::{Settings, Setup, name};
use crate::options::Backend;
use crate::remote::{How, Remote};
use crate::target::{Order, SIDE};
use crate::{Outcome, messages, perftest};

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    settings: Settings,
    /// How notifications travel; several, separated by commas, take turns.
    #[arg(long, value_enum, default_value = "one-sided,two-sided", value_delimiter = ',')]
    backend: Vec<Backend>,
    /// Devices of the initiator.
    #[arg(long)]
    devices: Option<String>,
    /// Devices of the target.
    #[arg(long)]
    target_devices: Option<String>,
    /// Notifications of the stream.
    #[arg(long, default_value_t = 5000, value_parser = value_parser!(u64).range(1..=10_000_000))]
    count: u64,
    /// Notifications that are sent back, one at a time.
    #[arg(long, default_value_t = 1000, value_parser = value_parser!(u64).range(1..=10_000_000))]
    pings: u64,
    /// Bytes of a message.
    #[arg(long, default_value_t = 16, value_parser = value_parser!(u64).range(1..=4000))]
    message_bytes: u64,
    /// Runs of everybody, in turn; the table shows medians.
    #[arg(long, default_value_t = 3, value_parser = value_parser!(u64).range(1..=100))]
    runs: u64,
    /// Microseconds between two looks in vain; 0: only the processor is offered to others.
    #[arg(long, default_value_t = 0, value_parser = value_parser!(u64).range(0..=1_000_000))]
    look_us: u64,
    /// Seconds for which a run may stand still.
    #[arg(long, default_value_t = 60, value_parser = value_parser!(u64).range(1..=86_400))]
    patience: u64,
    /// What runs `bench_mooncake_notify.py`: words of a command, separated by spaces.
    #[arg(long, value_name = "COMMAND")]
    mooncake: Option<String>,
    /// Entry of the devices' GID tables, for Mooncake.
    #[arg(long, default_value_t = 1)]
    gid_index: u32,
    /// Also writes the records, as a JSON list; `-`: to standard output, instead of a table.
    #[arg(long, value_name = "FILE")]
    json: Option<std::path::PathBuf>,
    /// Also shows the counters of the initiator's engine.
    #[arg(long)]
    stats: bool,
}

const MOONCAKE: &str = "mooncake";
/// How much faster than Mooncake notifications are to be.
const GOAL: f64 = 2.0;
const COLUMNS: [&str; 3] = ["ops_per_s", "op_us", "script_us"];
/// Smaller is better. A script's own share of an operation counts for nobody.
const COMPARED: [&str; 3] = ["net_op_us", "p50_us", "p99_us"];

fn said(error: baton_host::Error) -> String {
    error.to_string()
}

/// Both sides of one run.
struct Pair<'a> {
    options: &'a Options,
    // Dropped before the target: it says goodbye to it.
    engine: Engine,
    remote: Remote,
}

impl Options {
    fn look(&self) -> Duration {
        Duration::from_micros(self.look_us)
    }

    fn open(&self, backend: Backend) -> Outcome<Pair<'_>> {
        let params = vec![("backend".to_owned(), backend.word().to_owned())];
        let setup = Setup { params, managed: false };
        let engine = self.settings.open(&name("initiator", 0), self.devices.as_deref(), &setup)?;
        let how = How {
            settings: &self.settings,
            devices: self.target_devices.as_deref(),
            command: None,
            look_us: self.look_us,
            patience: self.patience,
        };
        let (remote, infos) = Remote::start(&how, &[setup])?;
        let peer = name(SIDE, 0);
        engine.load_remote(&peer, infos.first().ok_or("no connection information")?).map_err(said)?;
        if engine.connect(&peer, Duration::from_secs(self.patience)).map_err(said)? != Status::Done {
            return Err(format!("no session with the target within {} s", self.patience));
        }
        Ok(Pair { options: self, engine, remote })
    }

    fn measure(&self, backend: Backend) -> Outcome<Figures> {
        let mut pair = self.open(backend)?;
        pair.stream((self.count / 10).max(1))?;
        let op_us = pair.stream(self.count)?.as_secs_f64() * 1e6 / self.count as f64;
        pair.ping((self.pings / 10).max(1))?;
        let laps = pair.ping(self.pings)?;
        if self.stats {
            eprintln!("{}: {}", backend.word(), pair.engine.stats().map_err(said)?);
        }
        let values = [
            ("ops_per_s", 1e6 / op_us),
            ("op_us", op_us),
            ("net_op_us", op_us),
            ("p50_us", percentile(&laps, 50.0)),
            ("p99_us", percentile(&laps, 99.0)),
        ];
        let values = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Ok(Figures { case: format!("{} B", self.message_bytes), values })
    }

    fn mooncake(&self, command: &str) -> Outcome<Figures> {
        let mut words = command.split_whitespace();
        let mut command = Command::new(words.next().ok_or("--mooncake is empty")?);
        command.args(words);
        command.args(self.devices.iter().flat_map(|device| ["--device", device]));
        command.args(self.target_devices.iter().flat_map(|device| ["--target-device", device]));
        let numbers = [
            ("--count", self.count),
            ("--pings", self.pings),
            ("--message-bytes", self.message_bytes),
            ("--look-us", self.look_us),
        ];
        for (flag, number) in numbers {
            command.args([flag, &number.to_string()]);
        }
        command.env("MC_GID_INDEX", self.gid_index.to_string()).env("GLOG_minloglevel", "2");
        let said = perftest::output_within(&mut command, Duration::from_secs(self.patience))?;
        let figures = said.lines().find_map(|line| serde_json::from_str(line).ok());
        figures.ok_or_else(|| format!("{command:?} measured nothing"))
    }
}

impl Pair<'_> {
    fn send(engine: &Engine, number: u64, options: &Options) -> Outcome<()> {
        let message = messages::message(number, options.message_bytes as usize);
        let patience = Duration::from_secs(options.patience);
        messages::send(engine, &name(SIDE, 0), &message, options.look(), patience)
    }

    /// From the first to the moment at which the target says that it has had them all, in order.
    fn stream(&mut self, count: u64) -> Outcome<Duration> {
        let Pair { options, engine, remote } = self;
        let started = Instant::now();
        let order = Order::Hear(count, options.message_bytes as usize);
        let act = || (0..count).try_for_each(|number| Self::send(engine, number, options));
        remote.tell_and(&order, act, || messages::work(engine, options.look()))?;
        Ok(started.elapsed())
    }

    /// Half of each round trip, in microseconds, sorted.
    fn ping(&mut self, count: u64) -> Outcome<Vec<f64>> {
        let Pair { options, engine, remote } = self;
        let (bytes, look) = (options.message_bytes as usize, options.look());
        let patience = Duration::from_secs(options.patience);
        let order = Order::Echo(count, bytes, name("initiator", 0), engine.conn_info().map_err(said)?);
        let mut laps = Vec::with_capacity(count as usize);
        let act = || {
            for number in 0..count {
                let started = Instant::now();
                Self::send(engine, number, options)?;
                messages::hear(engine, number..number + 1, bytes, look, patience)?;
                laps.push(started.elapsed().as_secs_f64() * 1e6 / 2.0);
            }
            Ok(())
        };
        remote.tell_and(&order, act, || messages::work(engine, look))?;
        laps.sort_unstable_by(f64::total_cmp);
        Ok(laps)
    }
}

/// Runs everybody in turn and prints the table.
pub fn run(options: &Options) -> Outcome<()> {
    let against = options.mooncake.as_ref().map(|_| MOONCAKE);
    let baton = |backend: &Backend| match backend {
        Backend::OneSided => "baton one-sided",
        Backend::TwoSided => "baton two-sided",
        Backend::Auto => "baton auto",
    };
    let mut measured: Vec<(Peer, Vec<Figures>)> = options
        .backend
        .iter()
        .map(|backend| (Peer { name: baton(backend), against }, Vec::new()))
        .chain(against.map(|name| (Peer { name, against: None }, Vec::new())))
        .collect();
    for round in 1..=options.runs {
        for (at, (peer, runs)) in measured.iter_mut().enumerate() {
            let found = match (options.backend.get(at), &options.mooncake) {
                (Some(backend), _) => options.measure(*backend),
                (None, Some(command)) => options.mooncake(command),
                (None, None) => continue,
            };
            match found {
                Ok(figures) => runs.push(figures),
                Err(reason) if peer.name == MOONCAKE => eprintln!("{}: {reason}", peer.name),
                Err(reason) => return Err(format!("{}: {reason}", peer.name)),
            }
        }
        eprintln!("round {round} of {} is done", options.runs);
    }
    let records = condense_figures(&measured, &COMPARED);
    let json = serde_json::to_string_pretty(&records).map_err(|error| error.to_string())? + "\n";
    match options.json.as_deref() {
        Some(path) if path.as_os_str() == "-" => {
            print!("{json}");
            return Ok(());
        }
        Some(path) => {
            std::fs::write(path, json).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        None => {}
    }
    let Options { count, pings, runs, .. } = options;
    println!("bare notifications: {count} in a stream, {pings} to and fro (one way), medians of {runs} runs");
    print!("{}", table_of_figures(&records, &COLUMNS, &COMPARED));
    for record in &records {
        if let Some(ratio) = record.ratio.get("net_op_us") {
            let word = if *ratio >= GOAL { "reached" } else { "MISSED" };
            println!("{word}: {} has {ratio:.2} times {MOONCAKE}'s rate (goal {GOAL})", record.peer);
        }
    }
    Ok(())
}
