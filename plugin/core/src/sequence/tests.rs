use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn a_number_inside_the_window_comes_back_whole(lowest in 0u64..(1 << 40), distance in -(1i64 << 21)..=(1 << 21)) {
        prop_assume!(lowest as i64 + distance >= 0);
        let seq = XferSeq((lowest as i64 + distance) as u64);
        let imm = Imm::of(ImmKind::Tail, 1, seq);
        prop_assert_eq!(unwrap24(imm.seq_low, XferSeq(lowest)), Some(seq));
    }

    #[test]
    fn a_number_outside_is_refused(lowest in (1u64 << 24)..(1 << 40), low in 0u32..(1 << 24)) {
        match unwrap24(low, XferSeq(lowest)) {
            Some(seq) => {
                prop_assert_eq!(seq.0 & SEQ_MASK, u64::from(low));
                prop_assert!(seq.0.abs_diff(lowest) <= WINDOW);
            }
            None => {
                let ahead = u64::from(low).wrapping_sub(lowest) & SEQ_MASK;
                prop_assert!(ahead > WINDOW && (1 << 24) - ahead > WINDOW);
            }
        }
    }

    #[test]
    fn an_immediate_survives_the_wire(record in any::<bool>(), lanes in 1u8..=64, seq in any::<u64>()) {
        let kind = if record { ImmKind::Record } else { ImmKind::Tail };
        let imm = Imm::of(kind, lanes, XferSeq(seq));
        prop_assert_eq!(Imm::decode(imm.encode()), Ok(imm));
    }
}

#[test]
fn numbers_before_the_first_and_kinds_that_do_not_exist_are_refused() {
    assert_eq!(unwrap24(0xFF_FFFF, XferSeq(0)), None, "that would be −1");
    assert_eq!(unwrap24(0xFF_FFFF, XferSeq(1 << 24)), Some(XferSeq((1 << 24) - 1)));
    assert_eq!(Imm::decode(0x8000_0000).map(|imm| imm.kind), Ok(ImmKind::Empty));
    assert_eq!(Imm::decode(0xC000_0000), Err(ImmError::Kind(3)));
    assert_eq!(Imm::decode(0xFFFF_FFFF), Err(ImmError::Kind(3)));
    assert_eq!(Imm::of(ImmKind::Record, 64, XferSeq(0x12_3456_789A)).encode(), 0x7F56_789A);
}
