// The glue between NIXL's virtual functions and the Rust side. It holds no state and makes no decision of its own:
// every function translates its arguments, calls the face, and lets no exception out.
#include "face.hpp"
#include "interface.hpp"

#include <cstring>
#include <exception>
#include <mutex>
#include <new>

namespace baton_nixl {
namespace {

const Face *g_face = nullptr; // a static of the Rust side, set before NIXL can call anything here

Bytes bytes_of(const std::string &text) {
    return {text.data(), text.size()};
}

bool put_string(void *user, Bytes bytes) {
    try {
        static_cast<std::string *>(user)->assign(bytes.ptr, bytes.len);
        return true;
    } catch (...) {
        return false;
    }
}

bool put_notification(void *user, Bytes name, Bytes message) {
    try {
        static_cast<Notifications *>(user)->emplace_back(std::string(name.ptr, name.len),
                                                         std::string(message.ptr, message.len));
        return true;
    } catch (...) {
        return false;
    }
}

bool put_setting(void *user, Bytes key, Bytes value) {
    try {
        static_cast<Settings *>(user)->emplace(std::string(key.ptr, key.len), std::string(value.ptr, value.len));
        return true;
    } catch (...) {
        return false;
    }
}

// Runs `body`; an exception (out of memory, in practice) becomes a status.
template <class Body> Status guarded(const char *what, Body &&body) noexcept {
    try {
        return body();
    } catch (const std::exception &error) {
        const char *reason = error.what();
        g_face->complain({what, std::strlen(what)});
        g_face->complain({reason, std::strlen(reason)});
    } catch (...) {
        g_face->complain({what, std::strlen(what)});
    }
    return Status::Backend;
}

// A registration of ours, or (remote) a peer's that was imported. `region` is the Rust side's handle.
class Memory final : public MemoryBase {
public:
    const std::uint64_t region;
    const bool remote;

    Memory(std::uint64_t region_, bool remote_) : MemoryBase(!remote_), region(region_), remote(remote_) {}
};

class Request final : public RequestBase {
public:
    void *const inner;

    explicit Request(void *inner_) : inner(inner_) {}
};

// The handles in a descriptor list, once per request: a post hands over nothing but the request.
void pieces_of(const MetaList &list, std::vector<Piece> &pieces) {
    pieces.clear();
    pieces.reserve(list.descs.size());
    for (const MetaDesc &desc : list.descs) {
        const auto *memory = static_cast<const Memory *>(desc.memory);
        pieces.push_back({desc.addr, desc.len, memory ? memory->region : 0, 0});
    }
}

// Both lists of a request. Large ones leave their memory to the next request: fresh memory costs the kernel more than
// filling it costs us. Very large ones do not, and neither do requests that are prepared at the same time.
class Lists {
public:
    template <typename Use> auto with(const MetaList &local, const MetaList &remote, Use use) {
        const std::unique_lock<std::mutex> turn{mutex_, std::try_to_lock};
        std::vector<Piece> fresh[2];
        std::vector<Piece> *const lists = turn ? kept_ : fresh;
        pieces_of(local, lists[0]);
        pieces_of(remote, lists[1]);
        auto answer = use(lists[0], lists[1]);
        for (std::vector<Piece> &list : kept_) {
            if (turn && list.capacity() > kMaxKept) std::vector<Piece>{}.swap(list);
        }
        return answer;
    }

private:
    static constexpr std::size_t kMaxKept = std::size_t{1} << 18;

    std::mutex mutex_;
    std::vector<Piece> kept_[2];
};

class Backend final : public EngineFields {
public:
    Backend(const InitParams &init, Agent *agent)
        : EngineFields(init), agent_(agent), takes_vram_(g_face->takes_vram(agent)) {}

    ~Backend() override { g_face->destroy(agent_); }

    bool supports_remote() const override { return true; }
    bool supports_local() const override { return true; }
    bool supports_notif() const override { return true; }
    // Memory of accelerators only where this host can register it: NIXL takes another backend for it then.
    std::vector<MemoryKind> supported_memory() const override {
        if (takes_vram_) return {MemoryKind::Dram, MemoryKind::Vram};
        return {MemoryKind::Dram};
    }

    Status register_memory(const BlobDesc &desc, const MemoryKind &kind, MemoryBase *&out) override {
        // Where it cannot be registered the engine says why, and the log with it.
        if (kind != MemoryKind::Dram && kind != MemoryKind::Vram) return Status::NotSupported;
        return guarded("registerMem", [&] {
            std::uint64_t region = 0;
            const Status status{g_face->register_memory(agent_, desc.addr, desc.len, desc.device,
                                                        kind == MemoryKind::Vram, &region)};
            if (status == Status::Success) out = keep(region, false);
            return status;
        });
    }

