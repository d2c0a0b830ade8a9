//! The common suite of all fabrics, on TCP over the loopback interface.

use std::sync::Arc;

use baton_fabric::Fabric;
use baton_fabric::conformance::InProcess;
use baton_fabric_soft::tcp::{TcpConfig, TcpFabric};

fn fabric(io_threads: usize) -> Arc<dyn Fabric> {
    TcpFabric::new(TcpConfig { io_threads, ..TcpConfig::default() }).expect("a TCP fabric")
}

baton_fabric::conformance_tests!(InProcess::new(fabric(0), fabric(0)));

/// With threads that send bulk beside the callers.
mod io_threads {
    use super::{InProcess, fabric};

    baton_fabric::conformance_tests!(InProcess::new(fabric(2), fabric(2)));
}
