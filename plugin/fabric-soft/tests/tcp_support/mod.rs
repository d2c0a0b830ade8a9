//! Nodes, memory with sentinels and connections for the tests of the TCP fabric.

use std::io::Read;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_fabric::*;
use baton_fabric_soft::tcp::{TcpConfig, TcpFabric};
use serde_json::Value;

pub const WATCHDOG: Duration = Duration::from_secs(60);
pub const SENTINEL: u8 = 0xA5;
pub const MARGIN: usize = 64;
pub const DEPTH: u32 = 256;

/// Fails the test instead of hanging.
pub fn guarded(body: fn()) {
    let (done, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        let _ = done.send(());
    });
    if ended.recv_timeout(WATCHDOG) == Err(mpsc::RecvTimeoutError::Timeout) {
        panic!("not finished after {WATCHDOG:?}");
    }
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// A fabric with its service thread.
pub struct Node {
    pub fabric: Arc<TcpFabric>,
    pub stop: Arc<AtomicBool>,
    pub service: Option<JoinHandle<()>>,
}

impl Node {
    pub fn new() -> Node {
        Node::with(TcpConfig::default())
    }

    pub fn with(config: TcpConfig) -> Node {
        let fabric = TcpFabric::new(TcpConfig {
            listen: Some("127.0.0.1".parse().unwrap()),
            // A test that reads late on a busy machine is no dead peer.
            user_timeout: WATCHDOG,
            ..config
        })
        .unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let (of_thread, stopped) = (Arc::clone(&fabric), Arc::clone(&stop));
        let service = std::thread::spawn(move || {
            while !stopped.load(Ordering::Acquire) {
                if !of_thread.serve(1 << 20) && of_thread.arm() {
                    let mut fd =
                        libc::pollfd { fd: of_thread.event_fd().unwrap(), events: libc::POLLIN, revents: 0 };
                    // SAFETY: one descriptor, which the fabric keeps open.
                    unsafe { libc::poll(&mut fd, 1, 20) };
                    of_thread.disarm();
                }
            }
        });
        Node { fabric, stop, service: Some(service) }
    }

    /// Whoever polls does everything from now on.
    pub fn without_service(mut self) -> Node {
        self.stop_service();
        self
    }

    fn stop_service(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(service) = self.service.take() {
            let _ = service.join();
        }
    }

    pub fn endpoint(&self, active: bool) -> (EndpointId, Value) {
        let config = EndpointConfig {
            sq_depth: DEPTH,
            rq_depth: DEPTH,
            active,
            control: false,
            max_sge: 1,
            exposed: true,
        };
        self.fabric.create_endpoint(&config).unwrap()
    }

    pub fn counter(&self, name: &str) -> u64 {
        self.fabric.stats()["counters"][name].as_u64().unwrap_or_else(|| panic!("no counter {name}"))
    }

    pub fn malformed(&self, name: &str) -> u64 {
        self.fabric.stats()["counters"]["malformed"][name].as_u64().unwrap_or(0)
    }

    pub fn until(&self, what: &str, condition: impl Fn(&Node) -> bool) {
        let give_up = soon();
        while !condition(self) {
            assert!(Instant::now() < give_up, "in vain: {what}; {}", self.fabric.stats());
            std::thread::yield_now();
        }
    }

    /// The next completion here, while the other one is served as well.
    pub fn wait_with(&self, other: &Node) -> Completion {
        let (mut out, give_up) = ([Completion::EMPTY; 1], soon());
        while self.fabric.poll(&mut out) == 0 {
            other.fabric.serve(1 << 16);
            assert!(Instant::now() < give_up, "in vain: a completion; {}", self.fabric.stats());
        }
        out[0]
    }

    pub fn wait(&self, count: usize) -> Vec<Completion> {
        let (mut all, mut out, give_up) = (Vec::new(), [Completion::EMPTY; 16], soon());
        while all.len() < count {
            let n = self.fabric.poll(&mut out);
            all.extend_from_slice(&out[..n]);
            assert!(
                Instant::now() < give_up,
                "{count} completions in vain: {all:?}; {}",
                self.fabric.stats()
            );
            if n == 0 {
                std::thread::yield_now();
            }
        }
        all
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop_service();
    }
}

