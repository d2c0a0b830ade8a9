//! Rests of messages whose head was received: taken late, in order, or lost with their epoch, as the driver of the real engine does it.

use super::checker::Way;
use super::death::{REST_NS, RESUME_NS};
use super::drive::Later;
use super::swarm::Swarm;
use crate::{Check, Neglect};
use baton_core::two_sided::channel::Channel;
use baton_core::two_sided::codec::Status;
use baton_core::two_sided::setup::{Place, PlaceJob, RestOf};
use baton_fabric::{EndpointId, Fabric, Rest, Untaken};
use std::collections::{BTreeMap, VecDeque};

/// Rests of one side of an epoch.
#[derive(Default)]
pub(super) struct Rests(BTreeMap<EndpointId, Lane>);

/// What waits on one lane, oldest first.
#[derive(Default)]
struct Lane {
    jobs: VecDeque<Job>,
    /// The oldest is not all here, and the fabric will tell when there is more.
    later: bool,
}

/// `told`: how it ended is known already, and it goes nowhere.
struct Job {
    job: PlaceJob,
    told: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Placed,
    Failed(Status),
    Lost,
}

struct Told {
    job: PlaceJob,
    outcome: Outcome,
}

fn address(job: &PlaceJob, base: u64) -> u64 {
    match job.to {
        Place::Local(addr) => addr,
        Place::Region(_, offset) => base + offset,
    }
}

impl Rests {
    /// One more, behind the others of its endpoint.
    pub fn push(&mut self, rest: RestOf, job: PlaceJob) {
        self.0.entry(rest.endpoint).or_default().jobs.push_back(Job { job, told: false });
    }

    /// There is more of the rest that was not all here.
    pub fn more(&mut self, endpoint: EndpointId) {
        if let Some(lane) = self.0.get_mut(&endpoint) {
            lane.later = false;
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.values().all(|lane| lane.jobs.is_empty())
    }

    fn waiting(&self) -> Vec<EndpointId> {
        self.0.iter().filter(|(_, lane)| !lane.jobs.is_empty()).map(|(endpoint, _)| *endpoint).collect()
    }
}

impl Job {
    fn told(&self, outcome: Outcome) -> Told {
        Told { job: self.job, outcome }
    }
}

impl Lane {
    /// The oldest has ceased to be wanted, which was not told.
    fn is_unwanted(&self, channel: &Channel) -> bool {
        self.jobs.front().is_some_and(|Job { job, told }| !told && !channel.wants(&job.ticket))
    }

    /// Says where the next rests go. What ceased to be wanted goes nowhere and is told at once.
    fn prepare(&mut self, channel: &Channel, base: u64, most: usize, out: &mut Vec<Told>) -> Vec<Rest> {
        let mut rests = Vec::new();
        for next in self.jobs.iter_mut().take(most) {
            let job = &next.job;
            let wanted = job.rest.is_some_and(|rest| rest.wanted) && channel.wants(&job.ticket);
            let to = (wanted && !next.told).then(|| address(job, base));
            rests.push(Rest { to, len_bytes: job.len });
            if !wanted && !next.told {
                out.push(next.told(Outcome::Lost));
                next.told = true;
            }
        }
        rests
    }

    /// That is how the first `count` ended.
    fn tell(&mut self, count: usize, outcome: Outcome, out: &mut Vec<Told>) {
        let ended = self.jobs.drain(..count.min(self.jobs.len()));
        out.extend(ended.filter(|job| !job.told).map(|job| job.told(outcome)));
    }
}

impl Swarm {
    /// Takes some rests of some lane.
    pub(super) fn take_some(&mut self, way @ (link, side): Way) -> Check {
        let Some(open) = &self.links[link].sides[side].open else { return Ok(()) };
        let waiting = open.rests.waiting();
        if waiting.is_empty() {
            return Ok(());
        }
        let endpoint = waiting[self.rng.below(waiting.len() as u64) as usize];
        let most = self.rng.between(1, 4) as usize;
        self.take(way, endpoint, most)
    }

    /// Takes or loses all rests of a channel that has ended.
    pub(super) fn end_rests(&mut self, way @ (link, side): Way) -> Check {
        while let Some(open) = &self.links[link].sides[side].open
            && let Some(endpoint) = open.rests.waiting().first().copied()
        {
            self.take(way, endpoint, usize::MAX)?;
        }
        Ok(())
    }

    fn take(&mut self, way @ (link, side): Way, endpoint: EndpointId, most: usize) -> Check {
        let node = self.links[link].nodes[side];
        let base = self.cells[node].base;
        let Some(open) = &mut self.links[link].sides[side].open else { return Ok(()) };
        let Some(lane) = open.rests.0.get_mut(&endpoint) else { return Ok(()) };
        let ended = open.channel.end_reason().is_some();
        if lane.later && !ended && !lane.is_unwanted(&open.channel) {
            return Ok(());
        }
        let mut out = Vec::new();
        let rests = lane.prepare(&open.channel, base, most, &mut out);
        let unwanted = out.len();
        let (whole, untaken) = self.fabrics[node].take(endpoint, &rests);
        self.busy |= whole > 0 || unwanted > 0;
        lane.tell(whole, Outcome::Placed, &mut out);
        lane.later = untaken == Some(Untaken::Later);
        match untaken {
            None if whole > 0 => {}
            None => return Err(format!("{way:?}: a call for {rests:?} came to nothing")),
            Some(Untaken::Unmapped) => lane.tell(1, Outcome::Failed(Status::CopyFailed), &mut out),
            Some(Untaken::Later) if !ended => {}
            Some(Untaken::Later | Untaken::Gone) => lane.tell(usize::MAX, Outcome::Lost, &mut out),
        }
        self.reached.rests_unwanted += unwanted as u64;
        for (nth, told) in out.iter().enumerate() {
            self.rest_ended(way, told, nth < unwanted);
        }
        self.pump(way)
    }

    fn rest_ended(&mut self, (link, side): Way, told: &Told, unwanted: bool) {
        let (now, node) = (self.now(), self.links[link].nodes[side]);
        let Told { job, mut outcome } = *told;
        self.busy = true;
        if outcome == Outcome::Lost {
            self.reached.rests_lost += u64::from(!unwanted);
            if self.neglects(Neglect::RestsTold) && !unwanted {
                outcome = Outcome::Placed;
            }
            self.place_late(node, &job);
        } else {
            self.reached.rests_taken += 1;
        }
        let Some(open) = &mut self.links[link].sides[side].open else { return };
        let pool = &mut self.bounces[node].pool;
        match outcome {
            Outcome::Placed => open.channel.on_placed(now, job.ticket, job.len, Ok(()), pool),
            Outcome::Failed(status) => open.channel.on_placed(now, job.ticket, job.len, Err(status), pool),
            Outcome::Lost => open.channel.on_lost(job.ticket, pool),
        }
    }

    /// For tests of the checkers: a rest that was lost is put to its place at some time.
    fn place_late(&mut self, node: usize, job: &PlaceJob) {
        if self.neglects(Neglect::RestsLate) && job.rest.is_some_and(|rest| rest.wanted) {
            let addr = address(job, self.cells[node].base);
            let bytes = vec![0; job.len as usize];
            self.schedule(RESUME_NS + REST_NS, Later::Stray { node, addr, bytes });
        }
    }
}
