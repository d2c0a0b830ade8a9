//! Memory of accelerators on model devices with a fake libcuda: written without a GPU, and untried on one.

#[path = "fake_support/cuda.rs"]
mod cuda;
mod fake_support;

use baton_fabric::{
    Batch, Completion, CompletionKind, EndpointId, Extra, ExtraOp, Fabric, FabricError, Keys, Memory,
    MemoryKind, Op, RecvSlot, Template, WcStatus,
};
use baton_fabric_verbs::{Accelerators, Cuda, CudaError, VerbsConfig, VerbsFabric};
use baton_verbs::fake::{Fake, FakeConfig, Live};
use cuda::{Vram, api, host};
use fake_support::{alike, completions, config, connect, end, until};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn open(fake: &Fake, devices: &[&str], config: VerbsConfig, found: Accelerators) -> Arc<VerbsFabric> {
    VerbsFabric::with_accelerators(&fake.library_of(devices), config, || found).expect("a fabric")
}

fn with_gpu(fake: &Fake, device: &str) -> Arc<VerbsFabric> {
    open(fake, &[device], config(&[("ib_timeout", "8"), ("ib_retry", "2")]), host(api(), ""))
}

fn memory(addr: u64, len: usize, kind: MemoryKind) -> Memory {
    Memory {
        addr,
        len_bytes: len as u64,
        kind,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    }
}

fn vram(addr: u64, len: usize) -> Memory {
    memory(addr, len, MemoryKind::Vram)
}

/// A buffer of the host's that is written from.
struct Source {
    bytes: Box<[u8]>,
    keys: Keys,
}

impl Source {
    fn new(fabric: &VerbsFabric, len: usize, byte: u8) -> Source {
        let bytes = vec![byte; len].into_boxed_slice();
        let keys = fabric.register(&memory(bytes.as_ptr() as u64, len, MemoryKind::Dram)).expect("register");
        Source { bytes, keys }
    }

    fn write(&self, remote_addr: u64, remote_key: u64, len: usize) -> Template {
        Template {
            local_addr: self.bytes.as_ptr() as u64,
            remote_addr,
            local_key: self.keys.local,
            remote_key,
            len_bytes: len as u32,
            op: Op::Write,
            reserved: [0; 3],
        }
    }
}

fn recvs(fabric: &VerbsFabric, endpoint: EndpointId, ids: std::ops::Range<u32>) {
    let slots: Vec<RecvSlot> = ids.map(|id| RecvSlot { id, ..RecvSlot::default() }).collect();
    fabric.post_recv(endpoint, &slots).expect("post RECVs");
}

fn post(fabric: &VerbsFabric, endpoint: EndpointId, work: &[Template], imm: u32, seq: u64) {
    let batch = Batch { work, imm: Some(imm), extra: None, first_seq: seq, signaled: true, patient: false };
    fabric.post(endpoint, &batch).expect("post");
}

fn count(fabric: &VerbsFabric, name: &str) -> u64 {
    fabric.stats()["accelerators"][name].as_u64().unwrap_or_else(|| panic!("a counter {name}"))
}

/// Why memory of accelerators is not offered, from the fabric's notes and from a refusal.
fn refusal(fake: &Fake, found: Accelerators) -> String {
    let fabric = open(fake, &["fake0"], VerbsConfig::default(), found);
    assert!(!fabric.caps().vram);
    let refused = fabric.register(&vram(0x7000_0000, 4096)).expect_err("a refusal");
    assert!(matches!(refused, FabricError::Unsupported(_)), "{refused}");
    let notes = fabric.stats()["notes"].to_string();
    let why = refused.to_string();
    let (_, reason) = why.split_once("registered here: ").expect("a reason");
    let (reason, _) = reason.rsplit_once(" (NVIDIA's").expect("what is known");
    assert!(notes.contains(reason), "{notes} tell of {reason}");
    why
}

