//! A provider made of memory and threads.
//!
//! [`Fake`] is a network of devices that exist in this process only. Its [`Library`] behaves as libibverbs does: functions to
//! list and open devices, contexts with a table of their own, objects, descriptors. Work requests copy this process' memory,
//! after the checks that a device makes, on a worker thread and in an order that reliable connections permit: the seed chooses
//! among the permitted ones. It is stricter than any device where that finds faults: entries of a queue come free when their
//! completion is *polled*, failed completions carry a wrong operation, devices hand out equal numbers and equal keys. On top it
//! has faults that no soft device shows, as configuration ([`DeviceConfig`]) and on demand ([`FakeDevice`]).
//!
//! What a correct program never does is noted as a violation; dropping the fake with violations panics.

mod abi;
mod config;
mod create;
mod dma;
mod engine;
mod events;
mod model;
mod modify;
mod objects;
mod post;
mod slots;
mod sysfs;
#[cfg(test)]
mod tests;
mod vram;

pub use config::{DeviceConfig, FakeConfig, FakeGid, PortConfig, ReadTiming};

pub use vram::dmabuf;

use crate::library::Library;
use engine::Step;
use model::{About, State};
use objects::Shared;
use rdma_sys::ibv_event_type;
use std::sync::Arc;
use std::time::Instant;

/// Objects that are alive on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Live {
    /// Open contexts.
    pub contexts: usize,
    /// Protection domains.
    pub pds: usize,
    /// Memory regions.
    pub mrs: usize,
    /// Completion channels.
    pub channels: usize,
    /// Completion queues.
    pub cqs: usize,
    /// Queue pairs.
    pub qps: usize,
}

impl State {
    fn live(&self, device: usize) -> Live {
        Live {
            contexts: self.contexts.values().filter(|it| it.device == device).count(),
            pds: self.pds.values().filter(|it| it.device == device).count(),
            mrs: self.mrs.values().filter(|it| it.device == device).count(),
            channels: self.channels.values().filter(|it| it.device == device).count(),
            cqs: self.cqs.values().filter(|it| it.device == device).count(),
            qps: self.qps.values().filter(|it| it.device == device).count(),
        }
    }
}

/// A network of devices in this process. It works on until it is dropped and every context of it is closed.
pub struct Fake {
    shared: Arc<Shared>,
    slots: std::sync::Mutex<Vec<slots::Slot>>,
}

impl Fake {
    /// Builds the devices and starts them.
    pub fn new(config: FakeConfig) -> Fake {
        let shared = Arc::new(Shared::new(State::new(config)));
        let worker = Arc::clone(&shared);
        std::thread::Builder::new()
            .name("fake-verbs".into())
            .spawn(move || work(&worker))
            .expect("a thread for the fake's devices");
        Fake { shared, slots: std::sync::Mutex::default() }
    }

    /// A library that lists all devices.
    pub fn library(&self) -> Library {
        let count = self.shared.look().devices.len();
        self.library_of_indices((0..count).collect())
    }

    /// A library that lists these devices only, as another host's would. Panics on a name that there is not.
    pub fn library_of(&self, names: &[&str]) -> Library {
        self.library_of_indices(names.iter().map(|name| self.index(name)).collect())
    }

    fn library_of_indices(&self, devices: Vec<usize>) -> Library {
        let (slot, api) = slots::take(Arc::clone(&self.shared), devices);
        self.slots.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(slot);
        // SAFETY: behaving as libibverbs does is what the fake is for.
        unsafe { Library::from_api(api) }
    }

    fn index(&self, name: &str) -> usize {
        let state = self.shared.look();
        let found = state.devices.iter().position(|device| device.config.name == name);
        found.unwrap_or_else(|| panic!("the fake has no device {name}"))
    }

    /// A device, to look at it and to do it harm. Panics on a name that there is not.
    pub fn device(&self, name: &str) -> FakeDevice<'_> {
        FakeDevice { fake: self, index: self.index(name) }
    }

    /// Keeps back the data of READs while `held`: what follows them without a fence goes on.
    pub fn hold_reads(&self, held: bool) {
        self.shared.change().reads_held = held;
    }

    /// What the program did that no correct program does; forgotten by asking.
    pub fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.look().violations)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.shared.change().stopping = true;
        let violations = self.take_violations();
        if !violations.is_empty() && !std::thread::panicking() {
            panic!("the program broke rules of verbs: {}", violations.join("; "));
        }
    }
}

