//! Fragments of the messages of transfers: all but the last, which is the record of the tail step.
//!
//! The peer puts one message of all lanes together at a time. Over one lane fragments arrive in order; before a message
//! begins on another lane, the peer must have taken the last fragment of the one before. Its RECV says so once it is granted anew:
//!
//! ```text
//!   lane a:  … fragment   last fragment = RECV n of lane a
//!   lane b:                            | granted ≥ depth + n |  fragment 0 …
//! ```

use crate::ids::{LaneId, XferSeq};
use crate::notify::{Fragment, RECORD_HEADER_BYTES, Record, RecordScope};
use crate::peer::{Cargo, PostStep, RingId, Session, SessionMemory};
use crate::sequence::{Imm, ImmKind};

impl Session {
    /// Its message needs fragments before its record.
    pub(super) fn has_fragments_to_go(&self, xfer: u32) -> bool {
        let transfer = &self.transfers[xfer];
        transfer.body.len() - transfer.sent > self.record_limit
    }

    /// Length of its next record, a fragment or the last.
    pub(super) fn next_record_bytes(&self, xfer: u32) -> u32 {
        let transfer = &self.transfers[xfer];
        (RECORD_HEADER_BYTES + self.record_limit.min(transfer.body.len() - transfer.sent)) as u32
    }

    /// The lane whose last fragment must be taken before this message may begin.
    pub(super) fn fragments_blocked(&self, xfer: u32) -> Option<LaneId> {
        let transfer = &self.transfers[xfer];
        let (lane, recvs) = self.last_fragment?;
        let begins = transfer.sent == 0 && self.has_fragments_to_go(xfer);
        let other = transfer.parts.first().is_some_and(|part| part.lane != lane);
        let taken = self.port(RingId::Lane(lane)).recv_out.returned() >= recvs;
        (begins && other && !taken).then_some(lane)
    }

    /// Posts the next fragment of the head of the tail queue. What it needs was checked.
    pub(super) fn post_fragment(&mut self, xfer: u32, mem: &dyn SessionMemory) -> PostStep {
        if self.transfers[xfer].sent == 0 {
            self.transfers[xfer].fragment_key = self.outbox.draw_seq().0;
        }
        let lane = self.transfers[xfer].parts[0].lane;
        let ring = RingId::Lane(lane);
        let imm = Imm::of(ImmKind::Record, 1, XferSeq(0));
        self.begin_payload(imm);
        self.encode_part(xfer, RecordScope::Part);
        let extra = self.carry_record(ring, imm, false, mem);
        let transfer = &mut self.transfers[xfer];
        transfer.in_flight += 1;
        transfer.sent += self.record_limit;
        self.note_fragment(xfer, lane);
        PostStep {
            ring,
            work: None,
            imm: None,
            extra: Some(extra),
            bytes: 0,
            signaled: true,
            what: Cargo::Transfer { xfer, first_template: 0, templates: 0 },
        }
    }

    /// Appends the record of what is next of the body to the scratch buffer.
    pub(super) fn encode_part(&mut self, xfer: u32, scope: RecordScope) {
        let limit = self.record_limit;
        let transfer = &self.transfers[xfer];
        let (sent, body) = (transfer.sent, &transfer.body);
        let fragment = Fragment::of(transfer.fragment_key, sent, body.len(), limit);
        let record = Record { epoch: self.setup.epoch, scope, fragment, flags: transfer.flags };
        record.encode(&body[sent..body.len().min(sent + limit)], &mut self.scratch);
    }

    /// A record of the transfer was just given a RECV of that lane: remembers it if it was a fragment.
    pub(super) fn note_fragment(&mut self, xfer: u32, lane: LaneId) {
        if self.transfers[xfer].body.len() > self.record_limit {
            self.counters.fragments_sent += 1;
            self.last_fragment = Some((lane, self.port(RingId::Lane(lane)).recv_out.consumed()));
        }
    }
}
