//! `baton-bench`: two processes, each with an engine, move scattered blocks from one to the other as fast as they can.

use std::process::ExitCode;

use clap::Parser;

mod cpu;
mod engine;
mod initiator;
mod memory;
mod target;

/// A result whose error is the sentence that the user reads.
type Outcome<T> = Result<T, String>;

/// Benchmarks of Baton between two processes.
#[derive(Parser)]
#[command(name = "baton-bench")]
enum Cli {
    /// Starts a target, moves blocks, prints one JSON object a case.
    Run(initiator::Options),
    /// The passive side; `run` starts it and talks to it by lines on standard input and output.
    Target(target::Options),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse() {
        Cli::Run(options) => initiator::run(&options),
        Cli::Target(options) => target::serve(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("baton-bench: {reason}");
            ExitCode::FAILURE
        }
    }
}
