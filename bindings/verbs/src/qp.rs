//! Reliable connections.

use crate::cq::Cq;
use crate::error::VerbsError;
use crate::memory::Pd;
use crate::post::{PostFailed, RecvChain, SendChain};
use rdma_sys::{
    ibv_access_flags, ibv_ah_attr, ibv_gid, ibv_global_route, ibv_mtu, ibv_qp, ibv_qp_attr, ibv_qp_attr_mask,
    ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state, ibv_qp_type,
};
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpCap {
    /// Work requests of the send queue.
    pub max_send_wr: u32,
    /// Work requests of the receive queue.
    pub max_recv_wr: u32,
    /// Scatter/gather elements of a send.
    pub max_send_sge: u32,
    /// Scatter/gather elements of a RECV.
    pub max_recv_sge: u32,
    /// Bytes that a work request can carry itself.
    pub max_inline_bytes: u32,
}

/// What a queue pair is made with.
pub struct QpConfig<'a> {
    /// Where sends complete.
    pub send_cq: &'a Arc<Cq>,
    /// Where RECVs complete.
    pub recv_cq: &'a Arc<Cq>,
    /// Sizes.
    pub cap: QpCap,
}

/// A path MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathMtu {
    bytes: u32,
}

impl PathMtu {
    /// 256, 512, 1024, 2048 or 4096 bytes.
    pub fn from_bytes(bytes: u32) -> Option<PathMtu> {
        matches!(bytes, 256 | 512 | 1024 | 2048 | 4096).then_some(PathMtu { bytes })
    }

    fn code(self) -> ibv_mtu::Type {
        self.bytes.ilog2() - 7
    }
}

/// How a queue pair reaches its peer.
#[derive(Clone, Copy, Debug)]
pub struct Connection {
    /// Own port.
    pub port: u8,
    /// Index of the own GID.
    pub sgid_index: u8,
    /// The peer's GID.
    pub dgid: [u8; 16],
    /// The peer's LID; 0 on Ethernet.
    pub dlid: u16,
    /// Whether packets carry a global header: always on Ethernet.
    pub global: bool,
    /// The peer's queue pair.
    pub dest_qp_num: u32,
    /// Path MTU.
    pub path_mtu: PathMtu,
    /// First packet number that the peer sends.
    pub rq_psn: u32,
    /// First packet number that this side sends.
    pub sq_psn: u32,
    /// READs of the peer answered at a time.
    pub responder_reads: u8,
    /// Own READs outstanding.
    pub initiator_reads: u8,
    /// Service level.
    pub service_level: u8,
    /// Traffic class (DSCP and ECN).
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Least time that a peer without a RECV asks us to wait, by the specification's code.
    pub min_rnr_timer: u8,
    /// Acknowledgement timeout 4.096 µs · 2ⁿ.
    pub timeout: u8,
    /// Retries after a timeout.
    pub retry_cnt: u8,
    /// Retries when the peer has no RECV.
    pub rnr_retry: u8,
}

/// State of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpState {
    /// Ready to send.
    ReadyToSend,
    /// In error.
    Error,
    /// Another, by the specification's number.
    Other(u32),
}

/// A queue pair of a reliable connection.
pub struct Qp {
    qp: NonNull<ibv_qp>,
    pd: Arc<Pd>,
    _send_cq: Arc<Cq>,
    _recv_cq: Arc<Cq>,
    cap: QpCap,
}

// SAFETY: providers lock the queues; the pointer is constant.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

