//! Short payloads in the shared ring: when they are taken out of it, and what becomes of forged ones.

mod local_support;

use std::sync::atomic::Ordering;

use baton_fabric::*;
use local_support::*;

/// Where an entry of the ring begins, in words, and what is where in it.
const ENTRIES: usize = 512;
const ENTRY: usize = 8;
const OFFSET: usize = 2;
const LENGTH: usize = 4;
/// Longest payload in the ring, and the room for all of them.
const SHORT: u64 = 256;
const ROOM: u64 = 16 << 10;

fn write<'a>(bytes: &'a [u8], to: &Block, at: u64) -> Extra<'a> {
    Extra {
        op: ExtraOp::Write,
        bytes,
        staged: None,
        gather: &[],
        remote_addr: to.addr + at,
        remote_key: to.keys.remote,
        fenced: false,
    }
}

fn post_extra(
    fabric: &dyn Fabric,
    endpoint: EndpointId,
    work: &[Template],
    extra: Extra<'_>,
    first_seq: u64,
) {
    let batch = Batch { work, imm: None, extra: Some(extra), first_seq, signaled: true, patient: false };
    fabric.post(endpoint, &batch).expect("post");
}

/// Polls both until the first one's next completion.
fn outcome(a: &dyn Fabric, b: &dyn Fabric) -> WcStatus {
    let (mut out, give_up) = ([Completion::EMPTY; 1], soon());
    loop {
        b.poll(&mut [Completion::EMPTY; 32]);
        if a.poll(&mut out) == 1 {
            return out[0].status;
        }
        assert!(std::time::Instant::now() < give_up, "no completion");
    }
}

#[test]
fn the_kernel_moves_no_short_payload_into_the_engines_own_memory() {
    let (a, b) = (open(), open());
    let (a, b): (&dyn Fabric, &dyn Fabric) = (&*a, &*b);
    let (x, _, _) = connect(a, b);
    let source = Block::new(a, 4096, 7);
    let application = Block::new(b, 4096, 0);
    let own = application.as_own(b);
    let bytes: Vec<u8> = (0..=SHORT).map(|i| i as u8 ^ 0x33).collect();
    let data = Template {
        local_addr: source.addr,
        remote_addr: own.addr + 1024,
        local_key: source.keys.local,
        remote_key: own.keys.remote,
        len_bytes: 512,
        op: Op::Write,
        reserved: [0; 3],
    };
    let whole = SHORT as usize;
    let nothing: &[Template] = &[];
    let cases = [
        ("a short payload", nothing, &bytes[..whole], &own, 0),
        ("a long one", nothing, &bytes[..=whole], &own, 1),
        ("one for memory that may be unmapped", nothing, &bytes[..whole], &application, 1),
        ("one behind data goes along with it", &[data], &bytes[..whole], &own, 1),
    ];
    let mut seq = 0;
    for (what, work, bytes, target, pulls) in cases {
        let before = counter(b, "pulls");
        own.fill(0);
        post_extra(a, x, work, write(bytes, target, 3), seq);
        seq += work.len() as u64 + 1;
        assert_eq!(outcome(a, b), WcStatus::Success, "{what}");
        assert_eq!(counter(b, "pulls") - before, pulls, "{what}");
        let expected = |at: usize| match at {
            1024..1536 if !work.is_empty() => 7,
            3.. if at - 3 < bytes.len() => bytes[at - 3],
            _ => 0,
        };
        assert_eq!(own.differs(expected), None, "{what}");
    }
    assert!(own.sentinels_stand());
}

#[test]
fn a_forged_place_or_length_of_a_payload_in_the_ring_is_refused() {
    let b = open();
    let b: &dyn Fabric = &*b;
    let own = Block::new(b, 64 << 10, 0).as_own(b);
    let forged = [
        ("longer than any", LENGTH, SHORT + 1),
        ("as long as a number can be", LENGTH, u64::from(u32::MAX)),
        ("nothing", LENGTH, 0),
        ("behind the room", OFFSET, ROOM),
        ("across its end", OFFSET, ROOM - 8),
        ("out of the address space", OFFSET, u64::MAX - 7),
        ("between two words", OFFSET, 4),
    ];
    for (n, (what, word, value)) in forged.into_iter().enumerate() {
        let a = open();
        let a: &dyn Fabric = &*a;
        let (x, _, ours) = connect(a, b);
        let ring = map_ring(ours["ring_fd"].as_i64().expect("a descriptor") as i32);
        post_extra(a, x, &[], write(&[9; 16], &own, 0), 0);
        // Nobody serves `b` meanwhile.
        ring[ENTRIES + word].store(value, Ordering::SeqCst);
        assert_eq!(outcome(a, b), WcStatus::PeerGone, "{what}");
        assert_eq!(counter(b, "violations"), n as u64 + 1, "{what}");
        assert_eq!(own.differs(|_| 0), None, "{what}");
    }
    assert!(own.sentinels_stand());
}

#[test]
fn more_short_payloads_than_the_ring_has_room_for_all_arrive() {
    let (a, b) = (open(), open());
    let (a, b): (&dyn Fabric, &dyn Fabric) = (&*a, &*b);
    let (x, _, ours) = connect(a, b);
    let ring = map_ring(ours["ring_fd"].as_i64().expect("a descriptor") as i32);
    let own = Block::new(b, 64 << 10, 0).as_own(b);
    let count = 2 * ROOM / SHORT;
    for lap in 0..3u64 {
        for i in 0..count {
            let bytes = [(lap * 7 + i) as u8; SHORT as usize];
            post_extra(a, x, &[], write(&bytes, &own, i * SHORT), lap * count + i);
        }
        let flags = |i: u64| ring[ENTRIES + i as usize * ENTRY + 5].load(Ordering::SeqCst);
        let first = lap * count % u64::from(DEPTH);
        assert_ne!(flags(first), flags(first + count - 1), "the room was enough for all of them");
        for _ in 0..count {
            assert_eq!(outcome(a, b), WcStatus::Success);
        }
        let expected = |at: usize| if at < 32 << 10 { (lap * 7 + at as u64 / SHORT) as u8 } else { 0 };
        assert_eq!(own.differs(expected), None);
    }
}

#[test]
fn a_door_of_another_version_is_passed_over_by_name() {
    let (a, b) = (open(), open());
    let (a, b): (&dyn Fabric, &dyn Fabric) = (&*a, &*b);
    assert_eq!(a.reach(&b.address(), soon()), Ok(()));
    // The magic is the first word of the door's page.
    let door = map_shared(b.address()["door_fd"].as_i64().expect("a descriptor") as i32, 1);
    let older = u64::from_le_bytes(*b"BATONDR2");
    door[0].store(older, Ordering::SeqCst);
    let c = open();
    let text = c.reach(&b.address(), soon()).expect_err("another layout");
    assert!(text.contains(&format!("{older:#x}")), "{text}");
}
