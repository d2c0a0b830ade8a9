//! A Rust host's view of the engine: settings and their sources, logs, hooks, transfers given up.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

use baton_host::{
    Access, BatonMemory, Engine, EngineOptions, Environment, ErrorCode, Event, Level, LogTo, Notification,
    Op, OpenError, Region, RemoteRegion, SelectError, Source, Status,
};
use baton_tests::{build_engine, scratch};

const DEADLINE: Duration = Duration::from_secs(60);

/// Directory of the engine, built once for this process.
fn engine_directory() -> &'static PathBuf {
    static DIRECTORY: OnceLock<PathBuf> = OnceLock::new();
    DIRECTORY.get_or_init(|| build_engine("baton-engine", None))
}

fn environment(variables: &[(&str, &str)]) -> Environment {
    let plugin = (OsString::from("BATON_PLUGIN"), engine_directory().clone().into_os_string());
    let given = variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
    Environment::Given(std::iter::once(plugin).chain(given).collect())
}

fn options(name: &str) -> EngineOptions {
    EngineOptions::new(name).environment(environment(&[]))
}

fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < DEADLINE, "{what}: not within {DEADLINE:?}");
        std::thread::yield_now();
    }
}

/// Two agents that know each other, with memory of their own; the fields are dropped in this order.
struct Pair {
    to_b: RemoteRegion,
    region_a: Region,
    region_b: Region,
    a: Engine,
    b: Engine,
    memory_b: Box<[u8]>,
    _memory_a: Box<[u8]>,
}

fn pair(names: (&str, &str), len: usize) -> Pair {
    let a = Engine::open(options(names.0)).expect("open");
    let b = Engine::open(options(names.1)).expect("open");
    let (mut memory_a, mut memory_b) = (vec![7u8; len].into_boxed_slice(), vec![9u8; len].into_boxed_slice());
    // SAFETY: the memory outlives the regions, which come first in the structure.
    let (region_a, region_b) = unsafe {
        (
            a.register(memory_a.as_mut_ptr(), len, Default::default()).expect("register"),
            b.register(memory_b.as_mut_ptr(), len, Default::default()).expect("register"),
        )
    };
    a.load_remote(names.1, &b.conn_info().expect("info")).expect("load");
    b.load_remote(names.0, &a.conn_info().expect("info")).expect("load");
    let to_b = a.import_region(names.1, &region_b.export().expect("export")).expect("import");
    Pair { to_b, region_a, region_b, a, b, memory_b, _memory_a: memory_a }
}

#[test]
fn what_was_chosen_and_why_is_in_the_choice_and_in_the_stats() {
    let file = scratch("config").join("baton.toml");
    std::fs::write(&file, "fabric = \"tcp\"\nspin_us = 5\n").expect("a file");
    let variables = [("BATON_CONFIG", file.to_str().expect("UTF-8")), ("BATON_FABRIC", "local")];
    let engine = Engine::open(
        EngineOptions::new("choice").param("fabric", "tcp").environment(environment(&variables)),
    )
    .expect("open");

    let fabric = engine.choice().chosen("fabric").expect("a setting");
    assert_eq!((fabric.value.as_deref(), &fabric.source), (Some("tcp"), &Source::Parameter));
    let stats: serde_json::Value = serde_json::from_str(&engine.stats().expect("stats")).expect("JSON");
    let choice = &stats["choice"];
    assert_eq!(choice["settings"]["fabric"]["value"], "tcp");
    assert_eq!(choice["settings"]["fabric"]["passed_over"][0]["what"], "environment: local");
    assert_eq!(choice["settings"]["spin_us"]["source"], format!("file {}", file.display()));
    assert_eq!(choice["settings"]["backend"]["source"], "default");
    assert!(choice["engine"]["because"].as_str().is_some_and(|b| b.contains("from environment")), "{choice}");
}

