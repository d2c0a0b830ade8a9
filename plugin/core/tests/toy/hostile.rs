//! What a hostile peer or device tells: completions of nobody's making.

use super::*;

impl World {
    /// Hands a made-up completion to a session.
    pub fn forge(&mut self, n: usize, index: usize, imm: u32) {
        self.nodes[n].ends[index].recvs -= 1;
        self.nodes[n].ends[index].next_recv += 1;
        self.forge_only(n, index, imm);
        self.pump(n);
    }

    /// Puts a payload of the peer's making into the next RECV slot of an end and reports a SEND of `len_bytes`.
    pub fn forge_send(&mut self, n: usize, index: usize, payload: &[u8], len_bytes: u32) {
        let slot = self.take_recv(n, index);
        self.nodes[n].mem.fill_slot(index as u64, slot, payload);
        let completion = Completion {
            endpoint: endpoint(index),
            kind: CompletionKind::RecvSend,
            status: WcStatus::Success,
            seq: slot.into(),
            len_bytes,
        };
        let node = &mut self.nodes[n];
        node.session.on_completion(self.now, &completion, &node.mem);
        self.pump(n);
    }

    /// The same, but its session does not get to act.
    pub fn forge_only(&mut self, n: usize, index: usize, imm: u32) {
        let completion = Completion {
            endpoint: endpoint(index),
            kind: CompletionKind::RecvImm(imm),
            status: WcStatus::Success,
            seq: 0,
            len_bytes: 0,
        };
        let node = &mut self.nodes[n];
        node.session.on_completion(self.now, &completion, &node.mem);
    }
}