/// A device of a fake.
pub struct FakeDevice<'a> {
    fake: &'a Fake,
    index: usize,
}

impl FakeDevice<'_> {
    /// What is alive on it.
    pub fn live(&self) -> Live {
        self.fake.shared.look().live(self.index)
    }

    /// Brings a port up or down, with an event.
    pub fn set_port(&self, port: u8, up: bool) {
        let mut state = self.fake.shared.change();
        state.devices[self.index].config.ports[usize::from(port) - 1].up = up;
        let kind =
            if up { ibv_event_type::IBV_EVENT_PORT_ACTIVE } else { ibv_event_type::IBV_EVENT_PORT_ERR };
        state.raise(self.index, kind, About::Port(port));
    }

    /// Changes an entry of a port's GID table, with an event. Connections that use the old one break.
    pub fn set_gid(&self, port: u8, index: usize, gid: Option<FakeGid>) {
        let mut state = self.fake.shared.change();
        let gids = &mut state.devices[self.index].config.ports[usize::from(port) - 1].gids;
        gids.resize(gids.len().max(index + 1), None);
        gids[index] = gid;
        if let Some(sysfs) = &state.sysfs {
            sysfs.write(&state.devices[self.index].config);
        }
        state.raise(self.index, ibv_event_type::IBV_EVENT_GID_CHANGE, About::Port(port));
    }

    /// The device is lost: an event, every queue pair in error, nothing new can be made.
    pub fn fail(&self) {
        let mut state = self.fake.shared.change();
        state.devices[self.index].dead = true;
        state.raise(self.index, ibv_event_type::IBV_EVENT_DEVICE_FATAL, About::Device);
        let lost: Vec<u64> =
            state.qps.iter().filter(|(_, qp)| qp.device == self.index).map(|(id, _)| *id).collect();
        for qp in lost {
            state.enter_error(qp);
        }
    }

    /// After `taken` more work requests, posting one fails once with this errno; the rest of its chain is not looked at.
    pub fn fail_post_after(&self, taken: u32, errno: i32) {
        self.fake.shared.look().devices[self.index].fail_post = Some((taken, errno));
    }

    /// Polling answers this negative number from now on, or entries again.
    pub fn fail_polls(&self, answer: Option<i32>) {
        self.fake.shared.look().devices[self.index].fail_poll = answer;
    }

    /// Its completion queues overrun: each is told, and nothing comes out of them any more but what is in them.
    pub fn overrun(&self) {
        let mut state = self.fake.shared.change();
        let queues: Vec<u64> =
            state.cqs.iter().filter(|(_, cq)| cq.device == self.index).map(|(id, _)| *id).collect();
        for queue in queues {
            state.overrun(queue);
        }
    }

    /// Changes how much may be registered.
    pub fn set_memlock(&self, bytes: Option<u64>) {
        self.fake.shared.look().devices[self.index].config.memlock_bytes = bytes;
    }

    /// Lets the next `count` deregistrations fail with EBUSY.
    pub fn set_busy_deregistrations(&self, count: u32) {
        self.fake.shared.look().devices[self.index].config.busy_deregistrations = count;
    }
}

/// The worker: one queue pair at a time does one thing, in the seed's order.
fn work(shared: &Shared) {
    /// Without the worker nothing completes any more: better an end than a hang.
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            if std::thread::panicking() {
                std::process::abort();
            }
        }
    }
    let _bomb = Bomb;
    loop {
        let mut state = shared.when_free();
        if state.stopping && state.contexts.is_empty() {
            return;
        }
        let now = Instant::now();
        let active: Vec<u64> = state.active.iter().copied().collect();
        let first = state.rng.below(active.len());
        let mut next: Option<Instant> = None;
        let mut progress = false;
        for id in active[first..].iter().chain(&active[..first]) {
            match state.step(*id, now) {
                Step::Progress => {
                    progress = true;
                    break;
                }
                Step::Idle => {
                    state.active.remove(id);
                }
                Step::Blocked(until) => next = [next, until].into_iter().flatten().min(),
            }
        }
        if progress {
            continue;
        }
        // Poisoning: a panic under the lock is a fault of the fake, which its test reports.
        match next {
            Some(until) => drop(
                shared.work.wait_timeout(state, until - now).unwrap_or_else(|poisoned| poisoned.into_inner()),
            ),
            None => drop(shared.work.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner())),
        }
    }
}