#[test]
fn a_variable_of_another_project_is_used_and_said_so_in_choice_and_log() {
    let records = Arc::new(Mutex::new(Vec::new()));
    let sink = records.clone();
    let log = LogTo::Function(Box::new(move |level, _, message| {
        sink.lock().expect("no panic").push((level, message.to_owned()));
    }));
    let variables = [("NCCL_IB_RETRY_CNT", "7"), ("MC_GID_INDEX", "none"), ("BATON_LOG", "info")];
    let engine = Engine::open(EngineOptions::new("alias").environment(environment(&variables)).log(log))
        .expect("nothing of it breaks an engine");
    let retry = engine.choice().chosen("ib_retry").expect("a setting");
    assert_eq!((retry.value.as_deref(), &retry.source), (Some("6"), &Source::Alias("NCCL_IB_RETRY_CNT")));
    let choice: serde_json::Value = serde_json::from_str(&engine.choice_json()).expect("JSON");
    let records = records.lock().expect("no panic");
    for (note, level) in [
        ("ib_retry 6 from NCCL_IB_RETRY_CNT, as BATON_IB_RETRY is not set", Level::Info),
        ("MC_GID_INDEX is \"none\" and ignored", Level::Warn),
    ] {
        let told = choice["notes"].as_array().expect("a list").iter().filter_map(serde_json::Value::as_str);
        assert_eq!(told.filter(|text| text.starts_with(note)).count(), 1, "{choice}");
        assert_eq!(
            records.iter().filter(|(l, text)| *l == level && text.starts_with(note)).count(),
            1,
            "{records:?}"
        );
    }
}

#[test]
fn wrong_settings_are_refused_by_name_and_what_the_engine_lacks_by_the_engine() {
    let refused = Engine::open(options("a").param("fabrik", "tcp")).expect_err("refused");
    assert!(matches!(&refused, OpenError::Select(SelectError::UnknownName { .. })), "{refused}");
    assert_eq!(refused.code(), ErrorCode::InvalidParam);
    let refused = Engine::open(options("a").param("fabric", "verbs")).expect_err("refused");
    assert_eq!(refused.code(), ErrorCode::Unsupported, "{refused}");
    let text = refused.to_string();
    assert!(text.contains("fabric") && text.contains("verbs") && !text.contains('\n'), "{text}");
    let missing = EngineOptions::new("a").environment(Environment::Given(Vec::new()));
    let refused = Engine::open(missing.param("plugin", "/no/such/engine.so")).expect_err("refused");
    assert_eq!(refused.code(), ErrorCode::NotFound);
}

#[test]
fn names_that_are_too_long_or_empty_or_have_a_nul_are_refused_with_the_limit() {
    for name in ["", &"x".repeat(300), "a\0b"] {
        let refused = Engine::open(options(name)).expect_err("refused");
        assert_eq!(refused.code(), ErrorCode::InvalidParam, "{refused}");
    }
    let text = Engine::open(options(&"x".repeat(300))).expect_err("refused").to_string();
    assert!(text.contains("255"), "{text}");
}

#[test]
fn what_was_chosen_is_logged_once_at_info_through_the_host_s_function() {
    let records = Arc::new(Mutex::new(Vec::new()));
    let copy = Arc::clone(&records);
    let log = LogTo::Function(Box::new(move |level, target, message| {
        copy.lock().expect("unpoisoned").push((level, target.to_owned(), message.to_owned()));
    }));
    let engine = Engine::open(options("talker").param("log", "info").log(log)).expect("open");
    drop(engine);
    let records = records.lock().expect("unpoisoned");
    let chosen: Vec<_> = records.iter().filter(|(_, _, m)| m.starts_with("chosen: ")).collect();
    assert_eq!(chosen.len(), 1, "{records:?}");
    assert_eq!((chosen[0].0, chosen[0].1.as_str()), (Level::Info, "baton_host"));
    assert!(records.iter().all(|(level, ..)| *level <= Level::Info), "{records:?}");
}

#[test]
fn each_of_several_engines_logs_what_concerns_it_and_nothing_else() {
    let open = |name: &str| {
        let records = Arc::new(Mutex::new(Vec::new()));
        let copy = Arc::clone(&records);
        let log = LogTo::Function(Box::new(move |_, target, message| {
            copy.lock().expect("unpoisoned").push((target.to_owned(), message.to_owned()));
        }));
        (Engine::open(options(name).param("log", "info").log(log)).expect("open"), records)
    };
    let (a, a_log) = open("log-a");
    let (b, b_log) = open("log-b");
    a.load_remote("log-b", &b.conn_info().expect("info")).expect("load");
    a.connect("log-b", DEADLINE).expect("connect");
    drop(a);
    drop(b);
    for (own, other, log) in [("log-a", "log-b", a_log), ("log-b", "log-a", b_log)] {
        let log = log.lock().expect("unpoisoned");
        let count = |begin: String| log.iter().filter(|(_, message)| message.starts_with(&begin)).count();
        assert_eq!(count(format!("engine {own} ")), 1, "{log:?}");
        assert_eq!(count(format!("engine {other} ")), 0, "{log:?}");
        assert_eq!(count(format!("session with {other} ")), 2, "opened and ended: {log:?}");
        assert_eq!(count(format!("session with {own} ")), 0, "{log:?}");
    }
}

