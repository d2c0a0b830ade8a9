//! TCP against strangers, liars, dead and stopped peers: whoever misbehaves loses its own connection and nothing else.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use baton_fabric::*;
use baton_fabric_soft::tcp::TcpConfig;
use baton_fabric_soft::tcp::frame::{self, FrameOp, Header, Piece};
use serde_json::{Value, json};

#[allow(dead_code, reason = "the rig holds more than these tests need")]
mod tcp_support;

use tcp_support::*;

// ---- at the listener

#[test]
fn garbage_at_the_listener_is_closed_and_counted() {
    guarded(|| {
        let (a, b) = (Node::new(), Node::new());
        let ends = connect(&a, &b);
        let address = b.fabric.address();
        for garbage in [
            &b"GET / HTTP/1.1\r\n\r\n"[..],
            &[0; 64],
            &[0xff; 4096],
            b"BATONTCP but not really, sixty-four bytes of it are needed here..",
        ] {
            let mut stream = listener(&address);
            let _ = stream.write_all(garbage);
            closed(stream);
        }
        b.until("four are counted", |b| b.counter("half_open_garbage") + b.counter("half_open_version") >= 4);
        expect_alive(&a, &b, ends, 0);
        assert_eq!(b.fabric.stats()["half_open"], 0);
    });
}

#[test]
fn a_flood_of_silent_connections_does_not_keep_a_peer_out() {
    guarded(|| {
        let (a, b) = (Node::new(), Node::new());
        let address = b.fabric.address();
        let flood: Vec<TcpStream> = (0..200).map(|_| listener(&address)).collect();
        let ends = connect(&a, &b);
        expect_alive(&a, &b, ends, 0);
        b.until("the oldest are pushed out", |b| b.counter("half_open_evicted") >= 100);
        assert!(b.fabric.stats()["half_open"].as_u64().unwrap() <= 64);
        b.until("the others expire", |b| {
            b.counter("half_open_expired") > 0 && b.fabric.stats()["half_open"] == 0
        });
        flood.into_iter().for_each(closed);
    });
}

#[test]
fn an_unknown_token_is_refused_by_name() {
    guarded(|| {
        let (a, b) = (Node::new(), Node::new());
        let (endpoint, _) = a.endpoint(true);
        let mut address = b.endpoint(false).1;
        address["token"] = json!("00112233445566778899aabbccddeeff");
        let error = a.fabric.connect_endpoint(endpoint, &address, soon()).unwrap_err().to_string();
        assert!(error.contains("no such endpoint"), "{error}");
        b.until("it is counted", |b| b.counter("half_open_unknown") == 1);
        expect_alive(&a, &b, connect(&a, &b), 0);
    });
}

#[test]
fn a_probe_is_not_an_attack() {
    guarded(|| {
        let (a, b) = (Node::new(), Node::new());
        a.fabric.reach(&b.fabric.address(), soon()).unwrap();
        b.until("the probe is counted", |b| b.counter("probes") == 1);
        assert_eq!(b.counter("half_open_garbage") + b.counter("half_open_gone"), 0);
        let nobody = json!({"version": 1, "candidates": ["127.0.0.1:1"]});
        assert!(a.fabric.reach(&nobody, soon()).unwrap_err().contains("127.0.0.1:1"));
    });
}

#[test]
fn the_first_candidate_that_leads_to_the_endpoint_is_taken() {
    guarded(|| {
        let (a, b, stranger) = (Node::new(), Node::new(), Node::new());
        let (active, mut passive) = (a.endpoint(true), b.endpoint(false));
        let mine = passive.1["candidates"][0].clone();
        // Nobody; a Baton fabric that is somebody else; an interface that is not here; and the right one.
        let other = stranger.fabric.address()["candidates"][0].clone();
        passive.1["candidates"] = json!(["127.0.0.1:1", other, "[fe80::1%nosuch0]:9", mine]);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| b.fabric.connect_endpoint(passive.0, &active.1, soon()).unwrap());
            a.fabric.connect_endpoint(active.0, &passive.1, soon()).unwrap();
            waits.join().unwrap();
        });
        expect_alive(&a, &b, (active.0, passive.0), 0);
        assert_eq!(stranger.counter("half_open_unknown"), 1);
    });
}

// ---- on a connection

