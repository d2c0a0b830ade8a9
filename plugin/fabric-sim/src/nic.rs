//! What happens at each event: both halves of a reliable connection.

use crate::config::Sabotage;
use crate::endpoint::*;
use crate::memory::Want;
use crate::world::{Event, Inner};
use baton_fabric::{Completion, CompletionKind, WcStatus};

/// How often an endpoint is looked at that its owner has not connected yet.
const NOT_READY_NS: u64 = 10_000;

impl Inner {
    pub(crate) fn handle(&mut self, event: Event) {
        match event {
            Event::Launch(qp) => self.launch(qp),
            Event::Deliver(flow) => self.deliver(flow),
            Event::Sample(flow) => self.sample(flow),
            Event::Return(flow) => self.answer(flow),
            Event::Arrive(flow) => self.arrive(flow),
            Event::Flush(qp) => self.flush(qp),
            Event::GiveUp(flow) => self.give_up(flow),
        }
    }

    // ---- the initiator starts work

    pub(crate) fn kick_launch(&mut self, qp: Qp) {
        let gap = self.cfg.launch_gap_ns.clone();
        let Some(ep) = self.endpoint(qp) else { return };
        let due = ep.state == State::Connected && !ep.launch_blocked && ep.launched < ep.sq.len();
        if due && !ep.launch_scheduled {
            ep.launch_scheduled = true;
            let delay = self.draw(gap);
            self.schedule(delay, Event::Launch(qp));
        }
    }

    fn launch(&mut self, qp: Qp) {
        let (max_reads, fences) = (self.cfg.max_reads, self.cfg.sabotage != Some(Sabotage::FenceIgnored));
        let Some(ep) = self.endpoint(qp) else { return };
        ep.launch_scheduled = false;
        if ep.state != State::Connected || ep.launch_blocked || ep.launched >= ep.sq.len() {
            return;
        }
        let wr = &ep.sq[ep.launched];
        let reads = ep
            .sq
            .iter()
            .take(ep.launched)
            .filter(|earlier| earlier.is_read() && earlier.done.is_none())
            .count();
        // Tried again when a READ is done.
        if (wr.fenced && fences && reads > 0) || (wr.is_read() && reads >= max_reads) {
            return;
        }
        let (flow, index) = (ep.flow, ep.launched);
        ep.launched += 1;
        let sent = self.digest_of_source(qp, index);
        let Some(ep) = self.endpoint(qp) else { return };
        ep.sq[index].sent = sent;
        match self.request(qp, index) {
            Some(request) => self.send_off(flow, request),
            None => {
                let ep = self.endpoint(qp).expect("found above");
                ep.sq[index].done = Some(WcStatus::LocalAccess);
                ep.launch_blocked = true;
                self.complete(qp);
            }
        }
        self.kick_launch(qp);
    }

    /// Reads the source now; `None` when local keys or bounds do not permit it.
    fn request(&mut self, qp: Qp, index: usize) -> Option<InFlight> {
        let node = qp.0;
        let slot = self.nodes[node].slots.get(qp.1.slot as usize)?;
        let ep = slot.endpoint.as_ref()?;
        let (wr, rail) = (&ep.sq[index], ep.rail);
        let memory = &self.nodes[node].memory;
        let fetch = |source: &Source| match source {
            Source::Inline(bytes) => Some(bytes.clone()),
            Source::Memory(pieces) => memory.gather(rail, pieces),
        };
        let request = match &wr.kind {
            WrKind::Write { source, remote_addr, remote_key, imm } => {
                Request::Write { addr: *remote_addr, key: *remote_key, bytes: fetch(source)?, imm: *imm }
            }
            WrKind::Send { source, head } => Request::Send { bytes: fetch(source)?, head: *head },
            WrKind::Read { local_addr, local_key, len, remote_addr, remote_key } => {
                if !memory.allows(rail, *local_key, *local_addr, *len, Want::Local) {
                    return None;
                }
                Request::Read { addr: *remote_addr, key: *remote_key, len: *len }
            }
        };
        Some(InFlight { seq: wr.seq, request, placed: 0, heard: false, since: None, rnr: 0 })
    }

