//! Transfers by index from lists of blocks, and what posting does once something that a request or a list holds is gone.

mod common;

use baton_driver::{Code, Desc, Driver, Error, Status};
use baton_fabric::Op;
use common::*;

const BLOCK: usize = 1024;
const BLOCKS: usize = 64;

/// Blocks of a buffer, the last first.
fn blocks(buffer: &Buffer, region: u64) -> Vec<Desc> {
    (0..buffer.len() / BLOCK).rev().map(|n| buffer.desc(n * BLOCK, BLOCK, region)).collect()
}

/// Two engines, memory on both sides, the region as `a` imported it, and a list of each side in `a`.
struct Lists {
    a: Driver,
    b: Driver,
    local: Buffer,
    remote: Buffer,
    imported: u64,
    local_list: u64,
    remote_list: u64,
}

fn lists(fabric: &str) -> Lists {
    let (a, b) = pair(&[fabric]);
    let (local, remote) = (Buffer::new(&a, BLOCKS * BLOCK, 1), Buffer::new(&b, BLOCKS * BLOCK, 2));
    let imported = import(&a, "b", &b, &remote);
    let local_list = a.create_block_list(None, &blocks(&local, local.region)).expect("local list");
    let remote_list = a.create_block_list(Some("b"), &blocks(&remote, imported)).expect("remote list");
    Lists { a, b, local, remote, imported, local_list, remote_list }
}

fn refused(engine: &Driver, peer: &str, local: (u64, &[u32]), remote: (u64, &[u32]), code: Code) -> String {
    let error = engine.create_xfer_from_indices(Op::Write, peer, local, remote).err().expect("refused");
    assert_eq!(error.code, code, "{error}");
    error.text
}

fn moves_what_the_indices_name(fabric: &str, op: Op) {
    let Lists { a, b, local, remote, local_list, remote_list, .. } = lists(fabric);
    let before = [local.read(), remote.read()];
    // Every third block there, in an order of its own; every block but those stays as it is.
    let there: Vec<u32> =
        (0..BLOCKS as u32).filter(|n| n % 3 == 0).map(|n| (n * 5) % BLOCKS as u32).collect();
    let here: Vec<u32> = (0..there.len() as u32).rev().collect();
    let xfer =
        a.create_xfer_from_indices(op, "b", (local_list, &here), (remote_list, &there)).expect("create");
    for round in 0..3u8 {
        a.post(&xfer, Some(&[round])).expect("post");
        done(&a, &xfer);
        assert_eq!(notification(&b).message, [round]);
    }
    let [mut expected_local, mut expected_remote] = before.clone();
    let at = |index: u32| {
        let first = (BLOCKS - 1 - index as usize) * BLOCK;
        first..first + BLOCK
    };
    for (here, there) in here.iter().zip(&there) {
        match op {
            Op::Write => expected_remote[at(*there)].copy_from_slice(&before[0][at(*here)]),
            Op::Read => expected_local[at(*here)].copy_from_slice(&before[1][at(*there)]),
        }
    }
    assert_eq!(local.read(), expected_local);
    assert_eq!(remote.read(), expected_remote);
    local.assert_guards();
    remote.assert_guards();
}

#[test]
fn indices_move_exactly_the_blocks_they_name() {
    for fabric in ["local", "tcp", "verbs", "verbs rails"] {
        moves_what_the_indices_name(fabric, Op::Write);
        moves_what_the_indices_name(fabric, Op::Read);
    }
}

