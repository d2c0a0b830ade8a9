//! Two processes, each with an RDMA device of its own, move blocks both ways: what applications do, and what the
//! network does to them. See `baton_tests::rig` for how devices and settings are chosen. Without an RDMA device the
//! tests are ignored; `cargo xtask test` runs them in a guest that has two.

mod faults;
mod memlock;
mod reconnect;
mod transfers;

use baton_tests::{Agent, AgentBlock, Block, Node, Remote, in_own_process, rig_agent, rig_fabric, rig_node};
use serde_json::{Value, json};

/// Makes each body a test, in a process of its own, that is ignored where nobody asks for it.
macro_rules! with_devices {
    ($($(#[$attr:meta])* fn $name:ident() $body:block)*) => { $(
        #[test]
        #[ignore = "needs RDMA devices: cargo xtask test --only guest"]
        $(#[$attr])*
        fn $name() { crate::alone(concat!(module_path!(), "::", stringify!($name)), || $body) }
    )* };
}
pub(crate) use with_devices;

/// Runs the body of a test, given by its full path, in a process of its own.
pub fn alone(path: &str, body: impl FnOnce()) {
    let (_, test) = path.split_once("::").expect("a path inside this program");
    in_own_process(test, body);
}

/// An engine here called `a` and an agent in another process called `b` that know each other.
pub struct Pair {
    a: Node,
    b: Agent,
}

impl Pair {
    /// Starts both.
    pub fn meet() -> Pair {
        let (a, mut b) = (rig_node("a"), agent());
        b.befriend(&a, "a");
        Pair { a, b }
    }

    /// Memory here with the first seed, and at the agent with the second.
    pub fn blocks(&mut self, bytes: usize, seeds: (u64, u64)) -> (Block, AgentBlock, Remote) {
        let here = Block::new(&self.a.engine, bytes, seeds.0).expect("register");
        let there = self.b.block(bytes, seeds.1);
        let remote = self.b.import_into(&self.a, &there);
        (here, there, remote)
    }

    /// Waits until the agent has been told exactly this.
    pub fn assert_b_heard(&mut self, message: &str) {
        assert_eq!(self.b.ask(json!({ "do": "heard" })), json!([["a", message]]));
    }

    /// What the engine here says about its session with the agent.
    pub fn session(&self) -> Value {
        let stats = self.a.stats();
        let peers = stats["peers"].as_array().cloned().unwrap_or_default();
        let session = peers.iter().map(|peer| &peer["session"]).find(|session| session.is_object()).cloned();
        session.unwrap_or_else(|| panic!("no session in {stats}"))
    }

    /// Both directions of both operations work, with notifications.
    pub fn assert_works(&mut self) {
        transfers::everything_once(self, 256 << 10, 16 << 10);
        assert_eq!(self.session()["fabric"], rig_fabric());
    }
}

/// An agent called `b` in another process.
pub fn agent() -> Agent {
    rig_agent(env!("CARGO_BIN_EXE_baton-test-agent"), "b")
}
