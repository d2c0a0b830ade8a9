//! Executing work requests as reliable connections do: in order at the peer, answered in order, READs answered late.

use super::config::ReadTiming;
use super::dma::{self, Piece};
use super::model::{About, Cqe, Id, SendWr, Sge, State};
use super::modify::Reach;
use rdma_sys::{
    ibv_access_flags as access, ibv_event_type, ibv_qp_state, ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode,
};
use std::time::{Duration, Instant};

/// Work requests of a queue pair that are executed and not answered, at most.
const WINDOW: usize = 64;
/// READs up to here may be taken from memory before they are placed.
const TAKE_BYTES: u64 = 1 << 20;

/// How long the data of a late READ stays away: long enough for a program to act on what overtook it.
const LATE: Duration = Duration::from_millis(2);
/// One in so many READs is late where the seed decides.
const LATE_ONE_IN: usize = 8;

/// What a queue pair did when its turn came.
pub(super) enum Step {
    /// Something.
    Progress,
    /// Nothing, and there is nothing to do.
    Idle,
    /// Nothing, until then or until something else changes.
    Blocked(Option<Instant>),
}

/// Why a work request is not executed.
enum Stop {
    /// It failed here.
    Local(ibv_wc_status::Type),
    /// The peer refuses it and is in error itself, with an event.
    Refused(ibv_wc_status::Type, ibv_event_type),
    /// The peer has no RECV.
    NotReady,
}

impl State {
    pub fn step(&mut self, id: Id, now: Instant) -> Step {
        match self.qps.get(&id).map(|qp| qp.state) {
            Some(ibv_qp_state::IBV_QPS_ERR) => self.flush_one(id),
            Some(ibv_qp_state::IBV_QPS_RTS) => self.advance(id, now),
            _ => Step::Idle,
        }
    }

    /// One entry of one queue is completed as flushed; each queue in order.
    fn flush_one(&mut self, id: Id) -> Step {
        let coin = self.rng.coin();
        let Some(qp) = self.qps.get_mut(&id) else { return Step::Idle };
        let send_first = !qp.sq.is_empty() && (qp.rq.is_empty() || coin);
        let (cq, wr_id, send, number) = if send_first {
            let wr = qp.sq.pop_front().expect("not empty");
            (qp.send_cq, wr.wr_id, true, wr.number)
        } else if let Some(wr) = qp.rq.pop_front() {
            (qp.recv_cq, wr.wr_id, false, wr.number)
        } else {
            return Step::Idle;
        };
        let qpn = qp.qpn;
        let status = ibv_wc_status::IBV_WC_WR_FLUSH_ERR;
        self.complete(cq, failed_entry(wr_id, status, qpn, (id, send, number)));
        Step::Progress
    }

    fn advance(&mut self, id: Id, now: Instant) -> Step {
        let qp = &self.qps[&id];
        let Some(front) = qp.sq.front() else { return Step::Idle };
        if let Some(status) = front.failed.filter(|_| qp.started > 0) {
            self.fail_front(id, status);
            return Step::Progress;
        }
        let reach = self.reach(id);
        if matches!(reach, Reach::LocalDown) && self.config.soft_statuses {
            self.fail_front(id, ibv_wc_status::IBV_WC_LOC_QP_OP_ERR);
            return Step::Progress;
        }
        let peer = if let Reach::Peer(peer) = reach { Some(peer) } else { None };
        let link = !matches!(reach, Reach::LocalDown);
        let late = self.late_until(id).filter(|until| *until > now);
        let answer = late.is_none() && self.answer_is_due(id, peer, link);
        let (wanted, until) = self.next_may_start(id, now);
        let start = peer.filter(|_| wanted && until.is_none());
        if (start.is_some() || answer) && self.qps[&id].silence.is_some() {
            self.qps.get_mut(&id).expect("looked up above").silence = None;
        }
        let prefer_start = match self.config.read_timing {
            ReadTiming::Prompt => false,
            ReadTiming::Late => true,
            ReadTiming::Random => self.rng.coin(),
        };
        match (start, answer) {
            (Some(peer), false) => self.start_next(id, peer, now),
            (Some(peer), true) if prefer_start => self.start_next(id, peer, now),
            (_, true) => self.answer_front(id, peer),
            (None, false) => {
                return self.wait(id, peer, wanted, [until, late].into_iter().flatten().min(), now);
            }
        }
        Step::Progress
    }

