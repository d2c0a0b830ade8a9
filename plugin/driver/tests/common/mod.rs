//! Two engines in one process over a software fabric, and memory with sentinels around it.

// Each test binary uses its part of this.
#![allow(dead_code)]

pub mod pages;
pub mod rails;
pub mod verbs;

use baton_driver::{Config, Desc, Driver, Notification, NotifyMode, Status, Xfer};
use baton_fabric::{Fabric, Memory, MemoryKind, Op};
use baton_fabric_soft::local::{LocalConfig, LocalFabric};
use baton_fabric_soft::tcp::{TcpConfig, TcpFabric};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Every wait of these tests ends after this long at the latest.
pub const WATCHDOG: Duration = Duration::from_secs(20);
/// Behind a fabric's name: engines that use SENDs in place of immediates.
const SENDS: &str = " send";
/// Behind a fabric's name: engines that offer the two-sided backend alone.
const TWO_SIDED: &str = " two-sided";
/// Behind a fabric's name: engines that offer both backends.
const AUTO: &str = " auto";
/// Bytes around each buffer that nothing may touch.
const GUARD: usize = 64;

pub fn fabric(name: &str) -> Arc<dyn Fabric> {
    match name.trim_end_matches(SENDS).trim_end_matches(TWO_SIDED).trim_end_matches(AUTO) {
        "local" => LocalFabric::new(LocalConfig::default()).expect("local fabric"),
        "tcp" => TcpFabric::new(TcpConfig::default()).expect("tcp fabric"),
        kind if kind.starts_with("verbs") => verbs::fabric(kind),
        other => panic!("no fabric {other}"),
    }
}

pub fn config(name: &str, spin_us: u32) -> Config {
    Config {
        agent_name: name.to_owned(),
        backends: baton_driver::Backends { one_sided: true, two_sided: false },
        requested: "test".to_owned(),
        notes: Vec::new(),
        listen: None,
        candidates: Vec::new(),
        progress_thread: true,
        spin_us,
        notify: NotifyMode::Immediate,
        notify_only: None,
        timeout_scale: 1,
        copy_threads: 2,
        chunk_bytes: 4 << 20,
        thread_start: None,
    }
}

pub fn engine(name: &str, fabrics: &[&str]) -> Driver {
    engine_that_spins(name, fabrics, 0)
}

/// With a progress thread that spins for so long.
pub fn engine_that_spins(name: &str, fabrics: &[&str], spin_us: u32) -> Driver {
    engine_as(config(name, spin_us), fabrics)
}

/// With deadlines ten times as long.
pub fn patient_engine(name: &str, fabrics: &[&str]) -> Driver {
    engine_as(Config { timeout_scale: 10, ..config(name, 0) }, fabrics)
}

fn engine_as(config: Config, fabrics: &[&str]) -> Driver {
    let sends = fabrics.iter().any(|name| name.ends_with(SENDS));
    let notify = if sends { NotifyMode::Send } else { NotifyMode::Immediate };
    let two_sided = fabrics.iter().any(|name| name.ends_with(TWO_SIDED));
    let auto = fabrics.iter().any(|name| name.ends_with(AUTO));
    let backends = baton_driver::Backends { one_sided: !two_sided, two_sided: two_sided || auto };
    let fabrics = fabrics.iter().map(|name| fabric(name)).collect();
    Driver::create(Config { notify, backends, ..config }, fabrics).expect("engine")
}

/// Two engines that know each other.
pub fn pair(fabrics: &[&str]) -> (Driver, Driver) {
    let (a, b) = (engine("a", fabrics), engine("b", fabrics));
    a.load_remote(Some("b"), b.conn_info()).expect("load b");
    b.load_remote(Some("a"), a.conn_info()).expect("load a");
    (a, b)
}

/// Registered memory between two sentinels.
pub struct Buffer {
    bytes: Box<[u8]>,
    pub region: u64,
}

impl Buffer {
    pub fn new(engine: &Driver, len: usize, seed: u8) -> Buffer {
        Buffer::with_access(engine, len, seed, true, true)
    }

    pub fn with_access(
        engine: &Driver,
        len: usize,
        seed: u8,
        remote_read: bool,
        remote_write: bool,
    ) -> Buffer {
        let mut buffer = Buffer::unregistered(len, seed);
        let memory = Memory {
            addr: buffer.addr(),
            len_bytes: len as u64,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read,
            remote_write,
            ordered: false,
            mapped: false,
        };
        buffer.region = engine.register(&memory).expect("register");
        buffer
    }

