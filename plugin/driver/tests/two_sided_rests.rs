//! Messages that go past their slots on the software fabrics: straight to the host's memory, which nothing holds while a peer stops in
//! the middle of one.

mod two_pair;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use baton_core::two_sided::codec::{Direction, Status};
use baton_core::two_sided::report::{TwoCancel, XferFailure};
use baton_fabric::Fabric;
use baton_fabric_soft::tcp::{TcpConfig, TcpFabric};

use two_pair::*;

/// Side 1 sends without a checksum of the data, so what it sends has a head.
const FROM: usize = 1;
const TO: usize = 0;
const AT: usize = 4096;
/// Of what does not fit into the sockets' buffers.
const LEN: usize = 1 << 20;

fn heads(pair: &Pair) -> u64 {
    pair.sides[TO].exec().channel.counters().heads_received
}

fn arrive_byte_for_byte(setting: Setting) {
    let mut pair = Pair::new(setting);
    let len = 9_000_001;
    pair.sides[FROM].data.at(AT, len).copy_from_slice(&pattern(1, len));
    pair.sides[FROM].data.at(12 << 20, len).copy_from_slice(&pattern(2, len));
    pair.submit(FROM, 1, Direction::Write, &[(AT, AT + 64, len)], b"written");
    pair.submit(TO, 2, Direction::Read, &[(12 << 20, 12 << 20, len)], b"read");
    pair.until("both end", |sides| sides[0].done.len() == 1 && sides[1].done.len() == 1);
    assert_eq!((&pair.sides[FROM].done[0], &pair.sides[TO].done[0]), (&(1, Ok(())), &(2, Ok(()))));
    let data = &pair.sides[TO].data;
    assert_eq!(data.at(AT + 64, len), pattern(1, len));
    assert_eq!(data.at(12 << 20, len), pattern(2, len));
    for (at, len) in [(0, AT + 64), (AT + 64 + len, 4096), ((12 << 20) + len, 4096)] {
        assert!(data.at(at, len).iter().all(|byte| *byte == 0), "beside them");
    }
    let counters = pair.sides[TO].exec().channel.counters();
    let chunks = 2 * (len / SLOT as usize) as u64;
    assert!(counters.heads_received >= chunks && counters.rests_lost == 0, "{counters:?}");
    assert_eq!(data.held.0.load(Ordering::Acquire), 0, "nothing is held");
}

#[test]
fn over_tcp_long_blocks_arrive_byte_for_byte() {
    arrive_byte_for_byte(tcp());
    arrive_byte_for_byte(tcp().registered());
}

#[test]
fn over_the_local_fabric_long_blocks_arrive_byte_for_byte() {
    arrive_byte_for_byte(local());
    arrive_byte_for_byte(local().registered());
    arrive_byte_for_byte(local().copied_by_threads());
}

fn survive_lost_connections(setting: Setting) {
    let mut pair = Pair::new(setting);
    let len = 20 << 20;
    pair.sides[FROM].data.at(AT, len).copy_from_slice(&pattern(1, len));
    pair.submit(FROM, 1, Direction::Write, &[(AT, AT, len)], b"written");
    for round in 1..5u64 {
        let wanted = heads(&pair) + 20 * round;
        pair.until("it gets on", |sides| {
            sides[TO].exec().channel.counters().heads_received >= wanted || sides[FROM].done.len() == 1
        });
        pair.reconnect();
    }
    pair.until("it ends", |sides| sides[FROM].done.len() == 1 && sides[TO].delivered.len() == 1);
    assert_eq!(pair.sides[FROM].done[0], (1, Ok(())));
    assert_eq!(pair.sides[TO].data.at(AT, len), pattern(1, len));
    assert_eq!(pair.sides[TO].delivered, [b"written".to_vec()]);
}

#[test]
fn over_tcp_a_transfer_that_loses_its_connection_is_finished() {
    survive_lost_connections(tcp());
}

#[test]
fn over_the_local_fabric_a_transfer_that_loses_its_connection_is_finished() {
    survive_lost_connections(local().registered());
}

/// A peer whose messages do not fit into the sockets' buffers, so that it can stop in the middle of one.
fn narrow() -> Setting {
    setting([0, 1].map(|_| {
        let listen = Some("127.0.0.1".parse().unwrap());
        let config = TcpConfig {
            listen,
            user_timeout: PATIENCE,
            socket_buffer_bytes: 8192,
            io_threads: 0,
            ..TcpConfig::default()
        };
        TcpFabric::new(config).unwrap() as Arc<dyn Fabric>
    }))
}