    /// Until when the answer to the oldest executed work request, a READ, stays away.
    fn late_until(&self, id: Id) -> Option<Instant> {
        let qp = &self.qps[&id];
        let front = qp.sq.front().filter(|front| qp.started > 0 && front.is_read())?;
        match self.config.read_timing {
            // Whatever starts behind it makes it later still.
            ReadTiming::Late => Some(qp.last_start? + LATE),
            ReadTiming::Prompt | ReadTiming::Random => front.late_until,
        }
    }

    /// Whether the oldest executed work request can be answered now.
    fn answer_is_due(&self, id: Id, peer: Option<Id>, link: bool) -> bool {
        let qp = &self.qps[&id];
        let Some(front) = qp.sq.front().filter(|_| qp.started > 0 && link) else { return false };
        let refused_later = qp.sq.iter().take(qp.started).any(|wr| wr.refused_by_peer);
        !front.is_read() || (!self.reads_held && (peer.is_some() || refused_later))
    }

    /// Whether the next work request may be executed by the rules of the queue, and what its time is when it must wait for one.
    fn next_may_start(&self, id: Id, now: Instant) -> (bool, Option<Instant>) {
        let qp = &self.qps[&id];
        let Some(next) = qp.sq.get(qp.started) else { return (false, None) };
        let executed = || qp.sq.iter().take(qp.started);
        let reads = executed().filter(|wr| wr.is_read()).count();
        let deep = next.is_read() && reads >= usize::from(qp.path.initiator_reads);
        let fenced_off = next.fenced && reads > 0;
        let failed = executed().any(|wr| wr.failed.is_some());
        let wanted = !(qp.started >= WINDOW || failed || fenced_off || deep);
        (wanted, qp.rnr.map(|(until, _)| until).filter(|until| *until > now))
    }

