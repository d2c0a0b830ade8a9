//! Where the kernel forbids one process to read the other, blocks cross by TCP, and that is said with its reason.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;

use baton_host::Op;
use baton_tests::{Agent, Block, command, engine_directory};
use serde_json::Value;

use crate::{alone, node};

/// User and group of the agent that may not read this process: nobody's.
const STRANGER: u32 = 65534;

/// Engine and agent program where any user can load them; removed at the end.
struct Public(PathBuf);

impl Public {
    fn new() -> Public {
        let folder = std::env::temp_dir().join(format!("baton-forbidden-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder for any user");
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).expect("open to any user");
        let agent = PathBuf::from(env!("CARGO_BIN_EXE_baton-test-agent"));
        for from in [agent, engine_directory().join("libbaton_engine.so")] {
            let to = folder.join(from.file_name().expect("a file"));
            std::fs::copy(&from, &to).expect("copy");
            std::fs::set_permissions(&to, PermissionsExt::from_mode(0o755)).expect("open to any user");
        }
        Public(folder)
    }

    fn agent_of_another_user(&self, name: &str) -> Agent {
        let mut program = command(self.0.join("baton-test-agent"), [("BATON_PLUGIN", &self.0)]);
        program.uid(STRANGER).gid(STRANGER);
        Agent::start(program, name)
    }
}

impl Drop for Public {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("remove the folder");
    }
}

#[test]
fn processes_of_two_users_fall_back_to_tcp_and_say_why() {
    alone("faults::forbidden::processes_of_two_users_fall_back_to_tcp_and_say_why", || {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: only root can start a process of another user");
        }
        let public = Public::new();
        let (a, mut b) = (node("a", "auto"), public.agent_of_another_user("b"));
        b.befriend(&a, "a");
        let (here, there) = (Block::new(&a.engine, 65536, 1).expect("register"), b.block(65536, 2));
        let remote = b.import_into(&a, &there);
        let write = a.scattered(Op::Write, &here, &remote, 4096).expect("create");
        a.run(&write, Some(b"written"));
        b.assert_holds(&there, 1, Some(4096), "after WRITE");
        let stats: Value = serde_json::from_str(&a.engine.stats().expect("stats")).expect("JSON");
        assert_eq!(stats["peers"][0]["session"]["fabric"], "tcp", "{stats}");
        assert_eq!(stats["counters"]["fallbacks"], 1, "{stats}");
    });
}
