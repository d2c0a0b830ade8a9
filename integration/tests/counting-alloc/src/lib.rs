//! The allocator of tests that say how often, or how much, is allocated.
//! A test harness has a thread of its own, which allocates when it likes: it stands in no account here.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ops::Sub;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

/// What was asked of the allocator up to some moment; the difference of two is what was asked between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// Blocks that were made or grown.
    pub allocations: u64,
    /// Bytes that malloc has taken for the blocks that live: below zero when more were freed than made.
    pub live_bytes: i64,
}

impl Sub for Account {
    type Output = Account;

    fn sub(self, before: Account) -> Account {
        Account {
            allocations: self.allocations - before.allocations,
            live_bytes: self.live_bytes - before.live_bytes,
        }
    }
}

thread_local! {
    static OF_THREAD: Cell<Account> = const { Cell::new(Account { allocations: 0, live_bytes: 0 }) };
    static THREAD: Cell<i32> = const { Cell::new(0) };
}

/// The account of the calling thread.
pub fn of_this_thread() -> Account {
    OF_THREAD.get()
}

/// How often the calling thread allocates in `body`.
pub fn allocations(body: impl FnOnce()) -> u64 {
    let before = of_this_thread();
    body();
    (of_this_thread() - before).allocations
}

static OF_ALL: AtomicU64 = AtomicU64::new(0);
static HARNESS: AtomicI32 = AtomicI32::new(0);

/// How often all threads together allocate, those that a fabric starts among them, but not the harness's.
pub struct AllThreads(());

impl AllThreads {
    /// To be made by the test itself: another thread that is the process's first is the harness.
    pub fn of_this_test() -> AllThreads {
        let first = std::process::id() as i32;
        HARNESS.store(if this_thread() == first { 0 } else { first }, Ordering::SeqCst);
        AllThreads(())
    }

    /// Blocks that were made or grown until now.
    pub fn allocations(&self) -> u64 {
        OF_ALL.load(Ordering::SeqCst)
    }
}

fn this_thread() -> i32 {
    if THREAD.get() == 0 {
        // SAFETY: asks the kernel for a number.
        THREAD.set(unsafe { libc::gettid() });
    }
    THREAD.get()
}

/// What malloc takes for a block: a header, and room up to the next multiple.
fn taken(size: usize) -> i64 {
    (size + 8).next_multiple_of(16) as i64
}

fn note(allocations: u64, bytes: i64) {
    // At a thread's end the account may be gone, and nobody asks for it.
    let _ = OF_THREAD.try_with(|account| {
        let before = account.get();
        account.set(Account {
            allocations: before.allocations + allocations,
            live_bytes: before.live_bytes + bytes,
        });
    });
    if allocations > 0 && HARNESS.load(Ordering::Relaxed) != this_thread() {
        OF_ALL.fetch_add(allocations, Ordering::SeqCst);
    }
}

struct Counting;

// SAFETY: everything is left to the system's allocator; the accounts have no influence on it and allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(1, taken(layout.size()));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(1, taken(layout.size()));
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        note(0, -taken(layout.size()));
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(1, taken(size) - taken(layout.size()));
        // SAFETY: as above.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[cfg(test)]
mod tests {
    use super::*;

    /// Allocates in another thread, which lives on while `then` runs.
    fn beside_another_thread(then: impl FnOnce()) {
        let (told, done) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            let block = std::hint::black_box(vec![1u8; 1000]);
            told.send(block).expect("told");
            let _ = ended.recv();
        });
        let block = done.recv().expect("a block");
        then();
        drop(end);
        other.join().expect("join");
        assert_eq!(block, [1; 1000]);
    }

    #[test]
    fn an_account_is_of_one_thread() {
        beside_another_thread(|| {
            let before = of_this_thread();
            let block = std::hint::black_box(vec![1u8; 1000]);
            let made = of_this_thread() - before;
            assert_eq!(made, Account { allocations: 1, live_bytes: 1008 });
            drop(block);
            assert_eq!(of_this_thread() - before, Account { allocations: 1, live_bytes: 0 });
        });
    }

    #[test]
    fn what_a_test_starts_is_in_the_account_of_all_threads() {
        let all = AllThreads::of_this_test();
        let before = (all.allocations(), of_this_thread());
        beside_another_thread(|| {
            let here = (of_this_thread() - before.1).allocations;
            assert!(all.allocations() - before.0 > here, "the other thread's block");
        });
    }
}
