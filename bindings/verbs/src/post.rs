//! Chains of work requests: built in place, posted with one doorbell, built again.

use rdma_sys::{ibv_recv_wr, ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode};
use std::mem::MaybeUninit;

/// Operation of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// RDMA READ.
    Read,
    /// RDMA WRITE.
    Write,
    /// RDMA WRITE with immediate, in host order.
    WriteWithImm(u32),
    /// SEND.
    Send,
}

/// Flags of a work request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SendFlags {
    /// Completes in its queue.
    pub signaled: bool,
    /// Starts only after all earlier READs of its queue have completed.
    pub fenced: bool,
}

/// The provider took only a part of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("posting stopped after {taken} work requests: {}", std::io::Error::from_raw_os_error(*.errno))]
pub struct PostFailed {
    /// Work requests taken; they will complete.
    pub taken: usize,
    /// Why not more.
    pub errno: i32,
}

macro_rules! chain {
    ($(#[$doc:meta])* $name:ident of $wr:ty) => {
        $(#[$doc])*
        pub struct $name {
            // Boxed slices: the links between elements stay valid when the chain moves.
            wrs: Box<[$wr]>,
            sges: Box<[ibv_sge]>,
            // Which work request has several elements, and those; not touched between that and the post.
            list: (usize, Vec<ibv_sge>),
            len: usize,
        }

        // SAFETY: the pointers inside lead into its own boxes, or to memory that `post` promises to be valid.
        unsafe impl Send for $name {}

        impl $name {
            /// Room for `capacity` work requests.
            pub fn with_capacity(capacity: usize) -> $name {
                let mut wrs: Box<[$wr]> = (0..capacity)
                    // SAFETY: a C structure of integers, unions of them and pointers, for which all zero bytes are valid.
                    .map(|_| unsafe { MaybeUninit::zeroed().assume_init() })
                    .collect();
                let mut sges: Box<[ibv_sge]> =
                    (0..capacity).map(|_| ibv_sge { addr: 0, length: 0, lkey: 0 }).collect();
                for (wr, sge) in wrs.iter_mut().zip(&mut sges) {
                    wr.sg_list = sge;
                }
                $name { wrs, sges, list: (0, Vec::new()), len: 0 }
            }

            /// Starts a new chain.
            pub fn clear(&mut self) {
                if !self.list.1.is_empty() {
                    let at = self.list.0;
                    self.wrs[at].sg_list = &mut self.sges[at];
                    self.list.1.clear();
                }
                self.len = 0;
            }

            /// Work requests in it.
            pub fn len(&self) -> usize {
                self.len
            }

            /// Whether there are none.
            pub fn is_empty(&self) -> bool {
                self.len == 0
            }

            /// Most work requests that it holds.
            pub fn capacity(&self) -> usize {
                self.wrs.len()
            }

            /// The next work request, linked behind the one before. Panics when the chain is full.
            fn next(&mut self) -> (&mut $wr, &mut ibv_sge) {
                let at = self.len;
                self.len += 1;
                let wr: *mut $wr = &mut self.wrs[at];
                if at > 0 {
                    self.wrs[at - 1].next = wr;
                }
                let wr = &mut self.wrs[at];
                wr.next = std::ptr::null_mut();
                (wr, &mut self.sges[at])
            }

            pub(crate) fn first(&mut self) -> Option<*mut $wr> {
                (self.len > 0).then(|| self.wrs.as_mut_ptr())
            }

            /// What the provider says, as the number of work requests that it took.
            pub(crate) fn outcome(&self, errno: i32, bad: *mut $wr) -> Result<(), PostFailed> {
                if errno == 0 {
                    return Ok(());
                }
                // Without a culprit nothing was taken: the specification demands that it is named.
                let taken = (0..self.len).find(|&i| std::ptr::eq(&self.wrs[i], bad)).unwrap_or(0);
                Err(PostFailed { taken, errno: errno.abs() })
            }
        }
    };
}

chain! {
    /// Work requests for a send queue.
    SendChain of ibv_send_wr
}

chain! {
    /// RECVs.
    RecvChain of ibv_recv_wr
}

impl SendChain {
    fn set(
        &mut self,
        wr_id: u64,
        op: Opcode,
        flags: SendFlags,
        target: (u64, u32),
    ) -> (&mut ibv_send_wr, &mut ibv_sge) {
        let (wr, sge) = self.next();
        wr.wr_id = wr_id;
        wr.opcode = match op {
            Opcode::Read => ibv_wr_opcode::IBV_WR_RDMA_READ,
            Opcode::Write => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            Opcode::WriteWithImm(imm) => {
                wr.imm_data_invalidated_rkey_union.imm_data = imm.to_be();
                ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM
            }
            Opcode::Send => ibv_wr_opcode::IBV_WR_SEND,
        };
        wr.send_flags = 0;
        if flags.signaled {
            wr.send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        if flags.fenced {
            wr.send_flags |= ibv_send_flags::IBV_SEND_FENCE.0;
        }
        wr.wr.rdma.remote_addr = target.0;
        wr.wr.rdma.rkey = target.1;
        (wr, sge)
    }

    /// Appends a work request on registered memory. Without length it has no element: an element of length 0 would mean 2³¹ bytes to some devices.
    pub fn push(
        &mut self,
        wr_id: u64,
        op: Opcode,
        flags: SendFlags,
        (addr, lkey, len_bytes): (u64, u32, u32),
        target: (u64, u32),
    ) {
        let (wr, sge) = self.set(wr_id, op, flags, target);
        *sge = ibv_sge { addr, length: len_bytes, lkey };
        wr.num_sge = i32::from(len_bytes > 0);
    }

    /// Appends a work request that carries `bytes` itself. They are copied when the chain is *posted*.
    ///
    /// # Safety
    /// `bytes` must stay valid until then, and be at most as long as the queue pair's inline limit.
    pub unsafe fn push_inline(
        &mut self,
        wr_id: u64,
        op: Opcode,
        flags: SendFlags,
        bytes: &[u8],
        target: (u64, u32),
    ) {
        let (wr, sge) = self.set(wr_id, op, flags, target);
        *sge = ibv_sge { addr: bytes.as_ptr() as u64, length: bytes.len() as u32, lkey: 0 };
        wr.num_sge = i32::from(!bytes.is_empty());
        if !bytes.is_empty() {
            wr.send_flags |= ibv_send_flags::IBV_SEND_INLINE.0;
        }
    }

    /// Appends a SEND of several pieces (address, local key, length), at most one to a chain. Pieces without length are left out.
    pub fn push_gathered(
        &mut self,
        wr_id: u64,
        flags: SendFlags,
        pieces: impl Iterator<Item = (u64, u32, u32)>,
    ) {
        assert!(self.list.1.is_empty(), "one gathered SEND to a chain");
        self.list.0 = self.len;
        let some = pieces.filter(|(_, _, length)| *length > 0);
        self.list.1.extend(some.map(|(addr, lkey, length)| ibv_sge { addr, length, lkey }));
        let (list, count) = (self.list.1.as_mut_ptr(), self.list.1.len());
        let (wr, _) = self.set(wr_id, Opcode::Send, flags, (0, 0));
        if count > 0 {
            wr.sg_list = list;
        }
        wr.num_sge = count as i32;
    }

    /// Makes the last work request, a WRITE, carry an immediate.
    pub fn set_last_imm(&mut self, imm: u32) {
        if let Some(last) = self.len.checked_sub(1) {
            let wr = &mut self.wrs[last];
            debug_assert_eq!(wr.opcode, ibv_wr_opcode::IBV_WR_RDMA_WRITE);
            wr.opcode = ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM;
            wr.imm_data_invalidated_rkey_union.imm_data = imm.to_be();
        }
    }

    /// Makes the last work request complete in its queue.
    pub fn signal_last(&mut self) {
        if let Some(last) = self.len.checked_sub(1) {
            self.wrs[last].send_flags |= ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
    }
}

impl RecvChain {
    /// Appends a RECV; one without length serves immediates and empty messages only.
    pub fn push(&mut self, wr_id: u64, (addr, lkey, len_bytes): (u64, u32, u32)) {
        let (wr, sge) = self.next();
        wr.wr_id = wr_id;
        *sge = ibv_sge { addr, length: len_bytes, lkey };
        wr.num_sge = i32::from(len_bytes > 0);
    }
}
