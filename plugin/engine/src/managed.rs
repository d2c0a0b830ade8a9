//! Entries for memory that the engine allocates. Their contract is that of `entries.rs`.

use crate::convert::out;
use crate::entries::checked_memory;
use crate::object::with;
use baton_abi::*;
use baton_driver::err;

pub unsafe extern "C" fn alloc_managed(
    engine: *mut BatonEngine,
    memory: *mut BatonMemory,
    region: *mut u64,
) -> BatonStatus {
    // SAFETY: the contract.
    unsafe {
        with(engine, |e| {
            if memory.is_null() || region.is_null() {
                return Err(err!(InvalidParam, "memory or region is null"));
            }
            let mut made = checked_memory(&*memory)?;
            let handle = e.driver.alloc_managed(&mut made)?;
            (*memory).addr = made.addr;
            out(region, handle, "region")
        })
    }
}

pub unsafe extern "C" fn free_managed(engine: *mut BatonEngine, region: u64) -> BatonStatus {
    // SAFETY: the contract.
    unsafe { with(engine, |e| e.driver.free_managed(region).map(|()| BATON_OK)) }
}