    /// Memory that no engine knows.
    pub fn unregistered(len: usize, seed: u8) -> Buffer {
        let mut bytes = vec![0xA5u8; len + 2 * GUARD].into_boxed_slice();
        for (i, byte) in bytes[GUARD..GUARD + len].iter_mut().enumerate() {
            *byte = (i as u8).wrapping_mul(31).wrapping_add(seed).wrapping_add((i >> 8) as u8);
        }
        Buffer { bytes, region: baton_driver::NO_REGION }
    }

    pub fn len(&self) -> usize {
        self.bytes.len() - 2 * GUARD
    }

    pub fn addr(&self) -> u64 {
        self.bytes[GUARD..].as_ptr() as u64
    }

    /// The bytes, read anew: a fabric wrote them behind the compiler's back.
    pub fn read(&self) -> Vec<u8> {
        let inner = &self.bytes[GUARD..self.bytes.len() - GUARD];
        // SAFETY: the memory is ours; volatile because other threads wrote it.
        inner.iter().map(|byte| unsafe { std::ptr::from_ref(byte).read_volatile() }).collect()
    }

    /// First 64 bytes: transfers write in the order of remote addresses.
    pub fn read_first(&self) -> [u8; 64] {
        let at = GUARD;
        // SAFETY: inside our memory; volatile because other threads write it.
        unsafe { self.bytes[at..].as_ptr().cast::<[u8; 64]>().read_volatile() }
    }

    pub fn fill(&mut self, byte: u8) {
        let len = self.len();
        self.bytes[GUARD..GUARD + len].fill(byte);
    }

    pub fn assert_guards(&self) {
        let end = self.bytes.len() - GUARD;
        for (i, byte) in self.bytes[..GUARD].iter().chain(&self.bytes[end..]).enumerate() {
            // SAFETY: as above.
            let value = unsafe { std::ptr::from_ref(byte).read_volatile() };
            assert_eq!(value, 0xA5, "sentinel byte {i} was overwritten");
        }
    }

    pub fn desc(&self, offset: usize, len: usize, region: u64) -> Desc {
        Desc { addr: self.addr() + offset as u64, len_bytes: len as u64, region, reserved: 0 }
    }
}

/// A transfer of `blocks` pieces of `block` bytes, the remote ones in reverse order.
pub fn scattered(
    engine: &Driver,
    op: Op,
    peer: &str,
    local: &Buffer,
    remote: &Buffer,
    imported: u64,
    block: usize,
) -> Arc<Xfer> {
    let blocks = local.len() / block;
    let locals: Vec<_> = (0..blocks).map(|i| local.desc(i * block, block, local.region)).collect();
    let remotes: Vec<_> = (0..blocks).rev().map(|i| remote.desc(i * block, block, imported)).collect();
    engine.create_xfer(op, peer, &locals, &remotes).expect("create")
}

/// `bytes` with its blocks in reverse order.
pub fn reversed(bytes: &[u8], block: usize) -> Vec<u8> {
    bytes.chunks(block).rev().flatten().copied().collect()
}

pub fn wait(engine: &Driver, xfer: &Xfer) -> Status {
    let deadline = Instant::now() + WATCHDOG;
    loop {
        match engine.status(xfer) {
            Status::InProgress => assert!(Instant::now() < deadline, "still in progress: {}", engine.stats()),
            status => return status,
        }
        std::thread::yield_now();
    }
}

pub fn done(engine: &Driver, xfer: &Xfer) {
    let status = wait(engine, xfer);
    assert!(matches!(status, Status::Done), "{status:?}");
}

pub fn notification(engine: &Driver) -> Notification {
    let deadline = Instant::now() + WATCHDOG;
    loop {
        let mut taken = engine.take_notifications(1).expect("take");
        if let Some(n) = taken.pop() {
            return n;
        }
        assert!(Instant::now() < deadline, "no notification: {}", engine.stats());
        std::thread::yield_now();
    }
}

pub fn import(engine: &Driver, name: &str, owner: &Driver, buffer: &Buffer) -> u64 {
    engine.import(name, &owner.export(buffer.region).expect("export")).expect("import")
}
