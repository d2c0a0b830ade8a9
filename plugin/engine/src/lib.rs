//! The engine as a dynamic plugin: `libbaton_engine.so`.
//!
//! It exports one table of functions through two doors, the data symbol `baton_engine_v1` and a root module of abi_stable. Every entry is
//! guarded: no panic crosses, a forked child touches nothing, every error leaves its text for `last_error`.

mod convert;
mod create;
mod entries;
mod guard;
mod logging;
mod managed;
mod object;
mod settings;
mod telling;
mod verbs;

/// Version of this build; a build may carry another label than the package's.
const VERSION: &str = match option_env!("BATON_BUILD_VERSION") {
    Some(label) => label,
    None => env!("CARGO_PKG_VERSION"),
};

/// The engine's table.
const TABLE: baton_abi::BatonEngineV1 = baton_abi::engine_table! {
    name: "baton",
    version: VERSION,
    create: entries::create,
    destroy: entries::destroy,
    conn_info: entries::conn_info,
    load_remote: entries::load_remote,
    connect: entries::connect,
    disconnect: entries::disconnect,
    register: entries::register,
    deregister: entries::deregister,
    export_region: entries::export_region,
    import_region: entries::import_region,
    release_remote_region: entries::release_remote_region,
    create_xfer_req: create::create_xfer_req,
    create_block_list: create::create_block_list,
    release_block_list: create::release_block_list,
    create_xfer_from_indices: create::create_xfer_from_indices,
    post_xfer_req: entries::post_xfer_req,
    xfer_status: entries::xfer_status,
    xfer_error: entries::xfer_error,
    xfer_cancel: entries::xfer_cancel,
    release_xfer_req: entries::release_xfer_req,
    poll_many: entries::poll_many,
    gen_notif: entries::gen_notif,
    get_notifs: entries::get_notifs,
    inbound_status: telling::inbound_status,
    set_event_hook: entries::set_event_hook,
    notify_fd: entries::notify_fd,
    alloc_managed: managed::alloc_managed,
    free_managed: managed::free_managed,
    progress: entries::progress,
    stats: entries::stats,
    set_log_level: entries::set_log_level,
    probe: entries::probe,
    last_error: entries::last_error,
    post_xfer_req_with: telling::post_xfer_req_with,
};

baton_abi::export_engine!(TABLE);
baton_abi::export_engine_root!(TABLE);
