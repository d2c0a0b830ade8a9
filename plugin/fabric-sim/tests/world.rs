//! What the simulated world does on purpose, beyond what every fabric does.

use baton_fabric::*;
use baton_fabric_sim::{SimConfig, SimFabric, SimWorld};
use std::sync::Arc;
use std::time::Instant;

const LEN: u64 = 4096;

struct Pair {
    world: SimWorld,
    fabrics: [Arc<SimFabric>; 2],
    endpoints: [EndpointId; 2],
    memory: [u64; 2],
    keys: [Keys; 2],
}

impl Pair {
    fn new(seed: u64, config: SimConfig, recvs: usize) -> Pair {
        let world = SimWorld::new(seed, config);
        let fabrics = [world.fabric(0), world.fabric(1)];
        let memory = [0, 1].map(|node| world.alloc(node, LEN as usize));
        let keys = [0, 1].map(|node| {
            let memory = Memory {
                addr: memory[node],
                len_bytes: LEN,
                kind: MemoryKind::Dram,
                device: 0,
                remote_read: true,
                remote_write: true,
                ordered: false,
                mapped: false,
            };
            fabrics[node].register(&memory).expect("register")
        });
        let config = EndpointConfig {
            sq_depth: 8,
            rq_depth: 8,
            active: true,
            control: false,
            max_sge: 1,
            exposed: true,
        };
        let made = [0, 1].map(|node: usize| fabrics[node].create_endpoint(&config).expect("create"));
        fabrics[1].post_recv(made[1].0, &vec![RecvSlot::default(); recvs]).expect("RECVs");
        for node in [0, 1] {
            fabrics[node].connect_endpoint(made[node].0, &made[1 - node].1, Instant::now()).expect("connect");
        }
        Pair { world, fabrics, endpoints: [made[0].0, made[1].0], memory, keys }
    }

    fn template(&self, op: Op) -> Template {
        Template {
            local_addr: self.memory[0],
            remote_addr: self.memory[1],
            local_key: self.keys[0].local,
            remote_key: self.keys[1].remote,
            len_bytes: LEN as u32,
            op,
            reserved: [0; 3],
        }
    }

    fn post(&self, work: &[Template], extra: Option<Extra<'_>>, first_seq: u64) -> Result<(), PostError> {
        self.fabrics[0].post(
            self.endpoints[0],
            &Batch { work, imm: None, extra, first_seq, signaled: true, patient: false },
        )
    }

    fn poll(&self, node: usize) -> Vec<Completion> {
        let mut out = [Completion::EMPTY; 16];
        let n = self.fabrics[node].poll(&mut out);
        out[..n].to_vec()
    }

    fn settle(&self) -> [Vec<Completion>; 2] {
        while self.world.step() {}
        [self.poll(0), self.poll(1)]
    }
}

fn tail(fenced: bool) -> Extra<'static> {
    Extra {
        op: ExtraOp::WriteImm(1),
        bytes: &[],
        staged: None,
        gather: &[],
        remote_addr: 0,
        remote_key: 0,
        fenced,
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let digest = |seed| {
        let pair = Pair::new(seed, SimConfig::default(), 8);
        for seq in 0..4 {
            pair.post(&[pair.template(Op::Write)], None, seq).expect("post");
        }
        pair.settle();
        (pair.world.digest(), pair.world.now_ns())
    };
    assert_eq!(digest(1), digest(1));
    assert_ne!(digest(1), digest(2));
}

/// Whether the target, told that its memory has been read, changed it too early for the READ.
fn read_is_overtaken(seed: u64, fenced: bool) -> bool {
    let pair = Pair::new(seed, SimConfig::default(), 8);
    pair.world.store(1, pair.memory[1], &[1; LEN as usize]);
    pair.post(&[pair.template(Op::Read)], Some(tail(fenced)), 0).expect("post");
    while pair.poll(1).is_empty() {
        assert!(pair.world.step(), "seed {seed}: the immediate never arrives");
    }
    pair.world.store(1, pair.memory[1], &[2; LEN as usize]);
    pair.settle();
    let mut found = [0; LEN as usize];
    pair.world.load(0, pair.memory[0], &mut found);
    found != [1; LEN as usize]
}

