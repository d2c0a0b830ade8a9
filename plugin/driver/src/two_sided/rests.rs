//! Rests of messages whose head was received ([`baton_fabric::Fabric::take`]): they go straight to the host's memory.
//!
//! Memory is touched inside of a call and held for that long only. So whoever withdraws a region, or gives a transfer up, waits for
//! nothing that a peer might not send.

use std::collections::VecDeque;

use baton_core::two_sided::channel::Channel;
use baton_core::two_sided::codec::{Direction, Status};
use baton_core::two_sided::setup::{Place, PlaceJob, TwoSetup};
use baton_fabric::{EndpointId, Fabric, Rest, Untaken};

use super::copiers::{Copied, Outcome};
use super::{Held, Regions};

/// Rests of one call.
const BATCH: usize = 32;

/// So many calls may come to nothing before the oldest rest is given up: a fabric that cannot say why must not be asked for ever.
const VAIN_CALLS: u32 = 16;

/// What waits on one lane, oldest first.
struct Lane {
    endpoint: EndpointId,
    jobs: VecDeque<Job>,
    /// The oldest is not all here, and the fabric will tell when there is more.
    later: bool,
}

/// `told`: how it ended is known already, and it goes nowhere.
struct Job {
    job: PlaceJob,
    told: bool,
}

/// Rests of one channel.
pub(super) struct Rests {
    lanes: Vec<Lane>,
    waiting: usize,
    // Working space.
    held: Vec<Held>,
    rests: Vec<Rest>,
}

impl Rests {
    /// `heads`: there will be any.
    pub fn new(setup: &TwoSetup, heads: bool) -> Rests {
        let lanes = setup.lanes.iter().map(|lane| Lane {
            endpoint: lane.endpoint,
            jobs: VecDeque::with_capacity(if heads { lane.rq_depth as usize } else { 0 }),
            later: false,
        });
        let (held, rests) = (Vec::with_capacity(BATCH), Vec::with_capacity(BATCH));
        Rests { lanes: lanes.collect(), waiting: 0, held, rests }
    }

    /// One more, behind the others of its endpoint.
    pub fn push(&mut self, endpoint: EndpointId, job: PlaceJob) {
        let lane = self.lanes.iter_mut().find(|lane| lane.endpoint == endpoint);
        let lane = lane.expect("heads arrive on lanes");
        lane.jobs.push_back(Job { job, told: false });
        self.waiting += 1;
    }

    /// There is more of the rest that was not all here.
    pub fn more(&mut self, endpoint: EndpointId) {
        self.lanes.iter_mut().filter(|lane| lane.endpoint == endpoint).for_each(|lane| lane.later = false);
    }

    /// Takes what is here; `ended`: what is not is lost.
    pub fn take(
        &mut self,
        fabric: &dyn Fabric,
        channel: &Channel,
        regions: &dyn Regions,
        ended: bool,
        out: &mut Vec<Copied>,
    ) {
        if self.waiting == 0 {
            return;
        }
        let Rests { lanes, held, rests, .. } = self;
        for lane in lanes.iter_mut() {
            if lane.later && !ended && !lane.is_unwanted(channel) {
                continue;
            }
            let mut vain = 0;
            while !lane.jobs.is_empty() {
                lane.prepare(channel, regions, held, rests, out);
                let (whole, untaken) = fabric.take(lane.endpoint, rests);
                held.clear();
                lane.tell(whole, Outcome::Placed, out);
                lane.later = untaken == Some(Untaken::Later);
                match untaken {
                    None if whole > 0 => vain = 0,
                    None => {
                        vain += 1;
                        match vain {
                            ..VAIN_CALLS => {}
                            VAIN_CALLS => lane.give_up(out),
                            // Not even dropping it helps: the watchdog of the epoch ends this, or that has happened.
                            _ if ended => lane.tell(usize::MAX, Outcome::Lost, out),
                            _ => break,
                        }
                    }
                    Some(Untaken::Unmapped) => lane.tell(1, Outcome::Failed(Status::CopyFailed), out),
                    Some(Untaken::Later) if !ended => break,
                    Some(Untaken::Later | Untaken::Gone) => lane.tell(usize::MAX, Outcome::Lost, out),
                }
            }
        }
        self.waiting = self.lanes.iter().map(|lane| lane.jobs.len()).sum();
    }
}

impl Lane {
    /// The oldest has ceased to be wanted, which was not told.
    fn is_unwanted(&self, channel: &Channel) -> bool {
        self.jobs.front().is_some_and(|Job { job, told }| !told && !channel.wants(&job.ticket))
    }

    /// Says where the next rests go. What ceased to be wanted, or may not be placed any more, goes nowhere and is told at once.
    fn prepare(
        &mut self,
        channel: &Channel,
        regions: &dyn Regions,
        held: &mut Vec<Held>,
        rests: &mut Vec<Rest>,
        out: &mut Vec<Copied>,
    ) {
        rests.clear();
        for Job { job, told } in self.jobs.iter_mut().take(BATCH) {
            let wanted = job.rest.is_some_and(|rest| rest.wanted) && channel.wants(&job.ticket);
            let mut to = None;
            if !*told && !wanted {
                out.push((job.ticket, job.len, Outcome::Lost));
                *told = true;
            } else if !*told {
                match place(job, regions, held) {
                    Ok(addr) => to = Some(addr),
                    Err(status) => {
                        out.push((job.ticket, job.len, Outcome::Failed(status)));
                        *told = true;
                    }
                }
            }
            rests.push(Rest { to, len_bytes: job.len });
        }
    }

    /// The oldest cannot be placed, and goes nowhere.
    fn give_up(&mut self, out: &mut Vec<Copied>) {
        let Some(Job { job, told }) = self.jobs.front_mut() else { return };
        if !std::mem::replace(told, true) {
            out.push((job.ticket, job.len, Outcome::Failed(Status::CopyFailed)));
        }
    }

    /// That is how the first `count` ended.
    fn tell(&mut self, count: usize, outcome: Outcome, out: &mut Vec<Copied>) {
        for Job { job, told } in self.jobs.drain(..count.min(self.jobs.len())) {
            if !told {
                out.push((job.ticket, job.len, outcome));
            }
        }
    }
}

/// Where it goes, which is own memory or held.
fn place(job: &PlaceJob, regions: &dyn Regions, held: &mut Vec<Held>) -> Result<u64, Status> {
    match job.to {
        Place::Local(addr) => Ok(addr),
        Place::Region(region, offset) => {
            // Once more: it may have been withdrawn since the chunk was checked.
            let hold = regions.hold(region, offset, job.len.into(), Direction::Write)?;
            let addr = hold.addr();
            held.push(hold);
            Ok(addr)
        }
    }
}
