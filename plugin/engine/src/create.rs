//! The entries that build transfers: from descriptors, or by index from lists of blocks. The contract is that of [`crate::entries`].

use crate::convert::{descs, indices, name, out};
use crate::object::{self, with};
use baton_abi::*;
use baton_driver::{Error, err};
use baton_fabric::Op;

/// A spec of the host, once its size and the pointers are known to be good.
///
/// # Safety
/// `spec` must be null or point to a structure that is as long as its first field says.
unsafe fn read_spec<S: Copy, T>(spec: *const S, out_xfer: *mut T) -> Result<S, Error> {
    if spec.is_null() || out_xfer.is_null() {
        return Err(err!(InvalidParam, "spec or out is null"));
    }
    // SAFETY: every spec begins with its size, and is at least that long.
    let size = unsafe { spec.cast::<u32>().read() };
    if (size as usize) < size_of::<S>() {
        return Err(err!(
            InvalidParam,
            "spec.size_bytes is {size}; this engine needs at least {}",
            size_of::<S>()
        ));
    }
    // SAFETY: the caller's structure is at least as large as ours.
    Ok(unsafe { spec.read() })
}

fn op(raw: u32) -> Result<Op, Error> {
    match raw {
        BATON_OP_READ => Ok(Op::Read),
        BATON_OP_WRITE => Ok(Op::Write),
        other => Err(err!(InvalidParam, "operation {other}: valid are 0 (READ) and 1 (WRITE)")),
    }
}

pub unsafe extern "C" fn create_xfer_req(
    engine: *mut BatonEngine,
    spec: *const BatonXferSpec,
    out_xfer: *mut *mut BatonXfer,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            let spec = read_spec(spec, out_xfer)?;
            let op = op(spec.op)?;
            let local = descs(spec.local, spec.local_count, "local descriptors")?;
            let remote = descs(spec.remote, spec.remote_count, "remote descriptors")?;
            let xfer = e.driver.create_xfer(op, name(spec.peer)?, local, remote)?;
            out(out_xfer, object::give_xfer(xfer), "out")
        })
    }
}

pub unsafe extern "C" fn create_block_list(
    engine: *mut BatonEngine,
    peer: BatonSlice,
    blocks: *const BatonDesc,
    count: u64,
    list: *mut u64,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            if list.is_null() {
                return Err(err!(InvalidParam, "list is null"));
            }
            let owner = if peer.len_bytes == 0 { None } else { Some(name(peer)?) };
            let blocks = descs(blocks, count, "blocks")?;
            out(list, e.driver.create_block_list(owner, blocks)?, "list")
        })
    }
}

pub unsafe extern "C" fn release_block_list(engine: *mut BatonEngine, list: u64) -> BatonStatus {
    // SAFETY: the contract.
    unsafe { with(engine, |e| e.driver.release_block_list(list).map(|()| BATON_OK)) }
}

pub unsafe extern "C" fn create_xfer_from_indices(
    engine: *mut BatonEngine,
    spec: *const BatonIndexSpec,
    out_xfer: *mut *mut BatonXfer,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            let spec = read_spec(spec, out_xfer)?;
            let op = op(spec.op)?;
            let local = indices(spec.local_indices, spec.index_count, "local indices")?;
            let remote = indices(spec.remote_indices, spec.index_count, "remote indices")?;
            let xfer = e.driver.create_xfer_from_indices(
                op,
                name(spec.peer)?,
                (spec.local_list, local),
                (spec.remote_list, remote),
            )?;
            out(out_xfer, object::give_xfer(xfer), "out")
        })
    }
}
