//! Records of the engine, and the few of this shim, on their way to the host.

use std::ffi::c_void;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering};

use baton_abi::{
    BATON_LOG_DEBUG, BATON_LOG_ERROR, BATON_LOG_INFO, BATON_LOG_TRACE, BATON_LOG_WARN, BatonSlice,
};
use tracing::level_filters::LevelFilter;

/// Level of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Level {
    /// Something is lost.
    Error = BATON_LOG_ERROR,
    /// Something is worse than it should be.
    Warn = BATON_LOG_WARN,
    /// What was chosen, who came and went.
    Info = BATON_LOG_INFO,
    /// Details.
    Debug = BATON_LOG_DEBUG,
    /// Everything.
    Trace = BATON_LOG_TRACE,
}

impl Level {
    /// From the number of the interface; a larger one counts as the most talkative.
    pub fn from_raw(level: u32) -> Level {
        match level {
            0 | BATON_LOG_ERROR => Level::Error,
            BATON_LOG_WARN => Level::Warn,
            BATON_LOG_INFO => Level::Info,
            BATON_LOG_DEBUG => Level::Debug,
            _ => Level::Trace,
        }
    }

    /// From a word of the setting `log`; `None` for `off`.
    pub(crate) fn from_word(word: &str) -> Option<Level> {
        [Level::Error, Level::Warn, Level::Info, Level::Debug, Level::Trace]
            .into_iter()
            .find(|l| l.word() == word)
    }

    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
            Level::Trace => "trace",
        }
    }
}

/// A function that takes records: level, target, message. Called on any thread; must not call the engine.
pub type LogFn = Box<dyn Fn(Level, &str, &str) + Send + Sync>;

/// Where records go.
#[derive(Default)]
pub enum LogTo {
    /// To `tracing` if a subscriber is set, else to stderr.
    #[default]
    Auto,
    /// To `tracing`: target `baton`, fields `agent` and `module`.
    Tracing,
    /// To stderr, a line each.
    Stderr,
    /// To a function.
    Function(LogFn),
}

impl std::fmt::Debug for LogTo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            LogTo::Auto => "Auto",
            LogTo::Tracing => "Tracing",
            LogTo::Stderr => "Stderr",
            LogTo::Function(_) => "Function",
        })
    }
}

/// Where the records of one engine go. Its address is given to the engine.
pub(crate) struct Sink {
    to: To,
    level: AtomicU32,
    agent: String,
}

enum To {
    Tracing,
    Stderr,
    Function(LogFn),
}

impl Sink {
    /// `level` is the setting's; `explicit` when somebody gave it, else a tracing subscriber's own level holds.
    pub(crate) fn new(to: LogTo, level: Option<Level>, explicit: bool, agent: &str) -> Sink {
        let to = match to {
            LogTo::Auto if tracing::dispatcher::has_been_set() => To::Tracing,
            LogTo::Tracing => To::Tracing,
            LogTo::Auto | LogTo::Stderr => To::Stderr,
            LogTo::Function(function) => To::Function(function),
        };
        let level = if matches!(to, To::Tracing) && !explicit { current_of_tracing() } else { level };
        Sink { to, level: AtomicU32::new(level.map_or(0, |l| l as u32)), agent: agent.to_owned() }
    }

    pub(crate) fn set_level(&self, level: Option<Level>) {
        self.level.store(level.map_or(0, |l| l as u32), Ordering::Relaxed);
    }

    /// The level to ask of the engine, 0 for none.
    pub(crate) fn raw_level(&self) -> u32 {
        self.level.load(Ordering::Relaxed)
    }

    pub(crate) fn log(&self, level: Level, target: &str, message: &str) {
        if level as u32 > self.raw_level() {
            return;
        }
        match &self.to {
            To::Tracing => to_tracing(level, &self.agent, target, message),
            To::Stderr => {
                let line = format!("baton[{}] {} {target}: {message}\n", self.agent, level.word());
                // A host may have closed stderr; there is nowhere else to say so.
                let _ = std::io::stderr().lock().write_all(line.as_bytes());
            }
            To::Function(function) => function(level, target, message),
        }
    }
}

