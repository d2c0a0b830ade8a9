//! A second, small engine: it copies between engines of one process inside the post.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use baton_abi::*;

const MAGIC: &[u8] = b"example-engine:";

static AGENTS: LazyLock<Mutex<HashMap<String, Arc<Agent>>>> = LazyLock::new(Mutex::default);
thread_local!(static LAST_ERROR: RefCell<String> = const { RefCell::new(String::new()) });

type Failure = (BatonStatus, String);

#[derive(Default)]
struct Agent {
    name: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    peers: HashSet<String>,
    local: HashMap<u64, (u64, u64)>,
    remote: HashMap<u64, (String, u64)>,
    next: u64,
    inbox: VecDeque<(String, Vec<u8>)>,
    copied_bytes: u64,
}

struct Xfer {
    write: bool,
    peer: String,
    pairs: Vec<(BatonDesc, BatonDesc)>,
    status: Mutex<BatonStatus>,
}

/// Every entry runs in here: a panic becomes a code, an error leaves its text behind.
fn guard(entry: impl FnOnce() -> Result<(), Failure>) -> BatonStatus {
    let panicked = |_| Err((BATON_ERR_PANIC, "the example engine panicked".to_owned()));
    match catch_unwind(AssertUnwindSafe(entry)).unwrap_or_else(panicked) {
        Ok(()) => BATON_OK,
        Err((code, text)) => {
            LAST_ERROR.set(text);
            code
        }
    }
}

fn fail<T>(code: BatonStatus, text: impl Into<String>) -> Result<T, Failure> {
    Err((code, text.into()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn agent<'a>(engine: *mut BatonEngine) -> Result<&'a Agent, Failure> {
    // SAFETY: an engine is a pointer that `create` gave out and `destroy` has not taken back.
    unsafe { engine.cast::<Agent>().as_ref() }.ok_or((BATON_ERR_INVALID_PARAM, "no engine".to_owned()))
}

fn bytes<'a>(slice: BatonSlice) -> Result<&'a [u8], Failure> {
    // SAFETY: the caller lends the bytes for the call.
    unsafe { slice.bytes() }.ok_or((BATON_ERR_INVALID_PARAM, "a slice without a pointer".to_owned()))
}

fn text(slice: BatonSlice) -> Result<String, Failure> {
    let found = std::str::from_utf8(bytes(slice)?);
    found.map(str::to_owned).map_err(|e| (BATON_ERR_INVALID_PARAM, format!("a name: {e}")))
}

fn list<'a, T>(first: *const T, count: u64) -> &'a [T] {
    // SAFETY: the caller lends `count` elements for the call; none need no pointer.
    if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(first, count as usize) } }
}

fn set<T>(out: *mut T, value: T) {
    // SAFETY: the caller lends the place for the call.
    unsafe { out.write(value) }
}

fn give(out: &[u8], buf: *mut u8, cap: u64, needed: *mut u64) -> Result<(), Failure> {
    set(needed, out.len() as u64);
    if out.len() as u64 > cap {
        return fail(BATON_ERR_TOO_SMALL, format!("{} bytes needed, {cap} given", out.len()));
    }
    // SAFETY: the caller lends `cap` bytes.
    unsafe { buf.copy_from_nonoverlapping(out.as_ptr(), out.len()) };
    Ok(())
}

/// The peer itself, if `agent` knows it and it is there.
fn find(agent: &Agent, peer: &str) -> Result<Arc<Agent>, Failure> {
    if peer != agent.name && !lock(&agent.state).peers.contains(peer) {
        return fail(BATON_ERR_NOT_FOUND, format!("unknown peer {peer:?}"));
    }
    let found = lock(&AGENTS).get(peer).cloned();
    found.ok_or_else(|| (BATON_ERR_REMOTE_DISCONNECT, format!("no agent {peer:?} in this process")))
}

fn inside(regions: &HashMap<u64, (u64, u64)>, piece: &BatonDesc) -> Result<(), Failure> {
    let end = piece.addr.checked_add(piece.len_bytes);
    let region = regions.get(&piece.region);
    if region.is_some_and(|(addr, len)| piece.addr >= *addr && end.is_some_and(|end| end <= addr + len)) {
        return Ok(());
    }
    let text = format!("{} bytes at {:#x} are not in region {}", piece.len_bytes, piece.addr, piece.region);
    fail(BATON_ERR_NOT_FOUND, text)
}

fn start(options: &BatonCreateOptions) -> Result<*mut BatonEngine, Failure> {
    let name = text(options.agent_name)?;
    for setting in list(options.settings, options.settings_count) {
        let (key, value) = (text(setting.key)?, text(setting.value)?);
        if key == "fabric" && value != "auto" {
            return fail(
                BATON_ERR_UNSUPPORTED,
                format!("fabric {value:?}: the example engine has only auto"),
            );
        }
    }
    let agent = Arc::new(Agent { name: name.clone(), ..Agent::default() });
    if lock(&AGENTS).insert(name.clone(), Arc::clone(&agent)).is_some() {
        return fail(BATON_ERR_INVALID_PARAM, format!("a second agent {name:?} in this process"));
    }
    if let (Some(log), BATON_LOG_INFO..) = (options.log, options.log_level) {
        let (target, message) = (BatonSlice::from_static("example"), format!("agent {name} is there"));
        // SAFETY: the host's own function with the host's own argument.
        unsafe { log(options.log_user, BATON_LOG_INFO, target, BatonSlice::of(message.as_bytes())) };
    }
    Ok(Arc::into_raw(agent).cast_mut().cast())
}

fn prepare(agent: &Agent, spec: &BatonXferSpec) -> Result<*mut BatonXfer, Failure> {
    let peer = text(spec.peer)?;
    find(agent, &peer)?;
    let (local, remote) = (list(spec.local, spec.local_count), list(spec.remote, spec.remote_count));
    if local.len() != remote.len() || local.iter().zip(remote).any(|(l, r)| l.len_bytes != r.len_bytes) {
        let text = format!("{} local and {} remote pieces do not match", local.len(), remote.len());
        return fail(BATON_ERR_INVALID_PARAM, text);
    }
    let (state, mut pairs) = (lock(&agent.state), Vec::new());
    for (l, r) in local.iter().zip(remote) {
        let Some((_, id)) = state.remote.get(&r.region).filter(|(owner, _)| *owner == peer) else {
            return fail(BATON_ERR_NOT_FOUND, format!("no region {} of {peer:?}", r.region));
        };
        inside(&state.local, l)?;
        pairs.push((*l, BatonDesc { region: *id, ..*r }));
    }
    let xfer = Xfer { write: spec.op == BATON_OP_WRITE, peer, pairs, status: Mutex::new(BATON_NOT_POSTED) };
    Ok(Box::into_raw(Box::new(xfer)).cast())
}

fn copy(agent: &Agent, xfer: &Xfer, peer: &Agent) -> Result<(), Failure> {
    let ours = lock(&agent.state).local.clone();
    // Under the owner's lock: once deregistered, nothing is copied any more.
    let mut theirs = lock(&peer.state);
    for (l, r) in &xfer.pairs {
        inside(&ours, l)?;
        inside(&theirs.local, r)?;
        let (from, to) = if xfer.write { (l.addr, r.addr) } else { (r.addr, l.addr) };
        // SAFETY: both pieces are registered memory, which their owners keep mapped.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, l.len_bytes as usize) };
        theirs.copied_bytes += l.len_bytes;
    }
    Ok(())
}

macro_rules! entries {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) $body:block)*) => {
        $(unsafe extern "C" fn $name($($arg: $ty),*) -> BatonStatus { guard(|| $body) })*
    };
}

