//! Compiles the C++ glue into the plugin and links it so that it needs nothing from NIXL and shows two symbols.

use std::path::Path;

fn main() {
    println!("cargo:rerun-if-changed=cpp");
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++20")
        .file("cpp/backend.cpp")
        .flag("-fvisibility=hidden")
        .flag("-fvisibility-inlines-hidden")
        .flag("-Wall")
        .flag("-Wextra")
        .flag("-Werror=return-type")
        .define("_GLIBCXX_USE_CXX11_ABI", "1")
        // The C++ library is linked below, statically where that is possible.
        .cpp_link_stdlib(None);
    build.compile("baton_nixl_glue");
    link_cpp_library(&build);

    // -z defs: NIXL shows an undefined symbol only at log level INFO. -z nodelete: NIXL 1.0 closes the plugin while
    // threads may still be in it.
    for arg in ["-Wl,-Bsymbolic-functions", "-Wl,-z,defs", "-Wl,-z,relro,-z,now", "-Wl,-z,nodelete"] {
        println!("cargo:rustc-cdylib-link-arg={arg}");
    }
}

/// A private copy of libstdc++ makes one build run under older C++ libraries; without the archive the shared one serves.
fn link_cpp_library(build: &cc::Build) {
    let answer = build.get_compiler().to_command().arg("-print-file-name=libstdc++.a").output();
    let path = answer.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned()).unwrap_or_default();
    match Path::new(&path).parent() {
        Some(dir) if dir.is_absolute() => {
            println!("cargo:rustc-link-search=native={}", dir.display());
            println!("cargo:rustc-link-lib=static:-bundle=stdc++");
        }
        _ => println!("cargo:rustc-link-lib=stdc++"),
    }
}
