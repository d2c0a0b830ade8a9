//! The suite of the fabric seam on model devices: usual ones, and each of the ways in which real ones differ.

mod fake_support;

use baton_verbs::fake::{FakeConfig, ReadTiming};
use fake_support::{OnFake, alike};

mod usual {
    use super::*;
    baton_fabric::conformance_tests!(OnFake::new(FakeConfig::default(), &[]));
}

/// READs that are executed as late as a missing fence would allow.
mod late_reads {
    use super::*;
    baton_fabric::conformance_tests!(OnFake::new(
        FakeConfig { read_timing: ReadTiming::Late, seed: 7, ..FakeConfig::default() },
        &[]
    ));
}

/// Small pieces in another order, and statuses as soft-RoCE reports them.
mod soft {
    use super::*;
    baton_fabric::conformance_tests!(OnFake::new(
        FakeConfig {
            soft_statuses: true,
            access_events: false,
            piece_bytes: 4096,
            seed: 3,
            ..FakeConfig::default()
        },
        &[]
    ));
}

/// Little inline, short messages, queues rounded up, a context of the old kind. (Less still than the suite needs is for the driver's tests.)
mod meagre {
    use super::*;
    baton_fabric::conformance_tests!(OnFake::new(
        FakeConfig {
            extended_context: false,
            ..alike(|device| {
                device.max_inline_bytes = 64;
                device.round_send_queue = true;
                device.ports[0].max_msg_bytes = 4 << 20;
            })
        },
        &[]
    ));
}

/// InfiniBand, with a library that lacks what is optional.
mod infiniband {
    use super::*;
    use baton_verbs::{GidType, LinkLayer};
    baton_fabric::conformance_tests!(OnFake::new(
        FakeConfig {
            old_library: true,
            ..alike(|device| {
                let port = &mut device.ports[0];
                port.link_layer = LinkLayer::InfiniBand;
                port.lid = device.name.bytes().last().map_or(1, |last| u16::from(last) + 1);
                let gid = port.gids.remove(0).map(|gid| gid.of_kind(GidType::Ib));
                port.gids = vec![gid];
            })
        },
        &[]
    ));
}
