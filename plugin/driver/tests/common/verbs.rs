//! Hosts with model RDMA devices, all on one network.

use baton_fabric::Fabric;
use baton_fabric_verbs::{VerbsConfig, VerbsFabric};
use baton_verbs::Library;
use baton_verbs::fake::{DeviceConfig, Fake, FakeConfig, FakeGid, PortConfig};
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Devices of each network; every host takes new ones.
const DEVICES: usize = 1000;

struct Network {
    fake: Fake,
    library: Library,
    taken: AtomicUsize,
}

impl Network {
    fn new(change: impl Fn(&mut DeviceConfig)) -> Network {
        let device = |n: usize| {
            let mut device = DeviceConfig::new(&format!("fake{n}"), 1);
            device.ports = vec![PortConfig::roce(vec![FakeGid::ipv4([10, 77, (n >> 8) as u8, n as u8])])];
            change(&mut device);
            device
        };
        let config = FakeConfig {
            devices: (0..DEVICES).map(device).collect(),
            piece_bytes: 64 * 1024,
            ..FakeConfig::default()
        };
        let fake = Fake::new(config);
        Network { library: fake.library(), fake, taken: AtomicUsize::new(0) }
    }

    fn host(&self, devices: usize) -> Vec<String> {
        let first = self.taken.fetch_add(devices, Ordering::Relaxed);
        assert!(first + devices <= DEVICES, "the network has no more devices");
        (first..first + devices).map(|n| format!("fake{n}")).collect()
    }
}

static USUAL: OnceLock<Network> = OnceLock::new();
static MEAGRE: OnceLock<Network> = OnceLock::new();
static MUTE: OnceLock<Network> = OnceLock::new();
static SOFT: OnceLock<Network> = OnceLock::new();

/// A new host's fabric: `verbs`, `verbs rails` (two devices), `verbs meagre` (nothing inline, messages of 64 KiB, memory regions of 4 MiB),
/// `verbs mute` (no immediates), `verbs soft` (calls itself soft-RoCE).
pub fn fabric(kind: &str) -> Arc<dyn Fabric> {
    open(kind).0
}

/// And the network with the names of the host's devices, to do them harm.
pub fn open(kind: &str) -> (Arc<dyn Fabric>, &'static Fake, Vec<String>) {
    let (network, devices) = match kind {
        "verbs" => (USUAL.get_or_init(|| Network::new(|_| {})), 1),
        "verbs rails" => (USUAL.get_or_init(|| Network::new(|_| {})), 2),
        "verbs meagre" => (MEAGRE.get_or_init(|| Network::new(meagre)), 1),
        "verbs mute" => (MUTE.get_or_init(|| Network::new(|device| device.immediate = false)), 1),
        "verbs soft" => (SOFT.get_or_init(|| Network::new(soft)), 1),
        other => panic!("no kind of host {other:?}"),
    };
    let names = network.host(devices);
    // Errors shall come soon.
    let mut config = VerbsConfig { ib_timeout: 10, ib_retry: 2, ..VerbsConfig::default() };
    assert!(config.set("devices", &names.join(",")).expect("names of devices"));
    let fabric = VerbsFabric::with_library(&network.library, config).expect("a fabric on model devices");
    (fabric, &network.fake, names)
}

fn meagre(device: &mut DeviceConfig) {
    device.max_inline_bytes = 0;
    device.max_mr_bytes = 4 << 20;
    device.ports[0].max_msg_bytes = 64 * 1024;
    device.max_qp_wr = 200;
    device.max_qp_rd_atom = 1;
    device.max_qp_init_rd_atom = 1;
}

fn soft(device: &mut DeviceConfig) {
    device.vendor_id = baton_verbs::SOFT_ROCE_VENDOR;
}

/// Nobody on any of the networks broke the rules of verbs.
pub fn assert_rules() {
    for network in [&USUAL, &MEAGRE, &MUTE, &SOFT].into_iter().filter_map(OnceLock::get) {
        let violations = network.fake.take_violations();
        assert!(violations.is_empty(), "{violations:?}");
    }
}
