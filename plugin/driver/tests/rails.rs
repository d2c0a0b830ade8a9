//! Several rails, segments and fabrics that can do only a part: what the driver makes of them.

mod common;

use baton_driver::{Code, Config, Driver, Error, NotifyMode, Status};
use baton_fabric::{Fabric, Memory, MemoryKind, Op};
use common::rails::{Dress, Railed};
use common::*;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

fn dressed(name: &str, dress: Dress) -> Arc<Railed> {
    Railed::new(fabric(name), dress)
}

fn engine_over(name: &str, fabrics: &[&Arc<Railed>]) -> Driver {
    let fabrics = fabrics.iter().map(|fabric| Arc::clone(fabric) as Arc<dyn Fabric>).collect();
    Driver::create(config(name, 0), fabrics).expect("engine")
}

fn acquaint(a: &Driver, b: &Driver) {
    a.load_remote(Some("b"), b.conn_info()).expect("load b");
    b.load_remote(Some("a"), a.conn_info()).expect("load a");
}

fn stats(engine: &Driver) -> Value {
    serde_json::from_str(&engine.stats()).expect("stats are JSON")
}

/// WRITEs to and READs from the peer, with and without a message; every byte and the sentinels.
fn exchange(own: &Driver, peer: &Driver, name: &str, len: usize, block: usize) {
    for (op, message) in
        [(Op::Write, Some(&b"written"[..])), (Op::Read, Some(b"read")), (Op::Write, None), (Op::Read, None)]
    {
        exchange_once(own, peer, name, (len, block), op, message);
    }
}

fn exchange_once(
    own: &Driver,
    peer: &Driver,
    name: &str,
    (len, block): (usize, usize),
    op: Op,
    message: Option<&[u8]>,
) {
    let (mine, theirs) = (Buffer::new(own, len, 3), Buffer::new(peer, len, 90));
    let (mine_before, theirs_before) = (mine.read(), theirs.read());
    let imported = import(own, name, peer, &theirs);
    let xfer = scattered(own, op, name, &mine, &theirs, imported, block);
    own.post(&xfer, message).expect("post");
    done(own, &xfer);
    if let Some(message) = message {
        assert_eq!(notification(peer).message, message);
    }
    let (mine_after, theirs_after) = match op {
        Op::Write => (mine_before.clone(), reversed(&mine_before, block)),
        Op::Read => (reversed(&theirs_before, block), theirs_before),
    };
    assert!(mine.read() == mine_after, "{op:?}: local bytes");
    assert!(theirs.read() == theirs_after, "{op:?}: remote bytes");
    mine.assert_guards();
    theirs.assert_guards();
    own.deregister(mine.region).expect("deregister");
    peer.deregister(theirs.region).expect("deregister");
}

#[test]
fn every_lane_uses_the_keys_of_its_rails_and_of_the_segments_it_touches() {
    for name in ["local", "tcp"] {
        let many = Dress { rails: 3, segment_bytes: 300_001, lanes: 7, ..Dress::default() };
        let few = Dress { rails: 2, segment_bytes: 200_003, lanes: 4, ..Dress::default() };
        let fabrics = [dressed(name, many), dressed(name, Dress { max_message_bytes: 65_536, ..few })];
        let (a, b) = (engine_over("a", &[&fabrics[0]]), engine_over("b", &[&fabrics[1]]));
        acquaint(&a, &b);
        exchange(&a, &b, "b", 3_000_000, 100_000);
        exchange(&b, &a, "a", 1_000_000, 1000);
        let session = &stats(&a)["peers"][0]["session"];
        assert_eq!(session["lanes"], 4);
        // The active side's endpoint n of 8 is on rail (8 − n) mod 3, the passive one's on n mod 2; lanes follow control.
        assert_eq!(session["rails"], json!([[1, 1], [0, 0], [2, 1], [1, 0]]));
        assert_eq!(fabrics[0].longest.load(Ordering::Relaxed), 65_536, "what both sides permit");
        drop((a, b));
        for fabric in &fabrics {
            assert_eq!((fabric.region_count(), fabric.endpoint_count()), (0, 0), "given back");
        }
    }
}

