//! Managed memory between two processes: copied through a mapping that both share, and never counted when it is not the peer's any more.

mod local_support;

use baton_fabric::*;
use local_support::*;
use serde_json::json;

/// The other process; does nothing when the tests run.
#[test]
fn second_process() {
    local_support::second_process();
}

#[test]
fn every_byte_crosses_without_the_kernel_and_no_other_is_touched() {
    const LEN: usize = 3_000_001;
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let (endpoint, _) = peer.connect(fabric);
    let remote = peer.shared_block(LEN, 0);
    let (source, _source) = Block::shared(fabric, LEN, 0);
    let (back, _back) = Block::shared(fabric, LEN, 0);
    let work = |op: Op, local: &Block| -> Vec<Template> {
        pieces(LEN).iter().rev().map(|&(at, len)| template(op, local, at, remote, at, len)).collect()
    };
    let count = pieces(LEN).len() as u64;
    for round in 0..3u64 {
        source.fill_pattern(round);
        assert_eq!(
            status_of(fabric, endpoint, &work(Op::Write, &source), 2 * count * round),
            WcStatus::Success
        );
        let holds = peer.ask(json!({ "do": "holds", "index": remote.index, "seed": round }));
        assert_eq!(holds, json!({ "differs": null, "sentinels": true }));
        peer.ask(json!({ "do": "pattern", "index": remote.index, "seed": 100 + round }));
        let first = 2 * count * round + count;
        assert_eq!(status_of(fabric, endpoint, &work(Op::Read, &back), first), WcStatus::Success);
        assert_eq!(back.differs(|i| pattern(100 + round, i)), None);
        assert!(back.sentinels_stand() && source.sentinels_stand());
        assert_eq!(source.differs(|i| pattern(round, i)), None);
    }
    // Not one of them went through the kernel, and each region was mapped once.
    assert_eq!((counter(fabric, "shared_bytes"), counter(fabric, "mappings_made")), (3 * LEN as u64, 1));
    assert_eq!((peer.counter("shared_bytes"), peer.counter("mappings_made")), (3 * LEN as u64, 1));
    assert_eq!(counter(fabric, "shared_fallbacks") + peer.counter("shared_fallbacks"), 0);
}

#[test]
fn managed_and_other_memory_mix_in_any_combination() {
    const LEN: usize = 200_000;
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let (endpoint, _) = peer.connect(fabric);
    let (shared, _file) = Block::shared(fabric, LEN, 0);
    let locals = [shared, Block::new(fabric, LEN, 0)];
    let remotes = [peer.shared_block(LEN, 0), peer.block(LEN, 0)];
    let mut seq = 0;
    for (i, local) in locals.iter().enumerate() {
        for (j, remote) in remotes.iter().enumerate() {
            let seed = (10 * i + j) as u64;
            local.fill_pattern(seed);
            let write = template(Op::Write, local, 0, *remote, 0, LEN);
            assert_eq!(status_of(fabric, endpoint, &[write], seq), WcStatus::Success);
            let holds = peer.ask(json!({ "do": "holds", "index": remote.index, "seed": seed }));
            assert_eq!(holds, json!({ "differs": null, "sentinels": true }), "{i} to {j}");
            peer.ask(json!({ "do": "pattern", "index": remote.index, "seed": 100 + seed }));
            let read = template(Op::Read, local, 0, *remote, 0, LEN);
            assert_eq!(status_of(fabric, endpoint, &[read], seq + 1), WcStatus::Success);
            assert_eq!(local.differs(|at| pattern(100 + seed, at)), None, "{j} to {i}");
            assert!(local.sentinels_stand());
            seq += 2;
        }
    }
    // One batch of all four combinations, a quarter each.
    let quarter = LEN / 4;
    let work: Vec<_> = (0..4)
        .map(|i| template(Op::Write, &locals[i % 2], i * quarter, remotes[i / 2], i * quarter, quarter))
        .collect();
    locals.iter().for_each(|local| local.fill_pattern(7));
    peer.ask(json!({ "do": "pattern", "index": remotes[0].index, "seed": 7 }));
    peer.ask(json!({ "do": "pattern", "index": remotes[1].index, "seed": 7 }));
    assert_eq!(status_of(fabric, endpoint, &work, seq), WcStatus::Success);
    for remote in remotes {
        let holds = peer.ask(json!({ "do": "holds", "index": remote.index, "seed": 7 }));
        assert_eq!(holds, json!({ "differs": null, "sentinels": true }));
    }
    assert_eq!(counter(fabric, "shared_bytes"), LEN as u64);
    assert_eq!(peer.counter("shared_bytes"), (LEN + quarter) as u64);
}

#[test]
fn what_was_freed_is_never_read_as_done_and_another_buffer_in_its_place_is_read_as_itself() {
    const LEN: usize = 1 << 20;
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let (local, _file) = Block::shared(fabric, LEN, 0);
    for round in 0..8u8 {
        let (endpoint, _) = peer.connect(fabric);
        let old = peer.shared_block(LEN, round);
        let read = |of: Remote| template(Op::Read, &local, 0, of, 0, LEN);
        assert_eq!(status_of(fabric, endpoint, &[read(old)], 0), WcStatus::Success);
        assert_eq!(local.differs(|_| round), None);
        // Its descriptor is free again, and the next file takes the number.
        assert_eq!(peer.ask(json!({ "do": "free_shared", "index": old.index })), json!(true));
        wait("the mapping to go", || {
            fabric.serve(0);
            counter(fabric, "mappings") == 0
        });
        let new = peer.shared_block(LEN, 0x80 + round);
        assert_eq!(status_of(fabric, endpoint, &[read(new)], 1), WcStatus::Success);
        assert_eq!(local.differs(|_| 0x80 + round), None, "bytes of another buffer");
        assert_eq!(status_of(fabric, endpoint, &[read(old)], 2), WcStatus::RemoteAccess);
        end(fabric, endpoint);
        fabric.destroy_endpoint(endpoint);
    }
    assert!(local.sentinels_stand());
    assert_eq!(counter(fabric, "mappings"), 0);
}

