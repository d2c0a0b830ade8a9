//! What a hostile node says: frames and messages of its own making, each in the right place of its queue pair.

use super::*;
use baton_core::two_sided::codec::{
    Block, DataHeader, DataKind, Frame, FrameHeader, encode_frame, encode_message,
};

impl World {
    /// Number of the next frame and the last received one, as that node would tell.
    pub fn next_frame(&self, from: usize) -> FrameHeader {
        let counters = self.nodes[from].channel.counters();
        let seq = counters.frames_sent + 1;
        FrameHeader { session: SESSION, epoch: Epoch(self.epoch), seq, ack: counters.frames_received }
    }

    /// Puts a control frame into the peer's next RECV.
    pub fn say(&mut self, from: usize, change: impl FnOnce(&mut FrameHeader), frame: &Frame<'_>) {
        let mut header = self.next_frame(from);
        change(&mut header);
        let mut bytes = Vec::new();
        encode_frame(header, frame, &mut bytes).unwrap();
        self.inject(from, 0, &bytes);
    }

    /// A data message for lane 0 with the number that follows.
    pub fn message(
        &self,
        from: usize,
        kind: DataKind,
        block: Block,
        change: impl FnOnce(&mut DataHeader),
    ) -> Vec<u8> {
        let lane_seq = self.nodes[1 - from].channel.stats().lanes[0].received as u32;
        let (session, epoch) = (SESSION, Epoch(self.epoch));
        let mut header = DataHeader { kind, data_crc: false, session, epoch, lane_seq, block };
        change(&mut header);
        let mut bytes = Vec::new();
        encode_message(&header, &[], self.config.slot, &mut bytes).unwrap();
        bytes.resize(64 + block.len as usize, 0xBB);
        bytes
    }

    /// Puts a data message into the peer's next RECV of lane 0.
    pub fn put(&mut self, from: usize, kind: DataKind, block: Block, change: impl FnOnce(&mut DataHeader)) {
        let bytes = self.message(from, kind, block, change);
        self.inject(from, 1, &bytes);
    }
}
