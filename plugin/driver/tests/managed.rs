//! Memory that the engine allocates: what it is, how it moves, what is refused, and how it ends.

mod common;

use baton_core::wire::ConnInfo;
use baton_driver::{Code, Desc, Driver, MAX_MANAGED_BYTES, Status};
use baton_fabric::{Memory, MemoryKind, Op};
use common::*;
use serde_json::Value;
use std::net::TcpListener;
use std::time::Instant;

/// A managed buffer; its descriptors are like any region's.
struct Managed {
    addr: u64,
    len: usize,
    region: u64,
    inode: String,
}

fn ask(len_bytes: u64) -> Memory {
    let (kind, device) = (MemoryKind::Dram, 0);
    Memory {
        addr: 0,
        len_bytes,
        kind,
        device,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    }
}

impl Managed {
    fn new(engine: &Driver, len: usize) -> Managed {
        let mut memory = ask(len as u64);
        let region = engine.alloc_managed(&mut memory).expect("alloc");
        Managed { addr: memory.addr, len, region, inode: inode_at(memory.addr) }
    }

    fn fill(&self, seed: u8) {
        for i in 0..self.len {
            // SAFETY: inside the buffer; no transfer runs.
            unsafe { ((self.addr as usize + i) as *mut u8).write_volatile(pattern(seed, i)) };
        }
    }

    fn read(&self) -> Vec<u8> {
        // SAFETY: inside the buffer; volatile because a fabric wrote it.
        (0..self.len).map(|i| unsafe { ((self.addr as usize + i) as *const u8).read_volatile() }).collect()
    }

    fn desc(&self, offset: usize, len: usize, region: u64) -> Desc {
        Desc { addr: self.addr + offset as u64, len_bytes: len as u64, region, reserved: 0 }
    }
}

fn pattern(seed: u8, at: usize) -> u8 {
    (at as u8).wrapping_mul(31).wrapping_add(seed).wrapping_add((at >> 8) as u8)
}

fn stats(engine: &Driver) -> Value {
    let stats: Value = serde_json::from_str(&engine.stats()).expect("JSON");
    stats["managed"].clone()
}

/// Inode of the file behind a mapped address: addresses are used again, also by other tests.
fn inode_at(addr: u64) -> String {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let holds = |line: &&str| {
        let (range, _) = line.split_once(' ').unwrap_or_default();
        let (from, to) = range.split_once('-').unwrap_or_default();
        let number = |text| u64::from_str_radix(text, 16).unwrap_or(0);
        (number(from)..number(to)).contains(&addr)
    };
    let line = maps.lines().find(holds).expect("a mapping");
    line.split_whitespace().nth(4).expect("an inode").to_owned()
}

impl Managed {
    /// By its engine, or by a peer in this process.
    fn is_mapped(&self) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        maps.lines()
            .any(|line| line.contains("baton-managed") && line.split_whitespace().nth(4) == Some(&self.inode))
    }

    fn wait_until_unmapped(&self, peer: &Driver) {
        let deadline = Instant::now() + WATCHDOG;
        while self.is_mapped() {
            peer.progress().expect("progress");
            assert!(Instant::now() < deadline, "still mapped: {}", peer.stats());
            std::thread::yield_now();
        }
    }
}