#[test]
fn a_host_that_cannot_register_it_says_what_is_missing() {
    let fake = Fake::new(FakeConfig::default());
    let missing = Accelerators {
        cuda: Cuda::open_at("/nonexistent/libcuda.so.1".as_ref()).map_err(|e| e.to_string()),
        kernel_modules: String::new(),
    };
    assert!(refusal(&fake, missing).contains("/nonexistent/libcuda.so.1 cannot be opened"));
    let mut table = api();
    table.init = cuda::no_driver;
    assert!(
        refusal(&fake, host(table, "")).contains("cuInit: no CUDA-capable device is detected (error 100)")
    );
    let mut table = api();
    table.device_get_count = cuda::no_device;
    assert!(refusal(&fake, host(table, "")).contains("libcuda has no device"));
    let mut table = api();
    table.device_get_attribute = cuda::no_attributes;
    let why = refusal(&fake, host(table, "rdma_rxe 1 0 - Live 0x0\n"));
    assert!(why.contains("GPU 0 does not export dma-bufs") && why.contains("no nvidia_peermem"), "{why}");
    let mut table = api();
    table.mem_get_handle_for_address_range = None;
    assert!(refusal(&fake, host(table, "")).contains("older than CUDA 11.7"));
    let fake = Fake::new(alike(|device| device.dmabuf = false));
    let why = refusal(&fake, host(api(), ""));
    assert!(why.contains("device fake0 takes no dma-bufs"), "{why}");
}

#[test]
fn one_device_without_dma_bufs_is_enough_not_to_offer_it() {
    let mut config = FakeConfig::default();
    config.devices[1].dmabuf = false;
    let fake = Fake::new(config);
    let fabric = open(&fake, &["fake0", "fake1"], VerbsConfig::default(), host(api(), ""));
    assert!(!fabric.caps().vram);
    let fabric =
        open(&fake, &["fake0", "fake1"], VerbsConfig::default(), host(api(), "nvidia_peermem 16384 0\n"));
    assert!(fabric.caps().vram, "peer memory serves both");
}

#[test]
fn addresses_of_the_host_are_refused_as_memory_of_a_gpu() {
    let fake = Fake::new(FakeConfig::default());
    let fabric = with_gpu(&fake, "fake0");
    assert!(fabric.caps().vram);
    let bytes = [0u8; 64];
    let refused = fabric.register(&vram(bytes.as_ptr() as u64, 64)).expect_err("a refusal");
    assert!(matches!(refused, FabricError::Invalid(_)), "{refused}");
    assert!(refused.to_string().contains("libcuda does not know it"), "{refused}");
}

#[test]
fn a_part_of_an_allocation_is_written_exactly_and_its_descriptor_closed() {
    let fake = Fake::new(FakeConfig::default());
    let (a, b) = (with_gpu(&fake, "fake0"), with_gpu(&fake, "fake1"));
    // With a context of its own, and as memory of a pool, which needs its device's primary one.
    for pooled in [false, true] {
        let gpu = Vram::new(1 << 20, 1, pooled);
        gpu.fill(0xA5);
        let (start, len) = (70_001, 300_003);
        let keys = b.register(&vram(gpu.addr + start as u64, len)).expect("register");
        assert!(!cuda::is_exported(gpu.addr + start as u64), "the descriptor is closed");
        assert_eq!(cuda::contexts_left(), 0);
        let [ours, theirs] = connect(&a, &b, 1);
        recvs(&b, theirs[0], 0..1);
        let source = Source::new(&a, len, 0x3C);
        let key = b.region_keys(keys).remote[0];
        post(&a, ours[0], &[source.write(gpu.addr + start as u64, key, len)], 7, 0);
        let got = completions(&b, 1);
        assert_eq!((got[0].kind, got[0].status), (CompletionKind::RecvImm(7), WcStatus::Success));
        assert_eq!(gpu.bytes(0, start), vec![0xA5; start]);
        assert_eq!(gpu.bytes(start, len), vec![0x3C; len]);
        let behind = start + len;
        assert_eq!(gpu.bytes(behind, gpu.len - behind), vec![0xA5; gpu.len - behind]);
        completions(&a, 1);
        end(&a, &ours);
        end(&b, &theirs);
        b.deregister(keys, Instant::now() + Duration::from_secs(1)).expect("deregister");
        a.deregister(source.keys, Instant::now() + Duration::from_secs(1)).expect("deregister");
        assert_eq!(count(&b, "regions_flushed"), 0);
    }
}

