//! Connection information that leads to somebody who listens, and does not answer as an engine would.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_core::Instance;
use baton_core::wire::{Access, ConnInfo, RegionBlob};
use baton_host::{ErrorCode, Op};
use baton_tests::{Block, Node, PATIENCE, Remote};

use crate::{alone, befriend, node};

const BYTES: usize = 64 << 10;

/// Listens, and does with each connection what it was told.
struct Impostor {
    info: Vec<u8>,
    blob: Vec<u8>,
    connections: Arc<AtomicUsize>,
}

impl Impostor {
    /// `like`: an engine whose connection information is used with another instance, name and address.
    fn new(like: &Node, behave: impl Fn(TcpStream) + Send + 'static) -> Impostor {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
        let at = listener.local_addr().expect("bound").to_string();
        let info = ConnInfo::decode(&like.engine.conn_info().expect("info")).expect("its own");
        let instance = Instance([3; 16]);
        let info = ConnInfo { instance, name: "impostor".into(), candidates: vec![at], ..info };
        let memory = Block::new(&like.engine, BYTES, 1).expect("register");
        let blob = RegionBlob::decode(&memory.region().export().expect("export")).expect("a blob");
        let access = Access { remote_read: true, remote_write: true };
        let blob = RegionBlob { instance, access, ..blob }.encode().expect("a blob");
        let connections = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&connections);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                count.fetch_add(1, Ordering::SeqCst);
                behave(stream);
            }
        });
        Impostor { info: info.encode().expect("encode"), blob, connections }
    }
}

/// A node and a peer that behaves, and how to see that they go on.
fn scene() -> (Node, Node) {
    let (a, b) = (node("a", "tcp"), node("b", "tcp"));
    befriend((&a, "a"), (&b, "b"));
    assert_goes_on(&a, &b, 5);
    (a, b)
}

fn assert_goes_on(a: &Node, b: &Node, seed: u64) {
    let (here, there) = (
        Block::new(&a.engine, BYTES, seed).expect("register"),
        Block::new(&b.engine, BYTES, 99).expect("register"),
    );
    let blob = there.region().export().expect("export");
    let remote = Remote::import(a, "b", &blob, there.region().addr()).expect("import");
    let write = a.scattered(Op::Write, &here, &remote, 4096).expect("create");
    a.run(&write, Some(b"on"));
    b.expect_notification("a", b"on");
    there.assert_holds_reversed(seed, 4096, "at the peer that behaves");
}

fn test(name: &str, body: impl FnOnce(&Node, &Node)) {
    alone(&format!("{}::{name}", module_path!()), || {
        let (a, b) = scene();
        body(&a, &b);
        assert_goes_on(&a, &b, 6);
    });
}

#[test]
fn who_closes_or_talks_nonsense_is_an_error_that_says_so() {
    test("who_closes_or_talks_nonsense_is_an_error_that_says_so", |a, b| {
        let behaviours: [fn(TcpStream); 4] = [
            drop,
            |mut stream| stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap_or_default(),
            |mut stream| stream.write_all(&[0; 64]).unwrap_or_default(),
            |mut stream| {
                // What it hears, back.
                let mut buffer = [0; 4096];
                let n = stream.read(&mut buffer).unwrap_or_default();
                stream.write_all(&buffer[..n]).unwrap_or_default();
            },
        ];
        for behave in behaviours {
            let impostor = Impostor::new(b, behave);
            a.load("impostor", &impostor.info);
            let error = a.engine.connect("impostor", PATIENCE).expect_err("no engine");
            assert!(error.code != ErrorCode::Timeout && error.text.contains("impostor"), "{error}");
            assert!(impostor.connections.load(Ordering::SeqCst) > 0);
            a.engine.disconnect("impostor").expect("disconnect");
            assert_goes_on(a, b, 7);
        }
    });
}

#[test]
fn many_callers_towards_one_who_says_nothing_make_one_attempt_and_get_one_error() {
    test("many_callers_towards_one_who_says_nothing_make_one_attempt_and_get_one_error", |a, b| {
        let kept = std::sync::Mutex::new(Vec::new());
        let impostor = Impostor::new(b, move |stream| kept.lock().expect("unpoisoned").push(stream));
        a.load("impostor", &impostor.info);
        let here = Block::new(&a.engine, BYTES, 1).expect("register");
        let addr = RegionBlob::decode(&impostor.blob).expect("a blob").base;
        let remote = Remote::import(a, "impostor", &impostor.blob, addr).expect("import");
        let create = |_| a.scattered(Op::Write, &here, &remote, 4096).expect("create");
        let transfers: Vec<_> = (0..16).map(create).collect();
        std::thread::scope(|scope| {
            for transfer in &transfers {
                scope.spawn(|| transfer.post(Some(b"never")).expect("post"));
            }
        });
        assert_goes_on(a, b, 7);
        let errors: Vec<_> = transfers.iter().map(|t| a.finish(t).expect_err("nobody answers")).collect();
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        assert_eq!(errors[0].code, ErrorCode::RemoteDisconnect, "{}", errors[0]);
        assert_eq!(impostor.connections.load(Ordering::SeqCst), 1, "one attempt for all");
        here.assert_holds(1, "at the source");
    });
}
