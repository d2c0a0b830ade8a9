//! The local fabric between two processes, and what is left when one of them goes.

mod local_support;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use baton_fabric::*;
use local_support::*;
use serde_json::{Value, json};

/// The other process; does nothing when the tests run.
#[test]
fn second_process() {
    local_support::second_process();
}

#[test]
fn every_byte_crosses_and_no_other_is_touched() {
    const LEN: usize = 3_000_001;
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    fabric.reach(&peer.ask(json!({ "do": "address" })), soon()).expect("reach");
    let (endpoint, _) = peer.connect(fabric);
    let remote = peer.block(LEN, 0);
    let source = Block::new(fabric, LEN, 0);
    let back = Block::new(fabric, LEN, 0);
    source.fill_pattern(1);
    let work = |op: Op, local: &Block| -> Vec<Template> {
        pieces(LEN).iter().rev().map(|&(at, len)| template(op, local, at, remote, at, len)).collect()
    };
    assert_eq!(status_of(fabric, endpoint, &work(Op::Write, &source), 0), WcStatus::Success);
    let holds = peer.ask(json!({ "do": "holds", "index": remote.index, "seed": 1 }));
    assert_eq!(holds, json!({ "differs": null, "sentinels": true }));
    peer.ask(json!({ "do": "pattern", "index": remote.index, "seed": 2 }));
    assert_eq!(
        status_of(fabric, endpoint, &work(Op::Read, &back), pieces(LEN).len() as u64),
        WcStatus::Success
    );
    assert_eq!(back.differs(|i| pattern(2, i)), None);
    assert!(back.sentinels_stand() && source.sentinels_stand());
    assert_eq!(source.differs(|i| pattern(1, i)), None);
}

#[test]
fn a_hundred_thousand_small_writes_arrive_in_order_with_their_immediates() {
    const COUNT: u64 = 100_000;
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let (endpoint, _) = peer.connect(fabric);
    let remote = peer.block(64, 0);
    peer.ask(json!({ "do": "recvs", "count": DEPTH }));
    peer.tell(json!({ "do": "count_immediates", "count": COUNT }));
    let mut out = [Completion::EMPTY; 64];
    let (mut posted, mut done) = (0, 0);
    let give_up = soon();
    while done < COUNT {
        // The target's RECVs come back at their own pace, so this also waits for RECVs now and then.
        while posted < COUNT && posted - done < u64::from(DEPTH) / 2 {
            let bytes = [posted as u8; 64];
            let extra = Extra {
                op: ExtraOp::WriteImm(posted as u32),
                bytes: &bytes,
                staged: None,
                gather: &[],
                remote_addr: remote.addr,
                remote_key: remote.key,
                fenced: false,
            };
            let signaled = posted % 32 == 31 || posted == COUNT - 1;
            let batch = Batch {
                work: &[],
                imm: None,
                extra: Some(extra),
                first_seq: posted,
                signaled,
                patient: false,
            };
            fabric.post(endpoint, &batch).expect("post");
            posted += 1;
        }
        let n = fabric.poll(&mut out);
        for c in &out[..n] {
            assert_eq!(c.status, WcStatus::Success, "{c:?}");
            done = c.seq + 1;
        }
        assert!(Instant::now() < give_up, "{done} of {COUNT} are done");
    }
    assert_eq!(peer.answer(), json!("ok"));
    let holds = peer.ask(json!({ "do": "holds_only", "index": remote.index, "fill": (COUNT - 1) as u8 }));
    assert_eq!(holds, json!({ "differs": null, "sentinels": true }));
}

