//! Making and unmaking objects, by the rules of the device.

use super::model::{Caps, Channel, Cq, Errno, Id, Mr, Path, Pd, Qp, Signal, Slots, State};
use rdma_sys::{ibv_access_flags as access, ibv_qp_state};
use std::collections::VecDeque;

/// What registering a region asks for.
pub(super) struct Registration {
    pub pd: Id,
    pub iova: u64,
    pub len: u64,
    pub base: u64,
    pub access: u32,
    /// It is an accelerator's.
    pub vram: bool,
}

/// What a new queue pair asks for.
pub(super) struct NewQp {
    pub pd: Id,
    pub ptr: usize,
    pub send_cq: Id,
    pub recv_cq: Id,
    pub cap: Caps,
    pub signal_all: bool,
}

const PAGE: u64 = 4096;

impl State {
    pub fn alive(&self, device: usize) -> Result<(), Errno> {
        if self.devices[device].dead { Err(libc::EIO) } else { Ok(()) }
    }

    pub fn alloc_pd(&mut self, context: Id) -> Result<Id, Errno> {
        let device = self.contexts.get(&context).ok_or(libc::EINVAL)?.device;
        self.alive(device)?;
        let id = self.fresh_id();
        self.pds.insert(id, Pd { device, context, users: 0 });
        Ok(id)
    }

    pub fn dealloc_pd(&mut self, id: Id) -> Result<(), Errno> {
        if self.pds.get(&id).ok_or(libc::EINVAL)?.users > 0 {
            return Err(libc::EBUSY);
        }
        self.pds.remove(&id);
        Ok(())
    }

    /// Answers number and key.
    pub fn register(&mut self, wanted: Registration) -> Result<(Id, u32), Errno> {
        const OPTIONAL: u32 = access::IBV_ACCESS_RELAXED_ORDERING.0;
        const KNOWN: u32 = access::IBV_ACCESS_LOCAL_WRITE.0
            | access::IBV_ACCESS_REMOTE_READ.0
            | access::IBV_ACCESS_REMOTE_WRITE.0
            | access::IBV_ACCESS_REMOTE_ATOMIC.0
            | OPTIONAL;
        let device = self.pds.get(&wanted.pd).ok_or(libc::EINVAL)?.device;
        self.alive(device)?;
        let remote = access::IBV_ACCESS_REMOTE_WRITE.0 | access::IBV_ACCESS_REMOTE_ATOMIC.0;
        let lacks_local =
            wanted.access & remote != 0 && wanted.access & access::IBV_ACCESS_LOCAL_WRITE.0 == 0;
        let config = &self.devices[device].config;
        let wraps = wanted.iova.checked_add(wanted.len).is_none();
        if wanted.access & !KNOWN != 0 || lacks_local || wanted.len > config.max_mr_bytes || wraps {
            return Err(libc::EINVAL);
        }
        if !is_mapped(wanted.base, wanted.len) {
            return Err(libc::EFAULT);
        }
        let pages = (wanted.base + wanted.len).div_ceil(PAGE) - wanted.base / PAGE;
        let pinned = pages * PAGE;
        let regions = self.mrs.values().filter(|mr| mr.device == device).count();
        let over = config.memlock_bytes.is_some_and(|most| self.devices[device].pinned_bytes + pinned > most);
        if over || regions >= config.max_mr as usize {
            return Err(libc::ENOMEM);
        }
        let key = self.devices[device].next_key;
        self.devices[device].next_key = key.wrapping_add(0x101);
        self.devices[device].pinned_bytes += pinned;
        let id = self.fresh_id();
        self.devices[device].keys.insert(key, id);
        self.pds.get_mut(&wanted.pd).expect("looked up above").users += 1;
        self.mrs.insert(
            id,
            Mr {
                device,
                pd: wanted.pd,
                iova: wanted.iova,
                len: wanted.len,
                base: wanted.base,
                access: wanted.access,
                vram: wanted.vram,
                key,
                pinned_bytes: pinned,
            },
        );
        Ok((id, key))
    }

    pub fn deregister(&mut self, id: Id) -> Result<(), Errno> {
        let device = self.mrs.get(&id).ok_or(libc::EINVAL)?.device;
        self.settle(device);
        let config = &mut self.devices[device].config;
        if config.busy_deregistrations > 0 {
            config.busy_deregistrations -= 1;
            return Err(libc::EBUSY);
        }
        let mr = self.mrs.remove(&id).ok_or(libc::EINVAL)?;
        let device = &mut self.devices[mr.device];
        device.keys.remove(&mr.key);
        device.pinned_bytes -= mr.pinned_bytes;
        self.pds.get_mut(&mr.pd).expect("a region's domain is not deallocated").users -= 1;
        Ok(())
    }

    pub fn create_channel(&mut self, device: usize) -> Result<(Id, i32), Errno> {
        self.alive(device)?;
        let (id, signal) = (self.fresh_id(), Signal::new()?);
        let fd = signal.fd();
        self.channels.insert(id, Channel { device, signal, events: VecDeque::new(), cqs: 0 });
        Ok((id, fd))
    }

