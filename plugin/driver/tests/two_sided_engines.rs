//! Engines with the two-sided backend: what it takes and refuses that the one-sided does not.

mod common;

use baton_driver::{Code, Status};
use baton_fabric::Op;
use common::pages::Pages;
use common::*;

const LEN: usize = 3 << 20;

fn assert_same(one: &Buffer, other: &Buffer) {
    assert_eq!(one.read(), other.read());
    one.assert_guards();
    other.assert_guards();
}

#[test]
fn memory_that_is_not_registered_is_sent_and_filled() {
    for fabric in ["tcp two-sided", "local two-sided"] {
        let (a, b) = pair(&[fabric]);
        let there = Buffer::new(&b, LEN, 9);
        let remote = import(&a, "b", &b, &there);
        let mut here = Buffer::unregistered(LEN, 1);
        let write = scattered(&a, Op::Write, "b", &here, &there, remote, 4096);
        a.post(&write, Some(b"written")).expect("post");
        done(&a, &write);
        assert_eq!(notification(&b).message, b"written");
        assert_eq!(there.read(), reversed(&here.read(), 4096));
        here.fill(77);
        let read = scattered(&a, Op::Read, "b", &here, &there, remote, LEN);
        a.post(&read, None).expect("post");
        done(&a, &read);
        assert_same(&there, &here);
    }
}

#[test]
fn memory_that_is_not_registered_is_refused_where_the_session_is_one_sided() {
    let (a, b) = pair(&["tcp"]);
    let there = Buffer::new(&b, 4096, 9);
    let remote = import(&a, "b", &b, &there);
    let here = Buffer::unregistered(4096, 1);
    let refused = a
        .create_xfer(Op::Write, "b", &[here.desc(0, 4096, here.region)], &[there.desc(0, 4096, remote)])
        .err()
        .expect("refused");
    assert_eq!(refused.code, Code::NotFound, "{refused}");
}

#[test]
fn with_both_backends_only_memory_without_a_key_goes_through_bounce_memory() {
    let (a, b) = pair(&["tcp auto"]);
    let (known, unknown) = (Buffer::new(&a, LEN, 1), Buffer::unregistered(LEN, 2));
    let there = Buffer::new(&b, LEN, 9);
    let remote = import(&a, "b", &b, &there);
    for (here, through_bounce) in [(&known, 0), (&unknown, 1), (&known, 1)] {
        let write = scattered(&a, Op::Write, "b", here, &there, remote, LEN);
        a.post(&write, Some(b"there")).expect("post");
        done(&a, &write);
        assert_eq!(notification(&b).message, b"there");
        assert_same(&there, here);
        let stats: serde_json::Value = serde_json::from_str(&a.stats()).expect("JSON");
        let two = &stats["peers"][0]["session"]["two_sided"]["counters"];
        assert_eq!(two["transfers_done"], through_bounce, "{two}");
    }
    // One side that has but one backend decides.
    let c = engine("c", &["tcp two-sided"]);
    c.load_remote(Some("b"), b.conn_info()).expect("load");
    assert!(c.connect("b", 10_000).expect("connect"));
    let stats: serde_json::Value = serde_json::from_str(&c.stats()).expect("JSON");
    let session = &stats["peers"][0]["session"];
    assert!(session["protocol"].is_null() && session["two_sided"].is_object(), "{session}");
}

#[test]
fn a_two_sided_engine_exports_no_key_and_permits_what_the_host_permits() {
    let (a, b) = pair(&["tcp two-sided"]);
    let there = Buffer::new(&b, 4096, 9);
    let blob =
        baton_core::wire::RegionBlob::decode(&b.export(there.region).expect("export")).expect("decode");
    assert!(blob.fabrics.is_empty(), "{blob:?}");
    let hidden = Buffer::with_access(&b, 4096, 3, false, true);
    let remote = import(&a, "b", &b, &hidden);
    let here = Buffer::new(&a, 4096, 1);
    let refused = a
        .create_xfer(Op::Read, "b", &[here.desc(0, 4096, here.region)], &[hidden.desc(0, 4096, remote)])
        .err()
        .expect("refused");
    assert_eq!(refused.code, Code::InvalidParam, "{refused}");
}

#[test]
fn a_large_message_with_an_id_arrives_behind_its_bytes() {
    let (a, b) = pair(&["tcp two-sided"]);
    let (here, there) = (Buffer::new(&a, LEN, 5), Buffer::new(&b, LEN, 9));
    let remote = import(&a, "b", &b, &there);
    let xfer = scattered(&a, Op::Write, "b", &here, &there, remote, LEN);
    let message = vec![7u8; 100_000];
    a.post_telling(&xfer, baton_driver::Tell { message: Some(&message), id: Some(42) }).expect("post");
    assert_eq!(notification(&b).message, message);
    assert_same(&there, &here);
    assert!(b.inbound_status("a", 42).expect("status"), "the id came with it");
    assert!(!b.inbound_status("a", 42).expect("status"), "and is forgotten");
    assert!(matches!(wait(&a, &xfer), Status::Done));
}