#[test]
fn a_read_that_races_with_the_free_is_either_whole_and_old_or_refused() {
    const LEN: usize = 1 << 20;
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let (local, _file) = Block::shared(fabric, LEN, 0);
    for round in 0..20u64 {
        let (endpoint, _) = peer.connect(fabric);
        let remote = peer.shared_block(LEN, 0x33);
        let read = [template(Op::Read, &local, 0, remote, 0, LEN)];
        let mut seq = 0;
        let mut freed = false;
        let status = loop {
            local.fill(0);
            fabric
                .post(
                    endpoint,
                    &Batch {
                        work: &read,
                        imm: None,
                        extra: None,
                        first_seq: seq,
                        signaled: true,
                        patient: false,
                    },
                )
                .expect("post");
            if seq == round % 4 {
                // Its owner frees it and puts something else there while it is read.
                peer.tell(json!({ "do": "free_shared", "index": remote.index }));
                peer.tell(json!({ "do": "fill", "index": remote.index, "fill": 0x99 }));
                freed = true;
            }
            seq += 1;
            let status = poll_until(fabric, |all| !all.is_empty())[0].status;
            if status != WcStatus::Success {
                break status;
            }
            assert_eq!(
                local.differs(|_| 0x33),
                None,
                "round {round}: done with bytes that came after the free"
            );
        };
        assert!(freed);
        assert_eq!(
            (status, peer.answer(), peer.answer()),
            (WcStatus::RemoteAccess, json!(true), json!("ok"))
        );
        end(fabric, endpoint);
        fabric.destroy_endpoint(endpoint);
    }
    assert!(local.sentinels_stand());
}

#[test]
fn more_buffers_than_are_mapped_at_once_are_copied_by_the_kernel() {
    const MAPPED: u64 = 256;
    const COUNT: u64 = MAPPED + 20;
    let mut peer = Peer::start();
    let served = Served::new();
    let fabric: &dyn Fabric = &*served.fabric;
    let (endpoint, _) = peer.connect(fabric);
    let (local, _file) = Block::shared(fabric, 4096, 0);
    let mut remotes = Vec::new();
    for i in 0..COUNT {
        let remote = peer.shared_block(4096, i as u8);
        let read = template(Op::Read, &local, 0, remote, 0, 4096);
        assert_eq!(status_of(fabric, endpoint, &[read], i), WcStatus::Success);
        assert_eq!(local.differs(|_| i as u8), None, "buffer {i}");
        remotes.push(remote);
    }
    assert_eq!((counter(fabric, "mappings"), counter(fabric, "shared_fallbacks")), (MAPPED, COUNT - MAPPED));
    // One that is freed makes room for another.
    peer.ask(json!({ "do": "free_shared", "index": remotes[0].index }));
    wait("room", || {
        fabric.serve(0);
        counter(fabric, "mappings") == MAPPED - 1
    });
    let last = template(Op::Read, &local, 0, *remotes.last().expect("some"), 0, 4096);
    assert_eq!(status_of(fabric, endpoint, &[last], COUNT), WcStatus::Success);
    assert_eq!(local.differs(|_| (COUNT - 1) as u8), None);
    assert_eq!((counter(fabric, "mappings"), counter(fabric, "shared_fallbacks")), (MAPPED, COUNT - MAPPED));
    assert!(local.sentinels_stand());
}

#[test]
fn a_file_that_could_lose_its_pages_is_not_mapped_and_its_bytes_come_all_the_same() {
    let (one, two) = (Served::new(), Served::new());
    let (a, b): (&dyn Fabric, &dyn Fabric) = (&*one.fabric, &*two.fabric);
    let (source, _source) = Block::shared(a, 65536, 0);
    // A registration of the same memory under a file that is none, or is not sealed, or is too short.
    let unsealed = rustix::fs::memfd_create("baton-test", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
    let null = std::fs::File::open("/dev/null").expect("null");
    let (short, short_file) = Block::shared(a, 4096, 0);
    assert_eq!(short.len, 4096);
    let (target, _target) = Block::shared(b, 65536, 0);
    let (x, x_address) = new_endpoint(a);
    let (y, y_address) = new_endpoint(b);
    a.connect_endpoint(x, &y_address, soon()).expect("connect");
    b.connect_endpoint(y, &x_address, soon()).expect("connect");
    let memory = Memory {
        addr: source.addr,
        len_bytes: 65536,
        kind: MemoryKind::Dram,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    };
    use std::os::fd::AsFd;
    let files = [unsealed.as_fd(), null.as_fd(), short_file.as_fd()];
    for (i, file) in files.into_iter().enumerate() {
        let keys = a.register_shared(&memory, file).expect("register");
        source.fill_pattern(i as u64);
        let write = Template {
            local_addr: source.addr,
            remote_addr: target.addr,
            local_key: keys.local,
            remote_key: target.keys.remote,
            len_bytes: 65536,
            op: Op::Write,
            reserved: [0; 3],
        };
        assert_eq!(status_of(a, x, &[write], i as u64), WcStatus::Success);
        assert_eq!(target.differs(|at| pattern(i as u64, at)), None);
        assert_eq!(counter(b, "mappings_refused"), i as u64 + 1);
    }
    assert_eq!((counter(b, "shared_bytes"), counter(b, "mappings")), (0, 0));
    assert!(target.sentinels_stand());
}