/// A peer that speaks the hello and then whatever the test wants.
struct Liar {
    stream: TcpStream,
    epoch: u32,
    endpoint: EndpointId,
}

impl Liar {
    fn new(victim: &Node) -> Liar {
        let (endpoint, address) = victim.endpoint(false);
        let mut stream = listener(&address);
        let token: Vec<u8> = (0..16)
            .map(|i| u8::from_str_radix(&address["token"].as_str().unwrap()[2 * i..2 * i + 2], 16).unwrap())
            .collect();
        let epoch = 7u32;
        let mut hello = b"BATONTCP\x01\x00\x01\x00".to_vec();
        hello.extend_from_slice(&epoch.to_le_bytes());
        hello.extend_from_slice(&token);
        hello.extend_from_slice(&[0xab; 16]);
        hello.resize(64, 0);
        stream.write_all(&hello).unwrap();
        let mut reply = [0; 32];
        stream.read_exact(&mut reply).unwrap();
        assert_eq!((&reply[..8], reply[10]), (&b"BATONTCP"[..], 0));
        let mut own = address.clone();
        own["token"] = json!("ab".repeat(16));
        victim.fabric.connect_endpoint(endpoint, &own, soon()).unwrap();
        Liar { stream, epoch, endpoint }
    }

    fn header(&self, op: FrameOp) -> Header {
        Header { op, ..Header::ack(self.epoch, 0) }
    }

    fn say(&mut self, header: &Header, pieces: &[Piece], payload: &[u8]) {
        let mut bytes = Vec::new();
        frame::encode(&mut bytes, header);
        pieces.iter().for_each(|p| frame::encode_piece(&mut bytes, p));
        bytes.extend_from_slice(payload);
        let _ = self.stream.write_all(&bytes);
    }
}

#[test]
fn a_malformed_frame_costs_its_sender_the_connection_and_nobody_else_anything() {
    guarded(|| {
        let (a, b) = (Node::new(), Node::new());
        let ends = connect(&a, &b);
        let piece = Piece { key: 1, addr: 2, len: 10 };
        type Lie = fn(&Liar, Piece) -> (Header, Vec<Piece>);
        let lies: [(&str, Lie); 9] = [
            ("epoch", |l, _| (Header { epoch: 8, ..l.header(FrameOp::Ack) }, vec![])),
            ("ack", |l, _| (Header { ack: 1, ..l.header(FrameOp::Ack) }, vec![])),
            ("sequence", |l, p| {
                (Header { seq: 1, count: 1, ends: 1, len: 10, ..l.header(FrameOp::Write) }, vec![p])
            }),
            ("payload_mismatch", |l, p| {
                (Header { count: 1, ends: 1, len: 11, ..l.header(FrameOp::Write) }, vec![p])
            }),
            ("payload_too_long", |l, p| {
                (Header { count: 1, ends: 1, len: 300_000, ..l.header(FrameOp::Write) }, vec![p])
            }),
            ("piece_length", |l, p| {
                (Header { count: 1, ends: 1, ..l.header(FrameOp::ReadReq) }, vec![Piece { len: 0, ..p }])
            }),
            ("unexpected_answer", |l, _| (Header { len: 10, ..l.header(FrameOp::ReadResp) }, vec![])),
            ("refusal", |l, _| (Header { status: frame::Status::Access, ..l.header(FrameOp::Nak) }, vec![])),
            ("continuation", |l, _| {
                (Header { len: 10, ends: 1, message_bytes: 11, ..l.header(FrameOp::Send) }, vec![])
            }),
        ];
        for (i, (reason, lie)) in lies.into_iter().enumerate() {
            let mut liar = Liar::new(&b);
            b.fabric.post_recv(liar.endpoint, &[RecvSlot::default()]).unwrap();
            let (header, pieces) = lie(&liar, piece);
            liar.say(&header, &pieces, &[0; 10]);
            let flushed = b.wait(1)[0];
            assert_eq!(
                (flushed.endpoint, flushed.kind),
                (liar.endpoint, CompletionKind::RecvFlushed),
                "{reason}"
            );
            assert_eq!(b.malformed(reason), 1, "{reason}: {}", b.fabric.stats());
            closed(liar.stream);
            b.fabric.destroy_endpoint(liar.endpoint);
            expect_alive(&a, &b, ends, i as u64);
        }
    });
}