/// Works on the receiver alone until it has all that the sockets hold, and waits in the middle of a message.
fn stop_the_sender(pair: &mut Pair) {
    pair.until("it begins", |sides| sides[TO].exec().channel.counters().heads_received > 2);
    let (mut quiet, mut seen) = (0, 0);
    while quiet < 2000 || pair.sides[TO].exec().channel.copies() == 0 {
        let now = pair.now();
        pair.sides[TO].turn(now);
        let bytes = pair.sides[TO].fabric.stats()["counters"]["bytes_received"].as_u64().unwrap();
        quiet = if bytes == seen { quiet + 1 } else { 0 };
        seen = bytes;
        if quiet == 2000 && pair.sides[TO].exec().channel.copies() == 0 {
            // It stopped between two.
            let now = pair.now();
            pair.sides[FROM].turn(now);
            quiet = 0;
        }
        assert!(pair.start.elapsed() < PATIENCE, "{:#?}", pair.sides[TO].exec().channel.stats());
    }
}

#[test]
fn a_region_is_not_held_while_a_peer_stops_in_the_middle_of_a_message_to_it() {
    let mut pair = Pair::new(narrow());
    pair.submit(FROM, 1, Direction::Write, &[(0, 0, LEN)], b"no");
    stop_the_sender(&mut pair);
    let data = Arc::clone(&pair.sides[TO].data);
    assert_eq!(data.held.0.load(Ordering::Acquire), 0, "whoever withdraws it need not wait");
    data.withdrawn.store(true, Ordering::Release);
    // From here on it is the host's again.
    data.at(0, LEN).fill(0x77);
    pair.until("it is refused", |sides| sides[FROM].done.len() == 1);
    let failure = &pair.sides[FROM].done[0].1;
    assert!(matches!(failure, Err(XferFailure::Refused { status: Status::StaleRegion, .. })), "{failure:?}");
    assert!(data.at(0, LEN).iter().all(|byte| *byte == 0x77), "no late byte");
    assert!(!pair.sides[0].ended && !pair.sides[1].ended, "the session goes on");
    data.withdrawn.store(false, Ordering::Release);
    pair.sides[FROM].data.at(AT, 1 << 20).copy_from_slice(&pattern(3, 1 << 20));
    pair.submit(FROM, 2, Direction::Write, &[(AT, AT, 1 << 20)], b"yes");
    pair.until("the next one ends", |sides| sides[FROM].done.len() == 2 && sides[TO].delivered.len() == 1);
    assert_eq!(data.at(AT, 1 << 20), pattern(3, 1 << 20));
    assert_eq!(pair.sides[TO].delivered, [b"yes".to_vec()]);
}

#[test]
fn a_read_given_up_while_its_peer_stops_in_the_middle_of_a_message_leaves_its_memory_alone_at_once() {
    let mut pair = Pair::new(narrow());
    pair.sides[FROM].data.at(0, LEN).fill(0x55);
    pair.submit(TO, 1, Direction::Read, &[(0, 0, LEN)], b"no");
    stop_the_sender(&mut pair);
    let exec = pair.sides[TO].exec.as_mut().unwrap();
    assert_ne!(exec.channel.cancel(1), TwoCancel::NotFound);
    let now = pair.now();
    pair.sides[TO].turn(now);
    assert_eq!(pair.sides[TO].exec().channel.copies(), 0, "nothing is awaited for it any more");
    let data = Arc::clone(&pair.sides[TO].data);
    data.at(0, LEN).fill(0x77);
    pair.until("it is given up", |sides| sides[TO].done.len() == 1);
    assert_eq!(pair.sides[TO].done[0], (1, Err(XferFailure::Canceled)));
    pair.submit(TO, 2, Direction::Read, &[(10 << 20, 0, 1 << 20)], b"yes");
    pair.until("the next one ends", |sides| sides[TO].done.len() == 2);
    assert_eq!(pair.sides[TO].done[1], (2, Ok(())));
    assert!(data.at(10 << 20, 1 << 20).iter().all(|byte| *byte == 0x55));
    assert!(data.at(0, LEN).iter().all(|byte| *byte == 0x77), "no late byte");
}

#[test]
fn an_epoch_ends_at_once_while_a_peer_stops_in_the_middle_of_a_message_and_the_next_one_goes_on() {
    let mut pair = Pair::new(narrow());
    pair.sides[FROM].data.at(0, LEN).copy_from_slice(&pattern(5, LEN));
    pair.submit(FROM, 1, Direction::Write, &[(0, 0, LEN)], b"whole");
    stop_the_sender(&mut pair);
    pair.reconnect();
    pair.until("it ends", |sides| sides[FROM].done.len() == 1 && sides[TO].delivered.len() == 1);
    assert_eq!(pair.sides[FROM].done[0], (1, Ok(())));
    assert_eq!(pair.sides[TO].data.at(0, LEN), pattern(5, LEN));
}
