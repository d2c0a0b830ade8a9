//! What devices do on bad days, and what the fabric makes of it.

mod fake_support;

use baton_fabric::{
    Batch, Completion, CompletionKind, EndpointConfig, Extra, ExtraOp, Fabric, FabricError, Keys, Memory,
    MemoryKind, Op, PeerView, Template, WcStatus,
};
use baton_fabric_verbs::{VerbsConfig, VerbsFabric};
use baton_verbs::SOFT_ROCE_VENDOR;
use baton_verbs::fake::{DeviceConfig, Fake, FakeConfig, FakeGid, Live, PortConfig};
use fake_support::*;
use std::time::Instant;

fn memory(bytes: &[u8]) -> Memory {
    Memory {
        addr: bytes.as_ptr() as u64,
        len_bytes: bytes.len() as u64,
        kind: MemoryKind::Dram,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    }
}

/// A buffer registered with a fabric.
struct Block {
    bytes: Box<[u8]>,
    keys: Keys,
}

impl Block {
    fn new(fabric: &VerbsFabric, len: usize, byte: u8) -> Block {
        let bytes = vec![byte; len].into_boxed_slice();
        let keys = fabric.register(&memory(&bytes)).expect("register");
        Block { bytes, keys }
    }

    fn write_to(&self, target: &Block, offset: usize, len: usize) -> Template {
        Template {
            local_addr: self.bytes.as_ptr() as u64 + offset as u64,
            remote_addr: target.bytes.as_ptr() as u64 + offset as u64,
            local_key: self.keys.local,
            remote_key: target.keys.remote,
            len_bytes: len as u32,
            op: Op::Write,
            reserved: [0; 3],
        }
    }

    /// Every byte, read anew: a device wrote them behind the compiler's back.
    fn now(&self) -> Vec<u8> {
        // SAFETY: own memory; volatile because the model's thread writes it.
        self.bytes.iter().map(|byte| unsafe { std::ptr::from_ref(byte).read_volatile() }).collect()
    }
}

fn batch(work: &[Template], first_seq: u64) -> Batch<'_> {
    Batch { work, imm: None, extra: None, first_seq, signaled: true, patient: false }
}

fn told(result: Result<impl Sized, FabricError>) -> String {
    result.err().expect("an error").to_string()
}

fn open(fake: &Fake, settings: &[(&str, &str)]) -> Result<std::sync::Arc<VerbsFabric>, FabricError> {
    VerbsFabric::with_library(&fake.library_of(&["fake0"]), config(settings))
}

#[test]
fn completions_find_their_endpoint_although_two_devices_count_alike() {
    let fake = Fake::new(FakeConfig {
        devices: vec![
            DeviceConfig::new("fake0", 1),
            DeviceConfig::new("fake1", 2),
            DeviceConfig::new("fake2", 3),
            DeviceConfig::new("fake3", 4),
        ],
        ..FakeConfig::default()
    });
    let a = fabric(&fake, &["fake0", "fake1"], &[]);
    let b = fabric(&fake, &["fake2", "fake3"], &[]);
    let [ours, theirs] = connect(&a, &b, 5);
    let rails: Vec<u8> = ours.iter().map(|endpoint| a.rail(*endpoint)).collect();
    assert_eq!(
        rails.iter().filter(|rail| **rail == 0).count() + rails.iter().filter(|rail| **rail == 1).count(),
        5
    );
    assert!(rails[1..].contains(&0) && rails[1..].contains(&1), "lanes use both rails: {rails:?}");
    let numbers: Vec<_> =
        a.stats()["rails"].as_array().expect("rails").iter().map(|rail| rail["device"].clone()).collect();
    assert_eq!(numbers, ["fake0", "fake1"]);
    let (source, target) = (Block::new(&a, 5 * 4096, 0x17), Block::new(&b, 5 * 4096, 0));
    let (own, peer) = (a.region_keys(source.keys), b.region_keys(target.keys));
    assert_eq!((own.rails, peer.rails, own.local.len(), peer.remote.len()), (2, 2, 2, 2));
    for (i, endpoint) in ours.iter().enumerate() {
        let mut work = source.write_to(&target, i * 4096, 4096);
        work.local_key = own.local[usize::from(a.rail(*endpoint))];
        work.remote_key = peer.remote[usize::from(b.rail(theirs[i]))];
        a.post(*endpoint, &batch(&[work], 0)).expect("post");
    }
    let mut done = completions(&a, 5);
    done.sort_by_key(|completion| completion.endpoint);
    let mut expected = ours.clone();
    expected.sort();
    assert_eq!(done.iter().map(|completion| completion.endpoint).collect::<Vec<_>>(), expected);
    assert!(done.iter().all(|completion| completion.status == WcStatus::Success), "{done:?}");
    assert_eq!(target.now(), vec![0x17; 5 * 4096]);
    end(&a, &ours);
    end(&b, &theirs);
}