#[test]
fn more_reads_than_agreed_are_malformed() {
    guarded(|| {
        let b = Node::new();
        let block = Block::new(&b, 4 << 20);
        let mut liar = Liar::new(&b);
        // Nobody reads the answers, so they stay outstanding.
        let pieces = [Piece { key: block.keys.remote, addr: block.addr(), len: 4 << 20 }; 256];
        for i in 0..5 {
            let header = Header { count: 256, ends: 256, seq: 256 * i, ..liar.header(FrameOp::ReadReq) };
            liar.say(&header, &pieces, &[]);
        }
        b.until("it is found out", |b| b.malformed("too_many_reads") == 1);
        block.expect(&vec![SENTINEL; 4 << 20]);
    });
}

#[test]
fn a_write_that_stops_in_the_middle_ends_with_the_connection_and_is_not_delivered() {
    guarded(|| {
        let b = Node::new();
        let block = Block::new(&b, 1000);
        let mut liar = Liar::new(&b);
        b.fabric.post_recv(liar.endpoint, &[RecvSlot { id: 5, ..RecvSlot::default() }]).unwrap();
        let piece = Piece { key: block.keys.remote, addr: block.addr(), len: 1000 };
        let header =
            Header { count: 1, ends: 1, len: 1000, imm: 3, message_bytes: 1000, ..liar.header(FrameOp::Imm) };
        liar.say(&header, &[piece], &[1; 400]);
        let endpoint = liar.endpoint;
        drop(liar);
        let end = b.wait(1)[0];
        assert_eq!((end.endpoint, end.kind, end.seq), (endpoint, CompletionKind::RecvFlushed, 5));
        assert!(b.fabric.is_quiet(endpoint));
        let mut expected = vec![1; 400];
        expected.resize(1000, SENTINEL);
        block.expect(&expected);
    });
}

/// A slot on `b` for messages with a head, and a header of one.
fn headed(b: &Node, liar: &Liar, room: &Block) -> Header {
    assert!(b.fabric.receive_heads(liar.endpoint));
    let local_key = room.keys.local;
    let slot = RecvSlot { addr: room.addr(), local_key, len_bytes: 1000, id: 5 };
    b.fabric.post_recv(liar.endpoint, &[slot]).unwrap();
    Header {
        flags: frame::HEAD,
        len: 1000,
        imm: 64,
        message_bytes: 1000,
        ends: 1,
        ..liar.header(FrameOp::Send)
    }
}

#[test]
fn a_message_that_stops_behind_its_head_ends_with_the_connection_and_its_place_is_left_alone() {
    guarded(|| {
        let b = Node::new();
        let (room, place) = (Block::new(&b, 1000), Block::new(&b, 936));
        let mut liar = Liar::new(&b);
        let header = headed(&b, &liar, &room);
        liar.say(&header, &[], &[1; 464]);
        let head = b.wait(1)[0];
        let kind = CompletionKind::RecvHead { head_bytes: 64 };
        assert_eq!((head.endpoint, head.kind, head.seq, head.len_bytes), (liar.endpoint, kind, 5, 1000));
        let take = |addr| b.fabric.take(liar.endpoint, &[Rest { to: Some(addr), len_bytes: 936 }]);
        // It may be told that there is more for every part of it.
        b.until("what there is has been taken", |_| {
            let untaken = take(place.addr());
            assert_eq!(untaken, (0, Some(Untaken::Later)));
            place.now().iter().filter(|byte| **byte == 1).count() == 400
        });
        let endpoint = liar.endpoint;
        drop(liar.stream);
        b.until("it has ended", |b| {
            b.fabric.is_quiet(endpoint) || take(place.addr()).1 == Some(Untaken::Gone)
        });
        assert_eq!(take(place.addr()), (0, Some(Untaken::Gone)));
        let mut expected = vec![1; 400];
        expected.resize(936, SENTINEL);
        place.expect(&expected);
        let mut expected = vec![1; 64];
        expected.resize(1000, SENTINEL);
        room.expect(&expected);
    });
}

#[test]
fn a_head_in_the_middle_of_a_message_is_malformed() {
    guarded(|| {
        let b = Node::new();
        let room = Block::new(&b, 1000);
        let mut liar = Liar::new(&b);
        let header = headed(&b, &liar, &room);
        let first = Header { flags: frame::MORE, len: 500, imm: 0, ends: 0, ..header };
        liar.say(&first, &[], &[1; 500]);
        liar.say(&Header { len: 500, ..header }, &[], &[2; 500]);
        b.until("it is found out", |b| b.malformed("continuation") == 1);
        let mut expected = vec![1; 500];
        expected.resize(1000, SENTINEL);
        room.expect(&expected);
    });
}

