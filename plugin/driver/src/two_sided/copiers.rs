//! Threads that copy out of bounce slots while whoever drives the channel goes on.
//!
//! ```text
//!   executor --hand_out--> queue --> thread: copy --> Back (what has ended) --take--> executor
//! ```
//! A copy holds all that it touches: its slot, which the pool counts as PLACING, the slab, the region. So nobody waits for a thread but
//! who ends an epoch, and then only for the copies that a thread is at.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use baton_core::two_sided::codec::Status;
use baton_core::two_sided::setup::Ticket;
use parking_lot::{Condvar, Mutex};

use super::{Area, Held};

/// How many threads an engine should have for it: none where they would take the processors from those who send, poll and compute, and
/// more than two do not make memory faster.
pub fn copy_threads() -> usize {
    match std::thread::available_parallelism().map_or(1, usize::from) {
        ..=2 => 0,
        3..=4 => 1,
        _ => 2,
    }
}

/// A copy out of a slot, with all that it touches.
pub(super) struct Copy {
    pub ticket: Ticket,
    pub area: Arc<Area>,
    /// From there in the area.
    pub at: usize,
    /// To there, which is own memory or `held`.
    pub to: u64,
    pub len: u32,
    pub held: Option<Held>,
}

/// A copy that has ended.
pub(super) type Copied = (Ticket, u32, Outcome);

/// How.
#[derive(Clone, Copy, Debug)]
pub(super) enum Outcome {
    /// The bytes are there.
    Placed,
    /// They cannot be placed.
    Failed(Status),
    /// They did not come, or were not wanted any more.
    Lost,
}

impl Copy {
    pub fn run(self) -> Copied {
        // SAFETY: own memory is valid until the transfer was reported, which waits for its copies; a region is held. The slot is not
        // posted again before the copy was reported.
        let well = unsafe { self.area.read_to(self.at, self.to, self.len as usize) };
        drop(self.held);
        (self.ticket, self.len, if well { Outcome::Placed } else { Outcome::Failed(Status::CopyFailed) })
    }
}

/// Copies of all channels.
#[derive(Default)]
pub struct Copiers {
    queue: Mutex<Queue>,
    changed: Condvar,
    copied: AtomicU64,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<(Copy, Arc<Back>)>,
    stop: bool,
}

impl Copiers {
    /// A thread's body: copies until [`Copiers::stop`].
    pub fn work(&self) {
        loop {
            let (copy, back) = {
                let mut queue = self.queue.lock();
                loop {
                    if queue.stop {
                        return;
                    }
                    match queue.jobs.pop_front() {
                        Some(job) => break job,
                        None => self.changed.wait(&mut queue),
                    }
                }
            };
            back.finish(copy.run());
            self.copied.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Copies that the threads have done.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// Ends the threads. What is left in the queue is done by those whose it is.
    pub fn stop(&self) {
        self.queue.lock().stop = true;
        self.changed.notify_all();
    }

    /// `Err`: there is nobody to do it.
    fn push(&self, copy: Copy, back: &Arc<Back>) -> Result<(), Copy> {
        let mut queue = self.queue.lock();
        if queue.stop {
            return Err(copy);
        }
        back.state.lock().out += 1;
        queue.jobs.push_back((copy, Arc::clone(back)));
        drop(queue);
        self.changed.notify_one();
        Ok(())
    }

    /// A copy that no thread has begun.
    fn withdraw(&self, back: &Arc<Back>) -> Option<Copy> {
        let mut queue = self.queue.lock();
        let at = queue.jobs.iter().position(|(_, of)| Arc::ptr_eq(of, back))?;
        queue.jobs.remove(at).map(|(copy, _)| copy)
    }
}

/// Where the copies of one channel come back.
struct Back {
    state: Mutex<BackState>,
    ended: Condvar,
    wake: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct BackState {
    /// Handed out, not yet in `done`.
    out: u32,
    done: Vec<Copied>,
}

impl Back {
    fn finish(&self, copied: Copied) {
        let mut state = self.state.lock();
        state.out -= 1;
        // One call is enough for all that it will find.
        let first = state.done.is_empty();
        state.done.push(copied);
        drop(state);
        self.ended.notify_all();
        if first {
            (self.wake)();
        }
    }
}

/// A channel's share in the threads.
pub(super) struct Outside {
    copiers: Arc<Copiers>,
    back: Arc<Back>,
}

impl Outside {
    /// `wake` is called on one of the threads, under no lock, when there is something for [`Outside::take`].
    pub fn new(copiers: Arc<Copiers>, wake: Box<dyn Fn() + Send + Sync>) -> Outside {
        let back = Back { state: Mutex::default(), ended: Condvar::new(), wake };
        Outside { copiers, back: Arc::new(back) }
    }

    /// Lets a thread do it; `Err`: there is none any more.
    pub fn hand_out(&self, copy: Copy) -> Result<(), Copy> {
        self.copiers.push(copy, &self.back)
    }

    /// What has ended, behind what is in `into`; `true`: something, and nothing is under way any more.
    pub fn take(&self, into: &mut Vec<Copied>) -> bool {
        let mut state = self.back.state.lock();
        let last = state.out == 0 && !state.done.is_empty();
        into.append(&mut state.done);
        last
    }

    /// Ends all that was handed out: what no thread has begun is done here.
    pub fn take_all(&self, into: &mut Vec<Copied>) {
        while let Some(copy) = self.copiers.withdraw(&self.back) {
            self.back.state.lock().out -= 1;
            into.push(copy.run());
        }
        let mut state = self.back.state.lock();
        while state.out > 0 {
            // A thread is at it: at most a slot's bytes. Giving up is not possible, it may still write.
            if self.back.ended.wait_for(&mut state, Duration::from_secs(1)).timed_out() {
                tracing::warn!("{} copies out of bounce slots have not ended after a second", state.out);
            }
        }
        into.append(&mut state.done);
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        self.take_all(&mut Vec::new());
    }
}
