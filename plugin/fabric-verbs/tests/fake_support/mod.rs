//! Two fabrics on model devices, and a look at what they leave behind.

// Each test binary uses its part of this.
#![allow(dead_code)]

use baton_fabric::conformance::{Harness, InProcess};
use baton_fabric::{Completion, EndpointConfig, EndpointId, Fabric, PeerView};
use baton_fabric_verbs::{VerbsConfig, VerbsFabric};
use baton_verbs::fake::{DeviceConfig, Fake, FakeConfig, Live};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Every wait of these tests ends after this long at the latest.
pub const WATCHDOG: Duration = Duration::from_secs(20);

/// Settings by their names.
pub fn config(settings: &[(&str, &str)]) -> VerbsConfig {
    let mut config = VerbsConfig::default();
    for (key, value) in settings {
        assert!(config.set(key, value).expect("a valid setting"), "setting {key} exists");
    }
    config
}

/// The fabric of a host that has these devices.
pub fn fabric(fake: &Fake, devices: &[&str], settings: &[(&str, &str)]) -> Arc<VerbsFabric> {
    VerbsFabric::with_library(&fake.library_of(devices), config(settings)).expect("a fabric")
}

/// Both hosts of a fake with the devices fake0 and fake1.
pub fn hosts(fake: &Fake) -> [Arc<VerbsFabric>; 2] {
    ["fake0", "fake1"].map(|device| fabric(fake, &[device], &[]))
}

/// The usual two devices, changed alike.
pub fn alike(change: impl Fn(&mut DeviceConfig)) -> FakeConfig {
    let mut config = FakeConfig::default();
    config.devices.iter_mut().for_each(change);
    config
}

/// Endpoints of one session on both sides, connected pair by pair.
pub fn connect(a: &VerbsFabric, b: &VerbsFabric, count: usize) -> [Vec<EndpointId>; 2] {
    connect_deep(a, b, count, 64)
}

/// As [`connect`], with send queues of another depth.
pub fn connect_deep(a: &VerbsFabric, b: &VerbsFabric, count: usize, sq_depth: u32) -> [Vec<EndpointId>; 2] {
    let of = |active| {
        let config =
            |control| EndpointConfig { sq_depth, rq_depth: 64, active, control, max_sge: 1, exposed: true };
        (0..count).map(|i| config(i == 0)).collect::<Vec<_>>()
    };
    let ours = a.create_endpoints(&of(true), PeerView::Fabric(&b.address())).expect("endpoints of a");
    let offered: Vec<_> = ours.iter().map(|(_, address)| address.clone()).collect();
    let theirs = b.create_endpoints(&of(false), PeerView::Endpoints(&offered)).expect("endpoints of b");
    let deadline = Instant::now() + WATCHDOG;
    for ((own, address), (other, answer)) in ours.iter().zip(&theirs) {
        b.connect_endpoint(*other, address, deadline).expect("connect b");
        a.connect_endpoint(*own, answer, deadline).expect("connect a");
    }
    [ours, theirs].map(|made| made.into_iter().map(|(endpoint, _)| endpoint).collect())
}

/// Fences, waits until nothing is with the device, destroys.
pub fn end(fabric: &VerbsFabric, endpoints: &[EndpointId]) {
    endpoints.iter().for_each(|endpoint| fabric.fence(*endpoint));
    for endpoint in endpoints {
        until("a fenced endpoint becomes quiet", || fabric.is_quiet(*endpoint));
        fabric.destroy_endpoint(*endpoint);
    }
}

pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + WATCHDOG;
    while !condition() {
        assert!(Instant::now() < deadline, "waited {WATCHDOG:?} in vain: {what}");
        std::thread::yield_now();
    }
}

/// Polls until there are `count` completions.
pub fn completions(fabric: &VerbsFabric, count: usize) -> Vec<Completion> {
    let mut found = Vec::new();
    let mut out = [Completion::EMPTY; 16];
    until(&format!("{count} completions"), || {
        let n = fabric.poll(&mut out);
        found.extend_from_slice(&out[..n]);
        found.len() >= count
    });
    found
}

/// Two hosts for the suite; at its end nothing may be left of them on the devices.
pub struct OnFake {
    inner: Option<InProcess>,
    fake: Fake,
}

impl OnFake {
    pub fn new(config: FakeConfig, settings: &[(&str, &str)]) -> OnFake {
        let fake = Fake::new(config);
        let [a, b] = ["fake0", "fake1"].map(|device| fabric(&fake, &[device], settings));
        OnFake { inner: Some(InProcess::new(a, b)), fake }
    }

    fn inner(&self) -> &InProcess {
        self.inner.as_ref().expect("it is there until the end")
    }
}

impl Harness for OnFake {
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

impl Drop for OnFake {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        drop(self.inner.take());
        for device in ["fake0", "fake1"] {
            assert_eq!(self.fake.device(device).live(), Live::default(), "left behind on {device}");
        }
    }
}
