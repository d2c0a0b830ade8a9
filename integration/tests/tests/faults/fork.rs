//! A forked child has the engine's memory and descriptors, but none of its threads.

use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

use baton_host::abi::*;
use baton_host::{Op, Transfer};
use baton_tests::{Block, Node, wait_for};
use rustix::process::{Pid, WaitOptions, waitpid};

use crate::{PIECE, agent, assert_works, node, on_each_fabric};

const BYTES: usize = 16 << 20;

/// Calls every entry of the table that takes or makes an engine; each one's name and answer.
///
/// # Safety
/// Engine and request are those of the parent, and this is the child.
unsafe fn call_everything(node: &Node, transfer: &Transfer, region: u64) -> Vec<(&'static str, BatonStatus)> {
    let (t, e, x) = (node.engine.plugin().table(), node.engine.raw(), transfer.raw());
    let (name, none) = (BatonSlice::of(b"b"), BatonSlice::EMPTY);
    let mut bytes = [0u8; 256];
    let (buf, cap, mut n, mut count) = (bytes.as_mut_ptr(), 256, 0, 0);
    let (mut fd, mut status, mut out) = (0, 0, x);
    let mut engine = e;
    let memory = BatonMemory { addr: buf as u64, len_bytes: 256, device: 0, kind: BATON_MEM_DRAM, access: 3 };
    let mut managed = memory;
    let spec = BatonXferSpec {
        size_bytes: size_of::<BatonXferSpec>() as u32,
        op: BATON_OP_READ,
        peer: name,
        local: null(),
        local_count: 0,
        remote: null(),
        remote_count: 0,
    };
    let indices = BatonIndexSpec {
        size_bytes: size_of::<BatonIndexSpec>() as u32,
        op: BATON_OP_READ,
        peer: name,
        local_list: 1,
        remote_list: 1,
        local_indices: null(),
        remote_indices: null(),
        index_count: 0,
    };
    let options = BatonCreateOptions {
        size_bytes: size_of::<BatonCreateOptions>() as u32,
        flags: 0,
        agent_name: name,
        settings: null(),
        settings_count: 0,
        log: None,
        log_user: null_mut(),
        log_level: 0,
        reserved: 0,
    };
    let post =
        BatonPostOptions { size_bytes: size_of::<BatonPostOptions>() as u32, flags: 0, message: none, id: 0 };
    // SAFETY: all pointers are valid for the calls; the caller's promise for the rest.
    unsafe {
        vec![
            ("create", (t.create)(&options, &mut engine)),
            ("conn_info", (t.conn_info)(e, buf, cap, &mut n)),
            ("load_remote", (t.load_remote)(e, name, name)),
            ("connect", (t.connect)(e, name, 1000)),
            ("disconnect", (t.disconnect)(e, name)),
            ("register", (t.register)(e, &memory, &mut n)),
            ("deregister", (t.deregister)(e, region)),
            ("export_region", (t.export_region)(e, region, buf, cap, &mut n)),
            ("import_region", (t.import_region)(e, name, name, &mut n)),
            ("release_remote_region", (t.release_remote_region)(e, 1)),
            ("create_xfer_req", (t.create_xfer_req)(e, &spec, &mut out)),
            ("create_block_list", (t.create_block_list)(e, name, null(), 0, &mut n)),
            ("release_block_list", (t.release_block_list)(e, 1)),
            ("create_xfer_from_indices", (t.create_xfer_from_indices)(e, &indices, &mut out)),
            ("post_xfer_req", (t.post_xfer_req)(e, x, none, 0)),
            ("xfer_status", (t.xfer_status)(e, x)),
            ("xfer_error", (t.xfer_error)(e, x, buf, cap, &mut n)),
            ("xfer_cancel", (t.xfer_cancel)(e, x)),
            ("poll_many", (t.poll_many)(e, &x, 1, &mut status)),
            ("gen_notif", (t.gen_notif)(e, name, name)),
            ("get_notifs", (t.get_notifs)(e, buf, cap, &mut n, &mut count)),
            ("inbound_status", (t.inbound_status)(e, name, 1)),
            ("post_xfer_req_with", (t.post_xfer_req_with)(e, x, &post)),
            ("set_event_hook", (t.set_event_hook)(e, 0, None, null_mut())),
            ("notify_fd", (t.notify_fd)(e, &mut fd)),
            ("alloc_managed", (t.alloc_managed)(e, &mut managed, &mut n)),
            ("free_managed", (t.free_managed)(e, region)),
            ("progress", (t.progress)(e)),
            ("stats", (t.stats)(e, buf, cap, &mut n)),
            ("set_log_level", (t.set_log_level)(e, 0)),
            ("probe", (t.probe)(buf, cap, &mut n)),
            ("release_xfer_req", (t.release_xfer_req)(e, x)),
            ("destroy", (t.destroy)(e)),
        ]
    }
}

