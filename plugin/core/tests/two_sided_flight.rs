//! How much of a two-sided channel's data goes out at once, and in which messages.

mod two_toy;

use baton_core::two_sided::codec::Direction;
use baton_core::two_sided::pool::PoolConfig;
use baton_core::two_sided::setup::TwoLimits;
use two_toy::writes::{assert_moved, write};
use two_toy::*;

#[test]
fn a_lane_with_enough_bytes_under_way_takes_no_more_until_some_have_arrived() {
    let chunk = u64::from(Config::default().slot) - 64;
    let sent_at_once = |flight_bytes: u64| {
        let limits = TwoLimits { flight_bytes, ..Config::default().limits };
        let pool = PoolConfig { base_slabs: 8, ..Config::default().pool };
        let mut world = World::new(Config { first_recvs: 8, lanes: 2, limits, pool, ..Config::default() }, 2);
        write(&mut world, 7, 4096, 300_000, None);
        while world.pump(0) {}
        let sent = world.nodes[0].channel.counters().bytes_sent;
        world.settle();
        assert_moved(&world, 7, 4096, 300_000);
        world.audit();
        sent
    };
    assert_eq!(sent_at_once(u64::MAX), 2 * 8 * chunk, "as much as there is credit");
    assert_eq!(sent_at_once(3 * chunk), 2 * 3 * chunk);
    assert_eq!(sent_at_once(3 * chunk + 1), 2 * 4 * chunk);
    assert_eq!(sent_at_once(1), 2 * chunk, "one message always goes");
}

#[test]
fn a_pack_is_no_longer_than_64_kib_also_where_slots_are() {
    let slot = (256 << 10) + 64;
    let defaults = Config::default();
    let limits = TwoLimits { pack_bytes: 8192, small_bytes: 1 << 20, ..defaults.limits };
    let pool = PoolConfig { slot_bytes: slot, ..defaults.pool };
    for direction in [Direction::Write, Direction::Read] {
        let mut world = World::new(Config { slot, limits, pool, ..Config::default() }, 2);
        let spans: Vec<(usize, usize, usize)> = (0..100).map(|n| (n * 4096, n * 4096, 4096)).collect();
        let (from, to) = if direction == Direction::Write { (0, 1) } else { (1, 0) };
        world.nodes[from].mem.set_data(0, &pattern(1, 100 * 4096));
        world.submit(0, 1, direction, &spans, None);
        world.settle();
        assert_eq!(world.result_of(0, 1), Some(&Ok(())));
        assert_eq!(world.nodes[to].mem.data(0, 100 * 4096), pattern(1, 100 * 4096));
        // 15 blocks of 4096 bytes and 32 that tell of each.
        assert_eq!(world.nodes[from].channel.counters().packs_sent, 7, "{direction:?}");
        world.audit();
    }
}