#[test]
fn bad_blocks_and_indices_are_refused_by_name_with_value_and_limit() {
    let Lists { a, b, local, remote, imported, local_list, remote_list } = lists("tcp");
    let text = refused(&a, "b", (local_list, &[0, 64]), (remote_list, &[0, 1]), Code::InvalidParam);
    assert_eq!(text, "index 1: the local block list has no block 64, its 64 blocks are numbered from 0");
    let text = refused(&a, "b", (local_list, &[0]), (remote_list, &[0, 1]), Code::InvalidParam);
    assert!(text.contains("1 local and 2 remote indices"), "{text}");
    let halves: Vec<_> = (0..4).map(|n| remote.desc(n * 512, 512, imported)).collect();
    let half_list = a.create_block_list(Some("b"), &halves).expect("list");
    let text = refused(&a, "b", (local_list, &[7]), (half_list, &[3]), Code::InvalidParam);
    assert_eq!(text, "index 0: local block 7 has 1024 bytes and remote block 3 512; both must be equal");
    let text = refused(&a, "b", (remote_list, &[0]), (remote_list, &[0]), Code::InvalidParam);
    assert!(text.contains(&format!("{remote_list:#x}")) && text.contains("local side"), "{text}");
    let text = refused(&a, "b", (local_list, &[0]), (local_list, &[0]), Code::InvalidParam);
    assert!(text.contains(&format!("{local_list:#x}")) && text.contains("remote side"), "{text}");
    let text = refused(&a, "a", (local_list, &[0]), (remote_list, &[0]), Code::InvalidParam);
    assert!(text.contains("belongs to agent \"b\", not to \"a\""), "{text}");
    // Another engine's handle names nothing here.
    let of_b = b.create_block_list(None, &blocks(&remote, remote.region)).expect("list of b");
    let text = refused(&a, "b", (of_b, &[0]), (remote_list, &[0]), Code::NotFound);
    assert!(text.contains(&format!("{of_b:#x}")), "{text}");
    a.release_block_list(half_list).expect("release");
    assert_eq!(a.release_block_list(half_list).expect_err("gone").code, Code::NotFound);
    refused(&a, "b", (local_list, &[0]), (half_list, &[0]), Code::NotFound);

    let make = |owner: Option<&str>, block: Desc| -> Error {
        a.create_block_list(owner, &[local.desc(0, 1, local.region), block]).expect_err("refused")
    };
    let outside = make(None, local.desc(BLOCKS * BLOCK - 10, 11, local.region));
    assert_eq!(outside.code, Code::InvalidParam);
    assert!(outside.text.starts_with("block 1: span"), "{outside}");
    let unknown = make(None, local.desc(0, 1, 77));
    assert!(unknown.code == Code::NotFound && unknown.text.starts_with("block 1: "), "{unknown}");
    let reserved = make(None, Desc { reserved: 1, ..local.desc(0, 1, local.region) });
    assert!(reserved.text.contains("reserved"), "{reserved}");
    let overflow = make(None, Desc { addr: u64::MAX, ..local.desc(0, 2, local.region) });
    assert!(overflow.text.contains("overflows"), "{overflow}");
    assert_eq!(make(Some("nobody"), local.desc(0, 1, local.region)).code, Code::NotFound);
    assert!(a.take_notifications(usize::MAX).expect("take").is_empty());
}

#[test]
fn a_list_with_a_withdrawn_region_serves_what_does_not_use_it() {
    for fabric in ["local", "tcp", "verbs"] {
        let (a, b) = pair(&[fabric]);
        let here = [Buffer::new(&a, BLOCK, 1), Buffer::new(&a, BLOCK, 2)];
        let there = [Buffer::new(&b, BLOCK, 3), Buffer::new(&b, BLOCK, 4)];
        let imported = [0, 1].map(|n: usize| import(&a, "b", &b, &there[n]));
        let locals = [0, 1].map(|n: usize| here[n].desc(0, BLOCK, here[n].region));
        let remotes = [0, 1].map(|n: usize| there[n].desc(0, BLOCK, imported[n]));
        let local_list = a.create_block_list(None, &locals).expect("list");
        let remote_list = a.create_block_list(Some("b"), &remotes).expect("list");
        let make = |l: u32, r: u32| {
            a.create_xfer_from_indices(Op::Write, "b", (local_list, &[l]), (remote_list, &[r]))
        };
        let made = [make(0, 0), make(1, 0), make(0, 1)].map(|xfer| xfer.expect("create"));
        for xfer in &made {
            a.post(xfer, None).expect("post");
            done(&a, xfer);
        }
        let kept = there[1].read();
        a.deregister(here[1].region).expect("deregister");
        b.deregister(there[1].region).expect("deregister");
        for gone in &made[1..] {
            assert_eq!(a.post(gone, None).expect_err("withdrawn").code, Code::NotFound);
            assert!(matches!(wait(&a, gone), Status::Failed(e) if e.code == Code::NotFound));
        }
        for (l, r, list) in [(1, 0, local_list), (0, 1, remote_list)] {
            let error = make(l, r).err().expect("withdrawn");
            assert_eq!(error.code, Code::NotFound, "{error}");
            assert!(error.text.contains(&format!("{list:#x}")), "{error}");
        }
        let fresh = make(0, 0).expect("its regions are there");
        for xfer in [&made[0], &fresh] {
            a.post(xfer, Some(b"still")).expect("post");
            done(&a, xfer);
            assert_eq!(notification(&b).message, b"still");
        }
        assert_eq!(there[0].read(), here[0].read());
        assert_eq!(there[1].read(), kept, "written after deregister");
        let stats: serde_json::Value = serde_json::from_str(&a.stats()).expect("json");
        assert_eq!(stats["counters"]["epochs_ended"], 0, "a dead key was on the wire: {stats}");
    }
}

