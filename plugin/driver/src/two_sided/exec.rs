//! One channel, its memory and its endpoints.

use std::cell::RefCell;
use std::sync::Arc;

use baton_core::Nanos;
use baton_core::two_sided::channel::{Channel, Durable, TwoClosed};
use baton_core::two_sided::setup::TwoSetup;
use baton_fabric::{Completion, CompletionKind, EndpointId, Fabric};

use super::bounce::Slabs;
use super::copiers::{Copied, Outcome, Outside};
use super::post::Post;
use super::rests::Rests;
use super::view::{Found, View};
use super::{ChannelArea, Copiers, Regions, SharedBounce};

/// Bytes that [`Executor::drive`] copies itself where there are threads that do it as well.
const OWN_COPY_BYTES: u32 = 256 * 1024;

/// A channel on its fabric.
///
/// The pool is locked to decide and to count, never while something is posted or bytes are copied.
pub struct Executor {
    /// The machine.
    pub channel: Channel,
    bounce: SharedBounce,
    slabs: Arc<Slabs>,
    post: Post,
    /// Rails of the lanes, each once.
    rails: Vec<u8>,
    found: RefCell<Found>,
    copied: Vec<Copied>,
    rests: Rests,
    outside: Option<Outside>,
}

impl Executor {
    /// Begins an epoch: the RECVs are posted, the endpoints connected.
    pub fn new(
        fabric: Arc<dyn Fabric>,
        bounce: SharedBounce,
        area: ChannelArea,
        regions: Arc<dyn Regions>,
        setup: TwoSetup,
        durable: Durable,
        now: Nanos,
    ) -> Executor {
        let slabs = Arc::clone(bounce.lock().slabs());
        let mut rails: Vec<u8> = setup.lanes.iter().map(|lane| fabric.rail(lane.endpoint)).collect();
        rails.sort_unstable();
        rails.dedup();
        let heads = setup.lanes.iter().all(|lane| fabric.receive_heads(lane.endpoint));
        let post = Post::new(fabric, Arc::clone(&slabs), area, regions, &setup, heads);
        let rests = Rests::new(&setup, heads);
        let channel = Channel::new(setup, durable, now);
        Executor {
            channel,
            bounce,
            slabs,
            post,
            rails,
            found: RefCell::default(),
            copied: Vec::new(),
            rests,
            outside: None,
        }
    }

    /// Lets these threads do what is much to copy. `wake` is called on one of them, under no lock, when copies have ended: then
    /// [`Executor::drive`] is due.
    pub fn set_copiers(&mut self, copiers: Arc<Copiers>, wake: Box<dyn Fn() + Send + Sync>) {
        self.outside = Some(Outside::new(copiers, wake));
    }

    /// Bytes of registered memory that are this channel's alone.
    pub fn area_bytes(&self) -> usize {
        self.post.area().len_bytes()
    }

    /// Its endpoints, control first.
    pub fn endpoints(&self) -> Vec<EndpointId> {
        self.post.endpoints().collect()
    }

    /// The pool that its RECVs are lent by.
    pub fn bounce(&self) -> SharedBounce {
        Arc::clone(&self.bounce)
    }

    /// A completion of one of its endpoints (or of another, which the channel ignores).
    pub fn on_completion(&mut self, now: Nanos, done: &Completion) {
        self.on_completions(now, std::slice::from_ref(done));
    }

    /// Completions, in order.
    pub fn on_completions(&mut self, now: Nanos, done: &[Completion]) {
        let view = view(&self.post, &self.slabs, &self.rails, None);
        let mut bounce = self.bounce.lock();
        for done in done {
            self.channel.on_completion(now, done, &view, &mut bounce.pool);
        }
        drop(bounce);
        for done in done {
            match done.kind {
                CompletionKind::Send => self.post.on_sent(done),
                CompletionKind::RecvMore => self.rests.more(done.endpoint),
                _ => {}
            }
        }
    }

    /// Re-reads the credit page; `true`: there is more.
    pub fn poll_credit(&mut self) -> bool {
        self.channel.poll_credit(&view(&self.post, &self.slabs, &self.rails, None))
    }

    /// Deadlines.
    pub fn on_timeout(&mut self, now: Nanos) {
        self.channel.on_timeout(now, &self.bounce.lock().pool);
    }

    /// Carries out everything that there is to do; `true`: there was something.
    pub fn drive(&mut self, now: Nanos) -> bool {
        let mut any = false;
        let mut budget = OWN_COPY_BYTES;
        loop {
            self.copy(&mut budget);
            any |= !self.copied.is_empty();
            let view = view(&self.post, &self.slabs, &self.rails, Some(&self.found));
            let mut bounce = self.bounce.lock();
            for (ticket, len, outcome) in self.copied.drain(..) {
                let pool = &mut bounce.pool;
                match outcome {
                    Outcome::Placed => self.channel.on_placed(now, ticket, len, Ok(()), pool),
                    Outcome::Failed(status) => self.channel.on_placed(now, ticket, len, Err(status), pool),
                    Outcome::Lost => self.channel.on_lost(ticket, pool),
                }
            }
            let action = self.channel.next_action(now, &view, &mut bounce.pool);
            drop(bounce);
            let found = self.found.get_mut();
            let failed = action.as_ref().map(|action| self.post.carry_out(action, found));
            // What was found readable and did not go out after all.
            found.clear();
            let Some(failed) = failed else { return any };
            any = true;
            if let Some(endpoint) = failed {
                if self.post.take_source_failed() {
                    self.channel.on_source_failed(endpoint);
                }
                self.channel.on_post_failed(endpoint);
            }
        }
    }

    /// Does the copies that are due, up to `budget` bytes of them, hands out the others, and takes the rests of messages that are here.
    fn copy(&mut self, budget: &mut u32) {
        let ended = self.channel.end_reason().is_some();
        while let Some(job) = self.channel.next_place() {
            if let Some(rest) = job.rest {
                self.rests.push(rest.endpoint, job);
                continue;
            }
            let copy = match self.post.prepare(&job) {
                Ok(copy) => copy,
                Err(refused) => {
                    self.copied.push(refused);
                    continue;
                }
            };
            let outside = self.outside.as_ref().filter(|_| job.len > *budget && !ended);
            let own = match outside {
                None => copy,
                Some(outside) => match outside.hand_out(copy) {
                    Ok(()) => continue,
                    Err(copy) => copy,
                },
            };
            *budget = budget.saturating_sub(job.len);
            self.copied.push(own.run());
        }
        let (fabric, regions) = (self.post.fabric(), self.post.regions());
        self.rests.take(fabric, &self.channel, regions, ended, &mut self.copied);
        match &self.outside {
            // Whoever ends the epoch finds no copy under way.
            Some(outside) if ended => outside.take_all(&mut self.copied),
            // Nobody else comes by before it idles.
            Some(outside) if outside.take(&mut self.copied) => self.channel.flush(),
            Some(_) => {}
            None => {}
        }
    }

    /// Ends it, after its endpoints were fenced, drained and destroyed.
    pub fn close(self, now: Nanos) -> TwoClosed {
        self.channel.close(now, &mut self.bounce.lock().pool)
    }
}

fn view<'a>(
    post: &'a Post,
    slabs: &'a Slabs,
    rails: &'a [u8],
    found: Option<&'a RefCell<Found>>,
) -> View<'a> {
    View { area: post.area(), slabs, regions: post.regions(), rails, found }
}
