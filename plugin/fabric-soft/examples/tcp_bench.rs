//! Two processes on one host, one transfer of 128 pieces at a time: WRITE with an immediate, and READ.
//!
//! `cargo run --release -p baton-fabric-soft --example tcp_bench [lanes] [seconds per size] [pieces] [spin|sleep]`
//! (the last: whether the target's application polls all the time or leaves everything to its service thread).

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_fabric::*;
use baton_fabric_soft::tcp::{TcpConfig, TcpFabric};
use serde_json::{Value, json};

const SIZES: [usize; 4] = [4 << 10, 64 << 10, 256 << 10, 1 << 20];
const ARENA: usize = 512 << 20;
const DEPTH: u32 = 1024;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let arg = |i: usize, default: &str| args.get(i).cloned().unwrap_or_else(|| default.into());
    if arg(0, "") == "--target" {
        return target(arg(1, "1").parse().expect("lanes"), arg(2, "sleep") == "spin");
    }
    let lanes: usize = arg(0, "1").parse().expect("lanes");
    let seconds: f64 = arg(1, "1").parse().expect("seconds");
    let pieces: usize = arg(2, "128").parse().expect("pieces");
    initiator(lanes, seconds, pieces, &arg(3, "sleep"));
}

struct Side {
    fabric: Arc<TcpFabric>,
    memory: Vec<u8>,
    keys: Keys,
    endpoints: Vec<(EndpointId, Value)>,
}

fn side(lanes: usize, active: bool) -> Side {
    let env = |name: &str| std::env::var(name).ok().and_then(|v| v.parse::<usize>().ok());
    let mut config = TcpConfig::default();
    config.socket_buffer_bytes = env("BUF_KIB").map_or(config.socket_buffer_bytes, |k| k << 10);
    config.io_threads = env("IO_THREADS").unwrap_or(config.io_threads);
    let fabric = TcpFabric::new(config).expect("fabric");
    let memory: Vec<u8> = (0..ARENA).map(|i| i as u8).collect();
    let keys = fabric
        .register(&Memory {
            addr: memory.as_ptr() as u64,
            len_bytes: ARENA as u64,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: true,
            remote_write: true,
            ordered: false,
            mapped: false,
        })
        .expect("register");
    let config = EndpointConfig {
        sq_depth: DEPTH,
        rq_depth: DEPTH,
        active,
        control: false,
        max_sge: 1,
        exposed: true,
    };
    let endpoints = (0..lanes).map(|_| fabric.create_endpoint(&config).expect("endpoint")).collect();
    Side { fabric, memory, keys, endpoints }
}

/// Serves, and gives back the RECVs that immediates consumed.
fn service(fabric: Arc<TcpFabric>, repost: bool) {
    std::thread::spawn(move || {
        let fd = fabric.event_fd().expect("an event descriptor");
        loop {
            let more = fabric.serve(1 << 20);
            if repost {
                give_back(&fabric);
            }
            if !more && fabric.arm() {
                let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
                // SAFETY: one descriptor, which the fabric keeps open.
                unsafe { libc::poll(&mut poll, 1, -1) };
                fabric.disarm();
            }
        }
    });
}

fn give_back(fabric: &TcpFabric) {
    let mut out = [Completion::EMPTY; 64];
    let n = fabric.poll(&mut out);
    for c in &out[..n] {
        assert_eq!(c.status, WcStatus::Success);
        fabric.post_recv(c.endpoint, &[RecvSlot::default()]).expect("recv");
    }
}

fn describe(side: &Side) -> Value {
    let addresses: Vec<_> = side.endpoints.iter().map(|(_, a)| a).collect();
    json!({ "base": side.memory.as_ptr() as u64, "key": side.keys.remote, "endpoints": addresses })
}

fn connect(side: &Side, peer: &Value) {
    let deadline = Instant::now() + Duration::from_secs(10);
    for (i, (endpoint, _)) in side.endpoints.iter().enumerate() {
        side.fabric.connect_endpoint(*endpoint, &peer["endpoints"][i], deadline).expect("connect");
    }
}

fn line(from: &mut impl BufRead) -> Value {
    let mut text = String::new();
    from.read_line(&mut text).expect("a line");
    serde_json::from_str(&text).expect("JSON")
}

