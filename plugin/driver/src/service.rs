//! The service thread: sleeps on events, never spins. It accepts connections, reads lifelines, serves the software
//! fabrics and keeps the timers.

use crate::host_calls::HostWatch;
use crate::lifeline::{Input, Lifeline};
use crate::shared::Shared;
use baton_core::Nanos;
use baton_core::peer::EndReason;
use baton_core::spare;
use baton_core::wire::LifelineFrame;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Re-reading of credit pages while something waits for credit.
const CREDIT_WAIT_SLEEP_NS: u64 = 500_000;
/// Memory of large transfers that nobody used for so long, or twice, goes back.
const SPARES_MS: u64 = 10_000;
/// Longest sleep.
const MAX_SLEEP_NS: u64 = 1_000_000_000;
/// Bulk bytes served between two looks at the other duties.
const SERVE_BUDGET_BYTES: usize = 1024 * 1024;

/// Messages of one lifeline read between two looks at the other duties.
const FRAMES_PER_TURN: usize = 32;

/// Token of the listener in the epoll; lifelines count from 1.
const LISTENER: u64 = 0;

impl Shared {
    /// The thread's body.
    pub(crate) fn service(self: &Arc<Self>) {
        let (mut armed, mut host) = (false, HostWatch::default());
        let mut tend_spares = self.clock.now().plus_ms(SPARES_MS);
        while !self.is_stopping() {
            self.fabrics.iter().for_each(|fabric| fabric.tend());
            let timeout_ns = self.tend_fabrics(&mut armed, &mut host);
            if timeout_ns == 0 || self.sleep(timeout_ns, armed) {
                self.handle_descriptors();
            }
            self.read_unread_lifelines();
            self.hook.run();
            self.run_timers();
            if self.clock.now() >= tend_spares {
                spare::tend();
                tend_spares = self.clock.now().plus_ms(SPARES_MS);
            }
        }
        self.fabrics.iter().for_each(|fabric| fabric.disarm());
    }

    /// Serves and polls; answers how long the thread may sleep.
    fn tend_fabrics(self: &Arc<Self>, armed: &mut bool, host: &mut HostWatch) -> u64 {
        let now = self.clock.now();
        if host.host_is_at_it(&self.host_calls, now) {
            if std::mem::take(armed) {
                self.fabrics.iter().for_each(|fabric| fabric.disarm());
            }
            self.flush_credit_beside_host();
            return host.leave_for_ns(now);
        }
        let mut more = false;
        for fabric in &self.fabrics {
            more |= fabric.serve(SERVE_BUDGET_BYTES);
        }
        if self.poll() | more {
            self.spinner.kick();
            return 0;
        }
        self.flush_credit();
        *armed = true;
        if !self.fabrics.iter().all(|fabric| fabric.arm()) {
            // Most likely a caller is at what waits, and it may wait for this processor.
            std::thread::yield_now();
            return 0;
        }
        if self.credit_waiters_count.load(Ordering::Relaxed) > 0 {
            return CREDIT_WAIT_SLEEP_NS;
        }
        self.next_timer().map_or(MAX_SLEEP_NS, |at| at.since(self.clock.now()).clamp(1, MAX_SLEEP_NS))
    }