#[test]
fn a_chain_that_stops_in_the_middle_tells_exactly_what_was_taken() {
    let fake = Fake::new(FakeConfig::default());
    let [a, b] = hosts(&fake);
    let [ours, theirs] = connect(&a, &b, 1);
    let (source, target) = (Block::new(&a, 8 * 64, 1), Block::new(&b, 8 * 64, 0));
    let work: Vec<Template> = (0..8).map(|i| source.write_to(&target, i * 64, 64)).collect();
    fake.device("fake0").fail_post_after(5, 12);
    let failed = a.post(ours[0], &batch(&work, 0)).expect_err("the sixth is refused");
    assert_eq!(failed.taken, 5);
    assert!(failed.to_string().contains("fake0"), "{failed}");
    // What was taken is executed; nothing behind it is.
    end(&a, &ours);
    end(&b, &theirs);
    let now = target.now();
    assert_eq!(now[5 * 64..], [0; 3 * 64]);
    assert!(now[..5 * 64].iter().all(|byte| matches!(byte, 0 | 1)));
    // The next connection works.
    let [ours, theirs] = connect(&a, &b, 1);
    a.post(ours[0], &batch(&work, 0)).expect("post");
    assert_eq!(completions(&a, 1)[0].seq, 7);
    assert_eq!(target.now(), vec![1; 8 * 64]);
    let told = |name: &str| a.stats()[name].as_u64().expect("a counter");
    assert_eq!((told("sends_posted"), told("doorbells")), (5 + 8, 2), "of queue pairs that are gone too");
    end(&a, &ours);
    end(&b, &theirs);
    assert_eq!((told("sends_posted"), told("receives_posted"), told("doorbells")), (5 + 8, 0, 2));
}

#[test]
fn what_a_doorbell_took_is_told_when_the_end_of_the_batch_cannot_be_posted() {
    let fake = Fake::new(FakeConfig::default());
    let [a, b] = hosts(&fake);
    let [ours, theirs] = connect_deep(&a, &b, 1, 512);
    let (source, target) = (Block::new(&a, 400, 1), Block::new(&b, 400, 0));
    let work: Vec<Template> = (0..400).map(|i| source.write_to(&target, i, 1)).collect();
    // Neither staged nor short enough to go inline.
    let extra = Extra {
        op: ExtraOp::Send,
        bytes: &[0; 4096],
        staged: None,
        gather: &[],
        remote_addr: 0,
        remote_key: 0,
        fenced: false,
    };
    let batch =
        Batch { work: &work, imm: None, extra: Some(extra), first_seq: 0, signaled: true, patient: false };
    let failed = a.post(ours[0], &batch).expect_err("the extra cannot be carried");
    assert!((1..400).contains(&failed.taken), "{failed:?}");
    end(&a, &ours);
    end(&b, &theirs);
    assert!(target.now()[failed.taken..].iter().all(|byte| *byte == 0), "nothing behind it was executed");
}

#[test]
fn a_completion_queue_in_error_ends_its_sessions_and_is_no_progress() {
    let fake = Fake::new(FakeConfig::default());
    let [a, b] = hosts(&fake);
    let [ours, theirs] = connect(&a, &b, 3);
    fake.device("fake0").fail_polls(Some(-5));
    let lost = completions(&a, 3);
    assert!(lost.iter().all(|completion| completion.status == WcStatus::PeerGone), "{lost:?}");
    let mut out = [Completion::EMPTY; 4];
    assert_eq!((0..100).map(|_| a.poll(&mut out)).sum::<usize>(), 0, "an error is not a completion");
    assert_eq!(a.stats()["completion_queue_errors"], 1);
    assert!(a.arm(), "and no reason to stay awake");
    end(&a, &ours);
    end(&b, &theirs);
    fake.device("fake0").fail_polls(None);
    let [ours, theirs] = connect(&a, &b, 1);
    let (source, target) = (Block::new(&a, 64, 9), Block::new(&b, 64, 0));
    a.post(ours[0], &batch(&[source.write_to(&target, 0, 64)], 0)).expect("post");
    assert_eq!(completions(&a, 1)[0].status, WcStatus::Success);
    end(&a, &ours);
    end(&b, &theirs);
}

