//! `stats`: what was chosen, what happened, who waits for what. One JSON object.

use crate::engine::Driver;
use crate::inbox::MAX_WAITING_BYTES;
use crate::peer::{Conn, Peer};
use crate::shared::Shared;
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicU64, Ordering};

impl Driver {
    /// The statistics as JSON.
    pub fn stats(&self) -> String {
        self.shared.stats().to_string()
    }
}

impl Shared {
    fn stats(&self) -> Value {
        let peers: Vec<_> = self.peers.read().values().cloned().collect();
        let registry = self.registry.read().counts();
        let fabrics: Map<String, Value> =
            self.fabrics.iter().map(|fabric| (fabric.name().to_owned(), fabric.stats())).collect();
        let vram = self.fabrics.iter().any(|fabric| fabric.caps().vram);
        json!({
            "agent": &*self.own_name(),
            "instance": self.instance.to_string(),
            "backend": self.config.backends.to_string(),
            "requested": self.config.requested,
            "passed_over": self.config.notes,
            "fabrics_enabled": self.fabrics.iter().map(|fabric| fabric.name()).collect::<Vec<_>>(),
            "memory": if vram { &["dram", "vram"][..] } else { &["dram"] },
            "progress_thread": self.config.progress_thread,
            "spin_us": self.config.spin_us,
            "notify": self.config.notify,
            "timeout_scale": self.config.timeout_scale,
            "threads": self.threads.names(),
            "regions": { "local": registry.local_regions, "remote": registry.remote_regions, "refused": registry.refused },
            "managed": self.managed.stats(),
            "notifications_waiting": self.inbox.len(),
            "notifications_waiting_bytes": self.inbox.waiting_bytes(),
            "notifications_waiting_limit_bytes": MAX_WAITING_BYTES,
            "ids_unread": self.landed.total(),
            "bounce": self.bounce_stats(),
            "counters": self.counter_values(),
            "peers": peers.iter().map(|peer| peer_stats(peer)).collect::<Vec<_>>(),
            "fabrics": fabrics,
        })
    }

    /// Bounce memory by fabric, where there is any.
    fn bounce_stats(&self) -> Map<String, Value> {
        let pools = self.bounces.pools();
        pools
            .map(|(index, bounce)| {
                let bounce = bounce.lock();
                let config = bounce.pool.config();
                let slab_bytes = u64::from(config.slot_bytes) * u64::from(config.slab_slots);
                let mut stats = to_json(&bounce.pool.stats());
                stats["slab_bytes"] = json!(slab_bytes);
                stats["max_slabs"] = json!(config.max_slabs);
                (self.fabrics[index].name().to_owned(), stats)
            })
            .collect()
    }

    fn counter_values(&self) -> Value {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let c = &self.counters;
        let violations = c.violations.lock().clone();
        json!({
            "sessions_opened": read(&c.sessions_opened),
            "epochs_ended": read(&c.epochs_ended),
            "connects_failed": read(&c.connects_failed),
            "fallbacks": read(&c.fallbacks),
            "handshakes_refused": read(&c.handshakes_refused),
            "names_refused": read(&c.names_refused),
            "names_in_use": read(&c.names_in_use),
            "names_taken_back": read(&c.names_taken_back),
            "handshakes_held_off": read(&c.handshakes_held_off),
            "accepts_dropped": read(&c.accepts_dropped),
            "listener_pauses": read(&c.listener_pauses),
            "orphan_completions": read(&c.orphan_completions),
            "notifications_expired": read(&c.notifications_expired),
            "notifications_lost": read(&c.notifications_lost),
            "hook_events_dropped": read(&self.hook.dropped),
            "partial_inbound": read(&c.partial_inbound),
            "revokes_unanswered": read(&c.revokes_unanswered),
            "violations": violations.values().sum::<u64>(),
            "violations_by_cause": violations,
            "lifelines_broken": read(&c.lifelines_broken),
            "stale_fences": read(&c.stale_fences),
            "registrations_partial": read(&c.registrations_partial),
            "ids_dropped": read(&c.ids_dropped),
            "ids_forgotten": read(&c.ids_forgotten),
        })
    }
}

fn peer_stats(peer: &Peer) -> Value {
    let mut state = peer.state.lock();
    let mut value = json!({
        "name": &*peer.name(),
        "instance": peer.instance.to_string(),
        "bound": peer.bound.load(Ordering::Relaxed),
        "connection": state.conn.word(),
        "waiting_for_connection": state.waiting.len(),
        "notifications_queued": state.carry.waiting().len(),
        "transfers_in_flight": state.inflight.iter().flatten().count(),
        "epochs_ended": state.epochs_ended,
        "last_error": state.last_error.as_ref().map(|e| e.text.clone()),
    });
    if let Conn::Open(channel) | Conn::Ending(channel) = &mut state.conn {
        value["session"] = json!({
            "id": channel.session_id.0,
            "epoch": channel.epoch.0,
            "fabric": channel.fabric.name(),
            "verified": channel.verified,
        });
        if let Some(one) = &channel.one_sided {
            let rails = &one.lanes.rails;
            value["session"]["lanes"] = json!(rails.len());
            value["session"]["rails"] = rails.iter().map(|lane| [lane.own, lane.peer]).collect();
            value["session"]["protocol"] = to_json(&one.session.stats());
        }
        if let Some(two) = &channel.two_sided {
            value["session"]["two_sided"] = to_json(&two.exec.channel.stats());
            if channel.one_sided.is_none() {
                value["session"]["rails"] = json!(two.rails);
            }
            value["session"]["two_sided"]["area_bytes"] = json!(two.exec.area_bytes());
        }
    }
    value
}

fn to_json(stats: &impl serde::Serialize) -> Value {
    serde_json::to_value(stats).unwrap_or_else(|e| Value::String(e.to_string()))
}