#[test]
fn engines_without_a_common_backend_say_what_each_has() {
    let (a, b) = (engine("a", &["tcp"]), engine("b", &["tcp two-sided"]));
    a.load_remote(Some("b"), b.conn_info()).expect("load b");
    let refused = a.connect("b", 5000).expect_err("no backend in common");
    assert_eq!(refused.code, Code::RemoteDisconnect, "{refused}");
    assert!(refused.text.contains("here one-sided, there two-sided"), "{refused}");
}

#[test]
fn bounce_memory_grows_under_load_and_is_back_at_its_base_soon_after() {
    let (a, b) = pair(&["tcp two-sided"]);
    let bytes = 64 << 20;
    let (here, there) = (Buffer::new(&a, bytes, 1), Buffer::new(&b, bytes, 2));
    let remote = import(&a, "b", &b, &there);
    let slabs = |name: &str| {
        let stats: serde_json::Value = serde_json::from_str(&b.stats()).expect("JSON");
        stats["bounce"]["tcp"][name].as_u64().unwrap_or(0)
    };
    let xfer = scattered(&a, Op::Write, "b", &here, &there, remote, 1 << 20);
    let (mut most, deadline) = (0, std::time::Instant::now() + WATCHDOG);
    a.post(&xfer, None).expect("post");
    while matches!(a.status(&xfer), Status::InProgress) {
        assert!(std::time::Instant::now() < deadline, "{}", a.stats());
        most = most.max(slabs("slabs"));
    }
    assert_eq!(there.read(), reversed(&here.read(), 1 << 20));
    assert!(most > 1, "one slab was enough");
    let idle = std::time::Instant::now();
    while slabs("slabs") > 1 {
        assert!(idle.elapsed() < WATCHDOG, "{} slabs: {}", slabs("slabs"), b.stats());
        std::thread::yield_now();
    }
    eprintln!("back at the base after {:?}", idle.elapsed());
    let stats: serde_json::Value = serde_json::from_str(&b.stats()).expect("JSON");
    assert_eq!(
        stats["fabrics"]["tcp"]["counters"]["recv_waits"], 0,
        "no SEND ever waited for a RECV: {stats}"
    );
}

#[test]
fn with_both_backends_many_small_blocks_are_packed_where_that_pays() {
    let (a, b) = pair(&["verbs soft auto"]);
    let mut packed = 0;
    for op in [Op::Write, Op::Read] {
        let cases = [
            (1024, 256, true),
            (1024, 32, true),
            (1024, 31, false),
            (4096, 64, false),
            (256 << 10, 1, false),
        ];
        for (block, count, blocks_are_packed) in cases {
            let len = block * count;
            let (here, there) = (Buffer::new(&a, len, 1), Buffer::new(&b, len, 2));
            let xfer = scattered(&a, op, "b", &here, &there, import(&a, "b", &b, &there), block);
            a.post(&xfer, Some(b"there")).expect("post");
            done(&a, &xfer);
            assert_eq!(notification(&b).message, b"there");
            let (from, to) = if op == Op::Write { (&here, &there) } else { (&there, &here) };
            assert_eq!(to.read(), reversed(&from.read(), block));
            to.assert_guards();
            packed += u64::from(blocks_are_packed);
            let stats: serde_json::Value = serde_json::from_str(&a.stats()).expect("JSON");
            let two = &stats["peers"][0]["session"]["two_sided"]["counters"];
            assert_eq!(two["transfers_done"], packed, "{op:?} of {count} blocks of {block}: {two}");
        }
    }
    verbs::assert_rules();
}

#[test]
fn memory_that_is_not_mapped_is_refused_at_its_registration() {
    let a = engine("a", &["tcp two-sided"]);
    let mut memory = baton_fabric::Memory {
        addr: 0x1000,
        len_bytes: 8192,
        kind: baton_fabric::MemoryKind::Dram,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    };
    let refused = a.register(&memory).expect_err("refused");
    assert!(refused.code == Code::InvalidParam && refused.text.contains("0x1000"), "{refused}");
    // The end of what is mapped in the middle of it.
    let bytes = vec![1u8; 3 * 4096];
    (memory.addr, memory.len_bytes) = (bytes.as_ptr() as u64, 1 << 46);
    assert_eq!(a.register(&memory).expect_err("refused").code, Code::InvalidParam);
    memory.len_bytes = bytes.len() as u64;
    let region = a.register(&memory).expect("all of it is mapped");
    a.deregister(region).expect("deregister");
}

