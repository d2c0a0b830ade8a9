//! How transfers are spread over the lanes of a session, and what the length of work requests is set to.

mod common;

use baton_driver::{Config, Driver};
use baton_fabric::Op;
use common::*;

/// Work requests posted so far on each lane of the only session.
fn posted(engine: &Driver) -> Vec<u64> {
    let stats: serde_json::Value = serde_json::from_str(&engine.stats()).expect("json");
    let endpoints = stats["peers"][0]["session"]["protocol"]["endpoints"].as_array().expect("endpoints");
    endpoints[1..].iter().map(|endpoint| endpoint["posted"].as_u64().expect("a number")).collect()
}

fn with_chunks(chunk_bytes: u32) -> (Driver, Driver) {
    let config = Config { chunk_bytes, ..config("a", 0) };
    let a = Driver::create(config, vec![fabric("verbs")]).expect("engine");
    let b = engine("b", &["verbs"]);
    a.load_remote(Some("b"), b.conn_info()).expect("load b");
    (a, b)
}

#[test]
fn transfers_of_one_work_request_spread_over_the_lanes_within_ten_percent() {
    let (a, b) = pair(&["verbs"]);
    let (source, target) = (Buffer::new(&a, 4096, 1), Buffer::new(&b, 4096, 2));
    let imported = import(&a, "b", &b, &target);
    const COUNT: u64 = 200;
    for _ in 0..COUNT {
        let xfer = scattered(&a, Op::Write, "b", &source, &target, imported, 4096);
        a.post(&xfer, None).expect("post");
        done(&a, &xfer);
    }
    let lanes = posted(&a);
    assert!(lanes.len() > 1 && lanes.iter().sum::<u64>() == COUNT, "{lanes:?}");
    let share = COUNT as f64 / lanes.len() as f64;
    assert!(lanes.iter().all(|n| (*n as f64 - share).abs() <= share / 10.0), "{lanes:?}");
}

#[test]
fn one_large_descriptor_uses_every_lane() {
    let (a, b) = pair(&["verbs"]);
    let (source, target) = (Buffer::new(&a, 16 << 20, 1), Buffer::new(&b, 16 << 20, 2));
    let xfer = scattered(&a, Op::Write, "b", &source, &target, import(&a, "b", &b, &target), 16 << 20);
    a.post(&xfer, Some(b"large")).expect("post");
    done(&a, &xfer);
    let lanes = posted(&a);
    assert!(lanes.len() > 1 && lanes.iter().all(|n| *n > 0), "{lanes:?}");
    assert_eq!(notification(&b).message, b"large");
    assert_eq!(target.read(), source.read());
    target.assert_guards();
}

#[test]
fn work_requests_are_as_long_as_the_setting_says() {
    for (chunk_bytes, pieces) in [(4096, 64), (65_536, 4), (4 << 20, 1)] {
        let (a, b) = with_chunks(chunk_bytes);
        let (source, target) = (Buffer::new(&a, 256 * 1024, 1), Buffer::new(&b, 256 * 1024, 2));
        let xfer = scattered(&a, Op::Read, "b", &source, &target, import(&a, "b", &b, &target), 256 * 1024);
        a.post(&xfer, None).expect("post");
        done(&a, &xfer);
        assert_eq!(posted(&a).iter().sum::<u64>(), pieces, "{:?}", posted(&a));
        assert_eq!(source.read(), target.read());
        source.assert_guards();
    }
}
