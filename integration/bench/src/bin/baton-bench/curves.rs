//! `baton-bench plot`: curves out of files of earlier runs.

use std::path::{Path, PathBuf};

use baton_bench::{panels, plot, points_of};
use clap::Args;

use crate::Outcome;

#[derive(Args)]
pub struct Options {
    /// Files written with --json or --csv, by `run` or `peers` or `cargo xtask bench`.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Where to write: this with .svg and with .png behind it.
    #[arg(long, default_value = "baton-bench", value_name = "PATH")]
    out: PathBuf,
}

fn read(path: &Path) -> Outcome<(String, Vec<baton_bench::Point>)> {
    let told = |error: String| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| told(error.to_string()))?;
    let points = points_of(&text).map_err(told)?;
    let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    Ok((name, points))
}

/// Draws, and tells which files it wrote.
pub fn run(options: &Options) -> Outcome<()> {
    let files = options.files.iter().map(|path| read(path)).collect::<Outcome<Vec<_>>>()?;
    let panels = panels(&files);
    let write = |kind: &str, bytes: &[u8]| {
        let mut path = options.out.clone().into_os_string();
        path.push(format!(".{kind}"));
        let path = PathBuf::from(path);
        std::fs::write(&path, bytes).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        println!("{}", path.display());
        Ok::<(), String>(())
    };
    write("svg", plot::svg(&panels)?.as_bytes())?;
    write("png", &plot::png(&panels)?)
}