#[test]
fn deregistering_in_the_middle_of_an_inbound_write_leaves_the_memory_alone() {
    guarded(|| {
        let b = Node::new();
        let mut block = Block::new(&b, 200_000);
        let mut liar = Liar::new(&b);
        let piece = Piece { key: block.keys.remote, addr: block.addr(), len: 200_000 };
        let header = Header { count: 1, ends: 1, len: 200_000, ..liar.header(FrameOp::Write) };
        liar.say(&header, &[piece], &[1; 100_000]);
        b.until("the first half is placed", |_| block.now()[MARGIN + 99_999] == 1);
        b.fabric.deregister(block.keys, soon()).unwrap();
        block.fill(9);
        liar.stream.write_all(&[1; 100_000]).unwrap();
        let mut refusal = [0; frame::HEADER];
        liar.stream.read_exact(&mut refusal).unwrap();
        let refusal = frame::decode(&refusal, liar.epoch).unwrap();
        assert_eq!((refusal.op, refusal.seq, refusal.status), (FrameOp::Nak, 0, frame::Status::Access));
        closed(liar.stream);
        block.expect(&pattern(9, 200_000));
    });
}

#[test]
fn a_region_revoked_while_it_is_read_is_finished_with_zeros_and_refused() {
    guarded(|| {
        const LEN: usize = 8 << 20;
        let b = Node::new();
        let mut blocks: Vec<Block> = (0..3).map(|_| Block::new(&b, LEN)).collect();
        blocks.iter_mut().for_each(|block| block.fill(11));
        let mut liar = Liar::new(&b);
        let piece = |block: &Block| Piece { key: block.keys.remote, addr: block.addr(), len: LEN as u32 };
        let pieces: Vec<Piece> = blocks.iter().map(piece).collect();
        let header = Header { count: 3, ends: 3, ..liar.header(FrameOp::ReadReq) };
        liar.say(&header, &pieces, &[]);
        // The answers fill the sockets' buffers and then wait, because nobody reads them.
        b.until("the socket is full", |b| b.counter("sends_blocked") > 0);
        let blocked_at = b.counter("bytes_sent") as usize;
        assert!(blocked_at < 3 * LEN, "more fits the socket's buffers than this test has");
        for block in &mut blocks {
            b.fabric.deregister(block.keys, soon()).unwrap();
            block.fill(12);
        }
        let (answers, refusal) = read_answers(&mut liar);
        assert_eq!((refusal.op, refusal.status), (FrameOp::Nak, frame::Status::Access));
        assert_eq!(refusal.seq as usize, answers.good / LEN, "the first one that is not whole");
        assert!(answers.aborted);
        let original = pattern(11, LEN);
        for (i, byte) in answers.bytes.iter().enumerate() {
            let zero_filled = i >= answers.good && *byte == 0;
            assert!(zero_filled || *byte == original[i % LEN], "byte {i} of the answers is {byte}");
        }
        closed(liar.stream);
        assert_eq!(b.counter("zero_filled"), 1);
    });
}

#[derive(Default)]
struct Answers {
    bytes: Vec<u8>,
    good: usize,
    aborted: bool,
}

/// Everything until the refusal.
fn read_answers(liar: &mut Liar) -> (Answers, Header) {
    let mut answers = Answers::default();
    loop {
        let mut header = [0; frame::HEADER];
        liar.stream.read_exact(&mut header).unwrap();
        let header = frame::decode(&header, liar.epoch).unwrap();
        if header.op != FrameOp::ReadResp {
            return (answers, header);
        }
        assert!(!answers.aborted, "an answer after one that was cut short");
        assert_eq!(header.seq as usize, answers.bytes.len());
        let mut payload = vec![0; header.len as usize];
        liar.stream.read_exact(&mut payload).unwrap();
        answers.bytes.extend_from_slice(&payload);
        let mut trailer = [0; frame::TRAILER];
        liar.stream.read_exact(&mut trailer).unwrap();
        match frame::decode_trailer(&trailer).unwrap() {
            true => answers.good = answers.bytes.len(),
            false => answers.aborted = true,
        }
    }
}

