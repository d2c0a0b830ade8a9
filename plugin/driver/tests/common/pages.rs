//! Memory that the host takes away while it is registered.

use baton_driver::{Desc, Driver};
use baton_fabric::{Memory, MemoryKind};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

/// Pages that only one test knows. They are never unmapped: nobody else may have their place.
pub struct Pages {
    pub addr: u64,
    len: usize,
}

impl Pages {
    pub fn new(len: usize) -> Pages {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: fresh pages at a place of the kernel's choice.
        let pages = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE) };
        Pages { addr: pages.expect("mmap") as u64, len }
    }

    pub fn register(&self, engine: &Driver) -> u64 {
        let memory = Memory {
            addr: self.addr,
            len_bytes: self.len as u64,
            kind: MemoryKind::Dram,
            device: 0,
            remote_read: true,
            remote_write: true,
            ordered: false,
            mapped: false,
        };
        engine.register(&memory).expect("register")
    }

    /// From here on nothing can be read or written there. In one step: what was unmapped first might be given to another thread.
    pub fn take_away(&self) {
        let flags = MapFlags::PRIVATE | MapFlags::FIXED;
        let at = std::ptr::with_exposed_provenance_mut(self.addr as usize);
        // SAFETY: the pages are ours; that they are still registered is what is tested.
        unsafe { mmap_anonymous(at, self.len, ProtFlags::empty(), flags) }.expect("mmap");
    }

    pub fn desc(&self, region: u64) -> Desc {
        Desc { addr: self.addr, len_bytes: self.len as u64, region, reserved: 0 }
    }
}
