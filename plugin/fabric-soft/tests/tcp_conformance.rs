//! The common suite of all fabrics, on TCP over the loopback interface.

use std::sync::Arc;

use baton_fabric::Fabric;
use baton_fabric::conformance::InProcess;
use baton_fabric_soft::tcp::{TcpConfig, TcpFabric};

fn fabric() -> Arc<dyn Fabric> {
    TcpFabric::new(TcpConfig::default()).expect("a TCP fabric")
}

baton_fabric::conformance_tests!(InProcess::new(fabric(), fabric()));
