//! `baton-bench`: two processes, each with an engine, move scattered blocks from one to the other as fast as they can.

use std::process::ExitCode;

use clap::Parser;

mod bare;
mod cpu;
#[cfg(feature = "plot")]
mod curves;
mod engine;
mod first;
mod loops;
mod memory;
mod messages;
mod notify;
mod options;
mod output;
mod peers;
mod perftest;
mod plan;
mod queue_pair;
mod remote;
mod rivals;
mod run;
mod target;
mod verbs;

/// A result whose error is the sentence that the user reads.
type Outcome<T> = Result<T, String>;

/// Benchmarks of Baton between two processes.
#[derive(Parser)]
#[command(name = "baton-bench")]
enum Cli {
    /// Starts a target, moves blocks, prints tables; also JSON and CSV.
    Run(Box<options::Options>),
    /// The passive side; `run` starts it and talks to it by lines on standard input and output.
    Target(target::Options),
    /// The engine over verbs against perftest and Mooncake; `cargo xtask bench verbs` runs it in the guest.
    Verbs(verbs::Options),
    /// Bare notifications: their rate and their latency one way, also against Mooncake's two-sided transport.
    Notify(Box<notify::Options>),
    /// The same work through Baton, UCX and Mooncake, side by side; `cargo xtask bench peers` sets them up.
    Peers(Box<peers::Options>),
    /// Draws bandwidth and latency curves of earlier runs as SVG and PNG.
    #[cfg(feature = "plot")]
    Plot(curves::Options),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse() {
        Cli::Run(options) => run::run(&options),
        Cli::Target(options) => target::serve(&options),
        Cli::Verbs(options) => verbs::run(&options),
        Cli::Notify(options) => notify::run(&options),
        Cli::Peers(options) => peers::run(&options),
        #[cfg(feature = "plot")]
        Cli::Plot(options) => curves::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("baton-bench: {reason}");
            ExitCode::FAILURE
        }
    }
}
