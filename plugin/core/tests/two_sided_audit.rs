//! After many mixed operations with faults nothing of the credit is missing: what is known minus what is consumed is the depth, on both
//! sides, and every operation was told of exactly once. `cargo xtask test --long` runs a million.

mod two_toy;

use std::collections::BTreeMap;

use baton_core::two_sided::codec::Direction;
use baton_core::two_sided::notes::Resolve;
use baton_core::two_sided::report::{TwoCancel, TwoSubmitError, XferFailure};
use two_toy::*;

/// What was begun and not told of yet.
struct Books {
    /// Token → (side, has a message, was canceled).
    transfers: BTreeMap<u64, (usize, bool, bool)>,
    /// Token of the next notification that each side's peer has to see.
    next_note: [u64; 2],
    notes_sent: [u64; 2],
    notes_told: [u64; 2],
    /// Messages of transfers, by token: delivered, not yet told as done, or the other way round.
    messages: BTreeMap<u64, i32>,
    done: u64,
    canceled: u64,
}

impl Books {
    fn take(&mut self, world: &mut World) {
        for n in [0, 1] {
            for (token, result) in std::mem::take(&mut world.nodes[n].done) {
                let (side, message, canceled) = self.transfers.remove(&token).expect("told of once");
                assert_eq!(side, n);
                match result {
                    Ok(()) => {
                        self.done += 1;
                        if message {
                            self.settle(token, 1);
                        }
                    }
                    Err(XferFailure::Canceled) if canceled => self.canceled += 1,
                    Err(other) => panic!("{token}: {other}"),
                }
            }
            for (_, sent) in std::mem::take(&mut world.nodes[n].notes) {
                assert!(sent, "its deadline is far");
                self.notes_told[n] += 1;
            }
            for message in std::mem::take(&mut world.nodes[n].delivered) {
                let token = u64::from_le_bytes(message[..8].try_into().unwrap());
                if message.len() == 8 {
                    self.settle(token, -1);
                } else {
                    assert_eq!(token, self.next_note[1 - n], "notifications in order, once each");
                    self.next_note[1 - n] += 1;
                }
            }
        }
    }

    fn settle(&mut self, token: u64, by: i32) {
        let count = self.messages.entry(token).or_default();
        *count += by;
        assert!((-1..=1).contains(count), "message of transfer {token} came twice");
        if *count == 0 {
            self.messages.remove(&token);
        }
    }
}

fn audit(world: &mut World, books: &mut Books) {
    if world.nodes.iter().any(|node| node.ended.is_some()) {
        world.next_epoch();
    }
    world.audit();
    books.take(world);
    assert!(books.transfers.is_empty() && books.messages.is_empty(), "{:?}", books.transfers);
    assert_eq!((books.notes_told, books.next_note), (books.notes_sent, books.notes_sent));
}

fn operate(world: &mut World, rng: &mut Rng, books: &mut Books, token: u64) {
    let n = rng.below(2) as usize;
    match rng.below(10) {
        0..=5 => {
            let direction = rng.pick(&[Direction::Write, Direction::Read]);
            let longest = rng.pick(&[100, 600, 4000]);
            let len = rng.below(longest) as usize;
            let at = rng.below((world.config.data_bytes - 8192) as u64) as usize;
            let spans = [(at, at, len), (at + 4096, at + 4096, rng.below(200) as usize)];
            let message = rng.below(2) == 0;
            let text = token.to_le_bytes();
            let text = message.then_some(&text[..]);
            let (now, pieces) = (world.now, pieces(&spans));
            if world.nodes[n].channel.submit(now, token, direction, pieces, text).is_ok() {
                books.transfers.insert(token, (n, message, false));
            }
        }
        6..=8 => {
            let mut note = books.notes_sent[n].to_le_bytes().to_vec();
            let longest = rng.pick(&[4, 100, 3000]);
            note.resize(9 + rng.below(longest) as usize, 7);
            let resolve = rng.pick(&[Resolve::Sent, Resolve::Taken]);
            let deadline = world.now.plus_ms(1 << 40);
            match world.nodes[n].channel.notify(token, &note, resolve, deadline) {
                Ok(()) => books.notes_sent[n] += 1,
                Err(TwoSubmitError::Ended | TwoSubmitError::TooMany { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        _ => {
            let nth = rng.below(1 + books.transfers.len() as u64) as usize;
            if let Some((victim, (side, _, canceled))) = books.transfers.iter_mut().nth(nth) {
                let outcome = world.nodes[*side].channel.cancel(*victim);
                *canceled |= matches!(outcome, TwoCancel::Canceled | TwoCancel::Draining);
            }
        }
    }
    (0..2).for_each(|n| {
        world.pump(n);
    });
}

fn run(operations: u64, seed: u64) {
    let mut rng = Rng::new(seed);
    let mut world = World::new(Config { data_bytes: 64 << 10, ..Config::default() }, seed);
    let mut books = Books {
        transfers: BTreeMap::new(),
        next_note: [0; 2],
        notes_sent: [0; 2],
        notes_told: [0; 2],
        messages: BTreeMap::new(),
        done: 0,
        canceled: 0,
    };
    let mut faults = 0;
    for token in 0..operations {
        operate(&mut world, &mut rng, &mut books, token);
        for _ in 0..rng.below(40) {
            world.turn();
        }
        if rng.below(400) == 0 {
            // A queue pair dies in the middle of everything.
            let index = rng.below(u64::from(world.config.lanes) + 1) as usize;
            world.fence(rng.below(2) as usize, index);
            for _ in 0..rng.below(60) {
                world.step();
            }
            world.next_epoch();
            faults += 1;
        }
        if rng.below(1000) == 0 {
            world.pass(rng.clone().below(8_000));
        }
        if token % 16 == 0 {
            books.take(&mut world);
        }
        if token % 20_000 == 19_999 {
            audit(&mut world, &mut books);
        }
    }
    audit(&mut world, &mut books);
    world.pass(10_000);
    audit(&mut world, &mut books);
    assert!(books.done > operations / 3 && books.canceled > 0 && faults > 0, "{} {faults}", books.done);
    assert_eq!(world.nodes[1].pool.stats().slabs, 1, "the pool is back at its base");
}

#[test]
fn credit_at_rest_is_whole_after_ten_thousand_mixed_operations_with_faults() {
    run(10_000, 1);
}

#[test]
#[ignore = "takes minutes: cargo xtask test --long"]
fn credit_at_rest_is_whole_after_a_million_mixed_operations_with_faults() {
    run(1_000_000, 2);
}
