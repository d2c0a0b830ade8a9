//! Messages received in two steps, under what only a simulated world does to them.

use baton_fabric::*;
use baton_fabric_sim::{SimConfig, SimFabric, SimWorld};
use std::sync::Arc;
use std::time::Instant;

const HEAD: usize = 16;
const REST: usize = 3000;
const SLOT: usize = 4096;
const FILLER: u8 = 0xA5;

/// Node 0 sends to node 1, which receives heads.
struct Pair {
    world: SimWorld,
    fabrics: [Arc<SimFabric>; 2],
    endpoints: [EndpointId; 2],
    /// Where the rest goes, with a margin as long around it.
    place: u64,
    bytes: Vec<u8>,
}

impl Pair {
    /// With one message on its way, whose head is here.
    fn new(seed: u64) -> Pair {
        let world = SimWorld::new(seed, SimConfig { headed_bytes: 4096, ..SimConfig::default() });
        let fabrics = [world.fabric(0), world.fabric(1)];
        let memory = [0, 1].map(|node| world.alloc(node, SLOT));
        let keys = [0, 1].map(|node| {
            let memory = Memory {
                addr: memory[node],
                len_bytes: SLOT as u64,
                kind: MemoryKind::Dram,
                device: 0,
                remote_read: false,
                remote_write: false,
                ordered: false,
                mapped: false,
            };
            fabrics[node].register(&memory).expect("register")
        });
        let bytes: Vec<u8> = (0..HEAD + REST).map(|n| (n * 7 + n / 251) as u8).collect();
        world.store(0, memory[0], &bytes);
        let place = world.alloc(1, 3 * REST);
        world.store(1, place, &[FILLER; 3 * REST]);
        let config = |active| EndpointConfig {
            sq_depth: 8,
            rq_depth: 8,
            active,
            control: false,
            max_sge: 2,
            exposed: false,
        };
        let made = [0, 1].map(|node| fabrics[node].create_endpoint(&config(node == 0)).expect("create"));
        for node in [0, 1] {
            let connected = fabrics[node].connect_endpoint(made[node].0, &made[1 - node].1, Instant::now());
            connected.expect("connect");
        }
        let endpoints = [made[0].0, made[1].0];
        assert!(fabrics[1].receive_heads(endpoints[1]));
        let slot = RecvSlot { addr: memory[1], local_key: keys[1].local, len_bytes: SLOT as u32, id: 5 };
        fabrics[1].post_recv(endpoints[1], &[slot]).expect("post a RECV");
        let rest = Sge { addr: memory[0] + HEAD as u64, local_key: keys[0].local, len_bytes: REST as u32 };
        let extra = Extra {
            op: ExtraOp::SendHead,
            bytes: &bytes[..HEAD],
            staged: Some((memory[0], keys[0].local)),
            gather: &[rest],
            remote_addr: 0,
            remote_key: 0,
            fenced: false,
        };
        let batch =
            Batch { work: &[], imm: None, extra: Some(extra), first_seq: 0, signaled: true, patient: false };
        fabrics[0].post(endpoints[0], &batch).expect("post");
        let pair = Pair { world, fabrics, endpoints, place, bytes };
        let head = pair.wait(1);
        assert_eq!(head.kind, CompletionKind::RecvHead { head_bytes: HEAD as u32 });
        assert_eq!((head.seq, head.len_bytes as usize), (5, HEAD + REST));
        pair
    }

    fn poll(&self, node: usize) -> Option<Completion> {
        let mut out = [Completion::EMPTY];
        (self.fabrics[node].poll(&mut out) > 0).then_some(out[0])
    }

    fn wait(&self, node: usize) -> Completion {
        loop {
            if let Some(done) = self.poll(node) {
                return done;
            }
            assert!(self.world.step(), "seed at rest, and node {node} hears nothing");
        }
    }

    fn take(&self) -> (usize, Option<Untaken>) {
        let rest = Rest { to: Some(self.place + REST as u64), len_bytes: REST as u32 };
        self.fabrics[1].take(self.endpoints[1], &[rest])
    }

    /// The place with what is around it.
    fn expect_placed(&self, count: usize) {
        let mut found = vec![0; 3 * REST];
        self.world.load(1, self.place, &mut found);
        let mut expected = vec![FILLER; 3 * REST];
        expected[REST..][..count].copy_from_slice(&self.bytes[HEAD..][..count]);
        assert!(found == expected, "not exactly {count} bytes were placed");
    }
}

#[test]
fn a_rest_that_is_not_all_here_is_asked_for_again_when_more_is() {
    let (mut at_once, mut in_pieces) = (0, 0);
    for seed in 0..50 {
        let pair = Pair::new(seed);
        let mut asked = 0;
        loop {
            match pair.take() {
                (1, None) => break,
                (0, Some(Untaken::Later)) => asked += 1,
                other => panic!("seed {seed}: {other:?}"),
            }
            assert_eq!(pair.wait(1).kind, CompletionKind::RecvMore);
        }
        pair.expect_placed(REST);
        let sent = pair.wait(0);
        assert_eq!((sent.kind, sent.seq, sent.status), (CompletionKind::Send, 0, WcStatus::Success));
        at_once += u32::from(asked == 0);
        in_pieces += u32::from(asked > 1);
    }
    assert!(at_once > 0 && in_pieces > 0, "{at_once} at once, {in_pieces} in pieces");
}

#[test]
fn a_rest_that_stays_with_its_sender_ends_with_it() {
    let (mut gone, mut here) = (0, 0);
    for seed in 0..50 {
        let pair = Pair::new(seed);
        pair.fabrics[0].fence(pair.endpoints[0]);
        while pair.world.step() {}
        assert_eq!(pair.wait(0).status, WcStatus::Flushed);
        match pair.take() {
            (0, Some(Untaken::Gone)) => {
                pair.expect_placed(0);
                assert!(!pair.world.is_connected(1, pair.endpoints[1]), "the endpoint is in error");
                gone += 1;
            }
            (1, None) => {
                pair.expect_placed(REST);
                here += 1;
            }
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    assert!(gone > 0 && here > 0, "{gone} were gone, {here} had come before");
}

#[test]
fn after_a_long_partition_both_sides_have_ended_and_nothing_more_is_placed() {
    let mut ended = 0;
    for seed in 0..50 {
        let pair = Pair::new(seed);
        pair.world.partition(0, 1, 1_000_000_000);
        let before = pair.take();
        while pair.world.step() {}
        if before == (1, None) {
            // It was here; what is lost is that it was taken.
            pair.expect_placed(REST);
            assert_eq!(pair.wait(0).status, WcStatus::PeerGone);
            continue;
        }
        assert_eq!(before, (0, Some(Untaken::Later)), "seed {seed}");
        assert_eq!(pair.take(), (0, Some(Untaken::Gone)), "seed {seed}");
        pair.expect_placed(0);
        assert_eq!(pair.wait(0).status, WcStatus::PeerGone);
        assert!(!pair.world.is_connected(1, pair.endpoints[1]));
        ended += 1;
    }
    assert!(ended > 0);
}
