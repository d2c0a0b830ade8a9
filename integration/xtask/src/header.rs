//! `cargo xtask header`: the two texts that are generated from Rust, the C header and the README's table of settings.

use crate::run::{Outcome, cargo, minutes, root, run};

/// The README's table stands between these lines.
const BEGIN: &str = "<!-- settings: written by cargo xtask header -->\n";
const END: &str = "<!-- end of settings -->\n";

/// Writes both, or with `check` only compares them.
pub fn header(check: bool) -> Outcome<()> {
    let mut generate = cargo();
    generate.args(["run", "--quiet", "--locked", "-p", "baton", "--example", "gen-header"]);
    if check {
        generate.args(["--", "--check"]);
    }
    run(&mut generate, minutes(10))?;
    settings_table(check)
}

fn settings_table(check: bool) -> Outcome<()> {
    let path = root().join("README.md");
    let told = |error: std::io::Error| format!("{}: {error}", path.display());
    let text = std::fs::read_to_string(&path).map_err(told)?;
    let fresh = with_table(&text, &baton_host::settings::markdown())?;
    match (text == fresh, check) {
        (true, _) => Ok(()),
        (false, true) => {
            Err("README.md: the table of settings is not what host-api/shim says; run cargo xtask header"
                .into())
        }
        (false, false) => std::fs::write(&path, fresh).map_err(told),
    }
}

fn with_table(text: &str, table: &str) -> Outcome<String> {
    let marked = text.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let (before, after) = marked.ok_or_else(|| format!("README.md lacks the lines {BEGIN:?} and {END:?}"))?;
    Ok(format!("{before}{BEGIN}{table}{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::{BEGIN, END, with_table};

    #[test]
    fn only_what_stands_between_the_marks_is_replaced() {
        let text = format!("before\n{BEGIN}old\n{END}after\n");
        assert_eq!(with_table(&text, "new\n"), Ok(format!("before\n{BEGIN}new\n{END}after\n")));
        assert!(with_table("no marks", "new\n").is_err());
    }
}