    /// Until something happens or the time is over; whether a listener or lifeline has something.
    fn sleep(&self, timeout_ns: u64, armed: bool) -> bool {
        let mut fds = Vec::with_capacity(2 + self.fabrics.len());
        fds.push(PollFd::new(&self.wake_fd, PollFlags::IN));
        fds.push(PollFd::new(&self.epoll, PollFlags::IN));
        let fabric_fds = self.fabrics.iter().filter(|_| armed).filter_map(|fabric| fabric.event_fd());
        for fd in fabric_fds {
            // SAFETY: a fabric's event descriptor lives as long as the fabric, which `self` keeps alive.
            fds.push(PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(fd) }, PollFlags::IN));
        }
        let timeout = Timespec {
            tv_sec: (timeout_ns / 1_000_000_000) as i64,
            tv_nsec: (timeout_ns % 1_000_000_000) as i64,
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => tracing::error!("service thread: poll: {e}"),
        }
        if fds[0].revents().contains(PollFlags::IN) {
            self.service_wake.store(false, Ordering::Release);
            // Only empties the counter; a race with another wake leaves it readable, which is right.
            let _drained = rustix::io::read(&self.wake_fd, &mut [0u8; 8]);
        }
        !fds[1].revents().is_empty()
    }

    /// Makes the service thread look around.
    pub(crate) fn wake_service(&self) {
        if !self.service_wake.swap(true, Ordering::AcqRel)
            && let Err(e) = rustix::io::write(&self.wake_fd, &1u64.to_ne_bytes())
        {
            tracing::error!("waking the service thread: {e}");
        }
    }

    fn handle_descriptors(self: &Arc<Self>) {
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 32];
        let no_wait = Timespec { tv_sec: 0, tv_nsec: 0 };
        let (ready, _) = match epoll::wait(&self.epoll, &mut events, Some(&no_wait)) {
            Ok(ready) => ready,
            Err(rustix::io::Errno::INTR) => return,
            Err(e) => return tracing::error!("service thread: epoll: {e}"),
        };
        for event in ready {
            match event.data.u64() {
                LISTENER => self.accept(),
                id => {
                    let lifeline = self.lifelines.lock().get(&id).cloned();
                    lifeline.into_iter().for_each(|lifeline| self.read_lifeline(&lifeline));
                }
            }
        }
    }

    /// Watches the listener from now on.
    pub(crate) fn watch_listener(&self, listener: impl AsFd) -> std::io::Result<()> {
        Ok(epoll::add(&self.epoll, listener, EventData::new_u64(LISTENER), EventFlags::IN)?)
    }

    /// Stops watching the listener.
    pub(crate) fn unwatch_listener(&self) {
        if let Err(e) = epoll::delete(&self.epoll, &self.listener) {
            tracing::warn!("listener: {e}");
        }
    }

    fn resume_listener(&self, now: Nanos) {
        let at = self.listener_resumes_ns.load(Ordering::Relaxed);
        if at == 0 || now.0 < at {
            return;
        }
        match self.watch_listener(&self.listener) {
            Ok(()) => self.listener_resumes_ns.store(0, Ordering::Relaxed),
            Err(e) => tracing::warn!("listener: {e}"),
        }
    }

    /// Watches a lifeline from now on; whatever arrived already is reported as well.
    pub(crate) fn watch_lifeline(&self, lifeline: &Arc<Lifeline>) -> std::io::Result<()> {
        self.lifelines.lock().insert(lifeline.id, Arc::clone(lifeline));
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        Ok(epoll::add(&self.epoll, lifeline.fd(), EventData::new_u64(lifeline.id), flags)?)
    }

    /// Stops watching a lifeline; whether it was watched until now.
    pub(crate) fn forget_lifeline(&self, lifeline: &Lifeline) -> bool {
        self.revokes.forget(lifeline.id);
        let watched = self.lifelines.lock().remove(&lifeline.id).is_some();
        if watched && let Err(e) = epoll::delete(&self.epoll, lifeline.fd()) {
            tracing::warn!("lifeline of {}: {e}", lifeline.peer.name());
        }
        watched
    }

    /// Reads what came, within limits: a peer that never stops talking gets its turn like everybody else.
    pub(crate) fn read_lifeline(self: &Arc<Self>, lifeline: &Arc<Lifeline>) {
        lifeline.flush();
        for _ in 0..FRAMES_PER_TURN {
            let (why, broken) = match lifeline.receive(self.clock.now()) {
                Input::Nothing => return,
                Input::Frame(frame) => {
                    self.on_lifeline_frame(lifeline, frame);
                    continue;
                }
                Input::Broken(why) => (why, true),
                Input::End(why) => (why, false),
            };
            if self.forget_lifeline(lifeline) && broken {
                self.counters.lifelines_broken.fetch_add(1, Ordering::Relaxed);
            }
            return self.end_epoch_of(lifeline, EndReason::PeerGone(why));
        }
        // What is left makes no further event.
        let mut unread = self.unread_lifelines.lock();
        if !unread.iter().any(|other| other.id == lifeline.id) {
            unread.push(Arc::clone(lifeline));
        }
        drop(unread);
        self.wake_service();
    }

    fn read_unread_lifelines(self: &Arc<Self>) {
        let unread = std::mem::take(&mut *self.unread_lifelines.lock());
        unread.iter().for_each(|lifeline| self.read_lifeline(lifeline));
    }

    fn on_lifeline_frame(self: &Arc<Self>, lifeline: &Arc<Lifeline>, frame: LifelineFrame) {
        match frame {
            LifelineFrame::Ping { n } => lifeline.send(&LifelineFrame::Pong { n }),
            LifelineFrame::Pong { .. } | LifelineFrame::DrainAck { .. } => {}
            LifelineFrame::Fence { epoch, reason } if epoch == lifeline.epoch => {
                self.end_epoch_of(lifeline, EndReason::PeerFenced(reason));
            }
            LifelineFrame::Fence { epoch, .. } => {
                self.counters.stale_fences.fetch_add(1, Ordering::Relaxed);
                tracing::debug!("FENCE of another epoch ({}) ignored", epoch.0)
            }
            LifelineFrame::SessionClose { reason } => {
                self.end_epoch_of(lifeline, EndReason::PeerClosed(reason))
            }
            LifelineFrame::Violation { text } => {
                self.end_epoch_of(
                    lifeline,
                    EndReason::PeerFenced(format!("the peer accuses us of a violation: {text}")),
                );
            }
            LifelineFrame::Revoke { id, regions } => {
                self.registry.write().revoke(lifeline.peer.instance, &regions);
                self.drain_revoked(lifeline, id, &regions);
            }
            LifelineFrame::RevokeAck { id } => self.revokes.acknowledge(lifeline.id, id),
        }
    }

    fn end_epoch_of(self: &Arc<Self>, lifeline: &Arc<Lifeline>, reason: EndReason) {
        let peer = &lifeline.peer;
        let mut state = peer.state.lock();
        let ours = state
            .conn
            .channel()
            .is_some_and(|channel| channel.lifeline.as_ref().is_some_and(|l| l.id == lifeline.id));
        if ours {
            self.end_epoch(peer, &mut state, reason);
        }
    }

    /// Earliest time at which a session or a lifeline wants to look at the clock.
    fn next_timer(&self) -> Option<Nanos> {
        let lifelines = self.lifelines.lock().values().filter_map(|l| l.next_timeout()).min();
        let sessions = self.peers.read().values().filter_map(|peer| peer.next_timeout()).min();
        let listener = self.listener_resumes_ns.load(Ordering::Relaxed);
        let listener = (listener > 0).then_some(Nanos(listener));
        lifelines.into_iter().chain(sessions).chain(listener).min()
    }

    fn run_timers(self: &Arc<Self>) {
        let now = self.clock.now();
        if now < Nanos(self.next_timer_check_ns.load(Ordering::Relaxed)) {
            return;
        }
        self.next_timer_check_ns.store(now.plus_ms(TIMER_GRAIN_MS).0, Ordering::Relaxed);
        self.resume_listener(now);
        let lifelines: Vec<_> = self.lifelines.lock().values().cloned().collect();
        for lifeline in lifelines {
            if let Err(silent) = lifeline.on_timer(now) {
                self.end_epoch_of(&lifeline, EndReason::PeerGone(silent));
            }
        }
        let peers: Vec<_> = self.peers.read().values().cloned().collect();
        for peer in peers {
            self.run_peer_timers(&peer, now);
        }
    }
}

/// Timers are looked at no more often than this.
const TIMER_GRAIN_MS: u64 = 5;
