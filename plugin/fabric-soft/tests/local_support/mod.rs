//! A second process for the tests of the local fabric: the test binary runs itself and takes orders, one JSON object a line.

// Each test binary uses its part of this.
#![allow(dead_code)]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use baton_fabric::*;
use baton_fabric_soft::local::{LocalConfig, LocalFabric};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use serde_json::{Value, json};

/// A test that waits longer has found a hang.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes on either side of a block that nobody may touch.
pub const MARGIN: usize = 4096;
const SENTINEL: u8 = 0xA5;
/// Set for the second process.
const ROLE: &str = "BATON_TEST_LOCAL_PEER";
/// Begins an answer; the test harness writes to the same stream.
const MARK: &str = "@@";

pub fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// Registered memory with sentinels around it; never freed.
#[derive(Clone, Copy)]
pub struct Block {
    bytes: &'static [AtomicU8],
    pub addr: u64,
    pub len: usize,
    pub keys: Keys,
}

impl Block {
    pub fn new(fabric: &dyn Fabric, len: usize, fill: u8) -> Block {
        let bytes: Vec<AtomicU8> = (0..len + 2 * MARGIN).map(|_| AtomicU8::new(SENTINEL)).collect();
        let bytes: &'static [AtomicU8] = bytes.leak();
        let addr = bytes.as_ptr() as u64 + MARGIN as u64;
        let memory = exposed(addr, len);
        let block = Block { bytes, addr, len, keys: fabric.register(&memory).expect("register") };
        block.fill(fill);
        block
    }

    /// The same memory registered as the engine's own.
    pub fn as_own(self, fabric: &dyn Fabric) -> Block {
        let memory = Memory { ordered: true, mapped: true, ..exposed(self.addr, self.len) };
        Block { keys: fabric.register(&memory).expect("register"), ..self }
    }

    /// As [`Block::new`], of managed memory: a sealed file, mapped between the sentinels; the file ends with some as well.
    pub fn shared(fabric: &dyn Fabric, len: usize, fill: u8) -> (Block, Rc<OwnedFd>) {
        let file =
            memfd_create("baton-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memfd");
        let file_bytes = (len + 1).next_multiple_of(MARGIN);
        ftruncate(&file, file_bytes as u64).expect("ftruncate");
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).expect("seals");
        let room = file_bytes + 2 * MARGIN;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: fresh anonymous memory, then the file over its middle, which nobody knows yet; never unmapped.
        let bytes: &'static [AtomicU8] = unsafe {
            let base = mmap_anonymous(std::ptr::null_mut(), room, access, MapFlags::PRIVATE).expect("mmap");
            let middle = base.byte_add(MARGIN);
            mmap(middle, file_bytes, access, MapFlags::SHARED | MapFlags::FIXED, &file, 0).expect("mmap");
            std::slice::from_raw_parts(base.cast(), room)
        };
        bytes.iter().for_each(|byte| byte.store(SENTINEL, Ordering::Relaxed));
        let addr = bytes.as_ptr() as u64 + MARGIN as u64;
        let memory = exposed(addr, len);
        let keys = fabric.register_shared(&memory, file.as_fd()).expect("register");
        let block = Block { bytes, addr, len, keys };
        block.fill(fill);
        (block, Rc::new(file))
    }

    fn inside(&self) -> &[AtomicU8] {
        &self.bytes[MARGIN..MARGIN + self.len]
    }

    pub fn fill(&self, value: u8) {
        self.inside().iter().for_each(|byte| byte.store(value, Ordering::Relaxed));
    }

    pub fn fill_pattern(&self, seed: u64) {
        for (i, byte) in self.inside().iter().enumerate() {
            byte.store(pattern(seed, i), Ordering::Relaxed);
        }
    }

    /// First byte that is not as expected.
    pub fn differs(&self, expected: impl Fn(usize) -> u8) -> Option<usize> {
        (0..self.len).find(|&i| self.inside()[i].load(Ordering::Relaxed) != expected(i))
    }

    pub fn byte(&self, at: usize) -> u8 {
        self.inside()[at].load(Ordering::Relaxed)
    }

    pub fn sentinels_stand(&self) -> bool {
        let outside = self.bytes[..MARGIN].iter().chain(&self.bytes[MARGIN + self.len..]);
        outside.into_iter().all(|byte| byte.load(Ordering::Relaxed) == SENTINEL)
    }
}

