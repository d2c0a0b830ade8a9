//! The active side: starts the target, moves blocks, measures.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use baton_bench::{Sample, median};
use baton_host::{Engine, Op, RemoteRegion, Transfer};
use clap::Args;

use crate::engine::Settings;
use crate::memory::{Layout, Pool};
use crate::target::{self, Answer, Order, pause};
use crate::{Outcome, cpu};

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    settings: Settings,
    /// Devices of the initiator.
    #[arg(long)]
    devices: Option<String>,
    /// Devices of the target.
    #[arg(long)]
    target_devices: Option<String>,
    /// What starts `baton-bench` for the target, e.g. `ssh other /path/to/baton-bench`; default: this program.
    #[arg(long, value_name = "COMMAND")]
    target_command: Option<String>,
    /// Directions, separated by commas.
    #[arg(long, default_value = "write,read", value_delimiter = ',')]
    ops: Vec<String>,
    /// Bytes of a block, separated by commas.
    #[arg(long, default_value = "4096,65536,1048576", value_delimiter = ',')]
    sizes: Vec<usize>,
    /// Blocks of a request; no two are adjacent.
    #[arg(long, default_value_t = 32)]
    blocks: usize,
    /// Requests in flight.
    #[arg(long, default_value_t = 4)]
    depth: usize,
    /// Requests prepared, posted in turn; default: as many as in flight.
    #[arg(long)]
    requests: Option<usize>,
    /// Every request carries a notification; a case ends when the target has heard all of them.
    #[arg(long)]
    notify: bool,
    /// How much a case moves.
    #[arg(long, default_value_t = 256)]
    mib: u64,
    /// Microseconds between two looks at requests; 0: without a pause.
    #[arg(long, default_value_t = 0)]
    look_us: u64,
    /// Seconds for which a case may stand still.
    #[arg(long, default_value_t = 60)]
    patience: u64,
}

/// Seeds of both sides' memory.
const OWN: u64 = 1;
const THEIRS: u64 = 2;

/// The target in its process; killed when dropped.
struct Target {
    child: Child,
    orders: ChildStdin,
    answers: Receiver<String>,
    patience: Duration,
}

