//! Acknowledgements that nobody is in a hurry for.

#[allow(dead_code, reason = "the rig holds more than this test needs")]
mod tcp_support;

use baton_fabric::*;
use std::time::Instant;
use tcp_support::*;

const ROUNDS: u32 = 100;
/// One of so many in a row is asked for at once.
const AT_ONCE_OF: u64 = 16;

/// One side of a game of ball.
struct Player<'a> {
    node: &'a Node,
    endpoint: EndpointId,
    room: Block,
    thrown: u64,
    landed: u64,
}

impl Player<'_> {
    fn new(node: &Node, endpoint: EndpointId) -> Player<'_> {
        Player { node, endpoint, room: Block::new(node, 8), thrown: 0, landed: 0 }
    }

    fn throw(&mut self, ball: u32, to: (u64, u64)) {
        let extra = Extra {
            op: ExtraOp::WriteImm(ball),
            bytes: &u64::from(ball).to_le_bytes(),
            staged: None,
            gather: &[],
            remote_addr: to.0,
            remote_key: to.1,
            fenced: false,
        };
        let first_seq = self.thrown;
        let batch =
            Batch { work: &[], imm: None, extra: Some(extra), first_seq, signaled: true, patient: true };
        self.node.fabric.post(self.endpoint, &batch).unwrap();
        self.thrown += 1;
    }

    /// Looks until so many balls of this side have landed and the one awaited is here; not once more than that.
    fn look_until(&mut self, landed: u64, awaited: Option<u32>) {
        let (mut here, mut out, give_up) = (awaited.is_none(), [Completion::EMPTY; 16], soon());
        while !here || self.landed < landed {
            let n = self.node.fabric.poll(&mut out);
            for done in &out[..n] {
                assert_eq!(done.status, WcStatus::Success);
                match done.kind {
                    CompletionKind::Send => self.landed = done.seq + 1,
                    kind => here |= awaited.map(CompletionKind::RecvImm) == Some(kind),
                }
            }
            assert!(Instant::now() < give_up, "{landed} of {}, {awaited:?}: {here}", self.landed);
            std::thread::yield_now();
        }
    }
}

#[test]
fn they_come_along_with_what_goes_the_other_way() {
    guarded(|| {
        let nodes = [Node::new(), Node::new()].map(Node::without_service);
        let ends = connect(&nodes[0], &nodes[1]);
        let [mut a, mut b] = [(&nodes[0], ends.0), (&nodes[1], ends.1)].map(|(n, e)| Player::new(n, e));
        let place = |player: &Player<'_>| (player.room.addr(), player.room.keys.remote);
        let (at_a, at_b) = (place(&a), place(&b));
        for ball in 0..ROUNDS {
            for side in [&a, &b] {
                side.node.fabric.post_recv(side.endpoint, &[RecvSlot::default()]).unwrap();
            }
            a.throw(ball, at_b);
            b.look_until(u64::from(ball), Some(ball));
            b.throw(ball, at_a);
            a.look_until(u64::from(ball) + 1, Some(ball));
            for side in [&a, &b] {
                side.room.expect(&u64::from(ball).to_le_bytes());
            }
        }
        let alone = |node: &Node| node.counter("acknowledgements_sent");
        let most = u64::from(ROUNDS) / AT_ONCE_OF;
        assert!(alone(&nodes[0]) <= most && alone(&nodes[1]) <= most, "{:?}", nodes.each_ref().map(alone));
        // Nothing goes back for the last ball.
        let before = alone(&nodes[0]);
        std::thread::scope(|scope| {
            let watching = scope.spawn(|| b.look_until(u64::from(ROUNDS), None));
            while !watching.is_finished() {
                a.node.fabric.poll(&mut [Completion::EMPTY; 16]);
                std::thread::yield_now();
            }
        });
        assert_eq!(alone(&nodes[0]), before + 1, "it is told when there is nothing else to do");
    });
}
