//! The project's own commands: `cargo xtask demo`, `cargo xtask test` and their helpers.
//!
//! Each command does its own set-up: system packages when it runs as root (else it prints the command to run), a private
//! Python environment with the stock NIXL wheel under `target/`, and the release build of the plugin.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod artifacts;
mod bench;
mod bench_copies;
mod bench_figures;
mod bench_notify;
mod bench_peers;
mod bench_verbs;
mod contest;
mod counts;
mod demo;
mod elf;
mod fuzz;
mod guest;
mod header;
mod nixl_sys;
mod run;
mod setup;
mod suite;
mod tidy;
mod vm;
mod wheel;
mod wheel_abi;

use run::Outcome;

/// Baton's own commands.
#[derive(Parser)]
#[command(name = "cargo xtask", disable_help_subcommand = false)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// The main job: KV blocks cross between two stock NIXL agents in two processes.
    Demo {
        /// A small cache: seconds instead of a minute on a slow machine.
        #[arg(long)]
        quick: bool,
    },
    /// Everything CI runs: format, lints, licences, unit tests, ELF checks, NIXL wheels, NIXL's own test suite.
    Test {
        /// Also what takes long: large swarms and stopped peers.
        #[arg(long)]
        long: bool,
        /// Only the steps whose name contains this text; `guest:TEXT` also chooses among the checks in the guest.
        #[arg(long)]
        only: Option<String>,
    },
    /// Builds in release and prints the directory to put in NIXL_PLUGIN_DIR.
    PluginDir,
    /// Benchmarks.
    Bench {
        #[command(subcommand)]
        which: BenchWhich,
    },
    /// Counts the instructions that the steps of a transfer take, and compares them with the committed ones (±2 %).
    Counts {
        /// Writes what was counted instead.
        #[arg(long)]
        update: bool,
    },
    /// Looks with libFuzzer for bytes of a peer that do what no bytes should; all targets, or those whose name contains TARGET.
    Fuzz(fuzz::Options),
    /// Writes bindings/c/include/baton.h from the Rust definitions.
    Header {
        /// Only compares; fails when the committed file is not what would be written.
        #[arg(long)]
        check: bool,
    },
    /// Runs a command in a guest with two soft-RoCE devices, rxe0 and rxe1: `cargo xtask vm -- COMMAND`.
    Vm(vm::Options),
    /// Checks the layout of the tree: who names whom, where unsafe stands, how long files are.
    Tidy,
}

#[derive(Subcommand)]
enum BenchWhich {
    /// Baton against stock UCX through the stock NIXL API, two processes.
    Nixl(bench::Options),
    /// The same work through Baton, stock UCX and Mooncake over TCP, side by side: `cargo xtask bench peers -- OPTIONS`.
    Peers(bench_peers::Options),
    /// One request of 120,000 descriptors in random order: created, posted, done; Baton against stock UCX through NIXL.
    Many(bench_figures::Many),
    /// How long a notification takes one way: Baton against stock UCX through NIXL.
    Notify(bench_figures::Notify),
    /// Bare notifications over RDMA, one-sided and two-sided, against Mooncake's two-sided transport, in the guest.
    NotifyVerbs(bench_notify::Options),
    /// The engine on one host against a bare loop of process_vm_readv over the same blocks, and memcpy.
    Copies(bench_copies::Options),
    /// The engine over RDMA against perftest and Mooncake, two processes in the guest.
    Verbs(bench_verbs::Options),
}

fn dispatch(command: Command) -> Outcome<()> {
    match command {
        Command::Demo { quick } => demo::run(quick),
        Command::Test { long, only } => suite::all(long, only.as_deref()),
        Command::PluginDir => {
            let dir: PathBuf = artifacts::plugin_dir()?;
            println!("{}", dir.display());
            Ok(())
        }
        Command::Bench { which: BenchWhich::Nixl(options) } => bench::run(&options),
        Command::Bench { which: BenchWhich::Peers(options) } => bench_peers::bench(&options),
        Command::Bench { which: BenchWhich::Many(options) } => bench_figures::many(&options),
        Command::Bench { which: BenchWhich::Notify(options) } => bench_figures::notify(&options),
        Command::Bench { which: BenchWhich::NotifyVerbs(options) } => bench_notify::bench(&options),
        Command::Bench { which: BenchWhich::Copies(options) } => bench_copies::bench(&options),
        Command::Bench { which: BenchWhich::Verbs(options) } => bench_verbs::bench(&options),
        Command::Counts { update } => counts::counts(update),
        Command::Fuzz(options) => fuzz::run_targets(&options),
        Command::Header { check } => header::header(check),
        Command::Vm(options) => vm::run(&options),
        Command::Tidy => tidy::run(),
    }
}

fn main() -> ExitCode {
    run::end_children_with_us();
    match dispatch(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("xtask: {reason}");
            ExitCode::FAILURE
        }
    }
}
