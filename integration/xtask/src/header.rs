//! `cargo xtask header`.

use crate::run::Outcome;

pub fn run(_check: bool) -> Outcome<()> {
    Err("not yet".to_owned())
}
