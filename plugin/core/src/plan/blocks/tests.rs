use proptest::prelude::*;

use super::*;

fn block(region: u32, addr: u64, len_bytes: u64) -> Block {
    Block { addr, len_bytes, region }
}

fn pick(
    op: Op,
    (local, l): (&BlockTable, &[u32]),
    (remote, r): (&BlockTable, &[u32]),
) -> Result<Picked, IndexError> {
    let limits = PlanLimits { max_chunk_bytes: 20, ..PlanLimits::default() };
    Plan::from_blocks(
        op,
        Selection { table: local, indices: l },
        Selection { table: remote, indices: r },
        limits,
    )
}

/// What general planning makes of the same pairs.
fn expected(op: Op, local: &[Block], l: &[u32], remote: &[Block], r: &[u32]) -> Plan {
    let pairs = l.iter().zip(r).map(|(&l, &r)| {
        let (from, to) = (local[l as usize], remote[r as usize]);
        Pair {
            local_addr: from.addr,
            remote_addr: to.addr,
            len_bytes: from.len_bytes,
            local: from.region,
            remote: to.region,
        }
    });
    let limits = PlanLimits { max_chunk_bytes: 20, ..PlanLimits::default() };
    Plan::build(op, pairs.collect(), limits).unwrap()
}

/// Every byte with where it goes; destinations that overlap make the order matter, and then plans are compared as they are.
fn bytes_moved(pieces: &[Pair]) -> std::collections::BTreeSet<(u32, u64, u32, u64)> {
    let bytes = |piece: &Pair| {
        let Pair { local, local_addr, remote, remote_addr, len_bytes } = *piece;
        (0..len_bytes).map(move |n| (local, local_addr + n, remote, remote_addr + n))
    };
    pieces.iter().flat_map(bytes).collect()
}

fn any_list(len_bytes: u64) -> impl Strategy<Value = Vec<Block>> {
    let overlapping = prop::collection::vec((0..3u32, 0..600u64), 1..40)
        .prop_map(move |all| all.into_iter().map(|(region, addr)| block(region, addr, len_bytes)).collect());
    let apart = (1u32..90).prop_flat_map(|n| Just((0..n).collect::<Vec<_>>()).prop_shuffle());
    let apart = apart.prop_map(move |order| {
        order.into_iter().map(|n| block(n % 3, u64::from(n / 3) * len_bytes, len_bytes)).collect()
    });
    let in_order = (1u64..60).prop_map(move |n| (0..n).map(|at| block(7, at * 17, len_bytes)).collect());
    prop_oneof![overlapping, apart, in_order]
}

