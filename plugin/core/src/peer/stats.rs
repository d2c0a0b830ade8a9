//! What `stats` tells about a session.

use super::{EndpointStats, Port, RingId, Session, SessionStats, Waiter};
use crate::one_sided::{Blocked, State, Transfer};

/// Waiters told at most.
const WAITERS: usize = 64;

impl Session {
    /// Where the session stands, and for everything that waits what it waits for and since when.
    pub fn stats(&self) -> SessionStats {
        SessionStats {
            epoch: self.setup.epoch.0,
            notify: self.setup.notify,
            ended: self.ended.as_ref().map(ToString::to_string),
            counters: self.counters,
            transfers: self.transfers.live() as u32,
            outstanding_bytes: self.outstanding_bytes,
            tails_waiting: self.tails.len() as u32,
            notifications_waiting: self.outbox.waiting() as u32,
            unpopped_messages: self.unpopped.messages,
            unpopped_bytes: self.unpopped.bytes,
            reassembly_bytes: self.control_parts.held_bytes() + self.lane_parts.held_bytes(),
            withholding_credit: self.withholds(),
            endpoints: [&self.control].into_iter().chain(&self.lanes).map(endpoint_stats).collect(),
            waiters: self.waiters(),
        }
    }

    fn waiters(&self) -> Vec<Waiter> {
        let note = self.outbox.first_waiting().map(|(seq, since)| Waiter {
            what: format!("notification {} and {} behind it", seq.0, self.outbox.waiting() - 1),
            waits_for: self.note_waits_for(),
            since_ns: since.0,
        });
        let transfers = self.transfers.iter_live().map(|transfer| Waiter {
            what: format!("transfer {:#x}", transfer.token),
            waits_for: self.transfer_waits_for(transfer),
            since_ns: transfer.since.0,
        });
        note.into_iter().chain(transfers).take(WAITERS).collect()
    }

    fn note_waits_for(&self) -> String {
        let port = &self.control;
        if self.note_waits_for_credit() {
            format!(
                "credit of the peer's control endpoint: RECVs {} consumed of {} granted, ring bytes {} of {}",
                port.recv_out.consumed(),
                port.recv_out.known(),
                port.bytes_out.consumed(),
                port.bytes_out.known()
            )
        } else {
            format!("room in the control endpoint's send queue: {} in flight", port.ledger.in_flight())
        }
    }

    fn transfer_waits_for(&self, transfer: &Transfer) -> String {
        match transfer.state {
            State::Free => String::new(),
            State::Fresh | State::Data => {
                let limit = self.setup.limits.outstanding_bytes;
                format!("room for data ({} of at most {limit} bytes outstanding)", self.outstanding_bytes)
            }
            State::Arriving => "its READs to complete".into(),
            State::Posted => "completion".into(),
            State::Draining => "what was posted before its cancel to complete".into(),
            State::MessageOnly => "its notification to be acknowledged".into(),
            State::Tail => self.tail_waits_for(),
        }
    }

    /// The same for all that wait for their tails: the head's reason.
    fn tail_waits_for(&self) -> String {
        let port = |lane| self.port(RingId::Lane(lane));
        match self.head_blocked() {
            None => "its turn to post its tail".into(),
            Some(Blocked::Room(lane)) => {
                format!("room in {lane:?}'s send queue: {} in flight", port(lane).ledger.in_flight())
            }
            Some(Blocked::Staging(lane)) => {
                format!("{lane:?}'s staging ring: {} bytes not yet completed", port(lane).stage.in_use())
            }
            Some(Blocked::Recv(lane)) => {
                let credit = &port(lane).recv_out;
                format!("a RECV on {lane:?}: {} consumed of {} granted", credit.consumed(), credit.known())
            }
            Some(Blocked::Fragments(lane)) => {
                format!("the peer to take the last fragment of the message before, on {lane:?}")
            }
            Some(Blocked::RingBytes(lane)) => {
                let credit = &port(lane).bytes_out;
                format!(
                    "ring bytes of {lane:?}: {} consumed of {} granted",
                    credit.consumed(),
                    credit.known()
                )
            }
        }
    }
}

fn endpoint_stats(port: &Port) -> EndpointStats {
    EndpointStats {
        name: match port.ring_id {
            RingId::Control => "control".into(),
            RingId::Lane(lane) => format!("lane {}", lane.0),
        },
        sq_depth: port.ledger.depth(),
        posted: port.ledger.posted(),
        retired: port.ledger.retired(),
        recv_known: port.recv_out.known(),
        recv_consumed: port.recv_out.consumed(),
        ring_known: port.bytes_out.known(),
        ring_consumed: port.bytes_out.consumed(),
        recv_granted: port.recv_in.granted(),
        recv_received: port.recv_in.received(),
        recv_announced: port.recv_in.announced(),
        ring_freed: port.bytes_in.granted(),
        ring_announced: port.bytes_in.announced(),
    }
}
