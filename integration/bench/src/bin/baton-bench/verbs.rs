//! The engine over verbs against perftest and Mooncake: same devices, same sizes, as many queue pairs, in turn.
//!
//! Without notifications it is compared with `ib_write_bw` and `ib_read_bw`, which move one block a message and wait
//! for events where they can (READ); with notifications, one request after the other, with Mooncake.

use std::process::Command;
use std::time::Duration;

use baton_bench::{Peer, Record, Row, Sample, condense, table};
use clap::Args;

use crate::{Outcome, perftest};

#[derive(Args)]
pub struct Options {
    /// Device of the initiator.
    #[arg(long, default_value = "rxe0")]
    pub device: String,
    /// Device of the target.
    #[arg(long, default_value = "rxe1")]
    pub target_device: String,
    /// Entry of the devices' GID tables, for perftest.
    #[arg(long, default_value_t = 1)]
    pub gid_index: u32,
    /// Data queue pairs.
    #[arg(long, default_value_t = 4)]
    pub lanes: u32,
    /// Acknowledgement timeout of both.
    #[arg(long, default_value_t = 18)]
    pub ib_timeout: u32,
    /// Bytes of a block, separated by commas.
    #[arg(long, default_value = "4096,65536,1048576", value_delimiter = ',')]
    sizes: Vec<u64>,
    /// Runs of every peer; the table shows medians.
    #[arg(long, default_value_t = 7)]
    runs: u32,
    /// How much a case moves.
    #[arg(long, default_value_t = 64)]
    pub mib: u64,
    /// Microseconds for which the engine's host sleeps between two looks.
    #[arg(long, default_value_t = 500)]
    look_us: u64,
    /// What runs `bench_mooncake.py`: words of a command, separated by spaces.
    #[arg(long, value_name = "COMMAND")]
    mooncake: Option<String>,
    /// Only the peers whose name contains this text.
    #[arg(long)]
    only: Option<String>,
    /// Also writes the records, as a JSON list.
    #[arg(long, value_name = "FILE")]
    json: Option<std::path::PathBuf>,
}

/// One direction of one size.
#[derive(Clone, Copy)]
pub struct Case {
    /// `write` or `read`.
    pub op: &'static str,
    /// Bytes of a block.
    pub size: u64,
}

impl Case {
    /// Messages in flight on each queue pair: perftest's own default, where that is no gigabyte.
    pub fn tx_depth(self) -> u64 {
        if self.size < 1 << 20 { 128 } else { 8 }
    }

    /// Blocks of a request that is alone in flight.
    fn batch(self) -> u64 {
        if self.size < 1 << 20 { 128 } else { 32 }
    }
}

/// Requests of the engine in flight where it is compared with a queue of messages.
const DEPTH: u64 = 4;
/// One run of one case takes seconds.
pub const LIMIT: Duration = Duration::from_secs(90);

/// Throughput that the engine should reach of another's.
fn goal(against: &str, size: u64) -> f64 {
    match (against, size) {
        ("perftest", ..65536) => 0.7,
        ("perftest", _) => 0.8,
        (_, ..65536) => 1.2,
        _ => 0.95,
    }
}

const PERFTEST: Peer = Peer { name: "perftest", against: None };
const BATON: Peer = Peer { name: "baton", against: Some("perftest") };
const MOONCAKE: Peer = Peer { name: "mooncake", against: None };
const NOTIFYING: Peer = Peer { name: "baton+imm", against: Some("mooncake") };

impl Options {
    fn measure(&self, peer: &Peer, case: Case) -> Outcome<Sample> {
        match peer.name {
            "perftest" => perftest::run(self, case),
            "baton" => {
                let in_flight = case.tx_depth() * u64::from(self.lanes);
                self.engine(case, (in_flight / DEPTH).max(1), DEPTH, "off")
            }
            "baton+imm" => self.engine(case, case.batch(), 1, "imm"),
            _ => self.run_mooncake(case),
        }
    }

