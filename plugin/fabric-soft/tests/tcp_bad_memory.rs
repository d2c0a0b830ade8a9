//! TCP when what was promised is not there: registered memory that is not mapped or does not permit the access, and a
//! process without descriptors for another connection. It is an error of whoever asked, never a signal or a stall.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use baton_fabric::*;
use serde_json::{Value, json};

#[allow(dead_code, reason = "the rig holds more than these tests need")]
mod tcp_support;

use tcp_support::*;

/// Both ways a payload arrives: read along with its header, and straight into its target.
const SIZES: [usize; 3] = [100, 3000, 1 << 20];
const PAGE: usize = 4096;

/// Registered pages of which the last ones are taken away.
struct Pages {
    at: *mut libc::c_void,
    len: usize,
    keys: Keys,
}

impl Pages {
    fn new(node: &Node, len: usize) -> Pages {
        let len = len.next_multiple_of(PAGE);
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        // SAFETY: the mapping just made.
        unsafe { std::slice::from_raw_parts_mut(at.cast(), len) }.fill(SENTINEL);
        let memory = Memory {
            addr: at as u64,
            len_bytes: len as u64,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: true,
            remote_write: true,
            ordered: false,
            mapped: false,
        };
        Pages { at, len, keys: node.fabric.register(&memory).unwrap() }
    }

    fn addr(&self) -> u64 {
        self.at as u64
    }

    /// From `from` on, the pages permit `prot` only. The range stays reserved, so that nothing else moves in.
    fn protect(&self, from: usize, prot: i32) {
        // SAFETY: a part of the mapping, which no reference of this test points to.
        let done = unsafe { libc::mprotect(self.at.byte_add(from), self.len - from, prot) };
        assert_eq!(done, 0);
    }

