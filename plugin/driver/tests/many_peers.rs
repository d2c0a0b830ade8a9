//! One engine with very many peers over real sockets, sixteen of them at work: what an idle one costs, and that the work gets done.
//! `cargo xtask test --long` has a thousand, else there are a hundred.

mod common;

use baton_driver::{Config, Driver};
use baton_fabric::Op;
use common::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::Value;
use std::time::{Duration, Instant};

/// Longest wait of this test, whatever else runs on the machine.
const PATIENCE: Duration = Duration::from_secs(240);
const ACTIVE: usize = 16;
const LEN: usize = 256 * 1024;
/// What the books of a channel take besides its registered memory; `baton-core` tests that.
const BOOKS_BYTES: u64 = 64 << 10;

fn stats(engine: &Driver) -> Value {
    serde_json::from_str(&engine.stats()).expect("JSON")
}

fn two_sided(name: &str) -> Driver {
    let backends = baton_driver::Backends { one_sided: false, two_sided: true };
    // A thousand engines need no thousand threads that make progress.
    let config = Config { backends, progress_thread: false, ..config(name, 0) };
    Driver::create(config, vec![fabric("tcp")]).expect("engine")
}

fn slots(hub: &Driver, what: &str) -> u64 {
    stats(hub)["bounce"]["tcp"][what].as_u64().expect("a number")
}

/// The hub's peers with a session, by name.
fn sessions(hub: &Driver) -> Vec<Value> {
    let all = stats(hub)["peers"].as_array().expect("peers").clone();
    all.into_iter().filter(|peer| peer["session"]["two_sided"].is_object()).collect()
}

fn raise_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
        .expect("raise the limit of descriptors");
}

/// Every session of the hub is there and idle, and costs what it may.
fn assert_idle_cost(hub: &Driver, peers: usize) {
    let sessions = sessions(hub);
    assert_eq!(sessions.len(), peers);
    let mut lanes = 0;
    for peer in &sessions {
        let session = &peer["session"]["two_sided"];
        lanes += session["lanes"].as_array().expect("lanes").len() as u64;
        let bytes = session["area_bytes"].as_u64().expect("bytes") + BOOKS_BYTES;
        assert!(bytes <= 256 << 10, "an idle peer costs {bytes} bytes beyond the slabs");
        assert_eq!(session["inbox_bytes"], 0, "{session}");
    }
    assert_eq!(slots(hub, "lent"), lanes, "one slot per lane of each");
}

fn work(hub: &Driver, peers: &[Driver]) {
    std::thread::scope(|scope| {
        for (n, peer) in peers[..ACTIVE].iter().enumerate() {
            scope.spawn(move || {
                let (source, target) = (Buffer::new(peer, LEN, n as u8), Buffer::new(hub, LEN, 200));
                let remote = import(peer, "hub", hub, &target);
                let xfer = scattered(peer, Op::Write, "hub", &source, &target, remote, 8192);
                for _ in 0..3 {
                    peer.post(&xfer, None).expect("post");
                    let deadline = Instant::now() + PATIENCE;
                    while matches!(peer.status(&xfer), baton_driver::Status::InProgress) {
                        assert!(Instant::now() < deadline, "{}", peer.stats());
                        std::thread::yield_now();
                    }
                    assert!(matches!(peer.status(&xfer), baton_driver::Status::Done), "peer {n}");
                }
                assert_eq!(target.read(), reversed(&source.read(), 8192));
                target.assert_guards();
            });
        }
    });
}

fn with_peers(count: usize) {
    raise_descriptors();
    let hub = engine("hub", &["tcp two-sided"]);
    let peers: Vec<Driver> = (0..count).map(|n| two_sided(&format!("peer-{n}"))).collect();
    for (n, peer) in peers.iter().enumerate() {
        peer.load_remote(Some("hub"), hub.conn_info()).expect("load");
        peer.notify("hub", &(n as u32).to_le_bytes()).expect("notify");
    }
    let mut told = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    while told.len() < count {
        told.extend(hub.take_notifications(usize::MAX).expect("take"));
        assert!(Instant::now() < deadline, "{} of {count} have come", told.len());
        std::thread::yield_now();
    }
    let mut numbers: Vec<u32> =
        told.iter().map(|n| u32::from_le_bytes(n.message[..].try_into().expect("a number"))).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..count as u32).collect::<Vec<_>>(), "each once");
    assert_idle_cost(&hub, count);
    work(&hub, &peers);
    assert_eq!(stats(&hub)["counters"]["epochs_ended"], 0, "nobody was lost meanwhile");
    // What the active ones had beyond one slot per lane comes back by itself.
    let deadline = Instant::now() + PATIENCE;
    let lanes: u64 = sessions(&hub)
        .iter()
        .map(|peer| peer["session"]["two_sided"]["lanes"].as_array().expect("lanes").len() as u64)
        .sum();
    while slots(&hub, "lent") > lanes || slots(&hub, "slabs") > (2 * lanes).div_ceil(16).max(1) {
        assert!(Instant::now() < deadline, "{}", stats(&hub)["bounce"]);
        std::thread::yield_now();
    }
    assert_idle_cost(&hub, count);
}

#[test]
fn a_hundred_peers_cost_little_while_they_are_idle_and_sixteen_of_them_work() {
    with_peers(100);
}

#[test]
#[ignore = "takes minutes and twenty thousand descriptors: cargo xtask test --long"]
fn a_thousand_peers_cost_little_while_they_are_idle_and_sixteen_of_them_work() {
    with_peers(1000);
}
