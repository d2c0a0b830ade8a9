//! The state machine of a queue pair, and which peer its attributes lead to.

use super::model::{Errno, Id, Path, State};
use crate::device::LinkLayer;
use rdma_sys::{ibv_qp_attr, ibv_qp_attr_mask as mask, ibv_qp_state};

const STATE: u32 = mask::IBV_QP_STATE.0;
const TO_INIT: u32 = STATE | mask::IBV_QP_PKEY_INDEX.0 | mask::IBV_QP_PORT.0 | mask::IBV_QP_ACCESS_FLAGS.0;
const TO_RTR: u32 = STATE
    | mask::IBV_QP_AV.0
    | mask::IBV_QP_PATH_MTU.0
    | mask::IBV_QP_DEST_QPN.0
    | mask::IBV_QP_RQ_PSN.0
    | mask::IBV_QP_MAX_DEST_RD_ATOMIC.0
    | mask::IBV_QP_MIN_RNR_TIMER.0;
const TO_RTS: u32 = STATE
    | mask::IBV_QP_TIMEOUT.0
    | mask::IBV_QP_RETRY_CNT.0
    | mask::IBV_QP_RNR_RETRY.0
    | mask::IBV_QP_SQ_PSN.0
    | mask::IBV_QP_MAX_QP_RD_ATOMIC.0;
const OPTIONAL: u32 = mask::IBV_QP_CUR_STATE.0 | mask::IBV_QP_ACCESS_FLAGS.0;

/// Packet numbers have 24 bits.
const PSN: u32 = 0xff_ffff;

/// Where a queue pair's packets go.
pub(super) enum Reach {
    /// To this queue pair, which answers.
    Peer(Id),
    /// Nowhere: the own port or device does not work.
    LocalDown,
    /// Nowhere, or to somebody who does not answer.
    Silent,
}

impl State {
    pub fn modify_qp(&mut self, id: Id, attr: &ibv_qp_attr, given: u32) -> Result<(), Errno> {
        use ibv_qp_state::*;
        let from = self.qps.get(&id).ok_or(libc::EINVAL)?.state;
        let device = self.qps[&id].device;
        let to = if given & STATE != 0 { attr.qp_state } else { from };
        if to == IBV_QPS_RESET && given == STATE {
            self.reset(id);
            return Ok(());
        }
        if to == IBV_QPS_ERR && given == STATE && from != IBV_QPS_RESET {
            self.enter_error(id);
            return Ok(());
        }
        if self.devices[device].dead {
            return Err(libc::EIO);
        }
        let required = match (from, to) {
            (IBV_QPS_RESET, IBV_QPS_INIT) => TO_INIT,
            (IBV_QPS_INIT, IBV_QPS_RTR) => TO_RTR,
            (IBV_QPS_RTR, IBV_QPS_RTS) => TO_RTS,
            _ => return Err(libc::EINVAL),
        };
        if given & required != required || given & !(required | OPTIONAL) != 0 {
            return Err(libc::EINVAL);
        }
        let mut path = self.qps[&id].path;
        match to {
            IBV_QPS_INIT => self.check_init(device, attr, &mut path)?,
            IBV_QPS_RTR => self.check_rtr(device, attr, &mut path)?,
            _ => self.check_rts(device, attr, &mut path)?,
        }
        if given & mask::IBV_QP_ACCESS_FLAGS.0 != 0 {
            path.access = attr.qp_access_flags;
        }
        let qp = self.qps.get_mut(&id).expect("looked up above");
        (qp.path, qp.state) = (path, to);
        Ok(())
    }

    fn check_init(&self, device: usize, attr: &ibv_qp_attr, path: &mut Path) -> Result<(), Errno> {
        let port = self.port_of(device, attr.port_num).ok_or(libc::EINVAL)?;
        if usize::from(attr.pkey_index) >= port.pkeys.len() {
            return Err(libc::EINVAL);
        }
        (path.port, path.pkey_index) = (attr.port_num, attr.pkey_index);
        Ok(())
    }

    fn check_rtr(&self, device: usize, attr: &ibv_qp_attr, path: &mut Path) -> Result<(), Errno> {
        let av = &attr.ah_attr;
        let port = self.port_of(device, path.port).ok_or(libc::EINVAL)?;
        let limit = self.devices[device].config.max_qp_rd_atom;
        let mtu = if (1..=5).contains(&attr.path_mtu) { 128 << attr.path_mtu } else { u32::MAX };
        let ethernet = port.link_layer == LinkLayer::Ethernet;
        let wrong = mtu > port.mtu_bytes
            || attr.max_dest_rd_atomic > limit
            || attr.min_rnr_timer > 31
            || attr.rq_psn > PSN
            || av.port_num != path.port
            || (ethernet && av.is_global == 0);
        if wrong {
            return Err(libc::EINVAL);
        }
        let sgid = port.gids.get(usize::from(av.grh.sgid_index)).copied().flatten();
        if av.is_global != 0 && sgid.is_none_or(|sgid| sgid.gid == [0; 16]) {
            return Err(libc::EINVAL);
        }
        // SAFETY: both fields of the union are plain bytes.
        let dgid = unsafe { av.grh.dgid.raw };
        if av.is_global != 0 && dgid == [0; 16] {
            return Err(libc::EINVAL);
        }
        path.mtu = mtu;
        path.dest_qpn = attr.dest_qp_num;
        path.rq_psn = attr.rq_psn;
        path.responder_reads = attr.max_dest_rd_atomic;
        path.min_rnr_timer = attr.min_rnr_timer;
        path.global = av.is_global != 0;
        path.sgid_index = av.grh.sgid_index;
        path.sgid = sgid;
        path.dgid = dgid;
        path.dlid = av.dlid;
        Ok(())
    }

