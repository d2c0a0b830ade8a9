//! The program that libFuzzer drives; `cargo xtask fuzz` builds and runs it.
//!
//! `BATON_FUZZ_TARGET` says which target. With `BATON_FUZZ_SEEDS` it writes the seeds of all targets below that folder instead, and
//! prints a line for each target: its name and its longest useful input.
#![no_main]

use std::path::Path;
use std::process::exit;
use std::sync::OnceLock;

use baton_fuzz::{TARGETS, Target, dictionary};

static TARGET: OnceLock<&'static Target> = OnceLock::new();

libfuzzer_sys::fuzz_target!(
    init: begin(),
    |bytes: &[u8]| {
        (TARGET.get().expect("begin() chose one").run)(bytes);
    }
);

fn begin() {
    if let Some(folder) = std::env::var_os("BATON_FUZZ_SEEDS") {
        if let Err(error) = write_seeds(Path::new(&folder)) {
            eprintln!("baton-fuzz: {}: {error}", Path::new(&folder).display());
            exit(1);
        }
        exit(0);
    }
    let name = std::env::var("BATON_FUZZ_TARGET").unwrap_or_default();
    let Some(target) = TARGETS.iter().find(|target| target.name == name) else {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("baton-fuzz: BATON_FUZZ_TARGET is {name:?}; there are {}", names.join(", "));
        exit(1);
    };
    TARGET.get_or_init(|| target);
}

fn write_seeds(folder: &Path) -> std::io::Result<()> {
    for target in TARGETS {
        let own = folder.join(target.name);
        std::fs::create_dir_all(&own)?;
        let seeds = (target.seeds)();
        for (nth, seed) in seeds.iter().enumerate() {
            std::fs::write(own.join(format!("seed-{nth:03}")), seed)?;
        }
        let words: String = dictionary(&seeds).iter().map(|word| quoted(word)).collect();
        std::fs::write(folder.join(format!("{}.dict", target.name)), words)?;
        println!("{} {}", target.name, target.max_len);
    }
    Ok(())
}

/// A line of libFuzzer's dictionaries.
fn quoted(word: &str) -> String {
    format!("\"{}\"\n", word.replace('\\', "\\\\").replace('"', "\\\""))
}
