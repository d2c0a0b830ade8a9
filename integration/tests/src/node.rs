//! An agent of a test: an engine that notes which peers failed, and waits that end.

use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use baton_host::{
    Desc, Engine, EngineOptions, Environment, Error, Event, Notification, Op, OpenError, RemoteRegion,
    Status, Transfer,
};

use crate::{Block, PATIENCE};

/// Between two looks at something that makes no event.
const LOOK: Duration = Duration::from_micros(200);

/// A session that ended by failure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failed {
    /// Agent name of the peer.
    pub peer: String,
    /// Its instance.
    pub instance: Vec<u8>,
}

/// An engine and the failures it told of.
pub struct Node {
    /// The engine.
    pub engine: Engine,
    failures: Receiver<Failed>,
}

/// Looks until `done` answers, at most until the watchdog bites.
pub fn wait_for<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = done() {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(LOOK);
    }
}

impl Node {
    /// Opens an engine with the settings of this process.
    pub fn open(name: &str) -> Result<Node, OpenError> {
        Node::with(EngineOptions::new(name).environment(Environment::Process))
    }

    /// Opens an engine.
    pub fn with(options: EngineOptions) -> Result<Node, OpenError> {
        let engine = Engine::open(options)?;
        let (tell, failures) = mpsc::channel();
        let hook = move |event: Event<'_>| {
            if let Event::PeerFailed { peer, instance, .. } = event {
                // Nobody listens any more when the node is being dropped.
                let _ = tell.send(Failed { peer: peer.to_owned(), instance: instance.to_owned() });
            }
        };
        engine.set_event_hook(hook).expect("a hook can be set");
        Ok(Node { engine, failures })
    }

    /// Its next PEER_FAILED.
    pub fn next_failure(&self) -> Failed {
        self.failures
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|_| panic!("no PEER_FAILED: {}", self.stats_text()))
    }

    /// A PEER_FAILED that has come already.
    pub fn failure_so_far(&self) -> Option<Failed> {
        self.failures.try_recv().ok()
    }

    /// Its statistics.
    pub fn stats(&self) -> serde_json::Value {
        serde_json::from_str(&self.stats_text()).expect("stats are JSON")
    }

    fn stats_text(&self) -> String {
        self.engine.stats().unwrap_or_else(|e| format!("{{\"no stats\": \"{e}\"}}"))
    }

    /// One of its counters.
    pub fn counter(&self, name: &str) -> u64 {
        let stats = self.stats();
        stats["counters"][name].as_u64().unwrap_or_else(|| panic!("no counter {name} in {stats}"))
    }

    /// Learns a peer.
    pub fn load(&self, name: &str, info: &[u8]) {
        self.engine.load_remote(name, info).expect("connection information");
    }

    /// Waits for the end of the last post.
    pub fn finish(&self, transfer: &Transfer) -> Result<(), Error> {
        let what = || format!("a transfer: {}", self.stats_text());
        let start = Instant::now();
        loop {
            match transfer.status()? {
                Status::Done => return Ok(()),
                status => assert!(start.elapsed() < PATIENCE, "{status:?}: {}", what()),
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Posts and waits for success.
    pub fn run(&self, transfer: &Transfer, message: Option<&[u8]>) {
        transfer.post(message).expect("post");
        self.finish(transfer).expect("done");
    }

    /// Waits for the next notifications.
    pub fn notifications(&self) -> Vec<Notification> {
        wait_for("a notification", || {
            Some(self.engine.notifications().expect("notifications")).filter(|all| !all.is_empty())
        })
    }

    /// Waits for one notification and nothing else.
    pub fn expect_notification(&self, peer: &str, message: &[u8]) {
        let expected = Notification { peer: peer.to_owned(), message: message.to_vec() };
        assert_eq!(self.notifications(), [expected]);
    }

    /// A transfer of a whole block: its piece i belongs to piece n-1-i at the peer.
    pub fn scattered(&self, op: Op, local: &Block, remote: &Remote, piece: usize) -> Result<Transfer, Error> {
        let there = remote.pieces(local.bytes(), piece);
        self.engine.create_xfer(op, &remote.peer, &local.pieces(piece), &there)
    }
}

/// An imported block of a peer.
pub struct Remote {
    /// Whose.
    pub peer: String,
    /// The region.
    pub region: RemoteRegion,
    /// Where it starts.
    pub addr: u64,
}

impl Remote {
    /// Imports a block of `peer`.
    pub fn import(node: &Node, peer: &str, blob: &[u8], addr: u64) -> Result<Remote, Error> {
        Ok(Remote { peer: peer.to_owned(), region: node.engine.import_region(peer, blob)?, addr })
    }

    /// The first `bytes` of it in pieces, the last piece first.
    pub fn pieces(&self, bytes: usize, piece: usize) -> Vec<Desc> {
        let offset = |i: usize| self.addr + (i * piece) as u64;
        (0..bytes / piece).rev().map(|i| self.region.desc(offset(i), piece as u64)).collect()
    }
}
