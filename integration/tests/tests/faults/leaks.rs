//! What a process has, counted before and after many cycles.

use baton_host::Op;
use baton_tests::{Block, Remote, wait_for};

use crate::{agent, befriend, node, on_each_fabric};

/// Descriptors, threads, mappings and resident memory of this process.
#[derive(Debug)]
pub struct Census {
    descriptors: usize,
    threads: usize,
    mappings: usize,
    resident_kib: usize,
}

/// Threads that engines which live on start when they first need them, to copy.
const THREADS_SLACK: usize = 8;
/// Mappings that the allocator and thread stacks may have more than before.
const MAPPINGS_SLACK: usize = 32;
/// What the allocator may have more than before.
const RESIDENT_SLACK_KIB: usize = 12 << 10;

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory).expect("a directory").count()
}

/// Names of this process's threads.
pub fn thread_names() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("a directory").flatten();
    // One that has just ended has no name.
    tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok()).collect()
}

/// Waits until no thread of an engine is left: one that has been joined is not at once off the kernel's list.
pub fn assert_no_engine_threads() {
    wait_for("the end of the engine's threads", || {
        (!thread_names().iter().any(|name| name.starts_with("baton-"))).then_some(())
    });
}

impl Census {
    pub fn take() -> Census {
        let status = std::fs::read_to_string("/proc/self/status").expect("status");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
        Census {
            descriptors: entries("/proc/self/fd"),
            threads: entries("/proc/self/task"),
            mappings: std::fs::read_to_string("/proc/self/maps").expect("maps").lines().count(),
            resident_kib: resident.trim().trim_end_matches(" kB").parse().expect("a number"),
        }
    }

    fn grown(&self) -> Option<Census> {
        let now = Census::take();
        let flat = now.descriptors <= self.descriptors
            && now.threads <= self.threads + THREADS_SLACK
            && now.mappings <= self.mappings + MAPPINGS_SLACK
            && now.resident_kib <= self.resident_kib + RESIDENT_SLACK_KIB;
        (!flat).then_some(now)
    }

    /// Panics unless the process has, or soon has, no more than it had.
    pub fn assert_flat(&self, after: &str) {
        let start = std::time::Instant::now();
        while let Some(now) = self.grown() {
            assert!(start.elapsed().as_secs() < 20, "after {after}: {now:?}; before: {self:?}");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

on_each_fabric! {
    fn a_hundred_peers_come_transfer_and_go_and_nothing_grows(fabric) {
        let a = node("a", fabric);
        let here = Block::new(&a.engine, 65536, 1).expect("register");
        let cycle = |i: u64| {
            let b = node("b", fabric);
            befriend((&a, "a"), (&b, "b"));
            let there = Block::new(&b.engine, 65536, 2).expect("register");
            let blob = there.region().export().expect("export");
            let remote = Remote::import(&a, "b", &blob, there.region().addr()).expect("import");
            here.fill(i);
            let write = a.scattered(Op::Write, &here, &remote, 4096).expect("create");
            a.run(&write, Some(b"one"));
            b.expect_notification("a", b"one");
            there.assert_holds_reversed(i, 4096, "at the target");
            match i % 3 {
                0 => a.engine.disconnect("b").expect("disconnect"),
                1 => b.engine.disconnect("a").expect("disconnect"),
                _ => {}
            }
        };
        (0..20).for_each(cycle);
        let before = Census::take();
        (20..120).for_each(cycle);
        before.assert_flat("100 peers");
        let stats = a.stats();
        let known = stats["peers"].as_array().map(Vec::len);
        assert!(known.is_some_and(|n| n <= 2), "peers that are gone are kept: {stats}");
    }

    fn a_hundred_sessions_with_one_process_end_and_begin_and_nothing_grows(fabric) {
        let (a, mut b) = (node("a", fabric), agent("b", fabric));
        b.befriend(&a, "a");
        let (here, there) = (Block::new(&a.engine, 65536, 1).expect("register"), b.block(65536, 2));
        let info = b.info();
        // With work under way the session ends; what was posted ends with it. Where it was done already the session stays, for the
        // peer's work.
        let mut cycle = |i: u64, parts: bool| {
            a.load("b", &info);
            let remote = b.import_into(&a, &there);
            here.fill(i);
            let write = a.scattered(Op::Write, &here, &remote, 4096).expect("create");
            a.run(&write, None);
            b.assert_holds(&there, i, Some(4096), "at the target");
            if parts {
                write.post(None).expect("post");
                a.engine.disconnect("b").expect("disconnect");
                drop(a.finish(&write));
            }
        };
        (0..20).for_each(|i| cycle(i, true));
        // Counted while a session is open: whether a parting leaves one is chance.
        cycle(20, false);
        let before = Census::take();
        (21..120).for_each(|i| cycle(i, true));
        cycle(120, false);
        before.assert_flat("100 sessions");
    }
}