/// Host memory that peers may read and write.
pub fn exposed(addr: u64, len: usize) -> Memory {
    Memory {
        addr,
        len_bytes: len as u64,
        kind: MemoryKind::Dram,
        device: 0,
        remote_read: true,
        remote_write: true,
        ordered: false,
        mapped: false,
    }
}

/// What memory a test is about.
#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    /// The process's own.
    Plain,
    /// Managed by an engine: a file that peers map.
    Managed,
}

impl Kind {
    /// Memory of this process, and its file.
    pub fn here(self, fabric: &dyn Fabric, len: usize, fill: u8) -> (Block, Option<Rc<OwnedFd>>) {
        match self {
            Kind::Plain => (Block::new(fabric, len, fill), None),
            Kind::Managed => {
                let (block, file) = Block::shared(fabric, len, fill);
                (block, Some(file))
            }
        }
    }

    /// Memory of the peer.
    pub fn there(self, peer: &mut Peer, len: usize, fill: u8) -> Remote {
        match self {
            Kind::Plain => peer.block(len, fill),
            Kind::Managed => peer.shared_block(len, fill),
        }
    }

    /// That the kernel copied all of it, or none.
    pub fn assert_way(self, fabric: &dyn Fabric) {
        assert_eq!(counter(fabric, "shared_bytes") > 0, self == Kind::Managed);
    }
}

pub fn pattern(seed: u64, at: usize) -> u8 {
    let mixed = (at as u64 ^ seed << 32).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 40) as u8
}

pub fn open() -> Arc<LocalFabric> {
    // A RECV may come late on a busy machine; that it never comes is tested elsewhere.
    let config = LocalConfig { ptrace_any: true, rnr_wait: PATIENCE, ..LocalConfig::default() };
    LocalFabric::new(config).expect("the local fabric")
}

/// A fabric with a service thread that sleeps like the engine's.
pub struct Served {
    pub fabric: Arc<LocalFabric>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Served {
    pub fn new() -> Served {
        let fabric = open();
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let (fabric, stop) = (Arc::clone(&fabric), Arc::clone(&stop));
            std::thread::spawn(move || serve(&*fabric, &stop))
        };
        Served { fabric, stop, thread: Some(thread) }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        let _ = self.thread.take().expect("joined once").join();
    }
}

fn serve(fabric: &dyn Fabric, stop: &AtomicBool) {
    let fd = fabric.event_fd().expect("an event descriptor");
    while !stop.load(Ordering::Acquire) {
        if !fabric.serve(1 << 20) && fabric.arm() {
            // SAFETY: the fabric keeps the descriptor open.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            let limit = rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
            let _ = rustix::event::poll(&mut fds, Some(&limit));
        } else {
            // Completions wait for the other thread.
            std::thread::yield_now();
        }
    }
}

pub const DEPTH: u32 = 256;

pub fn new_endpoint(fabric: &dyn Fabric) -> (EndpointId, Value) {
    let config = EndpointConfig {
        sq_depth: DEPTH,
        rq_depth: DEPTH,
        active: true,
        control: false,
        max_sge: 1,
        exposed: true,
    };
    fabric.create_endpoint(&config).expect("an endpoint")
}

/// Connects a new endpoint of `a` with one of `b`; what they are, and the address of the one of `a`.
pub fn connect(a: &dyn Fabric, b: &dyn Fabric) -> (EndpointId, EndpointId, Value) {
    let (x, x_address) = new_endpoint(a);
    let (y, y_address) = new_endpoint(b);
    a.connect_endpoint(x, &y_address, soon()).expect("connect");
    b.connect_endpoint(y, &x_address, soon()).expect("connect");
    (x, y, x_address)
}

