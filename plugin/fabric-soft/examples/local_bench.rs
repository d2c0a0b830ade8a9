//! Two processes, stop and wait: 128 pieces per transfer, WRITE with immediate and READ, over the local fabric.
//!
//! `cargo run --release -p baton-fabric-soft --example local_bench [lanes] [sleep] [warm] [threads=N]`; with `sleep` the target sleeps on its
//! event descriptor instead of polling, with `warm` every transfer uses the same blocks.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_fabric::*;
use baton_fabric_soft::local::{LocalConfig, LocalFabric};
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::{Value, json};

const PIECES: usize = 128;
const MEMORY: usize = 256 << 20;
const DEPTH: u32 = 1024;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).is_some_and(|arg| arg == "target") {
        return target(args.iter().any(|arg| arg == "sleep"));
    }
    let lanes = args.iter().find_map(|arg| arg.parse().ok()).unwrap_or(0);
    initiator(lanes, args.iter().any(|arg| arg == "warm"));
}

/// Memory of whole pages, touched.
fn memory(fabric: &dyn Fabric, fill: u8) -> (u64, Keys) {
    let bytes = vec![fill; MEMORY + 4096].leak();
    let memory = Memory {
        addr: (bytes.as_ptr() as u64).next_multiple_of(4096),
        len_bytes: MEMORY as u64,
        kind: MemoryKind::Dram,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    };
    (memory.addr, fabric.register(&memory).expect("register"))
}

fn open() -> Arc<LocalFabric> {
    let mut config = LocalConfig { ptrace_any: true, ..LocalConfig::default() };
    if let Some(threads) = std::env::args().find_map(|arg| arg.strip_prefix("threads=")?.parse().ok()) {
        config.copy_threads = threads;
    }
    LocalFabric::new(config).expect("the local fabric")
}

fn endpoints(fabric: &dyn Fabric, lanes: usize, active: bool) -> (Vec<EndpointId>, Vec<Value>) {
    let config = EndpointConfig {
        sq_depth: DEPTH,
        rq_depth: DEPTH,
        active,
        control: false,
        max_sge: 1,
        exposed: true,
    };
    (0..lanes).map(|_| fabric.create_endpoint(&config).expect("an endpoint")).unzip()
}

fn connect(fabric: &dyn Fabric, own: &[EndpointId], peer: &Value) {
    let deadline = Instant::now() + Duration::from_secs(5);
    for (endpoint, address) in own.iter().zip(peer["endpoints"].as_array().expect("endpoints")) {
        fabric.connect_endpoint(*endpoint, address, deadline).expect("connect");
    }
}

fn line(from: &mut impl BufRead) -> Value {
    let mut text = String::new();
    from.read_line(&mut text).expect("a line from the other process");
    serde_json::from_str(&text).expect("JSON from the other process")
}

fn target(sleep: bool) {
    let fabric = open();
    let (addr, keys) = memory(&*fabric, 2);
    let mut stdin = BufReader::new(std::io::stdin());
    let hello = line(&mut stdin);
    let lanes = hello["endpoints"].as_array().expect("endpoints").len();
    let (own, addresses) = endpoints(&*fabric, lanes, false);
    let slots = vec![RecvSlot::default(); DEPTH as usize / 2];
    own.iter().for_each(|endpoint| fabric.post_recv(*endpoint, &slots).expect("RECVs"));
    connect(&*fabric, &own, &hello);
    println!("{}", json!({ "endpoints": addresses, "addr": addr, "key": keys.remote }));
    let end = std::thread::spawn(move || stdin.read_line(&mut String::new()));
    let mut out = [Completion::EMPTY; 64];
    while !end.is_finished() {
        let n = fabric.poll(&mut out);
        for c in &out[..n] {
            if let CompletionKind::RecvImm(_) = c.kind {
                fabric.post_recv(c.endpoint, &slots[..1]).expect("a RECV");
            }
        }
        if sleep && n == 0 && !fabric.serve(1 << 20) && fabric.arm() {
            wait(&*fabric);
        }
    }
    eprintln!("target {}", fabric.stats()["counters"]);
}

fn wait(fabric: &dyn Fabric) {
    let fd = fabric.event_fd().expect("an event descriptor");
    // SAFETY: the fabric keeps the descriptor open.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let limit = rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    let _ = poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&limit));
}

