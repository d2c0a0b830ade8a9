//! What an engine library needs to open its doors: the head of the table and the exported symbols.

/// Builds a [`BatonEngineV1`](crate::BatonEngineV1): name and version of the engine, then its entries by name.
/// Those not named answer `BATON_ERR_UNSUPPORTED`.
///
/// ```ignore
/// const TABLE: BatonEngineV1 = baton_abi::engine_table! {
///     name: "example",
///     version: env!("CARGO_PKG_VERSION"),
///     create: entries::create,
///     // … and all the others
/// };
/// ```
#[macro_export]
macro_rules! engine_table {
    (name: $name:expr, version: $version:expr, $($entry:ident: $function:expr),+ $(,)?) => {
        $crate::BatonEngineV1 {
            engine_name: $crate::BatonSlice::from_static($name),
            engine_version: $crate::BatonSlice::from_static($version),
            $($entry: $function,)+
            ..$crate::UNSUPPORTED_TABLE
        }
    };
}

/// Opens the C door: exports a constant [`BatonEngineV1`](crate::BatonEngineV1) as the data symbol
/// `baton_engine_v1`.
#[macro_export]
macro_rules! export_engine {
    ($table:expr) => {
        /// The table of this engine.
        #[allow(non_upper_case_globals)]
        #[unsafe(no_mangle)]
        pub static baton_engine_v1: $crate::BatonEngineV1 = $table;
    };
}

/// Opens the Rust door: exports the same constant as a root module of abi_stable. Without the feature
/// `stable_abi` it expands to nothing.
#[cfg(feature = "stable_abi")]
#[macro_export]
macro_rules! export_engine_root {
    ($table:expr) => {
        const _: () = {
            extern "C" fn root() -> $crate::rust_door::abi_stable::library::RootModuleResult {
                $crate::rust_door::load(|| $crate::rust_door::root(&$table))
            }

            // The name is abi_stable's for "the header of this library"; a test compares it.
            #[unsafe(export_name = "_1as_0lib_1header_0root_bmodule_bloader")]
            pub static HEADER: $crate::rust_door::abi_stable::library::LibHeader =
                // SAFETY: `root` returns an erased `EngineRootV1Ref`.
                unsafe { $crate::rust_door::header(root) };
        };
    };
}

/// Opens the Rust door: exports the same constant as a root module of abi_stable. Without the feature
/// `stable_abi` it expands to nothing.
#[cfg(not(feature = "stable_abi"))]
#[macro_export]
macro_rules! export_engine_root {
    ($table:expr) => {};
}
