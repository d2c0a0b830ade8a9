// What the Rust side offers to the C++ side: a table of functions, so that nothing has to be exported by name.
// src/face.rs holds the other half; both are written by hand and the sizes are compared when the plugin is loaded.
#pragma once

#include <cstdint>

namespace baton_nixl {

struct Agent; // one NIXL backend engine, owned by Rust

// Borrowed bytes.
struct Bytes {
    const char *ptr;
    std::uint64_t len;
};

struct Setting {
    Bytes key;
    Bytes value;
};

// One half of a transfer's pair; `region` is a handle that Rust gave out.
struct Piece {
    std::uint64_t addr;
    std::uint64_t len;
    std::uint64_t region;
    std::uint64_t reserved;
};

// Appends bytes to something of the caller's; false when that failed.
using PutBytes = bool (*)(void *user, Bytes bytes);
using PutPair = bool (*)(void *user, Bytes first, Bytes second);

// Statuses are NIXL's. No entry unwinds.
struct Face {
    std::uint64_t size;

    Agent *(*create)(Bytes agent_name, const Setting *settings, std::uint64_t count, int progress_thread);
    void (*destroy)(Agent *);
    void (*options)(void *user, PutPair put);
    const char *(*version)();
    void (*complain)(Bytes message);

    int (*takes_vram)(Agent *); // whether memory of accelerators can be registered
    int (*register_memory)(Agent *, std::uint64_t addr, std::uint64_t len, std::uint64_t device, int vram,
                           std::uint64_t *region);
    int (*deregister_memory)(Agent *, std::uint64_t region);
    int (*export_memory)(Agent *, std::uint64_t region, void *user, PutBytes put);
    int (*import_memory)(Agent *, Bytes peer, Bytes blob, std::uint64_t *remote_region);
    int (*import_own)(Agent *, std::uint64_t region, std::uint64_t *remote_region);
    int (*unload_memory)(Agent *, std::uint64_t remote_region);

    int (*conn_info)(Agent *, void *user, PutBytes put);
    int (*load_remote)(Agent *, Bytes peer, Bytes info);
    int (*connect)(Agent *, Bytes peer);
    int (*disconnect)(Agent *, Bytes peer);

    int (*prep)(Agent *, int op, Bytes peer, const Piece *local, std::uint64_t local_count, const Piece *remote,
                std::uint64_t remote_count, void **request);
    int (*post)(Agent *, void *request, int has_message, Bytes message);
    int (*check)(Agent *, void *request);
    int (*release)(Agent *, void *request);

    int (*send_notification)(Agent *, Bytes peer, Bytes message);
    int (*take_notifications)(Agent *, void *user, PutPair put);
};

} // namespace baton_nixl

// Called by the Rust entry point. Null when the layout is not what NIXL expects (said on stderr by `complain`).
extern "C" void *baton_nixl_plugin(const baton_nixl::Face *face);
// What is wrong with the layout of this build, or null.
extern "C" const char *baton_nixl_layout_error();
