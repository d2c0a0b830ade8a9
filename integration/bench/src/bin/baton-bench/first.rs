//! The first transfer of memory that the engine has never seen: what registration costs, where it is needed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use baton_host::{Desc, Op};

use crate::Outcome;
use crate::engine::name;
use crate::loops::{Bench, us};
use crate::memory::WORD;
use crate::target::SIDE;

/// What fresh memory holds before a READ fills it.
const EMPTY: u64 = u64::MAX;

/// Moves the blocks of the first iteration from or into fresh memory; microseconds from before its registration until it is done.
pub fn transfer(bench: &Bench<'_>) -> Outcome<f64> {
    let remote = &bench.blocks[0].remote;
    let sizes: Vec<usize> = remote.iter().map(|desc| desc.len_bytes as usize).collect();
    let bytes: usize = sizes.iter().sum();
    // Written to here: what the kernel does at the first touch is not what is measured.
    let words: Box<[AtomicU64]> = (0..bytes / WORD).map(|_| AtomicU64::new(EMPTY)).collect();
    let first: *mut u8 = words.as_ptr().cast_mut().cast();
    let started = Instant::now();
    let region = match bench.arm.backend.takes_any_memory() {
        true => None,
        // SAFETY: the words live until the region, which is dropped first, is gone, and this side accesses them atomically.
        false => Some(
            unsafe { bench.engine.register(first, bytes, Default::default()) }.map_err(|e| e.to_string())?,
        ),
    };
    let handle = region.as_ref().map_or(0, |region| region.handle());
    let mut addr = first as u64;
    let local: Vec<Desc> = sizes
        .iter()
        .map(|size| {
            let desc = Desc { addr, len_bytes: *size as u64, region: handle, reserved: 0 };
            addr += *size as u64;
            desc
        })
        .collect();
    let peer = name(SIDE, bench.arm.engine);
    let request = bench.engine.create_xfer(bench.op, &peer, &local, remote).map_err(|e| e.to_string())?;
    request.post(None).map_err(|e| e.to_string())?;
    let (posted, mut idle) = (Instant::now(), 0);
    loop {
        match request.status_raw() {
            code if code < 0 => return Err(request.error_text()),
            baton_host::abi::BATON_OK => break,
            _ => {
                idle += 1;
                bench.wait(idle, posted)?;
            }
        }
    }
    let took = us(started.elapsed());
    drop(request);
    drop(region);
    if bench.op == Op::Read && words.iter().any(|word| word.load(Ordering::Acquire) == EMPTY) {
        return Err("a READ into fresh memory left some of it as it was".to_owned());
    }
    Ok(took)
}
