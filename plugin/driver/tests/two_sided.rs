//! Two executors over the software fabrics, in the guest also over RDMA: every byte compared.

mod two_pair;

use std::sync::atomic::Ordering;

use baton_core::Nanos;
use baton_core::two_sided::codec::{Direction, Status};
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::report::XferFailure;

use two_pair::*;

fn writes_and_reads_arrive_byte_for_byte(setting: Setting) {
    let mut pair = Pair::new(setting);
    let (len, at) = (5 << 20, 4096);
    pair.sides[0].data.at(at, len).copy_from_slice(&pattern(1, len));
    pair.submit(0, 1, Direction::Write, &[(at, at + 64, len)], b"written");
    let blocks: Vec<(usize, usize, usize)> =
        (0..128).map(|n| ((6 << 20) + n * 4096, (8 << 20) + n * 8192, 4096)).collect();
    pair.sides[0].data.at(6 << 20, 128 * 4096).copy_from_slice(&pattern(2, 128 * 4096));
    pair.submit(0, 2, Direction::Write, &blocks, b"packed");
    pair.sides[1].data.at(12 << 20, len).copy_from_slice(&pattern(3, len));
    pair.submit(0, 3, Direction::Read, &[(12 << 20, 12 << 20, len)], b"read");
    pair.sides[1].data.at(18 << 20, len).copy_from_slice(&pattern(4, len));
    pair.submit(1, 4, Direction::Write, &[(18 << 20, 18 << 20, len)], b"and back");
    pair.until("all four end", |sides| sides[0].done.len() == 3 && sides[1].done.len() == 1);
    for side in &pair.sides {
        assert!(side.done.iter().all(|(_, result)| result.is_ok()), "{:?}", side.done);
    }
    pair.until("messages", |sides| sides[1].delivered.len() == 3 && sides[0].delivered.len() == 1);
    let [a, b] = &pair.sides;
    assert_eq!(b.data.at(at + 64, len), pattern(1, len));
    assert!(b.data.at(0, at + 64).iter().chain(b.data.at(at + 64 + len, 64).iter()).all(|byte| *byte == 0));
    let packed = pattern(2, 128 * 4096);
    for (n, &(_, there, len)) in blocks.iter().enumerate() {
        assert_eq!(b.data.at(there, len), &packed[n * 4096..][..len]);
        assert!(b.data.at(there + len, 4096).iter().all(|byte| *byte == 0), "between the blocks");
    }
    assert_eq!(a.data.at(12 << 20, len), pattern(3, len));
    assert_eq!(a.data.at(18 << 20, len), pattern(4, len));
    let counters = a.exec().channel.counters();
    assert!(counters.blocks_packed == 128 && counters.nops_sent == 0, "{counters:?}");
    assert!(
        pair.copiers.as_ref().is_none_or(|copiers| copiers.copied() > 0),
        "the threads had something to do"
    );
    for side in &pair.sides {
        let counters = side.exec().channel.counters();
        let gathered = if side.data.keys.is_some() { counters.messages_sent } else { 0 };
        assert_eq!(counters.messages_gathered, gathered, "{counters:?}");
        let pool = side.bounce.lock().pool.stats();
        assert_eq!(pool.counters.sends, counters.messages_sent - gathered, "a slot for each that was copied");
        assert_eq!(pool.sending, 0, "none afterwards");
        assert_eq!(side.data.held.0.load(Ordering::Acquire), 0, "nothing is held");
    }
}

fn a_region_that_is_withdrawn_while_it_is_read_is_refused_and_not_held_any_more(setting: Setting) {
    let mut pair = Pair::new(setting);
    pair.submit(0, 1, Direction::Read, &[(0, 0, 20 << 20)], b"read");
    pair.until("it is under way", |sides| sides[0].exec().channel.counters().bytes_placed > 1 << 20);
    pair.sides[1].data.withdrawn.store(true, Ordering::Release);
    pair.until("it is refused", |sides| sides[0].done.len() == 1);
    let refused =
        matches!(pair.sides[0].done[0].1, Err(XferFailure::Refused { status: Status::StaleRegion, .. }));
    assert!(refused, "{:?}", pair.sides[0].done);
    pair.until("its SENDs end", |sides| sides[1].data.held.0.load(Ordering::Acquire) == 0);
    assert!(!pair.sides[0].ended && !pair.sides[1].ended, "the session goes on");
    pair.sides[1].data.withdrawn.store(false, Ordering::Release);
    pair.submit(0, 2, Direction::Read, &[(0, 0, 1 << 20)], b"read");
    pair.until("the next one is done", |sides| sides[0].done.len() == 2);
    assert_eq!(pair.sides[0].done[1], (2, Ok(())));
}

