//! Who moves bytes when: events, `poll`, `serve`, `post` and the IO threads all come here.
//!
//! Each half of a connection has a lock that is only ever tried. Who finds it taken leaves a flag (`rx_ready`, `tx_work`)
//! behind, and whoever lets go of the lock looks at the flags afterwards: no work is lost and nobody waits. Only [`take`] does, for somebody
//! who finds that there is nothing to read before it.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use baton_fabric::{Rest, Untaken};
use rustix::event::epoll::EventFlags;

use super::BULK_BYTES;
use super::endpoint::{Endpoint, State};
use super::shared::Shared;

/// Bytes that one endpoint may move before the next one has its turn.
const TURN_BYTES: usize = 512 * 1024;
/// What a turn in which nothing moved counts, so that no loop is endless.
const IDLE_COST: usize = 1024;

/// The kernel reports something about a connection.
pub(super) fn on_event(shared: &Shared, endpoint: &Arc<Endpoint>, flags: EventFlags) {
    if flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR) {
        endpoint.rx_hup.store(true, Ordering::SeqCst);
    }
    if flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR) {
        endpoint.rx_ready.store(true, Ordering::SeqCst);
    }
    if flags.contains(EventFlags::OUT) {
        endpoint.tx_blocked.store(false, Ordering::SeqCst);
    }
    if endpoint.rx_runnable() || endpoint.tx_runnable() {
        shared.push_ready(endpoint);
    }
}

/// Moves up to about `budget` bytes of one endpoint, in both directions. Returns how many.
pub(super) fn run(shared: &Shared, endpoint: &Arc<Endpoint>, budget: usize) -> usize {
    let mut moved = 0;
    fence(Ordering::SeqCst);
    if endpoint.rx_runnable()
        && let Some(mut rx) = endpoint.rx.try_lock()
    {
        moved += rx.pump(shared, endpoint, budget);
    }
    if moved > 0 {
        shared.note_warm(endpoint);
    }
    moved + send(shared, endpoint, budget)
}

/// Like [`run`], for an endpoint of which the kernel has reported nothing.
pub(super) fn look(shared: &Shared, endpoint: &Arc<Endpoint>, budget: usize) -> usize {
    endpoint.rx_ready.store(true, Ordering::SeqCst);
    run(shared, endpoint, TURN_BYTES.min(budget))
}

/// Like [`run`], outbound only.
pub(super) fn send(shared: &Shared, endpoint: &Arc<Endpoint>, budget: usize) -> usize {
    let mut moved = 0;
    fence(Ordering::SeqCst);
    if endpoint.tx_runnable()
        && let Some(mut tx) = endpoint.tx.try_lock()
    {
        moved = tx.pump(shared, endpoint, budget);
    }
    settle(shared, endpoint);
    moved
}

/// Moves the rest of the message whose head was received; there is never more than one.
pub(super) fn take(shared: &Shared, endpoint: &Arc<Endpoint>, rests: &[Rest]) -> (usize, Option<Untaken>) {
    let Some(rest) = rests.first() else { return (0, None) };
    // Whoever has the lock finds out that it may not read, and lets go.
    let untaken = endpoint.rx.lock().take_rest(shared, endpoint, rest);
    if untaken == Some(Untaken::Later) && rest.len_bytes as usize >= BULK_BYTES {
        shared.awaited.store(true, Ordering::Relaxed);
    }
    settle(shared, endpoint);
    (usize::from(untaken.is_none()), untaken)
}

/// After letting go of a lock: what others left behind meanwhile, and the end of a failed endpoint.
pub(super) fn settle(shared: &Shared, endpoint: &Arc<Endpoint>) {
    fence(Ordering::SeqCst);
    if endpoint.state() == State::Failed {
        endpoint.try_flush(shared);
        return;
    }
    let rx = endpoint.rx_runnable() && !endpoint.rx.is_locked();
    let tx = endpoint.tx_runnable() && !endpoint.tx.is_locked();
    if rx || tx {
        shared.push_ready(endpoint);
    }
}

/// Gives every ready endpoint its turn until `budget` bytes have moved. Returns how many did.
pub(super) fn run_ready(shared: &Shared, budget: usize) -> usize {
    let mut moved = 0;
    // Endpoints that become ready again meanwhile come back after those that wait.
    while moved < budget {
        let Some(endpoint) = shared.pop_ready() else { break };
        moved += run(shared, &endpoint, TURN_BYTES.min(budget - moved)).max(IDLE_COST);
    }
    moved
}