/// Runs `body` in a forked child; its exit code says how many faults it found. `body` may not panic.
fn fork(body: impl FnOnce() -> u8) -> Pid {
    // SAFETY: the child uses what a forked child may: the C library's allocator, and the engine's entries, which
    // are what is being tested.
    match unsafe { libc::fork() } {
        0 => {
            let code = body();
            // SAFETY: ends this process at once.
            unsafe { libc::_exit(code.into()) }
        }
        child => Pid::from_raw(child).expect("a child"),
    }
}

fn exit_code(child: Pid) -> Option<i32> {
    let ended = waitpid(Some(child), WaitOptions::NOHANG).expect("our own child")?;
    Some(ended.1.exit_status().unwrap_or(-1))
}

on_each_fabric! {
    fn a_forked_child_is_refused_everything_and_disturbs_nothing(fabric) {
        let (a, mut b) = (node("a", fabric), agent("b", fabric));
        b.befriend(&a, "a");
        let (here, there) = (Block::new(&a.engine, BYTES, 1).expect("register"), b.block(BYTES, 2));
        let remote = b.import_into(&a, &there);
        let transfer = a.scattered(Op::Write, &here, &remote, PIECE).expect("create");
        a.run(&transfer, Some(b"before"));
        let (end, wake) = rustix::pipe::pipe().expect("a pipe");

        // Between post and end: what the child does falls into the middle.
        transfer.post(Some(b"with a child")).expect("post");
        let child = fork(|| {
            // SAFETY: the child of the process that made them.
            let answers = unsafe { call_everything(&a, &transfer, here.region().handle()) };
            // An entry that the engine does not offer has nothing to touch.
            let refused = |answer| matches!(answer, BATON_ERR_FORKED | BATON_ERR_UNSUPPORTED);
            let wrong = answers.iter().filter(|(_, answer)| !refused(*answer));
            let wrong: Vec<_> = wrong.collect();
            if !wrong.is_empty() {
                eprintln!("in the child: {wrong:?}");
            }
            // Lives on until the parent has seen enough.
            let _ = rustix::io::read(&end, &mut [0u8; 1]);
            wrong.len() as u8
        });
        a.finish(&transfer).expect("done");
        for _ in 0..20 {
            a.run(&transfer, None);
        }
        assert_eq!(exit_code(child), None, "the child still lives");
        b.assert_holds(&there, 1, Some(PIECE), "while the child lives");
        here.assert_holds(1, "while the child lives");
        rustix::io::write(&wake, b"!").expect("write");
        assert_eq!(wait_for("the child's end", || exit_code(child)), 0, "entries that were not refused");

        a.run(&transfer, Some(b"after"));
        let heard = b.ask(serde_json::json!({ "do": "heard", "count": 3 }));
        assert_eq!(heard, serde_json::json!([["a", "before"], ["a", "with a child"], ["a", "after"]]));
        assert_works(&a, "a", &mut b);
        assert_eq!(a.failure_so_far(), None);
    }

    fn a_child_that_drops_every_handle_leaves_the_parent_s_transfers_alone(fabric) {
        let (a, mut b) = (node("a", fabric), agent("b", fabric));
        b.befriend(&a, "a");
        let (here, there) = (Block::new(&a.engine, BYTES, 1).expect("register"), b.block(BYTES, 2));
        let remote = b.import_into(&a, &there);
        let transfer = a.scattered(Op::Write, &here, &remote, PIECE).expect("create");
        a.run(&transfer, None);
        let stop = AtomicBool::new(false);
        let mut mine = Some((transfer, remote, here, a));
        std::thread::scope(|scope| {
            let (transfer, _, _, _) = mine.as_ref().expect("here");
            let poster = scope.spawn(|| {
                let mut rounds = 0;
                while !stop.load(Ordering::Relaxed) || rounds < 10 {
                    transfer.post(None).expect("post");
                    wait_for("a transfer", || (transfer.status().expect("no error") == baton_host::Status::Done).then_some(()));
                    rounds += 1;
                }
            });
            for _ in 0..5 {
                // SAFETY: a bitwise copy that only the child, a process of its own, drops.
                let copy = unsafe { std::ptr::read(&mine) };
                let mut copy = std::mem::ManuallyDrop::new(copy);
                let child = fork(|| {
                    // SAFETY: dropped once in this process.
                    unsafe { std::mem::ManuallyDrop::drop(&mut copy) };
                    0
                });
                assert_eq!(wait_for("the child's end", || exit_code(child)), 0);
            }
            stop.store(true, Ordering::Relaxed);
            poster.join().expect("the poster");
        });
        let (_, _, here, a) = mine.take().expect("here");
        b.assert_holds(&there, 1, Some(PIECE), "after the children");
        here.assert_holds(1, "after the children");
        assert_works(&a, "a", &mut b);
        assert_eq!(a.failure_so_far(), None);
    }
}