fn notifications_of_any_length_arrive_in_order(setting: Setting) {
    let mut pair = Pair::new(setting);
    let messages: Vec<Vec<u8>> = (0..300).map(|n| pattern(n, (n as usize * 97) % 20_000)).collect();
    for (token, message) in (0..).zip(&messages) {
        let resolve = if token % 2 == 0 { Resolve::Sent } else { Resolve::Taken };
        pair.sides[0]
            .exec
            .as_mut()
            .unwrap()
            .channel
            .notify(token, message, resolve, Nanos(u64::MAX))
            .unwrap();
    }
    pair.until("all are resolved", |sides| sides[0].notes.len() == 300 && sides[1].delivered.len() == 300);
    assert_eq!(pair.sides[1].delivered, messages);
}

fn a_refusal_has_its_reason_and_the_pool_is_back_at_its_base_after_the_load(setting: Setting) {
    let mut pair = Pair::new(setting);
    pair.sides[1].data.withdrawn.store(true, Ordering::Release);
    pair.submit(0, 1, Direction::Write, &[(0, 0, 1 << 20)], b"no");
    pair.until("it is refused", |sides| sides[0].done.len() == 1);
    let refused = Err(XferFailure::Refused { status: Status::StaleRegion, chunk: 0 });
    assert_eq!(pair.sides[0].done[0], (1, refused));
    pair.sides[1].data.withdrawn.store(false, Ordering::Release);
    pair.submit(0, 2, Direction::Write, &[(0, 0, 16 << 20)], b"yes");
    pair.until("it is done", |sides| sides[0].done.len() == 2);
    assert_eq!(pair.sides[0].done[1], (2, Ok(())));
    assert!(pair.sides[1].bounce.lock().pool.stats().slabs > 1, "it grew");
    pair.until("it is back at its base", |sides| sides[1].bounce.lock().pool.stats().slabs == 1);
    for side in &pair.sides {
        let stats = side.bounce.lock().pool.stats();
        assert_eq!((stats.lent, stats.sending), (LANES as u32, 0), "an idle channel has a RECV per lane");
    }
    assert_eq!(pair.sides[1].delivered, [b"yes".to_vec()]);
}

fn a_transfer_that_loses_its_connection_again_and_again_is_finished_byte_for_byte_and_told_once(
    setting: Setting,
) {
    let mut pair = Pair::new(setting);
    let (len, at) = (20 << 20, 4096);
    pair.sides[0].data.at(at, len).copy_from_slice(&pattern(1, len));
    pair.submit(0, 1, Direction::Write, &[(at, at, len)], b"written");
    for round in 1..5u64 {
        // Somewhere in the middle.
        let some = round * 1_000_000;
        pair.until("some bytes", |sides| sides[1].exec().channel.counters().bytes_placed >= some);
        pair.sides[0]
            .exec
            .as_mut()
            .unwrap()
            .channel
            .notify(round, &[round as u8], Resolve::Taken, Nanos(u64::MAX))
            .unwrap();
        pair.reconnect();
    }
    pair.until("the end", |sides| sides[0].done.len() == 1 && sides[0].notes.len() == 4);
    pair.until("messages", |sides| sides[1].delivered.len() == 5);
    assert_eq!(pair.sides[0].done, [(1, Ok(()))]);
    let mut delivered = pair.sides[1].delivered.clone();
    delivered.sort();
    assert_eq!(delivered, [vec![1], vec![2], vec![3], vec![4], b"written".to_vec()]);
    let [_, b] = &pair.sides;
    assert_eq!(b.data.at(at, len), pattern(1, len));
    assert!(b.data.at(0, at).iter().chain(b.data.at(at + len, 64).iter()).all(|byte| *byte == 0));
    assert!(b.exec().channel.counters().duplicate_chunks > 0, "what was there is noticed, not placed again");
}

macro_rules! over {
    ($module:ident, $setting:expr, $mark:meta: $($name:ident),+ $(,)?) => {
        mod $module {
            use super::*;
            $(#[test] #[$mark] fn $name() {
                super::$name($setting);
            })+
        }
    };
    ($($module:ident: $setting:expr, $mark:meta;)+) => {
        $(over!($module, $setting, $mark:
            writes_and_reads_arrive_byte_for_byte,
            notifications_of_any_length_arrive_in_order,
            a_refusal_has_its_reason_and_the_pool_is_back_at_its_base_after_the_load,
            a_region_that_is_withdrawn_while_it_is_read_is_refused_and_not_held_any_more,
            a_transfer_that_loses_its_connection_again_and_again_is_finished_byte_for_byte_and_told_once,
        );)+
    };
}

over! {
    over_tcp: tcp(), cfg(test);
    over_tcp_gathered: tcp().registered(), cfg(test);
    over_tcp_copied: tcp().copied_by_threads(), cfg(test);
    over_local: local(), cfg(test);
    over_local_gathered: local().registered(), cfg(test);
    over_local_copied: local().registered().copied_by_threads(), cfg(test);
    over_rdma: rdma(), ignore = "needs RDMA devices: run it in the guest";
    over_rdma_gathered: rdma().registered(), ignore = "needs RDMA devices: run it in the guest";
}