    /// Nothing can be done: because somebody does not answer (then time runs), or by order.
    fn wait(&mut self, id: Id, peer: Option<Id>, wanted: bool, until: Option<Instant>, now: Instant) -> Step {
        let qp = &self.qps[&id];
        if peer.is_some() || (!wanted && qp.started == 0) {
            return Step::Blocked(until);
        }
        // The held answer of a READ is late, not lost.
        if self.reads_held && qp.sq.front().is_some_and(|front| front.is_read()) && qp.started > 0 {
            return Step::Blocked(None);
        }
        if qp.path.timeout == 0 {
            return Step::Blocked(None);
        }
        let step = Duration::from_nanos(4096 << qp.path.timeout);
        let endless = qp.path.retry_cnt == 7 && self.config.retry_7_is_endless;
        let (retry_cnt, silence) = (u32::from(qp.path.retry_cnt), qp.silence);
        let (next, tries) = match silence {
            None => (now + step, 0),
            Some((next, _)) if next > now => return Step::Blocked(Some(next)),
            Some((_, tries)) if tries >= retry_cnt && !endless => {
                self.fail_front(id, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
                return Step::Progress;
            }
            Some((_, tries)) => (now + step, tries + 1),
        };
        self.qps.get_mut(&id).expect("looked up above").silence = Some((next, tries));
        Step::Blocked(Some(next))
    }

    fn start_next(&mut self, id: Id, peer: Id, now: Instant) {
        let outcome = self.execute(id, peer);
        let rnr_step = rnr_time(self.qps[&peer].path.min_rnr_timer);
        let late = self.config.read_timing == ReadTiming::Random && self.rng.below(LATE_ONE_IN) == 0;
        let qp = self.qps.get_mut(&id).expect("it was just executed");
        let started = qp.started;
        qp.last_start = Some(now);
        qp.sq[started].late_until = late.then(|| now + LATE);
        let refused = matches!(outcome, Err(Stop::Refused(..)));
        let status = match outcome {
            Ok(false) => return,
            Ok(true) => {
                (qp.started, qp.rnr) = (started + 1, None);
                qp.sent = qp.sent.wrapping_add(1);
                let peer = self.qps.get_mut(&peer).expect("it just took the message");
                peer.received = peer.received.wrapping_add(1);
                return;
            }
            Err(Stop::NotReady) => {
                let tries = qp.rnr.map_or(0, |(_, tries)| tries);
                if qp.path.rnr_retry == 7 || tries < u32::from(qp.path.rnr_retry) {
                    qp.rnr = Some((now + rnr_step, tries + 1));
                    return;
                }
                ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR
            }
            Err(Stop::Local(status) | Stop::Refused(status, _)) => status,
        };
        let wr = &mut qp.sq[started];
        (wr.failed, wr.refused_by_peer) = (Some(status), refused);
        qp.started = started + 1;
        if let Err(Stop::Refused(_, event)) = outcome {
            if self.config.access_events {
                self.tell(self.qps[&peer].context, event, About::Qp(peer));
            }
            self.enter_error(peer);
        }
    }

    /// Executes the next work request, or a piece of it; true when all of it is.
    fn execute(&mut self, id: Id, peer: Id) -> Result<bool, Stop> {
        let qp = &self.qps[&id];
        let wr = &qp.sq[qp.started];
        let limit = self.port_of(qp.device, qp.path.port).map_or(0, |port| port.max_msg_bytes);
        if wr.len > u64::from(limit) {
            return Err(Stop::Local(ibv_wc_status::IBV_WC_LOC_LEN_ERR));
        }
        if wr.len > u64::from(qp.path.mtu.min(self.qps[&peer].path.mtu))
            && qp.path.mtu != self.qps[&peer].path.mtu
        {
            return Err(refused(ibv_wc_status::IBV_WC_REM_INV_REQ_ERR));
        }
        match wr.opcode {
            ibv_wr_opcode::IBV_WR_RDMA_READ => self.execute_read(id, peer),
            ibv_wr_opcode::IBV_WR_SEND => self.execute_send(id, peer),
            _ => self.execute_write(id, peer),
        }
    }

    fn execute_read(&mut self, id: Id, peer: Id) -> Result<bool, Stop> {
        let qp = &self.qps[&id];
        let wr = &qp.sq[qp.started];
        self.local_pieces(id, wr, access::IBV_ACCESS_LOCAL_WRITE.0).map_err(Stop::Local)?;
        let outstanding = qp.sq.iter().take(qp.started).filter(|wr| wr.is_read()).count();
        if outstanding >= usize::from(self.qps[&peer].path.responder_reads) {
            return Err(refused(ibv_wc_status::IBV_WC_REM_INV_REQ_ERR));
        }
        let from = self.remote_piece(peer, wr, access::IBV_ACCESS_REMOTE_READ.0)?;
        self.settle_before_read(self.qps[&peer].device, from);
        let early = self.config.read_timing == ReadTiming::Random && !self.reads_held;
        if early && from.len <= TAKE_BYTES && self.rng.coin() {
            let mut bytes = vec![0; from.len as usize];
            self.transfer(&[from], &[Piece { addr: bytes.as_mut_ptr() as u64, len: from.len }]);
            let qp = self.qps.get_mut(&id).expect("looked up above");
            let at = qp.started;
            qp.sq[at].taken = Some(bytes);
        }
        Ok(true)
    }

    fn execute_write(&mut self, id: Id, peer: Id) -> Result<bool, Stop> {
        let qp = &self.qps[&id];
        let wr = &qp.sq[qp.started];
        let (done, len) = (wr.done, wr.len);
        let with_imm =
            (wr.opcode == ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM).then_some((wr.imm, wr.len as u32));
        if done < len {
            let from = self.local_pieces(id, wr, 0).map_err(Stop::Local)?;
            let to = self.remote_piece(peer, wr, access::IBV_ACCESS_REMOTE_WRITE.0)?;
            let step = (len - done).min(u64::from(self.config.piece_bytes));
            let device = self.qps[&peer].device;
            self.place(device, &dma::part(&from, done, step), &dma::part(&[to], done, step));
            let qp = self.qps.get_mut(&id).expect("looked up above");
            let at = qp.started;
            qp.sq[at].done += step;
            if done + step < len {
                return Ok(false);
            }
        }
        let Some((imm, byte_len)) = with_imm else { return Ok(true) };
        let target = self.qps.get_mut(&peer).expect("reached above");
        let recv = target.rq.pop_front().ok_or(Stop::NotReady)?;
        let entry = Cqe {
            wr_id: recv.wr_id,
            status: ibv_wc_status::IBV_WC_SUCCESS,
            opcode: ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM,
            byte_len,
            imm: Some(imm),
            qpn: target.qpn,
            retires: (peer, false, recv.number),
        };
        let cq = target.recv_cq;
        self.complete(cq, entry);
        Ok(true)
    }

    fn execute_send(&mut self, id: Id, peer: Id) -> Result<bool, Stop> {
        let qp = &self.qps[&id];
        let wr = &qp.sq[qp.started];
        let len = wr.len;
        let from = self.local_pieces(id, wr, 0).map_err(Stop::Local)?;
        let target = self.qps.get_mut(&peer).expect("reached above");
        let recv = target.rq.pop_front().ok_or(Stop::NotReady)?;
        let (cq, qpn, pd, device) = (target.recv_cq, target.qpn, target.pd, target.device);
        let retires = (peer, false, recv.number);
        let room: u64 = recv.sges.iter().map(|sge| sge.len).sum();
        if room < len {
            let (here, there) = if self.config.soft_statuses {
                (ibv_wc_status::IBV_WC_LOC_QP_OP_ERR, ibv_wc_status::IBV_WC_REM_OP_ERR)
            } else {
                (ibv_wc_status::IBV_WC_LOC_LEN_ERR, ibv_wc_status::IBV_WC_REM_INV_REQ_ERR)
            };
            self.complete(cq, failed_entry(recv.wr_id, here, qpn, retires));
            return Err(refused(there));
        }
        let write = access::IBV_ACCESS_LOCAL_WRITE.0;
        let place = |sge: &Sge| self.translate(device, pd, sge.lkey, sge.addr, sge.len, write);
        let Some(to) = recv.sges.iter().map(place).collect::<Option<Vec<Piece>>>() else {
            let status = ibv_wc_status::IBV_WC_LOC_PROT_ERR;
            self.complete(cq, failed_entry(recv.wr_id, status, qpn, retires));
            return Err(refused(ibv_wc_status::IBV_WC_REM_OP_ERR));
        };
        self.transfer(&from, &to);
        let entry = Cqe {
            wr_id: recv.wr_id,
            status: ibv_wc_status::IBV_WC_SUCCESS,
            opcode: ibv_wc_opcode::IBV_WC_RECV,
            byte_len: len as u32,
            imm: None,
            qpn,
            retires,
        };
        self.complete(cq, entry);
        Ok(true)
    }

    /// The oldest executed work request is answered, or a piece of a READ is placed.
    fn answer_front(&mut self, id: Id, peer: Option<Id>) {
        let qp = &self.qps[&id];
        let front = &qp.sq[0];
        if front.is_read() && front.done < front.len {
            match self.place_read(id, peer) {
                Ok(false) => return,
                Ok(true) => {}
                Err(stop) => {
                    let (Stop::Local(status) | Stop::Refused(status, _)) = stop else { return };
                    if let (Stop::Refused(..), Some(peer)) = (stop, peer) {
                        self.enter_error(peer);
                    }
                    return self.fail_front(id, status);
                }
            }
        }
        let qp = self.qps.get_mut(&id).expect("looked up above");
        let Some(wr) = qp.sq.pop_front() else { return };
        qp.started -= 1;
        if wr.signaled || qp.signal_all {
            let entry = Cqe {
                wr_id: wr.wr_id,
                status: ibv_wc_status::IBV_WC_SUCCESS,
                opcode: match wr.opcode {
                    ibv_wr_opcode::IBV_WR_RDMA_READ => ibv_wc_opcode::IBV_WC_RDMA_READ,
                    ibv_wr_opcode::IBV_WR_SEND => ibv_wc_opcode::IBV_WC_SEND,
                    _ => ibv_wc_opcode::IBV_WC_RDMA_WRITE,
                },
                byte_len: wr.len as u32,
                imm: None,
                qpn: qp.qpn,
                retires: (id, true, wr.number),
            };
            let cq = qp.send_cq;
            self.complete(cq, entry);
        }
    }

    /// Places a piece of the oldest READ; true when all of it is placed.
    fn place_read(&mut self, id: Id, peer: Option<Id>) -> Result<bool, Stop> {
        let qp = &self.qps[&id];
        let front = &qp.sq[0];
        let (done, step) = (front.done, (front.len - front.done).min(u64::from(self.config.piece_bytes)));
        let whole = done + step == front.len;
        let to = self.local_pieces(id, front, access::IBV_ACCESS_LOCAL_WRITE.0).map_err(Stop::Local)?;
        let from = match &front.taken {
            Some(bytes) => Piece { addr: bytes.as_ptr() as u64, len: front.len },
            // The peer answered before it failed; who it is, is in the connection still.
            None => {
                let peer = peer.or_else(|| self.peer_in_error(id));
                let peer = peer.ok_or(Stop::Local(ibv_wc_status::IBV_WC_RETRY_EXC_ERR))?;
                self.remote_piece(peer, front, access::IBV_ACCESS_REMOTE_READ.0)?
            }
        };
        self.transfer(&dma::part(&[from], done, step), &dma::part(&to, done, step));
        self.qps.get_mut(&id).expect("looked up above").sq[0].done += step;
        Ok(whole)
    }

    /// The queue pair that refused a later work request of this one.
    fn peer_in_error(&self, id: Id) -> Option<Id> {
        let own = &self.qps[&id];
        let fits = |device: usize| {
            let peer = *self.devices[device].qpns.get(&own.path.dest_qpn)?;
            (self.qps[&peer].path.dest_qpn == own.qpn && self.qps[&peer].path.dgid == own.path.sgid?.gid)
                .then_some(peer)
        };
        (0..self.devices.len()).find_map(fits)
    }

    /// The oldest work request fails; everything behind it is flushed.
    fn fail_front(&mut self, id: Id, status: ibv_wc_status::Type) {
        let Some(qp) = self.qps.get_mut(&id) else { return };
        let Some(wr) = qp.sq.pop_front() else { return };
        let (cq, qpn) = (qp.send_cq, qp.qpn);
        self.complete(cq, failed_entry(wr.wr_id, status, qpn, (id, true, wr.number)));
        self.enter_error(id);
    }

    /// Nothing of the queue pair is executed from here on; what is queued will be flushed.
    pub fn enter_error(&mut self, id: Id) {
        let Some(qp) = self.qps.get_mut(&id) else { return };
        qp.state = ibv_qp_state::IBV_QPS_ERR;
        (qp.started, qp.silence, qp.rnr) = (0, None, None);
        self.active.insert(id);
    }

    /// Where a work request's own bytes are.
    fn local_pieces(&self, id: Id, wr: &SendWr, rights: u32) -> Result<Vec<Piece>, ibv_wc_status::Type> {
        if let Some(bytes) = &wr.inline {
            return Ok(vec![Piece { addr: bytes.as_ptr() as u64, len: bytes.len() as u64 }]);
        }
        let qp = &self.qps[&id];
        let place = |sge: &Sge| self.translate(qp.device, qp.pd, sge.lkey, sge.addr, sge.len, rights);
        wr.sges.iter().map(place).collect::<Option<_>>().ok_or_else(|| {
            let unknown = wr.sges.iter().any(|sge| !self.devices[qp.device].keys.contains_key(&sge.lkey));
            if unknown && self.config.soft_statuses {
                ibv_wc_status::IBV_WC_LOC_QP_OP_ERR
            } else {
                ibv_wc_status::IBV_WC_LOC_PROT_ERR
            }
        })
    }

    /// Where a work request's bytes are at the peer. Without bytes nothing is checked.
    fn remote_piece(&self, peer: Id, wr: &SendWr, rights: u32) -> Result<Piece, Stop> {
        if wr.len == 0 {
            return Ok(Piece { addr: 0, len: 0 });
        }
        let target = &self.qps[&peer];
        let piece = self.translate(target.device, target.pd, wr.rkey, wr.remote_addr, wr.len, rights);
        let piece = piece.filter(|_| target.path.access & rights == rights);
        piece.ok_or(Stop::Refused(
            ibv_wc_status::IBV_WC_REM_ACCESS_ERR,
            ibv_event_type::IBV_EVENT_QP_ACCESS_ERR,
        ))
    }

    pub fn transfer(&mut self, from: &[Piece], to: &[Piece]) {
        for (piece, target) in dma::zip(from, to) {
            // SAFETY: both lie in regions that are registered while the state is locked, or in buffers of a work request; a registered range is mapped by the program's promise to the kernel's pin.
            unsafe { dma::copy(piece.addr, target, piece.len) };
        }
    }
}

fn refused(status: ibv_wc_status::Type) -> Stop {
    Stop::Refused(status, ibv_event_type::IBV_EVENT_QP_REQ_ERR)
}

fn failed_entry(wr_id: u64, status: ibv_wc_status::Type, qpn: u32, retires: (Id, bool, u64)) -> Cqe {
    // Of a failure only number, status and queue pair mean something: the operation said is the wrong one on purpose.
    let opcode =
        if retires.1 { ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM } else { ibv_wc_opcode::IBV_WC_RDMA_READ };
    Cqe { wr_id, status, opcode, byte_len: 0xdead_beef, imm: Some(0xdead_beef), qpn, retires }
}

/// IBTA's table of waiting times, in units of 10 µs.
fn rnr_time(code: u8) -> Duration {
    const TENS_OF_US: [u64; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(TENS_OF_US[usize::from(code) % 32] * 10)
}