    fn send_off(&mut self, flow: usize, request: InFlight) {
        if self.flows[flow].dead {
            self.schedule_give_up(flow);
            return;
        }
        self.flows[flow].requests.push_back(request);
        let latency = self.draw(self.cfg.latency_ns.clone());
        self.schedule_deliver(flow, latency);
    }

    // ---- the target handles requests

    pub(crate) fn schedule_deliver(&mut self, flow: usize, delay: u64) {
        if !std::mem::replace(&mut self.flows[flow].deliver_scheduled, true) {
            self.schedule(delay, Event::Deliver(flow));
        }
    }

    fn deliver(&mut self, flow: usize) {
        self.flows[flow].deliver_scheduled = false;
        if self.flows[flow].dead || self.flows[flow].requests.is_empty() {
            return;
        }
        if self.waits_for_rests(flow) {
            return;
        }
        if let Some(delay) = self.hindrance(flow) {
            match delay {
                Some(delay) => self.schedule_deliver(flow, delay),
                None => self.flow_dead(flow, false),
            }
            return;
        }
        if self.cfg.sabotage == Some(Sabotage::SendBeforeData) {
            self.let_send_overtake(flow);
        }
        let head = &self.flows[flow].requests[0].request;
        match head {
            Request::Write { .. } => self.deliver_write(flow),
            Request::Send { .. } => self.deliver_send(flow),
            Request::Read { .. } => self.deliver_read(flow),
        }
    }

    /// What keeps the first request from getting on: `Some(Some(wait))`, `Some(None)` for ever, `None` nothing.
    fn hindrance(&mut self, flow: usize) -> Option<Option<u64>> {
        let (from, to) = (self.flows[flow].from, self.flows[flow].to);
        let (now, timeout) = (self.now, self.cfg.retry_timeout_ns);
        let fresh = self.flows[flow].requests[0].since.is_none();
        let since = *self.flows[flow].requests[0].since.get_or_insert(now);
        let patient = |delay: u64| Some((now + delay - since < timeout).then_some(delay));
        if let Some(until) = self.link_down_until(from.0, to.0) {
            let latency = self.draw(self.cfg.latency_ns.clone());
            return patient(until - now + latency);
        }
        if self.nodes[to.0].stalled_until > now {
            return patient(self.nodes[to.0].stalled_until - now);
        }
        if !self.nodes[to.0].alive {
            return Some(None);
        }
        let Some(target) = self.endpoint(to) else { return Some(None) };
        match target.state {
            State::Created => return patient(NOT_READY_NS),
            State::Error => return Some(None),
            State::Connected | State::Draining if target.peer != Some(from) => return Some(None),
            State::Connected | State::Draining => {}
        }
        if fresh && self.cfg.stall_one_in > 0 && self.rng.chance(1, self.cfg.stall_one_in) {
            return Some(Some(self.draw(self.cfg.stall_ns.clone())));
        }
        None
    }

    /// Length of the next piece of `left` bytes.
    pub(crate) fn piece(&mut self, left: usize) -> usize {
        if left < 2 || self.cfg.max_pieces < 2 || self.rng.chance(1, self.cfg.max_pieces) {
            return left;
        }
        self.rng.between(1, left as u64) as usize
    }

    /// The same for bytes that land at `addr`: words that lie aligned in the target's memory are never torn.
    fn piece_at(&mut self, addr: u64, left: usize) -> usize {
        let piece = self.piece(left);
        let aligned = (addr.wrapping_add(piece as u64) & !7).saturating_sub(addr) as usize;
        if piece == left || aligned == 0 { left } else { aligned }
    }