    fn engine(&self, case: Case, blocks: u64, depth: u64, notify: &str) -> Outcome<Sample> {
        let own = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(own);
        command.args(["run", "--fabric", "verbs", "--set", "spin_us=0"]);
        command.args(["--devices", &self.device, "--target-devices", &self.target_device]);
        command.args(["--lanes", &self.lanes.to_string()]);
        command.args(["--set", &format!("ib_timeout={}", self.ib_timeout)]);
        command.args(["--op", case.op, "--sizes", &case.size.to_string(), "--mib", &self.mib.to_string()]);
        command.args(["--batch", &blocks.to_string(), "--depth", &depth.to_string(), "--notify", notify]);
        command.args(["--look-us", &self.look_us.to_string(), "--requests", &depth.to_string()]);
        // The rounds are those of all peers.
        command.args(["--rounds", "1", "--json", "-"]);
        let said = perftest::output_within(&mut command, LIMIT)?;
        let rows: Vec<Row> = serde_json::from_str(&said).map_err(|error| format!("{command:?}: {error}"))?;
        let row = rows.first().ok_or_else(|| format!("{command:?} measured nothing"))?;
        Ok(row.into())
    }

    fn run_mooncake(&self, case: Case) -> Outcome<Sample> {
        let words = self.mooncake.as_deref().unwrap_or_default();
        let mut words = words.split_whitespace();
        let mut command = Command::new(words.next().ok_or("--mooncake is empty")?);
        command.args(words).args(["--op", case.op, "--size", &case.size.to_string()]);
        command.args(["--device", &self.device, "--target-device", &self.target_device]);
        // It is slow enough to be measured with less.
        let mib = if case.size < 1 << 20 { (self.mib / 4).max(1) } else { self.mib };
        command.args(["--blocks", &case.batch().to_string(), "--mib", &mib.to_string()]);
        command.args(["--look-us", &self.look_us.to_string()]);
        command.env("MC_GID_INDEX", self.gid_index.to_string()).env("GLOG_minloglevel", "2");
        command.env("MC_NUM_QP_PER_EP", self.lanes.to_string()).env("MC_TRANSFER_TIMEOUT", "120");
        sample_of(&mut command)
    }
}

/// The one sample that a program prints among other things.
fn sample_of(command: &mut Command) -> Outcome<Sample> {
    let said = perftest::output_within(command, LIMIT)?;
    let sample = said.lines().find_map(|line| serde_json::from_str(line).ok());
    sample.ok_or_else(|| format!("{command:?} measured nothing"))
}

/// Runs everybody in turn, so that a change of the machine's mood hits all, and prints the tables.
pub fn run(options: &Options) -> Outcome<()> {
    crate::output::check("--json", options.json.as_deref())?;
    let mut peers = vec![(PERFTEST, false), (BATON, false)];
    if options.mooncake.is_some() {
        peers.push((MOONCAKE, true));
    }
    peers.push((NOTIFYING, true));
    peers.retain(|(peer, _)| options.only.as_ref().is_none_or(|part| peer.name.contains(part)));
    let mut measured: Vec<(Peer, Vec<Sample>)> =
        peers.iter().map(|(peer, _)| (peer.clone(), Vec::new())).collect();
    let cases = options.sizes.iter().flat_map(|size| ["write", "read"].map(|op| Case { op, size: *size }));
    let cases: Vec<Case> = cases.collect();
    for round in 1..=options.runs {
        for case in &cases {
            for (peer, samples) in &mut measured {
                match options.measure(peer, *case) {
                    Ok(sample) => samples.push(sample),
                    // The others still tell something; what is missing is seen in the table.
                    Err(reason) => eprintln!("{}, {} of {}: {reason}", peer.name, case.op, case.size),
                }
            }
        }
        eprintln!("round {round} of {} is done", options.runs);
    }
    let mut records = Vec::new();
    for notify in [false, true] {
        let some: Vec<_> = measured.iter().zip(&peers).filter(|(_, (_, with))| *with == notify).collect();
        let some: Vec<_> = some.into_iter().map(|(one, _)| one.clone()).collect();
        let found = condense(&some, notify);
        let how = if notify { "with notifications, one request at a time" } else { "without notifications" };
        println!("{how}: medians of {} runs, {} queue pairs", options.runs, options.lanes);
        print!("{}", table(&found));
        verdicts(&some, &found);
        records.extend(found);
    }
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&records).map_err(|error| error.to_string())?;
        crate::output::write(path, &(text + "\n"))?;
    }
    Ok(())
}

fn verdicts(measured: &[(Peer, Vec<Sample>)], records: &[Record]) {
    for record in records {
        let Some(ratio) = record.ratio else { continue };
        let against = measured.iter().find(|(peer, _)| peer.name == record.peer);
        let against = against.and_then(|(peer, _)| peer.against).unwrap_or_default();
        let goal = goal(against, record.size_bytes);
        let word = if ratio >= goal { "reached" } else { "MISSED" };
        println!("{word}: {} of {} is {ratio:.2} of {against}'s (goal {goal})", record.op, record.size_bytes);
    }
}