#[test]
fn memory_that_the_host_took_away_fails_the_transfer_and_not_the_process() {
    for fabric in ["tcp two-sided", "local two-sided", "verbs two-sided"] {
        for op in [Op::Write, Op::Read] {
            for gone_here in [true, false] {
                // The model device reads what is registered without asking; only what it brings is copied.
                if fabric.starts_with("verbs") && (op == Op::Write) == gone_here {
                    continue;
                }
                let (a, b) = pair(&[fabric]);
                let pages = Pages::new(LEN);
                let gone = pages.register(if gone_here { &a } else { &b });
                let good = Buffer::new(if gone_here { &b } else { &a }, LEN, 3);
                let (local, remote) = if gone_here {
                    (pages.desc(gone), good.desc(0, LEN, import(&a, "b", &b, &good)))
                } else {
                    let imported = a.import("b", &b.export(gone).expect("export")).expect("import");
                    (good.desc(0, LEN, good.region), pages.desc(imported))
                };
                let xfer = a.create_xfer(op, "b", &[local], &[remote]).expect("create");
                a.connect("b", 10_000).expect("connect");
                pages.take_away();
                a.post(&xfer, Some(b"never")).expect("post");
                let status = wait(&a, &xfer);
                assert!(
                    matches!(status, Status::Failed(_)),
                    "{fabric} {op:?} gone here: {gone_here}: {status:?}"
                );
                assert!(b.take_notifications(usize::MAX).expect("take").is_empty());
                good.assert_guards();
                // Both engines go on.
                let (here, there) = (Buffer::new(&a, 8192, 1), Buffer::new(&b, 8192, 2));
                let again = scattered(&a, Op::Write, "b", &here, &there, import(&a, "b", &b, &there), 4096);
                let deadline = std::time::Instant::now() + WATCHDOG;
                while a.post(&again, None).is_err() || !matches!(wait(&a, &again), Status::Done) {
                    assert!(std::time::Instant::now() < deadline, "{}", a.stats());
                }
                assert_eq!(there.read(), reversed(&here.read(), 4096));
            }
        }
    }
}

#[test]
fn a_request_of_another_engine_is_refused_by_name() {
    let (a, b) = pair(&["tcp two-sided"]);
    let (here, there) = (Buffer::new(&a, 4096, 1), Buffer::new(&b, 4096, 2));
    let xfer = scattered(&a, Op::Write, "b", &here, &there, import(&a, "b", &b, &there), 4096);
    let state = |state| match state {
        Status::Failed(why) => Err(why),
        other => panic!("told of another engine's request: {other:?}"),
    };
    for refused in
        [b.post(&xfer, None), b.cancel(&xfer), b.release(&xfer), state(b.status(&xfer)), state(b.peek(&xfer))]
    {
        let refused = refused.expect_err("refused");
        assert!(refused.code == Code::InvalidParam && refused.text.contains("another engine"), "{refused}");
    }
    a.post(&xfer, None).expect("its own");
    done(&a, &xfer);
    assert_eq!(there.read(), here.read());
}

#[test]
fn a_wrong_address_of_memory_that_is_not_registered_fails_the_transfer() {
    for fabric in ["tcp two-sided", "tcp auto"] {
        for op in [Op::Write, Op::Read] {
            let (a, b) = pair(&[fabric]);
            let there = Buffer::new(&b, 8192, 2);
            let remote = import(&a, "b", &b, &there);
            let wrong = baton_driver::Desc { addr: 0x10000, len_bytes: 8192, region: 0, reserved: 0 };
            let xfer = a.create_xfer(op, "b", &[wrong], &[there.desc(0, 8192, remote)]).expect("create");
            a.post(&xfer, Some(b"never")).expect("post");
            let Status::Failed(why) = wait(&a, &xfer) else { panic!("there is no memory") };
            assert!(why.code == Code::Local && why.text.contains("not mapped"), "{why}");
            there.assert_guards();
            let here = Buffer::unregistered(8192, 7);
            let good = scattered(&a, Op::Write, "b", &here, &there, remote, 4096);
            let deadline = std::time::Instant::now() + WATCHDOG;
            while a.post(&good, Some(b"good")).is_err() || !matches!(wait(&a, &good), Status::Done) {
                assert!(std::time::Instant::now() < deadline, "{}", a.stats());
            }
            assert_eq!(there.read(), reversed(&here.read(), 4096));
            while notification(&b).message != b"good" {}
        }
    }
}