#[test]
fn where_a_range_cannot_be_exported_peer_memory_is_tried_and_both_reasons_are_told() {
    let fake = Fake::new(FakeConfig::default());
    let mut table = api();
    table.mem_get_handle_for_address_range = Some(cuda::refuses_to_export);
    let gpu = Vram::new(8192, 0, false);
    let with_module = host(table, "ib_core 1 0\nnvidia_peermem 16384 0 - Live 0x0 (POE)\n");
    let fabric = open(&fake, &["fake0"], VerbsConfig::default(), with_module);
    fabric.register(&vram(gpu.addr, 8192)).expect("by peer memory");
    let fabric = open(&fake, &["fake0"], VerbsConfig::default(), host(table, ""));
    let refused = fabric.register(&vram(gpu.addr, 8192)).expect_err("no way").to_string();
    assert!(
        refused.contains("cuMemGetHandleForAddressRange: operation not supported (error 801)"),
        "{refused}"
    );
    assert!(refused.contains("peer memory: no nvidia_peermem"), "{refused}");
    assert_eq!(cuda::contexts_left(), 0);
    drop(fabric);
}

#[test]
fn long_memory_is_registered_in_segments_and_shared_by_repeated_registrations() {
    let fake = Fake::new(alike(|device| device.max_mr_bytes = 1 << 16));
    let fabric = with_gpu(&fake, "fake0");
    let before = fake.device("fake0").live();
    let gpu = Vram::new(5 << 16, 0, false);
    let first = fabric.register(&vram(gpu.addr + 100, 4 << 16)).expect("register");
    let second = fabric.register(&vram(gpu.addr + 100, 4 << 16)).expect("register again");
    assert_eq!(fabric.region_keys(first).segments(), 4);
    // Four, one to flush by, and where flushes land.
    assert_eq!(fake.device("fake0").live().mrs - before.mrs, 4 + 2);
    let soon = || Instant::now() + Duration::from_secs(1);
    fabric.deregister(first, soon()).expect("deregister");
    assert_eq!(fake.device("fake0").live().mrs - before.mrs, 4 + 2);
    fabric.revoke(second);
    assert_eq!(fake.device("fake0").live().mrs - before.mrs, 2, "nobody reaches it any more");
    fabric.deregister(second, soon()).expect("deregister");
    assert_eq!(fake.device("fake0").live().mrs - before.mrs, 1);
    drop(fabric);
    assert_eq!(fake.device("fake0").live(), Live::default());
}

/// Checks every notification when it is delivered: its bytes must be there.
#[test]
fn notifications_come_only_when_what_they_tell_of_is_visible() {
    let fake = Fake::new(FakeConfig::default());
    let (a, b) = (with_gpu(&fake, "fake0"), with_gpu(&fake, "fake1"));
    let (len, lanes, rounds) = (4096, 3, 60);
    let gpu = Vram::new(len * lanes, 0, false);
    let key = b.region_keys(b.register(&vram(gpu.addr, gpu.len)).expect("register")).remote[0];
    let [ours, theirs] = connect(&a, &b, lanes);
    for lane in &theirs {
        recvs(&b, *lane, 0..60);
    }
    let sources: Vec<Source> = (1..=rounds).map(|round| Source::new(&a, len, round as u8)).collect();
    for (round, source) in sources.iter().enumerate() {
        for (lane, endpoint) in ours.iter().enumerate() {
            let at = gpu.addr + (lane * len) as u64;
            let sent = &[source.write(at, key, len)];
            // Told by an immediate and by a SEND, in turns.
            if round % 2 == 0 {
                post(&a, *endpoint, sent, round as u32, 2 * round as u64);
            } else {
                let extra = Extra {
                    op: ExtraOp::Send,
                    bytes: &[],
                    staged: None,
                    gather: &[],
                    remote_addr: 0,
                    remote_key: 0,
                    fenced: false,
                };
                let batch = Batch {
                    work: sent,
                    imm: None,
                    extra: Some(extra),
                    first_seq: 2 * round as u64,
                    signaled: true,
                    patient: false,
                };
                a.post(*endpoint, &batch).expect("post");
            }
        }
        let mut got = Vec::new();
        let mut out = [Completion::EMPTY; 4];
        until("all lanes tell", || {
            let n = b.poll(&mut out);
            for completion in &out[..n] {
                let lane =
                    theirs.iter().position(|endpoint| *endpoint == completion.endpoint).expect("a lane");
                assert_eq!(completion.status, WcStatus::Success);
                assert_eq!(completion.seq, round as u64, "lane {lane} in order");
                assert_eq!(
                    gpu.bytes(lane * len, len),
                    vec![round as u8 + 1; len],
                    "lane {lane}, round {round}"
                );
                got.push(lane);
            }
            got.len() == lanes
        });
        completions(&a, lanes);
    }
    let (flushes, held) = (count(&b, "flushes"), count(&b, "receives_held"));
    assert_eq!(held, (lanes as u64) * rounds);
    assert!(flushes >= rounds && flushes <= held, "{flushes} flushes for {held} notifications");
    assert_eq!(count(&b, "receives_dropped"), 0);
    assert_eq!(count(&a, "flushes"), 0, "nobody writes to memory of GPUs there");
    end(&a, &ours);
    end(&b, &theirs);
}