#[test]
fn the_hook_hears_of_a_notification_and_after_it_is_cleared_of_none() {
    let pair = pair(("hook-a", "hook-b"), 4096);
    let (heard, hears) = mpsc::channel();
    pair.b
        .set_event_hook(move |event| {
            if let Event::Notification { peer } = event {
                let _ = heard.send(peer.to_owned());
            }
        })
        .expect("set");
    pair.a.notify("hook-b", b"one").expect("notify");
    assert_eq!(hears.recv_timeout(DEADLINE).expect("heard"), "hook-a");
    let one = Notification { peer: "hook-a".to_owned(), message: b"one".to_vec() };
    assert_eq!(pair.b.notifications().expect("notifications"), [one]);

    pair.b.clear_event_hook().expect("cleared");
    // The closure, and with it the sender, is gone.
    assert!(matches!(hears.try_recv(), Err(mpsc::TryRecvError::Disconnected)));
    pair.a.notify("hook-b", b"two").expect("notify");
    wait("the second notification", || !pair.b.notifications().expect("notifications").is_empty());
}

#[test]
fn a_hook_may_use_the_engine_and_a_panic_in_it_harms_nobody() {
    let pair = pair(("busy-a", "busy-b"), 4096);
    let engine = pair.b.clone();
    let (got, gets) = mpsc::channel();
    pair.b
        .set_event_hook(move |_| {
            for notification in engine.notifications().expect("notifications") {
                let _ = got.send(notification.message);
            }
            panic!("wanted by the test");
        })
        .expect("set");
    for message in [b"one", b"two"] {
        pair.a.notify("busy-b", message).expect("notify");
        assert_eq!(gets.recv_timeout(DEADLINE).expect("heard"), message);
    }
    pair.b.clear_event_hook().expect("cleared");
}

#[test]
fn a_waiting_notification_makes_the_descriptor_readable() {
    let pair = pair(("fd-a", "fd-b"), 4096);
    let fd = pair.b.notify_fd().expect("a descriptor");
    // SAFETY: the engine owns the descriptor and lives until the end of the test.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let mut poll = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut poll, Some(&none)).expect("poll"), 0);
    pair.a.notify("fd-b", b"wake").expect("notify");
    let deadline = rustix::event::Timespec { tv_sec: DEADLINE.as_secs() as i64, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut poll, Some(&deadline)).expect("poll"), 1);
    assert_eq!(pair.b.notifications().expect("notifications").len(), 1);
}

#[test]
fn blocks_picked_by_index_arrive_and_their_lists_may_go_before_them() {
    const BLOCK: u64 = 4096;
    const COUNT: u64 = 8;
    let pair = pair(("index-a", "index-b"), (BLOCK * COUNT) as usize);
    let base = pair.region_b.addr();
    let here: Vec<_> = (0..COUNT).map(|n| pair.region_a.desc(n * BLOCK, BLOCK)).collect();
    let there: Vec<_> = (0..COUNT).map(|n| pair.to_b.desc(base + n * BLOCK, BLOCK)).collect();
    let local = pair.a.create_block_list("", &here).expect("list");
    let remote = pair.a.create_block_list("index-b", &there).expect("list");
    let make = |l: &[u32], r: &[u32]| {
        pair.a.create_xfer_from_indices(Op::Write, "index-b", (&local, l), (&remote, r))
    };
    let refused = make(&[0, 8], &[0, 1]).expect_err("refused");
    assert_eq!(refused.code, ErrorCode::InvalidParam);
    assert!(refused.text.contains("index 1") && refused.text.contains("no block 8"), "{refused}");
    assert_eq!(make(&[0, 1], &[0]).expect_err("refused").code, ErrorCode::InvalidParam);
    let foreign = pair.b.create_block_list("", &[pair.region_b.desc(0, BLOCK)]).expect("list of b");
    let refused = pair.a.create_xfer_from_indices(Op::Write, "index-b", (&foreign, &[0]), (&remote, &[0]));
    assert_eq!(refused.expect_err("another engine's").code, ErrorCode::NotFound);

    let write = make(&[6, 1, 0], &[2, 0, 5]).expect("create");
    drop((local, remote));
    write.post(Some(b"picked")).expect("post");
    wait("the transfer", || write.status().expect("status") == Status::Done);
    wait("its notification", || !pair.b.notifications().expect("notifications").is_empty());
    for (n, block) in pair.memory_b.chunks(BLOCK as usize).enumerate() {
        let byte = if [0, 2, 5].contains(&n) { 7 } else { 9 };
        // SAFETY: the memory is ours; volatile because the engine wrote it behind the compiler's back.
        assert!(block.iter().all(|b| unsafe { std::ptr::from_ref(b).read_volatile() } == byte), "block {n}");
    }
}

