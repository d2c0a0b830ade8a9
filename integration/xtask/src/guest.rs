//! The checks that need RDMA devices: all in one boot of the guest, one after the other, each with a limit of its own.
//!
//! A check is a line of [`CHECKS`]: a test program of the workspace, a scenario of the stock NIXL wheel, or anything a
//! shell runs there.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use crate::run::{Outcome, cargo, minutes, output, root, run, say, work_dir};
use crate::setup::{NIXL, nixl_python};
use crate::{artifacts, vm, wheel};

/// What runs.
enum What {
    /// Tests of a package: the test target, and which of its tests (words of the test harness).
    Tests(&'static str, &'static str, &'static str),
    /// A script of `integration/nixl/python` with its arguments, initiator on rxe0 and peer on rxe1.
    Nixl(&'static str, &'static str),
}

struct Check {
    name: &'static str,
    what: What,
    /// Settings of every engine.
    settings: &'static str,
    limit_s: u32,
    /// Only with `--long`.
    long: bool,
}

/// Under emulation everything takes longer, but nothing may fail for it.
const PATIENT: &str = "BATON_TIMEOUT_SCALE=10 BATON_IB_TIMEOUT=18";
/// Where peers fail and others are to succeed beside them. Not a short acknowledgement timeout as well: once soft-RoCE
/// sends again, long WRITEs end in errors of its own.
const SOON: &str = "BATON_TIMEOUT_SCALE=2 BATON_IB_TIMEOUT=18";
/// Where the network itself is to fail, in bounded time.
const BRIEF: &str = "BATON_TIMEOUT_SCALE=2 BATON_IB_TIMEOUT=12 BATON_IB_RETRY=3";

/// As PATIENT, with notifications by SEND.
const SEND: &str = "BATON_TIMEOUT_SCALE=10 BATON_IB_TIMEOUT=18 BATON_NOTIFY=send";

/// As PATIENT, through bounce memory.
const TWO_SIDED: &str = "BATON_TIMEOUT_SCALE=10 BATON_IB_TIMEOUT=18 BATON_BACKEND=two-sided";

const TWO: (&str, &str) = ("baton-tests", "verbs_two_processes");

const fn quick(name: &'static str, what: What, settings: &'static str, limit_s: u32) -> Check {
    Check { name, what, settings, limit_s, long: false }
}

const fn long(name: &'static str, what: What, settings: &'static str, limit_s: u32) -> Check {
    Check { name, what, settings, limit_s, long: true }
}

const CHECKS: &[Check] = &[
    quick(
        "what the model devices are held to",
        What::Tests("baton-verbs", "agreement", "real::"),
        PATIENT,
        60,
    ),
    quick(
        "conformance of the verbs fabric",
        What::Tests("baton-fabric-verbs", "conformance", ""),
        PATIENT,
        200,
    ),
    quick("two-sided channels", What::Tests("baton-driver", "two_sided", "over_rdma"), PATIENT, 200),
    quick("flushing of GPU memory", What::Tests("baton-fabric-verbs", "flush", ""), PATIENT, 60),
    quick("two processes, immediates", What::Tests(TWO.0, TWO.1, "transfers::"), PATIENT, 120),
    quick(
        "two processes, lanes on two devices of each",
        What::Tests(TWO.0, TWO.1, "transfers::every_device"),
        "BATON_TIMEOUT_SCALE=10 BATON_IB_TIMEOUT=18 BATON_DEVICES=rxe0,rxe1",
        60,
    ),
    quick("two processes, notifications by SEND", What::Tests(TWO.0, TWO.1, "transfers::"), SEND, 120),
    quick("two processes, two-sided", What::Tests(TWO.0, TWO.1, "transfers::"), TWO_SIDED, 120),
    quick(
        "the benchmark beside a bare queue pair",
        What::Tests("baton-bench", "two_processes", "over_rdma"),
        PATIENT,
        60,
    ),
    quick("the stock NIXL wheel", What::Nixl("demo.py", "--quick"), PATIENT, 200),
    long("memory lock limit", What::Tests(TWO.0, TWO.1, "memlock::"), PATIENT, 60),
    long("loss and delay", What::Tests(TWO.0, TWO.1, "faults::lost faults::delayed"), PATIENT, 200),
    long(
        "loss and delay, two-sided",
        What::Tests(TWO.0, TWO.1, "faults::lost faults::delayed"),
        TWO_SIDED,
        300,
    ),
    long("link down, nothing gets through", What::Tests(TWO.0, TWO.1, "faults::a_"), BRIEF, 300),
    long("100 reconnects", What::Tests(TWO.0, TWO.1, "reconnect::"), SOON, 400),
    long("killed, stopped and hostile peers", What::Tests("baton-tests", "faults", "verbs::"), SOON, 1500),
    long("the stock NIXL wheel's core scenarios", What::Nixl("scenarios.py", "--core"), PATIENT, 900),
    long(
        "the stock NIXL wheel's core scenarios, two-sided",
        What::Nixl("scenarios.py", "--core"),
        TWO_SIDED,
        900,
    ),
];

/// Boot, and what the checks' own limits do not see.
const BESIDES: Duration = Duration::from_secs(90);
/// What the quick checks take together at most; no single one is near its own limit.
const QUICK_BUDGET: Duration = Duration::from_secs(700);

/// Runs the checks whose name contains `part`; the report is on standard output.
pub fn checks(is_long: bool, part: &str) -> Outcome<()> {
    let chosen: Vec<&Check> =
        CHECKS.iter().filter(|check| (is_long || !check.long) && check.name.contains(part)).collect();
    if chosen.is_empty() {
        let names: Vec<&str> = CHECKS.iter().map(|check| check.name).collect();
        return Err(format!("no check in the guest is called {part:?}; there are: {}", names.join("; ")));
    }
    let plugins = artifacts::plugin_dir()?;
    let mut vm = vm::script()?;
    let programs = test_programs()?;
    let script = work_dir("guest")?.join("checks.sh");
    let text = script_of(&chosen, &programs, &plugins)?;
    std::fs::write(&script, text).map_err(|error| format!("cannot write {}: {error}", script.display()))?;
    let all =
        chosen.iter().map(|check| Duration::from_secs(check.limit_s.into())).sum::<Duration>() + BESIDES;
    let limit = if is_long { all } else { all.min(QUICK_BUDGET) };
    vm.args(["-t", &limit.as_secs().to_string(), "--", "bash"]).arg(&script);
    run(vm.current_dir(root()), limit + minutes(5))
}

#[derive(Deserialize)]
struct Message {
    reason: String,
    #[serde(default)]
    package_id: String,
    target: Option<Target>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

/// The workspace's test programs, by package and target.
fn test_programs() -> Outcome<BTreeMap<(String, String), PathBuf>> {
    say("building the tests that run in the guest");
    let listing = output(cargo().args([
        "test",
        "--workspace",
        "--locked",
        "--no-run",
        "--quiet",
        "--message-format=json-render-diagnostics",
    ]))?;
    let mut programs = BTreeMap::new();
    for line in listing.lines() {
        let Ok(message) = serde_json::from_str::<Message>(line) else { continue };
        let (Some(target), Some(executable)) = (message.target, message.executable) else { continue };
        if message.reason == "compiler-artifact" && target.kind.iter().any(|kind| kind == "test") {
            programs.insert((package_of(&message.package_id).to_owned(), target.name), executable);
        }
    }
    Ok(programs)
}

/// The name in cargo's id of a package: `path+file:///a/b#name@1.0.0`, or `…/name#1.0.0`.
fn package_of(id: &str) -> &str {
    let (path, version) = id.rsplit_once('#').unwrap_or((id, ""));
    version.split_once('@').map_or_else(|| path.rsplit('/').next().unwrap_or(path), |(name, _)| name)
}

/// A word as the shell reads it back.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A command with the variables that were set for it.
fn shell_line(command: &Command) -> String {
    let variables = || command.get_envs().map(|(name, value)| (name.to_string_lossy(), value));
    let unset = variables().filter(|(_, value)| value.is_none());
    let mut words = vec!["env".to_owned()];
    words.extend(unset.flat_map(|(name, _)| ["-u".to_owned(), quoted(&name)]));
    let set = variables().filter_map(|(name, value)| Some(format!("{name}={}", value?.to_string_lossy())));
    words.extend(set.map(|pair| quoted(&pair)));
    let rest = std::iter::once(command.get_program()).chain(command.get_args());
    words.extend(rest.map(|word| quoted(&word.to_string_lossy())));
    words.join(" ")
}

fn line_of(check: &Check, programs: &BTreeMap<(String, String), PathBuf>, plugins: &Path) -> Outcome<String> {
    let variables = check.settings.split(' ').filter_map(|word| word.split_once('='));
    match check.what {
        What::Tests(package, target, which) => {
            let key = (package.to_owned(), target.to_owned());
            let program =
                programs.get(&key).ok_or_else(|| format!("{package} has no test program {target}"))?;
            let mut command = Command::new(program);
            command.args(which.split_whitespace()).args(["--include-ignored", "--test-threads=1"]);
            command.env("RIG_SETTINGS", check.settings).env("RIG_DEVICES", "rxe0,rxe1");
            command.env("BATON_TEST_ENGINE", plugins);
            // For tests that read settings themselves instead of opening engines in the rig.
            command.envs(variables);
            Ok(shell_line(&command))
        }
        What::Nixl(file, arguments) => {
            let mut python = nixl_python(NIXL, plugins)?;
            python.arg(wheel::scripts().join(file)).args(arguments.split_whitespace());
            python.env("BATON_FABRIC", "verbs").env("BATON_DEVICES", "rxe0");
            python.env("NIXL_TEST_PEER_DEVICES", "rxe1").env("NIXL_TEST_DEADLINE_S", "100");
            python.env("NIXL_LOG_LEVEL", "ERROR").envs(variables);
            Ok(shell_line(&python))
        }
    }
}

/// What reports a check, and mends the network that a failed one may have left broken.
const RUNNER: &str = r#"#!/bin/bash
failed=0 count=0
check() { # NAME SECONDS COMMAND
  local said=/tmp/said rc started=$(date +%s%N) took
  echo "$3" >/tmp/check
  timeout -k 5 "$2" bash /tmp/check >$said 2>&1 </dev/null
  rc=$?
  took=$((($(date +%s%N) - started) / 100000000))
  took=$((took / 10)).$((took % 10))
  # A test program that knows no such test succeeds as well.
  if ((rc == 0)) && grep -q '^test result: ok. 0 passed' $said; then rc='0, but no test ran'; fi
  count=$((count + 1))
  if [[ $rc == 0 ]]; then
    echo "PASS $1 ($took s) $(sed -n 's/^test result: ok. \(.*\); 0 measured.*/\1/p' $said)"
    return
  fi
  failed=$((failed + 1))
  [[ $rc == 124 ]] && rc="124: no end after $2 s"
  echo "FAIL $1 ($took s, exit code $rc)"
  tail -n 200 $said | sed 's/^/  | /'
  { tc qdisc del dev rdma1 root; ip link set rdma1 up; } 2>/dev/null
}
"#;

fn script_of(
    chosen: &[&Check],
    programs: &BTreeMap<(String, String), PathBuf>,
    plugins: &Path,
) -> Outcome<String> {
    let mut script = RUNNER.to_owned();
    for check in chosen {
        let line = line_of(check, programs, plugins)?;
        let _ = writeln!(script, "check {} {} {}", quoted(check.name), check.limit_s, quoted(&line));
    }
    script.push_str("echo \"guest: $((count - failed)) passed, $failed failed\"\nexit $((failed > 0))\n");
    Ok(script)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_found_in_both_forms_of_their_id() {
        assert_eq!(package_of("path+file:///w/integration/tests#baton-tests@0.0.1"), "baton-tests");
        assert_eq!(package_of("path+file:///w/plugin/baton-core#0.0.1"), "baton-core");
    }

    #[test]
    fn a_command_survives_the_shell() {
        let mut command = Command::new("printf");
        command.args(["%s", "it's a $HOME; \"word\""]).env("A", "b c").env_remove("D");
        let line = shell_line(&command);
        assert!(line.starts_with("env -u 'D' 'A=b c' 'printf'"), "{line}");
        let said = output(Command::new("bash").args(["-c", &line]));
        assert_eq!(said.as_deref(), Ok("it's a $HOME; \"word\""));
    }

    #[test]
    fn every_check_has_a_name_of_its_own() {
        let names: std::collections::BTreeSet<&str> = CHECKS.iter().map(|check| check.name).collect();
        assert_eq!(names.len(), CHECKS.len());
    }
}
