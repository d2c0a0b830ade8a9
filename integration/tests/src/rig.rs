//! Tests over RDMA devices: two ends, each on a device of its own. What they use is told by variables that a test
//! passes on to the processes it starts:
//!
//! * `RIG_DEVICES`: device of the test's process and device of the other one, `rxe0,rxe1` in the guest
//! * `RIG_SETTINGS`: settings of every engine, `BATON_NAME=VALUE` separated by spaces; `BATON_DEVICES` there serves both ends
//! * `RIG_FABRIC`: instead of verbs, to write such tests where no device is

use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use baton_host::{EngineOptions, Environment};

use crate::{Agent, Node, command, engine_directory};

/// Set in the guest that `cargo xtask vm` runs.
const GUEST: &str = "RDMA_VM";

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

/// Whether this is the guest, whose network a test may break.
pub fn in_guest() -> bool {
    std::env::var_os(GUEST).is_some()
}

/// What the tests of this rig run over.
pub fn rig_fabric() -> String {
    variable("RIG_FABRIC").unwrap_or_else(|| "verbs".to_owned())
}

/// Panics where the tests over RDMA devices cannot run.
pub fn assert_devices() {
    let devices = std::fs::read_dir("/sys/class/infiniband").map_or(0, Iterator::count);
    assert!(rig_fabric() != "verbs" || devices > 0, "no RDMA device: run this in the guest, cargo xtask vm");
}

/// Devices of both ends, if anybody named some.
pub fn rig_devices() -> Option<[String; 2]> {
    let text = variable("RIG_DEVICES").or_else(|| in_guest().then(|| "rxe0,rxe1".to_owned()))?;
    let (here, there) = text.split_once(',').unwrap_or((&text, &text));
    Some([here.to_owned(), there.to_owned()])
}

/// Settings of an engine over RDMA devices, on the first (0) or the second (1) of them.
pub fn rig_settings(end: usize) -> Vec<(OsString, OsString)> {
    let given = variable("RIG_SETTINGS").unwrap_or_default();
    let pair = |word: &str| {
        let (name, value) =
            word.split_once('=').unwrap_or_else(|| panic!("RIG_SETTINGS: no value in {word}"));
        (name.to_owned().into(), value.to_owned().into())
    };
    let mut settings: Vec<(OsString, OsString)> = given.split_whitespace().map(pair).collect();
    let named = settings.iter().any(|(name, _)| name == "BATON_DEVICES");
    if let Some(devices) = rig_devices().filter(|_| !named) {
        settings.push(("BATON_DEVICES".into(), devices[end].clone().into()));
    }
    settings
}

fn variables(end: usize) -> Vec<(OsString, OsString)> {
    assert_devices();
    let fabric = rig_fabric();
    let mut all = if fabric == "verbs" { rig_settings(end) } else { Vec::new() };
    all.push(("BATON_FABRIC".into(), fabric.into()));
    all.push(("BATON_PLUGIN".into(), engine_directory().clone().into_os_string()));
    all.push(("BATON_PTRACE".into(), "any".into()));
    all
}

/// How an engine at one end of the rig is opened.
pub fn rig_options(name: &str, end: usize) -> EngineOptions {
    EngineOptions::new(name).environment(Environment::Given(variables(end)))
}

/// An engine in this process, at the first end.
pub fn rig_node(name: &str) -> Node {
    Node::with(rig_options(name, 0)).expect("open")
}

/// The program of an agent at the second end.
pub fn rig_agent_program(program: impl AsRef<Path>) -> Command {
    command(program.as_ref(), variables(1))
}

/// An agent in another process, at the second end; `program` is `baton-test-agent`.
pub fn rig_agent(program: impl AsRef<Path>, name: &str) -> Agent {
    Agent::start(rig_agent_program(program), name)
}
