use proptest::prelude::*;

use super::*;

fn post(ledger: &mut Ledger, n: u32, bytes: u64) -> Option<u64> {
    let signaled = ledger.must_signal(n, bytes);
    Some(ledger.reserve(n)?.commit(bytes, signaled))
}

#[test]
fn a_dropped_reservation_gives_its_room_back() {
    let mut ledger = Ledger::new(10);
    drop(ledger.reserve(10).unwrap());
    assert!(ledger.reserve(11).is_none());
    assert_eq!(ledger.free(), 10);
    assert_eq!(ledger.reserve(10).unwrap().commit(0, true), 0);
    assert!(ledger.reserve(1).is_none());
}

#[test]
fn unsignaled_batches_before_a_failed_reservation_do_not_leak() {
    // Depth 10, batches of 4: the second must be signaled although it is asked for before the third fails.
    let mut ledger = Ledger::new(10);
    assert_eq!(post(&mut ledger, 4, 0), Some(0));
    assert!(!ledger.awaits_completion());
    assert_eq!(post(&mut ledger, 4, 0), Some(4));
    assert!(ledger.awaits_completion(), "unsignaled + next > depth / 2");
    assert_eq!(post(&mut ledger, 4, 0), None);
    assert!(!ledger.needs_flush());
    assert_eq!(ledger.retire(7), Ok(8));
    assert_eq!(post(&mut ledger, 4, 0), Some(8));
    // A large batch that does not fit behind unsignaled ones: the leftovers need their zero-length WRITE.
    assert_eq!(post(&mut ledger, 7, 0), None);
    assert!(ledger.needs_flush());
    let flush = ledger.reserve(1).expect("there is always room for it").commit(0, true);
    assert_eq!(ledger.retire(flush), Ok(5));
    assert_eq!(post(&mut ledger, 7, 0), Some(13));
}

#[test]
fn a_completion_of_nothing_in_flight_is_refused() {
    let mut ledger = Ledger::new(8);
    assert_eq!(ledger.retire(0), Err(NotInFlight { seq: 0, retired: 0, posted: 0 }));
    post(&mut ledger, 3, 0);
    assert_eq!(ledger.retire(1), Ok(2));
    assert!(ledger.retire(1).is_err() && ledger.retire(3).is_err());
    assert_eq!(ledger.retire(2), Ok(1));
}

#[test]
fn a_batch_taken_in_part_is_accounted_exactly() {
    let mut ledger = Ledger::new(8);
    post(&mut ledger, 5, 0);
    ledger.took_only(5, 2);
    assert_eq!((ledger.posted(), ledger.in_flight(), ledger.free()), (2, 2, 6));
    assert!(!ledger.awaits_completion());
    assert_eq!(ledger.retire(1), Ok(2));
}

proptest! {
    #[test]
    fn nothing_is_stuck_whatever_the_depth_and_the_batches(
        depth in 2u32..200,
        batches in prop::collection::vec((1u32..100, 0u64..(4 << 20)), 1..200),
        lazy in any::<u64>(),
    ) {
        let mut ledger = Ledger::new(depth);
        let mut signaled = std::collections::VecDeque::new();
        let (mut posted, mut unsignaled) = (0u64, 0u32);
        for (nth, (n, bytes)) in batches.into_iter().enumerate() {
            let n = n.min(depth);
            let signal = ledger.must_signal(n, bytes);
            if lazy >> (nth % 64) & 1 == 1 && let Some(seq) = signaled.pop_front() {
                ledger.retire(seq).unwrap();
            }
            while ledger.free() < n {
                // No room: a completion is on its way, or the leftovers can be flushed.
                if ledger.needs_flush() {
                    let reservation = ledger.reserve(1);
                    prop_assert!(reservation.is_some());
                    signaled.push_back(reservation.unwrap().commit(0, true));
                    (posted, unsignaled) = (posted + 1, 0);
                }
                let seq = signaled.pop_front();
                prop_assert!(seq.is_some(), "stuck");
                ledger.retire(seq.unwrap()).unwrap();
            }
            let first = ledger.reserve(n).unwrap().commit(bytes, signal);
            prop_assert_eq!(first, posted);
            posted += u64::from(n);
            unsignaled = if signal { 0 } else { unsignaled + n };
            prop_assert!(unsignaled <= depth / 2 && unsignaled < SIGNAL_WRS);
            if signal {
                signaled.push_back(posted - 1);
            }
            prop_assert!(ledger.in_flight() <= depth);
            prop_assert_eq!(ledger.posted(), posted);
        }
    }
}
