//! Engines built against an interface that is not quite ours: the sources of the interface and of the example
//! engine are copied, changed in one place, and built there.

use std::path::{Path, PathBuf};

use crate::{building, cargo_build, profile_dir, target_dir, workspace};

/// How the interface of the engine differs from ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// One entry more at the end of the table.
    Newer,
    /// One entry less at the end of the table.
    Older,
    /// A field of a structure has another type.
    Changed,
    /// Another major version.
    Major,
}

/// A file, what to replace in it, with what.
type Edit = (&'static str, &'static str, &'static str);

impl Variant {
    fn name(self) -> &'static str {
        match self {
            Variant::Newer => "newer",
            Variant::Older => "older",
            Variant::Changed => "changed",
            Variant::Major => "major",
        }
    }

    fn edits(self) -> &'static [Edit] {
        match self {
            Variant::Newer => &[
                (
                    "host-api/abi/src/table.rs",
                    "    /// `post_xfer_req` with options",
                    "    /// The last entry, moved.\n    pub post_xfer_req_with:\n        unsafe extern \"C\" fn(engine: *mut \
                     BatonEngine, xfer: *mut BatonXfer, options: *const BatonPostOptions) -> BatonStatus,\n    /// A new entry.\n    \
                     pub brand_new: unsafe extern \"C\" fn(engine: *mut BatonEngine) -> BatonStatus,\n}\n\n#[cfg(any())]\nstruct Rest {\n    /// `post_xfer_req` with options",
                ),
                ("host-api/abi/src/layout.rs", "BatonEngineV1, 344,", "BatonEngineV1, 352,"),
                (
                    "host-api/abi/src/layout.rs",
                    "post_xfer_req_with @ 336,",
                    "post_xfer_req_with @ 336, brand_new @ 344,",
                ),
                ("host-api/abi/src/lib.rs", "BATON_ABI_MINOR: u32 = 1", "BATON_ABI_MINOR: u32 = 2"),
                ("host-api/abi/Cargo.toml", "version = \"1.1.0\"", "version = \"1.2.0\""),
            ],
            Variant::Older => &[
                (
                    "host-api/abi/src/table.rs",
                    "    /// `post_xfer_req` with options",
                    "}\n\n#[cfg(any())]\nstruct Rest {\n    /// `post_xfer_req` with options",
                ),
                ("host-api/abi/src/layout.rs", "BatonEngineV1, 344,", "BatonEngineV1, 336,"),
                ("host-api/abi/src/layout.rs", "post_xfer_req_with @ 336,", ""),
            ],
            Variant::Changed => {
                &[("host-api/abi/src/types.rs", "    pub device: u64,", "    pub device: i64,")]
            }
            Variant::Major => &[
                ("host-api/abi/src/lib.rs", "BATON_ABI_MAJOR: u32 = 1", "BATON_ABI_MAJOR: u32 = 2"),
                ("host-api/abi/Cargo.toml", "version = \"1.1.0\"", "version = \"2.0.0\""),
            ],
        }
    }
}

/// Builds the example engine against a changed interface; returns the library.
pub fn build_variant(variant: Variant) -> PathBuf {
    let _building = building();
    let root = target_dir().join("abi-variants").join(variant.name());
    let library = format!("baton_example_engine_{}", variant.name());

    for folder in ["host-api/abi", "integration/tests/example-engine"] {
        let mut files = Vec::new();
        list(&workspace().join(folder), &mut files);
        for from in files {
            let inside = from.strip_prefix(workspace()).expect("listed there").to_owned();
            let mut text = std::fs::read_to_string(&from).expect("a source file");
            for (file, old, new) in variant.edits() {
                if Path::new(file) == inside {
                    assert_eq!(text.matches(old).count(), 1, "{file}: {old:?} must be there once");
                    text = text.replace(old, new);
                }
            }
            text = text.replace("name = \"baton_example_engine\"", &format!("name = \"{library}\""));
            write_if_changed(&root.join(variant.name()).join(inside), &text);
        }
    }
    let manifest = std::fs::read_to_string(workspace().join("Cargo.toml")).expect("the workspace");
    let (head, rest) = manifest.split_once("members = [").expect("has members");
    let (_, tail) = rest.split_once(']').expect("a list ends");
    // Cargo tells packages in one target directory apart by their path inside the workspace: a folder of its own
    // for every variant, or they would overwrite each other and ours.
    let name = variant.name();
    let members = format!("members = [\"{name}/host-api/abi\", \"{name}/integration/tests/example-engine\"]");
    let tail = tail.replace("\"host-api/abi\"", &format!("\"{name}/host-api/abi\""));
    write_if_changed(&root.join("Cargo.toml"), &format!("{head}{members}{tail}"));
    std::fs::copy(workspace().join("Cargo.lock"), root.join("Cargo.lock")).expect("the lock file");
    cargo_build(&root, "baton-example-engine", None);
    profile_dir().join(format!("lib{library}.so"))
}

/// What has not changed keeps its time, so that cargo need not build it again.
fn write_if_changed(path: &Path, text: &str) {
    if std::fs::read_to_string(path).is_ok_and(|old| old == text) {
        return;
    }
    std::fs::create_dir_all(path.parent().expect("a file is in a directory")).expect("scratch directory");
    std::fs::write(path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

fn list(directory: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display())) {
        let path = entry.expect("a directory entry").path();
        if path.is_dir() { list(&path, files) } else { files.push(path) }
    }
}
