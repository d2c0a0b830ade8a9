//! What a two-sided channel allocates at work, once it is warm: nothing for a chunk, a stated number for a transfer or a notification.

mod two_pair;

use baton_core::Nanos;
use baton_core::two_sided::chunks::{ChunkMap, Piece};
use baton_core::two_sided::codec::Direction;
use baton_core::two_sided::notes::Resolve;
use std::sync::Arc;

use baton_counting_alloc::allocations;
use two_pair::*;

/// A transfer of one piece, from its submission to its end on both sides.
fn transfer(
    pair: &mut Pair,
    token: u64,
    direction: Direction,
    map: &ChunkMap,
    message: Option<&[u8]>,
) -> u64 {
    let before = pair.sides[1].delivered.len();
    pair.sides.iter_mut().for_each(|side| {
        side.done.clear();
        side.delivered.reserve(16);
    });
    allocations(|| {
        let now = pair.now();
        let channel = &mut pair.sides[0].exec.as_mut().expect("an epoch is open").channel;
        channel.submit_cut(now, token, direction, map.clone(), message).expect("taken");
        let told = before + usize::from(message.is_some());
        pair.until("it is done", |sides| sides[0].done.len() == 1 && sides[1].delivered.len() == told);
    })
}

/// What the middle one of many rounds allocates; a few rounds enlarge a table that then stays so.
fn typical(mut round: impl FnMut(u64) -> u64) -> u64 {
    let mut counts: Vec<u64> = (0..60).map(&mut round).skip(20).collect();
    counts.sort_unstable();
    counts[counts.len() / 2]
}

fn at_work_it_allocates_what_is_stated(setting: Setting) {
    let mut pair = Pair::new(setting);
    let base = pair.sides[0].data.base;
    let pieces =
        |len: u64| -> Arc<[Piece]> { [Piece { local: base, region: REGION, offset: 0, len }].into() };
    for (direction, len, message, expected) in [
        (Direction::Write, 4096, None, 0),
        // Some sixty chunks, more than there are RECVs at first, some of them waiting for slots.
        (Direction::Write, 64 * 60_000, None, 0),
        // More than 64: the receiver's bitmap.
        (Direction::Write, 80 * 60_000, None, 1),
        // The message at the sender, at the receiver, and its place there while it waits for the transfer.
        (Direction::Write, 4096, Some(&b"message"[..]), 3),
        // The pieces at the target, as they come and as they are cut.
        (Direction::Read, 4096, None, 4),
        (Direction::Read, 64 * 60_000, None, 4),
    ] {
        let map = ChunkMap::cut(pieces(len), pair.sides[0].exec().channel.chunk_bytes()).unwrap();
        let count = typical(|n| transfer(&mut pair, n, direction, &map, message));
        assert!(
            count <= expected,
            "{direction:?} of {len} bytes: {count} allocations, {expected} are stated"
        );
    }
    let count = typical(|token| {
        pair.sides[0].notes.clear();
        pair.sides[1].delivered.clear();
        allocations(|| {
            let channel = &mut pair.sides[0].exec.as_mut().expect("an epoch is open").channel;
            channel.notify(token, b"message", Resolve::Sent, Nanos(u64::MAX)).expect("taken");
            pair.until("it is there", |sides| sides[1].delivered.len() == 1 && sides[0].notes.len() == 1);
        })
    });
    assert!(count <= 2, "a notification: {count} allocations, its bytes at either end are stated");
}

#[test]
fn over_the_local_fabric() {
    at_work_it_allocates_what_is_stated(local());
    at_work_it_allocates_what_is_stated(local().registered());
}

#[test]
fn over_tcp() {
    at_work_it_allocates_what_is_stated(tcp());
    at_work_it_allocates_what_is_stated(tcp().registered());
}
