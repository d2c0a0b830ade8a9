//! Beginning and ending epochs, and what must hold when the world is at rest.

use super::*;

/// Begins an epoch on both sides: RECVs, then channels.
pub(super) fn open(
    config: &Config,
    epoch: u32,
    parts: Vec<(Durable, Pool, Mem)>,
    now: Nanos,
) -> Vec<(Channel, Pool, Mem, Vec<End>)> {
    let mut opened = Vec::new();
    for (durable, mut pool, mem) in parts {
        serve_pool(&mut pool, &mem, now);
        mem.reset(config);
        let lanes: Vec<TwoLane> = (0..config.lanes)
            .map(|lane| {
                let holder = Holder { peer: config.peer, lane: LaneId(lane) };
                TwoLane {
                    endpoint: endpoint(usize::from(lane) + 1),
                    sq_depth: config.sq,
                    rq_depth: config.rq,
                    posted: (0..config.first_recvs).filter_map(|_| pool.lend(holder)).collect(),
                    peer_posted: 0,
                }
            })
            .collect();
        opened.push((durable, pool, mem, lanes));
    }
    let told: Vec<Vec<u32>> =
        opened.iter().map(|(_, _, _, lanes)| lanes.iter().map(|l| l.posted.len() as u32).collect()).collect();
    let begin = |n: usize, (durable, pool, mem, mut lanes): (Durable, Pool, Mem, Vec<TwoLane>)| {
        let mut ends: Vec<End> = (0..=lanes.len()).map(|_| End::default()).collect();
        ends[0].recvs = (0..config.control_rq).map(|nth| (u64::from(nth), Recv::Control(nth))).collect();
        for (nth, lane) in lanes.iter_mut().enumerate() {
            lane.peer_posted = told[1 - n][nth];
            let recvs = lane.posted.iter().map(|&slot| Recv::Data(slot));
            ends[nth + 1].recvs = (0..).zip(recvs).collect();
            lane.posted.iter().for_each(|&slot| mem.spoil(slot));
        }
        let setup = TwoSetup {
            peer: config.peer,
            session: SESSION,
            epoch: Epoch(epoch),
            control: endpoint(0),
            control_sq_depth: config.control_sq,
            control_rq_depth: config.control_rq,
            lanes,
            slot_bytes: config.slot,
            peer_credit_addr: 0,
            peer_credit_key: 0,
            send_slots: config.send_slots,
            max_sge: config.max_sge,
            data_crc: config.data_crc,
            limits: config.limits,
        };
        (Channel::new(setup, durable, now), pool, mem, ends)
    };
    opened.into_iter().enumerate().map(|(n, parts)| begin(n, parts)).collect()
}

impl World {
    /// Ends this epoch and begins the next of the same session.
    pub fn next_epoch(&mut self) {
        self.next_epoch_after(|_, _| {});
    }

    /// The same, with something done to what a node goes on with.
    pub fn next_epoch_after(&mut self, mut between: impl FnMut(usize, &mut Durable)) {
        self.drain();
        self.epoch += 1;
        let now = self.now;
        let mut kept = Vec::new();
        let mut parts = Vec::new();
        for (n, node) in std::mem::take(&mut self.nodes).into_iter().enumerate() {
            let Node {
                channel,
                mut pool,
                mem,
                mut done,
                notes,
                delivered,
                placed,
                pool_jobs,
                popped_by_itself,
                ..
            } = node;
            let reason = channel.end_reason();
            assert!(
                self.hostile || !matches!(reason, Some(TwoEnd::Violation(_))),
                "{reason:?} between honest peers"
            );
            let mut closed = channel.close(now, &mut pool);
            done.extend(closed.done);
            between(n, &mut closed.durable);
            assert_eq!(pool.stats().lent, 0, "all slots came back");
            for job in pool_jobs {
                match job {
                    PoolAction::Allocate(slab) => {
                        mem.add_slab(slab);
                        pool.on_allocated(now, slab, true);
                    }
                    PoolAction::Release(slab) => {
                        mem.drop_slab(slab);
                        pool.on_released(slab);
                    }
                }
            }
            parts.push((closed.durable, pool, mem));
            kept.push((done, notes, delivered, placed, popped_by_itself));
        }
        let opened = open(&self.config, self.epoch, parts, now);
        for (parts, (done, notes, delivered, placed, popped_by_itself)) in opened.into_iter().zip(kept) {
            self.nodes.push(Node { done, notes, delivered, placed, popped_by_itself, ..Node::new(parts) });
        }
        (0..2).for_each(|n| {
            self.pump(n);
        });
    }

    pub fn result_of(&self, n: usize, token: u64) -> Option<&Result<(), XferFailure>> {
        let mut found = self.nodes[n].done.iter().filter(|(t, _)| *t == token);
        let first = found.next();
        assert!(found.next().is_none(), "token {token} was reported twice");
        first.map(|(_, result)| result)
    }

    /// At rest: no credit is lost, no slot, nothing is in flight.
    pub fn audit(&mut self) {
        self.settle();
        for n in [0, 1] {
            let node = &mut self.nodes[n];
            node.channel.poll_credit(&node.mem);
            assert_eq!(node.ended, None, "node {n}");
            node.pool.audit();
            assert!(node.copies.is_empty());
        }
        let stats: Vec<_> = self.nodes.iter().map(|node| node.channel.stats()).collect();
        for (s, r) in [(&stats[0], &stats[1]), (&stats[1], &stats[0])] {
            assert_eq!((s.transfers, s.notes_waiting, s.copies), (0, 0, 0), "{s:#?}");
            assert_eq!((s.send_slots, s.gathers), (0, 0), "all that SENDs used is back");
            for (own, other) in s.lanes.iter().zip(&r.lanes) {
                assert_eq!(own.consumed, other.received, "consumed = received");
                assert_eq!(own.known, other.granted, "known = granted");
                assert_eq!(own.known - own.consumed, u64::from(other.posted_recvs), "credit = RECVs posted");
            }
            assert_eq!(s.control_consumed, r.control_received);
            assert_eq!(
                s.control_known - s.control_consumed,
                u64::from(self.config.control_rq),
                "control credit"
            );
            assert_eq!(s.request_known, r.request_granted);
            let depth = u64::from(self.config.limits.request_depth);
            assert_eq!(s.request_known - s.request_consumed, depth, "REQUEST credit is all back");
            assert_eq!(
                (r.peer_transfers, r.inbox_bytes),
                (0, 0),
                "nothing is remembered of what was released"
            );
        }
    }
}
