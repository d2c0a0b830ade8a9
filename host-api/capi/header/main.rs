//! Writes `bindings/c/include/baton.h`, or with `--check` only compares it.

mod generate;

use std::process::ExitCode;

fn main() -> ExitCode {
    let (path, fresh) = (generate::header_path(), generate::header());
    let current = std::fs::read_to_string(&path).unwrap_or_default();
    match std::env::args().nth(1).as_deref() {
        Some("--check") if current == fresh => ExitCode::SUCCESS,
        Some("--check") => {
            eprintln!("{} is not what the sources say; run cargo xtask header", path.display());
            ExitCode::FAILURE
        }
        Some(other) => {
            eprintln!("unknown argument {other:?}; known is --check");
            ExitCode::FAILURE
        }
        None if current == fresh => ExitCode::SUCCESS,
        None => match std::fs::write(&path, fresh) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{}: {error}", path.display());
                ExitCode::FAILURE
            }
        },
    }
}