    fn expect(&self, at: usize, expected: &[u8]) {
        // SAFETY: the test asks only for what it left readable and nobody writes any more.
        let found = unsafe { std::slice::from_raw_parts(self.at.byte_add(at).cast::<u8>(), expected.len()) };
        assert!(found == expected, "byte {:?} differs", (0..found.len()).find(|i| found[*i] != expected[*i]));
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`; the nodes that knew it are fenced or gone with the test.
        unsafe { libc::munmap(self.at, self.len) };
    }
}

/// Two nodes with another connection that must survive.
fn rig() -> (Node, Node, (EndpointId, EndpointId), (EndpointId, EndpointId)) {
    let (a, b) = (Node::new(), Node::new());
    let (ends, bystanders) = (connect(&a, &b), connect(&a, &b));
    (a, b, ends, bystanders)
}

fn end(a: &Node, b: &Node, ends: (EndpointId, EndpointId)) {
    for (node, endpoint) in [(a, ends.0), (b, ends.1)] {
        node.fabric.fence(endpoint);
        node.until("it is quiet", |n| n.fabric.is_quiet(endpoint));
        node.fabric.destroy_endpoint(endpoint);
    }
}

#[test]
fn a_write_to_memory_that_is_not_writable_is_refused() {
    guarded(|| {
        let (a, b, _, bystanders) = rig();
        let mut seq = 0;
        for prot in [libc::PROT_READ, libc::PROT_NONE] {
            for len in SIZES {
                let ends = connect(&a, &b);
                let (source, target) = (Block::new(&a, len), Pages::new(&b, len));
                target.protect(0, prot);
                let work = [template(
                    Op::Write,
                    (source.addr(), source.keys.local),
                    (target.addr(), target.keys.remote),
                    len,
                )];
                post(&a, ends.0, &work, None, 0);
                assert_eq!(a.wait(1)[0].status, WcStatus::RemoteAccess, "{len} bytes");
                end(&a, &b, ends);
                target.protect(0, libc::PROT_READ);
                target.expect(0, &vec![SENTINEL; target.len]);
                expect_alive(&a, &b, bystanders, seq);
                seq += 1;
            }
        }
        assert_eq!(b.counter("unmapped"), 6);
    });
}

#[test]
fn of_several_writes_in_a_frame_the_one_with_the_bad_target_is_refused() {
    guarded(|| {
        let (a, b, _, bystanders) = rig();
        for len in [64, 2000, 60_000] {
            let ends = connect(&a, &b);
            let mut source = Block::new(&a, 4 * len);
            source.fill(5);
            let (good, bad) = (Block::new(&b, 3 * len), Pages::new(&b, len));
            bad.protect(0, libc::PROT_READ);
            let piece = |i: usize, to| {
                template(Op::Write, (source.addr() + (i * len) as u64, source.keys.local), to, len)
            };
            let at = |i: usize| (good.addr() + (i * len) as u64, good.keys.remote);
            let work =
                [piece(0, at(0)), piece(1, at(1)), piece(2, (bad.addr(), bad.keys.remote)), piece(3, at(2))];
            post(&a, ends.0, &work, None, 0);
            let done = a.wait(2);
            let found: Vec<_> = done.iter().map(|c| (c.seq, c.status)).collect();
            assert_eq!(found, [(2, WcStatus::RemoteAccess), (3, WcStatus::Flushed)]);
            end(&a, &b, ends);
            let mut expected = pattern(5, 4 * len)[..2 * len].to_vec();
            expected.resize(3 * len, SENTINEL);
            good.expect(&expected);
        }
        expect_alive(&a, &b, bystanders, 0);
    });
}

#[test]
fn a_message_for_a_recv_whose_memory_is_not_writable_is_refused() {
    guarded(|| {
        let (a, b, ends, bystanders) = rig();
        let slot = Pages::new(&b, PAGE);
        slot.protect(0, libc::PROT_READ);
        let recv = RecvSlot { id: 3, addr: slot.addr(), local_key: slot.keys.local, len_bytes: PAGE as u32 };
        b.fabric.post_recv(ends.1, &[recv]).unwrap();
        let extra = Extra {
            op: ExtraOp::Send,
            bytes: &[7; 500],
            staged: None,
            gather: &[],
            remote_addr: 0,
            remote_key: 0,
            fenced: false,
        };
        let batch =
            Batch { work: &[], imm: None, extra: Some(extra), first_seq: 0, signaled: true, patient: false };
        a.fabric.post(ends.0, &batch).unwrap();
        assert_eq!(a.wait(1)[0].status, WcStatus::RemoteAccess);
        let flushed = b.wait(1)[0];
        assert_eq!((flushed.kind, flushed.seq), (CompletionKind::RecvFlushed, 3));
        end(&a, &b, ends);
        slot.expect(0, &[SENTINEL; PAGE]);
        expect_alive(&a, &b, bystanders, 0);
    });
}

#[test]
fn a_read_into_own_memory_that_is_not_writable_fails_locally() {
    guarded(|| {
        let (a, b, _, bystanders) = rig();
        for (i, len) in SIZES.into_iter().enumerate() {
            let ends = connect(&a, &b);
            let (target, source) = (Pages::new(&a, len), Block::new(&b, len));
            target.protect(0, libc::PROT_READ);
            let work = [template(
                Op::Read,
                (target.addr(), target.keys.local),
                (source.addr(), source.keys.remote),
                len,
            )];
            post(&a, ends.0, &work, None, 0);
            assert_eq!(a.wait(1)[0].status, WcStatus::LocalAccess, "{len} bytes");
            end(&a, &b, ends);
            target.expect(0, &vec![SENTINEL; target.len]);
            expect_alive(&a, &b, bystanders, i as u64);
        }
    });
}

#[test]
fn of_several_reads_in_a_frame_those_before_the_bad_one_succeed() {
    guarded(|| {
        let (a, b, _, bystanders) = rig();
        for len in [64, 2000, 60_000] {
            let ends = connect(&a, &b);
            let mut source = Block::new(&b, 4 * len);
            source.fill(6);
            let (good, bad) = (Block::new(&a, 2 * len), Pages::new(&a, len));
            bad.protect(0, libc::PROT_READ);
            let piece = |i: usize, to| {
                template(Op::Read, to, (source.addr() + (i * len) as u64, source.keys.remote), len)
            };
            let at = |i: usize| (good.addr() + (i * len) as u64, good.keys.local);
            let to_bad = (bad.addr(), bad.keys.local);
            let work = [piece(0, at(0)), piece(1, at(1)), piece(2, to_bad), piece(3, to_bad)];
            post(&a, ends.0, &work, None, 0);
            // Those before it would be here if they had failed.
            let found: Vec<_> = a.wait(2).iter().map(|c| (c.seq, c.status)).collect();
            assert_eq!(found, [(2, WcStatus::LocalAccess), (3, WcStatus::Flushed)], "{len} bytes");
            end(&a, &b, ends);
            good.expect(&pattern(6, 4 * len)[..2 * len]);
            bad.expect(0, &vec![SENTINEL; len]);
        }
        expect_alive(&a, &b, bystanders, 0);
    });
}

#[test]
fn a_write_from_memory_that_is_not_mapped_fails_locally_at_once() {
    guarded(|| {
        let (a, b, _, bystanders) = rig();
        let mut seq = 0;
        for len in SIZES {
            // From the first byte on, and in the middle.
            for good in [0, len / 2 / PAGE * PAGE] {
                let ends = connect(&a, &b);
                let (source, target) = (Pages::new(&a, len), Block::new(&b, len));
                source.protect(good, libc::PROT_NONE);
                let work = [template(
                    Op::Write,
                    (source.addr(), source.keys.local),
                    (target.addr(), target.keys.remote),
                    len,
                )];
                b.fabric.post_recv(ends.1, &[RecvSlot::default()]).unwrap();
                post(&a, ends.0, &work, Some(1), 0);
                assert_eq!(a.wait(1)[0].status, WcStatus::LocalAccess, "{len} bytes, {good} of them good");
                assert_eq!(b.wait(1)[0].kind, CompletionKind::RecvFlushed);
                end(&a, &b, ends);
                target.expect(&vec![SENTINEL; len]);
                expect_alive(&a, &b, bystanders, seq);
                seq += 1;
            }
        }
    });
}

/// What became of `sends` work requests of `a` and of `recvs` RECVs of `b`, neither of which has a thread of its own.
fn outcomes(a: &Node, b: &Node, sends: usize, recvs: usize) -> (Vec<(u64, WcStatus)>, Vec<Completion>) {
    let (mut sent, mut received, give_up) = (Vec::new(), Vec::new(), soon());
    let mut out = [Completion::EMPTY; 16];
    while sent.len() < sends || received.len() < recvs {
        let n = b.fabric.poll(&mut out);
        received.extend_from_slice(&out[..n]);
        let n = a.fabric.poll(&mut out);
        sent.extend(out[..n].iter().map(|c| (c.seq, c.status)));
        assert!(Instant::now() < give_up, "in vain: {sent:?} {received:?}; {}", a.fabric.stats());
    }
    (sent, received)
}

/// Memory for one work request, of which the last bytes are not mapped.
fn torn(node: &Node, len: usize, mapped: usize) -> (Pages, u64) {
    let pages = Pages::new(node, PAGE + len);
    pages.protect(PAGE, libc::PROT_NONE);
    let at = pages.addr() + (PAGE - mapped) as u64;
    (pages, at)
}

#[test]
fn of_several_writes_only_the_one_whose_memory_is_not_mapped_fails() {
    guarded(|| {
        let (a, b) = (Node::new(), Node::new());
        let bystanders = connect(&a, &b);
        // Whoever polls `b` acknowledges, and nobody does before all is posted.
        let (a, b) = (a.without_service(), b.without_service());
        for (len, mapped) in [(64, 0), (64, 32), (2000, 0), (60_000, 0), (60_000, PAGE), (300_000, PAGE)] {
            // Where it is in its frame: the first piece, or one behind others.
            for before in [0, 5] {
                let ends = in_background(&a, &b, || connect(&a, &b));
                let placed = 3 + before;
                let mut source = Block::new(&a, (placed + 2) * len);
                source.fill(9);
                let ((pages, torn_at), target) = (torn(&a, len, mapped), Block::new(&b, (placed + 3) * len));
                let to = |i: usize| (target.addr() + (i * len) as u64, target.keys.remote);
                let good = |i: usize, to| {
                    let from = (source.addr() + (i * len) as u64, source.keys.local);
                    template(Op::Write, from, to, len)
                };
                for i in 0..3 {
                    post(&a, ends.0, &[good(i, to(i))], None, i as u64);
                }
                let mut work: Vec<_> = (3..placed).map(|i| good(i, to(i))).collect();
                work.push(template(Op::Write, (torn_at, pages.keys.local), to(placed + 2), len));
                work.extend([placed, placed + 1].map(|i| good(i, to(i))));
                post(&a, ends.0, &work, None, 3);
                let (found, _) = outcomes(&a, &b, 6, 0);
                let culprit = placed as u64;
                let expected = [
                    (0, WcStatus::Success),
                    (1, WcStatus::Success),
                    (2, WcStatus::Success),
                    // Those before it, of which only an error would be told, succeeded.
                    (culprit, WcStatus::LocalAccess),
                    (culprit + 1, WcStatus::Flushed),
                    (culprit + 2, WcStatus::Flushed),
                ];
                assert_eq!(found, expected, "{len} bytes, {mapped} mapped, {before} before it in its batch");
                in_background(&a, &b, || end(&a, &b, ends));
                let mut bytes = pattern(9, (placed + 2) * len)[..placed * len].to_vec();
                bytes.resize((placed + 2) * len, SENTINEL);
                assert!(target.now()[MARGIN..].starts_with(&bytes), "{len} bytes");
            }
        }
        in_background(&a, &b, || expect_alive(&a, &b, bystanders, 0));
    });
}

#[test]
fn of_several_messages_only_the_one_whose_memory_is_not_mapped_fails() {
    guarded(|| {
        let (a, b) = (Node::new().without_service(), Node::new().without_service());
        // In one frame, and with whole frames of it gone before.
        for (len, mapped) in [(3000, 0), (200_000, PAGE), (600_000, 300_000)] {
            let ends = in_background(&a, &b, || connect(&a, &b));
            let mut source = Block::new(&a, 3 * len);
            source.fill(4);
            let bad = Pages::new(&a, len);
            bad.protect(mapped / PAGE * PAGE, libc::PROT_NONE);
            let slots = Block::new(&b, 5 * len);
            for id in 0..5 {
                let addr = slots.addr() + (id * len) as u64;
                let slot =
                    RecvSlot { id: id as u32, addr, local_key: slots.keys.local, len_bytes: len as u32 };
                b.fabric.post_recv(ends.1, &[slot]).unwrap();
            }
            let good = |i: usize| (source.addr() + (i * len) as u64, source.keys.local);
            let all = [good(0), good(1), good(2), (bad.addr(), bad.keys.local), good(0)];
            for (seq, (addr, local_key)) in (0..).zip(all) {
                send(&a, ends.0, Sge { addr, local_key, len_bytes: len as u32 }, seq);
            }
            let (found, received) = outcomes(&a, &b, 5, 5);
            let expected = [
                (0, WcStatus::Success),
                (1, WcStatus::Success),
                (2, WcStatus::Success),
                (3, WcStatus::LocalAccess),
                (4, WcStatus::Flushed),
            ];
            assert_eq!(found, expected, "{len} bytes");
            let kinds: Vec<_> = received.iter().map(|c| c.kind).collect();
            let (whole, none) = (CompletionKind::RecvSend, CompletionKind::RecvFlushed);
            assert_eq!(kinds, [whole, whole, whole, none, none]);
            in_background(&a, &b, || end(&a, &b, ends));
            assert!(slots.now()[MARGIN..].starts_with(&pattern(4, 3 * len)), "{len} bytes");
        }
    });
}

fn send(node: &Node, endpoint: EndpointId, piece: Sge, seq: u64) {
    let extra = Extra {
        op: ExtraOp::Send,
        bytes: &[],
        staged: None,
        gather: &[piece],
        remote_addr: 0,
        remote_key: 0,
        fenced: false,
    };
    let batch =
        Batch { work: &[], imm: None, extra: Some(extra), first_seq: seq, signaled: true, patient: false };
    node.fabric.post(endpoint, &batch).unwrap();
}

/// Serves two nodes that have no thread for as long as it takes.
fn in_background<T>(a: &Node, b: &Node, body: impl FnOnce() -> T) -> T {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                a.fabric.serve(1 << 20);
                b.fabric.serve(1 << 20);
                std::thread::yield_now();
            }
        });
        let result = body();
        over.store(true, Ordering::Release);
        result
    })
}

#[test]
fn a_read_in_front_of_a_write_whose_memory_is_not_mapped_is_answered() {
    guarded(|| {
        let (a, b, _, bystanders) = rig();
        for (i, len) in SIZES.into_iter().enumerate() {
            let ends = connect(&a, &b);
            let (mut source, target, other) =
                (Block::new(&b, 8 * len), Block::new(&a, 8 * len), Block::new(&b, len));
            source.fill(8);
            let (pages, torn_at) = torn(&a, len, 50);
            let work = [
                template(
                    Op::Read,
                    (target.addr(), target.keys.local),
                    (source.addr(), source.keys.remote),
                    8 * len,
                ),
                template(Op::Write, (torn_at, pages.keys.local), (other.addr(), other.keys.remote), len),
            ];
            post(&a, ends.0, &work[..1], None, 0);
            post(&a, ends.0, &work[1..], None, 1);
            let found: Vec<_> = a.wait(2).iter().map(|c| (c.seq, c.status)).collect();
            assert_eq!(found, [(0, WcStatus::Success), (1, WcStatus::LocalAccess)], "{len} bytes");
            end(&a, &b, ends);
            target.expect(&pattern(8, 8 * len));
            expect_alive(&a, &b, bystanders, i as u64);
        }
    });
}

#[test]
fn only_the_write_whose_memory_is_revoked_on_the_way_fails() {
    const LONG: usize = 16 << 20;
    const ASKED: usize = 4 << 20;
    guarded(|| {
        let (a, b) = (Node::new().without_service(), Node::new().without_service());
        let ends = in_background(&a, &b, || connect(&a, &b));
        let (mut source, revoked) = (Block::new(&a, 1000), Block::new(&a, LONG));
        source.fill(2);
        let (target, far) = (Block::new(&b, 1000), Block::new(&b, LONG));
        let good = template(
            Op::Write,
            (source.addr(), source.keys.local),
            (target.addr(), target.keys.remote),
            1000,
        );
        let (mut asked, answer) = (Block::new(&b, ASKED), Block::new(&a, ASKED));
        asked.fill(3);
        let read =
            template(Op::Read, (answer.addr(), answer.keys.local), (asked.addr(), asked.keys.remote), ASKED);
        let bad =
            template(Op::Write, (revoked.addr(), revoked.keys.local), (far.addr(), far.keys.remote), LONG);
        for (seq, work) in (0..).zip([good, read, bad, good]) {
            post(&a, ends.0, &[work], None, seq);
        }
        a.until("the connection takes no more", |a| {
            a.fabric.serve(1 << 20);
            a.counter("sends_blocked") > 0
        });
        a.fabric.deregister(revoked.keys, soon()).unwrap();
        let (found, _) = outcomes(&a, &b, 4, 0);
        let expected = [
            (0, WcStatus::Success),
            (1, WcStatus::Success),
            (2, WcStatus::LocalAccess),
            (3, WcStatus::Flushed),
        ];
        assert_eq!(found, expected);
        target.expect(&pattern(2, 1000));
        answer.expect(&pattern(3, ASKED));
    });
}

#[test]
fn the_peers_acknowledgement_is_not_waited_for_without_end_and_nobody_else_is_blamed() {
    guarded(|| {
        let (a, b) = (Node::new(), Node::new().without_service());
        let ends = in_background(&a, &b, || connect(&a, &b));
        let (source, target) = (Block::new(&a, 1000), Block::new(&b, 1000));
        let (pages, torn_at) = torn(&a, 1000, 500);
        let write = |from| template(Op::Write, from, (target.addr(), target.keys.remote), 1000);
        let good = (source.addr(), source.keys.local);
        for (seq, from) in (0..).zip([good, good, (torn_at, pages.keys.local), good]) {
            post(&a, ends.0, &[write(from)], None, seq);
        }
        // `b` does nothing.
        let began = Instant::now();
        let found: Vec<_> = a.wait(4).iter().map(|c| (c.seq, c.status)).collect();
        let expected = [
            (0, WcStatus::Flushed),
            (1, WcStatus::Flushed),
            (2, WcStatus::LocalAccess),
            (3, WcStatus::Flushed),
        ];
        assert_eq!(found, expected);
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    });
}

#[test]
fn a_read_of_memory_that_is_not_mapped_is_refused_after_a_whole_frame() {
    guarded(|| {
        let (a, b, _, bystanders) = rig();
        let mut seq = 0;
        for len in SIZES {
            for good in [0, len / 2 / PAGE * PAGE] {
                let ends = connect(&a, &b);
                let (target, source) = (Block::new(&a, len), Pages::new(&b, len));
                source.protect(good, libc::PROT_NONE);
                let work = [template(
                    Op::Read,
                    (target.addr(), target.keys.local),
                    (source.addr(), source.keys.remote),
                    len,
                )];
                post(&a, ends.0, &work, None, 0);
                assert_eq!(a.wait(1)[0].status, WcStatus::RemoteAccess, "{len} bytes, {good} of them good");
                end(&a, &b, ends);
                expect_alive(&a, &b, bystanders, seq);
                seq += 1;
            }
        }
        assert_eq!(a.fabric.stats()["counters"]["malformed"], json!({}));
        assert_eq!(b.counter("zero_filled"), 6);
    });
}

// ---- descriptors

const CHILD: &str = "BATON_TCP_TEST_FEW_DESCRIPTORS";

/// The other process: has room for few connections, says how it fares whenever it is asked.
#[test]
fn child_process() {
    if std::env::var(CHILD).is_err() {
        return;
    }
    let node = Node::new();
    let (endpoint, address) = node.endpoint(false);
    println!("\n{}", json!({"address": address}));
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let limit = libc::rlimit { rlim_cur: open + 4, rlim_max: open + 4 };
    // SAFETY: sets a limit of this process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) }, 0);
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        if line.starts_with('{') {
            let (peer, give_up) = (serde_json::from_str(&line).unwrap(), soon());
            // What the flood holds is closed when the listener comes to it; until then this says that it has no descriptor.
            while let Err(error) = node.fabric.connect_endpoint(endpoint, &peer, give_up) {
                assert!(error.to_string().contains("Too many open files"), "{error}");
                assert!(Instant::now() < give_up, "{error}");
                std::thread::yield_now();
            }
        }
        println!("\n{}", node.fabric.stats());
    }
    std::process::exit(0);
}

struct Other {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Other {
    fn start() -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_process", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Other { child, lines }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn hear(&mut self) -> Value {
        let line = self.lines.by_ref().map_while(Result::ok).find(|l| l.starts_with('{'));
        serde_json::from_str(&line.expect("the child lives")).unwrap()
    }

    fn pauses(&mut self) -> u64 {
        self.say("how is it going");
        self.hear()["counters"]["accept_pauses"].as_u64().unwrap()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_process_without_descriptors_rests_its_listener_and_takes_connections_again() {
    guarded(|| {
        let mut other = Other::start();
        let address = other.hear()["address"].clone();
        // The limit is set before the first question is answered.
        assert_eq!(other.pauses(), 0);
        let began = Instant::now();
        let flood: Vec<_> = (0..40).map(|_| listener(&address)).collect();
        let give_up = soon();
        while other.pauses() < 3 {
            assert!(Instant::now() < give_up, "the listener never rests");
        }
        // No busy loop: a pause has a length, however slow the machine is.
        let (pauses, elapsed) = (other.pauses(), began.elapsed());
        assert!(u128::from(pauses) <= elapsed.as_millis() / 250 + 1, "{pauses} pauses in {elapsed:?}");
        drop(flood);
        let a = Node::new();
        let (active, own) = a.endpoint(true);
        other.say(&own.to_string());
        a.fabric.connect_endpoint(active, &address, soon()).unwrap();
        let stats = other.hear();
        assert_eq!(stats["counters"]["connections_accepted"], 1, "{stats}");
    });
}
