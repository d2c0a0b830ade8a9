//! NICs that have everything and NICs that have not, and WRITEs over them.

use super::{Config, World, pattern};
use baton_core::notify::NotifyMode;
use baton_fabric::Op;

/// How immediates and inline data may be missing.
pub fn poor_nics() -> impl Iterator<Item = Config> {
    [(NotifyMode::Send, 128), (NotifyMode::Send, 8), (NotifyMode::Send, 0), (NotifyMode::Immediate, 0)]
        .into_iter()
        .map(|(notify, inline)| Config { notify, inline, ..Config::default() })
}

/// The usual one, then the poor ones.
pub fn all_nics() -> impl Iterator<Item = Config> {
    std::iter::once(Config::default()).chain(poor_nics())
}

/// A WRITE of `len` bytes from offset `at` to offset `at` at the peer.
pub fn write(world: &mut World, token: u64, at: usize, len: usize, message: Option<&[u8]>) {
    world.nodes[0].mem.set_data(at, &pattern(token, len));
    let work = world.prepare(Op::Write, &[(at, at, len)]);
    world.submit(0, token, work, message);
}

/// That such a WRITE is done and its bytes are there.
pub fn assert_moved(world: &World, token: u64, at: usize, len: usize) {
    assert_eq!(world.result_of(0, token), Some(&Ok(())));
    assert_eq!(world.nodes[1].mem.data(at, len), pattern(token, len));
}
