//! `cargo xtask test`: everything CI runs, step by step. All steps run even when one fails, so one run tells everything.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::run::{Outcome, cargo, minutes, probe, root, run, say, target_dir};
use crate::{artifacts, counts, elf, fuzz, guest, header, nixl_sys, tidy, wheel};

struct Step {
    name: &'static str,
    run: fn(&Choice<'_>) -> Outcome<()>,
}

/// What is asked for of a step.
struct Choice<'a> {
    long: bool,
    /// Of a step with parts of its own, those whose name contains this text; all if it is empty.
    part: &'a str,
}

const STEPS: &[Step] = &[
    Step { name: "format", run: |_| format() },
    Step { name: "tidy", run: |_| tidy::run() },
    Step { name: "lints", run: |_| lints() },
    Step { name: "header", run: |_| header::header(true) },
    Step { name: "licences", run: |_| licences() },
    Step { name: "unit tests", run: |_| unit_tests() },
    Step { name: "long tests", run: long_tests },
    Step { name: "fuzz", run: fuzzing },
    Step { name: "counts", run: |_| counts::counts(false) },
    Step { name: "libraries", run: |_| elf::check(&artifacts::plugin_dir()?) },
    Step { name: "wheels", run: |choice| wheel::scenarios(&artifacts::plugin_dir()?, choice.long) },
    Step { name: "guest", run: |choice| guest::checks(choice.long, choice.part) },
    Step { name: "nixl-sys", run: |_| nixl_sys::conformance(&artifacts::plugin_dir()?) },
];

/// Runs every step, or those whose name contains `only`; behind a colon follows which part of the step.
pub fn all(long: bool, only: Option<&str>) -> Outcome<()> {
    let (only, part) = only.unwrap_or_default().split_once(':').unwrap_or((only.unwrap_or_default(), ""));
    let choice = Choice { long, part };
    crate::setup::nixl_base()?;
    let mut failed = Vec::new();
    let mut times: Vec<(&str, Duration)> = Vec::new();
    let wanted = STEPS.iter().filter(|step| step.name.contains(only));
    for step in wanted {
        say(format!("---- {}", step.name));
        let started = Instant::now();
        if let Err(reason) = (step.run)(&choice) {
            println!("FAIL {}: {reason}", step.name);
            failed.push(step.name);
        }
        times.push((step.name, started.elapsed()));
    }
    for (name, took) in &times {
        println!(
            "{:>6.1} s  {name}{}",
            took.as_secs_f64(),
            if failed.contains(name) { "  FAILED" } else { "" }
        );
    }
    println!("{} passed, {} failed", times.len() - failed.len(), failed.len());
    match (times.is_empty(), failed.is_empty()) {
        (true, _) => Err("no step has that name".to_owned()),
        (_, true) => Ok(()),
        _ => Err(format!("failed: {}", failed.join(", "))),
    }
}

fn format() -> Outcome<()> {
    run(cargo().args(["fmt", "--all", "--check"]), minutes(5))
}

fn lints() -> Outcome<()> {
    let mut clippy = cargo();
    clippy.args(["clippy", "--quiet", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]);
    run(&mut clippy, minutes(20))
}

/// Unit, property and cross-process tests, by nextest where it is installed.
fn unit_tests() -> Outcome<()> {
    // The tests that load libraries find them in the release directory or build them; both want them fresh.
    artifacts::build()?;
    let mut tests = cargo();
    if probe(cargo().args(["nextest", "--version"])).is_some() {
        tests.args(["nextest", "run", "--workspace", "--locked", "--no-fail-fast", "--status-level", "fail"]);
    } else {
        tests.args(["test", "--workspace", "--locked", "--no-fail-fast", "--quiet"]);
    }
    run(&mut tests, minutes(30))
}

/// Why a test is not run with the others, as its `ignore` says.
#[cfg(test)]
const LONG_MARK: &str = concat!("cargo xtask test ", "--long\"]");