#[test]
fn many_transfers_are_polled_together_and_every_byte_arrives() {
    const BLOCK: u64 = 4096;
    const COUNT: u64 = 100;
    let pair = pair(("many-a", "many-b"), (BLOCK * COUNT) as usize);
    let transfers: Vec<_> = (0..COUNT)
        .map(|i| {
            let there = pair.to_b.desc(pair.region_b.addr() + i * BLOCK, BLOCK);
            pair.a.create_xfer(Op::Write, "many-b", &[pair.region_a.desc(i * BLOCK, BLOCK)], &[there])
        })
        .collect::<Result<_, _>>()
        .expect("create");
    for transfer in &transfers {
        assert_eq!(transfer.status().expect("status"), Status::NotPosted);
        transfer.post(None).expect("post");
    }
    let all: Vec<_> = transfers.iter().collect();
    let mut statuses = vec![i32::MIN; all.len()];
    wait("all transfers", || pair.a.poll_many(&all, &mut statuses).expect("poll") == 0);
    assert!(statuses.iter().all(|s| *s == 0), "{statuses:?}");
    assert!(pair.memory_b.iter().all(|b| *b == 7));
}

#[test]
fn transfers_dropped_in_flight_end_without_blocking_and_the_engine_works_on() {
    const LEN: usize = 64 << 20;
    let pair = pair(("drop-a", "drop-b"), LEN);
    for _ in 0..4 {
        let there = pair.to_b.desc(pair.region_b.addr(), LEN as u64);
        let here = pair.region_a.desc(0, LEN as u64);
        let transfer = pair.a.create_xfer(Op::Write, "drop-b", &[here], &[there]).expect("create");
        transfer.post(None).expect("post");
        drop(transfer);
    }
    let there = pair.to_b.desc(pair.region_b.addr(), LEN as u64);
    let transfer = pair
        .a
        .create_xfer(Op::Write, "drop-b", &[pair.region_a.desc(0, LEN as u64)], &[there])
        .expect("create");
    transfer.post(Some(b"last")).expect("post");
    wait("the last transfer", || transfer.status().expect("status") == Status::Done);
    wait("its notification", || {
        pair.b.notifications().expect("notifications").iter().any(|n| n.message == b"last")
    });
    assert!(pair.memory_b.iter().all(|b| *b == 7));
    let mut left = Some(transfer);
    wait("its release", || match left.take().expect("not yet released").release() {
        Ok(()) => true,
        Err(busy) => {
            left = Some(busy);
            false
        }
    });
}

#[test]
fn a_transfer_posted_with_an_id_has_landed_when_the_target_asks_and_is_then_forgotten() {
    let pair = pair(("land-a", "land-b"), 4096);
    let there = pair.to_b.desc(pair.region_b.addr(), 4096);
    let transfer =
        pair.a.create_xfer(Op::Write, "land-b", &[pair.region_a.desc(0, 4096)], &[there]).expect("create");
    let has_landed = |id| pair.b.inbound_status("land-a", id).expect("asked") == Status::Done;
    assert!(!has_landed(1));
    for (id, message) in [(1, None), (u64::MAX, Some(&b"and a message"[..]))] {
        transfer.post_with_id(message, id).expect("post");
        wait("the transfer to land", || has_landed(id));
        assert!(!has_landed(id), "said once");
        wait("the transfer", || transfer.status().expect("status") == Status::Done);
    }
    assert!(pair.memory_b.iter().all(|b| *b == 7));
    let messages: Vec<_> = pair.b.notifications().expect("notifications");
    assert_eq!(messages.iter().map(|n| &n.message[..]).collect::<Vec<_>>(), [b"and a message"]);
    assert_eq!(pair.b.inbound_status("", 1).expect_err("no name").code, ErrorCode::InvalidParam);
}

