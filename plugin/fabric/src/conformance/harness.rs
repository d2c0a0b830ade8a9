//! What a fabric's test provides.

use crate::Fabric;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Two fabrics that reach each other, the memory of both sides, and, where nothing moves by itself, a way to let time pass.
pub trait Harness: Send + Sync + 'static {
    /// The fabric of side 0 or 1.
    fn fabric(&self, side: usize) -> Arc<dyn Fabric>;

    /// Memory of a side, valid as long as the harness; the address need not be aligned.
    fn alloc(&self, side: usize, len_bytes: usize) -> u64;

    /// Writes a side's memory as its application would.
    fn store(&self, side: usize, addr: u64, bytes: &[u8]);

    /// Reads a side's memory as its application would.
    fn load(&self, side: usize, addr: u64, bytes: &mut [u8]);

    /// Lets a simulated world take a step; called by every loop that waits.
    fn step(&self) {
        std::thread::yield_now();
    }
}

/// Both fabrics in this process, on its own memory.
pub struct InProcess {
    fabrics: [Arc<dyn Fabric>; 2],
    // By address. Words are atomics, so that looking at memory while a fabric writes it is defined.
    blocks: Mutex<BTreeMap<u64, Arc<[AtomicU64]>>>,
}

impl InProcess {
    /// A harness over two fabrics.
    pub fn new(a: Arc<dyn Fabric>, b: Arc<dyn Fabric>) -> InProcess {
        InProcess { fabrics: [a, b], blocks: Mutex::new(BTreeMap::new()) }
    }

    fn block(&self, addr: u64, len_bytes: usize) -> (u64, Arc<[AtomicU64]>) {
        let blocks = self.blocks.lock().expect("no panic under this lock");
        let (base, words) = blocks.range(..=addr).next_back().expect("an address that alloc returned");
        assert!(
            addr + len_bytes as u64 <= base + 8 * words.len() as u64,
            "the test reaches outside its memory"
        );
        (*base, Arc::clone(words))
    }

    /// Calls `each` with the word, the byte's index in it and the byte's index in the range, one call per touched word.
    fn words(&self, addr: u64, len_bytes: usize, mut each: impl FnMut(&AtomicU64, usize, usize, usize)) {
        let (base, words) = self.block(addr, len_bytes);
        let start = (addr - base) as usize;
        let mut done = 0;
        while done < len_bytes {
            let at = start + done;
            let n = (8 - at % 8).min(len_bytes - done);
            each(&words[at / 8], at % 8, done, n);
            done += n;
        }
    }
}

impl Harness for InProcess {
    fn fabric(&self, side: usize) -> Arc<dyn Fabric> {
        Arc::clone(&self.fabrics[side])
    }

    fn alloc(&self, _side: usize, len_bytes: usize) -> u64 {
        let words: Arc<[AtomicU64]> = (0..len_bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        let addr = words.as_ptr() as u64;
        self.blocks.lock().expect("no panic under this lock").insert(addr, words);
        addr
    }

    fn store(&self, _side: usize, addr: u64, bytes: &[u8]) {
        self.words(addr, bytes.len(), |word, first, at, n| {
            let mut value = word.load(Ordering::Relaxed).to_ne_bytes();
            value[first..first + n].copy_from_slice(&bytes[at..at + n]);
            word.store(u64::from_ne_bytes(value), Ordering::Release);
        });
    }

    fn load(&self, _side: usize, addr: u64, bytes: &mut [u8]) {
        self.words(addr, bytes.len(), |word, first, at, n| {
            let value = word.load(Ordering::Acquire).to_ne_bytes();
            bytes[at..at + n].copy_from_slice(&value[first..first + n]);
        });
    }
}
