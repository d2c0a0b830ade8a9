//! Memory of accelerators, through two engines on model RDMA devices and a fake libcuda. Untried on a GPU.

mod common;
#[path = "../../fabric-verbs/tests/fake_support/cuda.rs"]
mod cuda;

use baton_driver::{Code, Config, Desc, Driver, NotifyMode, Xfer};
use baton_fabric::{Fabric, Memory, MemoryKind, Op};
use baton_fabric_verbs::{VerbsConfig, VerbsFabric};
use baton_verbs::fake::{Fake, FakeConfig};
use common::*;
use cuda::Vram;
use std::sync::Arc;

/// An engine over RDMA on a host with a GPU.
fn engine_with_gpu(fake: &Fake, name: &str, device: &str, notify: NotifyMode) -> Driver {
    let config_of_fabric = VerbsConfig { ib_timeout: 10, ib_retry: 2, ..VerbsConfig::default() };
    let found = || cuda::host(cuda::api(), "");
    let fabric = VerbsFabric::with_accelerators(&fake.library_of(&[device]), config_of_fabric, found);
    let fabric: Arc<dyn Fabric> = fabric.expect("a fabric");
    Driver::create(Config { notify, ..config(name, 0) }, vec![fabric]).expect("engine")
}

fn register(engine: &Driver, addr: u64, len: usize) -> Result<u64, baton_driver::Error> {
    engine.register(&Memory {
        addr,
        len_bytes: len as u64,
        kind: MemoryKind::Vram,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    })
}

fn desc(addr: u64, len: usize, region: u64) -> Desc {
    Desc { addr, len_bytes: len as u64, region, reserved: 0 }
}

fn told_with_its_bytes(notify: NotifyMode) {
    let fake = Fake::new(FakeConfig::default());
    let (a, b) = (engine_with_gpu(&fake, "a", "fake0", notify), engine_with_gpu(&fake, "b", "fake1", notify));
    a.load_remote(Some("b"), b.conn_info()).expect("load b");
    b.load_remote(Some("a"), a.conn_info()).expect("load a");
    // Over all lanes.
    let len = 2 << 20;
    let gpu = Vram::new(len, 0, true);
    let theirs = register(&b, gpu.addr, len).expect("register");
    let imported = a.import("b", &b.export(theirs).expect("export")).expect("import");
    let mut mine = Buffer::new(&a, len, 0);
    let write = |len: usize| -> Arc<Xfer> {
        let (local, remote) = (mine.desc(0, len, mine.region), desc(gpu.addr, len, imported));
        a.create_xfer(Op::Write, "b", &[local], &[remote]).expect("create")
    };
    let (long, short) = (write(len), write(300));
    for round in 1..=30u8 {
        mine.fill(round);
        let (xfer, len) = if round % 3 == 0 { (&long, len) } else { (&short, 300) };
        if round % 2 == 0 {
            a.post(xfer, Some(&[round])).expect("post");
        } else {
            // Told by another message once the transfer is over.
            a.post(xfer, None).expect("post");
            done(&a, xfer);
            a.notify("b", &[round]).expect("notify");
        }
        assert_eq!(notification(&b).message, [round]);
        let wrong = gpu.bytes(0, len).iter().position(|byte| *byte != round);
        assert_eq!(wrong, None, "round {round}, {len} bytes, the first that is not there");
        done(&a, xfer);
    }
    mine.assert_guards();
    let stats: serde_json::Value = serde_json::from_str(&b.stats()).expect("JSON");
    assert_eq!(stats["memory"], serde_json::json!(["dram", "vram"]));
    let flushes = &stats["fabrics"]["verbs"]["accelerators"];
    assert!(flushes["flushes"].as_u64() >= Some(30) && flushes["receives_dropped"] == 0, "{flushes}");
    b.deregister(theirs).expect("deregister");
    for engine in [a, b] {
        engine.destroy().expect("destroy");
    }
}

#[test]
fn what_a_notification_tells_of_is_visible_in_a_gpus_memory() {
    told_with_its_bytes(NotifyMode::Immediate);
}

#[test]
fn what_a_notification_tells_of_is_visible_also_where_it_comes_by_a_send() {
    told_with_its_bytes(NotifyMode::Send);
}

#[test]
fn a_transfer_of_an_engine_to_itself_with_a_gpus_memory_is_refused_by_name() {
    let fake = Fake::new(FakeConfig::default());
    let a = engine_with_gpu(&fake, "a", "fake0", NotifyMode::Immediate);
    let gpu = Vram::new(4096, 1, false);
    let region = register(&a, gpu.addr, 4096).expect("register");
    let buffer = Buffer::new(&a, 4096, 1);
    let imported = a.import("a", &a.export(region).expect("export")).expect("import");
    let own = a.import("a", &a.export(buffer.region).expect("export")).expect("import");
    for (local, remote) in [
        (buffer.desc(0, 4096, buffer.region), desc(gpu.addr, 4096, imported)),
        (desc(gpu.addr, 4096, region), buffer.desc(0, 4096, own)),
    ] {
        let refused = a.create_xfer(Op::Read, "a", &[local], &[remote]).err().expect("refused");
        assert_eq!(refused.code, Code::Unsupported);
        let place = format!("4096 bytes at {:#x} of accelerator 0", gpu.addr);
        assert!(refused.text.contains(&place) && refused.text.contains("cudaMemcpy"), "{refused}");
    }
    a.destroy().expect("destroy");
}

#[test]
fn an_engine_without_a_way_to_a_gpus_memory_says_so_for_each_fabric() {
    let without = VerbsFabric::with_library(
        &Fake::new(FakeConfig::default()).library_of(&["fake0"]),
        VerbsConfig::default(),
    );
    let verbs: Arc<dyn Fabric> = without.expect("a fabric");
    let config = Config { notes: vec!["other: no such device".to_owned()], ..config("a", 0) };
    let a = Driver::create(config, vec![verbs, fabric("local"), fabric("tcp")]).expect("engine");
    let refused = register(&a, 0x7000_0000, 4096).expect_err("refused");
    assert_eq!(refused.code, Code::Unsupported);
    for reason in [
        "fabric verbs: not supported: memory of accelerators cannot be registered here: they were not looked for",
        "fabric local: not supported: the software fabric registers host memory only",
        "fabric tcp: not supported: the software fabric registers host memory only",
        "not in use: other: no such device",
    ] {
        assert!(refused.text.contains(reason), "{refused}");
    }
    let stats: serde_json::Value = serde_json::from_str(&a.stats()).expect("JSON");
    assert_eq!(stats["memory"], serde_json::json!(["dram"]));
    a.destroy().expect("destroy");
}