    pub fn destroy_channel(&mut self, id: Id) -> Result<(), Errno> {
        if self.channels.get(&id).ok_or(libc::EINVAL)?.cqs > 0 {
            return Err(libc::EBUSY);
        }
        self.channels.remove(&id);
        Ok(())
    }

    pub fn create_cq(
        &mut self,
        context: Id,
        entries: i32,
        channel: Option<Id>,
        ptr: usize,
    ) -> Result<Id, Errno> {
        let device = self.contexts.get(&context).ok_or(libc::EINVAL)?.device;
        self.alive(device)?;
        let capacity = usize::try_from(entries).unwrap_or(0);
        if capacity == 0 || capacity > self.devices[device].config.max_cqe as usize {
            return Err(libc::EINVAL);
        }
        if let Some(channel) = channel {
            self.channels.get_mut(&channel).ok_or(libc::EINVAL)?.cqs += 1;
        }
        let id = self.fresh_id();
        self.cqs.insert(
            id,
            Cq {
                device,
                context,
                ptr,
                channel,
                capacity,
                entries: VecDeque::new(),
                armed: false,
                overrun: false,
                qps: 0,
            },
        );
        Ok(id)
    }

    pub fn destroy_cq(&mut self, id: Id) -> Result<(), Errno> {
        let cq = self.cqs.get(&id).ok_or(libc::EINVAL)?;
        if cq.qps > 0 {
            return Err(libc::EBUSY);
        }
        if let Some(channel) = cq.channel.and_then(|channel| self.channels.get_mut(&channel)) {
            channel.cqs -= 1;
            channel.events.retain(|cq| *cq != id);
        }
        self.cqs.remove(&id);
        Ok(())
    }

    /// Answers number, the device's number for it, and what it got.
    pub fn create_qp(&mut self, wanted: NewQp) -> Result<(Id, u32, Caps), Errno> {
        let pd = self.pds.get(&wanted.pd).ok_or(libc::EINVAL)?;
        let (device, context) = (pd.device, pd.context);
        self.alive(device)?;
        let config = &self.devices[device].config;
        let (mut cap, limit) = (wanted.cap, config.max_qp_wr);
        let foreign = [wanted.send_cq, wanted.recv_cq]
            .iter()
            .any(|cq| self.cqs.get(cq).is_none_or(|cq| cq.context != context));
        let too_much = cap.send_wr.max(cap.recv_wr) > limit
            || cap.send_sge.max(cap.recv_sge) > config.max_sge
            || (config.refuse_inline && cap.inline > config.max_inline_bytes);
        if foreign || too_much {
            return Err(libc::EINVAL);
        }
        if self.devices[device].qpns.len() >= config.max_qp as usize {
            return Err(libc::ENOMEM);
        }
        cap.inline = config.max_inline_bytes.min(cap.inline);
        if config.round_send_queue {
            cap.send_wr = (cap.send_wr + 1).next_power_of_two() - 1;
        }
        let qpn = self.devices[device].next_qpn;
        self.devices[device].next_qpn = (qpn + 1) & 0xff_ffff;
        let id = self.fresh_id();
        self.devices[device].qpns.insert(qpn, id);
        self.pds.get_mut(&wanted.pd).expect("looked up above").users += 1;
        for cq in [wanted.send_cq, wanted.recv_cq] {
            self.cqs.get_mut(&cq).expect("looked up above").qps += 1;
        }
        let qp = Qp {
            device,
            context,
            pd: wanted.pd,
            ptr: wanted.ptr,
            qpn,
            send_cq: wanted.send_cq,
            recv_cq: wanted.recv_cq,
            cap,
            signal_all: wanted.signal_all,
            state: ibv_qp_state::IBV_QPS_RESET,
            path: Path::default(),
            sq: VecDeque::new(),
            started: 0,
            rq: VecDeque::new(),
            sq_slots: Slots::default(),
            rq_slots: Slots::default(),
            sent: 0,
            received: 0,
            last_start: None,
            silence: None,
            rnr: None,
        };
        self.qps.insert(id, qp);
        Ok((id, qpn, cap))
    }

    /// Its entries in completion queues stay there.
    pub fn destroy_qp(&mut self, id: Id) -> Result<(), Errno> {
        let qp = self.qps.remove(&id).ok_or(libc::EINVAL)?;
        self.active.remove(&id);
        self.devices[qp.device].qpns.remove(&qp.qpn);
        self.pds.get_mut(&qp.pd).expect("a queue pair's domain is not deallocated").users -= 1;
        for cq in [qp.send_cq, qp.recv_cq] {
            self.cqs.get_mut(&cq).expect("a queue pair's completion queues are not destroyed").qps -= 1;
        }
        Ok(())
    }
}

/// Whether every page of a range is mapped, which pinning demands.
fn is_mapped(addr: u64, len: u64) -> bool {
    let start = addr / PAGE * PAGE;
    let pages = (addr + len).div_ceil(PAGE) - addr / PAGE;
    let mut resident = vec![0u8; pages as usize];
    if pages == 0 {
        return true;
    }
    // SAFETY: the kernel looks the range up without touching it; there is a byte for every page.
    unsafe { libc::mincore(start as *mut libc::c_void, (pages * PAGE) as usize, resident.as_mut_ptr()) == 0 }
}