impl Target {
    fn start(options: &Options) -> Outcome<(Target, Vec<u8>)> {
        let own = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = match &options.target_command {
            None => Command::new(own),
            Some(words) => {
                let mut words = words.split_whitespace();
                let mut command = Command::new(words.next().ok_or("--target-command is empty")?);
                command.args(words);
                command
            }
        };
        command.arg("target").args(options.settings.arguments());
        command.args(["--look-us", &options.look_us.to_string()]);
        if let Some(devices) = &options.target_devices {
            command.args(["--devices", devices]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("cannot start the target: {error}"))?;
        let (orders, lines) = (child.stdin.take().ok_or("no pipe")?, child.stdout.take().ok_or("no pipe")?);
        let (tell, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(lines).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        let patience = Duration::from_secs(options.patience);
        let target = Target { child, orders, answers, patience };
        match target.hear()? {
            Answer::Ready(info) => Ok((target, info)),
            other => Err(format!("the target says {other:?}")),
        }
    }

    fn hear(&self) -> Outcome<Answer> {
        let line =
            self.answers.recv_timeout(self.patience).map_err(|error| format!("the target: {error}"))?;
        match serde_json::from_str(&line).map_err(|error| format!("the target says {line}: {error}"))? {
            Answer::Failed(reason) => Err(format!("the target: {reason}")),
            answer => Ok(answer),
        }
    }

    fn ask(&mut self, order: &Order) -> Outcome<Answer> {
        let line = serde_json::to_string(order).map_err(|error| error.to_string())?;
        writeln!(self.orders, "{line}")
            .and_then(|()| self.orders.flush())
            .map_err(|error| format!("the target takes no orders: {error}"))?;
        self.hear()
    }

    fn cpu(&mut self) -> Outcome<Duration> {
        match self.ask(&Order::Cpu)? {
            Answer::Cpu(time) => Ok(time),
            other => Err(format!("the target says {other:?}")),
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Bench<'a> {
    options: &'a Options,
    engine: Engine,
    target: Target,
}

/// The requests of one case, ready to be posted.
struct Case {
    op: Op,
    layout: Layout,
    transfers: Vec<Transfer>,
    pool: Pool,
    _remote: RemoteRegion,
}

/// What a loop over the requests came to.
#[derive(Default)]
struct Laps {
    count: u64,
    took: Duration,
    cpu: Duration,
    machine: Duration,
    each_us: Vec<f64>,
}

impl Bench<'_> {
    fn prepare(&mut self, op: Op, size: usize) -> Outcome<Case> {
        let requests = self.options.requests.unwrap_or(self.options.depth).max(self.options.depth);
        let layout = Layout { size, blocks: self.options.blocks, requests };
        let Answer::Memory { blob, addr } = self.target.ask(&Order::Hold(layout))? else {
            return Err("the target holds no memory".to_owned());
        };
        let pool = Pool::new(&self.engine, layout)?;
        let said = |error: baton_host::Error| error.to_string();
        let remote = self.engine.import_region(target::NAME, &blob).map_err(said)?;
        let there = |request: usize, index: usize| {
            remote.desc(addr + layout.offset(request, layout.blocks - 1 - index) as u64, size as u64)
        };
        let prepare = |request: usize| {
            let theirs: Vec<_> = (0..layout.blocks).map(|index| there(request, index)).collect();
            self.engine.create_xfer(op, target::NAME, &pool.blocks(request), &theirs).map_err(said)
        };
        let transfers = (0..requests).map(prepare).collect::<Outcome<Vec<_>>>()?;
        Ok(Case { op, layout, transfers, pool, _remote: remote })
    }

    /// Posts `count` requests in turn, `depth` at a time.
    fn turn(&self, case: &Case, count: u64) -> Outcome<(Duration, Vec<f64>)> {
        let message = self.options.notify.then_some(b"blocks are there".as_slice());
        let look = Duration::from_micros(self.options.look_us);
        let patience = Duration::from_secs(self.options.patience);
        let started = Instant::now();
        let (mut posted, mut done, mut last) = (0u64, 0u64, started);
        let mut since = vec![None; case.transfers.len()];
        let mut each_us = Vec::with_capacity(count as usize);
        while done < count {
            let before = done;
            while posted < count && posted - done < self.options.depth as u64 {
                let number = (posted % since.len() as u64) as usize;
                if since[number].is_some() {
                    break;
                }
                since[number] = Some(Instant::now());
                case.transfers[number].post(message).map_err(|error| error.to_string())?;
                posted += 1;
            }
            for (transfer, since) in case.transfers.iter().zip(&mut since) {
                let Some(at) = *since else { continue };
                match transfer.status_raw() {
                    code if code < 0 => return Err(transfer.error_text()),
                    baton_host::abi::BATON_OK => {
                        each_us.push(at.elapsed().as_secs_f64() * 1e6);
                        (*since, last, done) = (None, Instant::now(), done + 1);
                    }
                    _ => {}
                }
            }
            if done == before {
                if last.elapsed() > patience {
                    let stats = self.engine.stats().unwrap_or_default();
                    return Err(format!("nothing ended within {} s: {stats}", patience.as_secs()));
                }
                pause(look);
            }
        }
        Ok((started.elapsed(), each_us))
    }

    /// As `turn`, with notifications heard and CPU time measured.
    fn measure(&mut self, case: &Case, count: u64) -> Outcome<Laps> {
        if self.options.notify {
            self.target.ask(&Order::Listen)?;
        }
        let (theirs, ours, machine) = (self.target.cpu()?, cpu::of_process(), cpu::of_machine());
        let started = Instant::now();
        let (mut took, each_us) = self.turn(case, count)?;
        if self.options.notify {
            self.target.ask(&Order::Heard(count))?;
            took = started.elapsed();
        }
        let machine = cpu::of_machine().saturating_sub(machine);
        let cpu = (cpu::of_process() + self.target.cpu()?).saturating_sub(ours + theirs);
        Ok(Laps { count, took, cpu, machine, each_us })
    }

    /// Moves every request once and compares every byte: a run that is fast because it moves nothing is found out.
    fn check(&mut self, case: &Case) -> Outcome<()> {
        case.pool.fill(OWN);
        self.target.ask(&Order::Fill(THEIRS))?;
        self.measure(case, case.transfers.len() as u64)?;
        match case.op {
            Op::Write => drop(self.target.ask(&Order::Check(THEIRS, OWN))?),
            Op::Read => case.pool.check(OWN, THEIRS)?,
        }
        Ok(())
    }

    fn case(&mut self, op: Op, size: usize) -> Outcome<Sample> {
        let case = self.prepare(op, size)?;
        self.check(&case)?;
        let per_request = case.layout.request_bytes();
        let count = (self.options.mib << 20).div_ceil(per_request).max(case.transfers.len() as u64);
        // What the check did not warm up.
        self.measure(&case, (count / 10).max(1))?;
        let laps = self.measure(&case, count)?;
        let gib = (laps.count * per_request) as f64 / f64::from(1 << 30);
        let mut each = laps.each_us;
        each.sort_by(f64::total_cmp);
        Ok(Sample {
            op: if op == Op::Write { "WRITE" } else { "READ" }.to_owned(),
            size_bytes: size as u64,
            batch: case.layout.blocks as u64,
            gbps: (laps.count * per_request * 8) as f64 / laps.took.as_secs_f64() / 1e9,
            latency_us_p50: median(each.iter().copied()),
            latency_us_p99: each.get(each.len() * 99 / 100).copied().unwrap_or_default(),
            cpu_s_per_gib: Some(laps.cpu.as_secs_f64() / gib),
            machine_cpu_s_per_gib: Some(laps.machine.as_secs_f64() / gib),
        })
    }
}

fn op(word: &str) -> Outcome<Op> {
    match word {
        "write" => Ok(Op::Write),
        "read" => Ok(Op::Read),
        _ => Err(format!("--ops {word}: neither write nor read")),
    }
}

/// Runs every case and prints its line.
pub fn run(options: &Options) -> Outcome<()> {
    let ops = options.ops.iter().map(|word| op(word)).collect::<Outcome<Vec<_>>>()?;
    if options.depth == 0 {
        return Err("--depth 0: at least one request must be in flight".to_owned());
    }
    let engine = options.settings.open("initiator", options.devices.as_deref())?;
    let (target, info) = Target::start(options)?;
    engine.load_remote(target::NAME, &info).map_err(|error| error.to_string())?;
    let mut bench = Bench { options, engine, target };
    for size in &options.sizes {
        for op in &ops {
            let sample = bench.case(*op, *size).map_err(|reason| format!("{op:?} of {size}: {reason}"))?;
            println!("{}", serde_json::to_string(&sample).map_err(|error| error.to_string())?);
        }
    }
    Ok(())
}
