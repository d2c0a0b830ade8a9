//! What the plugin and its engines say, on stderr: NIXL passes on statuses, not reasons.

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use baton_host::Level;

use crate::agent::Refused;

static MUTED: AtomicBool = AtomicBool::new(false);
/// The most talkative level of the newest engine, for what the plugin itself says about calls.
static LEVEL: AtomicU32 = AtomicU32::new(Level::Warn as u32);

/// From now on nothing is written: the process is on its way out, or NIXL has closed the plugin.
pub(crate) fn mute() {
    MUTED.store(true, Ordering::Relaxed);
}

/// NIXL has opened the plugin again.
pub(crate) fn unmute() {
    MUTED.store(false, Ordering::Relaxed);
}

/// Sets the level for [`refused`], by the setting's word.
pub(crate) fn set_level(word: &str) {
    let words = [Level::Error, Level::Warn, Level::Info, Level::Debug, Level::Trace];
    let level = words.into_iter().find(|level| level.word() == word);
    LEVEL.store(level.map_or(0, |level| level as u32), Ordering::Relaxed);
}

/// Says something that must be heard whatever the level.
pub(crate) fn say(message: &str) {
    line(&format!("baton: {message}\n"));
}

/// Says why a call is refused.
pub(crate) fn refused(call: &str, refused: &Refused) {
    if Level::Warn as u32 <= LEVEL.load(Ordering::Relaxed) {
        line(&format!("baton: {call}: {}\n", refused.reason));
    }
}

/// Takes the records of an engine, which has already dropped those above its level.
pub(crate) fn record(agent: &str, level: Level, target: &str, message: &str) {
    line(&format!("baton[{agent}] {} {target}: {message}\n", level.word()));
}

fn line(text: &str) {
    if !MUTED.load(Ordering::Relaxed) {
        // One write, so that lines of several threads stay whole; with stderr closed there is nowhere to say so.
        let _ = std::io::stderr().lock().write_all(text.as_bytes());
    }
}