#[test]
fn a_read_is_cut_where_its_own_fabric_wants_it_and_a_write_is_not() {
    let shy = Dress { longest_read_bytes: 16_384, lanes: 1, ..Dress::default() };
    for (mine, theirs, longest) in
        [(shy.clone(), Dress::default(), 16_384), (Dress { lanes: 1, ..Dress::default() }, shy, 1_000_000)]
    {
        let fabrics = [dressed("local", mine), dressed("local", theirs)];
        let (a, b) = (engine_over("a", &[&fabrics[0]]), engine_over("b", &[&fabrics[1]]));
        acquaint(&a, &b);
        let longest_of = |op| {
            fabrics[0].longest.store(0, Ordering::Relaxed);
            exchange_once(&a, &b, "b", (1_000_000, 1_000_000), op, Some(&[7; 100]));
            fabrics[0].longest.load(Ordering::Relaxed)
        };
        assert_eq!(longest_of(Op::Write), 1_000_000);
        assert_eq!(longest_of(Op::Read), longest);
    }
}

#[test]
fn recv_slots_have_the_keys_of_their_rails() {
    let dress = |rails| Dress { rails, segment_bytes: 2 << 20, lanes: 2, ..Dress::default() };
    let fabrics = [dressed("local", dress(3)), dressed("local", dress(2))];
    let engine = |name, fabric: &Arc<Railed>| {
        let config = Config { notify: NotifyMode::Send, ..config(name, 0) };
        Driver::create(config, vec![Arc::clone(fabric) as Arc<dyn Fabric>]).expect("engine")
    };
    let (a, b) = (engine("a", &fabrics[0]), engine("b", &fabrics[1]));
    acquaint(&a, &b);
    exchange(&a, &b, "b", 3_000_000, 100_000);
    exchange(&b, &a, "a", 100_000, 1000);
    b.notify("a", b"alone").expect("notify");
    assert_eq!(notification(&a).message, b"alone");
}

#[test]
fn the_active_side_knows_the_peers_fabric_and_the_passive_one_its_endpoints() {
    let fabrics = [dressed("tcp", Dress { lanes: 3, ..Dress::default() }), dressed("tcp", Dress::default())];
    let (a, b) = (engine_over("a", &[&fabrics[0]]), engine_over("b", &[&fabrics[1]]));
    acquaint(&a, &b);
    exchange(&a, &b, "b", 4096, 1024);
    assert_eq!(*fabrics[0].views.lock().unwrap(), [json!({ "fabric": fabrics[1].address() })]);
    let views = fabrics[1].views.lock().unwrap();
    let offered = views[0]["endpoints"].as_array().expect("a list");
    // Control and its own two lanes; the third lane that is offered has no counterpart here.
    assert_eq!((views.len(), offered.len()), (1, 3));
    assert!(offered.iter().all(|address| address["rail"] == 0 && !address["inner"].is_null()));
}