#[test]
fn a_completion_queue_that_overran_ends_its_sessions_behind_what_was_in_it() {
    let fake = Fake::new(FakeConfig::default());
    let [a, b] = hosts(&fake);
    let [ours, theirs] = connect(&a, &b, 2);
    let (source, target) = (Block::new(&a, 64, 9), Block::new(&b, 64, 0));
    // One completion is in it, and another comes too late.
    a.arm();
    a.post(ours[0], &batch(&[source.write_to(&target, 0, 32)], 0)).expect("post");
    until("the device tells of a completion", || !a.arm());
    fake.device("fake0").overrun();
    a.post(ours[0], &batch(&[source.write_to(&target, 32, 32)], 1)).expect("post");
    let mut found = Vec::new();
    let mut out = [Completion::EMPTY; 16];
    until("both endpoints are given up", || {
        a.arm();
        let n = a.poll(&mut out);
        found.extend_from_slice(&out[..n]);
        found.len() >= 3
    });
    assert_eq!((found[0].status, found[0].seq), (WcStatus::Success, 0));
    assert!(found[1..].iter().all(|completion| completion.status == WcStatus::PeerGone), "{found:?}");
    assert_eq!(a.stats()["completion_queue_errors"], 1);
    end(&a, &ours);
    end(&b, &theirs);
}

#[test]
fn a_lost_device_ends_its_sessions_and_is_never_used_again() {
    let fake = Fake::new(FakeConfig::default());
    let [a, b] = hosts(&fake);
    let [ours, theirs] = connect(&a, &b, 2);
    fake.device("fake0").fail();
    let mut lost = Vec::new();
    let mut out = [Completion::EMPTY; 8];
    until("both endpoints hear of it", || {
        a.arm();
        let n = a.poll(&mut out);
        lost.extend(out[..n].iter().filter(|c| c.status != WcStatus::Success).map(|c| c.endpoint));
        ours.iter().all(|endpoint| lost.contains(endpoint))
    });
    end(&a, &ours);
    end(&b, &theirs);
    let config =
        EndpointConfig { sq_depth: 8, rq_depth: 8, active: true, control: true, max_sge: 1, exposed: true };
    let why = told(a.create_endpoint(&config));
    assert!(why.contains("fake0") && why.contains("fatal"), "{why}");
    let why = a.reach(&b.address(), Instant::now()).expect_err("unreachable");
    assert!(why.contains("fake0"), "{why}");
}

#[test]
fn a_port_that_is_down_takes_no_new_connections_until_it_is_back() {
    let fake = Fake::new(FakeConfig::default());
    let a = fabric(&fake, &["fake0"], &[("ib_timeout", "1"), ("ib_retry", "0")]);
    let b = fabric(&fake, &["fake1"], &[]);
    let [ours, theirs] = connect(&a, &b, 1);
    fake.device("fake0").set_port(1, false);
    let config =
        EndpointConfig { sq_depth: 8, rq_depth: 8, active: true, control: true, max_sge: 1, exposed: true };
    until("the port is known to be down", || {
        a.arm();
        a.create_endpoint(&config).is_err()
    });
    let why = told(a.create_endpoint(&config));
    assert!(why.contains("fake0 port 1") && why.contains("down"), "{why}");
    // The connection that exists is given up when the port stays away.
    let mut out = [Completion::EMPTY; 8];
    until("the old connection is given up", || {
        a.arm();
        let n = a.poll(&mut out);
        out[..n].iter().any(|c| c.endpoint == ours[0] && c.status != WcStatus::Success)
    });
    end(&a, &ours);
    fake.device("fake0").set_port(1, true);
    until("the port is used again", || {
        a.arm();
        a.reach(&b.address(), Instant::now()).is_ok()
    });
    end(&b, &theirs);
    let [ours, theirs] = connect(&a, &b, 1);
    let (source, target) = (Block::new(&a, 64, 4), Block::new(&b, 64, 0));
    a.post(ours[0], &batch(&[source.write_to(&target, 0, 64)], 0)).expect("post");
    assert_eq!(completions(&a, 1)[0].status, WcStatus::Success);
    assert_eq!(target.now(), vec![4; 64]);
    end(&a, &ours);
    end(&b, &theirs);
}

