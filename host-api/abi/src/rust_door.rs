//! The Rust door: the table once more as a root module of abi_stable, whose layout check walks every type in it.
//!
//! The mirror [`EngineRootV1`] is generated from the table and has its layout bit for bit, so a host that came
//! in through this door goes on with the same `BatonEngineV1`.

pub use abi_stable;

use abi_stable::library::{
    __call_root_module_loader, CheckTypeLayout, IntoRootModuleResult, LibHeader, RootModule, RootModuleResult,
};
use abi_stable::prefix_type::PrefixTypeTrait;
use abi_stable::sabi_types::VersionStrings;

use crate::*;

include!(concat!(env!("OUT_DIR"), "/mirror.rs"));

// SAFETY: as the table itself: immutable data and pointers to immutable statics.
unsafe impl Sync for EngineRootV1 {}
// SAFETY: as above.
unsafe impl Send for EngineRootV1 {}

// SAFETY: as above.
unsafe impl Sync for EngineRootV1Prefix {}
// SAFETY: as above.
unsafe impl Send for EngineRootV1Prefix {}

impl RootModule for EngineRootV1Ref {
    abi_stable::declare_root_module_statics! {EngineRootV1Ref}
    const BASE_NAME: &'static str = "baton_engine";
    const NAME: &'static str = "baton_engine";
    const VERSION_STRINGS: VersionStrings = abi_stable::package_version_strings!();
}

impl EngineRootV1Ref {
    /// The table behind this root module. Only its first `size_bytes` bytes exist.
    pub fn table(self) -> *const BatonEngineV1 {
        core::ptr::from_ref(self.0.prefix()).cast()
    }
}

/// The root module of a table.
pub fn root(table: &BatonEngineV1) -> EngineRootV1Ref {
    // SAFETY: the mirror has the table's fields in the table's order, with wrappers that are transparent.
    let mirror = unsafe { core::mem::transmute::<BatonEngineV1, EngineRootV1>(*table) };
    mirror.leak_into_prefix()
}

/// Runs a root module loader for [`export_engine_root!`].
pub fn load<T>(loader: fn() -> T) -> RootModuleResult
where
    T: IntoRootModuleResult,
{
    __call_root_module_loader(loader)
}

/// The header that [`export_engine_root!`] exports.
///
/// # Safety
/// `constructor` must return an erased [`EngineRootV1Ref`].
pub const unsafe fn header(constructor: extern "C" fn() -> RootModuleResult) -> LibHeader {
    // SAFETY: the caller's promise.
    unsafe { LibHeader::from_constructor::<EngineRootV1Ref>(constructor, CheckTypeLayout::Yes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exported_name_is_the_one_abi_stable_looks_up() {
        assert_eq!(abi_stable::library::ROOT_MODULE_LOADER_NAME, "_1as_0lib_1header_0root_bmodule_bloader");
    }
}
