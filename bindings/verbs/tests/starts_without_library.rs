//! A program that links the bindings needs none of rdma-core's libraries to start.

use baton_verbs::{Library, LibraryError};

fn mapped() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux");
    let files = maps.lines().filter_map(|line| line.split_once('/').map(|(_, path)| path.to_owned()));
    files
        .filter(|path| ["libibverbs", "librdmacm", "libmlx5"].iter().any(|name| path.contains(name)))
        .collect()
}

#[test]
fn libibverbs_is_loaded_when_it_is_opened_and_not_before() {
    // Whatever is needed by name in the executable would be mapped by now.
    assert_eq!(mapped(), Vec::<String>::new());
    match Library::open() {
        Ok(library) => {
            assert!(mapped().iter().any(|path| path.contains("libibverbs")));
            library.devices().expect("listing devices works, also where there are none");
        }
        Err(LibraryError::Open(reason)) => assert!(!reason.is_empty()),
        Err(e) => panic!("{e}"),
    }
}
