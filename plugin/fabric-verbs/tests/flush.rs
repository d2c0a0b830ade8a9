//! Flushing on real devices, with host memory in the part of a GPU's: it is registered as peer memory would be, so that everything that
//! arrives has to wait for a READ through the device's own queue pair. `BATON_TEST_DEVICES` as for the suite.

#[path = "fake_support/cuda.rs"]
mod cuda;

use baton_fabric::conformance::{Harness, InProcess, behaviour};
use baton_fabric::{Fabric, Memory, MemoryKind};
use baton_fabric_verbs::{VerbsConfig, VerbsFabric};
use baton_verbs::Library;
use cuda::Vram;
use std::sync::Arc;

struct Flushing {
    // Before the memory that is registered with it.
    inner: InProcess,
    gpus: [Vram; 2],
}

impl Flushing {
    fn new() -> Flushing {
        let named = std::env::var("BATON_TEST_DEVICES");
        let named = named.ok().or_else(|| std::env::var_os("RDMA_VM").map(|_| "rxe0,rxe1".to_owned()));
        let named = named.expect("devices");
        let (first, second) = named.split_once(',').expect("two devices");
        let gpus = [0, 1].map(|ordinal| Vram::new(8192, ordinal, false));
        let [a, b] = [(first, &gpus[0]), (second, &gpus[1])].map(|(device, gpu)| fabric(device, gpu));
        Flushing { inner: InProcess::new(a, b), gpus }
    }
}

fn fabric(device: &str, gpu: &Vram) -> Arc<dyn Fabric> {
    let mut config = VerbsConfig::default();
    for (key, value) in [("devices", device), ("ib_timeout", "18")] {
        assert!(config.set(key, value).expect("a valid setting"), "setting {key} exists");
    }
    let library = Library::open().expect("libibverbs");
    let found = || cuda::host(cuda::api(), "nvidia_peermem 16384 0\n");
    let fabric = VerbsFabric::with_accelerators(&library, config, found).expect("a fabric");
    assert!(fabric.caps().vram, "{}", fabric.stats()["notes"]);
    let memory = Memory {
        addr: gpu.addr + 100,
        len_bytes: 5000,
        kind: MemoryKind::Vram,
        device: 0,
        remote_read: false,
        remote_write: true,
        ordered: false,
        mapped: false,
    };
    fabric.register(&memory).unwrap_or_else(|e| panic!("device {device}: {e}"));
    fabric
}

impl Harness for Flushing {
    fn fabric(&self, side: usize) -> Arc<dyn Fabric> {
        self.inner.fabric(side)
    }
    fn alloc(&self, side: usize, len_bytes: usize) -> u64 {
        self.inner.alloc(side, len_bytes)
    }
    fn store(&self, side: usize, addr: u64, bytes: &[u8]) {
        self.inner.store(side, addr, bytes);
    }
    fn load(&self, side: usize, addr: u64, bytes: &mut [u8]) {
        self.inner.load(side, addr, bytes);
    }
}

impl Drop for Flushing {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let flushes: u64 = [0, 1]
            .iter()
            .map(|side| {
                self.inner.fabric(*side).stats()["accelerators"]["flushes"].as_u64().expect("a counter")
            })
            .sum();
        assert!(flushes > 0 && self.gpus.iter().all(|gpu| gpu.len > 0), "something was flushed");
    }
}

macro_rules! behaviours {
    ($($name:ident),* $(,)?) => {
        $(
            #[test]
            #[ignore = "needs RDMA devices: cargo xtask test --only guest"]
            fn $name() {
                behaviour::$name(Flushing::new());
            }
        )*
    };
}

behaviours! {
    an_immediate_comes_after_its_bytes_and_consumes_one_recv,
    immediates_arrive_in_the_order_of_posting,
    sends_fill_the_slots_in_order_with_id_and_length,
    a_sleeping_service_thread_is_woken_by_every_message,
    a_staged_send_arrives_whole,
}
