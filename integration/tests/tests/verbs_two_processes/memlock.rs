//! A user that may lock next to nothing.

use std::process::Command;

use baton_host::Engine;
use baton_tests::{Block, command, engine_directory, output_of, rig_options, text};

use crate::with_devices;

/// Where the user can load the engine and this program.
const PUBLIC: &str = "/tmp/baton-memlock";
/// Tells the program that it is the user's.
const USER: &str = "RIG_MEMLOCK_USER";

/// As the user: registering more than the limit is refused with the limit and its name.
fn as_the_user() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    assert_eq!(limit, Some(64 << 10), "the limit of this test");
    let refusal = match Engine::open(rig_options("a", 0)) {
        // The engine itself has to lock something.
        Err(error) => error.to_string(),
        Ok(engine) => {
            Block::new(&engine, 1 << 20, 1).err().expect("1 MiB is more than may be locked").to_string()
        }
    };
    assert!(refusal.contains("RLIMIT_MEMLOCK") && refusal.contains("65536"), "{refusal}");
}

with_devices! {
    fn a_user_who_may_not_lock_memory_is_told_the_limit() {
        if std::env::var_os(USER).is_some() {
            return as_the_user();
        }
        assert!(rustix::process::geteuid().is_root(), "only root can become another user");
        let own = std::env::current_exe().expect("a test knows its program");
        let engine = engine_directory().join(baton_host::ENGINE_FILE);
        output_of(Command::new("sh").arg("-c").arg(format!(
            "mkdir -p {PUBLIC} && cp {} {PUBLIC}/test && cp {} {PUBLIC}/ && chmod -R a+rX {PUBLIC}",
            own.display(),
            engine.display()
        )));
        let mut user = command("sh", [("BATON_TEST_ENGINE", PUBLIC), (USER, "1")]);
        user.env("BATON_TEST_BODY", std::env::var_os("BATON_TEST_BODY").expect("this is the body"));
        user.args(["-c", &format!(
            "ulimit -l 64; cd {PUBLIC}; exec setpriv --reuid 1234 --regid 1234 --clear-groups --inh-caps=-all \
             ./test --include-ignored --nocapture --exact memlock::a_user_who_may_not_lock_memory_is_told_the_limit"
        )]);
        let output = baton_tests::run(user, baton_tests::WATCHDOG);
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert!(output.status.success() && said.contains("1 passed"), "{}\n{said}", output.status);
    }
}
