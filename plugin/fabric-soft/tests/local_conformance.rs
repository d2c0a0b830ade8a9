//! The suite of the fabric seam on the local fabric: two fabrics in one process.

use baton_fabric::conformance::InProcess;
use baton_fabric_soft::local::{LocalConfig, LocalFabric};

fn pair() -> InProcess {
    let fabric = || LocalFabric::new(LocalConfig::default()).expect("a local fabric");
    InProcess::new(fabric(), fabric())
}

baton_fabric::conformance_tests!(pair());