#[test]
fn a_changed_gid_ends_what_was_connected_with_the_old_one_and_is_told_to_new_peers() {
    let fake = Fake::new(FakeConfig::default());
    let [a, b] = hosts(&fake);
    let [ours, theirs] = connect(&a, &b, 1);
    fake.device("fake0").set_gid(1, 1, Some(FakeGid::ipv4([10, 77, 0, 9])));
    let mut out = [Completion::EMPTY; 8];
    until("the connection is given up", || {
        a.arm();
        let n = a.poll(&mut out);
        out[..n].iter().any(|c| c.endpoint == ours[0] && c.status != WcStatus::Success)
    });
    end(&a, &ours);
    end(&b, &theirs);
    assert!(a.address().to_string().contains("0a4d0009"), "{}", a.address());
    let [ours, theirs] = connect(&a, &b, 1);
    end(&a, &ours);
    end(&b, &theirs);
}

#[test]
fn a_gid_table_in_any_order_yields_the_routable_entry() {
    let order = |gids: Vec<Option<FakeGid>>| {
        let mut config = FakeConfig::default();
        config.devices[0].ports[0].gids = gids;
        let fake = Fake::new(config);
        open(&fake, &[]).map(|fabric| fabric.stats()["rails"][0]["gid_index"].clone())
    };
    let (local, v4) = (FakeGid::link_local(1), FakeGid::ipv4([10, 77, 0, 1]));
    assert_eq!(order(vec![Some(local), Some(v4)]).expect("usable"), 1);
    assert_eq!(order(vec![Some(v4), Some(local)]).expect("usable"), 0);
    assert_eq!(order(vec![None, Some(FakeGid::zero()), Some(local), Some(v4)]).expect("usable"), 3);
    assert_eq!(order(vec![Some(local)]).expect("usable"), 0);
    let why = told(order(vec![Some(FakeGid::zero())]));
    assert!(why.contains("fake0 port 1") && why.contains("GID"), "{why}");
}

#[test]
fn what_cannot_be_used_is_refused_by_name() {
    let mut iwarp = FakeConfig::default();
    iwarp.devices[0].iwarp = true;
    let why = told(open(&Fake::new(iwarp), &[]));
    assert!(why.contains("fake0") && why.contains("iWARP is not supported"), "{why}");
    let mut down = FakeConfig::default();
    down.devices[0].ports[0].up = false;
    let why = told(open(&Fake::new(down), &[]));
    assert!(why.contains("device fake0 port 1: its state is DOWN"), "{why}");
    let why = told(open(&Fake::new(FakeConfig::default()), &[("gid_index", "7")]));
    assert!(why.contains("fake0") && why.contains("GID index 7"), "{why}");
    let why = told(open(&Fake::new(FakeConfig::default()), &[("devices", "mlx5_0")]));
    assert!(why.contains("mlx5_0") && why.contains("fake0"), "{why}");
    let none = Fake::new(FakeConfig::default());
    let why = told(VerbsFabric::with_library(&none.library_of(&[]), VerbsConfig::default()));
    assert!(why.contains("no RDMA device"), "{why}");
}

#[test]
fn a_peer_on_another_subnet_of_link_local_addresses_is_unreachable_with_both_sides_named() {
    let mut config = FakeConfig::default();
    config.devices[0].ports[0].gids = vec![Some(FakeGid::link_local(1))];
    let fake = Fake::new(config);
    let [a, b] = hosts(&fake);
    let why = a.reach(&b.address(), Instant::now()).expect_err("unreachable");
    assert!(why.contains("fe80::1") && why.contains("10.77.0.2") && why.contains("fake0"), "{why}");
}