#[test]
fn an_unfenced_tail_overtakes_a_read_and_a_fenced_one_never_does() {
    assert!((0..50).any(|seed| read_is_overtaken(seed, false)));
    assert!((0..200).all(|seed| !read_is_overtaken(seed, true)));
}

#[test]
fn a_slot_of_the_send_queue_is_free_only_once_its_completion_was_polled() {
    let pair = Pair::new(3, SimConfig::default(), 0);
    for seq in 0..8 {
        pair.post(&[pair.template(Op::Write)], None, seq).expect("there is room");
    }
    while pair.world.step() {}
    let full =
        pair.post(&[pair.template(Op::Write)], None, 8).expect_err("everything is done, but nobody knows");
    assert!(matches!(full.error, FabricError::Limit(_)), "{full}");
    assert_eq!(pair.poll(0).len(), 8);
    pair.post(&[pair.template(Op::Write)], None, 8).expect("there is room again");
}

#[test]
fn a_short_partition_only_delays() {
    let pair = Pair::new(4, SimConfig::default(), 8);
    pair.world.partition(0, 1, 100_000_000);
    pair.post(&[pair.template(Op::Write)], Some(tail(false)), 0).expect("post");
    let [sent, received] = pair.settle();
    assert!(pair.world.now_ns() >= 100_000_000);
    assert_eq!(sent.iter().map(|c| (c.seq, c.status)).collect::<Vec<_>>(), [(1, WcStatus::Success)]);
    assert_eq!(received.len(), 1);
}

#[test]
fn a_long_partition_and_a_dead_node_are_noticed_by_waiting() {
    for dead in [false, true] {
        let pair = Pair::new(5, SimConfig::default(), 8);
        if dead {
            pair.world.kill_node(1);
        } else {
            pair.world.partition(0, 1, 1_000_000_000);
        }
        pair.post(&[pair.template(Op::Write)], Some(tail(false)), 0).expect("post");
        let [sent, received] = pair.settle();
        let expected = [(0, WcStatus::PeerGone), (1, WcStatus::Flushed)];
        assert_eq!(sent.iter().map(|c| (c.seq, c.status)).collect::<Vec<_>>(), expected, "dead: {dead}");
        assert!(received.is_empty());
    }
}

#[test]
fn what_failed_here_may_have_arrived_there() {
    let outcome = |seed| {
        let pair = Pair::new(seed, SimConfig::default(), 8);
        pair.post(&[pair.template(Op::Write)], Some(tail(false)), 0).expect("post");
        let mut heard = Vec::new();
        while heard.is_empty() {
            assert!(pair.world.step());
            heard = pair.poll(1);
        }
        pair.world.kill_endpoint(1, pair.endpoints[1]);
        let [sent, _] = pair.settle();
        sent[0].status
    };
    let outcomes: Vec<WcStatus> = (0..100).map(outcome).collect();
    assert!(outcomes.contains(&WcStatus::Success) && outcomes.contains(&WcStatus::PeerGone), "{outcomes:?}");
}

#[test]
#[should_panic(expected = "the source of a work request changed before it completed")]
fn a_source_that_changes_before_its_write_completes_stops_the_run() {
    let pair = Pair::new(5, SimConfig::default(), 0);
    pair.post(&[pair.template(Op::Write)], None, 0).expect("post");
    while pair.fabrics[1].stats()["bytes_placed"] == 0 {
        assert!(pair.world.step(), "the WRITE begins to land");
    }
    pair.world.store(0, pair.memory[0], b"something else");
    while pair.world.step() {}
}