#[test]
fn a_sleeper_is_woken_when_a_notification_has_been_flushed() {
    let fake = Fake::new(FakeConfig::default());
    let (a, b) = (with_gpu(&fake, "fake0"), with_gpu(&fake, "fake1"));
    let gpu = Vram::new(4096, 0, false);
    let key = b.region_keys(b.register(&vram(gpu.addr, gpu.len)).expect("register")).remote[0];
    let [ours, theirs] = connect(&a, &b, 1);
    recvs(&b, theirs[0], 0..40);
    let source = Source::new(&a, 64, 1);
    for round in 0..40 {
        post(&a, ours[0], &[source.write(gpu.addr, key, 64)], round, u64::from(round));
        let mut out = [Completion::EMPTY; 4];
        let deadline = Instant::now() + fake_support::WATCHDOG;
        loop {
            let n = b.poll(&mut out);
            if n > 0 {
                assert_eq!(out[0].kind, CompletionKind::RecvImm(round));
                break;
            }
            assert!(Instant::now() < deadline, "round {round}: never woken");
            if b.arm() {
                let mut fd = libc::pollfd {
                    fd: b.event_fd().expect("a descriptor"),
                    events: libc::POLLIN,
                    revents: 0,
                };
                // SAFETY: one descriptor, open as long as the fabric.
                assert_eq!(unsafe { libc::poll(&mut fd, 1, 20_000) }, 1, "round {round}: no event");
            }
        }
        completions(&a, 1);
    }
    end(&a, &ours);
    end(&b, &theirs);
}

#[test]
fn when_a_flush_fails_nothing_is_delivered_and_the_next_session_works() {
    let fake = Fake::new(FakeConfig::default());
    let (a, b) = (with_gpu(&fake, "fake0"), with_gpu(&fake, "fake1"));
    let gpu = Vram::new(4096, 0, false);
    let key = b.region_keys(b.register(&vram(gpu.addr, gpu.len)).expect("register")).remote[0];
    let source = Source::new(&a, 64, 1);
    let [ours, theirs] = connect(&a, &b, 2);
    theirs.iter().for_each(|endpoint| recvs(&b, *endpoint, 0..4));
    // The next thing that this device posts is the READ of a flush.
    fake.device("fake1").fail_post_after(0, libc::ENOMEM);
    post(&a, ours[1], &[source.write(gpu.addr, key, 64)], 1, 0);
    let mut seen = Vec::new();
    let mut out = [Completion::EMPTY; 16];
    until("both sessions' endpoints end", || {
        let n = b.poll(&mut out);
        seen.extend_from_slice(&out[..n]);
        let lost = |endpoint| seen.iter().any(|c| c.endpoint == endpoint && c.status == WcStatus::PeerGone);
        theirs.iter().all(|endpoint| lost(*endpoint))
    });
    assert!(
        seen.iter().all(|c| !matches!(c.kind, CompletionKind::RecvImm(_) | CompletionKind::RecvSend)),
        "{seen:?}"
    );
    assert_eq!((count(&b, "flushes_failed"), count(&b, "receives_dropped")), (1, 1));
    end(&a, &ours);
    end(&b, &theirs);
    let [ours, theirs] = connect(&a, &b, 2);
    recvs(&b, theirs[1], 0..1);
    post(&a, ours[1], &[source.write(gpu.addr, key, 64)], 2, 0);
    assert_eq!(completions(&b, 1)[0].kind, CompletionKind::RecvImm(2));
    assert_eq!(gpu.bytes(0, 64), vec![1; 64]);
    end(&a, &ours);
    end(&b, &theirs);
}