#[test]
fn a_fabric_that_cannot_is_passed_over_on_either_side_at_every_step() {
    let faults = [
        Dress { no_endpoints: Some("no queue pairs are left"), ..Dress::default() },
        Dress { no_recvs: Some("no memory for RECVs"), ..Dress::default() },
        Dress { no_connection: Some("no route to the GID"), ..Dress::default() },
        Dress { segment_bytes: 50_000, ..Dress::default() },
    ];
    for (broken_side, fault) in [0, 1].into_iter().flat_map(|side| faults.iter().map(move |f| (side, f))) {
        let dress = |side| if side == broken_side { fault.clone() } else { Dress::default() };
        let sides = [0, 1].map(|side| [dressed("local", dress(side)), dressed("tcp", Dress::default())]);
        let [a, b] = [0, 1].map(|side| engine_over(["a", "b"][side], &[&sides[side][0], &sides[side][1]]));
        acquaint(&a, &b);
        exchange(&a, &b, "b", 4096, 1024);
        assert_eq!(stats(&a)["peers"][0]["session"]["fabric"], "tcp");
        let fallbacks = [&a, &b].map(|engine| stats(engine)["counters"]["fallbacks"].as_u64().unwrap_or(0));
        assert!(fallbacks[0] + fallbacks[1] >= 1, "{broken_side} {fallbacks:?}");
        for fabric in sides.iter().map(|fabrics| &fabrics[0]) {
            assert_eq!(
                (fabric.region_count(), fabric.endpoint_count()),
                (0, 0),
                "what was tried is given back"
            );
        }
    }
}

#[test]
fn when_no_fabric_has_endpoints_the_error_names_each_with_its_reason() {
    let out = Dress { no_endpoints: Some("no queue pairs are left"), ..Dress::default() };
    let lost = Dress { no_endpoints: Some("the port is down"), ..Dress::default() };
    let broken = [dressed("local", out), dressed("tcp", lost)];
    let whole = [dressed("local", Dress::default()), dressed("tcp", Dress::default())];
    let (a, b) = (engine_over("a", &[&broken[0], &broken[1]]), engine_over("b", &[&whole[0], &whole[1]]));
    acquaint(&a, &b);
    for (own, peer) in [(&a, "b"), (&b, "a")] {
        let Err(Error { text, .. }) = own.connect(peer, WATCHDOG.as_millis() as u32) else {
            panic!("it connects")
        };
        for reason in
            ["local: limit reached: no queue pairs are left", "tcp: limit reached: the port is down"]
        {
            assert!(text.contains(reason), "{text}");
        }
    }
}

/// Host memory that is called device memory.
fn vram(engine: &Driver, bytes: &[u8]) -> Result<u64, Error> {
    engine.register(&Memory {
        addr: bytes.as_ptr() as u64,
        len_bytes: bytes.len() as u64,
        kind: MemoryKind::Vram,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    })
}

#[test]
fn a_region_that_one_fabric_refuses_is_registered_with_the_others_and_fails_by_name_where_it_is_missing() {
    let refuses = || Dress { no_vram: Some("no peer memory driver"), ..Dress::default() };
    let sides = [0, 1].map(|_| [dressed("local", refuses()), dressed("tcp", Dress::default())]);
    let (a, b) =
        (engine_over("a", &[&sides[0][0], &sides[0][1]]), engine_over("b", &[&sides[1][0], &sides[1][1]]));
    acquaint(&a, &b);
    let (here, there) = (vec![1u8; 4096].into_boxed_slice(), vec![2u8; 4096].into_boxed_slice());
    let region_here = vram(&a, &here).expect("tcp takes it");
    let region_there = vram(&b, &there).expect("tcp takes it");
    assert_eq!(stats(&a)["counters"]["registrations_partial"], 1);
    let (mine, theirs) = (Buffer::new(&a, 4096, 1), Buffer::new(&b, 4096, 2));
    let desc = |addr: &[u8], region| baton_driver::Desc {
        addr: addr.as_ptr() as u64,
        len_bytes: 4096,
        region,
        reserved: 0,
    };
    let imported_there = a.import("b", &b.export(region_there).expect("export")).expect("import");
    let imported = import(&a, "b", &b, &theirs);
    assert!(a.connect("b", WATCHDOG.as_millis() as u32).expect("connect"), "over local");
    for (local, remote, wanted) in [
        (
            desc(&here, region_here),
            theirs.desc(0, 4096, imported),
            ["local region", "is not registered with fabric local", "no peer memory driver", "BATON_FABRIC"],
        ),
        (
            mine.desc(0, 4096, mine.region),
            desc(&there, imported_there),
            ["remote region", "of b (Vram, 4096 bytes", "has no key on fabric local", "only on: tcp"],
        ),
    ] {
        let xfer = a.create_xfer(Op::Write, "b", &[local], &[remote]).expect("create");
        let error = a.post(&xfer, None).expect_err("no key");
        assert_eq!(error.code, Code::Unsupported);
        wanted.iter().for_each(|words| assert!(error.text.contains(words), "{error}"));
        assert!(matches!(a.status(&xfer), Status::Failed(_)));
    }
    // The session and its other transfers are not touched by that.
    exchange(&a, &b, "b", 4096, 512);
    a.deregister(region_here).expect("deregister where it is");
    assert_eq!(
        sides[0].each_ref().map(|fabric| fabric.region_count()),
        [3, 1],
        "rings over local, one buffer"
    );
}

