//! The engine's bounce memory: one pool a fabric, and the thread that lets the pools grow and shrink.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use baton_core::Nanos;
use baton_core::two_sided::pool::{PeerKey, PoolConfig};
use baton_fabric::Fabric;
use parking_lot::{Condvar, Mutex};

use super::{Bounce, SharedBounce};
use crate::peer::Peer;
use crate::shared::Shared;

/// Pools of all fabrics, each made when the first channel on its fabric needs it.
pub(crate) struct Bounces {
    pools: Vec<OnceLock<SharedBounce>>,
    /// Who borrows, as far as it has a session.
    borrowers: Mutex<HashMap<PeerKey, Weak<Peer>>>,
    next_borrower: AtomicU32,
    work: Mutex<bool>,
    arrived: Condvar,
}

/// The tender sleeps no longer than that.
const MAX_SLEEP: Duration = Duration::from_secs(60);

impl Bounces {
    /// For that many fabrics.
    pub fn new(fabrics: usize) -> Bounces {
        Bounces {
            pools: (0..fabrics).map(|_| OnceLock::new()).collect(),
            borrowers: Mutex::default(),
            next_borrower: AtomicU32::new(0),
            work: Mutex::new(false),
            arrived: Condvar::new(),
        }
    }

    /// The pool of a fabric, and a new borrower of it.
    pub fn join(&self, index: usize, fabric: &Arc<dyn Fabric>, now: Nanos) -> (SharedBounce, PeerKey) {
        let config = match fabric.caps().headed_bytes {
            0 => PoolConfig::default(),
            headed_bytes => PoolConfig::for_heads(headed_bytes),
        };
        let bounce = self.pools[index].get_or_init(|| Bounce::new(Arc::clone(fabric), config, now));
        let borrower = PeerKey(self.next_borrower.fetch_add(1, Ordering::Relaxed));
        bounce.lock().pool.join(borrower);
        (Arc::clone(bounce), borrower)
    }

    /// Whom to tell when there are slots again.
    pub fn introduce(&self, borrower: PeerKey, peer: &Arc<Peer>) {
        self.borrowers.lock().insert(borrower, Arc::downgrade(peer));
    }

    /// All that it had came back.
    pub fn leave(&self, index: usize, borrower: PeerKey) {
        self.borrowers.lock().remove(&borrower);
        if let Some(bounce) = self.pools[index].get() {
            bounce.lock().pool.leave(borrower);
        }
    }

    /// Lets the tender look at a pool, if there is something to do there.
    pub fn tend(&self, index: usize, now: Nanos) {
        if self.pools[index].get().is_some_and(|bounce| bounce.lock().pool.wants_service(now)) {
            self.wake();
        }
    }

    /// Lets the tender look around.
    pub fn wake(&self) {
        *self.work.lock() = true;
        self.arrived.notify_one();
    }

    /// Pools that there are, by fabric.
    pub fn pools(&self) -> impl Iterator<Item = (usize, &SharedBounce)> {
        self.pools.iter().enumerate().filter_map(|(index, pool)| Some((index, pool.get()?)))
    }

    fn sleep(&self, until: Instant, stopping: impl Fn() -> bool) {
        let mut work = self.work.lock();
        while !*work && !stopping() {
            if self.arrived.wait_until(&mut work, until).timed_out() {
                break;
            }
        }
        *work = false;
    }
}

impl Shared {
    /// The tender's body: allocates, registers and gives back, which no progress thread may do.
    pub(crate) fn tend_bounces(self: &Arc<Self>) {
        while !self.is_stopping() {
            let mut until = Instant::now() + MAX_SLEEP;
            for (_, bounce) in self.bounces.pools() {
                Bounce::serve(bounce, self.clock.now());
                self.feed_hungry(bounce);
                let now = self.clock.now();
                if let Some(at) = bounce.lock().pool.next_timeout(now) {
                    until = until.min(Instant::now() + Duration::from_nanos(at.since(now)));
                }
            }
            self.bounces.sleep(until, || self.is_stopping());
        }
    }

    fn feed_hungry(self: &Arc<Self>, bounce: &SharedBounce) {
        loop {
            let Some(borrower) = bounce.lock().pool.next_hungry() else { return };
            let peer = self.bounces.borrowers.lock().get(&borrower).and_then(Weak::upgrade);
            let Some(peer) = peer else { continue };
            let mut state = peer.state.lock();
            let path = state.conn.channel().and_then(|channel| channel.two_sided.as_mut());
            if let Some(two) = path.filter(|two| two.borrower == borrower) {
                two.exec.channel.on_pool_changed();
                self.pump(&peer, &mut state);
            }
        }
    }
}
