//! What strangers, liars and ghosts get at an engine's listener, and that nobody else notices.

mod common;

use baton_core::handshake::{HandshakeError, Initiator};
use baton_core::wire::{
    ConnInfo, EndpointOffer, FabricOffer, FrameReader, Hello, MemoryOffer, OneSidedOffer, Progress,
    ProtocolRange, SessionKey, TwoSidedLane, TwoSidedOffer, parse_candidate,
};
use baton_core::{Instance, wire};
use baton_driver::{Code, Driver, Status};
use baton_fabric::Op;
use common::*;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

fn info(engine: &Driver) -> ConnInfo {
    ConnInfo::decode(engine.conn_info()).expect("own connection information")
}

fn address(engine: &Driver) -> SocketAddr {
    parse_candidate(&info(engine).candidates[0]).expect("a candidate").addr
}

fn dial(engine: &Driver) -> TcpStream {
    let stream = TcpStream::connect(address(engine)).expect("connect");
    stream.set_read_timeout(Some(WATCHDOG)).expect("timeout");
    stream
}

/// Waits until the engine closes the connection; what it said before.
fn until_closed(mut stream: TcpStream) -> Vec<u8> {
    let mut said = Vec::new();
    let deadline = Instant::now() + WATCHDOG;
    let mut buffer = [0; 4096];
    while let Ok(n) = stream.read(&mut buffer) {
        if n == 0 {
            return said;
        }
        said.extend_from_slice(&buffer[..n]);
        assert!(Instant::now() < deadline, "the connection stays open");
    }
    assert!(Instant::now() < deadline, "the connection stays open");
    said
}

fn assert_still_works(a: &Driver, b: &Driver) {
    let (source, target) = (Buffer::new(a, 8192, 1), Buffer::new(b, 8192, 2));
    let xfer = scattered(a, Op::Write, "b", &source, &target, import(a, "b", b, &target), 1024);
    a.post(&xfer, Some(b"fine")).expect("post");
    done(a, &xfer);
    assert_eq!(notification(b).message, b"fine");
    assert_eq!(target.read(), reversed(&source.read(), 1024));
    target.assert_guards();
}

fn hello_of(sender: Instance, to: Instance) -> Hello {
    let endpoint = EndpointOffer { address: serde_json::json!({}), sq_depth: 16, rq_depth: 16, rail: 0 };
    let memory = MemoryOffer { addr: 4096, key: 1, bytes: 32768 };
    Hello {
        protocol: ProtocolRange::OURS,
        instance: sender,
        to_instance: to,
        name: "stranger".into(),
        attempt: 1,
        session: None,
        last_epoch: 0,
        progress: Progress::Thread,
        nonce: [9; 16],
        offers: vec![FabricOffer {
            fabric: "tcp".into(),
            address: serde_json::json!({}),
            max_message_bytes: 1 << 20,
            one_sided: Some(OneSidedOffer {
                immediate: true,
                control: endpoint.clone(),
                lanes: vec![endpoint],
                control_ring: memory,
                rings: vec![memory],
                credit_page: memory,
            }),
            two_sided: None,
        }],
        features: Vec::new(),
    }
}

#[test]
fn garbage_at_the_listener_ends_that_connection_only() {
    let (a, b) = pair(&["tcp"]);
    assert_still_works(&a, &b);
    let huge = [0xFFu8; 64];
    let mut short_frame = 8u32.to_le_bytes().to_vec();
    short_frame.extend_from_slice(b"abcdefgh");
    let mut json = 100u32.to_le_bytes().to_vec();
    json.extend_from_slice(&[0; 32]);
    json.extend_from_slice(&[b'{'; 68]);
    for garbage in [&huge[..], b"GET / HTTP/1.1\r\n\r\n", &short_frame, &json] {
        let mut stream = dial(&b);
        stream.write_all(garbage).expect("send");
        until_closed(stream);
    }
    assert_still_works(&a, &b);
}

#[test]
fn silent_connections_cost_a_bounded_time_and_block_nobody() {
    let (a, b) = pair(&["tcp"]);
    // More than the listener keeps at once, from the address that `a` comes from as well.
    let silent: Vec<_> = (0..200).map(|_| dial(&b)).collect();
    assert_still_works(&a, &b);
    for stream in silent {
        until_closed(stream);
    }
}

#[test]
fn a_peer_without_the_session_key_is_told_so_and_gets_nothing() {
    let (a, b) = pair(&["tcp"]);
    let mut stream = dial(&b);
    let hello = hello_of(Instance([7; 16]), info(&b).instance);
    let (awaiting, frame) = Initiator::start(SessionKey::new([1; 32]), hello).expect("frame");
    stream.write_all(&frame).expect("send");
    let mut reader = FrameReader::new();
    reader.feed(&until_closed(stream));
    let body = reader.next_frame().expect("a frame").expect("an answer").to_vec();
    let refused = awaiting.on_reply(&body).expect_err("refused").cause;
    assert!(
        matches!(&refused, HandshakeError::RefusedUnverified(r) if r.code == wire::ErrorCode::BadAuthenticator),
        "{refused}"
    );
    assert_still_works(&a, &b);
}

#[test]
fn connection_information_with_a_wrong_key_is_refused_by_the_peer() {
    let (a, b) = (engine("a", &["tcp"]), engine("b", &["tcp"]));
    let wrong = ConnInfo { key: SessionKey::new([3; 32]), ..info(&b) };
    a.load_remote(Some("b"), &wrong.encode().expect("encode")).expect("load");
    let error = a.connect("b", 10_000).expect_err("refused");
    assert!(error.text.contains("key"), "{error}");
    a.load_remote(Some("b"), b.conn_info()).expect("the right one replaces it");
    assert_still_works(&a, &b);
}

