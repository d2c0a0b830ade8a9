//! How the word that an immediate carries, and its record, get to the peer: by a WRITE with the immediate, or by a SEND.

use baton_fabric::ExtraOp;

use super::{ExtraStep, RingId, Session, SessionMemory};
use crate::notify::{NotifyMode, SendHeader};
use crate::sequence::Imm;

impl Session {
    pub(crate) fn sends(&self) -> bool {
        self.setup.notify == NotifyMode::Send
    }

    /// Empties the scratch buffer; in send mode the word comes first. A record is appended by the caller.
    pub(crate) fn begin_payload(&mut self, imm: Imm) {
        self.scratch.clear();
        if self.sends() {
            SendHeader { imm: imm.encode(), epoch: self.setup.epoch }.encode(&mut self.scratch);
        }
    }

    /// Consumes what the record in the scratch buffer needs: a RECV, and ring bytes or staging room. That it is there was checked.
    pub(crate) fn carry_record(
        &mut self,
        ring: RingId,
        imm: Imm,
        fenced: bool,
        mem: &dyn SessionMemory,
    ) -> ExtraStep {
        if self.sends() {
            return self.carry_send(ring, fenced, mem);
        }
        let record_bytes = self.scratch.len() as u32;
        let inline = record_bytes <= self.setup.caps.inline_bytes;
        let port = self.port_mut(ring);
        let placement = port.ring_out.place(record_bytes);
        port.bytes_out.try_reserve(placement.charge).expect("ring bytes were checked").commit();
        port.recv_out.try_reserve(1).expect("a RECV was checked").commit();
        port.ring_out.advance(placement);
        let stage_end = port.ring_out.cursor();
        port.stage.pass(stage_end);
        let (remote_addr, remote_key) = (port.peer_ring_addr, port.peer_ring_key);
        let staged = (!inline).then(|| mem.stage_record(ring, placement.offset, &self.scratch));
        ExtraStep {
            op: ExtraOp::WriteImm(imm.encode()),
            from_scratch: true,
            staged,
            stage_end: Some(stage_end),
            remote_addr: remote_addr + u64::from(placement.offset),
            remote_key,
            fenced,
        }
    }

    /// The word of a lane without a record, behind its data; a lane whose last WRITE can carry it needs none.
    pub(crate) fn carry_tail(
        &mut self,
        ring: RingId,
        imm: Imm,
        fenced: bool,
        mem: &dyn SessionMemory,
    ) -> ExtraStep {
        if self.sends() {
            self.begin_payload(imm);
            return self.carry_send(ring, fenced, mem);
        }
        let port = self.port_mut(ring);
        port.recv_out.try_reserve(1).expect("a RECV was checked").commit();
        ExtraStep {
            op: ExtraOp::WriteImm(imm.encode()),
            from_scratch: false,
            staged: None,
            stage_end: None,
            remote_addr: port.peer_ring_addr,
            remote_key: port.peer_ring_key,
            fenced,
        }
    }

    /// A SEND of the payload in the scratch buffer.
    fn carry_send(&mut self, ring: RingId, fenced: bool, mem: &dyn SessionMemory) -> ExtraStep {
        let payload_bytes = self.scratch.len() as u32;
        let inline = payload_bytes <= self.setup.caps.inline_bytes;
        let port = self.port_mut(ring);
        port.recv_out.try_reserve(1).expect("a RECV was checked").commit();
        let place = (!inline).then(|| port.stage.place(payload_bytes).expect("staging room was checked"));
        if let Some(place) = place {
            port.stage.take(place);
        }
        ExtraStep {
            op: ExtraOp::Send,
            from_scratch: true,
            staged: place.map(|place| mem.stage_record(ring, place.offset, &self.scratch)),
            stage_end: place.map(|place| place.end),
            remote_addr: 0,
            remote_key: 0,
            fenced,
        }
    }
}
