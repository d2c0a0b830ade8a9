//! `baton-sim`: runs many seeds, says which ones fail, replays one.

use baton_core::notify::NotifyMode;
use baton_sim::{Failure, Faults, Options, Report, run, two_sided};
use clap::Parser;
use std::ops::Range;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Runs the protocol in the simulator.
#[derive(Parser)]
#[command(version)]
struct Args {
    /// Seeds to run, as A..B.
    #[arg(long, default_value = "0..200", value_parser = seeds)]
    seeds: Range<u64>,
    /// Random steps of each.
    #[arg(long, default_value_t = Options::default().steps)]
    steps: u32,
    /// Runs this seed alone, twice, and compares.
    #[arg(long, conflicts_with = "seeds")]
    replay: Option<u64>,
    /// No deaths, no partitions, no wrong keys.
    #[arg(long)]
    no_faults: bool,
    /// Nodes die, and nothing else goes wrong.
    #[arg(long, conflicts_with = "no_faults")]
    deaths_only: bool,
    /// How completion is told, in place of what the seed chooses.
    #[arg(long)]
    notify: Option<Notify>,
    /// Inline limit of the NICs in bytes, in place of what the seed chooses.
    #[arg(long)]
    inline: Option<u32>,
    /// The two-sided backend; `--notify` means nothing there.
    #[arg(long)]
    two_sided: bool,
    /// Threads; a run never uses more than one.
    #[arg(long, default_value_t = std::thread::available_parallelism().map_or(1, usize::from))]
    jobs: usize,
}

/// `--notify`.
#[derive(Clone, Copy, clap::ValueEnum)]
enum Notify {
    Imm,
    Send,
}

fn seeds(text: &str) -> Result<Range<u64>, String> {
    let (first, last) = text.split_once("..").ok_or("seeds are given as A..B")?;
    let number = |text: &str| text.parse::<u64>().map_err(|e| format!("{text:?}: {e}"));
    Ok(number(first)?..number(last)?)
}

fn main() -> ExitCode {
    let args = Args::parse();
    let notify = args.notify.map(|notify| match notify {
        Notify::Imm => NotifyMode::Immediate,
        Notify::Send => NotifyMode::Send,
    });
    let options = Options {
        steps: args.steps,
        faults: match (args.no_faults, args.deaths_only) {
            (true, _) => Faults::None,
            (false, true) => Faults::Deaths,
            (false, false) => Faults::All,
        },
        notify,
        inline_bytes: args.inline,
        ..Options::default()
    };
    match (args.replay, args.two_sided) {
        (Some(seed), false) => replay(seed, |seed| run(seed, options)),
        (Some(seed), true) => replay(seed, |seed| two_sided::run(seed, options)),
        (None, false) => sweep(&args, |seed| run(seed, options).map(Sum::from)),
        (None, true) => sweep(&args, |seed| two_sided::run(seed, options).map(Sum::from)),
    }
}

/// What a sweep adds up of each run.
struct Sum {
    /// Transfers done, failed or canceled; messages; epochs.
    totals: [u64; 4],
    named: Vec<(&'static str, u64)>,
}

impl From<Report> for Sum {
    fn from(report: Report) -> Sum {
        let totals = [report.done, report.failed, report.delivered, report.epochs];
        Sum { totals, named: report.reached.named().to_vec() }
    }
}

impl From<two_sided::TwoReport> for Sum {
    fn from(report: two_sided::TwoReport) -> Sum {
        let totals = [report.done, report.failed, report.delivered, report.epochs];
        Sum { totals, named: report.reached.named().to_vec() }
    }
}

fn replay<T: PartialEq + std::fmt::Debug>(seed: u64, run: impl Fn(u64) -> Result<T, Failure>) -> ExitCode {
    let (first, second) = (run(seed), run(seed));
    match &first {
        Ok(report) => println!("seed {seed}: {report:#?}"),
        Err(failure) => println!("{failure}"),
    }
    if first != second {
        println!("seed {seed} does not replay: {second:?}");
        return ExitCode::FAILURE;
    }
    if first.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn sweep(args: &Args, run: impl Fn(u64) -> Result<Sum, Failure> + Sync) -> ExitCode {
    let start = Instant::now();
    let next = AtomicU64::new(args.seeds.start);
    let failures: Mutex<Vec<Failure>> = Mutex::default();
    let reached: Mutex<Vec<(&'static str, u64)>> = Mutex::default();
    let totals = [const { AtomicU64::new(0) }; 4];
    let add = |sum: Sum| {
        for (total, n) in totals.iter().zip(sum.totals) {
            total.fetch_add(n, Ordering::Relaxed);
        }
        let mut reached = reached.lock().unwrap_or_else(PoisonError::into_inner);
        if reached.is_empty() {
            *reached = sum.named;
        } else {
            reached.iter_mut().zip(sum.named).for_each(|((_, total), (_, n))| *total += n);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..args.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= args.seeds.end {
                        return;
                    }
                    match run(seed) {
                        Ok(sum) => add(sum),
                        Err(failure) => {
                            println!("{failure}");
                            failures.lock().unwrap_or_else(PoisonError::into_inner).push(failure);
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (name, n) in reached.into_inner().unwrap_or_else(PoisonError::into_inner) {
        println!("{n:>10} {name}");
    }
    let [done, failed, delivered, epochs] = totals.map(AtomicU64::into_inner);
    println!(
        "{} seeds in {:.1} s: {done} transfers done, {failed} failed or canceled, {delivered} notifications, {epochs} epochs; {} seeds failed",
        args.seeds.end - args.seeds.start,
        start.elapsed().as_secs_f64(),
        failures.len()
    );
    if failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