#[test]
fn the_smaller_mtu_and_the_smaller_read_depth_are_used_and_a_depth_of_zero_is_refused() {
    let mut config = FakeConfig::default();
    config.devices[0].ports[0].mtu_bytes = 1024;
    config.devices[0].max_qp_rd_atom = 2;
    let fake = Fake::new(config);
    let [a, b] = hosts(&fake);
    // READs in both directions, more than either side serves at once: a wrong depth would be answered by an error.
    let [ours, theirs] = connect(&a, &b, 1);
    let (here, there) = (Block::new(&a, 64 * 64, 5), Block::new(&b, 64 * 64, 6));
    let reads = |own: &Block, peer: &Block| -> Vec<Template> {
        (0..32).map(|i| Template { op: Op::Read, ..own.write_to(peer, i * 64, 64) }).collect()
    };
    a.post(ours[0], &batch(&reads(&here, &there), 0)).expect("post");
    assert_eq!(completions(&a, 1)[0].status, WcStatus::Success);
    assert_eq!(here.now()[..32 * 64], [6; 32 * 64]);
    b.post(theirs[0], &batch(&reads(&there, &here), 0)).expect("post");
    assert_eq!(completions(&b, 1)[0].status, WcStatus::Success);
    end(&a, &ours);
    end(&b, &theirs);
    let config =
        EndpointConfig { sq_depth: 8, rq_depth: 8, active: true, control: true, max_sge: 1, exposed: true };
    let (endpoint, mut address) = a.create_endpoint(&config).expect("create");
    address["read_responder"] = 0.into();
    let why = told(a.connect_endpoint(endpoint, &address, Instant::now()));
    assert!(why.contains("responder depth 0") && why.contains("fake0"), "{why}");
    end(&a, &[endpoint]);
}

#[test]
fn a_limit_of_the_mtu_on_one_side_is_told_to_the_other_so_that_both_use_the_same() {
    let fake = Fake::new(FakeConfig::default());
    let a = fabric(&fake, &["fake0"], &[("mtu", "512")]);
    let b = fabric(&fake, &["fake1"], &[]);
    let config =
        EndpointConfig { sq_depth: 8, rq_depth: 8, active: true, control: true, max_sge: 1, exposed: true };
    let (limited, address) = a.create_endpoint(&config).expect("create");
    assert_eq!((&address["mtu"], &a.address()["rails"][0]["mtu"]), (&512.into(), &512.into()));
    let (free, address) = b.create_endpoint(&config).expect("create");
    assert_eq!(address["mtu"], 4096);
    end(&a, &[limited]);
    end(&b, &[free]);
}

#[test]
fn a_partition_key_that_is_not_there_is_refused_with_the_size_of_the_table() {
    for index in ["1", "65535"] {
        let why = told(open(&Fake::new(FakeConfig::default()), &[("ib_pkey", index)]));
        let wanted = format!("device fake0 port 1: partition key index {index}");
        assert!(why.contains(&wanted) && why.contains("1 entries"), "{why}");
    }
}

#[test]
fn the_time_that_retries_take_is_known_to_whoever_watches_for_stalls() {
    let fake = Fake::new(FakeConfig::default());
    let patient = fabric(&fake, &["fake0"], &[("ib_timeout", "22")]).retry_time();
    let usual = fabric(&fake, &["fake1"], &[]).retry_time();
    assert!(patient.as_secs() > 100 && usual.as_secs() < 5, "{patient:?}, {usual:?}");
}

#[test]
fn one_soft_device_among_them_keeps_reads_from_standing_behind_a_fence() {
    let hard = DeviceConfig::new("fake0", 1);
    let soft = DeviceConfig { vendor_id: SOFT_ROCE_VENDOR, ..DeviceConfig::new("fake1", 2) };
    let fake = Fake::new(FakeConfig { devices: vec![hard, soft], ..FakeConfig::default() });
    for (names, can) in [(&["fake0"][..], true), (&["fake1"], false), (&["fake0", "fake1"], false)] {
        let fabric = VerbsFabric::with_library(&fake.library_of(names), config(&[])).expect("open");
        assert_eq!(fabric.caps().reads_behind_fence, can, "{names:?}");
    }
}