// ---- volume

#[test]
fn ten_thousand_small_writes_with_immediates_all_arrive() {
    guarded(|| {
        const COUNT: usize = 10_000;
        const LEN: usize = 96;
        let (a, b) = (Node::new(), Node::new());
        let ends = connect(&a, &b);
        let (mut source, target) = (Block::new(&a, COUNT * LEN), Block::new(&b, COUNT * LEN));
        source.fill(3);
        b.fabric.post_recv(ends.1, &[RecvSlot::default(); DEPTH as usize]).unwrap();
        let (mut posted, mut done, mut seen) = (0, 0, 0);
        let (mut out, give_up) = ([Completion::EMPTY; 32], soon() + Duration::from_secs(20));
        while seen < COUNT || done < COUNT {
            assert!(
                Instant::now() < give_up,
                "{posted} posted, {done} done, {seen} seen; {}",
                a.fabric.stats()
            );
            while posted < COUNT && posted - done.min(seen) < DEPTH as usize {
                let at = (posted * LEN) as u64;
                let work = [template(
                    Op::Write,
                    (source.addr() + at, source.keys.local),
                    (target.addr() + at, target.keys.remote),
                    LEN,
                )];
                post(&a, ends.0, &work, Some(posted as u32), posted as u64);
                posted += 1;
            }
            let n = a.fabric.poll(&mut out);
            for c in &out[..n] {
                assert_eq!((c.status, c.seq), (WcStatus::Success, done as u64));
                done += 1;
            }
            let n = b.fabric.poll(&mut out);
            for c in &out[..n] {
                let expected = (CompletionKind::RecvImm(seen as u32), LEN as u32);
                assert_eq!((c.kind, c.len_bytes), expected, "{}", b.fabric.stats());
                let at = MARGIN + seen * LEN;
                assert_eq!(
                    target.bytes[at..at + LEN],
                    source.bytes[at..at + LEN],
                    "bytes of immediate {seen}"
                );
                seen += 1;
            }
            b.fabric.post_recv(ends.1, &vec![RecvSlot::default(); n]).unwrap();
        }
        target.expect(&pattern(3, COUNT * LEN));
        assert_eq!(b.counter("recv_waits"), 0);
    });
}

#[test]
fn bulk_arrives_whole_whoever_sends_it_and_whether_or_not_its_poster_polls() {
    guarded(|| {
        const COUNT: usize = 48;
        const LEN: usize = 1 << 20;
        for (io_threads, polls) in [(0, true), (0, false), (1, true), (1, false)] {
            let config = TcpConfig { io_threads, ..TcpConfig::default() };
            let (a, b) = (Node::with(config), Node::new());
            let ends = connect(&a, &b);
            let (mut source, target) = (Block::new(&a, COUNT * LEN), Block::new(&b, COUNT * LEN));
            source.fill(5);
            let one = |n: usize| {
                let at = (n * LEN) as u64;
                let (from, to) = (source.addr() + at, target.addr() + at);
                template(Op::Write, (from, source.keys.local), (to, target.keys.remote), LEN)
            };
            post(&a, ends.0, &(0..COUNT).map(one).collect::<Vec<_>>(), None, 0);
            if !polls {
                let told = |node: &Node| node.fabric.stats()["endpoints"][0]["placed"] == COUNT;
                b.until("all WRITEs to be placed", told);
            }
            let last = a.wait(1)[0];
            assert_eq!((last.status, last.seq), (WcStatus::Success, COUNT as u64 - 1));
            target.expect(&pattern(5, COUNT * LEN));
        }
    });
}

// ---- other processes

const CHILD: &str = "BATON_TCP_TEST_CHILD";
const BULK: usize = 64 << 20;

/// The other process: offers memory and an endpoint, serves until it is told to end, killed or stopped.
#[test]
fn child_process() {
    if std::env::var(CHILD).is_err() {
        return;
    }
    let node = Node::new();
    let block = Block::new(&node, BULK);
    let (endpoint, address) = node.endpoint(false);
    println!("\n{}", json!({"address": address, "addr": block.addr(), "key": block.keys.remote}));
    let mut text = String::new();
    std::io::stdin().lock().read_line(&mut text).unwrap();
    node.fabric.connect_endpoint(endpoint, &serde_json::from_str(&text).unwrap(), soon()).unwrap();
    let _ = std::io::stdin().lock().read_line(&mut text);
    std::process::exit(0);
}