fn target(lanes: usize, spin: bool) {
    let side = side(lanes, false);
    let slots = vec![RecvSlot::default(); DEPTH as usize];
    side.endpoints.iter().for_each(|(e, _)| side.fabric.post_recv(*e, &slots).expect("recvs"));
    println!("{}", describe(&side));
    service(Arc::clone(&side.fabric), true);
    let mut stdin = std::io::stdin().lock();
    connect(&side, &line(&mut stdin));
    println!("{{}}");
    if spin {
        let fabric = Arc::clone(&side.fabric);
        std::thread::spawn(move || {
            loop {
                give_back(&fabric);
            }
        });
    }
    let _ = stdin.read_line(&mut String::new());
    if std::env::var("STATS").is_ok() {
        eprintln!("target {}", side.fabric.stats()["counters"]);
    }
}

fn initiator(lanes: usize, seconds: f64, pieces: usize, mode: &str) {
    let mut child = Command::new(std::env::current_exe().expect("own path"))
        .args(["--target", &lanes.to_string(), mode])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start the target");
    let mut from = BufReader::new(child.stdout.take().expect("a pipe"));
    let side = side(lanes, true);
    let peer = line(&mut from);
    writeln!(child.stdin.as_mut().expect("a pipe"), "{}", describe(&side)).expect("the target reads");
    service(Arc::clone(&side.fabric), false);
    connect(&side, &peer);
    line(&mut from);
    let mut seqs = vec![0; lanes];
    let only = std::env::var("SIZE_KIB").ok().and_then(|v| v.parse::<usize>().ok());
    for op in [Op::Write, Op::Read] {
        for size in SIZES.into_iter().filter(|size| only.is_none_or(|k| k << 10 == *size)) {
            let micros = run(&side, &peer, &mut seqs, op, size, pieces, seconds);
            let gbps = (pieces * size) as f64 / micros / 1e3;
            println!(
                "{op:?} {pieces} x {:4} KiB, {lanes} lanes: {gbps:5.2} GB/s, median {micros:.0} us",
                size >> 10
            );
        }
    }
    if std::env::var("STATS").is_ok() {
        eprintln!("initiator {}", side.fabric.stats()["counters"]);
    }
    drop(child.stdin.take());
    child.wait().expect("the target ends");
}

/// Median time of one transfer in microseconds.
fn run(side: &Side, peer: &Value, seqs: &mut [u64], op: Op, size: usize, pieces: usize, seconds: f64) -> f64 {
    let base = side.memory.as_ptr() as u64;
    let remote = peer["base"].as_u64().expect("a number");
    let blocks = ARENA / size;
    let template = |i: usize| {
        // Scattered, not adjacent, the same pattern at both ends.
        let at = ((i * 7919 + 13) % blocks * size) as u64;
        Template {
            local_addr: base + at,
            remote_addr: remote + at,
            local_key: side.keys.local,
            remote_key: peer["key"].as_u64().expect("a number"),
            len_bytes: size as u32,
            op,
            reserved: [0; 3],
        }
    };
    let mut rounds = Vec::new();
    let mut i = 0;
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < seconds {
        let began = Instant::now();
        let work: Vec<Template> = (i..i + pieces).map(template).collect();
        i += pieces;
        let share = pieces.div_ceil(seqs.len());
        for ((chunk, seq), (endpoint, _)) in work.chunks(share).zip(seqs.iter_mut()).zip(&side.endpoints) {
            let imm = (op == Op::Write).then_some(1);
            let batch =
                Batch { work: chunk, imm, extra: None, first_seq: *seq, signaled: true, patient: false };
            side.fabric.post(*endpoint, &batch).expect("post");
            *seq += chunk.len() as u64;
        }
        let mut done = 0;
        let mut out = [Completion::EMPTY; 16];
        while done < seqs.len() {
            let n = side.fabric.poll(&mut out);
            for c in &out[..n] {
                assert_eq!(c.status, WcStatus::Success, "{c:?}");
                done += 1;
            }
        }
        rounds.push(began.elapsed().as_secs_f64() * 1e6);
    }
    rounds.sort_by(f64::total_cmp);
    rounds[rounds.len() / 2]
}