#[test]
fn one_soft_device_among_them_shortens_reads_and_nothing_else() {
    let hard = DeviceConfig::new("fake0", 1);
    let soft = DeviceConfig { vendor_id: SOFT_ROCE_VENDOR, ..DeviceConfig::new("fake1", 2) };
    let mut short = soft.clone();
    short.ports[0].max_msg_bytes = 300_000;
    for (device, longest) in [(soft, 1 << 30), (short, 300_000)] {
        let fake = Fake::new(FakeConfig { devices: vec![hard.clone(), device], ..FakeConfig::default() });
        for (names, read, write) in [
            (&["fake0"][..], 1 << 30, 1 << 30),
            (&["fake1"], longest.min(1 << 20), longest),
            (&["fake0", "fake1"], longest.min(1 << 20), longest),
        ] {
            let fabric = VerbsFabric::with_library(&fake.library_of(names), config(&[])).expect("open");
            let caps = fabric.caps();
            assert_eq!((caps.longest_read_bytes, caps.max_message_bytes), (read, write), "{names:?}");
        }
    }
}

#[test]
fn queues_are_as_deep_as_the_device_lets_them_be() {
    let config = alike(|device| {
        device.max_qp_wr = 100;
        device.max_inline_bytes = 70;
    });
    let fake = Fake::new(config);
    let [a, b] = hosts(&fake);
    let caps = a.caps();
    assert_eq!((caps.max_sq_depth, caps.max_rq_depth, caps.inline_bytes), (99, 100, 64));
    let [ours, theirs] = connect(&a, &b, 2);
    end(&a, &ours);
    end(&b, &theirs);
}

#[test]
fn more_queue_pairs_than_the_device_has_is_an_error_with_its_limit_and_leaves_nothing() {
    let fake = Fake::new(alike(|device| device.max_qp = 6));
    let [a, _b] = hosts(&fake);
    let before = fake.device("fake0").live();
    let config =
        EndpointConfig { sq_depth: 8, rq_depth: 8, active: true, control: false, max_sge: 1, exposed: true };
    let why = told(a.create_endpoints(&[config; 9], PeerView::Unknown));
    assert!(
        why.contains("fake0 port 1") && why.contains("6 queue pairs") && why.contains("BATON_LANES"),
        "{why}"
    );
    assert_eq!(fake.device("fake0").live(), before);
}

#[test]
fn a_completion_queue_too_small_for_a_session_becomes_one_per_queue_pair() {
    let fake = Fake::new(alike(|device| device.max_cqe = 200));
    let [a, b] = hosts(&fake);
    let before = fake.device("fake0").live().cqs;
    let [ours, theirs] = connect(&a, &b, 4);
    assert_eq!(fake.device("fake0").live().cqs - before, 4);
    let (source, target) = (Block::new(&a, 4 * 64, 3), Block::new(&b, 4 * 64, 0));
    for (i, endpoint) in ours.iter().enumerate() {
        a.post(*endpoint, &batch(&[source.write_to(&target, i * 64, 64)], 0)).expect("post");
    }
    assert_eq!(completions(&a, 4).len(), 4);
    assert_eq!(target.now(), vec![3; 4 * 64]);
    end(&a, &ours);
    end(&b, &theirs);
    assert_eq!(fake.device("fake0").live().cqs, before);
}

#[test]
fn a_registration_past_the_lock_limit_names_the_limit_and_leaves_nothing_on_any_device() {
    let fake = Fake::new(FakeConfig::default());
    let both = fabric(&fake, &["fake0", "fake1"], &[]);
    let before = [fake.device("fake0").live().mrs, fake.device("fake1").live().mrs];
    fake.device("fake1").set_memlock(Some(4096));
    let bytes = vec![0u8; 1 << 20];
    let why = told(both.register(&memory(&bytes)));
    assert!(
        why.contains("fake1") && why.contains("RLIMIT_MEMLOCK") && why.contains("1048576 bytes"),
        "{why}"
    );
    assert_eq!([fake.device("fake0").live().mrs, fake.device("fake1").live().mrs], before);
    fake.device("fake1").set_memlock(None);
    let keys = both.register(&memory(&bytes)).expect("register");
    both.deregister(keys, Instant::now()).expect("deregister");
    assert_eq!([fake.device("fake0").live().mrs, fake.device("fake1").live().mrs], before);
}

