//! `cargo xtask demo`: shows the main job, run by `integration/nixl/python/demo.py`.

use std::io::{BufRead, BufReader, IsTerminal};
use std::os::unix::process::CommandExt;
use std::process::Stdio;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Deserialize;

use crate::artifacts;
use crate::run::{Outcome, minutes, spell, wait};
use crate::setup::{NIXL, nixl_python};
use crate::wheel::scripts;

/// One line of the script.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    /// Something to tell.
    Say(String),
    /// Bytes that will be moved in all.
    Total(u64),
    /// Bytes moved since the last such line.
    Moved(u64),
    /// Why it failed.
    Failed(String),
}

pub fn run(quick: bool) -> Outcome<()> {
    let plugins = artifacts::plugin_dir()?;
    let mut python = nixl_python(NIXL, &plugins)?;
    python.arg(scripts().join("demo.py")).env("NIXL_LOG_LEVEL", "ERROR");
    if quick {
        python.arg("--quick");
    }
    let what = spell(&python);
    let spawned = python.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = spawned.map_err(|error| format!("cannot start `{what}`: {error}"))?;
    let stdout = child.stdout.take().ok_or("no pipe")?;
    let shown = std::thread::spawn(move || show(BufReader::new(stdout)));
    let status = wait(child, "the demo", minutes(10))?;
    let failed = shown.join().map_err(|_| "showing the demo's output failed")?;
    match (failed, status.success()) {
        (Some(reason), _) => Err(format!("the demo failed: {reason}")),
        (None, false) => Err(format!("the demo failed ({status})")),
        (None, true) => Ok(()),
    }
}

/// Prints what the script tells, below it a progress bar where somebody watches. Answers why it failed, if it did.
fn show(lines: impl BufRead) -> Option<String> {
    let bar = ProgressBar::new(0);
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let style =
        ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes}, {bytes_per_sec} with checks");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut failed = None;
    for line in lines.lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Line::Say(text)) => bar.suspend(|| println!("{text}")),
            Ok(Line::Total(bytes)) => bar.set_length(bytes),
            Ok(Line::Moved(bytes)) => bar.inc(bytes),
            Ok(Line::Failed(reason)) => failed = Some(reason),
            // What libraries print by themselves.
            Err(_) => bar.suspend(|| eprintln!("{line}")),
        }
    }
    bar.finish_and_clear();
    failed
}