    fn deliver_write(&mut self, flow: usize) {
        let InFlight { seq, request: Request::Write { addr, key, bytes, imm }, placed, .. } =
            &self.flows[flow].requests[0]
        else {
            return;
        };
        let (seq, addr, key, imm, total, placed) = (*seq, *addr, *key, *imm, bytes.len(), *placed);
        let sabotage = self.cfg.sabotage;
        if sabotage == Some(Sabotage::ImmediateBeforeData)
            && placed == 0
            && imm.is_some_and(|imm| imm < 1 << 30)
        {
            self.hear_immediate(flow, imm, total);
        }
        let piece = self.piece_at(addr.wrapping_add(placed as u64), total - placed);
        if total > 0 && !self.place_write(flow, addr, key, placed, piece) {
            return self.refuse(flow, WcStatus::RemoteAccess, true);
        }
        let early = sabotage == Some(Sabotage::EarlyAck) && imm.is_none();
        if early && placed == 0 {
            self.flows[flow].answers.push_back((seq, Answer::Status(WcStatus::Success)));
            self.schedule_return(flow);
        }
        self.flows[flow].requests[0].placed += piece;
        if placed + piece < total {
            let gap = self.draw(self.cfg.piece_gap_ns.clone());
            return self.schedule_deliver(flow, gap);
        }
        if imm.is_some() && !self.flows[flow].requests[0].heard && !self.hear_immediate(flow, imm, total) {
            return self.no_recv(flow);
        }
        self.delivered(flow, (!early).then_some(Answer::Status(WcStatus::Success)));
    }

    /// Places a piece: the bounds of the whole first, then the piece as the key stands by now.
    fn place_write(&mut self, flow: usize, addr: u64, key: u64, placed: usize, piece: usize) -> bool {
        let wrong = self.cfg.sabotage == Some(Sabotage::WrongByte) && self.rng.chance(1, 50);
        let Flow { to, requests, rails: [_, rail], .. } = &self.flows[flow];
        let Request::Write { bytes, .. } = &requests[0].request else { return false };
        let mut part = bytes[placed..placed + piece].to_vec();
        if wrong && piece > 0 {
            part[0] ^= 0x40;
        }
        let node = &mut self.nodes[to.0];
        node.counters.bytes_placed += piece as u64;
        node.memory.allows(*rail, key, addr, bytes.len(), Want::RemoteWrite)
            && node.memory.write(*rail, key, addr + placed as u64, &part, Want::RemoteWrite)
    }

    fn deliver_read(&mut self, flow: usize) {
        let Flow { to, rails: [_, rail], .. } = self.flows[flow];
        let Request::Read { addr, key, len } = self.flows[flow].requests[0].request else { return };
        if !self.nodes[to.0].memory.allows(rail, key, addr, len, Want::RemoteRead) {
            return self.refuse(flow, WcStatus::RemoteAccess, true);
        }
        self.delivered(flow, Some(Answer::Sampling { addr, key, len, bytes: Vec::new() }));
        let delay = self.draw(self.cfg.read_delay_ns.clone());
        self.schedule_sample(flow, delay);
    }

    pub(crate) fn delivered(&mut self, flow: usize, answer: Option<Answer>) {
        let Some(done) = self.flows[flow].requests.pop_front() else { return };
        if let Some(answer) = answer {
            self.flows[flow].answers.push_back((done.seq, answer));
            self.schedule_return(flow);
        }
        if !self.flows[flow].requests.is_empty() {
            let gap = self.draw(self.cfg.piece_gap_ns.clone());
            self.schedule_deliver(flow, gap);
        }
    }

    /// The first request is refused and nothing behind it is looked at; grave refusals break the target's endpoint too.
    pub(crate) fn refuse(&mut self, flow: usize, status: WcStatus, grave: bool) {
        // Answers return in order: READs taken before are served first (and find out for themselves).
        if self.flows[flow].answers.iter().any(|(_, answer)| matches!(answer, Answer::Sampling { .. })) {
            let gap = self.draw(self.cfg.read_delay_ns.clone());
            return self.schedule_deliver(flow, gap + 1);
        }
        let Some(bad) = self.flows[flow].requests.pop_front() else { return };
        self.close(flow, bad.seq, status, grave);
    }

