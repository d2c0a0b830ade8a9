//! The functions of a context's own table: posting and polling.

use super::model::{Errno, Id, RecvWr, SendWr, Sge, State};
use super::objects::{CqObject, QpObject, context_of};
use rdma_sys::{
    ibv_cq, ibv_qp, ibv_qp_state, ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wc, ibv_wc_flags,
    ibv_wc_opcode, ibv_wc_status, ibv_wr_opcode, imm_data_invalidated_rkey_union_t,
};
use std::ffi::c_int;

/// What is in the parts of an entry that mean nothing.
const GARBAGE: u8 = 0xa5;

pub(super) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: a queue pair of a fake, alive by the caller's promise.
    let (id, context) = unsafe { ((*qp.cast::<QpObject>()).id, context_of((*qp).context)) };
    let mut state = context.device.shared.change();
    while !wr.is_null() {
        // SAFETY: an element of the caller's list.
        let taken = unsafe { state.take_send(id, &*wr) };
        if let Err(errno) = taken {
            // SAFETY: room for the culprit, by the caller's promise.
            unsafe { *bad = wr };
            return errno;
        }
        // SAFETY: as above.
        wr = unsafe { (*wr).next };
    }
    0
}

pub(super) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: a queue pair of a fake, alive by the caller's promise.
    let (id, context) = unsafe { ((*qp.cast::<QpObject>()).id, context_of((*qp).context)) };
    let mut state = context.device.shared.change();
    while !wr.is_null() {
        // SAFETY: an element of the caller's list.
        let taken = unsafe { state.take_recv(id, &*wr) };
        if let Err(errno) = taken {
            // SAFETY: room for the culprit, by the caller's promise.
            unsafe { *bad = wr };
            return errno;
        }
        // SAFETY: as above.
        wr = unsafe { (*wr).next };
    }
    0
}

pub(super) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, most: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: a completion queue of a fake, alive by the caller's promise.
    let (id, context) = unsafe { ((*cq.cast::<CqObject>()).id, context_of((*cq).context)) };
    let entries = match context.device.shared.look().poll(id, most.max(0) as usize) {
        Ok(entries) => entries,
        Err(answer) => return answer,
    };
    for (at, entry) in entries.iter().enumerate() {
        // SAFETY: the caller gives room for `most` entries, and there are no more.
        let to = unsafe { wc.add(at) };
        // SAFETY: as above; all fields are integers.
        unsafe { to.cast::<u8>().write_bytes(GARBAGE, size_of::<ibv_wc>()) };
        // SAFETY: just filled.
        let to = unsafe { &mut *to };
        to.wr_id = entry.wr_id;
        to.status = entry.status;
        to.opcode = entry.opcode;
        to.qp_num = entry.qpn;
        to.vendor_err = if entry.status == ibv_wc_status::IBV_WC_SUCCESS { 0 } else { 0x50 | entry.status };
        if matches!(
            entry.opcode,
            ibv_wc_opcode::IBV_WC_RECV
                | ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM
                | ibv_wc_opcode::IBV_WC_RDMA_READ
        ) {
            to.byte_len = entry.byte_len;
        }
        to.wc_flags = 0;
        if let Some(imm_data) = entry.imm {
            to.wc_flags = ibv_wc_flags::IBV_WC_WITH_IMM.0;
            to.imm_data_invalidated_rkey_union = imm_data_invalidated_rkey_union_t { imm_data };
        }
    }
    entries.len() as c_int
}

pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, _solicited_only: c_int) -> c_int {
    // SAFETY: a completion queue of a fake, alive by the caller's promise.
    let (id, context) = unsafe { ((*cq.cast::<CqObject>()).id, context_of((*cq).context)) };
    let mut state = context.device.shared.look();
    match state.cqs.get_mut(&id) {
        Some(cq) => cq.armed = true,
        None => return libc::EINVAL,
    }
    0
}