    Status deregister_memory(MemoryBase *memory) override {
        return guarded("deregisterMem", [&] { return drop(memory); });
    }

    Status connect(const std::string &agent) override {
        return Status{g_face->connect(agent_, bytes_of(agent))};
    }

    Status disconnect(const std::string &agent) override {
        return Status{g_face->disconnect(agent_, bytes_of(agent))};
    }

    Status unload_memory(MemoryBase *memory) override {
        return guarded("unloadMD", [&] { return drop(memory); });
    }

    Status prep_transfer(const Operation &operation, const MetaList &local, const MetaList &remote,
                         const std::string &agent, RequestBase *&handle, const OptionalArgs *) const override {
        return guarded("prepXfer", [&] {
            void *inner = nullptr;
            const auto prep = [&](const std::vector<Piece> &here, const std::vector<Piece> &there) {
                return Status{g_face->prep(agent_, static_cast<int>(operation), bytes_of(agent), here.data(),
                                           here.size(), there.data(), there.size(), &inner)};
            };
            const Status status = lists_.with(local, remote, prep);
            if (status != Status::Success) return status;
            handle = new (std::nothrow) Request(inner);
            if (handle) return status;
            g_face->release(agent_, inner);
            return Status::Backend;
        });
    }

    // The message is what this post was given: the agent itself remembers the one from creation.
    Status post_transfer(const Operation &, const MetaList &, const MetaList &, const std::string &,
                         RequestBase *&handle, const OptionalArgs *args) const override {
        if (!handle) return Status::InvalidParam;
        const bool has_message = args && args->has_message;
        const Bytes message = has_message ? bytes_of(args->message) : Bytes{nullptr, 0};
        return Status{g_face->post(agent_, static_cast<Request *>(handle)->inner, has_message, message)};
    }

    Status check_transfer(RequestBase *handle) const override {
        if (!handle) return Status::InvalidParam;
        return Status{g_face->check(agent_, static_cast<Request *>(handle)->inner)};
    }

    // A refusal means that memory may still be touched: the agent keeps the handle and its caller tries again.
    Status release_request(RequestBase *handle) const override {
        if (!handle) return Status::Success;
        const Status status{g_face->release(agent_, static_cast<Request *>(handle)->inner)};
        if (status == Status::Success) delete static_cast<Request *>(handle);
        return status;
    }

    Status prep_remote_view(const RemoteMetaList &, void *&, const OptionalArgs *) const override {
        return Status::NotSupported;
    }
    Status prep_local_view(const MetaList &, void *&, const OptionalArgs *) const override {
        return Status::NotSupported;
    }
    void release_view(void *) const override {}

    Status public_data(const MemoryBase *memory, std::string &out) const override {
        if (!memory) return Status::InvalidParam;
        return Status{g_face->export_memory(agent_, static_cast<const Memory *>(memory)->region, &out, put_string)};
    }

    Status conn_info(std::string &out) const override { return Status{g_face->conn_info(agent_, &out, put_string)}; }

    Status load_remote_conn_info(const std::string &agent, const std::string &info) override {
        return Status{g_face->load_remote(agent_, bytes_of(agent), bytes_of(info))};
    }

    Status load_remote_memory(const BlobDesc &desc, const MemoryKind &kind, const std::string &agent,
                              MemoryBase *&out) override {
        if (kind != MemoryKind::Dram && kind != MemoryKind::Vram) return Status::NotSupported;
        return guarded("loadRemoteMD", [&] {
            std::uint64_t region = 0;
            const Status status{
                g_face->import_memory(agent_, bytes_of(agent), bytes_of(desc.meta_info), &region)};
            if (status == Status::Success) out = keep(region, true);
            return status;
        });
    }

    // A self transfer addresses our own registration through this second handle, which is unloaded on its own.
    Status load_local_memory(MemoryBase *in, MemoryBase *&out) override {
        if (!in) return Status::InvalidParam;
        return guarded("loadLocalMD", [&] {
            std::uint64_t region = 0;
            const Status status{g_face->import_own(agent_, static_cast<Memory *>(in)->region, &region)};
            if (status == Status::Success) out = keep(region, true);
            return status;
        });
    }

    Status take_notifications(Notifications &out) override {
        return Status{g_face->take_notifications(agent_, &out, put_notification)};
    }

    Status send_notification(const std::string &agent, const std::string &message) const override {
        return Status{g_face->send_notification(agent_, bytes_of(agent), bytes_of(message))};
    }

    Status query_memory(const RegList &, QueryAnswers &) const override { return Status::NotSupported; }

