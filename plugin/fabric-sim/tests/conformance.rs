//! The simulator is a fabric like any other.

use baton_fabric::Fabric;
use baton_fabric::conformance::Harness;
use baton_fabric_sim::{SimConfig, SimWorld};
use std::sync::Arc;

struct Simulated(SimWorld);

impl Harness for Simulated {
    fn fabric(&self, side: usize) -> Arc<dyn Fabric> {
        self.0.fabric(side)
    }

    fn alloc(&self, side: usize, len_bytes: usize) -> u64 {
        self.0.alloc(side, len_bytes)
    }

    fn store(&self, side: usize, addr: u64, bytes: &[u8]) {
        self.0.store(side, addr, bytes);
    }

    fn load(&self, side: usize, addr: u64, bytes: &mut [u8]) {
        self.0.load(side, addr, bytes);
    }

    fn step(&self) {
        self.0.step();
    }
}

baton_fabric::conformance_tests!(Simulated(SimWorld::new(7, SimConfig::default())));

/// With messages received in two steps.
mod headed {
    use super::*;

    baton_fabric::conformance_tests!(Simulated(SimWorld::new(
        7,
        SimConfig { headed_bytes: 1 << 20, ..SimConfig::default() }
    )));
}