#[test]
fn what_the_owner_does_not_permit_is_refused_across_processes() {
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let source = Block::new(fabric, 4096, 7);
    let remote = peer.block(4096, 0);
    let spoils: [fn(&mut Template); 4] = [
        |t| t.remote_key ^= 1 << 5,
        |t| t.remote_key = 0,
        |t| t.remote_addr += 1,
        |t| t.remote_addr = u64::MAX - 10,
    ];
    for op in [Op::Write, Op::Read] {
        for spoil in spoils {
            let (endpoint, _) = peer.connect(fabric);
            let mut bad = template(op, &source, 0, remote, 0, 4096);
            spoil(&mut bad);
            assert_eq!(status_of(fabric, endpoint, &[bad], 0), WcStatus::RemoteAccess);
            end(fabric, endpoint);
            fabric.destroy_endpoint(endpoint);
        }
    }
    let holds = peer.ask(json!({ "do": "holds_only", "index": remote.index, "fill": 0 }));
    assert_eq!(holds, json!({ "differs": null, "sentinels": true }));
    assert_eq!(source.differs(|_| 7), None);
}

#[test]
fn a_killed_target_fails_the_writes_and_leaves_the_initiator_quiet() {
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let (endpoint, _) = peer.connect(fabric);
    const LEN: usize = 8 << 20;
    let remote = peer.block(LEN, 0);
    let source = Block::new(fabric, LEN, 3);
    let one = template(Op::Write, &source, 0, remote, 0, LEN);
    for seq in 0..64 {
        post(fabric, endpoint, &[one], seq);
    }
    poll_until(fabric, |all| !all.is_empty());
    peer.kill();
    let all = poll_until(fabric, |all| all.last().is_some_and(|c| c.seq == 63));
    let bad: Vec<WcStatus> = all.iter().map(|c| c.status).filter(|s| *s != WcStatus::Success).collect();
    assert_eq!(bad.first(), Some(&WcStatus::PeerGone), "{all:?}");
    assert!(bad[1..].iter().all(|s| *s == WcStatus::Flushed), "{all:?}");
    end(fabric, endpoint);
    fabric.deregister(source.keys, soon()).expect("deregister");
    assert_eq!(source.differs(|_| 3), None);
}

#[test]
fn a_fenced_initiator_is_quiet_although_its_peer_is_stopped() {
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let (endpoint, _) = peer.connect(fabric);
    let remote = peer.block(4096, 0);
    let source = Block::new(fabric, 4096, 1);
    peer.stop();
    post(fabric, endpoint, &[template(Op::Write, &source, 0, remote, 0, 4096)], 0);
    fabric.fence(endpoint);
    assert_eq!(poll_until(fabric, |all| !all.is_empty())[0].status, WcStatus::Flushed);
    wait("quiet", || fabric.is_quiet(endpoint));
    peer.go_on();
    let holds = peer.ask(json!({ "do": "holds_only", "index": remote.index, "fill": 0 }));
    assert_eq!(holds["differs"], Value::Null);
}

#[test]
fn another_process_with_the_same_pid_is_not_taken_for_the_peer() {
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let address = peer.ask(json!({ "do": "address" }));
    let reach = |key: &str, value: Value| {
        let mut changed = address.clone();
        changed[key] = value;
        fabric.reach(&changed, soon()).expect_err("a changed address")
    };
    let text = reach("start_time", json!(address["start_time"].as_u64().unwrap() + 1));
    assert!(text.contains("not the peer any more"), "{text}");
    let text = reach("instance", json!("00112233445566778899aabbccddeeff"));
    assert!(text.contains("another one since"), "{text}");
    let text = reach("boot_id", json!("another"));
    assert!(text.contains("another host"), "{text}");
    let text = reach("pid_namespace", json!("pid:[1]"));
    assert!(text.contains("pid namespace"), "{text}");
    for (key, value) in [("pid", json!(0)), ("pid", json!(-1)), ("table", json!(8)), ("door_fd", json!(0))] {
        reach(key, value);
    }
    peer.kill();
    let text = fabric.reach(&address, soon()).expect_err("a dead peer");
    assert!(text.contains("no process"), "{text}");
}