#[test]
fn a_request_whose_remote_region_was_forgotten_here_still_hears_that_it_is_withdrawn() {
    for fabric in ["local", "tcp", "verbs"] {
        let Lists { a, b, local, remote, imported, local_list, remote_list } = lists(fabric);
        let by_index = a
            .create_xfer_from_indices(Op::Write, "b", (local_list, &[0]), (remote_list, &[0]))
            .expect("create");
        let plain = scattered(&a, Op::Write, "b", &local, &remote, imported, BLOCK);
        a.release_remote(imported).expect("release");
        for xfer in [&by_index, &plain] {
            a.post(xfer, None).expect("a request keeps what it needs");
            done(&a, xfer);
        }
        b.deregister(remote.region).expect("deregister");
        for xfer in [&by_index, &plain] {
            assert_eq!(a.post(xfer, None).expect_err("withdrawn").code, Code::NotFound);
        }
        let stats: serde_json::Value = serde_json::from_str(&a.stats()).expect("json");
        assert_eq!(stats["counters"]["epochs_ended"], 0, "a dead key was on the wire: {stats}");
    }
}

#[test]
fn a_list_of_an_earlier_instance_of_the_peer_is_stale() {
    let Lists { a, b, local, remote, local_list, remote_list, .. } = lists("tcp");
    let old =
        a.create_xfer_from_indices(Op::Write, "b", (local_list, &[0]), (remote_list, &[0])).expect("create");
    a.disconnect("b").expect("disconnect");
    refused(&a, "b", (local_list, &[0]), (remote_list, &[0]), Code::NotFound);
    assert_eq!(a.post(&old, None).expect_err("disconnected").code, Code::NotFound);
    // The same instance again: its list is as good as before.
    a.load_remote(Some("b"), b.conn_info()).expect("load");
    let again =
        a.create_xfer_from_indices(Op::Write, "b", (local_list, &[0]), (remote_list, &[0])).expect("create");
    a.post(&again, None).expect("post");
    done(&a, &again);
    drop((b, remote));
    let b = engine("b", &["tcp"]);
    a.load_remote(Some("b"), b.conn_info()).expect("load");
    let text = refused(&a, "b", (local_list, &[0]), (remote_list, &[0]), Code::Stale);
    assert!(text.contains(&format!("{remote_list:#x}")) && text.contains("import"), "{text}");
    let remote = Buffer::new(&b, BLOCKS * BLOCK, 3);
    let imported = import(&a, "b", &b, &remote);
    let list = a.create_block_list(Some("b"), &blocks(&remote, imported)).expect("list");
    let fresh = a.create_xfer_from_indices(Op::Read, "b", (local_list, &[5]), (list, &[9])).expect("create");
    a.post(&fresh, Some(b"read")).expect("post");
    done(&a, &fresh);
    assert_eq!(notification(&b).message, b"read");
    let at = |index: usize| (BLOCKS - 1 - index) * BLOCK..(BLOCKS - index) * BLOCK;
    assert_eq!(local.read()[at(5)], remote.read()[at(9)]);
}

#[test]
fn permission_is_checked_when_the_direction_is_known() {
    let (a, b) = pair(&["tcp"]);
    let (local, remote) = (Buffer::new(&a, BLOCK, 1), Buffer::new(&b, BLOCK, 2));
    let memory = baton_fabric::Memory {
        addr: remote.addr(),
        len_bytes: BLOCK as u64,
        kind: baton_fabric::MemoryKind::Dram,
        device: 0,
        remote_read: true,
        remote_write: false,
        ordered: false,
        mapped: false,
    };
    let read_only = b.register(&memory).expect("register");
    let imported = a.import("b", &b.export(read_only).expect("export")).expect("import");
    let local_list = a.create_block_list(None, &blocks(&local, local.region)).expect("list");
    let list = a.create_block_list(Some("b"), &blocks(&remote, imported)).expect("list");
    let text = refused(&a, "b", (local_list, &[0]), (list, &[0]), Code::InvalidParam);
    assert!(text.contains("does not permit Write"), "{text}");
    let read = a.create_xfer_from_indices(Op::Read, "b", (local_list, &[0]), (list, &[0])).expect("create");
    a.post(&read, None).expect("post");
    done(&a, &read);
    assert_eq!(local.read(), remote.read());
}

#[test]
fn lists_of_the_engine_itself_make_transfers_within_it() {
    let a = engine("a", &["tcp"]);
    let (from, to) = (Buffer::new(&a, 2 * BLOCK, 1), Buffer::new(&a, 2 * BLOCK, 2));
    let imported = import(&a, "a", &a, &to);
    let local = a.create_block_list(None, &blocks(&from, from.region)).expect("list");
    let remote = a.create_block_list(Some("a"), &blocks(&to, imported)).expect("list");
    let xfer =
        a.create_xfer_from_indices(Op::Write, "a", (local, &[0, 1]), (remote, &[1, 0])).expect("create");
    a.post(&xfer, Some(b"me")).expect("post");
    done(&a, &xfer);
    assert_eq!(notification(&a).message, b"me");
    assert_eq!(to.read(), reversed(&from.read(), BLOCK));
    a.deregister(to.region).expect("deregister");
    assert_eq!(a.post(&xfer, None).expect_err("withdrawn").code, Code::NotFound);
}
