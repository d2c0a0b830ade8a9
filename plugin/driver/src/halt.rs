//! The end of the engine for whoever waits for a peer: no handshake outlives the wish to destroy.

use crate::endpoints::EndpointSet;
use crate::err;
use crate::error::{Error, Result};
use baton_fabric::{EndpointId, Fabric};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Endpoints on their way to a peer.
type Endpoints = (Arc<dyn Fabric>, Vec<EndpointId>);

/// Ends waits, once and for all.
pub(crate) struct Halt {
    pulled: AtomicBool,
    /// Readable from the end on.
    fd: OwnedFd,
    /// What a fabric is connecting at this moment, by a number of its own; it waits where no descriptor reaches it.
    connecting: Mutex<Vec<(u64, Endpoints)>>,
}

impl Halt {
    pub fn new() -> std::io::Result<Halt> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Halt { pulled: AtomicBool::new(false), fd, connecting: Mutex::default() })
    }

    /// From now on every wait ends at once.
    pub fn pull(&self) {
        self.pulled.store(true, Ordering::SeqCst);
        if let Err(e) = rustix::io::write(&self.fd, &1u64.to_ne_bytes()) {
            tracing::error!("ending the waits for peers: {e}; they end by their deadlines");
        }
        for (_, (fabric, endpoints)) in self.connecting.lock().iter() {
            endpoints.iter().for_each(|endpoint| fabric.fence(*endpoint));
        }
    }

    /// An error once it was pulled.
    pub fn check(&self) -> Result<()> {
        if self.pulled.load(Ordering::SeqCst) { Err(Halt::error()) } else { Ok(()) }
    }

    /// What a wait that was ended answers.
    pub fn error() -> Error {
        err!(Shutdown, "the engine is being destroyed")
    }

    /// Readable once it was pulled.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Connects endpoints; the end fences them, which ends the fabric's wait.
    pub fn connecting(&self, set: &EndpointSet, connect: impl FnOnce() -> Result<()>) -> Result<()> {
        let number = {
            let mut connecting = self.connecting.lock();
            // Whoever pulls looks at the list afterwards.
            self.check()?;
            let number = connecting.last().map_or(0, |(last, _)| last + 1);
            connecting.push((number, (Arc::clone(&set.fabric), set.endpoints().collect())));
            number
        };
        let connected = connect();
        self.connecting.lock().retain(|(other, _)| *other != number);
        self.check().and(connected)
    }
}
