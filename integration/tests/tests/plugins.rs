//! One host program, not rebuilt, and engines that it finds through `BATON_PLUGIN` alone.

use std::path::{Path, PathBuf};

use baton_tests::{Variant, WATCHDOG, build_engine, build_variant, command, run, scratch, text};

const HOST: &str = env!("CARGO_BIN_EXE_baton-test-host");

/// Runs the host with an engine; its line, or its error.
fn host(plugin: &Path, door: &str) -> Result<String, String> {
    let mut program = command(HOST, [("BATON_PLUGIN", plugin.as_os_str())]);
    program.arg(door);
    let output = run(program, WATCHDOG);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    if output.status.success() { Ok(out.trim().to_owned()) } else { Err(err.trim().to_owned()) }
}

fn refusal(plugin: &Path, door: &str) -> String {
    let error = host(plugin, door).expect_err("refused");
    assert!(!error.contains('\n'), "one line: {error}");
    assert!(error.contains(&*plugin.to_string_lossy()), "names the file: {error}");
    error
}

/// The doors this build of the host has.
fn doors() -> &'static [&'static str] {
    if cfg!(feature = "rust-door") { &["c", "rust"] } else { &["c"] }
}

#[test]
fn one_host_runs_a_transfer_on_two_engines_and_on_two_versions_chosen_by_the_environment_alone() {
    let before = std::fs::read(HOST).expect("the host");
    let mut lines = Vec::new();
    for (package, version) in [
        ("baton-engine", None),
        ("baton-example-engine", None),
        ("baton-engine", Some("7.8.9")),
        ("baton-example-engine", Some("7.8.9")),
    ] {
        let directory = build_engine(package, version);
        for door in doors() {
            let line = host(&directory, door).unwrap_or_else(|e| panic!("{package} {version:?} {door}: {e}"));
            assert!(version.is_none_or(|v| line.ends_with(v)), "{line}");
            lines.push(line);
        }
    }
    lines.dedup();
    assert_eq!(lines.len(), 4, "four engines that call themselves differently: {lines:?}");
    assert!(before == std::fs::read(HOST).expect("the host"), "the host was not rebuilt");
}

#[test]
fn an_engine_with_one_entry_more_loads_and_so_does_one_with_one_entry_less() {
    for variant in [Variant::Newer, Variant::Older] {
        let plugin = build_variant(variant);
        for door in doors() {
            let line = host(&plugin, door).unwrap_or_else(|e| panic!("{variant:?} {door}: {e}"));
            assert!(line.contains("both ways with example"), "{line}");
        }
    }
}

#[test]
fn an_engine_whose_structure_has_another_type_in_a_field_is_refused_in_one_line_that_names_it() {
    let plugin = build_variant(Variant::Changed);
    let error = refusal(&plugin, "c");
    assert!(error.contains("interface 1.1 does not fit 1.1 of this host"), "{error}");
    assert!(error.contains("first difference: BatonMemory.device"), "{error}");
    assert!(error.contains("i64") && error.contains("u64"), "{error}");
    if doors().contains(&"rust") {
        let error = refusal(&plugin, "rust");
        assert!(
            error.contains("first difference: BatonMemory.device: type is i64 in the engine, u64 here"),
            "{error}"
        );
    }
}

#[test]
fn an_engine_of_another_major_version_is_refused_with_both_versions() {
    let plugin = build_variant(Variant::Major);
    let error = refusal(&plugin, "c");
    assert!(
        error.contains("interface 2.1 does not fit 1.1 of this host: major version 2 against 1"),
        "{error}"
    );
    if doors().contains(&"rust") {
        let error = refusal(&plugin, "rust");
        assert!(error.contains("2.0.0") && error.contains("1.1.0"), "{error}");
    }
}

#[test]
fn a_path_that_names_nothing_is_an_error_and_never_a_fall_back() {
    let error = host(Path::new("/no/such/engine.so"), "c").expect_err("refused");
    assert_eq!(
        error,
        "engine /no/such/engine.so: no such file (named by the setting plugin, from environment)"
    );
    let empty = scratch("no-engine");
    let error = host(&empty, "c").expect_err("refused");
    assert!(error.contains("libbaton_engine.so: no such file"), "{error}");
}

#[test]
fn variables_with_unknown_names_or_values_are_refused_with_what_would_be_valid() {
    for (name, value, expected) in [
        ("BATON_FABRIC", "infiniband", "BATON_FABRIC is \"infiniband\"; it takes auto, verbs, local, tcp"),
        ("BATON_BACKEND", "onesided", "it takes auto, one-sided, two-sided (did you mean one-sided?)"),
        ("BATON_SPIN_US", "-1", "it takes a whole number from 0 to 1000000"),
        ("BATON_PLUGINS", "x", "unknown setting \"BATON_PLUGINS\" (did you mean BATON_PLUGIN?)"),
        ("BATON_CONFIG", "/no/such/file", "file /no/such/file (from BATON_CONFIG or the parameter config)"),
    ] {
        let output = run(command(HOST, [(name, value)]), WATCHDOG);
        let error = text(&output.stderr);
        assert!(!output.status.success() && error.contains(expected), "{error}");
    }
}

/// A library made of C.
fn c_library(name: &str, source: &str, arguments: &[&str]) -> PathBuf {
    let directory = scratch(name);
    let (file, library) = (directory.join("library.c"), directory.join(format!("lib{name}.so")));
    std::fs::write(&file, source).expect("a source file");
    let mut cc = command(std::env::var("CC").unwrap_or_else(|_| "cc".to_owned()), [("LC_ALL", "C")]);
    cc.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&file).args(arguments);
    let output = run(cc, WATCHDOG);
    assert!(output.status.success(), "{}", text(&output.stderr));
    library
}

#[test]
fn a_library_whose_own_library_is_missing_is_refused_with_the_name_of_that_one() {
    let needed = c_library("needed", "int needed(void) { return 1; }", &[]);
    let directory = needed.parent().expect("a directory").to_str().expect("UTF-8");
    let source = "int needed(void); int call(void) { return needed(); }";
    let plugin = c_library("needs", source, &["-L", directory, "-lneeded"]);
    let error = refusal(&plugin, "c");
    assert!(error.contains("a library it needs is missing: libneeded.so"), "{error}");
}

#[test]
fn a_library_that_is_no_engine_is_refused_by_the_symbol() {
    let plugin = c_library("plain", "int plain = 1;", &[]);
    assert!(refusal(&plugin, "c").contains("no symbol baton_engine_v1: not an engine"));
    if doors().contains(&"rust") {
        assert!(refusal(&plugin, "rust").contains("not an engine"));
    }
    let plugin = c_library("other", "unsigned long long baton_engine_v1[64] = { 7 };", &[]);
    assert!(refusal(&plugin, "c").contains("the symbol is no table of an engine"));
    let unresolved = "int nowhere(void); int call(void) { return nowhere(); }";
    let plugin = c_library("unresolved", unresolved, &[]);
    assert!(refusal(&plugin, "c").contains("undefined symbol: nowhere"));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_library_of_another_architecture_is_refused_with_the_names_of_both() {
    let plugin = c_library("foreign", "int plain = 1;", &[]);
    let mut bytes = std::fs::read(&plugin).expect("a library");
    bytes[18..20].copy_from_slice(&183u16.to_le_bytes());
    std::fs::write(&plugin, bytes).expect("a library");
    let error = refusal(&plugin, "c");
    assert!(error.contains("is for AArch64") && error.contains("this process runs on x86-64"), "{error}");
}
