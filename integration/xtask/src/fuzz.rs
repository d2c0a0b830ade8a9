//! `cargo xtask fuzz`: lets libFuzzer look for bytes of a peer that should not be possible.
//!
//! libFuzzer needs to see which code an input reaches. The compiler can put that in without being a nightly one, as one of LLVM's
//! passes; only for the target, never for build scripts and macros, hence the named triple.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::run::{Outcome, cargo, minutes, output, run, say, spell, target_dir};

/// What has the compiler count the ways that are taken, and note what is compared with what.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Cllvm-args=-simplifycfg-branch-fold-threshold=0 --cfg fuzzing";
const TRIPLE: &str = "x86_64-unknown-linux-gnu";
/// How the program is told what to do.
const TARGET_VARIABLE: &str = "BATON_FUZZ_TARGET";
const SEEDS_VARIABLE: &str = "BATON_FUZZ_SEEDS";
/// One input that takes longer is a fault; so is one that needs more memory.
const LONGEST_SECONDS: u32 = 10;
const MOST_MEGABYTES: u32 = 1024;

/// What to run, and for how long each.
#[derive(clap::Args)]
pub struct Options {
    /// Only the targets whose name contains this text.
    target: Option<String>,
    /// Seconds of each target.
    #[arg(long, default_value_t = 60)]
    seconds: u32,
}

/// A target as the program lists it.
struct Target {
    name: String,
    max_len: u32,
}

/// What libFuzzer says of a run.
#[derive(Debug, Default, PartialEq, Eq)]
struct Said {
    runs: u64,
    per_second: u64,
    coverage_before: u64,
    coverage: u64,
    inputs: u64,
}

/// Runs the targets that were asked for, all of them even when one fails.
pub fn run_targets(options: &Options) -> Outcome<()> {
    fuzz(options.target.as_deref().unwrap_or_default(), options.seconds)
}

/// Each target whose name contains `part`, for so many seconds.
pub fn fuzz(part: &str, seconds: u32) -> Outcome<()> {
    crate::setup::compiler()?;
    let program = build()?;
    let folder = program_dir();
    let seeds = folder.join("seeds");
    make(&seeds)?;
    let listing = output(Command::new(&program).env(SEEDS_VARIABLE, &seeds))?;
    let targets = read_listing(&listing)?;
    let names: Vec<_> = targets.iter().map(|target| target.name.clone()).collect();
    let mut faults = Vec::new();
    let mut ran = 0;
    for target in targets.iter().filter(|target| target.name.contains(part)) {
        ran += 1;
        match run_one(&program, &folder, target, seconds) {
            Ok(said) => println!(
                "ok   {:<20} {:>10} runs {:>7}/s  coverage {:>5} → {:<5} {:>5} inputs kept",
                target.name, said.runs, said.per_second, said.coverage_before, said.coverage, said.inputs
            ),
            Err(reason) => {
                println!("FAIL {}: {reason}", target.name);
                faults.push(target.name.clone());
            }
        }
    }
    match (ran, faults.is_empty()) {
        (0, _) => Err(format!("no target's name contains {part:?}; there are {}", names.join(", "))),
        (_, true) => Ok(()),
        _ => Err(format!("faults in {}", faults.join(", "))),
    }
}

/// Everything of the fuzzer's is below one folder that git does not see.
fn program_dir() -> PathBuf {
    target_dir().join("fuzz")
}

fn make(dir: &Path) -> Outcome<()> {
    std::fs::create_dir_all(dir).map_err(|error| format!("cannot create {}: {error}", dir.display()))
}

/// With optimisation, and with every assertion and check of arithmetic that a test has.
fn build() -> Outcome<PathBuf> {
    let dir = program_dir();
    let mut build = cargo();
    build.args([
        "build",
        "--quiet",
        "--locked",
        "--profile",
        "fuzz",
        "-p",
        "baton-fuzz",
        "--features",
        "libfuzzer",
    ]);
    build.args(["--target", TRIPLE]).env("RUSTFLAGS", FLAGS).env("CARGO_TARGET_DIR", &dir);
    build.env_remove("CARGO_ENCODED_RUSTFLAGS");
    run(&mut build, minutes(20))?;
    Ok(dir.join(TRIPLE).join("fuzz/baton-fuzz"))
}

fn read_listing(listing: &str) -> Outcome<Vec<Target>> {
    let read = |line: &str| {
        let (name, max_len) = line.split_once(' ')?;
        Some(Target { name: name.to_owned(), max_len: max_len.parse().ok()? })
    };
    let targets =
        listing.lines().map(|line| read(line).ok_or_else(|| format!("baton-fuzz printed {line:?}")));
    targets.collect()
}

