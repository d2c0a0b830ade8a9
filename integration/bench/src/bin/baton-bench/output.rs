//! Files that results go to.

use std::fs::OpenOptions;
use std::path::Path;

use crate::Outcome;

/// Standard output, in place of a file.
const STDOUT: &str = "-";

/// Before anything is measured: an error if a file of that flag could not be written. What is in it stays.
pub fn check(flag: &str, path: Option<&Path>) -> Outcome<()> {
    let Some(path) = path.filter(|path| *path != Path::new(STDOUT)) else { return Ok(()) };
    let is_new = !path.exists();
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map_err(|error| format!("{flag} {}: it cannot be written: {error}", path.display()))?;
    if is_new {
        std::fs::remove_file(path).map_err(|error| format!("{flag} {}: {error}", path.display()))?;
    }
    Ok(())
}

/// Writes a file; whether it was standard output.
pub fn write(path: &Path, text: &str) -> Outcome<bool> {
    if path == Path::new(STDOUT) {
        print!("{text}");
        return Ok(true);
    }
    std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_be_written_is_refused_by_name_and_a_check_leaves_nothing_behind() {
        let dir = std::env::temp_dir().join(format!("baton-bench-output-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let (new, old, nowhere) = (dir.join("new"), dir.join("old"), dir.join("none").join("file"));
        std::fs::write(&old, "kept").expect("a file");
        assert_eq!(check("--json", Some(&new)), Ok(()));
        assert!(!new.exists());
        assert_eq!(check("--json", Some(&old)), Ok(()));
        assert_eq!(std::fs::read_to_string(&old).expect("a file"), "kept");
        for bad in [&nowhere, &dir] {
            let refused = check("--csv", Some(bad)).expect_err("not a file that can be made");
            assert!(refused.starts_with(&format!("--csv {}: ", bad.display())), "{refused}");
        }
        assert_eq!(check("--json", Some(Path::new("-"))), Ok(()));
        assert_eq!(check("--json", None), Ok(()));
        std::fs::remove_dir_all(&dir).expect("its own folder");
    }
}
