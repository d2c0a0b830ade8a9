//! What holds across both nodes at every moment.

use super::*;

impl World {
    /// A RECV that was posted goes missing.
    pub fn lose_recv(&mut self, n: usize, index: usize) {
        self.nodes[n].ends[index].recvs.pop_front().expect("a RECV");
    }

    /// The slot of the oldest RECV of an end.
    pub fn posted(&self, n: usize, index: usize) -> SlotId {
        match self.nodes[n].ends[index].recvs.front() {
            Some(&(_, Recv::Data(slot))) => slot,
            other => panic!("{other:?}"),
        }
    }

    /// Credit: nobody knows of more than was announced, announces more than was posted, takes more than was sent; and a RECV
    /// stands for every credit that is out. Not where somebody cheats, or once an endpoint has been fenced.
    pub fn check_credit(&self) {
        let fenced = self.nodes.iter().any(|node| node.ended.is_some() || node.ends.iter().any(|e| e.fenced));
        if self.hostile || fenced {
            return;
        }
        let stats: Vec<_> = self.nodes.iter().map(|node| node.channel.stats()).collect();
        for sender in [0, 1] {
            let (s, r) = (&stats[sender], &stats[1 - sender]);
            let ends = &self.nodes[1 - sender].ends;
            for (nth, (out, inn)) in s.lanes.iter().zip(&r.lanes).enumerate() {
                let recvs = ends[nth + 1].recvs.len() as u64;
                let holds = out.consumed <= out.known
                    && out.known <= inn.announced
                    && inn.announced <= inn.granted
                    && inn.received <= out.consumed
                    && inn.granted - inn.received == u64::from(inn.posted_recvs)
                    && recvs >= inn.granted.saturating_sub(out.consumed)
                    && recvs <= u64::from(inn.posted_recvs);
                assert!(holds, "lane {nth} of node {sender}: {out:?}, the peer {inn:?}, {recvs} RECVs");
            }
            let recvs = ends[0].recvs.len() as u64;
            let holds = s.control_consumed <= s.control_known
                && s.control_known <= r.control_granted
                && r.control_received <= s.control_consumed
                && recvs >= r.control_granted - s.control_consumed;
            assert!(holds, "control of node {sender}: {s:#?}, the peer {r:#?}, {recvs} RECVs");
            let holds = s.request_consumed <= s.request_known && s.request_known <= r.request_granted;
            assert!(holds, "REQUEST of node {sender}: {s:#?}, the peer {r:#?}");
        }
    }
}