#[test]
fn a_notification_that_came_before_the_fence_is_delivered_flushed() {
    let fake = Fake::new(FakeConfig::default());
    let (a, b) = (with_gpu(&fake, "fake0"), with_gpu(&fake, "fake1"));
    let gpu = Vram::new(4096, 0, false);
    let key = b.region_keys(b.register(&vram(gpu.addr, gpu.len)).expect("register")).remote[0];
    let source = Source::new(&a, 64, 9);
    let [ours, theirs] = connect(&a, &b, 1);
    recvs(&b, theirs[0], 0..2);
    post(&a, ours[0], &[source.write(gpu.addr, key, 64)], 5, 0);
    completions(&a, 1);
    b.fence(theirs[0]);
    until("quiet", || b.is_quiet(theirs[0]));
    let got = completions(&b, 2);
    assert_eq!((got[0].kind, got[0].status), (CompletionKind::RecvImm(5), WcStatus::Success));
    assert_eq!(got[1].kind, CompletionKind::RecvFlushed);
    assert_eq!(gpu.bytes(0, 64), vec![9; 64]);
    b.destroy_endpoint(theirs[0]);
    end(&a, &ours);
}

#[test]
fn two_gpus_and_two_devices_take_four_reads_for_a_flush() {
    let mut devices = FakeConfig::default().devices;
    devices.push(baton_verbs::fake::DeviceConfig::new("fake2", 3));
    let fake = Fake::new(FakeConfig { devices, ..FakeConfig::default() });
    let a = with_gpu(&fake, "fake0");
    let b = open(&fake, &["fake1", "fake2"], VerbsConfig::default(), host(api(), ""));
    let gpus = [Vram::new(4096, 0, false), Vram::new(4096, 1, false), Vram::new(4096, 1, false)];
    let keys: Vec<Keys> =
        gpus.iter().map(|gpu| b.register(&vram(gpu.addr, gpu.len)).expect("register")).collect();
    let [ours, theirs] = connect(&a, &b, 1);
    recvs(&b, theirs[0], 0..1);
    let rail = usize::from(b.rail(theirs[0]));
    let source = Source::new(&a, 64, 1);
    post(&a, ours[0], &[source.write(gpus[2].addr, b.region_keys(keys[2]).remote[rail], 64)], 1, 0);
    completions(&b, 1);
    assert_eq!(gpus[2].bytes(0, 64), vec![1; 64]);
    assert_eq!((count(&b, "flushes"), count(&b, "flush_reads"), count(&b, "regions_flushed")), (1, 4, 3));
    end(&a, &ours);
    end(&b, &theirs);
}

#[test]
fn nothing_is_flushed_without_memory_that_peers_may_write_or_where_the_gpu_keeps_the_order() {
    let fake = Fake::new(FakeConfig { late_vram: false, ..FakeConfig::default() });
    let a = with_gpu(&fake, "fake0");
    let mut table = api();
    table.device_get_attribute = cuda::orders_writes;
    let trusting = VerbsConfig { always_flush: false, ..VerbsConfig::default() };
    let gpu = Vram::new(4096, 0, false);
    for (config, kind, writable) in [
        (VerbsConfig::default(), MemoryKind::Dram, true),
        (VerbsConfig::default(), MemoryKind::Vram, false),
        (trusting, MemoryKind::Vram, true),
    ] {
        let b = open(&fake, &["fake1"], config, host(table, ""));
        let memory = Memory { remote_write: writable, ..memory(gpu.addr, gpu.len, kind) };
        let keys = b.register(&memory).expect("register");
        let [ours, theirs] = connect(&a, &b, 1);
        recvs(&b, theirs[0], 0..1);
        let source = Source::new(&a, 64, 1);
        let work = [source.write(gpu.addr, b.region_keys(keys).remote[0], 64)];
        if writable {
            post(&a, ours[0], &work, 1, 0);
            assert_eq!(completions(&b, 1)[0].kind, CompletionKind::RecvImm(1));
        }
        assert_eq!(
            (count(&b, "regions_flushed"), count(&b, "receives_held"), count(&b, "flushes")),
            (0, 0, 0)
        );
        end(&a, &ours);
        end(&b, &theirs);
        drop(b);
        assert_eq!(fake.device("fake1").live(), Live::default());
    }
}