    Status estimate_cost(const Operation &, const MetaList &, const MetaList &, const std::string &,
                         RequestBase *const &, std::chrono::microseconds &, std::chrono::microseconds &, int &,
                         const void *) const override {
        return Status::NotSupported;
    }

private:
    Agent *const agent_;
    const bool takes_vram_;
    mutable Lists lists_;

    // Takes over a handle; gives it back to Rust when there is no memory for the object.
    Memory *keep(std::uint64_t region, bool remote) {
        auto *memory = new (std::nothrow) Memory(region, remote);
        if (memory) return memory;
        if (remote) {
            g_face->unload_memory(agent_, region);
        } else {
            g_face->deregister_memory(agent_, region);
        }
        throw std::bad_alloc();
    }

    Status drop(MemoryBase *base) {
        if (!base) return Status::Success;
        auto *memory = static_cast<Memory *>(base);
        const Status status{memory->remote ? g_face->unload_memory(agent_, memory->region)
                                           : g_face->deregister_memory(agent_, memory->region)};
        delete memory; // NIXL forgets the pointer whatever the status says
        return status;
    }
};

EngineFields *create_engine(const InitParams *init) noexcept {
    Agent *agent = nullptr;
    try {
        std::vector<Setting> settings;
        if (init->custom_params) {
            for (const auto &[key, value] : *init->custom_params) {
                settings.push_back({bytes_of(key), bytes_of(value)});
            }
        }
        agent = g_face->create(bytes_of(init->local_agent), settings.data(), settings.size(),
                               init->enable_progress_thread);
        return agent ? new Backend(*init, agent) : nullptr;
    } catch (...) {
        if (agent) g_face->destroy(agent);
        const char what[] = "create_engine: out of memory";
        g_face->complain({what, sizeof(what) - 1});
        return nullptr;
    }
}

void destroy_engine(EngineFields *engine) noexcept {
    delete engine;
}

const char *plugin_name() noexcept {
    return "BATON";
}

const char *plugin_version() noexcept {
    return g_face->version();
}

Settings backend_options() {
    Settings options;
    g_face->options(&options, put_setting);
    return options;
}

std::vector<MemoryKind> backend_memory() {
    return {MemoryKind::Dram};
}

Plugin g_plugin = {plugin_api_version, create_engine, destroy_engine, plugin_name,
                   plugin_version,     backend_options, backend_memory};

// Itanium C++ ABI: a pointer to a virtual member function holds 1 + its offset in the vtable.
template <class Member> bool at_slot(Member member, std::ptrdiff_t slot) {
    std::ptrdiff_t words[2];
    static_assert(sizeof(words) == sizeof(member));
    std::memcpy(words, &member, sizeof(words));
    return words[0] == 1 + slot * std::ptrdiff_t{sizeof(void *)} && words[1] == 0;
}

const char *layout_error() {
    using E = EngineFields;
#define BATON_SLOT(number, member) \
    if (!at_slot(&E::member, number)) return "virtual function " #member " is not in slot " #number
    BATON_SLOT(2, supports_remote);
    BATON_SLOT(3, supports_local);
    BATON_SLOT(4, supports_notif);
    BATON_SLOT(5, supported_memory);
    BATON_SLOT(6, register_memory);
    BATON_SLOT(7, deregister_memory);
    BATON_SLOT(8, connect);
    BATON_SLOT(9, disconnect);
    BATON_SLOT(10, unload_memory);
    BATON_SLOT(11, prep_transfer);
    BATON_SLOT(12, post_transfer);
    BATON_SLOT(13, check_transfer);
    BATON_SLOT(14, release_request);
    BATON_SLOT(15, prep_remote_view);
    BATON_SLOT(16, prep_local_view);
    BATON_SLOT(17, release_view);
    BATON_SLOT(18, public_data);
    BATON_SLOT(19, conn_info);
    BATON_SLOT(20, load_remote_conn_info);
    BATON_SLOT(21, load_remote_memory);
    BATON_SLOT(22, load_local_memory);
    BATON_SLOT(23, take_notifications);
    BATON_SLOT(24, send_notification);
    BATON_SLOT(25, query_memory);
    BATON_SLOT(26, estimate_cost);
#undef BATON_SLOT
    return nullptr;
}

} // namespace
} // namespace baton_nixl

extern "C" const char *baton_nixl_layout_error() {
    return baton_nixl::layout_error();
}

extern "C" void *baton_nixl_plugin(const baton_nixl::Face *face) {
    using namespace baton_nixl;
    const char *error = layout_error();
    if (!error && face->size != sizeof(Face)) error = "the C++ and the Rust half of the plugin do not fit";
    if (error) {
        face->complain({error, std::strlen(error)});
        return nullptr;
    }
    g_face = face;
    return &g_plugin;
}