#[test]
fn errors_of_an_operation_have_code_and_text() {
    let pair = pair(("err-a", "err-b"), 4096);
    let unknown = pair.a.notify("nobody", b"x").expect_err("refused");
    assert_eq!(unknown.code, ErrorCode::NotFound);
    assert!(unknown.text.contains("nobody"), "{unknown}");
    let there = pair.to_b.desc(pair.region_b.addr(), 4096);
    let unequal = pair.a.create_xfer(Op::Write, "err-b", &[], &[there]).expect_err("refused");
    assert_eq!(unequal.code, ErrorCode::InvalidParam);
    let overflow = pair.to_b.desc(u64::MAX, 4096);
    let here = pair.region_a.desc(0, 4096);
    assert!(pair.a.create_xfer(Op::Write, "err-b", &[here], &[overflow]).is_err());
    for garbage in [&b""[..], b"x", &[0xff; 300]] {
        let refused = pair.a.load_remote("err-b", garbage).expect_err("refused");
        assert!(!refused.text.is_empty(), "{refused:?}");
        assert!(pair.a.import_region("err-b", garbage).is_err());
    }
    pair.a.notify("err-b", b"still alive").expect("notify");
    wait("a notification", || !pair.b.notifications().expect("notifications").is_empty());
}

#[test]
fn a_host_moves_and_frees_buffers_of_the_engines_own() {
    const LEN: usize = 300_000;
    let (a, b) =
        (Engine::open(options("own-a")).expect("open"), Engine::open(options("own-b")).expect("open"));
    a.load_remote("own-b", &b.conn_info().expect("info")).expect("load");
    let from = a.alloc_managed(LEN, Default::default()).expect("alloc");
    let to = b.alloc_managed(LEN, Access { remote_read: false, remote_write: true }).expect("alloc");
    let byte = |i: usize| (i * 31 + i / 256) as u8;
    for i in 0..LEN {
        // SAFETY: inside the buffer, and nothing is transferred yet.
        unsafe {
            assert_eq!(from.as_ptr().add(i).read() | to.as_ptr().add(i).read(), 0, "it begins with zeroes");
            from.as_ptr().add(i).write(byte(i));
        }
    }
    let remote = a.import_region("own-b", &to.export().expect("export")).expect("import");
    let refused = a.create_xfer(Op::Read, "own-b", &[from.desc(0, 8)], &[remote.desc(to.addr(), 8)]);
    assert_eq!(refused.expect_err("write-only").code, ErrorCode::InvalidParam);
    let inner = LEN as u64 - 200;
    let write = a
        .create_xfer(Op::Write, "own-b", &[from.desc(100, inner)], &[remote.desc(to.addr() + 100, inner)])
        .expect("create");
    write.post(None).expect("post");
    wait("the WRITE", || write.status().expect("status") == Status::Done);
    for i in 0..LEN {
        let expected = if (100..LEN - 100).contains(&i) { byte(i) } else { 0 };
        // SAFETY: inside the buffer, and the transfer is done.
        assert_eq!(unsafe { to.as_ptr().add(i).read_volatile() }, expected, "byte {i}");
    }
    let error = a.deregister_raw(from.handle()).expect_err("managed");
    assert!(error.code == ErrorCode::InvalidParam && error.text.contains("free_managed"), "{error}");
    let handle = from.handle();
    from.free().map_err(|(_, error)| error).expect("free");
    assert_eq!(a.free_managed_raw(handle).expect_err("freed").code, ErrorCode::NotFound);
    assert_eq!(write.post(None).expect_err("freed").code, ErrorCode::NotFound);
    let mut bad = BatonMemory { addr: 0, len_bytes: 1, device: 0, kind: 0, access: 8 };
    assert_eq!(a.alloc_managed_raw(&mut bad).expect_err("access").code, ErrorCode::InvalidParam);
    bad = BatonMemory { addr: 1, access: 3, ..bad };
    assert_eq!(a.alloc_managed_raw(&mut bad).expect_err("an address").code, ErrorCode::InvalidParam);
    let stats: serde_json::Value = serde_json::from_str(&b.stats().expect("stats")).expect("JSON");
    assert_eq!(stats["managed"]["bytes"].as_u64(), Some(LEN as u64), "{stats}");
    // Left to its engine's end.
    std::mem::forget(to);
}