    fn close(&mut self, flow: usize, seq: u64, status: WcStatus, grave: bool) {
        let to = self.flows[flow].to;
        self.nodes[to.0].counters.refused += 1;
        let state = &mut self.flows[flow];
        state.requests.clear();
        state.heads.clear();
        state.dead = true;
        state.answers.push_back((seq, Answer::Status(status)));
        self.schedule_return(flow);
        if grave {
            self.fence(to);
        }
    }

    fn schedule_sample(&mut self, flow: usize, delay: u64) {
        if !std::mem::replace(&mut self.flows[flow].sample_scheduled, true) {
            self.schedule(delay, Event::Sample(flow));
        }
    }

    fn sample(&mut self, flow: usize) {
        self.flows[flow].sample_scheduled = false;
        let Flow { to, rails: [_, rail], .. } = self.flows[flow];
        let next =
            self.flows[flow].answers.iter().position(|(_, answer)| matches!(answer, Answer::Sampling { .. }));
        let Some(index) = next else { return };
        let serving =
            self.endpoint(to).is_some_and(|ep| matches!(ep.state, State::Connected | State::Draining));
        if !serving || !self.nodes[to.0].alive {
            return self.flow_dead(flow, false);
        }
        let (seq, addr, key, len, have) = match &self.flows[flow].answers[index] {
            (seq, Answer::Sampling { addr, key, len, bytes }) => (*seq, *addr, *key, *len, bytes.len()),
            _ => return,
        };
        let piece = self.piece(len - have);
        let Some(read) = self.nodes[to.0].memory.read(rail, key, addr + have as u64, piece, Want::RemoteRead)
        else {
            self.flows[flow].answers.truncate(index);
            return self.close(flow, seq, WcStatus::RemoteAccess, true);
        };
        let (_, answer) = &mut self.flows[flow].answers[index];
        if let Answer::Sampling { bytes, .. } = answer {
            bytes.extend_from_slice(&read);
            if bytes.len() == len {
                *answer = Answer::Data { bytes: std::mem::take(bytes), placed: 0 };
            }
        }
        self.schedule_return(flow);
        let gap =
            if have + piece < len { self.cfg.piece_gap_ns.clone() } else { self.cfg.read_delay_ns.clone() };
        let delay = self.draw(gap);
        self.schedule_sample(flow, delay);
    }

    // ---- the initiator hears the answers

    pub(crate) fn schedule_return(&mut self, flow: usize) {
        if !std::mem::replace(&mut self.flows[flow].return_scheduled, true) {
            let latency = self.draw(self.cfg.latency_ns.clone());
            self.schedule(latency, Event::Return(flow));
        }
    }

    fn answer(&mut self, flow: usize) {
        self.flows[flow].return_scheduled = false;
        let (qp, to) = (self.flows[flow].from, self.flows[flow].to);
        if let Some(until) = self.link_down_until(qp.0, to.0) {
            if until - self.now >= self.cfg.retry_timeout_ns {
                return self.flow_dead(flow, true);
            }
            self.flows[flow].return_scheduled = true;
            return self.schedule(until - self.now, Event::Return(flow));
        }
        let listening =
            self.endpoint(qp).is_some_and(|ep| matches!(ep.state, State::Connected | State::Draining));
        if !listening {
            self.flows[flow].answers.clear();
            return;
        }
        let status = match self.flows[flow].answers.front() {
            None | Some((_, Answer::Sampling { .. })) => return,
            Some((_, Answer::Status(status))) => Some(*status),
            Some((_, Answer::Data { .. })) => self.place_read(flow),
        };
        let Some(status) = status else {
            let gap = self.draw(self.cfg.piece_gap_ns.clone());
            self.flows[flow].return_scheduled = true;
            return self.schedule(gap, Event::Return(flow));
        };
        let Some((seq, _)) = self.flows[flow].answers.pop_front() else { return };
        if let Some(ep) = self.endpoint(qp)
            && let Some(wr) = ep.sq.iter_mut().find(|wr| wr.seq == seq)
        {
            wr.done = Some(status);
        }
        self.complete(qp);
        self.kick_launch(qp);
        if !self.flows[flow].answers.is_empty() {
            self.schedule_return(flow);
        }
    }