#[test]
fn a_wrong_stamp_fails_whatever_was_copied_under_it() {
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let remote = peer.block(4096, 0x44);
    let local = Block::new(fabric, 4096, 0);
    // This side believes the endpoint's stamp to be elsewhere, as if the process had been replaced.
    let mut theirs = peer.ask(json!({ "do": "endpoint" }));
    theirs["stamp"] = json!(remote.addr);
    let (endpoint, ours) = new_endpoint(fabric);
    fabric.connect_endpoint(endpoint, &theirs, soon()).expect("connect");
    peer.ask(json!({ "do": "connect", "address": ours }));
    let read = template(Op::Read, &local, 0, remote, 0, 4096);
    assert_eq!(status_of(fabric, endpoint, &[read], 0), WcStatus::PeerGone);
    // And so does the target, which finds the wrong token.
    let theirs = peer.ask(json!({ "do": "endpoint" }));
    let (endpoint, mut ours) = new_endpoint(fabric);
    ours["stamp"] = json!(local.addr);
    fabric.connect_endpoint(endpoint, &theirs, soon()).expect("connect");
    peer.ask(json!({ "do": "connect", "address": ours }));
    let write = template(Op::Write, &local, 0, remote, 0, 4096);
    assert_eq!(status_of(fabric, endpoint, &[write], 0), WcStatus::PeerGone);
    // A ring that is not the endpoint's is refused at once.
    let (endpoint, ours) = new_endpoint(fabric);
    let mut theirs = peer.ask(json!({ "do": "endpoint" }));
    theirs["token"] = json!(ours["token"]);
    assert!(fabric.connect_endpoint(endpoint, &theirs, soon()).is_err());
}

/// Sixteen pages to register, of which the fifth has other access rights.
fn pages(access: rustix::mm::MprotectFlags) -> Memory {
    let all = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
    // SAFETY: a new mapping; leaked.
    let base = unsafe {
        let base =
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), 65536, all, rustix::mm::MapFlags::PRIVATE)
                .expect("map");
        rustix::mm::mprotect(base.byte_add(16384), 4096, access).expect("protect");
        base
    };
    exposed(base as u64, 65536)
}

#[test]
fn memory_that_faults_is_blamed_on_its_owner_and_crashes_nobody() {
    use rustix::mm::MprotectFlags;
    let (one, two) = (Served::new(), Served::new());
    let (a, b): (&dyn Fabric, &dyn Fabric) = (&*one.fabric, &*two.fabric);
    let good = [Block::new(a, 65536, 1), Block::new(b, 65536, 2)];
    let hole = pages(MprotectFlags::empty());
    let fixed = pages(MprotectFlags::READ);
    let keys = [a.register(&hole).expect("register"), b.register(&fixed).expect("register")];
    let pair = || {
        let (x, x_address) = new_endpoint(a);
        let (y, y_address) = new_endpoint(b);
        a.connect_endpoint(x, &y_address, soon()).expect("connect");
        b.connect_endpoint(y, &x_address, soon()).expect("connect");
        x
    };
    let work = |op: Op, local: (u64, u64), remote: (u64, u64)| -> Vec<Template> {
        (0..16)
            .map(|i| Template {
                local_addr: local.0 + 4096 * i,
                remote_addr: remote.0 + 4096 * i,
                local_key: local.1,
                remote_key: remote.1,
                len_bytes: 4096,
                op,
                reserved: [0; 3],
            })
            .collect()
    };
    let (from, to) = ((good[0].addr, good[0].keys.local), (good[1].addr, good[1].keys.remote));
    let (bad_from, bad_to) = ((hole.addr, keys[0].local), (fixed.addr, keys[1].remote));
    for (op, local, remote, status) in [
        (Op::Write, bad_from, to, WcStatus::LocalAccess),
        (Op::Write, from, bad_to, WcStatus::RemoteAccess),
        (Op::Read, bad_from, to, WcStatus::LocalAccess),
    ] {
        let endpoint = pair();
        post(a, endpoint, &work(op, local, remote), 0);
        let all = poll_until(a, |all| all.last().is_some_and(|c| c.seq == 15));
        // The four pages before the bad one were copied, silently, since only the last was to be signaled.
        assert_eq!((all[0].seq, all[0].status), (4, status), "{op:?} {all:?}");
        assert!(all[1..].iter().all(|c| c.status == WcStatus::Flushed), "{all:?}");
    }
    // The same with a payload that travels with the work request.
    let endpoint = pair();
    let extra = Extra {
        op: ExtraOp::Write,
        bytes: &[9; 100],
        staged: None,
        gather: &[],
        remote_addr: fixed.addr + 16384,
        remote_key: keys[1].remote,
        fenced: false,
    };
    let batch =
        Batch { work: &[], imm: None, extra: Some(extra), first_seq: 0, signaled: true, patient: false };
    a.post(endpoint, &batch).expect("post");
    assert_eq!(poll_until(a, |all| !all.is_empty())[0].status, WcStatus::RemoteAccess);
    assert_eq!(good[1].differs(|i| if i < 16384 { 0 } else { 2 }), None);
}