struct Other {
    child: Child,
    endpoint: EndpointId,
    addr: u64,
    key: u64,
}

impl Other {
    fn start(node: &Node) -> Other {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_process", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let hello =
            lines.map_while(Result::ok).find(|l| l.starts_with('{')).expect("the child says where it is");
        let hello: Value = serde_json::from_str(&hello).unwrap();
        let (endpoint, address) = node.endpoint(true);
        writeln!(child.stdin.as_mut().unwrap(), "{address}").unwrap();
        node.fabric.connect_endpoint(endpoint, &hello["address"], soon()).unwrap();
        Other { child, endpoint, addr: hello["addr"].as_u64().unwrap(), key: hello["key"].as_u64().unwrap() }
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: a signal to our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as libc::pid_t, signal) }, 0);
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_killed_peer_fails_the_oldest_work_request_and_flushes_the_rest() {
    guarded(|| {
        for op in [Op::Write, Op::Read] {
            let node = Node::new();
            let other = Other::start(&node);
            let block = Block::new(&node, BULK);
            const PIECE: usize = 1 << 20;
            let work: Vec<Template> = (0..BULK / PIECE)
                .map(|i| (i * PIECE) as u64)
                .map(|at| {
                    template(op, (block.addr() + at, block.keys.local), (other.addr + at, other.key), PIECE)
                })
                .collect();
            let mut seq = 0;
            let mut all = Vec::new();
            // Enough to be killed in the middle; then whatever was posted must come out.
            let mut out = [Completion::EMPTY; 16];
            for round in 0..4 {
                if round == 2 {
                    other.signal(libc::SIGKILL);
                }
                post(&node, other.endpoint, &work, None, seq);
                seq += work.len() as u64;
                let n = node.fabric.poll(&mut out);
                all.extend_from_slice(&out[..n]);
            }
            let last = |all: &[Completion]| all.last().is_some_and(|c: &Completion| c.seq == seq - 1);
            while !last(&all) {
                all.extend(node.wait(1));
            }
            let failed = all.iter().position(|c| c.status != WcStatus::Success).expect("something failed");
            assert!(
                matches!(all[failed].status, WcStatus::PeerGone | WcStatus::Flushed),
                "{:?}",
                all[failed]
            );
            assert!(all[failed + 1..].iter().all(|c| c.status == WcStatus::Flushed));
            assert!(all.windows(2).all(|w| w[0].seq < w[1].seq));
            node.fabric.fence(other.endpoint);
            node.until("it is quiet", |n| n.fabric.is_quiet(other.endpoint));
        }
    });
}

#[test]
fn a_stopped_peer_delays_nobody_else_and_goes_on_when_it_is_continued() {
    guarded(|| {
        let (a, b) = (Node::new(), Node::new());
        let ends = connect(&a, &b);
        let other = Other::start(&a);
        let mut block = Block::new(&a, BULK);
        block.fill(4);
        other.signal(libc::SIGSTOP);
        let piece = |op| template(op, (block.addr(), block.keys.local), (other.addr, other.key), 16 << 20);
        post(&a, other.endpoint, &[piece(Op::Write)], None, 0);
        for seq in 0..50 {
            expect_alive(&a, &b, ends, seq);
        }
        // And in the other direction, from the side whose sending is blocked.
        let (source, target) = (Block::new(&a, 3 << 20), Block::new(&b, 3 << 20));
        let work = [template(
            Op::Read,
            (target.addr(), target.keys.local),
            (source.addr(), source.keys.remote),
            3 << 20,
        )];
        post(&b, ends.1, &work, None, 0);
        assert_eq!(b.wait(1)[0].status, WcStatus::Success);
        other.signal(libc::SIGCONT);
        let done = a.wait(1)[0];
        assert_eq!((done.endpoint, done.status), (other.endpoint, WcStatus::Success));
        // What was written is read back.
        let back = Block::new(&a, 16 << 20);
        let read = template(Op::Read, (back.addr(), back.keys.local), (other.addr, other.key), 16 << 20);
        post(&a, other.endpoint, &[read], None, 1);
        assert_eq!(a.wait(1)[0].status, WcStatus::Success);
        back.expect(&pattern(4, 16 << 20));
    });
}
