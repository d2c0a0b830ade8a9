//! What the benchmarks through the stock NIXL API share: who takes part, and how its scripts are run in turn.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use baton_bench::Peer;
use indicatif::ProgressBar;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::artifacts;
use crate::run::{Outcome, spell, wait};
use crate::setup::{NIXL, nixl_python, wheel_libraries};
use crate::wheel::scripts;

/// A peer with how it is set up.
#[derive(Clone)]
pub struct Contestant {
    pub peer: Peer,
    backend: &'static str,
    environment: &'static [(&'static str, &'static str)],
}

const CONTESTANTS: &[Contestant] = &[
    Contestant { peer: Peer { name: "baton", against: Some("ucx") }, backend: "BATON", environment: &[] },
    Contestant { peer: Peer { name: "ucx", against: None }, backend: "UCX", environment: &[] },
    Contestant {
        peer: Peer { name: "baton-tcp", against: Some("ucx-tcp") },
        backend: "BATON",
        environment: &[("BATON_FABRIC", "tcp")],
    },
    Contestant {
        peer: Peer { name: "ucx-tcp", against: None },
        backend: "UCX",
        environment: &[("UCX_TLS", "tcp")],
    },
];

/// One run of one peer takes seconds; a hung one is ended.
const LIMIT: Duration = Duration::from_secs(300);

/// Those who take part, with the plugins of each.
pub struct Contest {
    pub contestants: Vec<Contestant>,
    ours: PathBuf,
    stock: PathBuf,
}

impl Contest {
    /// Everybody, or those whose name contains `only`.
    pub fn new(only: Option<&str>) -> Outcome<Contest> {
        let wanted = |one: &&Contestant| only.is_none_or(|part| one.peer.name.contains(part));
        let contestants: Vec<Contestant> = CONTESTANTS.iter().filter(wanted).cloned().collect();
        if contestants.is_empty() {
            let names: Vec<&str> = CONTESTANTS.iter().map(|one| one.peer.name).collect();
            return Err(format!("--only: no peer has that in its name; there are {}", names.join(", ")));
        }
        let ours = artifacts::plugin_dir()?;
        Ok(Contest { contestants, ours, stock: wheel_libraries(NIXL)?.join("plugins") })
    }

    /// Lets everybody do a run, then everybody the next: a change of the machine's mood hits all of them.
    pub fn take_turns<T: DeserializeOwned>(
        &self,
        runs: u32,
        script: &str,
        words: &[&str],
    ) -> Outcome<Vec<(Peer, Vec<T>)>> {
        let mut measured: Vec<(Peer, Vec<T>)> =
            self.contestants.iter().map(|one| (one.peer.clone(), Vec::new())).collect();
        let bar = ProgressBar::new(u64::from(runs) * self.contestants.len() as u64);
        for _ in 0..runs {
            for (one, (_, samples)) in self.contestants.iter().zip(&mut measured) {
                samples.extend(self.records(one, script, words)?);
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        Ok(measured)
    }

    /// What one run of a script says, a record a line.
    pub fn records<T: DeserializeOwned>(
        &self,
        one: &Contestant,
        script: &str,
        words: &[&str],
    ) -> Outcome<Vec<T>> {
        let plugins: &Path = if one.backend == "UCX" { &self.stock } else { &self.ours };
        let mut python = nixl_python(NIXL, plugins)?;
        python.arg(scripts().join(script)).args(words);
        python.env("NIXL_TEST_BACKEND", one.backend).env("NIXL_LOG_LEVEL", "ERROR");
        python.envs(one.environment.iter().copied());
        let lines = lines_of(&mut python).map_err(|reason| format!("{}: {reason}", one.peer.name))?;
        let samples: Vec<T> = lines.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
        if samples.is_empty() {
            Err(format!("{}: `{}` measured nothing", one.peer.name, spell(&python)))
        } else {
            Ok(samples)
        }
    }
}

/// Standard output of a run, line by line. UCX may crash at exit after all its work; what counts is what was printed.
fn lines_of(command: &mut Command) -> Outcome<Vec<String>> {
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::CommandExt;

    let what = spell(command);
    let spawned = command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child: Child = spawned.map_err(|error| format!("cannot start `{what}`: {error}"))?;
    let stdout = child.stdout.take().ok_or("no pipe")?;
    let reader = std::thread::spawn(move || BufReader::new(stdout).lines().map_while(Result::ok).collect());
    wait(child, &format!("`{what}`"), LIMIT)?;
    reader.join().map_err(|_| format!("`{what}`: reading its output failed"))
}

/// Writes records as a JSON list, where a file was named for it.
pub fn write_json<T: Serialize>(path: Option<&Path>, records: &[T]) -> Outcome<()> {
    let Some(path) = path else { return Ok(()) };
    let text = serde_json::to_string_pretty(records).map_err(|error| error.to_string())?;
    std::fs::write(path, text + "\n").map_err(|error| format!("cannot write {}: {error}", path.display()))
}
