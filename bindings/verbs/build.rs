//! Says what is missing before rdma-sys' build fails with less to go by.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for variable in ["LIBCLANG_PATH", "LLVM_CONFIG_PATH", "PKG_CONFIG_PATH", "PKG_CONFIG"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    #[cfg(feature = "verbs")]
    if let Err(missing) = verbs::check() {
        let without = "or build without RDMA: leave out the feature `verbs` (for the engine: -p baton-engine \
                       --no-default-features --features rust-door)";
        eprintln!(
            "\nThe bindings to libibverbs cannot be built: {missing};\n  {without}.\nAt run time libibverbs is optional in either case.\n"
        );
        std::process::exit(1);
    }
}

#[cfg(feature = "verbs")]
mod verbs {
    use std::ffi::CStr;
    use std::process::Command;

    /// The oldest rdma-core with what rdma-sys declares, by its libraries' own numbers.
    const NEEDED: [(&str, &str, &str); 2] =
        [("libibverbs", "1.8.28", "libibverbs-dev"), ("librdmacm", "1.2.28", "librdmacm-dev")];
    /// rdma-sys 0.3.0 panics with newer ones: its bindgen does not understand what they say.
    const NEWEST_CLANG: u32 = 15;

    pub fn check() -> Result<(), String> {
        for (library, version, package) in NEEDED {
            headers(library, version, package)?;
        }
        clang()
    }

    fn headers(library: &str, version: &str, package: &str) -> Result<(), String> {
        let program = std::env::var("PKG_CONFIG").unwrap_or_else(|_| "pkg-config".to_owned());
        let asked = Command::new(&program).args(["--atleast-version", version, library]).status();
        match asked {
            Ok(status) if status.success() => Ok(()),
            Ok(_) => Err(format!(
                "{program} knows no {library} of at least {version} (Debian, Ubuntu: apt install {package}; \
                 elsewhere rdma-core's development files)"
            )),
            Err(e) => Err(format!("{program} cannot be run: {e} (Debian, Ubuntu: apt install pkg-config)")),
        }
    }

    /// Loads the libclang that bindgen is going to load, by the same search, and asks for its version.
    fn clang() -> Result<(), String> {
        let advice = format!(
            "install one of at most {NEWEST_CLANG} (Debian 12, Ubuntu: apt install libclang-14-dev) and, where several are \
             installed, set LIBCLANG_PATH=/usr/lib/llvm-14/lib"
        );
        clang_sys::load().map_err(|e| format!("no libclang was found ({e}); {advice}"))?;
        let library = clang_sys::get_library().ok_or("libclang was loaded and is gone")?;
        // SAFETY: libclang is loaded; the text is copied before it is given back.
        let version = unsafe {
            let text = clang_sys::clang_getClangVersion();
            let copy = CStr::from_ptr(clang_sys::clang_getCString(text)).to_string_lossy().into_owned();
            clang_sys::clang_disposeString(text);
            copy
        };
        let number = version.split_once("version ").map_or(version.as_str(), |(_, number)| number);
        let major: Option<u32> =
            number.split(|c: char| !c.is_ascii_digit()).next().and_then(|n| n.parse().ok());
        match major {
            Some(major) if major > NEWEST_CLANG => Err(format!(
                "libclang at {} is version {major}, and rdma-sys 0.3.0 panics with one above {NEWEST_CLANG}; {advice}",
                library.path().display()
            )),
            // A text that is not understood is left to rdma-sys to judge.
            _ => Ok(()),
        }
    }
}
