use proptest::prelude::*;

use super::*;

#[test]
fn a_dropped_permit_gives_back_and_a_committed_one_consumes() {
    let mut credit = SendCredit::new(5);
    drop(credit.try_reserve(5).unwrap());
    assert_eq!(credit.available(), 5);
    credit.try_reserve(3).unwrap().commit();
    assert!(credit.try_reserve(3).is_none());
    assert_eq!((credit.known(), credit.consumed(), credit.available()), (5, 3, 2));
}

#[test]
fn words_of_another_epoch_and_unwritten_words_are_ignored() {
    let mut credit = SendCredit::new(5);
    credit.try_reserve(5).unwrap().commit();
    assert_eq!(credit.on_word(0, Epoch(7)), Ok(WordOutcome::Unchanged));
    assert_eq!(credit.on_word(CreditWord::encode(Epoch(6), 9), Epoch(7)), Ok(WordOutcome::Stale));
    assert_eq!(
        credit.on_word(CreditWord::encode(Epoch(7 + (1 << 16)), 9), Epoch(7)),
        Ok(WordOutcome::Raised)
    );
    assert_eq!(credit.on_word(CreditWord::encode(Epoch(7), 8), Epoch(7)), Ok(WordOutcome::Lower));
    assert_eq!(credit.known(), 9);
    let violation = CreditViolation { granted: 11, consumed: 5, depth: 5 };
    assert_eq!(credit.on_word(CreditWord::encode(Epoch(7), 11), Epoch(7)), Err(violation));
}

#[test]
fn counts_run_on_over_48_bits() {
    let mut credit = SendCredit { known: COUNT_MASK - 1, consumed: COUNT_MASK - 1, reserved: 0, depth: 10 };
    let word = CreditWord::encode(Epoch(1), COUNT_MASK + 5);
    assert_eq!(credit.on_word(word, Epoch(1)), Ok(WordOutcome::Raised));
    assert_eq!(credit.known(), COUNT_MASK + 5);
}

#[test]
fn pages_have_two_words_per_endpoint() {
    let page = CreditPage::new(3);
    assert_eq!((page.words(), page.bytes()), (8, 64));
    let words: Vec<usize> = [RingId::Control, RingId::Lane(LaneId(0)), RingId::Lane(LaneId(2))]
        .into_iter()
        .flat_map(|ring| [page.recv_word(ring), page.ring_word(ring)])
        .collect();
    assert_eq!(words, [0, 1, 2, 3, 6, 7]);
}

proptest! {
    /// Both halves with a lossy page between them (late and repeated words): the invariants hold, and at rest nothing is lost.
    #[test]
    fn credit_is_conserved(depth in 1u64..50, ops in prop::collection::vec((0u8..5, 1u64..20), 1..300)) {
        let epoch = Epoch(3);
        let (mut sender, mut receiver) = (SendCredit::new(depth), RecvCredit::new(depth));
        let (mut in_flight, mut words) = (0u64, vec![0u64]);
        for (op, n) in ops {
            match op {
                0 => if let Some(permit) = sender.try_reserve(n) {
                    permit.commit();
                    in_flight += n;
                },
                1 => {
                    let n = n.min(in_flight);
                    prop_assert!(receiver.receive(n), "a sender with credit is never refused");
                    in_flight -= n;
                }
                2 => receiver.grant(n.min(receiver.to_grant())),
                3 => words.push(CreditWord::encode(epoch, receiver.announce())),
                _ => {
                    let word = words[n as usize % words.len()];
                    prop_assert!(sender.on_word(word, epoch).is_ok());
                }
            }
            prop_assert!(sender.known() <= receiver.granted());
            prop_assert!(receiver.received() + in_flight == sender.consumed());
            prop_assert!(receiver.granted() - receiver.received() <= depth);
        }
        prop_assert!(receiver.receive(in_flight));
        receiver.grant(receiver.to_grant());
        sender.on_word(CreditWord::encode(epoch, receiver.announce()), epoch).unwrap();
        prop_assert_eq!(sender.available(), depth, "no credit leaks");
    }

    #[test]
    fn a_sender_beyond_what_it_was_told_is_caught(depth in 1u64..50, extra in 1u64..5) {
        let mut receiver = RecvCredit::new(depth);
        prop_assert!(!receiver.receive(depth + extra));
        prop_assert!(receiver.receive(depth));
        receiver.grant(depth);
        prop_assert!(!receiver.receive(1), "granted but not announced");
    }
}
