//! What happens to the survivors when a process, an engine or a peer does not behave: on the real engine, through
//! the Rust host, over each software fabric. Every test runs in a process of its own under a watchdog.

mod attacker;
mod destroy;
mod forbidden;
mod fork;
mod hostile;
mod impostor;
mod kill;
mod leaks;
mod meet;
mod stop;
mod wake;
mod withdraw;

use std::ffi::OsString;

use baton_host::{EngineOptions, Environment, ErrorCode, Op};
use baton_tests::{
    Agent, Block, Node, assert_devices, command, engine_directory, in_own_process, rig_settings,
};

/// A transfer that takes a while.
pub const LARGE: usize = 64 << 20;
/// Piece of a large transfer.
pub const PIECE: usize = 1 << 20;

/// Makes a test of each body for each fabric.
macro_rules! on_each_fabric {
    ($($(#[$attr:meta])* fn $name:ident($fabric:ident) $body:block)*) => {
        $($(#[$attr])* fn $name($fabric: &str) $body)*
        mod local { $(#[test] fn $name() { crate::alone(concat!(module_path!(), "::", stringify!($name)), || super::$name("local")) })* }
        mod tcp { $(#[test] fn $name() { crate::alone(concat!(module_path!(), "::", stringify!($name)), || super::$name("tcp")) })* }
        mod verbs { $(#[test] #[ignore = "needs an RDMA device: cargo xtask test --only guest"] fn $name() { crate::alone(concat!(module_path!(), "::", stringify!($name)), || super::$name("verbs")) })* }
    };
}
pub(crate) use on_each_fabric;

/// Runs the body of a test, given by its full path, in a process of its own.
pub fn alone(path: &str, body: impl FnOnce()) {
    let (_, test) = path.split_once("::").expect("a path inside this program");
    in_own_process(test, body);
}

/// Settings at the first (0) or the second (1) end.
fn variables(fabric: &str, end: usize) -> Vec<(OsString, OsString)> {
    let engine = engine_directory().clone().into_os_string();
    let pairs = [("BATON_PLUGIN", engine), ("BATON_FABRIC", fabric.into()), ("BATON_PTRACE", "any".into())];
    let mut all: Vec<_> = pairs.into_iter().map(|(name, value)| (name.into(), value)).collect();
    if fabric == "verbs" {
        assert_devices();
        all.extend(rig_settings(end));
    }
    all
}

/// How an engine over `fabric` is opened.
pub fn options(name: &str, fabric: &str) -> EngineOptions {
    EngineOptions::new(name).environment(Environment::Given(variables(fabric, usize::from(name == "b"))))
}

/// An agent in this process.
pub fn node(name: &str, fabric: &str) -> Node {
    Node::with(options(name, fabric)).expect("open")
}

/// The program of an agent in another process.
pub fn agent_program(fabric: &str) -> std::process::Command {
    command(env!("CARGO_BIN_EXE_baton-test-agent"), variables(fabric, 1))
}

/// An agent in another process.
pub fn agent(name: &str, fabric: &str) -> Agent {
    Agent::start(agent_program(fabric), name)
}

/// Makes two nodes of this process known to each other.
pub fn befriend(a: (&Node, &str), b: (&Node, &str)) {
    a.0.load(b.1, &b.0.engine.conn_info().expect("info"));
    b.0.load(a.1, &a.0.engine.conn_info().expect("info"));
}

/// What an operation towards a peer that is gone may answer.
pub fn is_gone(code: ErrorCode) -> bool {
    matches!(code, ErrorCode::RemoteDisconnect | ErrorCode::NotFound | ErrorCode::Stale)
}

/// Both directions work between a node called `name` and an agent, with fresh memory and a notification each.
pub fn assert_works(node: &Node, name: &str, agent: &mut Agent) {
    const BYTES: usize = 1 << 20;
    const SMALL: usize = 64 << 10;
    let here = Block::new(&node.engine, BYTES, 101).expect("register");
    let there = agent.block(BYTES, 102);
    let remote = agent.import_into(node, &there);
    let read = node.scattered(Op::Read, &here, &remote, SMALL).expect("create");
    node.run(&read, Some(b"read"));
    here.assert_holds_reversed(102, SMALL, "after a READ");
    assert_eq!(agent.ask(serde_json::json!({ "do": "heard" })), serde_json::json!([[name, "read"]]));

    here.fill(103);
    let write = agent.create("read", &there, name, &here, SMALL);
    agent.run(write, Some("fetched")).expect("the agent's READ");
    node.expect_notification(agent.name(), b"fetched");
    agent.assert_holds(&there, 103, Some(SMALL), "after its READ");
    let write = node.scattered(Op::Write, &here, &remote, SMALL).expect("create");
    node.run(&write, Some(b""));
    assert_eq!(agent.ask(serde_json::json!({ "do": "heard" })), serde_json::json!([[name, ""]]));
    agent.assert_holds(&there, 103, Some(SMALL), "after a WRITE");
    here.assert_holds(103, "at the source of a WRITE");
}