impl State {
    /// Counts towards an ordered failure of a post.
    fn post_fault(&mut self, device: usize) -> Result<(), Errno> {
        match &mut self.devices[device].fail_post {
            Some((0, errno)) => {
                let errno = *errno;
                self.devices[device].fail_post = None;
                Err(errno)
            }
            Some((left, _)) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// # Safety
    /// The list of elements of `wr` must be valid, and so must the memory they name if it is inline.
    unsafe fn take_send(&mut self, id: Id, wr: &ibv_send_wr) -> Result<(), Errno> {
        let qp = self.qps.get(&id).ok_or(libc::EINVAL)?;
        let (device, cap) = (qp.device, qp.cap);
        if !matches!(qp.state, ibv_qp_state::IBV_QPS_RTS | ibv_qp_state::IBV_QPS_ERR) {
            return Err(libc::EINVAL);
        }
        self.post_fault(device)?;
        let qp = &self.qps[&id];
        if qp.sq_slots.used() >= u64::from(cap.send_wr) {
            return Err(libc::ENOMEM);
        }
        let immediate = self.devices[device].config.immediate;
        let inline = wr.send_flags & ibv_send_flags::IBV_SEND_INLINE.0 != 0;
        let read = wr.opcode == ibv_wr_opcode::IBV_WR_RDMA_READ;
        let known = match wr.opcode {
            ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM => immediate,
            ibv_wr_opcode::IBV_WR_RDMA_WRITE | ibv_wr_opcode::IBV_WR_SEND => true,
            _ => read,
        };
        let count = u32::try_from(wr.num_sge).map_err(|_| libc::EINVAL)?;
        if !known || count > cap.send_sge || (inline && read) {
            return Err(libc::EINVAL);
        }
        // SAFETY: the caller's promise.
        let (raw, sges) = unsafe { self.elements(device, wr.sg_list, count, inline) };
        let len: u64 = sges.iter().map(|sge| sge.len).sum();
        if inline && len > u64::from(cap.inline) {
            return Err(libc::EINVAL);
        }
        let bytes = inline.then(|| {
            let mut bytes = Vec::new();
            for sge in &raw {
                // SAFETY: inline memory is valid at the post, by the caller's promise.
                bytes.extend_from_slice(unsafe {
                    std::slice::from_raw_parts(sge.addr as *const u8, sge.length as usize)
                });
            }
            bytes
        });
        // SAFETY: unions of integers; which fields are set follows from the operation, and the others are not used.
        let (imm, rdma) = unsafe { (wr.imm_data_invalidated_rkey_union.imm_data, wr.wr.rdma) };
        let qp = self.qps.get_mut(&id).expect("looked up above");
        qp.sq_slots.posted += 1;
        qp.sq.push_back(SendWr {
            wr_id: wr.wr_id,
            opcode: wr.opcode,
            signaled: wr.send_flags & ibv_send_flags::IBV_SEND_SIGNALED.0 != 0,
            fenced: wr.send_flags & ibv_send_flags::IBV_SEND_FENCE.0 != 0,
            imm,
            sges,
            inline: bytes,
            len,
            remote_addr: rdma.remote_addr,
            rkey: rdma.rkey,
            number: qp.sq_slots.posted,
            done: 0,
            taken: None,
            late_until: None,
            failed: None,
            refused_by_peer: false,
        });
        self.active.insert(id);
        Ok(())
    }

    /// # Safety
    /// The list of elements of `wr` must be valid.
    unsafe fn take_recv(&mut self, id: Id, wr: &ibv_recv_wr) -> Result<(), Errno> {
        let qp = self.qps.get(&id).ok_or(libc::EINVAL)?;
        let (device, cap) = (qp.device, qp.cap);
        if qp.state == ibv_qp_state::IBV_QPS_RESET {
            return Err(libc::EINVAL);
        }
        self.post_fault(device)?;
        let count = u32::try_from(wr.num_sge).map_err(|_| libc::EINVAL)?;
        if self.qps[&id].rq_slots.used() >= u64::from(cap.recv_wr) {
            return Err(libc::ENOMEM);
        }
        if count > cap.recv_sge {
            return Err(libc::EINVAL);
        }
        // SAFETY: the caller's promise.
        let (_, sges) = unsafe { self.elements(device, wr.sg_list, count, false) };
        let qp = self.qps.get_mut(&id).expect("looked up above");
        qp.rq_slots.posted += 1;
        qp.rq.push_back(RecvWr { wr_id: wr.wr_id, sges, number: qp.rq_slots.posted });
        self.active.insert(id);
        Ok(())
    }

    /// The elements as they are and as the device understands them.
    ///
    /// # Safety
    /// `list` must have `count` elements.
    unsafe fn elements(
        &mut self,
        device: usize,
        list: *const ibv_sge,
        count: u32,
        inline: bool,
    ) -> (Vec<ibv_sge>, Vec<Sge>) {
        if count == 0 {
            return (Vec::new(), Vec::new());
        }
        // SAFETY: the caller's promise.
        let raw: Vec<ibv_sge> = unsafe { std::slice::from_raw_parts(list, count as usize) }.to_vec();
        if !inline && raw.iter().any(|sge| sge.length == 0) {
            let name = self.devices[device].config.name.clone();
            self.violation(format!(
                "{name}: an element of length 0 was posted, which means 2^31 bytes to some devices; post without element"
            ));
        }
        let len = |length: u32| if length == 0 && !inline { 1 << 31 } else { u64::from(length) };
        let sges =
            raw.iter().map(|sge| Sge { addr: sge.addr, len: len(sge.length), lkey: sge.lkey }).collect();
        (raw, sges)
    }
}