    /// Places a piece of a READ; `Some` when that was the last.
    fn place_read(&mut self, flow: usize) -> Option<WcStatus> {
        let Flow { from: qp, rails: [rail, _], .. } = self.flows[flow];
        let (seq, Answer::Data { bytes, placed }) = self.flows[flow].answers.front()? else { return None };
        let (seq, total, placed) = (*seq, bytes.len(), *placed);
        let piece = self.piece(total - placed);
        let (local_addr, local_key) =
            self.endpoint(qp)?.sq.iter().find(|wr| wr.seq == seq).and_then(|wr| match wr.kind {
                WrKind::Read { local_addr, local_key, .. } => Some((local_addr, local_key)),
                _ => None,
            })?;
        let (_, Answer::Data { bytes, placed: so_far }) = self.flows[flow].answers.front_mut()? else {
            return None;
        };
        let memory = &mut self.nodes[qp.0].memory;
        if !memory.write(
            rail,
            local_key,
            local_addr + placed as u64,
            &bytes[placed..placed + piece],
            Want::Local,
        ) {
            return Some(WcStatus::LocalAccess);
        }
        *so_far += piece;
        self.nodes[qp.0].counters.bytes_placed += piece as u64;
        (placed + piece == total).then_some(WcStatus::Success)
    }

    /// Retires what is done, in order.
    fn complete(&mut self, qp: Qp) {
        while let Some(ep) = self.endpoint(qp) {
            let Some(status) = ep.sq.front().and_then(|wr| wr.done) else { return };
            if status == WcStatus::Success {
                self.check_source(qp);
            }
            let Some(ep) = self.endpoint(qp) else { return };
            let Some(wr) = ep.sq.pop_front() else { return };
            ep.launched -= 1;
            if wr.signaled || status != WcStatus::Success {
                self.push_completion(qp, CompletionKind::Send, status, wr.seq, 0);
            }
            if status != WcStatus::Success {
                return self.error_out(qp);
            }
        }
    }

    pub(crate) fn push_completion(
        &mut self,
        (node, endpoint): Qp,
        kind: CompletionKind,
        status: WcStatus,
        seq: u64,
        len_bytes: u32,
    ) {
        if !self.nodes[node].alive {
            return;
        }
        let completion = Completion { endpoint, kind, status, seq, len_bytes };
        let lost = self.cfg.sabotage == Some(Sabotage::LostCompletion) && kind == CompletionKind::Send;
        if lost && self.rng.chance(1, 100) {
            return;
        }
        let cq = &self.nodes[node].cq;
        let first = cq.iter().rposition(|c| c.endpoint == endpoint).map_or(0, |at| at + 1);
        let last = cq.len();
        let overtakes = self.cfg.reorder_one_in > 0 && self.rng.chance(1, self.cfg.reorder_one_in);
        let at = if overtakes { self.rng.between(first as u64, last as u64) as usize } else { last };
        self.nodes[node].cq.insert(at, completion);
        self.nodes[node].counters.completions += 1;
    }

    // ---- ends

    /// The endpoint starts nothing more; after a moment it is quiet.
    pub(crate) fn fence(&mut self, qp: Qp) {
        let delay = self.cfg.flush_delay_ns.clone();
        let Some(ep) = self.endpoint(qp) else { return };
        if matches!(ep.state, State::Created | State::Connected) {
            ep.state = State::Draining;
            let delay = self.draw(delay);
            self.schedule(delay, Event::Flush(qp));
        }
    }

