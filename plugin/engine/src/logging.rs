//! This library has its own `tracing` globals; this subscriber hands their records to the hosts' callbacks.

use baton_abi::{BatonLogFn, BatonSlice};
use parking_lot::RwLock;
use std::cell::Cell;
use std::fmt::Write;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use tracing::field::{Field, Visit};
use tracing::{Level, Metadata, Subscriber, span};

/// One engine's callback.
struct Sink {
    id: u64,
    log: BatonLogFn,
    user: usize,
    level: u32,
}

static SINKS: RwLock<Vec<Sink>> = RwLock::new(Vec::new());
static MAX_LEVEL: AtomicU32 = AtomicU32::new(0);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// The sink of the engine that this thread works for at the moment; 0 for none.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// The engine behind a sink is at work on this thread from here on.
pub fn enter(id: u64) {
    CURRENT.set(id);
}

/// As [`enter`], until the answer is dropped.
pub fn scope(id: u64) -> Scope {
    Scope { before: CURRENT.replace(id) }
}

/// Gives the thread back to whom it worked for before.
pub struct Scope {
    before: u64,
}

impl Drop for Scope {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}

/// A registered callback; dropping it returns after running calls have ended, and no call comes afterwards.
pub struct SinkHandle(u64);

/// Adds a callback. Records above `level` (or any, with level 0) are not made for it.
pub fn add(log: BatonLogFn, user: *mut core::ffi::c_void, level: u32) -> SinkHandle {
    static INSTALL: std::sync::Once = std::sync::Once::new();
    INSTALL.call_once(|| {
        // Fails only if this library set one already, and then it is this one.
        let _first = tracing::subscriber::set_global_default(Forwarder);
    });
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    let mut sinks = SINKS.write();
    sinks.push(Sink { id, log, user: user as usize, level });
    publish(&sinks);
    SinkHandle(id)
}

impl SinkHandle {
    /// For [`enter`] and [`scope`].
    pub fn id(&self) -> u64 {
        self.0
    }

    /// Changes the level of this callback.
    pub fn set_level(&self, level: u32) {
        let mut sinks = SINKS.write();
        sinks.iter_mut().filter(|sink| sink.id == self.0).for_each(|sink| sink.level = level);
        publish(&sinks);
    }
}

impl Drop for SinkHandle {
    fn drop(&mut self) {
        let mut sinks = SINKS.write();
        sinks.retain(|sink| sink.id != self.0);
        publish(&sinks);
    }
}

fn publish(sinks: &[Sink]) {
    MAX_LEVEL.store(sinks.iter().map(|sink| sink.level).max().unwrap_or(0), Ordering::Relaxed);
    tracing::callsite::rebuild_interest_cache();
}

fn number(level: &Level) -> u32 {
    match *level {
        Level::ERROR => baton_abi::BATON_LOG_ERROR,
        Level::WARN => baton_abi::BATON_LOG_WARN,
        Level::INFO => baton_abi::BATON_LOG_INFO,
        Level::DEBUG => baton_abi::BATON_LOG_DEBUG,
        Level::TRACE => baton_abi::BATON_LOG_TRACE,
    }
}

struct Forwarder;

impl Subscriber for Forwarder {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> tracing::subscriber::Interest {
        tracing::subscriber::Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && number(metadata.level()) <= MAX_LEVEL.load(Ordering::Relaxed)
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut text = Text(String::new());
        event.record(&mut text);
        let level = number(event.metadata().level());
        let target = event.metadata().target();
        // A record goes to the engine that it concerns; one of a thread that works for no particular engine goes to all.
        let current = CURRENT.get();
        let concerns = |sink: &&Sink| level <= sink.level && (current == 0 || current == sink.id);
        for sink in SINKS.read().iter().filter(concerns) {
            // SAFETY: the host promised a callable function until the sink is removed, which waits for this read lock.
            unsafe {
                (sink.log)(
                    sink.user as *mut _,
                    level,
                    BatonSlice::of(target.as_bytes()),
                    BatonSlice::of(text.0.as_bytes()),
                )
            };
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a String cannot fail.
        let _infallible = match field.name() {
            "message" => write!(self.0, "{value:?}"),
            name => write!(self.0, " {name}={value:?}"),
        };
    }
}
