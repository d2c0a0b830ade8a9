//! `cargo xtask counts`: how many instructions the steps of a transfer take, compared with what is committed.
//!
//! Plain callgrind over one small program: gungraun would bring its own runner, to be built in the very version of the library on every
//! machine, for what is here one command line and one number per dump. Instructions are the same at every run, however busy the
//! machine; what they depend on is the compiler, so a new one means `--update`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::Deserialize;

use crate::run::{Outcome, cargo, minutes, output, root, run, say, work_dir};

/// The committed counts: JSON, instructions by step.
const FILE: &str = "plugin/driver/benches/counts/counts.json";
/// A count may differ by this many percent, either way: what became cheaper is to be committed, so that it stays so.
const TOLERANCE_PERCENT: u64 = 2;
/// Every step is a function whose name begins like this.
const PREFIX: &str = "counted_";

/// Instructions by step.
type Counts = BTreeMap<String, u64>;

/// Counts, and compares or, with `update`, writes.
pub fn counts(update: bool) -> Outcome<()> {
    crate::setup::compiler()?;
    crate::setup::valgrind()?;
    let program = build()?;
    let measured = measure(&program)?;
    if update {
        let text = serde_json::to_string_pretty(&measured).map_err(|error| error.to_string())?;
        let path = root().join(FILE);
        std::fs::write(&path, text + "\n").map_err(|error| format!("{}: {error}", path.display()))?;
        say(format!("{FILE} is written"));
        return Ok(());
    }
    let text = std::fs::read_to_string(root().join(FILE)).map_err(|error| format!("{FILE}: {error}"))?;
    let committed: Counts = serde_json::from_str(&text).map_err(|error| format!("{FILE}: {error}"))?;
    let (table, faults) = compare(&committed, &measured);
    print!("{table}");
    if faults.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{}; if that is meant, or the compiler is another: cargo xtask counts --update",
        faults.join("; ")
    ))
}

/// One line per step, and what is wrong.
fn compare(committed: &Counts, measured: &Counts) -> (String, Vec<String>) {
    let (mut table, mut faults) = (String::new(), Vec::new());
    for (step, now) in measured {
        let Some(then) = committed.get(step) else {
            faults.push(format!("{step} is not in {FILE}"));
            continue;
        };
        let percent = (*now as f64 / *then as f64 - 1.0) * 100.0;
        table += &format!("{step:<20} {now:>12} instructions  {percent:>+6.2} %\n");
        if now.abs_diff(*then) * 100 > then * TOLERANCE_PERCENT {
            faults.push(format!(
                "{step} takes {now} instructions, committed are {then} ({percent:+.1} %, limit {TOLERANCE_PERCENT} %)"
            ));
        }
    }
    let gone = committed.keys().filter(|step| !measured.contains_key(*step));
    faults.extend(gone.map(|step| format!("{step} of {FILE} was not counted")));
    (table, faults)
}

#[derive(Deserialize)]
struct Built {
    executable: Option<PathBuf>,
}

fn build() -> Outcome<PathBuf> {
    let mut build = cargo();
    build.args(["build", "--quiet", "--release", "--locked", "-p", "baton-driver", "--bench", "counts"]);
    let messages = output(build.arg("--message-format=json"))?;
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Built>(line).ok()?.executable)
        .next_back()
        .ok_or_else(|| "cargo built no program of the benchmark counts".to_owned())
}

/// Runs the program under callgrind, which writes one file per call of a step.
fn measure(program: &Path) -> Outcome<Counts> {
    let symbols = output(Command::new("nm").arg("--defined-only").arg(program))?;
    let names = symbols.lines().filter_map(|line| line.split_whitespace().last());
    let steps: Vec<&str> = names.filter(|name| name.starts_with(PREFIX)).collect();
    let dir = work_dir("counts")?;
    std::fs::remove_dir_all(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    let dir = work_dir("counts")?;
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--quiet", "--tool=callgrind", "--collect-atstart=no", "--toggle-collect=uncounted"]);
    valgrind.arg(format!("--callgrind-out-file={}", dir.join("out").display()));
    // A pattern here and names there: callgrind forgets the first of two options for one name.
    valgrind.arg(format!("--toggle-collect={PREFIX}*"));
    valgrind.args(steps.iter().map(|step| format!("--dump-after={step}")));
    run(valgrind.arg(program).stdout(Stdio::null()), minutes(5))?;
    let mut calls: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for entry in std::fs::read_dir(&dir).map_err(|error| format!("{}: {error}", dir.display()))? {
        let path = entry.map_err(|error| format!("{}: {error}", dir.display()))?.path();
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        if let Some((step, count)) = read_dump(&text) {
            calls.entry(step).or_default().push(count);
        }
    }
    // The middle one: now and then a call finds something of another thread to do.
    let middle = |(step, mut counts): (String, Vec<u64>)| {
        counts.sort_unstable();
        (step, counts[counts.len() / 2])
    };
    let counts: Counts = calls.into_iter().map(middle).collect();
    match steps
        .iter()
        .find(|step| counts.get(step.trim_start_matches(PREFIX)).is_none_or(|count| *count == 0))
    {
        None => Ok(counts),
        Some(step) => Err(format!("callgrind wrote nothing about {step} in {}", dir.display())),
    }
}

/// Step and instructions of one file of callgrind's.
fn read_dump(text: &str) -> Option<(String, u64)> {
    let after = |begin: &str| text.lines().find_map(|line| line.strip_prefix(begin));
    let step = after("desc: Trigger: --dump-after=")?.strip_prefix(PREFIX)?.to_owned();
    Some((step, after("summary: ")?.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(list: &[(&str, u64)]) -> Counts {
        list.iter().map(|(step, count)| ((*step).to_owned(), *count)).collect()
    }

    #[test]
    fn a_dump_tells_its_step_and_its_instructions() {
        let text = "version: 1\ndesc: Trigger: --dump-after=counted_post_1\n\nevents: Ir\nsummary: 1234\n";
        assert_eq!(read_dump(text), Some(("post_1".to_owned(), 1234)));
        assert_eq!(read_dump("desc: Trigger: Program termination\nsummary: 5\n"), None);
    }

    #[test]
    fn more_than_two_percent_either_way_is_a_fault_and_so_is_a_step_on_one_side_only() {
        let committed = counts(&[("a", 1000), ("b", 1000), ("c", 1000), ("gone", 1)]);
        let measured = counts(&[("a", 1020), ("b", 979), ("c", 1021), ("new", 1)]);
        let (table, faults) = compare(&committed, &measured);
        assert_eq!(table.lines().count(), 3);
        let about: Vec<_> = faults.iter().map(|fault| fault.split(' ').next().unwrap_or_default()).collect();
        assert_eq!(about, ["b", "c", "new", "gone"]);
        assert!(faults[1].contains("1021") && faults[1].contains("1000"), "{faults:?}");
    }
}
