//! The suite of the fabric seam on real devices: `BATON_TEST_DEVICES=first,second` (in the guest rxe0,rxe1) names them.

use baton_fabric::Fabric;
use baton_fabric::conformance::InProcess;
use baton_fabric_verbs::{VerbsConfig, VerbsFabric};
use std::sync::Arc;

fn fabric(device: &str) -> Arc<dyn Fabric> {
    let mut config = VerbsConfig::default();
    for (key, value) in [("devices", device), ("ib_timeout", "18")] {
        assert!(config.set(key, value).expect("a valid setting"), "setting {key} exists");
    }
    VerbsFabric::open(config).unwrap_or_else(|e| panic!("device {device}: {e}"))
}

fn pair() -> InProcess {
    let named = std::env::var("BATON_TEST_DEVICES");
    let named =
        named.ok().or_else(|| std::env::var_os("RDMA_VM").map(|_| "rxe0,rxe1".to_owned())).expect("devices");
    let (first, second) = named.split_once(',').expect("two devices");
    InProcess::new(fabric(first), fabric(second))
}

baton_fabric::conformance_tests!(
    #[ignore = "needs RDMA devices: cargo xtask test --only guest"]
    pair()
);