/// Registered memory between sentinels.
pub struct Block {
    pub bytes: Vec<u8>,
    pub keys: Keys,
}

impl Block {
    pub fn new(node: &Node, len: usize) -> Block {
        let bytes = vec![SENTINEL; len + 2 * MARGIN];
        let memory = Memory {
            addr: bytes.as_ptr() as u64 + MARGIN as u64,
            len_bytes: len as u64,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: true,
            remote_write: true,
            ordered: false,
            mapped: false,
        };
        Block { keys: node.fabric.register(&memory).unwrap(), bytes }
    }

    pub fn addr(&self) -> u64 {
        self.bytes.as_ptr() as u64 + MARGIN as u64
    }

    pub fn fill(&mut self, seed: u64) {
        let len = self.bytes.len();
        let bytes = pattern(seed, len - 2 * MARGIN);
        self.bytes[MARGIN..len - MARGIN].copy_from_slice(&bytes);
    }

    /// A copy taken with volatile reads, because peers write here.
    pub fn now(&self) -> Vec<u8> {
        // SAFETY: every byte is inside the vector.
        self.bytes.iter().map(|b| unsafe { std::ptr::from_ref(b).read_volatile() }).collect()
    }

    pub fn expect(&self, expected: &[u8]) {
        let found = self.now();
        let end = found.len() - MARGIN;
        assert!(
            found[..MARGIN].iter().chain(&found[end..]).all(|b| *b == SENTINEL),
            "a sentinel was written"
        );
        let wrong = (0..expected.len()).find(|i| found[MARGIN + i] != expected[*i]);
        assert_eq!((wrong, end - MARGIN), (None, expected.len()), "byte differs");
    }
}

pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..len).map(|_| next()).collect()
}

pub fn template(op: Op, local: (u64, u64), remote: (u64, u64), len: usize) -> Template {
    Template {
        local_addr: local.0,
        remote_addr: remote.0,
        local_key: local.1,
        remote_key: remote.1,
        len_bytes: len as u32,
        op,
        reserved: [0; 3],
    }
}

pub fn post(node: &Node, endpoint: EndpointId, work: &[Template], imm: Option<u32>, first_seq: u64) {
    let batch = Batch { work, imm, extra: None, first_seq, signaled: true, patient: false };
    node.fabric.post(endpoint, &batch).unwrap();
}

pub fn connect(a: &Node, b: &Node) -> (EndpointId, EndpointId) {
    let (active, passive) = (a.endpoint(true), b.endpoint(false));
    std::thread::scope(|scope| {
        let other = scope.spawn(|| b.fabric.connect_endpoint(passive.0, &active.1, soon()).unwrap());
        a.fabric.connect_endpoint(active.0, &passive.1, soon()).unwrap();
        other.join().unwrap();
    });
    (active.0, passive.0)
}

/// A connection between the two still works.
pub fn expect_alive(a: &Node, b: &Node, ends: (EndpointId, EndpointId), seq: u64) {
    let (mut source, target) = (Block::new(a, 5000), Block::new(b, 5000));
    source.fill(seq);
    b.fabric.post_recv(ends.1, &[RecvSlot::default()]).unwrap();
    let work =
        [template(Op::Write, (source.addr(), source.keys.local), (target.addr(), target.keys.remote), 5000)];
    post(a, ends.0, &work, Some(77), seq);
    assert_eq!(a.wait(1)[0].status, WcStatus::Success);
    assert_eq!(b.wait(1)[0].kind, CompletionKind::RecvImm(77));
    target.expect(&pattern(seq, 5000));
    for (node, block) in [(a, &source), (b, &target)] {
        node.fabric.deregister(block.keys, soon()).unwrap();
    }
}

pub fn listener(address: &Value) -> TcpStream {
    let stream = TcpStream::connect(address["candidates"][0].as_str().unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

pub fn closed(mut stream: TcpStream) {
    // Whatever answer comes first, then the end: by FIN or by reset.
    let _ = stream.read_to_end(&mut Vec::new());
}