/// The inputs that were found stay for the next time.
fn run_one(program: &Path, folder: &Path, target: &Target, seconds: u32) -> Outcome<Said> {
    let (corpus, crashes) = (folder.join("corpus").join(&target.name), folder.join("crashes"));
    make(&corpus)?;
    make(&crashes)?;
    let log = folder.join(format!("{}.log", target.name));
    let file = std::fs::File::create(&log).map_err(|error| format!("{}: {error}", log.display()))?;
    let out = file.try_clone().map_err(|error| format!("{}: {error}", log.display()))?;
    say(format!("{}: {seconds} s, its words are in {}", target.name, log.display()));
    let mut fuzzer = Command::new(program);
    fuzzer.env(TARGET_VARIABLE, &target.name).stdout(out).stderr(file);
    fuzzer.arg(&corpus).arg(folder.join("seeds").join(&target.name));
    fuzzer.arg(format!("-max_total_time={seconds}")).arg(format!("-max_len={}", target.max_len));
    let words = folder.join("seeds").join(format!("{}.dict", target.name));
    // libFuzzer will not have an empty one.
    if words.metadata().is_ok_and(|of| of.len() > 0) {
        fuzzer.arg(format!("-dict={}", words.display()));
    }
    fuzzer.arg(format!("-artifact_prefix={}/{}-", crashes.display(), target.name));
    fuzzer.arg(format!("-timeout={LONGEST_SECONDS}")).arg(format!("-rss_limit_mb={MOST_MEGABYTES}"));
    fuzzer.args(["-use_value_profile=1", "-len_control=20", "-print_final_stats=1", "-verbosity=1"]);
    let outcome = run(&mut fuzzer, Duration::from_secs(seconds.into()) + minutes(3));
    let text = std::fs::read(&log).map_err(|error| format!("{}: {error}", log.display()))?;
    let text = String::from_utf8_lossy(&text);
    if let Err(reason) = outcome {
        return Err(describe(program, &target.name, &text, &reason, &log));
    }
    let said = read_log(&text).ok_or_else(|| format!("libFuzzer told nothing: {}", log.display()))?;
    // Without the compiler's help an input looks like any other, and a long run finds nothing.
    if said.coverage <= 1 {
        return Err(format!("blind: it sees {} places; see {}", said.coverage, log.display()));
    }
    Ok(said)
}

/// Where the input is that did it, what was said, and how to see it again.
fn describe(program: &Path, name: &str, log: &str, reason: &str, path: &Path) -> String {
    let Some(input) = log.lines().find_map(|line| line.split("Test unit written to ").nth(1)) else {
        return format!("{reason}; see {}", path.display());
    };
    let panicked = log.lines().skip_while(|line| !line.contains("panicked at")).take(3);
    let again = spell(Command::new(program).arg(input.trim()));
    format!("{}\n     again: {TARGET_VARIABLE}={name} {again}", panicked.collect::<Vec<_>>().join(" "))
}

/// The figures of a log: each line that begins with `#` tells of the places reached so far.
fn read_log(log: &str) -> Option<Said> {
    let after =
        |line: &str, key: &str| line.split(key).nth(1)?.split_whitespace().next()?.parse::<u64>().ok();
    let coverage = |line: &str| after(line, " cov: ");
    let told = || log.lines().filter(|line| line.starts_with('#'));
    let last = told().rev().find(|line| coverage(line).is_some())?;
    let stat = |key: &str| log.lines().find_map(|line| after(line, key));
    Some(Said {
        runs: stat("stat::number_of_executed_units:")?,
        per_second: stat("stat::average_exec_per_sec:")?,
        coverage_before: told().find(|line| line.contains("INITED")).and_then(coverage)?,
        coverage: coverage(last)?,
        inputs: last.split(" corp: ").nth(1)?.split('/').next()?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "INFO: Seed: 1\n#13\tINITED cov: 105 ft: 220 corp: 12/1234b exec/s: 0 rss: 40Mb\n\
        #20\tNEW    cov: 106 ft: 221 corp: 13/1300b lim: 108 exec/s: 0 rss: 40Mb L: 60/70 MS: 1 ChangeBit-\n\
        #900\tDONE   cov: 130 ft: 300 corp: 40/4Kb lim: 512 exec/s: 450 rss: 50Mb\n\
        stat::number_of_executed_units: 900\nstat::average_exec_per_sec:     450\n";

    #[test]
    fn the_figures_of_a_run_are_read() {
        let expected = Said { runs: 900, per_second: 450, coverage_before: 105, coverage: 130, inputs: 40 };
        assert_eq!(read_log(LOG), Some(expected));
        assert_eq!(read_log("INFO: no lines\n"), None);
    }

    #[test]
    fn a_fault_is_told_with_its_input_and_how_to_see_it_again() {
        let log = "#9\tNEW cov: 3\nthread '<unnamed>' panicked at a.rs:1:2:\nwhy\nnote: backtrace\n\
            artifact_prefix='x'; Test unit written to /t/crashes/words-crash-ab\n";
        let told = describe(Path::new("/t/baton-fuzz"), "words", log, "failed", Path::new("/t/words.log"));
        assert!(told.contains("panicked at a.rs:1:2: why"), "{told}");
        assert!(told.ends_with("BATON_FUZZ_TARGET=words /t/baton-fuzz /t/crashes/words-crash-ab"), "{told}");
    }

    #[test]
    fn targets_are_read_from_the_listing() {
        let targets = read_listing("a-b 12\nc 4096\n").expect("lines as they should be");
        let read: Vec<_> = targets.iter().map(|target| (target.name.as_str(), target.max_len)).collect();
        assert_eq!(read, [("a-b", 12), ("c", 4096)]);
        assert!(read_listing("nothing").is_err());
    }
}
