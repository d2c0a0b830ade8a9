//! An engine: opened by settings, used through its table, destroyed with the last thing that belongs to it.

use std::collections::BTreeMap;
use std::ffi::{OsString, c_void};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_abi::*;
use serde_json::json;

use crate::error::{Error, ErrorCode, OpenError, Status};
use crate::inner::{Inner, check, read_text};
use crate::load::{self, Door, Place, Plugin};
use crate::log::{self, Level, LogTo, Sink};
use crate::notify::{self, Event, Hook, Notification};
use crate::region::{BlockList, MemoryKind};
use crate::select::{self, Choice, SelectError, Source};
use crate::settings::Reader;
use crate::transfer::Transfer;

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Remote memory into local memory.
    Read,
    /// Local memory into remote memory.
    Write,
}

impl Op {
    fn raw(self) -> u32 {
        match self {
            Op::Read => BATON_OP_READ,
            Op::Write => BATON_OP_WRITE,
        }
    }
}

/// Where environment variables are read.
#[derive(Clone, Debug, Default)]
pub enum Environment {
    /// In this process, at open.
    #[default]
    Process,
    /// In this list.
    Given(Vec<(OsString, OsString)>),
}

/// How to open an engine.
#[derive(Debug)]
pub struct EngineOptions {
    agent_name: String,
    params: BTreeMap<String, String>,
    environment: Environment,
    progress_thread: bool,
    log: LogTo,
    door: Door,
}

impl EngineOptions {
    /// An agent of that name; a progress thread is permitted.
    pub fn new(agent_name: impl Into<String>) -> EngineOptions {
        EngineOptions {
            agent_name: agent_name.into(),
            params: BTreeMap::new(),
            environment: Environment::default(),
            progress_thread: true,
            log: LogTo::default(),
            door: Door::default(),
        }
    }

    /// Sets one setting by its lower-case name; it goes before environment and file.
    pub fn param(mut self, name: impl Into<String>, value: impl Into<String>) -> EngineOptions {
        self.params.insert(name.into(), value.into());
        self
    }

    /// Sets several.
    pub fn params(mut self, params: impl IntoIterator<Item = (String, String)>) -> EngineOptions {
        self.params.extend(params);
        self
    }

    /// Reads variables elsewhere than in this process.
    pub fn environment(mut self, environment: Environment) -> EngineOptions {
        self.environment = environment;
        self
    }

    /// Whether the engine may run a progress thread.
    pub fn progress_thread(mut self, permitted: bool) -> EngineOptions {
        self.progress_thread = permitted;
        self
    }

    /// Where log records go.
    pub fn log(mut self, to: LogTo) -> EngineOptions {
        self.log = to;
        self
    }

    /// Through which door the engine is entered.
    pub fn door(mut self, door: Door) -> EngineOptions {
        self.door = door;
        self
    }
}

/// An engine. Clones are the same engine; it ends when the last clone and everything made from it is gone.
#[derive(Clone, Debug)]
pub struct Engine {
    inner: Arc<Inner>,
}

/// What the settings come to, and where the engine is.
fn decide(
    params: &BTreeMap<String, String>,
    environment: &Environment,
) -> Result<(Choice, Place), OpenError> {
    let process;
    let variables: &[(OsString, OsString)] = match environment {
        Environment::Given(list) => list,
        Environment::Process => {
            process = std::env::vars_os().collect::<Vec<_>>();
            &process
        }
    };
    let path = select::config_path(params, variables)?;
    let text = path.as_deref().map(read_config).transpose()?;
    let file = path.as_deref().zip(text.as_deref());
    let choice = select::select(params, variables, file)?;
    let plugin = choice.chosen("plugin").and_then(|c| Some((c.value.as_deref()?, c.source.to_string())));
    let place = load::find(plugin.as_ref().map(|(path, source)| (*path, source.as_str())))?;
    Ok((choice, place))
}

fn read_config(path: &Path) -> Result<String, SelectError> {
    let unreadable =
        |e: std::io::Error| SelectError::Unreadable { path: path.to_owned(), cause: e.to_string() };
    std::fs::read_to_string(path).map_err(unreadable)
}

/// Which fabrics and devices this machine offers to the engine that the settings choose: a JSON object.
pub fn probe(params: &BTreeMap<String, String>, environment: &Environment) -> Result<String, OpenError> {
    let (_, place) = decide(params, environment)?;
    let plugin = load::load(&place.path, Door::C)?;
    let answer = read_text(plugin.table(), |buf, cap, needed| {
        // SAFETY: the buffer is `cap` long.
        unsafe { (plugin.table().probe)(buf, cap, needed) }
    });
    answer.map_err(|error| OpenError::Create { path: place.path, error })
}