/// Maps a ring of this process once more, as a hostile engine could.
pub fn map_ring(fd: i32) -> &'static [AtomicU64] {
    map_shared(fd, 4096 / 8 + DEPTH as usize * 8)
}

/// Maps so many words of shared memory of this process once more.
pub fn map_shared(fd: i32, words: usize) -> &'static [AtomicU64] {
    // SAFETY: the descriptor belongs to an endpoint or a fabric that the test keeps.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping of memory that is never made smaller; leaked.
    unsafe {
        let base = mmap(std::ptr::null_mut(), words * 8, access, MapFlags::SHARED, fd, 0).expect("map");
        std::slice::from_raw_parts(base.cast(), words)
    }
}

/// The second process.
pub struct Peer {
    child: Child,
    stdin: ChildStdin,
    answers: mpsc::Receiver<Value>,
}

impl Peer {
    /// Starts the process; the test binary needs a test `second_process` that calls [`second_process`].
    pub fn start() -> Peer {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "second_process", "--nocapture"]).env(ROLE, "1");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the second process");
        let stdin = child.stdin.take().expect("piped");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let (send, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if let Some((_, text)) = line.split_once(MARK) {
                    let _ = send.send(serde_json::from_str(text).expect("JSON"));
                }
            }
        });
        Peer { child, stdin, answers }
    }

    pub fn tell(&mut self, order: Value) {
        writeln!(self.stdin, "{order}").expect("the second process reads");
    }

    pub fn answer(&mut self) -> Value {
        self.answers.recv_timeout(PATIENCE).expect("an answer of the second process in time")
    }

    pub fn ask(&mut self, order: Value) -> Value {
        self.tell(order);
        self.answer()
    }

    /// Address and key of new memory there.
    pub fn block(&mut self, len: usize, fill: u8) -> Remote {
        self.new_block("block", len, fill)
    }

    /// Address and key of new managed memory there.
    pub fn shared_block(&mut self, len: usize, fill: u8) -> Remote {
        self.new_block("shared_block", len, fill)
    }

    fn new_block(&mut self, order: &str, len: usize, fill: u8) -> Remote {
        let answer = self.ask(json!({ "do": order, "len": len, "fill": fill }));
        let number = |name: &str| answer[name].as_u64().expect("a number");
        Remote { index: number("index"), addr: number("addr"), key: number("key") }
    }

    /// A counter of the fabric there.
    pub fn counter(&mut self, name: &str) -> u64 {
        self.ask(json!({ "do": "counter", "name": name })).as_u64().expect("a number")
    }

    /// A connected pair; the other end is the peer's newest endpoint.
    pub fn connect(&mut self, fabric: &dyn Fabric) -> (EndpointId, Value) {
        let theirs = self.ask(json!({ "do": "endpoint" }));
        let (endpoint, ours) = new_endpoint(fabric);
        fabric.connect_endpoint(endpoint, &theirs, soon()).expect("connect");
        assert_eq!(self.ask(json!({ "do": "connect", "address": ours })), json!("ok"));
        (endpoint, theirs)
    }

    /// Returns when every thread of the process stands still.
    pub fn stop(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("stop");
        let options = rustix::process::WaitOptions::UNTRACED;
        let (_, status) = rustix::process::waitpid(Some(pid), options).expect("waitpid").expect("a status");
        assert!(status.stopped());
    }

    pub fn go_on(&self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("continue");
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Memory of the second process.
#[derive(Clone, Copy)]
pub struct Remote {
    pub index: u64,
    pub addr: u64,
    pub key: u64,
}

pub fn template(op: Op, local: &Block, from: usize, remote: Remote, to: usize, len: usize) -> Template {
    Template {
        local_addr: local.addr + from as u64,
        remote_addr: remote.addr + to as u64,
        local_key: local.keys.local,
        remote_key: remote.key,
        len_bytes: len as u32,
        op,
        reserved: [0; 3],
    }
}

/// Polls until `enough` says so, and returns everything polled.
pub fn poll_until(fabric: &dyn Fabric, enough: impl Fn(&[Completion]) -> bool) -> Vec<Completion> {
    let (mut all, mut out) = (Vec::new(), [Completion::EMPTY; 32]);
    let give_up = soon();
    while !enough(&all) {
        let n = fabric.poll(&mut out);
        all.extend_from_slice(&out[..n]);
        if n == 0 {
            std::thread::yield_now();
        }
        assert!(Instant::now() < give_up, "waited in vain; polled so far: {all:?}");
    }
    all
}

pub fn post(fabric: &dyn Fabric, endpoint: EndpointId, work: &[Template], first_seq: u64) {
    fabric
        .post(endpoint, &Batch { work, imm: None, extra: None, first_seq, signaled: true, patient: false })
        .expect("post");
}

pub fn status_of(fabric: &dyn Fabric, endpoint: EndpointId, work: &[Template], first_seq: u64) -> WcStatus {
    post(fabric, endpoint, work, first_seq);
    poll_until(fabric, |all| !all.is_empty())[0].status
}

pub fn end(fabric: &dyn Fabric, endpoint: EndpointId) {
    fabric.fence(endpoint);
    wait("quiet", || fabric.is_quiet(endpoint));
}

/// Pieces of odd sizes at odd places, from a few bytes to some that are streamed; each of the target's bytes is covered once.
pub fn pieces(len: usize) -> Vec<(usize, usize)> {
    let mut cuts = vec![0];
    for i in 1.. {
        let next = cuts.last().expect("one") + [17, 4096, 100_003, 32_768][i % 4] + i % 7;
        if next >= len {
            break;
        }
        cuts.push(next);
    }
    cuts.push(len);
    cuts.windows(2).map(|w| (w[0], w[1] - w[0])).collect()
}

/// A counter of a fabric, or how many regions it has mapped.
pub fn counter(fabric: &dyn Fabric, name: &str) -> u64 {
    let stats = fabric.stats();
    let value = if name == "mappings" { &stats[name] } else { &stats["counters"][name] };
    value.as_u64().unwrap_or_else(|| panic!("no counter {name} in {stats}"))
}

pub fn wait(what: &str, condition: impl Fn() -> bool) {
    let give_up = soon();
    while !condition() {
        assert!(Instant::now() < give_up, "waited in vain for {what}");
        std::thread::yield_now();
    }
}

// ---- the second process itself

struct Orders {
    served: Served,
    blocks: Vec<Block>,
    /// Of managed blocks, by their index.
    files: HashMap<u64, Rc<OwnedFd>>,
    endpoints: Vec<EndpointId>,
    next_seq: u64,
}

/// Body of the test by which the second process runs; nothing in the first one.
pub fn second_process() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let mut orders = Orders {
        served: Served::new(),
        blocks: Vec::new(),
        files: HashMap::new(),
        endpoints: Vec::new(),
        next_seq: 0,
    };
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let order: Value = serde_json::from_str(&line).expect("JSON");
        let answer = orders.follow(&order);
        println!("{MARK}{answer}");
    }
    // The test's end: nothing of the harness matters any more.
    std::process::exit(0);
}

