//! `baton-bench`: two processes, each with an engine, move scattered blocks from one to the other as fast as they can.

use std::process::ExitCode;

use clap::Parser;

mod cpu;
mod engine;
mod initiator;
mod memory;
mod perftest;
mod target;
mod verbs;

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
    /// The engine over verbs against perftest and Mooncake; `cargo xtask bench verbs` runs it in the guest.
    Verbs(verbs::Options),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse() {
        Cli::Run(options) => initiator::run(&options),
        Cli::Target(options) => target::serve(&options),
        Cli::Verbs(options) => verbs::run(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("baton-bench: {reason}");
            ExitCode::FAILURE
        }
    }
}