#[test]
fn engines_without_a_common_backend_say_so_before_anything_is_dialled() {
    let (a, b) = (engine("a", &["tcp"]), engine("b", &["tcp"]));
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    listener.set_nonblocking(true).expect("a socket");
    let nobody = listener.local_addr().expect("bound").to_string();
    for (words, shown) in [(vec!["two-sided".to_owned()], "two-sided"), (vec![], "none that is known")] {
        let other = ConnInfo { backends: words, candidates: vec![nobody.clone()], ..info(&b) };
        a.load_remote(Some("b"), &other.encode().expect("encode")).expect("load");
        let error = a.connect("b", 10_000).expect_err("refused");
        assert_eq!(error.code, Code::RemoteDisconnect, "{error}");
        let why =
            format!("no common backend: here one-sided, there {shown}; set BATON_BACKEND alike on both");
        assert!(error.text.contains(&why), "{error}");
        assert!(listener.accept().is_err(), "nothing was dialled");
    }
    a.load_remote(Some("b"), b.conn_info()).expect("the right one replaces it");
    assert_still_works(&a, &b);
}

#[test]
fn an_offer_of_another_backend_is_refused_by_name_and_costs_no_endpoints() {
    let (a, b) = pair(&["tcp"]);
    assert_still_works(&a, &b);
    let mut hello = hello_of(Instance([7; 16]), info(&b).instance);
    let one_sided = hello.offers[0].one_sided.take().expect("an offer");
    let lane = TwoSidedLane { endpoint: one_sided.control.clone(), posted: 1 };
    hello.offers[0].two_sided = Some(TwoSidedOffer {
        control: one_sided.control,
        lanes: vec![lane],
        slot_bytes: 65536,
        request_depth: 256,
        notify_window: 1 << 20,
        message_bytes: 4096,
        credit_page: one_sided.credit_page,
    });
    let mut stream = dial(&b);
    let (awaiting, frame) = Initiator::start(info(&b).key, hello).expect("frame");
    stream.write_all(&frame).expect("send");
    let mut reader = FrameReader::new();
    reader.feed(&until_closed(stream));
    let body = reader.next_frame().expect("a frame").expect("an answer").to_vec();
    let refused = awaiting.on_reply(&body).expect_err("refused").cause.to_string();
    let why = "no common backend: here one-sided, there two-sided; set BATON_BACKEND alike on both";
    assert!(refused.contains("NO_FABRIC") && refused.contains(why), "{refused}");
    assert_still_works(&a, &b);
}

#[test]
fn connection_information_of_an_engine_that_is_gone_fails_in_bounded_time() {
    let a = engine("a", &["tcp"]);
    let b = engine("b", &["tcp"]);
    let ghost = b.conn_info().to_vec();
    drop(b);
    a.load_remote(Some("b"), &ghost).expect("load");
    let started = Instant::now();
    let error = a.connect("b", 30_000).expect_err("nobody is there");
    assert_eq!(error.code, Code::RemoteDisconnect, "{error}");
    assert!(started.elapsed() < Duration::from_secs(15), "bounded by the connect deadline");
    assert!(matches!(a.notify("b", b"kept until its deadline"), Ok(())));
    let b = engine("b", &["tcp"]);
    a.load_remote(Some("b"), b.conn_info()).expect("load the new one");
    assert_still_works(&a, &b);
}

#[test]
fn names_and_bytes_that_are_none_are_refused_with_their_limit() {
    let (a, b) = pair(&["tcp"]);
    let long = "n".repeat(300);
    for (name, why) in [(long.as_str(), "300"), ("a\0b", "NUL"), ("", "empty")] {
        let error = a.connect(name, 0).expect_err("refused");
        assert_eq!(error.code, Code::InvalidParam);
        assert!(error.text.contains(why), "{error}");
    }
    let mut truncated = b.conn_info().to_vec();
    truncated.pop();
    assert_eq!(a.load_remote(None, &truncated).expect_err("truncated").code, Code::InvalidParam);
    let other = a.load_remote(Some("c"), b.conn_info()).expect_err("another name inside");
    assert!(other.text.contains("\"b\"") && other.text.contains("\"c\""), "{other}");
    assert_still_works(&a, &b);
}

#[test]
fn a_region_of_an_earlier_instance_is_stale_and_never_a_key_on_the_wire() {
    let (a, b) = pair(&["tcp"]);
    let old_target = Buffer::new(&b, 4096, 1);
    let old_blob = b.export(old_target.region).expect("export");
    let source = Buffer::new(&a, 4096, 2);
    let old =
        scattered(&a, Op::Write, "b", &source, &old_target, a.import("b", &old_blob).expect("import"), 4096);
    a.post(&old, None).expect("post");
    done(&a, &old);
    drop(b);
    let b = engine("b", &["tcp"]);
    a.load_remote(Some("b"), b.conn_info()).expect("load");
    let stale = a.import("b", &old_blob).expect("an import is kept");
    let error = a
        .create_xfer(Op::Write, "b", &[source.desc(0, 64, source.region)], &[old_target.desc(0, 64, stale)])
        .err()
        .expect("stale");
    assert_eq!(error.code, Code::Stale, "{error}");
    match a.post(&old, None) {
        Err(error) => assert_eq!(error.code, Code::NotFound, "{error}"),
        Ok(()) => assert!(matches!(wait(&a, &old), Status::Failed(_))),
    }
    assert_still_works(&a, &b);
}
