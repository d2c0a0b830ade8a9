//! WRITEs of the first side, and that they arrive.

use super::{World, pattern};
use baton_core::two_sided::codec::Direction;

/// A WRITE of `len` bytes from offset `at` to offset `at` at the peer.
pub fn write(world: &mut World, token: u64, at: usize, len: usize, message: Option<&[u8]>) {
    world.nodes[0].mem.set_data(at, &pattern(token, len));
    world.submit(0, token, Direction::Write, &[(at, at, len)], message);
}

/// That such a WRITE is done, its bytes are there, and none around them was touched.
pub fn assert_moved(world: &World, token: u64, at: usize, len: usize) {
    assert_eq!(world.result_of(0, token), Some(&Ok(())));
    assert_eq!(world.nodes[1].mem.data(at, len), pattern(token, len));
    assert_eq!(world.nodes[1].mem.data(at - 64, 64), [0; 64], "sentinel before");
    assert_eq!(world.nodes[1].mem.data(at + len, 64), [0; 64], "sentinel behind");
}
