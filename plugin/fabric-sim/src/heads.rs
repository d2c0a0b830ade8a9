//! Messages that are received in two steps: the head in its RECV's slot, the rest where and when the receiver says.
//!
//! ```text
//! requests of a flow: | heads are here, rests wait | a head may come, anything else waits |
//! ```
//! A rest moves only inside of [`Inner::take`], so nothing of it lands late. What is taken is acknowledged in the order of the requests.

use crate::endpoint::*;
use crate::memory::Want;
use crate::world::{Event, Inner};
use baton_fabric::{CompletionKind, Rest, Untaken, WcStatus};

impl Inner {
    /// Whether the first request of a flow is a message whose head comes first.
    pub(crate) fn has_head(&mut self, flow: usize) -> bool {
        let Flow { to, requests, .. } = &self.flows[flow];
        let headed =
            matches!(requests.front(), Some(InFlight { request: Request::Send { head: 1.., .. }, .. }));
        let to = *to;
        headed && self.endpoint(to).is_some_and(|ep| ep.heads)
    }

    /// Whether the first request of a flow waits for rests in front of it. The next head sometimes comes all the same, unless it would be
    /// refused: a refusal is answered behind them.
    pub(crate) fn waits_for_rests(&mut self, flow: usize) -> bool {
        if self.flows[flow].heads.is_empty() {
            return false;
        }
        let waits = !(self.has_head(flow) && self.head_fits(flow) && self.rng.chance(1, 2));
        if waits {
            // The network does not keep it.
            self.flows[flow].requests[0].since = None;
        }
        waits
    }

    fn head_fits(&mut self, flow: usize) -> bool {
        let Flow { to, rails: [_, rail], .. } = self.flows[flow];
        let Some(slot) = self.endpoint(to).and_then(|ep| ep.rq.front().copied()) else { return false };
        let Request::Send { bytes, head } = &self.flows[flow].requests[0].request else { return false };
        let memory = &self.nodes[to.0].memory;
        bytes.len() <= slot.len_bytes as usize
            && memory.allows(rail, slot.local_key, slot.addr, *head, Want::Local)
    }

    /// The first request is a SEND with a head, which its target wants by itself.
    pub(crate) fn deliver_head(&mut self, flow: usize) {
        let Flow { to, rails: [_, rail], .. } = self.flows[flow];
        let Some(slot) = self.endpoint(to).and_then(|ep| ep.rq.front().copied()) else {
            return self.no_recv(flow);
        };
        let Request::Send { bytes, head } = &self.flows[flow].requests[0].request else { return };
        let (len, head) = (bytes.len(), *head);
        if len > slot.len_bytes as usize {
            return self.refuse(flow, WcStatus::RemoteLength, true);
        }
        let memory = &mut self.nodes[to.0].memory;
        if !memory.write(rail, slot.local_key, slot.addr, &bytes[..head], Want::Local) {
            return self.refuse(flow, WcStatus::RemoteAccess, true);
        }
        let Some(InFlight { seq, request: Request::Send { mut bytes, .. }, .. }) =
            self.flows[flow].requests.pop_front()
        else {
            return;
        };
        if let Some(ep) = self.endpoint(to) {
            ep.rq.pop_front();
        }
        let kind = CompletionKind::RecvHead { head_bytes: head as u32 };
        self.push_completion(to, kind, WcStatus::Success, u64::from(slot.id), len as u32);
        let (rest, stays) = (bytes.split_off(head), self.rng.chance(1, 2));
        let here = if stays { rest.len() } else { 0 };
        self.flows[flow].heads.push_back(Head { seq, rest, stays, here, placed: 0, asked: false });
        self.schedule_arrive(flow);
        self.deliver_next(flow);
    }

    fn deliver_next(&mut self, flow: usize) {
        if !self.flows[flow].requests.is_empty() {
            let gap = self.draw(self.cfg.piece_gap_ns.clone());
            self.schedule_deliver(flow, gap);
        }
    }

    fn schedule_arrive(&mut self, flow: usize) {
        let more = self.flows[flow].heads.iter().any(|head| head.here < head.rest.len());
        if more && !std::mem::replace(&mut self.flows[flow].arrive_scheduled, true) {
            let latency = self.draw(self.cfg.latency_ns.clone());
            self.schedule(latency, Event::Arrive(flow));
        }
    }

