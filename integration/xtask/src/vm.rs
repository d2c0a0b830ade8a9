//! `cargo xtask vm`: the guest with soft-RoCE devices, run by `integration/rdma-vm/rdma-vm`.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;

use crate::run::{Outcome, root, spell};
use crate::setup;

#[derive(Args)]
pub struct Options {
    /// Ends the guest after so many seconds (exit code 124).
    #[arg(short, long, value_name = "SECS", default_value_t = 300)]
    time: u64,
    /// A folder that the guest may write, at its own path; everything else it writes is dropped.
    #[arg(short, long, value_name = "DIR")]
    writable: Vec<PathBuf>,
    /// Runs the command as this user, without capabilities and with 64 KiB of lockable memory.
    #[arg(short, long, value_name = "UID")]
    user: Option<u32>,
    /// Virtual CPUs.
    #[arg(short, long, default_value_t = 4)]
    cpus: u32,
    /// Memory in MiB.
    #[arg(short, long, default_value_t = 4096)]
    memory: u32,
    /// Shows the log of the guest's kernel at the end.
    #[arg(short, long)]
    verbose: bool,
    /// What to run; a shell without it.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// The script, ready to take options and a command.
pub fn script() -> Outcome<Command> {
    setup::guest()?;
    Ok(Command::new(root().join("integration/rdma-vm/rdma-vm")))
}

/// Becomes the script: its output, exit code and signals are those of the command in the guest.
pub fn run(options: &Options) -> Outcome<()> {
    let mut vm = script()?;
    vm.args(["-t", &options.time.to_string()]);
    vm.args(["-c", &options.cpus.to_string(), "-m", &options.memory.to_string()]);
    for folder in &options.writable {
        vm.arg("-w").arg(folder);
    }
    if let Some(user) = options.user {
        vm.args(["-u", &user.to_string()]);
    }
    if options.verbose {
        vm.arg("-v");
    }
    if options.command.is_empty() {
        vm.arg("-i");
    } else {
        vm.arg("--").args(&options.command);
    }
    let error = vm.exec();
    Err(format!("cannot start `{}`: {error}", spell(&vm)))
}
