//! Link options of the plugin.

fn main() {
    // Never unloaded: threads and thread-local destructors would outlive the code. All symbols are resolved at load.
    for arg in ["-Wl,-z,nodelete", "-Wl,-z,now", "-Wl,-z,relro", "-Wl,-z,defs"] {
        println!("cargo::rustc-cdylib-link-arg={arg}");
    }
    println!("cargo::rerun-if-env-changed=BATON_BUILD_VERSION");
    println!("cargo::rerun-if-changed=build.rs");
}