/// Every block but the first and the last moves, in reverse order; those two stay as they were.
fn moves_every_byte_and_no_other(fabric: &str, op: Op) {
    const BLOCK: usize = 40_000;
    const BLOCKS: usize = 24;
    let (a, b) = pair(&[fabric]);
    let (ours, theirs) = (Managed::new(&a, BLOCK * BLOCKS), Managed::new(&b, BLOCK * BLOCKS));
    for memory in [&ours, &theirs] {
        assert_eq!(memory.addr % 4096, 0);
        assert!(memory.read().iter().all(|byte| *byte == 0), "it begins with zeroes");
    }
    ours.fill(1);
    theirs.fill(2);
    let imported = a.import("b", &b.export(theirs.region).expect("export")).expect("import");
    let inner = 1..BLOCKS - 1;
    let locals: Vec<_> = inner.clone().map(|i| ours.desc(i * BLOCK, BLOCK, ours.region)).collect();
    let remotes: Vec<_> = inner.rev().map(|i| theirs.desc(i * BLOCK, BLOCK, imported)).collect();
    let xfer = a.create_xfer(op, "b", &locals, &remotes).expect("create");
    for round in 0..3u8 {
        ours.fill(3 + round);
        theirs.fill(100 + round);
        a.post(&xfer, Some(b"moved")).expect("post");
        done(&a, &xfer);
        assert_eq!(notification(&b).message, b"moved");
        let (target, from, to) = match op {
            Op::Write => (&theirs, 3 + round, 100 + round),
            Op::Read => (&ours, 100 + round, 3 + round),
        };
        for (i, byte) in target.read().into_iter().enumerate() {
            let (block, inside) = (i / BLOCK, i % BLOCK);
            let moved = (1..BLOCKS - 1).contains(&block);
            let expected =
                if moved { pattern(from, (BLOCKS - 1 - block) * BLOCK + inside) } else { pattern(to, i) };
            assert_eq!(byte, expected, "round {round}, byte {i}");
        }
    }
    drop(xfer);
    a.free_managed(ours.region).expect("free");
    b.free_managed(theirs.region).expect("free");
    // A peer that has it mapped lets go as soon as it hears of that.
    ours.wait_until_unmapped(&b);
    theirs.wait_until_unmapped(&a);
    assert_eq!((stats(&a)["buffers"].as_u64(), stats(&a)["bytes"].as_u64()), (Some(0), Some(0)));
}

#[test]
fn a_write_between_managed_buffers_moves_every_byte_and_no_other() {
    for fabric in ["local", "tcp", "verbs", "local two-sided", "tcp two-sided"] {
        moves_every_byte_and_no_other(fabric, Op::Write);
    }
}

#[test]
fn a_read_between_managed_buffers_moves_every_byte_and_no_other() {
    for fabric in ["local", "tcp", "verbs", "local two-sided", "tcp two-sided"] {
        moves_every_byte_and_no_other(fabric, Op::Read);
    }
}

#[test]
fn managed_and_registered_memory_mix_in_one_transfer_and_within_an_engine() {
    let (a, b) = pair(&["local"]);
    let (ours, theirs) = (Managed::new(&a, 65536), Buffer::new(&b, 65536, 7));
    let own = Buffer::new(&a, 65536, 9);
    ours.fill(5);
    let imported = import(&a, "b", &b, &theirs);
    let locals = [ours.desc(0, 32768, ours.region), own.desc(32768, 32768, own.region)];
    let remotes = [theirs.desc(0, 32768, imported), theirs.desc(32768, 32768, imported)];
    let xfer = a.create_xfer(Op::Write, "b", &locals, &remotes).expect("create");
    a.post(&xfer, None).expect("post");
    done(&a, &xfer);
    let expected: Vec<u8> = ours.read()[..32768].iter().chain(&own.read()[32768..]).copied().collect();
    assert_eq!(theirs.read(), expected);
    theirs.assert_guards();
    let itself = a.import("a", &a.export(ours.region).expect("export")).expect("import");
    let xfer = a
        .create_xfer(Op::Read, "a", &[own.desc(0, 65536, own.region)], &[ours.desc(0, 65536, itself)])
        .expect("create");
    a.post(&xfer, None).expect("post");
    done(&a, &xfer);
    assert_eq!(own.read(), ours.read());
    own.assert_guards();
}

#[test]
fn what_makes_no_sense_is_refused_by_name_and_leaves_nothing_behind() {
    let engine = engine("a", &["local"]);
    let refused = |memory: Memory| engine.alloc_managed(&mut { memory }).expect_err("refused");
    assert_eq!(refused(ask(0)).code, Code::InvalidParam);
    assert_eq!(refused(Memory { addr: 4096, ..ask(4096) }).code, Code::InvalidParam);
    assert_eq!(refused(Memory { kind: MemoryKind::Vram, ..ask(4096) }).code, Code::Unsupported);
    for too_much in [MAX_MANAGED_BYTES + 1, u64::MAX] {
        let error = refused(ask(too_much));
        assert_eq!(error.code, Code::Limit);
        assert!(
            error.text.contains("MAX_MANAGED_BYTES") && error.text.contains(&too_much.to_string()),
            "{error}"
        );
    }
    // More than any machine of ours has, and less than the limit.
    let error = refused(ask(MAX_MANAGED_BYTES));
    assert_eq!(error.code, Code::Limit, "{error}");
    let own = Buffer::new(&engine, 4096, 1);
    let error = engine.free_managed(own.region).expect_err("not managed");
    assert!(error.code == Code::InvalidParam && error.text.contains("deregister"), "{error}");
    assert_eq!(engine.free_managed(4242).expect_err("unknown").code, Code::NotFound);
    engine.deregister(own.region).expect("it is still there");
    let empty = stats(&engine);
    assert_eq!((empty["buffers"].as_u64(), empty["bytes"].as_u64()), (Some(0), Some(0)), "{empty}");
}

