//! The receive queue of an endpoint: RECVs in order, and completions until they are polled.

use std::collections::VecDeque;

use baton_fabric::{Completion, CompletionKind, EndpointId, FabricError, RecvSlot, WcStatus};

/// RECVs and their completions; together never more than the depth.
pub struct RecvQueue {
    slots: VecDeque<RecvSlot>,
    done: VecDeque<Completion>,
    depth: usize,
}

impl RecvQueue {
    pub fn new(depth: u32) -> RecvQueue {
        let depth = depth as usize;
        RecvQueue { slots: VecDeque::with_capacity(depth), done: VecDeque::with_capacity(depth), depth }
    }

    /// Adds RECVs, all or none.
    pub fn post(&mut self, slots: &[RecvSlot]) -> Result<(), FabricError> {
        let held = self.slots.len() + self.done.len();
        if held + slots.len() > self.depth {
            return Err(FabricError::Limit(format!(
                "{} RECVs on top of {held} in a receive queue of {}",
                slots.len(),
                self.depth
            )));
        }
        self.slots.extend(slots);
        Ok(())
    }

    /// RECVs and completions at most.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// RECVs posted and unconsumed.
    pub fn available(&self) -> usize {
        self.slots.len()
    }

    /// The RECV that will be consumed after `ahead` others.
    pub fn peek(&self, ahead: usize) -> Option<RecvSlot> {
        self.slots.get(ahead).copied()
    }

    /// Consumes a RECV.
    pub fn complete(&mut self, endpoint: EndpointId, kind: CompletionKind, len_bytes: u32) {
        let slot = self.slots.pop_front().expect("the caller has peeked at it");
        let seq = u64::from(slot.id);
        self.done.push_back(Completion { endpoint, kind, status: WcStatus::Success, seq, len_bytes });
    }

    /// Hands out completions; once the endpoint has `ended`, also the RECVs that are left.
    pub fn drain(&mut self, endpoint: EndpointId, ended: bool, out: &mut [Completion]) -> usize {
        let mut n = 0;
        while n < out.len() {
            let next = match self.done.pop_front() {
                Some(completion) => completion,
                None if ended => match self.slots.pop_front() {
                    Some(slot) => Completion {
                        endpoint,
                        kind: CompletionKind::RecvFlushed,
                        status: WcStatus::Flushed,
                        seq: u64::from(slot.id),
                        len_bytes: 0,
                    },
                    None => break,
                },
                None => break,
            };
            out[n] = next;
            n += 1;
        }
        n
    }

    /// Whether [`RecvQueue::drain`] has something.
    pub fn is_ready(&self, ended: bool) -> bool {
        !self.done.is_empty() || (ended && !self.slots.is_empty())
    }
}
