//! Hosts in C and C++ on baton.h and baton.hpp, linked with libbaton.so and with the static library.

use std::path::{Path, PathBuf};

use baton_tests::{WATCHDOG, build_engine, build_libbaton, command, run, scratch, text, workspace};

/// How a program finds the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Linking {
    Shared,
    Static,
}

fn compile(source: &str, linking: Linking) -> PathBuf {
    let (compiler, standard) =
        if source.ends_with(".c") { ("CC", "-std=c99") } else { ("CXX", "-std=c++17") };
    let default = if compiler == "CC" { "cc" } else { "c++" };
    let libraries = build_libbaton();
    let program = scratch(&format!("{source}-{linking:?}")).join("host");
    let mut cc = command(std::env::var(compiler).unwrap_or_else(|_| default.to_owned()), [("LC_ALL", "C")]);
    cc.args([standard, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-o"]).arg(&program);
    cc.arg("-I").arg(workspace().join("bindings/c/include"));
    cc.arg(workspace().join("bindings/c/test").join(source));
    match linking {
        Linking::Shared => {
            cc.arg("-L").arg(&libraries).arg("-lbaton");
            cc.arg(format!("-Wl,-rpath,{}", libraries.display()));
        }
        Linking::Static => {
            cc.arg(libraries.join("libbaton.a")).args([
                "-lgcc_s",
                "-lpthread",
                "-ldl",
                "-lm",
                "-lrt",
                "-lutil",
            ]);
        }
    }
    let output = run(cc, WATCHDOG);
    assert!(output.status.success(), "{source}: {}", text(&output.stderr));
    program
}

fn transfer(program: &Path, engine: &Path) -> String {
    let output = run(command(program, [("BATON_PLUGIN", engine.as_os_str())]), WATCHDOG);
    assert!(
        output.status.success(),
        "{} on {}: {}",
        program.display(),
        engine.display(),
        text(&output.stderr)
    );
    text(&output.stdout)
}

#[test]
fn a_host_in_c_and_one_in_cpp_run_a_transfer_on_the_example_engine() {
    let engine = build_engine("baton-example-engine", None);
    for source in ["smoke.c", "smoke.cpp"] {
        for linking in [Linking::Shared, Linking::Static] {
            let line = transfer(&compile(source, linking), &engine);
            assert!(line.contains("host: "), "{line}");
        }
    }
}

#[test]
fn a_host_in_c_and_one_in_cpp_run_a_transfer_on_the_engine() {
    let engine = build_engine("baton-engine", None);
    for source in ["smoke.c", "smoke.cpp"] {
        let line = transfer(&compile(source, Linking::Shared), &engine);
        for part in ["by index: ", "managed: ", "host: "] {
            assert!(line.contains(part), "{line}");
        }
    }
}

#[test]
fn without_the_variable_the_engine_must_be_beside_libbaton() {
    let program = compile("smoke.c", Linking::Static);
    let beside = program.parent().expect("a directory").join("libbaton_engine.so");
    let output = run(command(&program, [("BATON_LOG", "off")]), WATCHDOG);
    let error = text(&output.stderr);
    assert!(error.contains(&format!("{}: no such file (beside ", beside.display())), "{error}");

    std::fs::copy(build_engine("baton-example-engine", None).join("libbaton_engine.so"), &beside)
        .expect("a copy");
    let output = run(command(&program, [("BATON_LOG", "off")]), WATCHDOG);
    assert!(output.status.success(), "{}", text(&output.stderr));
}
