//! Transfers of an engine to itself: no session, the bytes are copied by a worker, notifications are delivered here.

use crate::err;
use crate::inbox::Notification;
use crate::shared::Shared;
use crate::transfer::{RemoteSide, Xfer};
use baton_core::plan::Pair;
use baton_fabric::Op;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes copied per turn, by the worker or by a thread that asks for a status.
const SLICE_BYTES: u64 = 256 * 1024;

struct Job {
    xfer: Arc<Xfer>,
    next_piece: usize,
    done_in_piece: u64,
    cancelled: bool,
}

/// Queue of self transfers, first come first served.
pub(crate) struct SelfCopies {
    jobs: Mutex<VecDeque<Job>>,
    wake: Condvar,
}

impl SelfCopies {
    pub(crate) fn new() -> SelfCopies {
        SelfCopies { jobs: Mutex::new(VecDeque::new()), wake: Condvar::new() }
    }

    /// Queues a begun transfer.
    pub(crate) fn submit(&self, xfer: Arc<Xfer>) {
        self.jobs.lock().push_back(Job { xfer, next_piece: 0, done_in_piece: 0, cancelled: false });
        self.wake.notify_one();
    }

    /// Marks a queued transfer as cancelled; it ends at its next slice.
    pub(crate) fn cancel(&self, xfer: &Arc<Xfer>) {
        if let Some(job) = self.jobs.lock().iter_mut().find(|job| Arc::ptr_eq(&job.xfer, xfer)) {
            job.cancelled = true;
        }
    }

    /// Copies one slice if there is work that nobody else is copying.
    pub(crate) fn help(&self, shared: &Shared) -> bool {
        let Some(mut jobs) = self.jobs.try_lock() else { return false };
        Self::turn(&mut jobs, shared)
    }

    // Copying happens under the queue's lock: the slices are small, posts wait for one slice at most.
    fn turn(jobs: &mut VecDeque<Job>, shared: &Shared) -> bool {
        let Some(job) = jobs.front_mut() else { return false };
        if job.cancelled {
            let job = jobs.pop_front();
            job.into_iter()
                .for_each(|job| job.xfer.finish(Err(err!(Canceled, "the transfer was cancelled"))));
            return true;
        }
        let mut budget = SLICE_BYTES;
        while budget > 0 {
            let Some(piece) = job.xfer.plan.pieces().get(job.next_piece) else { break };
            let len = (piece.len_bytes - job.done_in_piece).min(budget);
            if let Err(why) = copy(&job.xfer, piece, job.done_in_piece, len) {
                let text = format!(
                    "copying {} bytes between {:#x} and {:#x}: {why}",
                    piece.len_bytes, piece.local_addr, piece.remote_addr
                );
                if let Some(job) = jobs.pop_front() {
                    job.xfer.told.lock().take();
                    job.xfer.finish(Err(err!(
                        Local,
                        "{text}; the memory is registered but not mapped as the transfer needs it"
                    )));
                }
                return true;
            }
            budget -= len;
            job.done_in_piece += len;
            if job.done_in_piece == piece.len_bytes {
                job.next_piece += 1;
                job.done_in_piece = 0;
            }
        }
        if job.next_piece == job.xfer.plan.pieces().len()
            && let Some(job) = jobs.pop_front()
        {
            let told = job.xfer.told.lock().take().unwrap_or_default();
            if let Some(id) = told.id {
                shared.land(None, id);
            }
            if let Some(message) = told.message {
                shared.deliver(Notification::own(shared.own_name(), message));
            }
            job.xfer.finish(Ok(()));
        }
        true
    }

    /// The worker's loop; ends when the engine stops.
    pub(crate) fn work(&self, shared: &Shared) {
        let mut jobs = self.jobs.lock();
        while !shared.is_stopping() {
            if Self::turn(&mut jobs, shared) {
                MutexGuard::bump(&mut jobs);
            } else {
                self.wake.wait(&mut jobs);
            }
        }
        jobs.drain(..).for_each(|job| job.xfer.finish(Err(err!(Shutdown, "the engine is going away"))));
    }

    /// Wakes the worker so that it sees the engine stop.
    pub(crate) fn stop(&self) {
        let _queue = self.jobs.lock();
        self.wake.notify_all();
    }
}

fn copy(xfer: &Xfer, piece: &Pair, from: u64, len: u64) -> std::io::Result<()> {
    let (local, remote) = (piece.local_addr + from, piece.remote_addr + from);
    let (source, target) = match xfer.op {
        Op::Write => (local, remote),
        Op::Read => (remote, local),
    };
    debug_assert!(matches!(xfer.remotes[piece.remote as usize], RemoteSide::Own(_)));
    // SAFETY: both spans lie inside pinned registrations, as checked when the request was built, and the host promised that
    // registered memory is valid.
    unsafe { crate::host_copy::copy(source, target, len) }
}