impl Orders {
    fn fabric(&self) -> &dyn Fabric {
        &*self.served.fabric
    }

    fn newest(&self) -> EndpointId {
        *self.endpoints.last().expect("an endpoint")
    }

    fn follow(&mut self, order: &Value) -> Value {
        let number = |name: &str| order[name].as_u64().unwrap_or_else(|| panic!("no {name} in {order}"));
        match order["do"].as_str().expect("an order") {
            "address" => self.fabric().address(),
            "block" => {
                let block = Block::new(self.fabric(), number("len") as usize, number("fill") as u8);
                self.blocks.push(block);
                json!({ "index": self.blocks.len() - 1, "addr": block.addr, "key": block.keys.remote })
            }
            "shared_block" => {
                let (block, file) =
                    Block::shared(self.fabric(), number("len") as usize, number("fill") as u8);
                self.files.insert(self.blocks.len() as u64, file);
                self.blocks.push(block);
                json!({ "index": self.blocks.len() - 1, "addr": block.addr, "key": block.keys.remote })
            }
            // Deregistered first, as a managed buffer is; its pages stay in the mapping here.
            "free_shared" => {
                let keys = self.blocks[number("index") as usize].keys;
                self.fabric().deregister(keys, soon()).expect("deregister");
                json!(self.files.remove(&number("index")).is_some())
            }
            "counter" => counter(self.fabric(), order["name"].as_str().expect("a name")).into(),
            "fill" => {
                self.blocks[number("index") as usize].fill(number("fill") as u8);
                json!("ok")
            }
            "pattern" => {
                self.blocks[number("index") as usize].fill_pattern(number("seed"));
                json!("ok")
            }
            // Every byte and the sentinels.
            "holds" => {
                let block = self.blocks[number("index") as usize];
                let seed = number("seed");
                json!({ "differs": block.differs(|i| pattern(seed, i)), "sentinels": block.sentinels_stand() })
            }
            "holds_only" => {
                let block = self.blocks[number("index") as usize];
                let fill = number("fill") as u8;
                json!({ "differs": block.differs(|_| fill), "sentinels": block.sentinels_stand() })
            }
            "endpoint" => {
                let (endpoint, address) = new_endpoint(self.fabric());
                self.endpoints.push(endpoint);
                address
            }
            "connect" => match self.fabric().connect_endpoint(self.newest(), &order["address"], soon()) {
                Ok(()) => json!("ok"),
                Err(error) => json!(error.to_string()),
            },
            "recvs" => {
                let slots = vec![RecvSlot::default(); number("count") as usize];
                self.fabric().post_recv(self.newest(), &slots).expect("RECVs");
                json!("ok")
            }
            "deregister" => {
                let keys = self.blocks[number("index") as usize].keys;
                self.fabric().deregister(keys, soon()).expect("deregister");
                json!("ok")
            }
            "count_immediates" => self.count_immediates(number("count")),
            "write_until_refused" => self.write_until_refused(order),
            other => panic!("unknown order {other}"),
        }
    }