#[test]
fn memory_that_no_fabric_takes_is_refused_with_every_reason() {
    let tiny = Dress { rails: 2, segment_bytes: 200_000, no_vram: Some("no GPU"), ..Dress::default() };
    let sides =
        [dressed("local", tiny), dressed("tcp", Dress { no_vram: Some("sockets only"), ..Dress::default() })];
    let a = engine_over("a", &[&sides[0], &sides[1]]);
    let error = vram(&a, &[0; 64]).expect_err("refused");
    assert_eq!(error.code, Code::Unsupported);
    assert_eq!(error.text, "fabric local: not supported: no GPU; fabric tcp: not supported: sockets only");
    let tiny = dressed("local", Dress { rails: 2, segment_bytes: 16, ..Dress::default() });
    let a = engine_over("a", &[&tiny]);
    let bytes = vec![0u8; 16 * 2048 + 1];
    let memory = |len_bytes| Memory {
        addr: bytes.as_ptr() as u64,
        len_bytes,
        kind: MemoryKind::Dram,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    };
    let fits = a.register(&memory(16 * 2048)).expect("4096 keys");
    let error = a.register(&memory(16 * 2048 + 1)).expect_err("4098 keys");
    assert_eq!(error.code, Code::Limit);
    assert!(
        error.text.contains("2 rails of 2049 segments of 16 bytes; a region has at most 4096 keys"),
        "{error}"
    );
    a.deregister(fits).expect("deregister");
    assert_eq!(tiny.region_count(), 0, "what was refused is given back");
}

#[test]
fn rings_that_no_segment_holds_fail_the_attempt_by_name_and_leave_nothing_behind() {
    let short = dressed("tcp", Dress { segment_bytes: 50_000, ..Dress::default() });
    let whole = dressed("tcp", Dress::default());
    let (a, b) = (engine_over("a", &[&short]), engine_over("b", &[&whole]));
    acquaint(&a, &b);
    let error = a.connect("b", WATCHDOG.as_millis() as u32).expect_err("no rings");
    assert!(
        error.text.contains("fabric tcp: ring 1 of a session needs 32768 bytes at offset 36864"),
        "{error}"
    );
    assert_eq!((short.region_count(), short.endpoint_count()), (0, 0));
}

#[test]
fn every_fabric_is_tended_whether_the_host_polls_or_not() {
    let fabrics = [dressed("local", Dress::default()), dressed("tcp", Dress::default())];
    let a = engine_over("a", &[&fabrics[0], &fabrics[1]]);
    let deadline = Instant::now() + WATCHDOG;
    let until_more = |poll: &dyn Fn()| {
        let before = fabrics.each_ref().map(|fabric| fabric.tended.load(Ordering::Relaxed));
        while fabrics.iter().zip(before).any(|(fabric, n)| fabric.tended.load(Ordering::Relaxed) < n + 1) {
            assert!(Instant::now() < deadline, "nobody tends the fabrics");
            poll();
            std::thread::yield_now();
        }
    };
    until_more(&|| ());
    until_more(&|| assert!(!a.progress().expect("progress")));
}
