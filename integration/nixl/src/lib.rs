//! `libplugin_BATON.so`: Baton as a NIXL backend.
//!
//! NIXL loads the library, calls [`nixl_plugin_init`] and gets a description of the backend whose virtual functions are
//! C++ (`cpp/`); they do nothing but call [`face`], which calls [`agent`]. The engine itself is another library, found
//! and loaded by `baton-host` when NIXL creates the backend: NIXL hides why a plugin failed to load, so this one loads
//! everywhere and says on stderr what is missing.

// NIXL derives the backend's name from the file's: lib plugin_BATON .so.
#![cfg_attr(not(test), expect(non_snake_case, reason = "the file must be called libplugin_BATON.so"))]

use std::ffi::c_void;

mod agent;
mod face;
mod log;
mod options;
mod status;

/// NIXL's entry point: describes the backend. Called again after [`nixl_plugin_fini`] in the same process.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_init() -> *mut c_void {
    log::unmute();
    face::plugin()
}

/// NIXL's exit: also called between two uses, so everything stays usable. Engines are destroyed by their agents; one
/// that outlives its agent at process exit keeps its threads, which may no longer write to a closing stderr.
#[unsafe(no_mangle)]
pub extern "C" fn nixl_plugin_fini() {
    log::mute();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpp_half_has_the_layout_nixl_expects() {
        assert_eq!(face::layout_error(), None);
    }

    #[test]
    fn init_works_again_after_fini() {
        let first = nixl_plugin_init();
        nixl_plugin_fini();
        assert!(!first.is_null());
        assert_eq!(nixl_plugin_init(), first);
    }
}