#[test]
fn managed_memory_is_freed_once_and_never_deregistered() {
    let engine = engine("a", &["local"]);
    let buffer = Managed::new(&engine, 10_000);
    buffer.fill(3);
    let error = engine.deregister(buffer.region).expect_err("managed");
    assert!(error.code == Code::InvalidParam && error.text.contains("free_managed"), "{error}");
    assert!(engine.export(buffer.region).is_ok() && buffer.is_mapped(), "the refusal changed nothing");
    let counted = stats(&engine);
    assert_eq!((counted["buffers"].as_u64(), counted["bytes"].as_u64()), (Some(1), Some(10_000)));
    assert_eq!(counted["mapped_bytes"].as_u64(), Some(12_288));
    engine.free_managed(buffer.region).expect("free");
    assert!(!buffer.is_mapped());
    assert_eq!(engine.free_managed(buffer.region).expect_err("freed").code, Code::NotFound);
    assert_eq!(engine.deregister(buffer.region).expect_err("freed").code, Code::NotFound);
    assert_eq!(engine.export(buffer.region).expect_err("freed").code, Code::NotFound);
}

#[test]
fn a_request_on_a_freed_buffer_is_refused_on_either_side() {
    let (a, b) = pair(&["local"]);
    let (ours, theirs) = (Managed::new(&a, 8192), Managed::new(&b, 8192));
    let imported = a.import("b", &b.export(theirs.region).expect("export")).expect("import");
    let locals = [ours.desc(0, 8192, ours.region)];
    let remotes = [theirs.desc(0, 8192, imported)];
    let xfer = a.create_xfer(Op::Write, "b", &locals, &remotes).expect("create");
    a.post(&xfer, None).expect("post");
    done(&a, &xfer);
    b.free_managed(theirs.region).expect("free");
    assert!(a.post(&xfer, None).is_err() || !matches!(wait(&a, &xfer), Status::Done));
    a.free_managed(ours.region).expect("free");
    assert_eq!(a.post(&xfer, None).expect_err("freed").code, Code::NotFound);
}

#[test]
fn a_buffer_that_a_transfer_still_uses_stays_mapped_and_is_freed_by_a_later_call() {
    let (a, b) = (engine("a", &["local"]), engine("b", &["local"]));
    // Nobody answers there: the transfer waits for its session.
    let mute = TcpListener::bind("127.0.0.1:0").expect("bind");
    let mut info = ConnInfo::decode(b.conn_info()).expect("information");
    info.candidates = vec![mute.local_addr().expect("address").to_string()];
    a.load_remote(Some("b"), &info.encode().expect("encode")).expect("load");
    let (ours, theirs) = (Managed::new(&a, 8192), Managed::new(&b, 8192));
    ours.fill(9);
    let imported = a.import("b", &b.export(theirs.region).expect("export")).expect("import");
    let locals = [ours.desc(0, 8192, ours.region)];
    let remotes = [theirs.desc(0, 8192, imported)];
    let xfer = a.create_xfer(Op::Write, "b", &locals, &remotes).expect("create");
    a.post(&xfer, None).expect("post");
    let error = a.free_managed(ours.region).expect_err("in use");
    assert!(error.code == Code::Busy && error.text.contains("free it again"), "{error}");
    assert!(ours.is_mapped() && ours.read()[1] == pattern(9, 1), "it is as it was");
    let counted = stats(&a);
    assert_eq!((counted["buffers"].as_u64(), counted["frees_unfinished"].as_u64()), (Some(1), Some(1)));
    assert!(matches!(a.status(&xfer), Status::InProgress), "the free ended no transfer of others");
    a.cancel(&xfer).expect("cancel");
    assert!(matches!(wait(&a, &xfer), Status::Failed(_)));
    a.free_managed(ours.region).expect("free");
    assert!(!ours.is_mapped() && stats(&a)["buffers"].as_u64() == Some(0));
}