    fn check_rts(&self, device: usize, attr: &ibv_qp_attr, path: &mut Path) -> Result<(), Errno> {
        let limit = self.devices[device].config.max_qp_init_rd_atom;
        let wrong = attr.max_rd_atomic > limit
            || attr.timeout > 31
            || attr.retry_cnt > 7
            || attr.rnr_retry > 7
            || attr.sq_psn > PSN;
        if wrong {
            return Err(libc::EINVAL);
        }
        path.sq_psn = attr.sq_psn;
        path.initiator_reads = attr.max_rd_atomic;
        path.timeout = attr.timeout;
        path.retry_cnt = attr.retry_cnt;
        path.rnr_retry = attr.rnr_retry;
        Ok(())
    }

    /// Back to the start: what is queued is forgotten, without completions.
    fn reset(&mut self, id: Id) {
        let Some(qp) = self.qps.get_mut(&id) else { return };
        qp.state = ibv_qp_state::IBV_QPS_RESET;
        qp.sq.clear();
        qp.rq.clear();
        (qp.started, qp.sent, qp.received) = (0, 0, 0);
        (qp.silence, qp.rnr) = (None, None);
        qp.path = Path::default();
        (qp.sq_slots.retired, qp.rq_slots.retired) = (qp.sq_slots.posted, qp.rq_slots.posted);
        let (send_cq, recv_cq) = (qp.send_cq, qp.recv_cq);
        for cq in [send_cq, recv_cq] {
            // A queue pair that starts anew has no completions of its life before.
            if let Some(cq) = self.cqs.get_mut(&cq) {
                cq.entries.retain(|entry| entry.retires.0 != id);
            }
        }
    }

    pub fn port_of(&self, device: usize, port: u8) -> Option<&super::config::PortConfig> {
        self.devices[device].config.ports.get(usize::from(port).checked_sub(1)?)
    }

    /// Who gets this queue pair's packets and answers them.
    pub fn reach(&self, id: Id) -> Reach {
        let Some(qp) = self.qps.get(&id) else { return Reach::Silent };
        let Some(port) = self.port_of(qp.device, qp.path.port) else { return Reach::Silent };
        if !port.up || self.devices[qp.device].dead {
            return Reach::LocalDown;
        }
        let own_gid = port.gids.get(usize::from(qp.path.sgid_index)).copied().flatten();
        if qp.path.global && own_gid != qp.path.sgid {
            return Reach::Silent;
        }
        for (device, it) in self.devices.iter().enumerate().filter(|(_, device)| !device.dead) {
            for (at, there) in it.config.ports.iter().enumerate() {
                let near = there.up && there.network == port.network && there.link_layer == port.link_layer;
                let named = match port.link_layer {
                    LinkLayer::InfiniBand => there.lid == qp.path.dlid,
                    LinkLayer::Ethernet => there.gids.iter().flatten().any(|gid| {
                        let own = qp.path.sgid.as_ref();
                        gid.gid == qp.path.dgid
                            && own.is_some_and(|own| {
                                own.kind == gid.kind && own.is_link_local() == gid.is_link_local()
                            })
                    }),
                };
                if near && named {
                    let peer = it.qpns.get(&qp.path.dest_qpn).copied();
                    let answers = peer.filter(|peer| self.answers(id, *peer, device, at as u8 + 1));
                    return answers.map_or(Reach::Silent, Reach::Peer);
                }
            }
        }
        Reach::Silent
    }

    /// Whether `peer` is connected to `id` and takes its packets.
    fn answers(&self, id: Id, peer: Id, device: usize, port: u8) -> bool {
        let (own, peer) = (&self.qps[&id], &self.qps[&peer]);
        let awake = matches!(peer.state, ibv_qp_state::IBV_QPS_RTR | ibv_qp_state::IBV_QPS_RTS);
        let gid = |path: &Path| path.sgid.map(|sgid| sgid.gid).unwrap_or_default();
        let addressed =
            !own.path.global || (peer.path.dgid == gid(&own.path) && own.path.dgid == gid(&peer.path));
        let pkey = |device: usize, path: &Path| {
            let port = self.port_of(device, path.port);
            port.and_then(|port| port.pkeys.get(usize::from(path.pkey_index))).map(|key| key & 0x7fff)
        };
        awake
            && peer.device == device
            && peer.path.port == port
            && peer.path.dest_qpn == own.qpn
            && addressed
            && pkey(own.device, &own.path) == pkey(peer.device, &peer.path)
            && own.path.sq_psn.wrapping_add(own.sent) & PSN
                == peer.path.rq_psn.wrapping_add(peer.received) & PSN
    }
}
