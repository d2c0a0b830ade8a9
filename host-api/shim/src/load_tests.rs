use super::*;

/// A file that goes with the test.
struct Scratch(PathBuf);

impl std::ops::Deref for Scratch {
    type Target = PathBuf;
    fn deref(&self) -> &PathBuf {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.0.parent().expect("it is in a directory"));
    }
}

fn scratch(name: &str, bytes: &[u8]) -> Scratch {
    let directory = std::env::temp_dir().join(format!("baton-load-{}-{name}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("scratch directory");
    let path = directory.join(ENGINE_FILE);
    std::fs::write(&path, bytes).expect("scratch file");
    Scratch(path.canonicalize().expect("just written"))
}

fn refusal(path: &Path) -> String {
    let text = load(path, Door::C).expect_err("refused").to_string();
    assert!(!text.contains('\n'), "{text}");
    assert!(text.contains(&*path.to_string_lossy()), "{text}");
    text
}

fn header() -> Vec<u8> {
    let mut header = vec![0; 64];
    header[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1]);
    header[16..18].copy_from_slice(&3u16.to_le_bytes());
    header[18..20].copy_from_slice(&62u16.to_le_bytes());
    header
}

#[test]
fn a_path_that_does_not_exist_is_an_error_that_says_who_named_it() {
    let error = find(Some(("/no/such/engine.so", "environment"))).expect_err("refused");
    assert_eq!(
        error.to_string(),
        "engine /no/such/engine.so: no such file (named by the setting plugin, from environment)"
    );
}

#[test]
fn a_directory_means_the_engine_in_it() {
    let path = scratch("directory", b"x");
    let directory = path.parent().expect("has one").to_str().expect("UTF-8");
    assert_eq!(find(Some((directory, "parameter"))).map(|p| p.path), Ok(path.clone()));
    std::fs::remove_file(&*path).expect("remove");
    let error = find(Some((directory, "parameter"))).expect_err("refused").to_string();
    assert!(error.contains("libbaton_engine.so: no such file"), "{error}");
}

#[test]
fn without_the_setting_the_place_is_beside_this_program() {
    let own = own_file().expect("known");
    assert_eq!(own, std::env::current_exe().and_then(|p| p.canonicalize()).expect("known"));
    assert_eq!(mapped_file(own_file as *const () as usize).expect("mapped"), own);
}

#[test]
fn a_text_file_is_not_a_shared_library() {
    assert!(
        refusal(&scratch("text", b"hello"))
            .contains("is not a shared library: it begins with [68, 65, 6c, 6c]")
    );
    assert!(refusal(&scratch("empty", b"")).contains("is not a shared library"));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_library_of_another_machine_is_refused_with_both_names() {
    let mut other = header();
    other[18..20].copy_from_slice(&183u16.to_le_bytes());
    let text = refusal(&scratch("aarch64", &other));
    assert!(
        text.ends_with(
            "is for AArch64 (64 bit, little-endian), this process runs on x86-64 (64 bit, little-endian)"
        ),
        "{text}"
    );
    other[4] = 1;
    other[18..20].copy_from_slice(&3u16.to_le_bytes());
    assert!(refusal(&scratch("x86", &other)).contains("is for x86 (32 bit"));
    other[5] = 2;
    other[18..20].copy_from_slice(&22u16.to_be_bytes());
    assert!(refusal(&scratch("s390", &other)).contains("is for s390 (32 bit, big-endian)"));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_program_or_a_file_cut_off_is_refused_before_the_loader_sees_it() {
    let mut program = header();
    program[16..18].copy_from_slice(&2u16.to_le_bytes());
    assert!(refusal(&scratch("program", &program)).contains("its ELF type is 2"));
    assert!(refusal(&scratch("short", &header()[..40])).contains("is cut off: it has 40 bytes"));
    let mut cut = header();
    cut[32..40].copy_from_slice(&64u64.to_le_bytes());
    cut[54..56].copy_from_slice(&56u16.to_le_bytes());
    cut[56..58].copy_from_slice(&1u16.to_le_bytes());
    cut.extend([0; 56]);
    cut[64..68].copy_from_slice(&1u32.to_le_bytes());
    cut[64 + 32..64 + 40].copy_from_slice(&9999u64.to_le_bytes());
    assert!(refusal(&scratch("cut", &cut)).contains("its header speaks of 9999"));
}