fn current_of_tracing() -> Option<Level> {
    match LevelFilter::current().into_level()? {
        tracing::Level::ERROR => Some(Level::Error),
        tracing::Level::WARN => Some(Level::Warn),
        tracing::Level::INFO => Some(Level::Info),
        tracing::Level::DEBUG => Some(Level::Debug),
        tracing::Level::TRACE => Some(Level::Trace),
    }
}

/// A callsite is static in level and target, so there is one for each level and the target is a field.
fn to_tracing(level: Level, agent: &str, module: &str, message: &str) {
    match level {
        Level::Error => tracing::error!(target: "baton", agent, module, "{message}"),
        Level::Warn => tracing::warn!(target: "baton", agent, module, "{message}"),
        Level::Info => tracing::info!(target: "baton", agent, module, "{message}"),
        Level::Debug => tracing::debug!(target: "baton", agent, module, "{message}"),
        Level::Trace => tracing::trace!(target: "baton", agent, module, "{message}"),
    }
}

/// What the engine calls.
pub(crate) unsafe extern "C" fn receive(
    user: *mut c_void,
    level: u32,
    target: BatonSlice,
    message: BatonSlice,
) {
    // A panic of the host's function may not cross the interface; the record is lost, nothing else.
    let _ = std::panic::catch_unwind(|| {
        // SAFETY: `user` is the sink given at create, which outlives the engine's threads; the slices are
        // valid during the call.
        let (sink, target, message) = unsafe { (&*user.cast::<Sink>(), target.bytes(), message.bytes()) };
        let text = |bytes: Option<&[u8]>| String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned();
        sink.log(Level::from_raw(level), &text(target), &text(message));
    });
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn records_up_to_the_level_reach_the_function_and_a_panic_in_it_stays_there() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let copy = Arc::clone(&seen);
        let function: LogFn = Box::new(move |level, target, message| {
            assert!(message != "panic", "wanted by the test");
            copy.lock().expect("unpoisoned").push((level, target.to_owned(), message.to_owned()));
        });
        let mut sink = Sink::new(LogTo::Function(function), Some(Level::Info), true, "a");
        let user = (&raw mut sink).cast();
        for (level, message) in
            [(BATON_LOG_WARN, "one"), (BATON_LOG_DEBUG, "two"), (BATON_LOG_ERROR, "panic")]
        {
            // SAFETY: the sink lives on; the slices are static.
            unsafe { receive(user, level, BatonSlice::from_static("t"), BatonSlice::from_static(message)) };
        }
        assert_eq!(*seen.lock().expect("unpoisoned"), [(Level::Warn, "t".to_owned(), "one".to_owned())]);
    }

    /// Writes every event down: level, target, fields.
    struct Notes(Arc<Mutex<Vec<String>>>);

    struct Line(String);

    impl tracing::field::Visit for Line {
        fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
            self.0.push_str(&format!(" {}={value:?}", field.name()));
        }
    }

    impl tracing::Subscriber for Notes {
        fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }
        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
        fn event(&self, event: &tracing::Event<'_>) {
            let metadata = event.metadata();
            let mut line = Line(format!("{} {}", metadata.level(), metadata.target()));
            event.record(&mut line);
            self.0.lock().expect("unpoisoned").push(line.0);
        }
        fn enter(&self, _: &tracing::span::Id) {}
        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn records_reach_a_tracing_subscriber_with_level_agent_and_module() {
        let notes = Arc::new(Mutex::new(Vec::new()));
        tracing::subscriber::with_default(Notes(Arc::clone(&notes)), || {
            let sink = Sink::new(LogTo::Tracing, Some(Level::Info), true, "a");
            sink.log(Level::Warn, "driver::peer", "gone");
            sink.log(Level::Debug, "driver::peer", "not wanted");
            sink.set_level(Some(Level::Trace));
            sink.log(Level::Trace, "driver", "wanted now");
        });
        assert_eq!(
            *notes.lock().expect("unpoisoned"),
            [
                "WARN baton message=gone agent=\"a\" module=\"driver::peer\"",
                "TRACE baton message=wanted now agent=\"a\" module=\"driver\"",
            ]
        );
    }

    #[test]
    fn words_and_numbers_of_levels_agree() {
        for raw in 1..=5 {
            let level = Level::from_raw(raw);
            assert_eq!(level as u32, raw);
            assert_eq!(Level::from_word(level.word()), Some(level));
        }
        assert_eq!(Level::from_word("off"), None);
    }
}