impl Qp {
    /// Creates one in the state RESET. What it really got is in [`Qp::cap`].
    pub fn new(pd: &Arc<Pd>, config: &QpConfig<'_>) -> Result<Qp, VerbsError> {
        let wanted = config.cap;
        let mut init = ibv_qp_init_attr {
            qp_context: std::ptr::null_mut(),
            send_cq: config.send_cq.as_ptr(),
            recv_cq: config.recv_cq.as_ptr(),
            srq: std::ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: wanted.max_send_wr,
                max_recv_wr: wanted.max_recv_wr,
                max_send_sge: wanted.max_send_sge,
                max_recv_sge: wanted.max_recv_sge,
                max_inline_data: wanted.max_inline_bytes,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: domain and queues are alive and held by the new object.
        let qp = unsafe { (pd.context().api().create_qp)(pd.as_ptr(), &mut init) };
        let qp = NonNull::new(qp).ok_or_else(|| VerbsError::last("ibv_create_qp"))?;
        let cap = QpCap {
            max_send_wr: init.cap.max_send_wr,
            max_recv_wr: init.cap.max_recv_wr,
            max_send_sge: init.cap.max_send_sge,
            max_recv_sge: init.cap.max_recv_sge,
            max_inline_bytes: init.cap.max_inline_data,
        };
        Ok(Qp {
            qp,
            pd: Arc::clone(pd),
            _send_cq: Arc::clone(config.send_cq),
            _recv_cq: Arc::clone(config.recv_cq),
            cap,
        })
    }

    /// Its number on its device.
    pub fn number(&self) -> u32 {
        // SAFETY: alive.
        unsafe { (*self.qp.as_ptr()).qp_num }
    }

    /// What it really got.
    pub fn cap(&self) -> QpCap {
        self.cap
    }

    fn modify(
        &self,
        step: &'static str,
        attr: &mut ibv_qp_attr,
        mask: ibv_qp_attr_mask,
    ) -> Result<(), VerbsError> {
        // SAFETY: alive; the attributes named by the mask are set.
        let answer = unsafe { (self.pd.context().api().modify_qp)(self.qp.as_ptr(), attr, mask.0 as i32) };
        VerbsError::check(step, answer)
    }

    /// RESET → INIT. From here on RECVs may be posted.
    pub fn to_init(
        &self,
        port: u8,
        pkey_index: u16,
        remote_read: bool,
        remote_write: bool,
    ) -> Result<(), VerbsError> {
        let mut attr = empty_attr();
        attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = port;
        attr.pkey_index = pkey_index;
        attr.qp_access_flags = access(remote_read, remote_write);
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_PKEY_INDEX
            | ibv_qp_attr_mask::IBV_QP_PORT
            | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS;
        self.modify("ibv_modify_qp to INIT", &mut attr, mask)
    }

    /// INIT → RTR → RTS.
    pub fn connect(&self, to: &Connection) -> Result<(), VerbsError> {
        let mut attr = empty_attr();
        attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
        attr.path_mtu = to.path_mtu.code();
        attr.dest_qp_num = to.dest_qp_num;
        attr.rq_psn = to.rq_psn;
        attr.max_dest_rd_atomic = to.responder_reads;
        attr.min_rnr_timer = to.min_rnr_timer;
        attr.ah_attr = ibv_ah_attr {
            grh: ibv_global_route {
                dgid: ibv_gid { raw: to.dgid },
                flow_label: 0,
                sgid_index: to.sgid_index,
                hop_limit: to.hop_limit,
                traffic_class: to.traffic_class,
            },
            dlid: to.dlid,
            sl: to.service_level,
            src_path_bits: 0,
            static_rate: 0,
            is_global: u8::from(to.global),
            port_num: to.port,
        };
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_AV
            | ibv_qp_attr_mask::IBV_QP_PATH_MTU
            | ibv_qp_attr_mask::IBV_QP_DEST_QPN
            | ibv_qp_attr_mask::IBV_QP_RQ_PSN
            | ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
        self.modify("ibv_modify_qp to RTR", &mut attr, mask)?;
        let mut attr = empty_attr();
        attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
        attr.timeout = to.timeout;
        attr.retry_cnt = to.retry_cnt;
        attr.rnr_retry = to.rnr_retry;
        attr.sq_psn = to.sq_psn;
        attr.max_rd_atomic = to.initiator_reads;
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_TIMEOUT
            | ibv_qp_attr_mask::IBV_QP_RETRY_CNT
            | ibv_qp_attr_mask::IBV_QP_RNR_RETRY
            | ibv_qp_attr_mask::IBV_QP_SQ_PSN
            | ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("ibv_modify_qp to RTS", &mut attr, mask)
    }

    /// Any state → ERR: what is outstanding is flushed, nothing more is accepted.
    pub fn to_error(&self) -> Result<(), VerbsError> {
        let mut attr = empty_attr();
        attr.qp_state = ibv_qp_state::IBV_QPS_ERR;
        self.modify("ibv_modify_qp to ERR", &mut attr, ibv_qp_attr_mask::IBV_QP_STATE)
    }

    /// Its state.
    pub fn state(&self) -> Result<QpState, VerbsError> {
        let mut attr = empty_attr();
        let mut init = MaybeUninit::<ibv_qp_init_attr>::zeroed();
        // SAFETY: alive, and room for both answers.
        let answer = unsafe {
            let mask = ibv_qp_attr_mask::IBV_QP_STATE.0 as i32;
            (self.pd.context().api().query_qp)(self.qp.as_ptr(), &mut attr, mask, init.as_mut_ptr())
        };
        VerbsError::check("ibv_query_qp", answer)?;
        Ok(match attr.qp_state {
            ibv_qp_state::IBV_QPS_RTS => QpState::ReadyToSend,
            ibv_qp_state::IBV_QPS_ERR => QpState::Error,
            other => QpState::Other(other),
        })
    }

    /// Posts a chain with one doorbell. The chain may be built anew afterwards.
    ///
    /// # Safety
    /// Local memory of the chain must stay valid until its work requests have completed or the queue pair is destroyed.
    pub unsafe fn post_send(&self, chain: &mut SendChain) -> Result<(), PostFailed> {
        let Some(first) = chain.first() else { return Ok(()) };
        let mut bad = std::ptr::null_mut();
        // SAFETY: a linked list of valid work requests; the function is the provider's own.
        let errno = unsafe { rdma_sys::ibv_post_send(self.qp.as_ptr(), first, &mut bad) };
        chain.outcome(errno, bad)
    }

    /// Posts RECVs.
    ///
    /// # Safety
    /// As for [`Qp::post_send`].
    pub unsafe fn post_recv(&self, chain: &mut RecvChain) -> Result<(), PostFailed> {
        let Some(first) = chain.first() else { return Ok(()) };
        let mut bad = std::ptr::null_mut();
        // SAFETY: a linked list of valid work requests; the function is the provider's own.
        let errno = unsafe { rdma_sys::ibv_post_recv(self.qp.as_ptr(), first, &mut bad) };
        chain.outcome(errno, bad)
    }
}

#[cfg(all(test, feature = "fake"))]
impl Qp {
    /// Posts work requests as they are.
    ///
    /// # Safety
    /// They must be a valid list.
    pub(crate) unsafe fn post_raw(&self, wr: *mut rdma_sys::ibv_send_wr) -> i32 {
        let mut bad = std::ptr::null_mut();
        // SAFETY: the caller's promise.
        unsafe { rdma_sys::ibv_post_send(self.qp.as_ptr(), wr, &mut bad) }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: alive, and destroyed once.
        let answer = unsafe { (self.pd.context().api().destroy_qp)(self.qp.as_ptr()) };
        if let Err(e) = VerbsError::check("ibv_destroy_qp", answer) {
            tracing::error!("{}: a queue pair stays: {e}", self.pd.context().info().name);
        }
    }
}

fn empty_attr() -> ibv_qp_attr {
    // SAFETY: a C structure of integers, for which all zero bytes are valid.
    unsafe { MaybeUninit::<ibv_qp_attr>::zeroed().assume_init() }
}

fn access(remote_read: bool, remote_write: bool) -> u32 {
    let mut flags = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
    if remote_read {
        flags |= ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
    }
    if remote_write {
        flags |= ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
    }
    flags
}