/// What takes minutes: where it stands, and the program that has it. Optimised, or it would take hours.
const LONG_TESTS: &[(&str, &[&str])] = &[
    ("plugin/core/src/two_sided/codec/mutated.rs", &["-p", "baton-core", "--lib"]),
    ("plugin/core/tests/two_sided_audit.rs", &["-p", "baton-core", "--test", "two_sided_audit"]),
    ("integration/sim/tests/two_sided.rs", &["-p", "baton-sim", "--test", "two_sided"]),
    ("plugin/driver/tests/many_peers.rs", &["-p", "baton-driver", "--test", "many_peers"]),
];

fn long_tests(choice: &Choice<'_>) -> Outcome<()> {
    if !choice.long {
        say("only with --long");
        return Ok(());
    }
    let mut failed = Vec::new();
    for (file, program) in LONG_TESTS.iter().filter(|(file, _)| file.contains(choice.part)) {
        say(file);
        let mut tests = cargo();
        tests.args(["test", "--release", "--locked", "--quiet"]).args(*program);
        failed.extend(run(tests.args(["--", "--ignored"]), minutes(40)).err());
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("; ")) }
}

/// A short look of each target, from what earlier ones have found.
fn fuzzing(choice: &Choice<'_>) -> Outcome<()> {
    if !choice.long {
        say("only with --long; on their seeds the targets are run with the unit tests");
        return Ok(());
    }
    fuzz::fuzz(choice.part, 30)
}

/// The tool that checks licences and sources is built once, outside git and outside of what `cargo clean` removes.
fn licences() -> Outcome<()> {
    let tools = tools_dir();
    let deny = tools.join("bin/cargo-deny");
    if probe(Command::new("cargo-deny").arg("--version")).is_none() && !deny.exists() {
        // Unoptimised: built in half the time, and fast enough for one question.
        say("installing cargo-deny (once; a minute or two)");
        let mut install = cargo();
        install
            .current_dir("/")
            .args(["install", "--quiet", "--debug", "--locked", "cargo-deny", "--root"])
            .arg(&tools);
        run(install.env("CARGO_TARGET_DIR", target_dir().join("xtask/cargo-deny")), minutes(30))?;
    }
    let program = if deny.exists() { deny.into_os_string() } else { "cargo-deny".into() };
    let ask = |what: &[&str]| {
        let mut command = Command::new(&program);
        command.current_dir(root()).args(["--log-level", "error", "check"]).args(what);
        command
    };
    run(&mut ask(&["licenses", "bans", "sources"]), minutes(5))?;
    // The advisory database is a git repository that many machines cannot reach.
    match probe(&mut ask(&["advisories"])) {
        Some(_) => say("advisories: none"),
        None => say("advisories: not checked (or found: run `cargo deny check advisories`)"),
    }
    Ok(())
}

fn tools_dir() -> std::path::PathBuf {
    let home = std::env::var_os("XDG_CACHE_HOME").map(std::path::PathBuf::from);
    let home =
        home.or_else(|| std::env::var_os("HOME").map(|home| std::path::PathBuf::from(home).join(".cache")));
    home.unwrap_or_else(target_dir).join("baton-tools")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};

    fn marked(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).expect("a folder of the tree") {
            let path = entry.expect("an entry").path();
            if path.is_dir() && !path.ends_with("target") {
                marked(&path, found);
            } else if path.extension().is_some_and(|ext| ext == "rs")
                && std::fs::read_to_string(&path).expect("source").contains(LONG_MARK)
            {
                found.push(path.strip_prefix(root()).expect("inside the tree").to_owned());
            }
        }
    }

    #[test]
    fn every_test_that_is_left_to_the_long_run_is_in_it() {
        let mut found = Vec::new();
        for folder in ["bindings", "host-api", "integration", "plugin"] {
            marked(&root().join(folder), &mut found);
        }
        found.sort();
        let mut listed: Vec<PathBuf> = LONG_TESTS.iter().map(|(file, _)| PathBuf::from(file)).collect();
        listed.sort();
        assert_eq!(found, listed);
    }
}
