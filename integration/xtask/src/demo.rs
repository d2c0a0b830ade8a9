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

/// The setting that decides how much the engines say.
const LOG: &str = "BATON_LOG";

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
    // The engines say which fabric a session got; they say it at level info. A level that was asked for is left alone.
    let quiet = std::env::var_os(LOG).is_none();
    if quiet {
        python.env(LOG, "info");
    }
    let what = spell(&python);
    python.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = python.spawn().map_err(|error| format!("cannot start `{what}`: {error}"))?;
    let (stdout, stderr) = (child.stdout.take().ok_or("no pipe")?, child.stderr.take().ok_or("no pipe")?);
    let bar = progress_bar();
    let behind = bar.clone();
    let heard = std::thread::spawn(move || listen(BufReader::new(stderr), &behind, quiet));
    let shown = std::thread::spawn(move || show(BufReader::new(stdout), &bar));
    let status = wait(child, "the demo", minutes(10))?;
    let failed = shown.join().map_err(|_| "showing the demo's output failed")?;
    heard.join().map_err(|_| "reading the demo's log failed")?;
    match (failed, status.success()) {
        (Some(reason), _) => Err(format!("the demo failed: {reason}")),
        (None, false) => Err(format!("the demo failed ({status})")),
        (None, true) => Ok(()),
    }
}

fn progress_bar() -> ProgressBar {
    let bar = ProgressBar::new(0);
    if !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let style =
        ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes}, {bytes_per_sec} with checks");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}

/// Prints what the script tells, above a progress bar where somebody watches. Answers why it failed, if it did.
fn show(lines: impl BufRead, bar: &ProgressBar) -> Option<String> {
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

/// Passes the log on; what the engines say at level info is, when `quiet`, cut down to what they chose.
fn listen(lines: impl BufRead, bar: &ProgressBar, quiet: bool) {
    for line in lines.lines().map_while(Result::ok) {
        match (quiet, line.strip_prefix("baton[")) {
            (true, Some(record)) if record.contains("] info ") => {
                if let Some(choice) = chosen(record) {
                    bar.suspend(|| println!("{choice}"));
                }
            }
            _ => bar.suspend(|| eprintln!("{line}")),
        }
    }
}

/// What a record of the driver says about backend and fabric: `NAME] info TARGET: engine …` or `…: session with …`.
fn chosen(record: &str) -> Option<String> {
    let (name, rest) = record.split_once("] info ")?;
    let (target, text) = rest.split_once(": ")?;
    if !target.starts_with("baton_driver") {
        return None;
    }
    let word = |from: &str| text.split_once(from).and_then(|(_, rest)| rest.split([' ', ',', ';']).next());
    if text.starts_with("engine ") {
        return Some(format!("{name}: backend {}", word(": backend ")?));
    }
    let peer = text.strip_prefix("session with ")?.split(' ').next()?;
    Some(format!("{name}: session with {peer} over fabric {}", word(": fabric ")?))
}

#[cfg(test)]
mod tests {
    use super::chosen;

    #[test]
    fn the_choice_is_read_out_of_the_log() {
        let engine = "decode] info baton_driver::engine: engine decode (0d): backend one-sided (backend auto), fabrics local";
        assert_eq!(chosen(engine).as_deref(), Some("decode: backend one-sided"));
        let session =
            "decode] info baton_driver::connect: session with prefill (01), epoch 1: fabric local, 2 lane(s)";
        assert_eq!(chosen(session).as_deref(), Some("decode: session with prefill over fabric local"));
        assert_eq!(
            chosen("decode] info baton_driver::epoch: session with prefill (01), epoch 1, ends: over"),
            None
        );
        assert_eq!(chosen("decode] info baton_host: chosen: {}"), None);
    }
}