    /// Takes immediates 0, 1, 2, … and posts a new RECV for each.
    fn count_immediates(&self, count: u64) -> Value {
        let mut next = 0;
        let mut out = [Completion::EMPTY; 64];
        let give_up = soon();
        while next < count {
            let n = self.fabric().poll(&mut out);
            for c in &out[..n] {
                if (c.kind, c.status) != (CompletionKind::RecvImm(next as u32), WcStatus::Success) {
                    return json!(format!("{c:?} instead of immediate {next}"));
                }
                self.fabric().post_recv(c.endpoint, &[RecvSlot::default()]).expect("a RECV");
                next += 1;
            }
            if Instant::now() > give_up {
                return json!(format!("{next} of {count} immediates"));
            }
        }
        json!("ok")
    }

    /// Writes a whole block over and over until a write fails; answers with the status.
    fn write_until_refused(&mut self, order: &Value) -> Value {
        let remote = Remote {
            index: 0,
            addr: order["addr"].as_u64().expect("addr"),
            key: order["key"].as_u64().expect("key"),
        };
        let source = self.blocks[order["index"].as_u64().unwrap_or(0) as usize];
        let endpoint = self.newest();
        let piece = order["piece"].as_u64().expect("piece") as usize;
        let work: Vec<Template> = (0..source.len / piece)
            .map(|i| template(Op::Write, &source, i * piece, remote, i * piece, piece))
            .collect();
        println!("{MARK}{}", json!("started"));
        loop {
            let batch = Batch {
                work: &work,
                imm: None,
                extra: None,
                first_seq: self.next_seq,
                signaled: true,
                patient: false,
            };
            self.next_seq += work.len() as u64;
            if let Err(error) = self.fabric().post(endpoint, &batch) {
                return json!(error.to_string());
            }
            // Endpoints of earlier orders may still have something to say.
            let ours = |all: &[Completion]| all.iter().find(|c| c.endpoint == endpoint).map(|c| c.status);
            let done = poll_until(self.fabric(), |all| ours(all).is_some());
            if let Some(status) = ours(&done).filter(|status| *status != WcStatus::Success) {
                return json!(format!("{status:?}"));
            }
        }
    }
}