#[test]
fn a_region_longer_than_the_device_takes_is_registered_in_segments_never_truncated() {
    let fake = Fake::new(alike(|device| device.max_mr_bytes = 3 << 20));
    let [a, _b] = hosts(&fake);
    let before = fake.device("fake0").live().mrs;
    let bytes = vec![0u8; (9 << 20) + 5];
    let keys = a.register(&memory(&bytes)).expect("register");
    let all = a.region_keys(keys);
    // Segments are multiples of 2 MiB.
    assert_eq!((all.segment_bytes, all.rails, all.local.len(), all.remote.len()), (2 << 20, 1, 5, 5));
    let mut distinct = all.remote.to_vec();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), 5, "each segment has its own key");
    assert_eq!(fake.device("fake0").live().mrs, before + 5);
    a.deregister(keys, Instant::now()).expect("deregister");
    assert_eq!(fake.device("fake0").live().mrs, before);
}

#[test]
fn an_empty_range_and_one_past_the_address_space_are_refused() {
    let fake = Fake::new(FakeConfig::default());
    let [a, _b] = hosts(&fake);
    for (addr, len_bytes) in [(0x1000, 0), (u64::MAX - 10, 100)] {
        let bad = Memory { addr, len_bytes, ..memory(&[]) };
        assert!(matches!(a.register(&bad), Err(FabricError::Invalid(_))));
    }
}

#[test]
fn equal_registrations_share_a_memory_region_until_the_last_is_gone() {
    let fake = Fake::new(FakeConfig::default());
    let [a, _b] = hosts(&fake);
    let before = fake.device("fake0").live().mrs;
    let bytes = vec![0u8; 8192];
    let first = a.register(&memory(&bytes)).expect("register");
    let second = a.register(&memory(&bytes)).expect("register");
    let narrower = a.register(&Memory { remote_write: false, ..memory(&bytes) }).expect("register");
    assert_eq!(fake.device("fake0").live().mrs, before + 2, "another access is another region");
    assert_ne!(first, second);
    a.revoke(first);
    a.deregister(first, Instant::now()).expect("deregister");
    assert_eq!(fake.device("fake0").live().mrs, before + 2, "the second registration still holds it");
    a.deregister(second, Instant::now()).expect("deregister");
    a.deregister(narrower, Instant::now()).expect("deregister");
    assert_eq!(fake.device("fake0").live().mrs, before);
    assert!(matches!(a.deregister(second, Instant::now()), Err(FabricError::NotFound(_))));
}

#[test]
fn a_hundred_connections_leave_nothing_behind() {
    let fake = Fake::new(FakeConfig::default());
    {
        let [a, b] = hosts(&fake);
        let before = [fake.device("fake0").live(), fake.device("fake1").live()];
        for round in 0..100 {
            let [ours, theirs] = connect(&a, &b, 3);
            let (source, target) = (Block::new(&a, 64, round), Block::new(&b, 64, 0));
            a.post(ours[1], &batch(&[source.write_to(&target, 0, 64)], 0)).expect("post");
            // Every third one ends with its work request on the way.
            if round % 3 != 0 {
                assert_eq!(completions(&a, 1)[0].kind, CompletionKind::Send);
                assert_eq!(target.now(), vec![round; 64]);
            }
            end(&a, &ours);
            end(&b, &theirs);
            a.deregister(source.keys, Instant::now()).expect("deregister");
            b.deregister(target.keys, Instant::now()).expect("deregister");
            let mut out = [Completion::EMPTY; 8];
            assert_eq!(a.poll(&mut out) + b.poll(&mut out), 0);
        }
        assert_eq!([fake.device("fake0").live(), fake.device("fake1").live()], before);
    }
    assert_eq!([fake.device("fake0").live(), fake.device("fake1").live()], [Live::default(); 2]);
}

#[test]
fn a_device_with_two_ports_has_two_rails_on_one_registration() {
    let mut config = FakeConfig::default();
    config.devices[0].ports.push(PortConfig::roce(vec![FakeGid::ipv4([10, 78, 0, 1])]));
    let fake = Fake::new(config);
    let a = fabric(&fake, &["fake0"], &[]);
    let before = fake.device("fake0").live();
    assert_eq!(before.contexts, 1);
    let bytes = vec![0u8; 4096];
    let keys = a.register(&memory(&bytes)).expect("register");
    let all = a.region_keys(keys);
    assert_eq!((all.rails, all.remote[0] == all.remote[1]), (2, true));
    assert_eq!(fake.device("fake0").live().mrs, before.mrs + 1);
    a.deregister(keys, Instant::now()).expect("deregister");
}