    /// More of the oldest rest that is not all here.
    pub(crate) fn arrive(&mut self, flow: usize) {
        let Flow { from, to, .. } = self.flows[flow];
        self.flows[flow].arrive_scheduled = false;
        let down = self.link_down_until(from.0, to.0);
        if down.is_some_and(|until| until - self.now >= self.cfg.retry_timeout_ns) {
            return self.flow_dead(flow, false);
        }
        let busy = down.unwrap_or(0).max(self.nodes[to.0].stalled_until);
        if busy > self.now {
            self.flows[flow].arrive_scheduled = true;
            return self.schedule(busy - self.now, Event::Arrive(flow));
        }
        let coming = self.flows[flow].heads.iter().position(|head| head.here < head.rest.len());
        let Some(index) = coming else { return };
        let Head { rest, here, .. } = &self.flows[flow].heads[index];
        let piece = self.piece(rest.len() - here);
        let head = &mut self.flows[flow].heads[index];
        head.here += piece;
        if std::mem::take(&mut head.asked) {
            self.push_completion(to, CompletionKind::RecvMore, WcStatus::Success, 0, 0);
        }
        self.schedule_arrive(flow);
    }

    /// See [`baton_fabric::Fabric::take`].
    pub(crate) fn take(&mut self, qp: Qp, rests: &[Rest]) -> (usize, Option<Untaken>) {
        let alive = self.nodes[qp.0].alive;
        let open = self.endpoint(qp).filter(|ep| alive && ep.state == State::Connected);
        let Some(peer) = open.and_then(|ep| ep.peer) else { return (0, Some(Untaken::Gone)) };
        let inbound = self.flows.iter().rposition(|flow| flow.from == peer && flow.to == qp);
        let Some(flow) = inbound.filter(|flow| !self.flows[*flow].dead) else {
            self.fence(qp);
            return (0, Some(Untaken::Gone));
        };
        for (whole, rest) in rests.iter().enumerate() {
            // Enough for one call.
            if whole > 0 && self.rng.chance(1, 4) {
                return (whole, None);
            }
            if let Some(why) = self.take_oldest(flow, rest) {
                return (whole, Some(why));
            }
        }
        (rests.len(), None)
    }

    fn take_oldest(&mut self, flow: usize, rest: &Rest) -> Option<Untaken> {
        let Flow { from, to, .. } = self.flows[flow];
        let Some(Head { rest: bytes, stays, .. }) = self.flows[flow].heads.front() else {
            panic!("node {} endpoint {:?}: a rest is asked for whose head has not come", to.0, to.1);
        };
        let (len, stays) = (bytes.len(), *stays);
        assert_eq!(
            rest.len_bytes as usize, len,
            "node {} endpoint {:?}: bytes of the oldest rest",
            to.0, to.1
        );
        if stays && !self.serves_rests(from) {
            self.fence(to);
            return Some(Untaken::Gone);
        }
        let head = &mut self.flows[flow].heads[0];
        let node = &mut self.nodes[to.0];
        if let Some(addr) = rest.to {
            let Some(place) = node.memory.bytes_mut(addr, len) else {
                self.taken(flow, false);
                return Some(Untaken::Unmapped);
            };
            place[head.placed..head.here].copy_from_slice(&head.rest[head.placed..head.here]);
            node.counters.bytes_placed += (head.here - head.placed) as u64;
            head.placed = head.here;
        }
        if head.here < len {
            head.asked = true;
            return Some(Untaken::Later);
        }
        self.taken(flow, rest.to.is_some());
        None
    }

    /// A sender whose endpoint has ended lets nobody read its memory any more.
    fn serves_rests(&mut self, from: Qp) -> bool {
        let alive = self.nodes[from.0].alive;
        let works = |ep: &mut Endpoint| matches!(ep.state, State::Connected | State::Draining);
        alive && self.endpoint(from).is_some_and(works)
    }

    /// The oldest rest is placed or dropped: its message is acknowledged, and what waited goes on.
    fn taken(&mut self, flow: usize, placed: bool) {
        let to = self.flows[flow].to;
        let Some(Head { seq, .. }) = self.flows[flow].heads.pop_front() else { return };
        let counters = &mut self.nodes[to.0].counters;
        if placed {
            counters.rests_placed += 1;
        } else {
            counters.rests_dropped += 1;
        }
        self.flows[flow].answers.push_back((seq, Answer::Status(WcStatus::Success)));
        self.schedule_return(flow);
        self.deliver_next(flow);
    }
}