struct Bench {
    fabric: Arc<LocalFabric>,
    lanes: Vec<EndpointId>,
    seqs: Vec<u64>,
    local: (u64, Keys),
    remote: (u64, u64),
    warm: bool,
}

impl Bench {
    /// One transfer: the templates striped over the lanes, the last one with an immediate; returns when all is done.
    fn transfer(&mut self, templates: &[Vec<Template>], imm: Option<u32>) {
        for ((work, endpoint), seq) in templates.iter().zip(&self.lanes).zip(&mut self.seqs) {
            let batch = Batch { work, imm, extra: None, first_seq: *seq, signaled: true, patient: false };
            *seq += work.len() as u64;
            self.fabric.post(*endpoint, &batch).expect("post");
        }
        let mut missing = templates.len();
        let mut out = [Completion::EMPTY; 16];
        while missing > 0 {
            let n = self.fabric.poll(&mut out);
            for c in &out[..n] {
                assert_eq!(c.status, WcStatus::Success, "{c:?}");
                missing -= 1;
            }
        }
    }

    /// Transfers of one kind over scattered blocks; every round uses others, so that caches are as cold as in real life.
    fn run(&mut self, op: Op, len: usize, rounds: usize) -> Vec<Duration> {
        let total = PIECES * len;
        let striped = self.fabric.caps().stripe_min_bytes <= total as u64;
        let lanes = if striped { self.lanes.len() } else { 1 };
        let blocks = MEMORY / len;
        let sets: Vec<Vec<Vec<Template>>> = (0..if self.warm { 1 } else { (MEMORY / total).clamp(1, 64) })
            .map(|set| {
                let mut split = vec![Vec::new(); lanes];
                for i in 0..PIECES {
                    // Odd factors permute the blocks, so that neither side's pieces touch each other.
                    let block = set * PIECES + i;
                    let (from, to) = (block * 37 % blocks * len, (block * 53 + 7) % blocks * len);
                    split[i * lanes / PIECES].push(Template {
                        local_addr: self.local.0 + from as u64,
                        remote_addr: self.remote.0 + to as u64,
                        local_key: self.local.1.local,
                        remote_key: self.remote.1,
                        len_bytes: len as u32,
                        op,
                        reserved: [0; 3],
                    });
                }
                split
            })
            .collect();
        let imm = (op == Op::Write).then_some(1);
        (0..rounds + 2)
            .map(|round| {
                let start = Instant::now();
                self.transfer(&sets[round % sets.len()], imm);
                start.elapsed()
            })
            .skip(2)
            .collect()
    }
}

fn initiator(lanes: usize, warm: bool) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.arg("target").args(std::env::args().skip(1)).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child: Child = command.spawn().expect("the target process");
    let fabric = open();
    let local = memory(&*fabric, 1);
    let lanes = if lanes == 0 { usize::from(fabric.caps().default_lanes) } else { lanes };
    let (own, addresses) = endpoints(&*fabric, lanes, true);
    let mut stdin = child.stdin.take().expect("piped");
    writeln!(stdin, "{}", json!({ "endpoints": addresses })).expect("hello");
    let reply = line(&mut BufReader::new(child.stdout.take().expect("piped")));
    connect(&*fabric, &own, &reply);
    let number = |name: &str| reply[name].as_u64().expect("a number");
    let remote = (number("addr"), number("key"));
    let mut bench = Bench { fabric, lanes: own, seqs: vec![0; lanes], local, remote, warm };
    println!("{lanes} lanes, {PIECES} pieces per transfer");
    for op in [Op::Write, Op::Read] {
        for (len, rounds) in [(4 << 10, 2000), (64 << 10, 300), (1 << 20, 20)] {
            let mut times = bench.run(op, len, rounds);
            times.sort_unstable();
            let rate = |t: Duration| (PIECES * len) as f64 / t.as_secs_f64() / 1e9;
            println!(
                "{op:?} {:>5} KiB: median {:>9.1?} = {:.2} GB/s, best {:.2} GB/s, p99 {:.1?}",
                len >> 10,
                times[times.len() / 2],
                rate(times[times.len() / 2]),
                rate(times[0]),
                times[times.len() * 99 / 100]
            );
        }
    }
    println!("initiator {}", bench.fabric.stats()["counters"]);
    drop(stdin);
    child.wait().expect("the target process");
}