impl Engine {
    /// Chooses, loads and creates.
    pub fn open(options: EngineOptions) -> Result<Engine, OpenError> {
        let (choice, place) = decide(&options.params, &options.environment)?;
        let plugin = load::load(&place.path, options.door)?;
        let log = choice.chosen("log").expect("a setting");
        let level = log.value.as_deref().and_then(Level::from_word);
        let explicit = log.source != Source::Default;
        let mut sink = Box::new(Sink::new(options.log, level, explicit, &options.agent_name));
        let raw = create(plugin, &choice, &mut sink, &options.agent_name, options.progress_thread)
            .map_err(|error| OpenError::Create { path: place.path.clone(), error })?;
        let choice_json = describe(&choice, &place, plugin);
        let inner = Inner {
            plugin,
            raw,
            choice,
            choice_json,
            sink,
            hook: Mutex::new(None),
            inbox: Mutex::new(Vec::new()),
            unreleased: Mutex::new(Vec::new()),
            any_unreleased: AtomicBool::new(false),
        };
        inner.log(Level::Info, "baton_host", &format!("chosen: {}", inner.choice_json));
        for note in inner.choice.notes() {
            let level = if note.warning { Level::Warn } else { Level::Info };
            inner.log(level, "baton_host", &note.text);
        }
        Ok(Engine { inner: Arc::new(inner) })
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.inner
    }

    /// What was chosen, from where.
    pub fn choice(&self) -> &Choice {
        &self.inner.choice
    }