#[test]
fn a_scribbling_peer_ends_its_own_connections_only() {
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let remote = peer.block(65536, 0);
    let source = Block::new(fabric, 65536, 1);
    let (good, _) = peer.connect(fabric);
    let mut random = 0x1234_5678_9abc_def1_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for round in 0..60u64 {
        let theirs = peer.ask(json!({ "do": "endpoint" }));
        let (endpoint, ours) = new_endpoint(fabric);
        let ring = map_ring(ours["ring_fd"].as_i64().expect("a descriptor") as i32);
        fabric.connect_endpoint(endpoint, &theirs, soon()).expect("connect");
        assert_eq!(peer.ask(json!({ "do": "connect", "address": ours })), json!("ok"));
        peer.ask(json!({ "do": "recvs", "count": 8 }));
        let work = [template(Op::Write, &source, 0, remote, 0, 1024); 16];
        for i in 0..4 {
            // Either the ring's words or, more to the point, its entries.
            let (from, to) = if round % 2 == 0 { (24, 48) } else { (512, 512 + 64 * 8) };
            for _ in 0..8 {
                ring[from + next() as usize % (to - from)].store(next() >> (next() % 64), Ordering::SeqCst);
            }
            let batch = Batch {
                work: &work,
                imm: None,
                extra: None,
                first_seq: 16 * i,
                signaled: true,
                patient: false,
            };
            if fabric.post(endpoint, &batch).is_err() {
                break;
            }
        }
        // The peer lives and its other connection works.
        let write = template(Op::Write, &source, 0, remote, 0, 65536);
        post(fabric, good, &[write], round);
        poll_until(fabric, |all| all.iter().any(|c| c.endpoint == good && c.status == WcStatus::Success));
        fabric.fence(endpoint);
        fabric.destroy_endpoint(endpoint);
    }
    let holds = peer.ask(json!({ "do": "holds_only", "index": remote.index, "fill": 1 }));
    assert_eq!(holds, json!({ "differs": null, "sentinels": true }));
}

#[test]
fn two_fabrics_of_one_process_and_a_peer_live_side_by_side() {
    let mut peer = Peer::start();
    let (one, two) = (Served::new(), Served::new());
    let remote = peer.block(4096, 0);
    let mut endpoints = Vec::new();
    for served in [&one, &two] {
        let fabric: &dyn Fabric = &*served.fabric;
        let (endpoint, _) = peer.connect(fabric);
        let source = Block::new(fabric, 4096, 5);
        let write = template(Op::Write, &source, 0, remote, 0, 4096);
        assert_eq!(status_of(fabric, endpoint, &[write], 0), WcStatus::Success);
        endpoints.push((Arc::clone(&served.fabric), endpoint, write));
    }
    drop(one);
    // The other one is not concerned; nor is the peer by the end of the first.
    drop(endpoints.remove(0));
    let (fabric, endpoint, write) = &endpoints[0];
    assert_eq!(status_of(&**fabric, *endpoint, &[*write], 1), WcStatus::Success);
    assert_eq!(peer.ask(json!({ "do": "deregister", "index": remote.index })), json!("ok"));
    assert_eq!(status_of(&**fabric, *endpoint, &[*write], 2), WcStatus::RemoteAccess);
}
