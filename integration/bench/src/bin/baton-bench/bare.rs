//! The same copies without an engine, as both sides see them: a loop of process_vm_readv, and words in a shared page
//! that say how far it is.

use std::fs::{File, OpenOptions};
use std::io::Error;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use serde::{Deserialize, Serialize};

use crate::Outcome;
use crate::memory::{Layout, Pool};
use crate::target::between_looks;

/// Threads of one side at most.
pub const MAX_THREADS: usize = 2;
/// Words are so far apart that no two share a cache line.
const STRIDE: usize = 32;
const PAGE: usize = 4096;
/// Instead of a number: the target's threads end.
const END: u64 = u64::MAX;
/// Instead of a number: a thread of the target could not go on.
pub const FAILED: u64 = u64::MAX - 1;
/// What one call takes.
const MAX_PIECES: usize = 1024;
/// One call moves less than 2 GiB.
const MAX_CALL: usize = 1 << 30;

/// What the target does in one round.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Work {
    /// Where the initiator's shared page is found.
    pub page: String,
    /// The initiator, and where its memory starts.
    pub pid: u32,
    pub base: u64,
    /// The target pulls what the initiator writes; else it only hears that something was pulled.
    pub writes: bool,
    /// Threads of the side that pulls, each with its share of every request's blocks.
    pub threads: usize,
    /// The request of the first iteration.
    pub first: u64,
}

/// A page that both processes have mapped.
pub struct Words {
    file: File,
    page: *mut AtomicU64,
}

// SAFETY: the page stays mapped until this is dropped, and is accessed atomically only.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    pub fn new() -> Outcome<Words> {
        let said = |error: rustix::io::Errno| format!("no page to share with the target: {error}");
        let fd = memfd_create("baton-bench", MemfdFlags::CLOEXEC).map_err(said)?;
        ftruncate(&fd, PAGE as u64).map_err(said)?;
        Words::map(File::from(fd))
    }

    /// The page of another process.
    fn open(path: &str) -> Outcome<Words> {
        let file = OpenOptions::new().read(true).write(true).open(path);
        Words::map(file.map_err(|error| format!("the initiator's page {path}: {error}"))?)
    }

    fn map(file: File) -> Outcome<Words> {
        // SAFETY: a new mapping at an address of the kernel's choice; the file is as long as it.
        let page = unsafe {
            mmap(std::ptr::null_mut(), PAGE, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, &file, 0)
        };
        let page = page.map_err(|error| format!("the shared page cannot be mapped: {error}"))?;
        Ok(Words { file, page: page.cast() })
    }

    /// Where the other process finds it.
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < PAGE / size_of::<AtomicU64>());
        // SAFETY: within the page, which lives as long as this; both processes access it atomically only.
        unsafe { &*self.page.add(index) }
    }

    /// How many iterations a thread of the initiator has asked for, or done itself.
    pub fn asked(&self, thread: usize) -> &AtomicU64 {
        self.word(2 * thread * STRIDE)
    }

    /// How many of them the target has done, or heard of.
    pub fn done(&self, thread: usize) -> &AtomicU64 {
        self.word((2 * thread + 1) * STRIDE)
    }

    /// For a new round.
    pub fn reset(&self) {
        for thread in 0..MAX_THREADS {
            self.asked(thread).store(0, Ordering::Relaxed);
            self.done(thread).store(0, Ordering::Release);
        }
    }

    /// Ends the target's threads.
    pub fn end(&self) {
        (0..MAX_THREADS).for_each(|thread| self.asked(thread).store(END, Ordering::Release));
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: mapped by us, and nobody borrows a word any more.
        let _ = unsafe { munmap(self.page.cast(), PAGE) };
    }
}

/// Between two looks at a word.
pub fn spin(looks: u32) {
    between_looks(std::time::Duration::ZERO, looks);
}

/// The part of a request's blocks that one of `threads` moves.
fn share(blocks: usize, thread: usize, threads: usize) -> std::ops::Range<usize> {
    blocks * thread / threads..blocks * (thread + 1) / threads
}

/// Where the blocks of a request come from and go to, as offsets (to, from), for one thread of several.
pub fn moves(
    layout: Layout,
    order: &[u32],
    request: usize,
    writes: bool,
    part: (usize, usize),
) -> Vec<(usize, usize)> {
    let at = |index: usize| {
        let (near, far) = (layout.offset(request, index), layout.offset(request, order[index] as usize));
        if writes { (far, near) } else { (near, far) }
    };
    share(layout.blocks, part.0, part.1).map(at).collect()
}

/// One thread's blocks of one request, ready to be pulled.
pub struct Pull {
    pid: libc::pid_t,
    to: Vec<libc::iovec>,
    from: Vec<libc::iovec>,
    per_call: usize,
    size: usize,
}

impl Pull {
    /// Into this side's memory from that of another process, which starts at `base` there.
    pub fn new(pool: &Pool, pid: u32, base: u64, moves: &[(usize, usize)]) -> Pull {
        let size = pool.layout().size;
        let one = |iov_base| libc::iovec { iov_base, iov_len: size };
        Pull {
            pid: pid as libc::pid_t,
            to: moves.iter().map(|(to, _)| one(pool.at(*to).cast())).collect(),
            // An address of another process: no pointer of ours.
            from: moves
                .iter()
                .map(|(_, from)| one(std::ptr::without_provenance_mut(base as usize + from)))
                .collect(),
            per_call: (MAX_CALL / size).clamp(1, MAX_PIECES),
            size,
        }
    }