    fn flush(&mut self, qp: Qp) {
        self.complete(qp);
        if self.endpoint(qp).is_some_and(|ep| ep.state == State::Draining) {
            self.error_out(qp);
        }
    }

    fn error_out(&mut self, qp: Qp) {
        let Some(ep) = self.endpoint(qp) else { return };
        ep.state = State::Error;
        ep.launched = 0;
        let peer = ep.peer;
        self.flush_late(qp);
        // Acknowledgements that are still on their way to the peer may be lost with the endpoint; a refusal is not.
        let inbound =
            peer.and_then(|peer| self.flows.iter().rposition(|flow| flow.from == peer && flow.to == qp));
        if let Some(flow) = inbound
            && !self.flows[flow].dead
        {
            let lose = self.rng.chance(1, 2);
            self.flow_dead(flow, lose);
        }
    }

    /// What was posted to a broken endpoint comes back at once.
    pub(crate) fn flush_late(&mut self, qp: Qp) {
        let Some(ep) = self.endpoint(qp) else { return };
        let (sends, recvs) = (std::mem::take(&mut ep.sq), std::mem::take(&mut ep.rq));
        for wr in sends {
            self.push_completion(qp, CompletionKind::Send, WcStatus::Flushed, wr.seq, 0);
        }
        for slot in recvs {
            self.push_completion(qp, CompletionKind::RecvFlushed, WcStatus::Flushed, u64::from(slot.id), 0);
        }
    }

    /// Nothing gets through any more. Answers that are complete may still arrive, unless they are lost as well.
    pub(crate) fn flow_dead(&mut self, flow: usize, lose_answers: bool) {
        let state = &mut self.flows[flow];
        state.dead = true;
        state.requests.clear();
        let (rests, target) = (!std::mem::take(&mut state.heads).is_empty(), state.to);
        let complete = state.answers.iter().position(|(_, answer)| matches!(answer, Answer::Sampling { .. }));
        state.answers.truncate(if lose_answers { 0 } else { complete.unwrap_or(state.answers.len()) });
        let initiator = state.from;
        if self.endpoint(initiator).is_some_and(|ep| ep.launched > 0) {
            self.schedule_give_up(flow);
        }
        if rests {
            // The target has part of a message and will never have more.
            self.fence(target);
        }
    }

    fn schedule_give_up(&mut self, flow: usize) {
        if !std::mem::replace(&mut self.flows[flow].give_up_scheduled, true) {
            self.schedule(self.cfg.retry_timeout_ns, Event::GiveUp(flow));
        }
    }

    fn give_up(&mut self, flow: usize) {
        self.flows[flow].give_up_scheduled = false;
        let qp = self.flows[flow].from;
        let Some(ep) = self.endpoint(qp) else { return };
        if !matches!(ep.state, State::Connected | State::Draining) {
            return;
        }
        let launched = ep.launched;
        if let Some(wr) = ep.sq.iter_mut().take(launched).find(|wr| wr.done.is_none()) {
            wr.done = Some(WcStatus::PeerGone);
            ep.launch_blocked = true;
            self.complete(qp);
        }
    }

    pub(crate) fn kill_node(&mut self, node: usize) {
        self.nodes[node].alive = false;
        self.nodes[node].cq.clear();
        for slot in &mut self.nodes[node].slots {
            if let Some(ep) = &mut slot.endpoint {
                ep.state = State::Error;
                ep.sq.clear();
                ep.rq.clear();
                ep.launched = 0;
            }
        }
        for flow in 0..self.flows.len() {
            if self.flows[flow].to.0 == node && !self.flows[flow].dead {
                let lose = self.rng.chance(1, 2);
                self.flow_dead(flow, lose);
            }
        }
    }
}