#[test]
fn a_library_that_is_no_libcuda_is_refused_by_the_symbol_that_it_lacks() {
    let refused = Cuda::open_at("libc.so.6".as_ref()).err().expect("no libcuda");
    assert_eq!(refused, CudaError::Symbol("libc.so.6".to_owned(), "cuInit"));
}

#[test]
fn a_libcuda_is_opened_from_a_file_and_serves_without_what_is_optional() {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake_support/libcuda.c");
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("libcuda-{}.so.1", std::process::id()));
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let built = std::process::Command::new(compiler)
        .args(["-w", "-shared", "-fPIC", "-o"])
        .arg(&path)
        .arg(source)
        .status();
    assert!(built.expect("a C compiler").success());
    let cuda = Cuda::open_at(&path).map_err(|e| e.to_string());
    std::fs::remove_file(&path).expect("it was just built");
    let fake = Fake::new(FakeConfig::default());
    let found = Accelerators { cuda, kernel_modules: "nvidia_peermem 16384 0\n".to_owned() };
    let fabric = open(&fake, &["fake0"], VerbsConfig::default(), found);
    let notes = fabric.stats()["notes"].to_string();
    let wanted = "2 GPUs; dma-buf no (libcuda has no cuMemGetHandleForAddressRange (it is older than CUDA 11.7)); peer memory yes";
    assert!(fabric.caps().vram && notes.contains(wanted), "{notes}");
    let refused = fabric.register(&vram(0x7000_0000, 4096)).expect_err("not its own").to_string();
    assert!(refused.contains("cuPointerGetAttribute: whatever (error 1)"), "{refused}");
}

/// The whole suite while everything that arrives has to be flushed.
mod while_flushing {
    use super::*;
    use baton_fabric::conformance::{Harness, InProcess};

    pub struct Flushing {
        inner: Option<InProcess>,
        gpus: [Vram; 2],
        _fake: Fake,
    }

    impl Flushing {
        fn new() -> Flushing {
            let fake = Fake::new(FakeConfig::default());
            let gpus = [0, 1].map(|ordinal| Vram::new(8192, ordinal, ordinal == 1));
            let [a, b] = [("fake0", &gpus[0]), ("fake1", &gpus[1])].map(|(device, gpu)| {
                let fabric = with_gpu(&fake, device);
                fabric.register(&vram(gpu.addr, gpu.len)).expect("register");
                fabric
            });
            Flushing { inner: Some(InProcess::new(a, b)), gpus, _fake: fake }
        }

        fn inner(&self) -> &InProcess {
            assert!(self.gpus.iter().all(|gpu| gpu.len > 0));
            self.inner.as_ref().expect("it is there until the end")
        }
    }

    impl Drop for Flushing {
        fn drop(&mut self) {
            drop(self.inner.take());
        }
    }

    impl Harness for Flushing {
        fn fabric(&self, side: usize) -> Arc<dyn Fabric> {
            self.inner().fabric(side)
        }
        fn alloc(&self, side: usize, len_bytes: usize) -> u64 {
            self.inner().alloc(side, len_bytes)
        }
        fn store(&self, side: usize, addr: u64, bytes: &[u8]) {
            self.inner().store(side, addr, bytes);
        }
        fn load(&self, side: usize, addr: u64, bytes: &mut [u8]) {
            self.inner().load(side, addr, bytes);
        }
    }

    baton_fabric::conformance_tests!(Flushing::new());
}
