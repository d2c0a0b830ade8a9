//! Numbers that a peer writes or sends bare: immediates, transfer numbers of 24 bits, credit words, numbers of notifications.

use baton_core::credit::{CreditWord, RecvCredit, SendCredit};
use baton_core::notify::{Arrival, Body, Inbound, NotifyWindow};
use baton_core::sequence::{Imm, ImmKind, MAX_INCOMPLETE, WINDOW, unwrap24};
use baton_core::{Epoch, LaneId, NotifySeq, XferSeq};

use crate::input::Input;

const EPOCH: Epoch = Epoch(0x1_0002);
const LANES: u8 = 4;
const RECVS: u64 = 64;

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let _ = match input.u8() {
        Some(0) => credit(&mut input),
        Some(1) => inbound(&mut input),
        Some(2) => window(&mut input),
        _ => bare(&mut input),
    };
}

fn bare(input: &mut Input<'_>) -> Option<()> {
    loop {
        let word = input.u32()?;
        if let Ok(imm) = Imm::decode(word) {
            assert_eq!(imm.encode(), word, "what decodes is canonical");
            assert!((1..=64).contains(&imm.lanes));
        }
        let lowest = XferSeq(input.u64()?);
        if let Some(seq) = unwrap24(word & 0xFF_FFFF, lowest) {
            assert_eq!(seq.0 & 0xFF_FFFF, u64::from(word & 0xFF_FFFF));
            assert!(seq.0.abs_diff(lowest.0) <= WINDOW);
        }
    }
}

/// A sender whose peer writes any words: it never has more than its depth, and what it knows never falls.
fn credit(input: &mut Input<'_>) -> Option<()> {
    let depth = u64::from(input.u8()?) + 1;
    let (mut sender, mut receiver) = (SendCredit::new(depth), RecvCredit::new(depth));
    loop {
        let before = sender.known();
        match input.u8()? {
            0 => {
                if let Some(permit) = sender.try_reserve(input.u8()?.into()) {
                    permit.commit();
                }
            }
            1 => {
                let _ = sender.on_word(input.u64()?, EPOCH);
            }
            2 => {
                let _ = sender.on_word(CreditWord::encode(EPOCH, input.number()?), EPOCH);
            }
            3 => {
                let consumed = sender.consumed();
                let count = consumed + u64::from(input.u8()?);
                let _ = sender.on_word(CreditWord::encode(EPOCH, count), EPOCH);
            }
            4 => {
                let _ = receiver.receive(input.number()?.min(u64::MAX / 2));
            }
            _ => {
                receiver.grant(receiver.to_grant());
                receiver.announce();
            }
        }
        assert!(sender.known() >= before, "a grant never falls");
        assert!(sender.consumed() <= sender.known() && sender.known() <= sender.consumed() + depth);
        assert!(receiver.received() <= receiver.announced() && receiver.announced() <= receiver.granted());
    }
}

/// A receiver of any immediates: its table is bounded, and no transfer is told twice.
fn inbound(input: &mut Input<'_>) -> Option<()> {
    let first = if input.u8()? == 0 { 0 } else { input.u32()?.into() };
    let mut table = Inbound::new(XferSeq(first), RECVS);
    let mut told = std::collections::BTreeSet::new();
    loop {
        let (what, lanes, lane) = (input.u8()?, input.u8()? % LANES + 1, LaneId(input.u8()? % LANES));
        let seq_low = if what & 2 == 0 { input.u8()?.into() } else { input.u32()? & 0xFF_FFFF };
        let seq_low = if what & 4 == 0 { (first as u32).wrapping_add(seq_low) & 0xFF_FFFF } else { seq_low };
        let Ok(seq) = table.unwrap(seq_low, lane) else { continue };
        assert!((table.lowest().0..table.lowest().0 + MAX_INCOMPLETE + RECVS).contains(&seq.0));
        let arrival = if what & 1 == 0 { Arrival::Tail } else { Arrival::Record(Body::EMPTY) };
        match table.arrive(seq, lanes, lane, arrival) {
            Ok(Some(_)) => assert!(told.insert(seq), "told twice"),
            Ok(None) => assert!(!told.contains(&seq)),
            // The epoch ends.
            Err(_) => return None,
        }
    }
}

/// Any numbers of notifications: none is new twice.
fn window(input: &mut Input<'_>) -> Option<()> {
    let (mut window, mut seen) = (NotifyWindow::default(), std::collections::BTreeSet::new());
    loop {
        let seq = NotifySeq(input.number()?);
        let highest = window.highest();
        if window.insert(seq) {
            assert!(seen.insert(seq), "{seq:?} is new twice");
        } else {
            let below = seq.0 == 0 || seq.0.saturating_add(NotifyWindow::SPAN) <= highest;
            assert!(below || seen.contains(&seq), "{seq:?} is lost");
        }
    }
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let imm = |kind, lanes, seq| Imm::of(kind, lanes, XferSeq(seq)).encode().to_le_bytes();
    let bare = [ImmKind::Tail, ImmKind::Record, ImmKind::Empty].map(|kind| {
        [&[9][..], &imm(kind, 3, 0xFF_FFFE), &0xFF_FFFFu64.to_le_bytes(), &imm(kind, 64, 5), &[0; 8]].concat()
    });
    let word = CreditWord::encode(EPOCH, 20).to_le_bytes();
    let credit = [&[0, 15, 0, 16, 3, 20, 0, 4, 2, 20, 1][..], &word, &[4, 10, 5, 0, 3, 1]].concat();
    let inbound = vec![1, 0, 0, 1, 0, 0, 1, 1, 1, 0, 1, 0, 2, 1, 0, 1, 2, 1];
    let wraps = [&[1, 1][..], &0xFF_FFFFu32.to_le_bytes(), &[1, 0, 0, 0, 1, 0, 0, 1]].concat();
    let window = vec![2, 1, 2, 4, 3, 4, 199, 230, 0, 8, 1, 220, 0, 200];
    bare.into_iter().chain([credit, inbound, wraps, window]).collect()
}