proptest! {
    #[test]
    fn a_plan_of_indices_is_the_plan_of_its_pairs(
        (local, remote) in (0..17u64).prop_flat_map(|len| (any_list(len), any_list(len))),
        picks in prop::collection::vec(any::<[prop::sample::Index; 2]>(), 0..60),
        ascend in any::<bool>(),
        distinct in any::<bool>(),
        read in any::<bool>(),
    ) {
        let op = if read { Op::Read } else { Op::Write };
        let mut l: Vec<u32> = picks.iter().map(|p| p[0].index(local.len()) as u32).collect();
        let mut r: Vec<u32> = picks.iter().map(|p| p[1].index(remote.len()) as u32).collect();
        if ascend {
            l.sort_unstable();
            r.sort_unstable();
        }
        if distinct {
            for side in [&mut l, &mut r] {
                let mut seen = std::collections::BTreeSet::new();
                side.retain(|index| seen.insert(*index));
            }
            let n = l.len().min(r.len());
            l.truncate(n);
            r.truncate(n);
        }
        let tables = (BlockTable::new(local.clone()), BlockTable::new(remote.clone()));
        let Picked { plan, locals, remotes } = pick(op, (&tables.0, &l), (&tables.1, &r)).unwrap();
        let plain = expected(op, &local, &l, &remote, &r);
        let back: Vec<Pair> = plan
            .pieces()
            .iter()
            .map(|piece| Pair {
                local: locals[piece.local as usize],
                remote: remotes[piece.remote as usize],
                ..*piece
            })
            .collect();
        let source = if read { &tables.1 } else { &tables.0 };
        if source.disjoint || plain.is_ordered() {
            prop_assert_eq!(&back, plain.pieces());
        } else {
            // Sources that overlap may come in any order; what goes where is the same.
            prop_assert_eq!(bytes_moved(&back), bytes_moved(plain.pieces()));
        }
        prop_assert_eq!(plan.is_ordered(), plain.is_ordered());
        prop_assert_eq!(
            (plan.total_bytes(), plan.longest_bytes()),
            (plain.total_bytes(), plain.longest_bytes())
        );
        // No region that it does not touch: deregistering one must not stop it.
        for (list, regions) in [(&local, &locals), (&remote, &remotes)] {
            prop_assert!(regions.is_sorted() && regions.iter().all(|n| list.iter().any(|b| b.region == *n)));
        }
        let used: std::collections::BTreeSet<u32> = plan.pieces().iter().map(|p| p.local).collect();
        prop_assert_eq!(used.len(), locals.len());
    }
}

#[test]
fn few_indices_of_a_long_list_are_put_in_order_too() {
    let list: Vec<Block> = (0..1000).rev().map(|n| block(0, n * 64, 16)).collect();
    let (table, l, r) = (BlockTable::new(list.clone()), [1, 5, 3], [900, 7, 500]);
    for op in [Op::Write, Op::Read] {
        let picked = pick(op, (&table, &l), (&table, &r)).unwrap();
        assert_eq!(picked.plan, expected(op, &list, &l, &list, &r));
        assert!(!picked.plan.is_ordered());
        let twice = pick(op, (&table, &[1, 1]), (&table, &[9, 9])).unwrap();
        assert!(twice.plan.is_ordered(), "one destination twice: the host's order holds");
    }
}

#[test]
fn bad_indices_are_named_with_value_and_limit() {
    let (four, three) = (BlockTable::new(vec![block(0, 0, 4)]), BlockTable::new(vec![block(0, 0, 3); 5]));
    let text = |l: &[u32], r: &[u32]| pick(Op::Write, (&four, l), (&three, r)).unwrap_err().to_string();
    assert_eq!(text(&[0, 0], &[0]), "2 local and 1 remote indices: the lists must be equally long");
    assert_eq!(
        text(&[1], &[0]),
        "index 0: the local block list has no block 1, its 1 blocks are numbered from 0"
    );
    assert_eq!(
        pick(Op::Read, (&three, &[0, 4]), (&three, &[0, 5])).unwrap_err(),
        IndexError::Range { position: 1, side: "remote", index: 5, len: 5 }
    );
    assert_eq!(
        text(&[0], &[2]),
        "index 0: local block 0 has 4 bytes and remote block 2 3; both must be equal"
    );
    let none = BlockTable::new(Vec::new());
    assert!(none.is_empty() && pick(Op::Write, (&none, &[]), (&none, &[])).unwrap().plan.piece_count() == 0);
    assert!(matches!(
        pick(Op::Write, (&none, &[0]), (&none, &[0])).unwrap_err(),
        IndexError::Range { len: 0, index: 0, .. }
    ));
    let limits = PlanLimits { max_pieces: 2, ..PlanLimits::default() };
    let spread = BlockTable::new((0..3).map(|n| block(0, n * 100, 4)).collect());
    let all = Selection { table: &spread, indices: &[0, 1, 2] };
    let error = Plan::from_blocks(Op::Write, all, all, limits).unwrap_err();
    assert!(matches!(error, IndexError::Plan(PlanError::TooManyPieces { pieces: 3, limit: 2, .. })));
}
