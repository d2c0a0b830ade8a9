//! Events: completion channels and devices, in one descriptor.

use crate::choose::AckTime;
use crate::fabric::VerbsFabric;
use crate::rail::{Device, Down, OpenRail};
use baton_verbs::AsyncEvent;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Shortest time for which a port may be down before its connections are given up: a flap of the link.
const PORT_GRACE: Duration = Duration::from_millis(500);

/// How often a port that stays down is looked at.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// The descriptor that a sleeper waits on.
pub(crate) struct Wake {
    epoll: OwnedFd,
    bell: OwnedFd,
}

impl Wake {
    pub fn new(devices: &[Arc<Device>]) -> rustix::io::Result<Wake> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &bell, EventData::new_u64(0), EventFlags::IN)?;
        for device in devices {
            epoll::add(&epoll, device.channel.fd(), EventData::new_u64(0), EventFlags::IN)?;
            epoll::add(&epoll, device.context.async_fd(), EventData::new_u64(0), EventFlags::IN)?;
        }
        Ok(Wake { epoll, bell })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Wakes the sleeper for something that no device announces.
    pub fn ring(&self) {
        if let Err(e) = rustix::io::write(&self.bell, &1u64.to_ne_bytes()) {
            tracing::error!("waking whoever sleeps on the verbs fabric: {e}");
        }
    }

    fn silence(&self) {
        // Empty already is right too.
        let _emptied = rustix::io::read(&self.bell, &mut [0u8; 8]);
    }
}

impl VerbsFabric {
    /// Takes all events, so that the descriptor is readable for new ones only.
    pub(crate) fn take_events(&self) {
        self.wake.silence();
        for device in &self.devices {
            loop {
                match device.channel.next_event() {
                    Ok(Some(token)) => {
                        if let Some(queue) = self.queue_by_token(token) {
                            queue.on_event();
                        }
                    }
                    Ok(None) => break,
                    Err(e) => {
                        tracing::error!("device {}: {e}", device.name);
                        break;
                    }
                }
            }
        }
        self.take_device_events();
    }

    /// Acts on what happened to devices and ports.
    pub(crate) fn take_device_events(&self) {
        for (index, device) in self.devices.iter().enumerate() {
            loop {
                match device.context.next_event() {
                    Ok(Some(event)) => self.on_device_event(index, event),
                    Ok(None) => break,
                    Err(e) => {
                        tracing::error!("device {}: {e}", device.name);
                        break;
                    }
                }
            }
        }
        self.give_up_after_grace();
    }

    fn rails_of(&self, device_index: usize, port: Option<u8>) -> impl Iterator<Item = &Arc<OpenRail>> {
        self.rails.iter().filter(move |rail| {
            rail.device_index == device_index && port.is_none_or(|port| rail.port == port)
        })
    }

    fn on_device_event(&self, device_index: usize, event: AsyncEvent) {
        let name = &self.devices[device_index].name;
        match event {
            AsyncEvent::DeviceFatal => {
                tracing::error!("device {name} is lost (fatal error); its connections end");
                for rail in self.rails_of(device_index, None) {
                    let why = "the device had a fatal error".to_owned();
                    rail.set_down(Some(Down { why, for_good: true, grace_ends: Instant::now() }));
                    self.give_up_all(rail, true);
                }
                self.flusher.lose(device_index);
            }
            AsyncEvent::PortErr(port) => {
                let retries = AckTime::new(self.config.ib_timeout, self.config.ib_retry).worst;
                let grace_ends = Instant::now() + PORT_GRACE.max(retries);
                tracing::warn!(
                    "device {name} port {port} is down; no new connections use it until it is back"
                );
                for rail in self.rails_of(device_index, Some(port)) {
                    let why = "the port is down".to_owned();
                    rail.set_down(Some(Down { why, for_good: false, grace_ends }));
                }
            }
            AsyncEvent::PortActive(port) | AsyncEvent::GidChange(port) | AsyncEvent::PortChange(port) => {
                tracing::info!("device {name} port {port}: {event:?}");
                for rail in self.rails_of(device_index, Some(port)) {
                    self.look_again(rail);
                }
            }
            AsyncEvent::QpErr(number) => tracing::debug!("device {name}: queue pair {number} is in error"),
            AsyncEvent::CqErr(token) => {
                tracing::error!("device {name}: completion queue {token} overran; its connections end");
                if let Some(queue) = self.queue_by_token(token) {
                    queue.fail();
                    self.wake.ring();
                }
            }
            AsyncEvent::Other(kind) => tracing::debug!("device {name}: event {kind}"),
        }
    }

    /// A port or its GID table changed.
    fn look_again(&self, rail: &Arc<OpenRail>) {
        match rail.refresh(&self.config) {
            Ok(changed) => {
                rail.set_down(None);
                if changed {
                    let gid = rail.facts().gid.gid;
                    for endpoint in self.endpoints.all() {
                        let stale = endpoint.gid.lock().is_some_and(|used| used != gid);
                        if Arc::ptr_eq(&endpoint.rail, rail) && stale {
                            self.give_up(&endpoint, false);
                        }
                    }
                }
            }
            Err(why) => {
                tracing::warn!("{rail}: {why}");
                let grace_ends = Instant::now() + PORT_GRACE;
                rail.set_down(Some(Down { why, for_good: false, grace_ends }));
            }
        }
    }

    fn give_up_after_grace(&self) {
        for rail in &self.rails {
            let Some(down) = rail.down().filter(|down| !down.for_good && Instant::now() >= down.grace_ends)
            else {
                continue;
            };
            if rail.is_active() {
                self.look_again(rail);
                continue;
            }
            self.give_up_all(rail, false);
            // There are no new ones while it is down; should the event of its return be lost, it is seen then.
            rail.set_down(Some(Down { grace_ends: Instant::now() + LOOK_AGAIN, ..down }));
        }
    }

    fn give_up_all(&self, rail: &Arc<OpenRail>, device_lost: bool) {
        for endpoint in self.endpoints.all() {
            if Arc::ptr_eq(&endpoint.rail, rail) && !endpoint.is_fenced() {
                self.give_up(&endpoint, device_lost);
            }
        }
    }
}
