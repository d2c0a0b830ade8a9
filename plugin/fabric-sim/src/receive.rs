//! What consumes a RECV of the target: immediates and SENDs.

use crate::config::Sabotage;
use crate::endpoint::*;
use crate::memory::Want;
use crate::world::Inner;
use baton_fabric::{CompletionKind, WcStatus};

impl Inner {
    /// The target hears an immediate; `false` without a RECV.
    pub(crate) fn hear_immediate(&mut self, flow: usize, imm: Option<u32>, total: usize) -> bool {
        let to = self.flows[flow].to;
        let twice = self.cfg.sabotage == Some(Sabotage::RepeatedImmediate) && self.rng.chance(1, 20);
        for _ in 0..=u32::from(twice) {
            let Some(slot) = self.endpoint(to).and_then(|ep| ep.rq.pop_front()) else { return false };
            let kind = CompletionKind::RecvImm(imm.unwrap_or_default());
            self.push_completion(to, kind, WcStatus::Success, u64::from(slot.id), total as u32);
        }
        self.flows[flow].requests[0].heard = true;
        true
    }

    /// A SEND right behind a WRITE that has not begun comes first.
    pub(crate) fn let_send_overtake(&mut self, flow: usize) {
        let requests = &mut self.flows[flow].requests;
        let begun = requests[0].placed > 0 || !matches!(requests[0].request, Request::Write { .. });
        if !begun && requests.get(1).is_some_and(|next| matches!(next.request, Request::Send { .. })) {
            requests.swap(0, 1);
        }
    }

    pub(crate) fn deliver_send(&mut self, flow: usize) {
        if self.has_head(flow) {
            return self.deliver_head(flow);
        }
        let twice = self.cfg.sabotage == Some(Sabotage::RepeatedImmediate) && self.rng.chance(1, 20);
        let Flow { to, rails: [_, rail], .. } = self.flows[flow];
        for repeated in [false, true] {
            if repeated && !twice {
                break;
            }
            let Some(slot) = self.endpoint(to).and_then(|ep| ep.rq.front().copied()) else {
                return self.no_recv(flow);
            };
            let Request::Send { bytes, .. } = &self.flows[flow].requests[0].request else { return };
            let len = bytes.len();
            // A refusal breaks the target's endpoint, which flushes the slot.
            if len > slot.len_bytes as usize {
                return self.refuse(flow, WcStatus::RemoteLength, true);
            }
            if len > 0 && !self.nodes[to.0].memory.write(rail, slot.local_key, slot.addr, bytes, Want::Local)
            {
                return self.refuse(flow, WcStatus::RemoteAccess, true);
            }
            if let Some(ep) = self.endpoint(to) {
                ep.rq.pop_front();
            }
            let id = u64::from(slot.id);
            self.push_completion(to, CompletionKind::RecvSend, WcStatus::Success, id, len as u32);
        }
        self.delivered(flow, Some(Answer::Status(WcStatus::Success)));
    }

    pub(crate) fn no_recv(&mut self, flow: usize) {
        self.flows[flow].requests[0].rnr += 1;
        if self.flows[flow].requests[0].rnr > self.cfg.rnr_retries {
            self.refuse(flow, WcStatus::RnrExceeded, false);
        } else {
            self.schedule_deliver(flow, self.cfg.rnr_delay_ns);
        }
    }
}