    /// The library this engine lives in.
    pub fn plugin(&self) -> &'static Plugin {
        self.inner.plugin
    }

    /// The engine's own handle, for hosts that call the table themselves.
    pub fn raw(&self) -> *mut BatonEngine {
        self.inner.raw
    }

    /// Its connection information; secret, whoever holds it may connect.
    pub fn conn_info(&self) -> Result<Vec<u8>, Error> {
        let inner = &self.inner;
        inner.read(|buf, cap, needed| {
            // SAFETY: the engine lives; the buffer is `cap` long.
            unsafe { (inner.table().conn_info)(inner.raw, buf, cap, needed) }
        })
    }

    /// Takes a peer's connection information. With an empty name, whatever name is inside is accepted.
    pub fn load_remote(&self, name: &str, info: &[u8]) -> Result<(), Error> {
        let (name, info) = (BatonSlice::of(name.as_bytes()), BatonSlice::of(info));
        // SAFETY: the engine lives; the slices are borrowed for the call.
        let code = unsafe { (self.inner.table().load_remote)(self.inner.raw, name, info) };
        self.inner.check(code).map(drop)
    }

    /// Connects now instead of at the first post; with a zero `timeout` it only starts to.
    pub fn connect(&self, peer: &str, timeout: Duration) -> Result<Status, Error> {
        let ms = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        // SAFETY: as above.
        let code =
            unsafe { (self.inner.table().connect)(self.inner.raw, BatonSlice::of(peer.as_bytes()), ms) };
        self.inner.check(code).map(Status::from_raw)
    }

    /// Forgets a peer; its running transfers end. Harmless for an unknown one.
    pub fn disconnect(&self, peer: &str) -> Result<(), Error> {
        // SAFETY: as above.
        let code =
            unsafe { (self.inner.table().disconnect)(self.inner.raw, BatonSlice::of(peer.as_bytes())) };
        self.inner.check(code).map(drop)
    }

    /// Prepares a transfer between local pieces and a peer's, pair by pair.
    pub fn create_xfer(
        &self,
        op: Op,
        peer: &str,
        local: &[BatonDesc],
        remote: &[BatonDesc],
    ) -> Result<Transfer, Error> {
        let inner = &self.inner;
        inner.reap();
        let spec = BatonXferSpec {
            size_bytes: size_of::<BatonXferSpec>() as u32,
            op: op.raw(),
            peer: BatonSlice::of(peer.as_bytes()),
            local: local.as_ptr(),
            local_count: local.len() as u64,
            remote: remote.as_ptr(),
            remote_count: remote.len() as u64,
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the engine lives; all that the spec points at is borrowed for the call.
        let code = unsafe { (inner.table().create_xfer_req)(inner.raw, &spec, &mut raw) };
        inner.check(code).map(|_| Transfer::new(Arc::clone(inner), raw))
    }

    /// Prepares a transfer between elements of two lists of blocks, pair by pair.
    pub fn create_xfer_from_indices(
        &self,
        op: Op,
        peer: &str,
        local: (&BlockList, &[u32]),
        remote: (&BlockList, &[u32]),
    ) -> Result<Transfer, Error> {
        let inner = &self.inner;
        if local.1.len() != remote.1.len() {
            let text = format!("{} local indices, {} remote ones", local.1.len(), remote.1.len());
            return Err(Error { code: ErrorCode::InvalidParam, text });
        }
        inner.reap();
        let spec = BatonIndexSpec {
            size_bytes: size_of::<BatonIndexSpec>() as u32,
            op: op.raw(),
            peer: BatonSlice::of(peer.as_bytes()),
            local_list: local.0.handle(),
            remote_list: remote.0.handle(),
            local_indices: local.1.as_ptr(),
            remote_indices: remote.1.as_ptr(),
            index_count: local.1.len() as u64,
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: as in `create_xfer`.
        let code = unsafe { (inner.table().create_xfer_from_indices)(inner.raw, &spec, &mut raw) };
        inner.check(code).map(|_| Transfer::new(Arc::clone(inner), raw))
    }

    /// Sends a message without a transfer.
    pub fn notify(&self, peer: &str, message: &[u8]) -> Result<(), Error> {
        let (peer, message) = (BatonSlice::of(peer.as_bytes()), BatonSlice::of(message));
        // SAFETY: the engine lives; the slices are borrowed for the call.
        let code = unsafe { (self.inner.table().gen_notif)(self.inner.raw, peer, message) };
        self.inner.check(code).map(drop)
    }

    /// All notifications that wait, oldest first per peer.
    pub fn notifications(&self) -> Result<Vec<Notification>, Error> {
        let mut out = Vec::new();
        self.inner.reap();
        while self.inner.take_notifications(&mut out)? {}
        Ok(out)
    }

    /// Whether the transfer that a peer posted with `id` ([`Transfer::post_with_id`]) has landed here: [`Status::Done`] once for
    /// each, then it is forgotten. Ids that nobody asks for hold their sender back like messages that nobody takes.
    pub fn inbound_status(&self, peer: &str, id: u64) -> Result<Status, Error> {
        let peer = BatonSlice::of(peer.as_bytes());
        // SAFETY: as above.
        let code = unsafe { (self.inner.table().inbound_status)(self.inner.raw, peer, id) };
        self.inner.check(code).map(Status::from_raw)
    }

    /// Calls `hook` on an engine thread for every notification and every peer that fails, instead of an earlier
    /// hook. It may use the engine, but not set or clear the hook, nor drop the last clone of the engine.
    pub fn set_event_hook(&self, hook: impl Fn(Event<'_>) + Send + Sync + 'static) -> Result<(), Error> {
        let inner = &self.inner;
        let mut place = inner.hook.lock().unwrap_or_else(PoisonError::into_inner);
        inner.unset_hook(&mut place)?;
        let hook: Box<Hook> = Box::new(Box::new(hook));
        let user = (&raw const *hook).cast_mut().cast::<c_void>();
        let mask = BATON_EVENT_NOTIFICATION | BATON_EVENT_PEER_FAILED;
        // SAFETY: the engine lives; the hook is kept until it has been unset.
        let code = unsafe { (inner.table().set_event_hook)(inner.raw, mask, Some(notify::on_event), user) };
        inner.check(code)?;
        *place = Some(hook);
        Ok(())
    }

    /// Removes the hook; a call that is running has ended when this returns.
    pub fn clear_event_hook(&self) -> Result<(), Error> {
        let mut place = self.inner.hook.lock().unwrap_or_else(PoisonError::into_inner);
        self.inner.unset_hook(&mut place)
    }

    /// A descriptor that is readable while notifications wait. The engine owns it.
    pub fn notify_fd(&self) -> Result<i32, Error> {
        let mut fd = -1;
        // SAFETY: the engine lives; `fd` is valid for the call.
        let code = unsafe { (self.inner.table().notify_fd)(self.inner.raw, &mut fd) };
        self.inner.check(code).map(|_| fd)
    }

    /// Lends this thread to the engine for a moment; whether there was work.
    pub fn progress(&self) -> Result<bool, Error> {
        self.inner.reap();
        // SAFETY: the engine lives.
        let code = unsafe { (self.inner.table().progress)(self.inner.raw) };
        self.inner.check(code).map(|found| found == 1)
    }

    /// Counters and sessions as a JSON object; its key `choice` says what was chosen and why.
    pub fn stats(&self) -> Result<String, Error> {
        let inner = &self.inner;
        let text = read_text(inner.table(), |buf, cap, needed| {
            // SAFETY: the engine lives; the buffer is `cap` long.
            unsafe { (inner.table().stats)(inner.raw, buf, cap, needed) }
        })?;
        let mut stats: serde_json::Value =
            serde_json::from_str(&text).unwrap_or_else(|_| json!({ "raw": text }));
        match stats.as_object_mut() {
            Some(object) => drop(object.insert("choice".to_owned(), inner.choice_json.clone())),
            None => stats = json!({ "raw": stats, "choice": inner.choice_json }),
        }
        Ok(stats.to_string())
    }

    /// Whether memory of this kind can be registered. What is missing is in the error of registering it and in [`Engine::stats`].
    pub fn takes(&self, kind: MemoryKind) -> Result<bool, Error> {
        let word = match kind {
            MemoryKind::Dram => return Ok(true),
            MemoryKind::Vram => "vram",
        };
        let stats: serde_json::Value = serde_json::from_str(&self.stats()?).unwrap_or_default();
        Ok(stats["memory"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == word)))
    }

    /// What was chosen and why what comes before it was passed over: a JSON object.
    pub fn choice_json(&self) -> String {
        self.inner.choice_json.to_string()
    }

    /// Changes the level of the log.
    pub fn set_log_level(&self, level: Option<Level>) -> Result<(), Error> {
        let raw = level.map_or(0, |l| l as u32);
        // SAFETY: the engine lives.
        let code = unsafe { (self.inner.table().set_log_level)(self.inner.raw, raw) };
        self.inner.check(code)?;
        self.inner.sink.set_level(level);
        Ok(())
    }
}

fn create(
    plugin: &'static Plugin,
    choice: &Choice,
    sink: &mut Sink,
    agent_name: &str,
    progress_thread: bool,
) -> Result<*mut BatonEngine, Error> {
    let settings: Vec<_> = choice
        .settings()
        .iter()
        .filter(|c| c.setting.reader == Reader::Engine)
        .filter_map(|c| {
            let value = BatonSlice::of(c.value.as_ref()?.as_bytes());
            Some(BatonSetting { key: BatonSlice::from_static(c.setting.name), value })
        })
        .collect();
    let options = BatonCreateOptions {
        size_bytes: size_of::<BatonCreateOptions>() as u32,
        flags: if progress_thread { BATON_CREATE_PROGRESS_THREAD } else { 0 },
        agent_name: BatonSlice::of(agent_name.as_bytes()),
        settings: settings.as_ptr(),
        settings_count: settings.len() as u64,
        log: Some(log::receive),
        log_user: (&raw mut *sink).cast(),
        log_level: sink.raw_level(),
        reserved: 0,
    };
    let mut raw = std::ptr::null_mut();
    // SAFETY: the options and all they point at are borrowed for the call; the sink outlives the engine.
    let code = unsafe { (plugin.table().create)(&options, &mut raw) };
    check(plugin.table(), code)?;
    if raw.is_null() {
        return Err(Error { code: ErrorCode::Local, text: "create said OK and gave no engine".to_owned() });
    }
    Ok(raw)
}

fn describe(choice: &Choice, place: &Place, plugin: &Plugin) -> serde_json::Value {
    let because = |pairs: Vec<(String, String)>| {
        pairs.into_iter().map(|(what, why)| json!({ "what": what, "why": why })).collect::<Vec<_>>()
    };
    let mut settings = serde_json::Map::new();
    for chosen in choice.settings() {
        let mut entry = json!({ "value": chosen.value, "source": chosen.source.to_string() });
        if !chosen.passed_over.is_empty() {
            let why = format!("{} goes before it", chosen.source);
            let list = chosen.passed_over.iter().map(|(s, v)| (format!("{s}: {v}"), why.clone()));
            entry["passed_over"] = because(list.collect()).into();
        }
        settings.insert(chosen.setting.name.to_owned(), entry);
    }
    json!({
        "engine": {
            "path": place.path.to_string_lossy(),
            "because": place.reason,
            "passed_over": because(place.passed_over.clone()),
            "name": plugin.name(),
            "version": plugin.version(),
            "abi": plugin.abi().to_string(),
            "missing_entries": plugin.missing(),
        },
        "settings": settings,
        "notes": choice.notes().iter().map(|note| note.text.as_str()).collect::<Vec<_>>(),
    })
}
