//! The end of a process, of a registration and of a connection in the middle of a copy, whichever way the bytes go: no late byte, no
//! end that is told as a success.

mod local_support;

use baton_fabric::*;
use local_support::*;
use serde_json::json;

/// The other process; does nothing when the tests run.
#[test]
fn second_process() {
    local_support::second_process();
}

fn a_killed_initiator_writes_nothing_after_its_end(kind: Kind) {
    const LEN: usize = 8 << 20;
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let (endpoint, _) = peer.connect(fabric);
    fabric.post_recv(endpoint, &[RecvSlot { id: 9, ..RecvSlot::default() }]).expect("a RECV");
    let (target, _file) = kind.here(fabric, LEN, 0);
    kind.there(&mut peer, LEN, 0x66);
    peer.tell(json!({ "do": "write_until_refused", "addr": target.addr, "key": target.keys.remote, "piece": 65536 }));
    assert_eq!(peer.answer(), json!("started"));
    wait("the first bytes", || target.byte(LEN / 2) == 0x66);
    peer.kill();
    // The RECV tells this side that the connection has ended.
    let flushed = poll_until(fabric, |all| !all.is_empty());
    assert_eq!((flushed[0].kind, flushed[0].seq), (CompletionKind::RecvFlushed, 9));
    end(fabric, endpoint);
    target.fill(0x11);
    fabric.deregister(target.keys, soon()).expect("deregister");
    assert_eq!(target.differs(|_| 0x11), None);
    assert!(target.sentinels_stand());
    kind.assert_way(fabric);
}

fn a_killed_source_fails_the_read_and_its_memory_stays_as_it_is(kind: Kind) {
    const LEN: usize = 32 << 20;
    const READS: u64 = 64;
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let (endpoint, _) = peer.connect(fabric);
    let remote = kind.there(&mut peer, LEN, 0x77);
    let (local, _file) = kind.here(fabric, LEN, 0);
    let one = template(Op::Read, &local, 0, remote, 0, LEN);
    for seq in 0..READS {
        post(fabric, endpoint, &[one], seq);
    }
    poll_until(fabric, |all| !all.is_empty());
    peer.kill();
    let all = poll_until(fabric, |all| all.last().is_some_and(|c| c.seq == READS - 1));
    let bad =
        all.iter().find(|c| c.status != WcStatus::Success).expect("nobody reads 2 GiB before it is killed");
    assert_eq!(bad.status, WcStatus::PeerGone);
    end(fabric, endpoint);
    assert_eq!(counter(fabric, "mappings"), u64::from(kind == Kind::Managed));
    // With the endpoint the mapping goes, and the memory of the dead with it.
    fabric.destroy_endpoint(endpoint);
    wait("the mapping to go", || counter(fabric, "mappings") == 0);
    local.fill(0x22);
    assert_eq!(local.differs(|_| 0x22), None);
    assert!(local.sentinels_stand());
    kind.assert_way(fabric);
}

fn after_deregister_under_load_memory_keeps_what_its_owner_puts_there(kind: Kind) {
    const LEN: usize = 4 << 20;
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    kind.there(&mut peer, LEN, 0x66);
    for round in 0..12usize {
        let (endpoint, _) = peer.connect(fabric);
        let (target, _file) = kind.here(fabric, LEN, 0);
        let piece = [4096, 65536, LEN][round % 3].max(LEN / DEPTH as usize);
        peer.tell(json!({ "do": "write_until_refused", "addr": target.addr, "key": target.keys.remote, "piece": piece }));
        assert_eq!(peer.answer(), json!("started"));
        let probe = (round * LEN / 12).min(LEN - 1);
        wait("the first bytes", || target.byte(probe) == 0x66);
        fabric.deregister(target.keys, soon()).expect("deregister");
        target.fill(0x11);
        assert_eq!(peer.answer(), json!("RemoteAccess"));
        assert_eq!(target.differs(|_| 0x11), None, "round {round}");
        assert!(target.sentinels_stand());
        end(fabric, endpoint);
        fabric.destroy_endpoint(endpoint);
    }
}

fn a_write_from_a_withdrawn_region_is_never_reported_as_done(kind: Kind) {
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let (endpoint, _) = peer.connect(fabric);
    let remote = kind.there(&mut peer, 4096, 0);
    let (kept, _kept) = kind.here(fabric, 4096, 1);
    let (withdrawn, _withdrawn) = kind.here(fabric, 4096, 2);
    // Managed ones are mapped there before.
    for (seq, block) in [&kept, &withdrawn].into_iter().enumerate() {
        let write = template(Op::Write, block, 0, remote, 0, 4096);
        assert_eq!(status_of(fabric, endpoint, &[write], seq as u64), WcStatus::Success);
    }
    peer.stop();
    // Gathered into one call: the first is good, the second loses its source before the target looks.
    let good = template(Op::Write, &kept, 0, remote, 0, 2048);
    let bad = template(Op::Write, &withdrawn, 0, remote, 2048, 1024);
    for (seq, work) in (2..).zip([good, bad, good]) {
        post(fabric, endpoint, &[work], seq);
    }
    fabric.deregister(withdrawn.keys, soon()).expect("deregister");
    peer.go_on();
    let all = poll_until(fabric, |all| all.len() == 3);
    let statuses: Vec<WcStatus> = all.iter().map(|c| c.status).collect();
    assert_eq!(statuses, [WcStatus::Success, WcStatus::LocalAccess, WcStatus::Flushed]);
}

macro_rules! of_both_kinds {
    ($($behaviour:ident),* $(,)?) => {
        mod plain { $(#[test] fn $behaviour() { super::$behaviour(super::Kind::Plain) })* }
        mod managed { $(#[test] fn $behaviour() { super::$behaviour(super::Kind::Managed) })* }
    };
}

of_both_kinds! {
    a_killed_initiator_writes_nothing_after_its_end,
    a_killed_source_fails_the_read_and_its_memory_stays_as_it_is,
    after_deregister_under_load_memory_keeps_what_its_owner_puts_there,
    a_write_from_a_withdrawn_region_is_never_reported_as_done,
}
