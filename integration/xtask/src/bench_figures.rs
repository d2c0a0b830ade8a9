//! `cargo xtask bench many` and `cargo xtask bench notify`: what large requests and bare notifications take, Baton
//! against stock UCX through the stock NIXL API.

use std::path::PathBuf;

use baton_bench::{Figures, condense_figures, table_of_figures};
use clap::Args;

use crate::contest::{Contest, write_json};
use crate::run::Outcome;

/// What both benchmarks are asked for.
#[derive(Args)]
struct Common {
    /// Runs of every peer, in turn; the table shows medians.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=100))]
    runs: u32,
    /// Agents without progress threads, where NIXL's default is with.
    #[arg(long)]
    no_progress_thread: bool,
    /// Only the peers whose name contains this text.
    #[arg(long)]
    only: Option<String>,
    /// Also writes the records, as a JSON list.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Args)]
pub struct Many {
    #[command(flatten)]
    common: Common,
    /// Descriptors of a request; they go and come in random order.
    #[arg(long, default_value_t = 120_000, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    count: u32,
    /// Bytes of a descriptor.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    size: u32,
    /// Requests of a run that count, in each direction.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeats: u32,
    /// Also forced to TCP, both.
    #[arg(long)]
    tcp: bool,
}

#[derive(Args)]
pub struct Notify {
    #[command(flatten)]
    common: Common,
    /// Seconds of a run in which round trips count.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=100))]
    seconds: u32,
    /// Bytes of a message, its number included.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(8..=4096))]
    message_bytes: u32,
}

impl Common {
    /// Runs everybody and reports; `columns` are figures, and `compared` those with ratios.
    fn run(
        &self,
        contest: &Contest,
        what: &str,
        (script, mut words): (&str, Vec<&str>),
        columns: &[&str],
        compared: &[&str],
    ) -> Outcome<()> {
        words.extend(self.no_progress_thread.then_some("--no-progress-thread"));
        let measured = contest.take_turns::<Figures>(self.runs, script, &words)?;
        let records = condense_figures(&measured, compared);
        let threads =
            if self.no_progress_thread { "without progress threads" } else { "with progress threads" };
        println!("two processes {threads}, {what}, medians of {} runs in turn", self.runs);
        print!("{}", table_of_figures(&records, columns, compared));
        write_json(self.json.as_deref(), &records)
    }
}

/// `cargo xtask bench many`.
pub fn many(options: &Many) -> Outcome<()> {
    let mut contest = Contest::new(options.common.only.as_deref())?;
    if !options.tcp && options.common.only.is_none() {
        contest.contestants.retain(|one| !one.peer.name.ends_with("-tcp"));
    }
    let Many { count, size, repeats, .. } = options;
    let numbers = [count, size, repeats].map(u32::to_string);
    let words = vec!["--count", &numbers[0], "--size", &numbers[1], "--repeats", &numbers[2]];
    let what = format!("{count} x {size} B in random order, created, posted, done; every byte compared");
    let columns = ["create_ms", "post_ms", "caller_ms", "caller_cpu_ms", "done_ms", "cpu_s"];
    options.common.run(&contest, &what, ("bench_many.py", words), &columns, &["done_ms"])
}

/// `cargo xtask bench notify`.
pub fn notify(options: &Notify) -> Outcome<()> {
    let contest = Contest::new(options.common.only.as_deref())?;
    let numbers = [options.seconds, options.message_bytes].map(|number| number.to_string());
    let words = vec!["--seconds", &numbers[0], "--message-bytes", &numbers[1]];
    let what = "notifications to and fro with spinning getters, one way";
    let columns = ["count", "p50_us", "p99_us", "p999_us", "mean_us", "cpu_us"];
    options.common.run(&contest, what, ("bench_notify.py", words), &columns, &["p50_us", "p99_us"])
}