#[test]
fn a_forked_child_does_not_get_it() {
    let engine = engine("a", &["local"]);
    let buffer = Managed::new(&engine, 8192);
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let ours = |line: &&str| line.contains("baton-managed") && line.contains(&buffer.inode);
    let behind = maps.lines().skip_while(|line| !ours(line)).find(|line| line.starts_with("VmFlags:"));
    let flags = behind.expect("flags");
    // "dc": do not copy on fork.
    assert!(flags.split_whitespace().any(|flag| flag == "dc"), "{flags}");
}

/// Huge pages that the system has in reserve, and whether shared memory may get transparent ones.
fn huge_pages_here() -> (u64, bool) {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = meminfo.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
    let free = free.and_then(|rest| rest.trim().parse().ok()).unwrap_or(0);
    let shared = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let shared = std::fs::read_to_string(shared).unwrap_or("[never]".into());
    (free, !shared.contains("[never]") && !shared.contains("[deny]"))
}

#[test]
fn huge_pages_are_used_where_there_are_some_and_doing_without_them_is_counted() {
    // Not whole pages.
    const LEN: usize = (4 << 20) - 100;
    let (a, b) = pair(&["local"]);
    let small = Managed::new(&a, 4096);
    let kinds = ["on_reserved_huge_pages", "on_transparent_huge_pages", "huge_page_fallbacks"];
    let count = || {
        let now = stats(&a);
        kinds.map(|kind| now[kind].as_u64().expect("a number"))
    };
    assert_eq!(count(), [0, 0, 0], "a page is not worth it");
    let (reserved, transparent) = huge_pages_here();
    let (ours, theirs) = (Managed::new(&a, LEN), Managed::new(&b, LEN));
    let expected = match (reserved, transparent) {
        (4.., _) => [1, 0, 0],
        (0, true) => [0, 1, 0],
        (0, false) => [0, 0, 1],
        // Somebody else may be as quick.
        _ => count(),
    };
    assert_eq!((count(), count().iter().sum::<u64>()), (expected, 1), "{reserved} pages in reserve");
    ours.fill(1);
    let imported = a.import("b", &b.export(theirs.region).expect("export")).expect("import");
    let write = a.create_xfer(
        Op::Write,
        "b",
        &[ours.desc(0, LEN - 1, ours.region)],
        &[theirs.desc(1, LEN - 1, imported)],
    );
    let write = write.expect("create");
    a.post(&write, None).expect("post");
    done(&a, &write);
    let (sent, got) = (ours.read(), theirs.read());
    assert_eq!((got[0], &got[1..]), (0, &sent[..LEN - 1]));
    for buffer in [&small, &ours] {
        a.free_managed(buffer.region).expect("free");
    }
    b.free_managed(theirs.region).expect("free");
    ours.wait_until_unmapped(&b);
}

#[test]
fn the_engines_end_frees_what_the_host_has_left() {
    let (a, b) = pair(&["local"]);
    let buffers: Vec<_> = (0..3).map(|_| Managed::new(&a, 1 << 20)).collect();
    let theirs = Managed::new(&b, 1 << 20);
    let imported = a.import("b", &b.export(theirs.region).expect("export")).expect("import");
    let xfer = a
        .create_xfer(
            Op::Write,
            "b",
            &[buffers[1].desc(0, 1 << 20, buffers[1].region)],
            &[theirs.desc(0, 1 << 20, imported)],
        )
        .expect("create");
    a.post(&xfer, None).expect("post");
    // Whether it is over or not: the end ends it first.
    a.destroy().expect("destroy");
    assert!(!buffers[0].is_mapped() && !buffers[2].is_mapped(), "buffers of an engine that is gone");
    buffers[1].wait_until_unmapped(&b);
    assert!(theirs.is_mapped());
    assert_eq!(a.alloc_managed(&mut ask(1)).expect_err("destroyed").code, Code::Shutdown);
}