    /// Pulls all of it.
    pub fn go(&self) -> Outcome<()> {
        for (to, from) in self.to.chunks(self.per_call).zip(self.from.chunks(self.per_call)) {
            let (ours, theirs) = (to.as_ptr(), from.as_ptr());
            // SAFETY: both lists are as long as said, and what is written to are blocks of a pool that outlives this
            // and that others access atomically.
            let moved =
                unsafe { libc::process_vm_readv(self.pid, ours, to.len() as _, theirs, from.len() as _, 0) };
            if usize::try_from(moved) != Ok(to.len() * self.size) {
                let reason =
                    if moved < 0 { Error::last_os_error().to_string() } else { format!("{moved} bytes") };
                return Err(format!(
                    "process_vm_readv of {} x {} bytes from process {}: {reason}; where Yama forbids it, BATON_PTRACE=any \
                     may help",
                    to.len(),
                    self.size,
                    self.pid
                ));
            }
        }
        Ok(())
    }
}

/// What each thread pulls, request by request.
pub fn pulls(pool: &Pool, pid: u32, base: u64, writes: bool, part: (usize, usize)) -> Vec<Pull> {
    let (layout, order) = (pool.layout(), pool.layout().order());
    let one = |request| Pull::new(pool, pid, base, &moves(layout, &order, request, writes, part));
    (0..layout.requests).map(one).collect()
}

/// The target's threads of one round.
pub struct Answering {
    threads: Vec<JoinHandle<Outcome<()>>>,
}

impl Answering {
    pub fn start(pool: &Arc<Pool>, work: &Work) -> Outcome<Answering> {
        let words = Arc::new(Words::open(&work.page)?);
        let one = |thread: usize| {
            let (words, work, pool) = (Arc::clone(&words), work.clone(), Arc::clone(pool));
            std::thread::spawn(move || {
                let answer = answer(&words, &pool, &work, thread);
                if answer.is_err() {
                    words.done(thread).store(FAILED, Ordering::Release);
                }
                answer
            })
        };
        Ok(Answering { threads: (0..work.threads.clamp(1, MAX_THREADS)).map(one).collect() })
    }

    /// Waits for threads that were told to end.
    pub fn end(self) -> Outcome<()> {
        let join = |thread: JoinHandle<Outcome<()>>| {
            thread.join().map_err(|_| "an answering thread panicked".to_owned())?
        };
        self.threads.into_iter().try_for_each(join)
    }
}

fn answer(words: &Words, pool: &Pool, work: &Work, thread: usize) -> Outcome<()> {
    let pulls = match work.writes {
        true => pulls(pool, work.pid, work.base, true, (thread, work.threads)),
        false => Vec::new(),
    };
    let (mut done, mut looks) = (0, 0u32);
    loop {
        let asked = words.asked(thread).load(Ordering::Acquire);
        match asked {
            END => return Ok(()),
            _ if asked == done => {
                looks = looks.wrapping_add(1);
                spin(looks);
                continue;
            }
            _ if work.writes => {
                let next = |n: u64| ((work.first + n) % pulls.len() as u64) as usize;
                (done..asked).try_for_each(|n| pulls[next(n)].go())?;
            }
            _ => {}
        }
        done = asked;
        words.done(thread).store(done, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout { size: 64, blocks: 5, requests: 3 };

    #[test]
    fn threads_share_all_blocks_and_a_pull_moves_what_a_transfer_would() {
        for writes in [true, false] {
            let (source, target) = (Pool::new(&[], LAYOUT).unwrap(), Pool::new(&[], LAYOUT).unwrap());
            source.fill(1);
            target.fill(2);
            for thread in 0..MAX_THREADS {
                let base = source.at(0).addr() as u64;
                let pulls = pulls(&target, std::process::id(), base, writes, (thread, MAX_THREADS));
                assert_eq!(pulls.len(), LAYOUT.requests);
                assert!(target.check(2, 1, writes).is_err(), "the last share is missing");
                pulls.iter().try_for_each(Pull::go).unwrap();
            }
            target.check(2, 1, writes).unwrap();
        }
    }

    #[test]
    fn a_pull_that_cannot_be_says_from_whom_and_why() {
        let pool = Pool::new(&[], LAYOUT).unwrap();
        let pull = Pull::new(&pool, std::process::id(), 0, &[(0, 64)]);
        let reason = pull.go().unwrap_err();
        assert!(reason.contains("1 x 64 bytes") && reason.contains("Bad address"), "{reason}");
    }

    #[test]
    fn words_of_the_other_process_are_the_same_page() {
        let words = Words::new().unwrap();
        let theirs = Words::open(&words.path()).unwrap();
        words.asked(1).store(7, Ordering::Release);
        assert_eq!((theirs.asked(1).load(Ordering::Acquire), theirs.done(1).load(Ordering::Acquire)), (7, 0));
        theirs.done(0).store(3, Ordering::Release);
        assert_eq!(words.done(0).load(Ordering::Acquire), 3);
        words.reset();
        assert_eq!(theirs.asked(1).load(Ordering::Acquire), 0);
        assert!(Words::open("/nonexistent").is_err_and(|reason| reason.contains("/nonexistent")));
    }
}