entries! {
    fn create(options: *const BatonCreateOptions, out: *mut *mut BatonEngine) {
        // SAFETY: the caller lends the options for the call.
        start(unsafe { &*options }).map(|engine| set(out, engine))
    }
    fn destroy(e: *mut BatonEngine) {
        lock(&AGENTS).remove(&agent(e)?.name);
        // SAFETY: `create` made it so, and this is the last call.
        drop(unsafe { Arc::from_raw(e.cast::<Agent>()) });
        Ok(())
    }
    fn conn_info(e: *mut BatonEngine, buf: *mut u8, cap: u64, needed: *mut u64) {
        give(&[MAGIC, agent(e)?.name.as_bytes()].concat(), buf, cap, needed)
    }
    fn load_remote(e: *mut BatonEngine, name: BatonSlice, info: BatonSlice) {
        let (name, info) = (text(name)?, bytes(info)?);
        let Some(inside) = info.strip_prefix(MAGIC).filter(|i| name.is_empty() || *i == name.as_bytes()) else {
            return fail(BATON_ERR_INVALID_PARAM, format!("{} bytes are no information of {name:?}", info.len()));
        };
        lock(&agent(e)?.state).peers.insert(String::from_utf8_lossy(inside).into_owned());
        Ok(())
    }
    fn register(e: *mut BatonEngine, memory: *const BatonMemory, out: *mut u64) {
        // SAFETY: the caller lends it for the call.
        let memory = unsafe { *memory };
        if memory.len_bytes == 0 || memory.addr.checked_add(memory.len_bytes).is_none() {
            return fail(BATON_ERR_INVALID_PARAM, "these bytes are no memory");
        }
        let mut state = lock(&agent(e)?.state);
        state.next += 1;
        set(out, state.next);
        let handle = state.next;
        state.local.insert(handle, (memory.addr, memory.len_bytes));
        Ok(())
    }
    fn deregister(e: *mut BatonEngine, region: u64) {
        let removed = lock(&agent(e)?.state).local.remove(&region);
        removed.map(drop).ok_or((BATON_ERR_NOT_FOUND, format!("no region {region}")))
    }
    fn export(_e: *mut BatonEngine, id: u64, buf: *mut u8, cap: u64, needed: *mut u64) {
        give(&id.to_le_bytes(), buf, cap, needed)
    }
    fn import(e: *mut BatonEngine, peer: BatonSlice, blob: BatonSlice, out: *mut u64) {
        let (peer, blob) = (text(peer)?, bytes(blob)?);
        let Ok(id) = blob.try_into().map(u64::from_le_bytes) else {
            return fail(BATON_ERR_INVALID_PARAM, format!("{} bytes are no exported region", blob.len()));
        };
        let mut state = lock(&agent(e)?.state);
        state.next += 1;
        set(out, state.next);
        let handle = state.next;
        state.remote.insert(handle, (peer, id));
        Ok(())
    }
    fn create_xfer(e: *mut BatonEngine, spec: *const BatonXferSpec, out: *mut *mut BatonXfer) {
        // SAFETY: the caller lends the spec for the call.
        prepare(agent(e)?, unsafe { &*spec }).map(|xfer| set(out, xfer))
    }
    fn post(e: *mut BatonEngine, xfer: *mut BatonXfer, message: BatonSlice, flags: u32) {
        // SAFETY: a request lives until its release.
        let (agent, xfer) = (agent(e)?, unsafe { &*xfer.cast::<Xfer>() });
        let peer = find(agent, &xfer.peer)?;
        copy(agent, xfer, &peer)?;
        *lock(&xfer.status) = BATON_OK;
        if flags & BATON_POST_NOTIFY != 0 {
            lock(&peer.state).inbox.push_back((agent.name.clone(), bytes(message)?.to_vec()));
        }
        Ok(())
    }
    fn release(_e: *mut BatonEngine, xfer: *mut BatonXfer) {
        // SAFETY: `create_xfer` made it so, and this is the last call.
        drop(unsafe { Box::from_raw(xfer.cast::<Xfer>()) });
        Ok(())
    }
    fn gen_notif(e: *mut BatonEngine, peer: BatonSlice, message: BatonSlice) {
        let (agent, peer) = (agent(e)?, text(peer)?);
        let peer = find(agent, &peer)?;
        lock(&peer.state).inbox.push_back((agent.name.clone(), bytes(message)?.to_vec()));
        Ok(())
    }
    fn get_notifs(e: *mut BatonEngine, buf: *mut u8, cap: u64, needed: *mut u64, count: *mut u64) {
        let mut state = lock(&agent(e)?.state);
        set(count, 0);
        let Some((name, message)) = state.inbox.front() else { return Ok(()) };
        // One at a time is "as many as fit" for the simplest of engines.
        let total = (size_of::<BatonNotifHeader>() + name.len() + message.len()).next_multiple_of(8);
        let (message_len, name_len) = ((message.len() as u64).to_ne_bytes(), (name.len() as u32).to_ne_bytes());
        let total_bytes = (total as u64).to_ne_bytes();
        let head = [&total_bytes[..], &message_len, &name_len, &[0; 4]].concat();
        let mut out = [&head, name.as_bytes(), message].concat();
        out.resize(total, 0);
        give(&out, buf, cap, needed)?;
        state.inbox.pop_front();
        set(count, 1);
        Ok(())
    }
    fn stats(e: *mut BatonEngine, buf: *mut u8, cap: u64, needed: *mut u64) {
        let json = format!("{{\"engine\":\"example\",\"copied_bytes\":{}}}", lock(&agent(e)?.state).copied_bytes);
        give(json.as_bytes(), buf, cap, needed)
    }
}

unsafe extern "C" fn status(_: *mut BatonEngine, xfer: *mut BatonXfer) -> BatonStatus {
    // SAFETY: a request lives until its release.
    *lock(unsafe { &(*xfer.cast::<Xfer>()).status })
}

unsafe extern "C" fn last_error(buf: *mut u8, cap: u64, needed: *mut u64) -> BatonStatus {
    give(LAST_ERROR.with_borrow(String::clone).as_bytes(), buf, cap, needed)
        .map_or_else(|e| e.0, |()| BATON_OK)
}

const VERSION: Option<&str> = option_env!("BATON_BUILD_VERSION");
const TABLE: BatonEngineV1 = baton_abi::engine_table! {
    name: "example", version: if let Some(v) = VERSION { v } else { env!("CARGO_PKG_VERSION") }, create: create, destroy: destroy, conn_info: conn_info,
    load_remote: load_remote, register: register, deregister: deregister, export_region: export,
    import_region: import, create_xfer_req: create_xfer, post_xfer_req: post, xfer_status: status,
    release_xfer_req: release, gen_notif: gen_notif, get_notifs: get_notifs, stats: stats,
    last_error: last_error,
};
baton_abi::export_engine!(TABLE);
baton_abi::export_engine_root!(TABLE);
