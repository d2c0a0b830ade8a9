//! Two connected queue pairs with registered memory.

use crate::fake::{Fake, FakeConfig};
use crate::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a condition may take to come true.
pub const PATIENCE: Duration = Duration::from_secs(20);
pub const ALL: Access =
    Access { local_write: true, remote_read: true, remote_write: true, relaxed_ordering: false };
pub const SIGNALED: SendFlags = SendFlags { signaled: true, fenced: false };
pub const SILENT: SendFlags = SendFlags { signaled: false, fenced: false };
pub const FENCED: SendFlags = SendFlags { signaled: true, fenced: true };

/// One side: a device with memory, and a queue pair on it.
pub struct End {
    pub qp: Qp,
    pub mr: Mr,
    pub memory: Box<[u8]>,
    pub cq: Arc<Cq>,
    pub channel: Arc<Channel>,
    pub pd: Arc<Pd>,
    pub context: Arc<Context>,
}

/// What a test may change about a connection.
#[derive(Clone, Copy)]
pub struct Options {
    pub bytes: usize,
    pub depth: u32,
    pub inline: u32,
    pub cqe: u32,
    pub initiator_reads: u8,
    pub responder_reads: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            bytes: 1 << 16,
            depth: 32,
            inline: 64,
            cqe: 256,
            initiator_reads: 4,
            responder_reads: 4,
            timeout: 8,
            retry_cnt: 3,
            rnr_retry: 3,
        }
    }
}

impl End {
    pub fn new(library: &Library, device: &str, options: Options) -> End {
        let context = library.open_device(device).expect("the device opens");
        let pd = Pd::new(&context).expect("a domain");
        let channel = Channel::new(&context).expect("a channel");
        let cq = Cq::new(&channel, options.cqe, 7).expect("a completion queue");
        let memory = vec![0; options.bytes].into_boxed_slice();
        let mr = Mr::register(&pd, memory.as_ptr() as u64, options.bytes as u64, ALL).expect("a region");
        let qp = Self::make_qp(&pd, &cq, options);
        End { qp, mr, memory, cq, channel, pd, context }
    }

    pub fn make_qp(pd: &Arc<Pd>, cq: &Arc<Cq>, options: Options) -> Qp {
        let cap = QpCap {
            max_send_wr: options.depth,
            max_recv_wr: options.depth,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_bytes: options.inline,
        };
        Qp::new(pd, &QpConfig { send_cq: cq, recv_cq: cq, cap }).expect("a queue pair")
    }

    pub fn addr(&self, at: usize) -> u64 {
        self.memory.as_ptr() as u64 + at as u64
    }

    pub fn fill(&mut self, seed: u8) {
        for (at, byte) in self.memory.iter_mut().enumerate() {
            *byte = (at as u8).wrapping_mul(7).wrapping_add(seed).wrapping_add((at >> 8) as u8);
        }
    }

    /// Memory as it is now: the device writes it behind the compiler's back.
    pub fn bytes(&self, range: std::ops::Range<usize>) -> Vec<u8> {
        // SAFETY: inside the box; a volatile read because a device writes it.
        range.map(|at| unsafe { (self.memory.as_ptr().add(at)).read_volatile() }).collect()
    }

    pub fn local(&self, at: usize, len: usize) -> (u64, u32, u32) {
        (self.addr(at), self.mr.lkey(), len as u32)
    }

    pub fn remote(&self, at: usize) -> (u64, u32) {
        (self.addr(at), self.mr.rkey())
    }

    pub fn connection(&self, peer: &End, options: Options) -> Connection {
        self.connection_to(peer.gid(1), peer.qp.number(), options)
    }

    pub fn connection_to(&self, dgid: [u8; 16], dest_qp_num: u32, options: Options) -> Connection {
        Connection {
            port: 1,
            sgid_index: 1,
            dgid,
            dlid: 0,
            global: true,
            dest_qp_num,
            path_mtu: PathMtu::from_bytes(1024).expect("an MTU"),
            rq_psn: 77,
            sq_psn: 77,
            responder_reads: options.responder_reads,
            initiator_reads: options.initiator_reads,
            service_level: 0,
            traffic_class: 0,
            hop_limit: 64,
            min_rnr_timer: 1,
            timeout: options.timeout,
            retry_cnt: options.retry_cnt,
            rnr_retry: options.rnr_retry,
        }
    }

    pub fn gid(&self, index: u32) -> [u8; 16] {
        self.context.query_gid(1, index).expect("the table is readable").expect("an entry").gid
    }

    pub fn send(&self, fill: impl FnOnce(&mut SendChain)) -> Result<(), PostFailed> {
        let mut chain = SendChain::with_capacity(64);
        fill(&mut chain);
        // SAFETY: the memory belongs to ends that outlive their queue pairs' work.
        unsafe { self.qp.post_send(&mut chain) }
    }

    pub fn recv(&self, wr_id: u64, at: usize, len: usize) {
        let mut chain = RecvChain::with_capacity(1);
        chain.push(wr_id, self.local(at, len));
        // SAFETY: as for send.
        unsafe { self.qp.post_recv(&mut chain) }.expect("a RECV is taken");
    }

    /// The next completions.
    pub fn completions(&self, count: usize) -> Vec<Done> {
        let (mut done, deadline) = (Vec::new(), Instant::now() + PATIENCE);
        let mut buffer = WcBuffer::new(4);
        while done.len() < count {
            let polled = self.cq.poll(&mut buffer, (count - done.len()).min(4)).expect("polling works");
            done.extend(polled.iter().map(Done::of));
            assert!(Instant::now() < deadline, "{} of {count} completions: {done:?}", done.len());
        }
        done
    }

    pub fn nothing_completes(&self) -> bool {
        self.cq.poll(&mut WcBuffer::new(1), 1).expect("polling works").is_empty()
    }
}

/// A completion, for comparing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    pub wr_id: u64,
    pub status: Status,
    pub opcode: WcOpcode,
    pub byte_len: u32,
    pub imm: Option<u32>,
}

impl Done {
    fn of(wc: &Wc) -> Done {
        Done {
            wr_id: wc.wr_id(),
            status: wc.status(),
            opcode: wc.opcode(),
            byte_len: wc.byte_len(),
            imm: wc.imm(),
        }
    }
}

pub fn ids(done: &[Done]) -> Vec<(u64, Status)> {
    done.iter().map(|done| (done.wr_id, done.status)).collect()
}

/// Two connected ends on fake0 and fake1.
pub fn pair(fake: &Fake, options: Options) -> (End, End) {
    pair_on(&fake.library(), ["fake0", "fake1"], options)
}

/// Two connected ends.
pub fn pair_on(library: &Library, devices: [&str; 2], options: Options) -> (End, End) {
    let [a, b] = devices.map(|device| End::new(library, device, options));
    for end in [&a, &b] {
        end.qp.to_init(1, 0, true, true).expect("to INIT");
    }
    a.qp.connect(&a.connection(&b, options)).expect("a connects");
    b.qp.connect(&b.connection(&a, options)).expect("b connects");
    (a, b)
}

pub fn fake() -> Fake {
    Fake::new(FakeConfig::default())
}

/// Polls until it is true.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::yield_now();
    }
}
