//! Bare notifications whose every byte is known, sent and heard in order.

use std::ops::Range;
use std::time::{Duration, Instant};

use baton_host::{Engine, ErrorCode};

use crate::Outcome;
use crate::target::pause;

/// What notification `number` says: the number, then bytes that differ from one message to the next.
pub fn message(number: u64, bytes: usize) -> Vec<u8> {
    let mut message = number.to_le_bytes().to_vec();
    message.truncate(bytes);
    message.extend((message.len()..bytes).map(|at| (number.wrapping_mul(31) as u8).wrapping_add(at as u8)));
    message
}

/// Sends one. While the engine keeps as many as it takes, its work is done here.
pub fn send(engine: &Engine, peer: &str, message: &[u8], look: Duration, patience: Duration) -> Outcome<()> {
    let mut deadline = None;
    loop {
        match engine.notify(peer, message) {
            Ok(()) => return Ok(()),
            Err(error) if error.code == ErrorCode::Limit => {
                let deadline = *deadline.get_or_insert_with(|| Instant::now() + patience);
                if Instant::now() > deadline {
                    return Err(format!("not taken within {} s: {error}", patience.as_secs()));
                }
                work(engine, look)?;
            }
            Err(error) => return Err(error.to_string()),
        }
    }
}

/// Lends this thread to the engine, or somebody else where there is nothing to do.
pub fn work(engine: &Engine, look: Duration) -> Outcome<()> {
    if !engine.progress().map_err(|error| error.to_string())? {
        pause(look);
    }
    Ok(())
}

/// Takes the messages of these numbers, one after the other; any other message is an error.
pub fn hear(
    engine: &Engine,
    numbers: Range<u64>,
    bytes: usize,
    look: Duration,
    patience: Duration,
) -> Outcome<()> {
    let (Range { start, end }, mut next, deadline) =
        (numbers.clone(), numbers.start, Instant::now() + patience);
    while next < end {
        let heard = engine.notifications().map_err(|error| error.to_string())?;
        if heard.is_empty() {
            if Instant::now() > deadline {
                return Err(format!("{} notifications instead of {}", next - start, end - start));
            }
            pause(look);
        }
        for one in heard {
            let expected = message(next, bytes);
            if next >= end || one.message != expected {
                return Err(format!(
                    "notification {next} of {start}..{end} from {} is {:?} instead of {expected:?}",
                    one.peer, one.message
                ));
            }
            next += 1;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_length_that_is_wanted_and_differ_from_their_neighbours() {
        for bytes in [1, 7, 8, 9, 16, 300] {
            for number in [0, 1, 255, 256, 70_000] {
                assert_eq!(message(number, bytes).len(), bytes);
                assert_ne!(message(number, bytes), message(number + 1, bytes));
            }
        }
        assert!(message(5, 0).is_empty());
    }
}
