//! A process without free descriptors does not burn a core at its listener, and goes on once there are some. The limit
//! is the process's, so this test is alone in its binary.

mod common;

use baton_core::wire::{ConnInfo, parse_candidate};
use common::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Socket, Type};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// The listener's rest, as the driver has it.
const PAUSE: Duration = Duration::from_millis(500);

fn pauses(engine: &baton_driver::Driver) -> u64 {
    let stats: serde_json::Value = serde_json::from_str(&engine.stats()).expect("json");
    stats["counters"]["listener_pauses"].as_u64().expect("a counter")
}

#[test]
fn a_listener_without_descriptors_rests_and_comes_back() {
    let b = engine("b", &["tcp"]);
    let info = ConnInfo::decode(b.conn_info()).expect("own");
    let address = parse_candidate(&info.candidates[0]).expect("a candidate").addr;
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("socket");
    let before = getrlimit(Resource::Nofile);
    // No new descriptor fits below the lowest free number.
    let free = std::fs::File::open("/dev/null").expect("open");
    let lowest = std::os::fd::AsRawFd::as_raw_fd(&free) as u64;
    drop(free);
    setrlimit(Resource::Nofile, Rlimit { current: Some(lowest), maximum: before.maximum })
        .expect("lower the limit");
    let started = Instant::now();
    socket.connect(&address.into()).expect("the kernel accepts into the backlog");
    while pauses(&b) < 2 {
        assert!(started.elapsed() < WATCHDOG, "the listener never noticed");
        std::thread::yield_now();
    }
    let most = 1 + started.elapsed().as_nanos() / PAUSE.as_nanos();
    assert!(u128::from(pauses(&b)) <= most, "more pauses than fit the time: it does not rest");
    setrlimit(Resource::Nofile, before).expect("restore the limit");
    let mut stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(WATCHDOG)).expect("timeout");
    stream.write_all(&[0xFF; 64]).expect("send garbage");
    let mut rest = Vec::new();
    // By FIN or by reset, but not by silence.
    if let Err(e) = stream.read_to_end(&mut rest) {
        assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}");
    }
}
