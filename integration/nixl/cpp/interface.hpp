// NIXL's binary interface for backends, declared in our own words: x86-64, Itanium C++ ABI, libstdc++ with the new
// string ABI; the same in wheels 1.0.0 to 1.5.1. Only layout and the order of virtual functions matter to NIXL, so the
// names are ours and live in our namespace: NIXL's names would make weak symbols that could bind to its own library.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace baton_nixl {

// Every type here is read by a library that was built elsewhere.
static_assert(sizeof(void *) == 8, "NIXL's wheels are 64-bit");
static_assert(sizeof(std::string) == 32, "libstdc++ with the new string ABI is needed (_GLIBCXX_USE_CXX11_ABI=1)");

using Settings = std::unordered_map<std::string, std::string>;

// How NIXL spells an outcome.
enum class Status : int {
    InProgress = 1,
    Success = 0,
    NotPosted = -1,
    InvalidParam = -2,
    Backend = -3,
    NotFound = -4,
    Mismatch = -5,
    NotAllowed = -6,
    RepostActive = -7,
    Unknown = -8,
    NotSupported = -9,
    RemoteDisconnect = -10,
    Canceled = -11,
    NoTelemetry = -12,
};

enum class MemoryKind : int { Dram = 0, Vram = 1, Block = 2, Object = 3, File = 4 };

enum class Operation : int { Read = 0, Write = 1 };

// What the agent hands to create_engine.
struct InitParams {
    std::string local_agent;
    std::string type;
    Settings *custom_params;
    bool enable_progress_thread;
    std::uint64_t progress_delay_us;
    int sync_mode;
    bool enable_telemetry;
};

// What the agent hands to prep and post besides descriptors.
struct OptionalArgs {
    std::string message;
    bool has_message;
    std::string custom_param;
};

// A request as the agent knows it: it only ever stores the pointer.
class RequestBase {
public:
    RequestBase() = default;
    RequestBase(const RequestBase &) = delete;
    RequestBase &operator=(const RequestBase &) = delete;
    virtual ~RequestBase() = default;
};

// Backend metadata of one registration as the agent knows it.
class MemoryBase {
public:
    bool is_private;

    explicit MemoryBase(bool is_private_) : is_private(is_private_) {}
    MemoryBase(const MemoryBase &) = delete;
    MemoryBase &operator=(const MemoryBase &) = delete;
    virtual ~MemoryBase() = default;
};

struct BasicDesc {
    std::uintptr_t addr;
    std::size_t len;
    std::uint64_t device;
};

struct BlobDesc : BasicDesc {
    std::string meta_info;
};

struct MetaDesc : BasicDesc {
    MemoryBase *memory;
};

struct RemoteMetaDesc : MetaDesc {
    std::string remote_agent;
};

// A descriptor list. Read, never constructed: its virtual functions are NIXL's.
template <class Desc> struct DescList {
    void *vtable;
    MemoryKind kind;
    std::vector<Desc> descs;

    DescList() = delete;
};

using MetaList = DescList<MetaDesc>;
using RemoteMetaList = DescList<RemoteMetaDesc>;
using RegList = DescList<BlobDesc>;

// An element of the event queue that NIXL's base class holds. Nothing is ever put there: before 1.3 it was larger.
struct TelemetryEvent {
    std::uint64_t words[2];
};

// What a descriptor of `queryMem` answers.
using QueryAnswers = std::vector<std::optional<Settings>>;
using Notifications = std::vector<std::pair<std::string, std::string>>;

// The agent reads these fields directly; their order, with the vtable pointer in front, is the interface.
class EngineFields {
public:
    std::string backend_type;
    Settings custom_params;
    std::vector<TelemetryEvent> telemetry_events;
    std::mutex telemetry_mutex;
    bool init_error = false;
    const std::string local_agent;
    const bool enable_telemetry;

    explicit EngineFields(const InitParams &init)
        : backend_type(init.type), custom_params(init.custom_params ? *init.custom_params : Settings{}),
          local_agent(init.local_agent), enable_telemetry(init.enable_telemetry) {}

    EngineFields(const EngineFields &) = delete;
    EngineFields &operator=(const EngineFields &) = delete;

    // The virtual functions in NIXL's order; the destructor takes slots 0 and 1.
    virtual ~EngineFields() = default;
    virtual bool supports_remote() const = 0;
    virtual bool supports_local() const = 0;
    virtual bool supports_notif() const = 0;
    virtual std::vector<MemoryKind> supported_memory() const = 0;
    virtual Status register_memory(const BlobDesc &, const MemoryKind &, MemoryBase *&out) = 0;
    virtual Status deregister_memory(MemoryBase *) = 0;
    virtual Status connect(const std::string &agent) = 0;
    virtual Status disconnect(const std::string &agent) = 0;
    virtual Status unload_memory(MemoryBase *) = 0;
    virtual Status prep_transfer(const Operation &, const MetaList &local, const MetaList &remote,
                                 const std::string &agent, RequestBase *&handle, const OptionalArgs *) const = 0;
    virtual Status post_transfer(const Operation &, const MetaList &local, const MetaList &remote,
                                 const std::string &agent, RequestBase *&handle, const OptionalArgs *) const = 0;
    virtual Status check_transfer(RequestBase *) const = 0;
    virtual Status release_request(RequestBase *) const = 0;
    virtual Status prep_remote_view(const RemoteMetaList &, void *&view, const OptionalArgs *) const = 0;
    virtual Status prep_local_view(const MetaList &, void *&view, const OptionalArgs *) const = 0;
    virtual void release_view(void *) const = 0;
    virtual Status public_data(const MemoryBase *, std::string &out) const = 0;
    virtual Status conn_info(std::string &out) const = 0;
    virtual Status load_remote_conn_info(const std::string &agent, const std::string &info) = 0;
    virtual Status load_remote_memory(const BlobDesc &, const MemoryKind &, const std::string &agent,
                                      MemoryBase *&out) = 0;
    virtual Status load_local_memory(MemoryBase *in, MemoryBase *&out) = 0;
    virtual Status take_notifications(Notifications &) = 0;
    virtual Status send_notification(const std::string &agent, const std::string &message) const = 0;
    virtual Status query_memory(const RegList &, QueryAnswers &) const = 0;
    virtual Status estimate_cost(const Operation &, const MetaList &local, const MetaList &remote,
                                 const std::string &agent, RequestBase *const &handle,
                                 std::chrono::microseconds &duration, std::chrono::microseconds &margin, int &method,
                                 const void *) const = 0;
};

// What nixl_plugin_init returns.
struct Plugin {
    int api_version;
    EngineFields *(*create_engine)(const InitParams *);
    void (*destroy_engine)(EngineFields *);
    const char *(*plugin_name)();
    const char *(*plugin_version)();
    Settings (*backend_options)();
    std::vector<MemoryKind> (*backend_memory)();
};

constexpr int plugin_api_version = 1;

// ---- the layout, number by number ----

// GCC allows offsetof on classes that are not standard layout, but warns; these have no virtual bases, so it is exact.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
#define BATON_AT(type, field, offset) \
    static_assert(offsetof(type, field) == (offset), #type "::" #field " is not where NIXL has it")

static_assert(sizeof(Status) == 4 && sizeof(MemoryKind) == 4 && sizeof(Operation) == 4);

static_assert(sizeof(InitParams) == 96);
BATON_AT(InitParams, local_agent, 0);
BATON_AT(InitParams, type, 32);
BATON_AT(InitParams, custom_params, 64);
BATON_AT(InitParams, enable_progress_thread, 72);
BATON_AT(InitParams, progress_delay_us, 80);
BATON_AT(InitParams, sync_mode, 88);
BATON_AT(InitParams, enable_telemetry, 92);

static_assert(sizeof(OptionalArgs) == 72);
BATON_AT(OptionalArgs, message, 0);
BATON_AT(OptionalArgs, has_message, 32);
BATON_AT(OptionalArgs, custom_param, 40);

static_assert(sizeof(RequestBase) == 8);
static_assert(sizeof(MemoryBase) == 16);
BATON_AT(MemoryBase, is_private, 8);

static_assert(sizeof(BasicDesc) == 24 && std::is_standard_layout_v<BasicDesc>);
BATON_AT(BasicDesc, addr, 0);
BATON_AT(BasicDesc, len, 8);
BATON_AT(BasicDesc, device, 16);
static_assert(sizeof(BlobDesc) == 56);
BATON_AT(BlobDesc, meta_info, 24);
static_assert(sizeof(MetaDesc) == 32);
BATON_AT(MetaDesc, memory, 24);
static_assert(sizeof(RemoteMetaDesc) == 64);
BATON_AT(RemoteMetaDesc, remote_agent, 32);

static_assert(sizeof(MetaList) == 40 && sizeof(RemoteMetaList) == 40 && sizeof(RegList) == 40);
BATON_AT(MetaList, vtable, 0);
BATON_AT(MetaList, kind, 8);
BATON_AT(MetaList, descs, 16);

static_assert(sizeof(EngineFields) == 208);
BATON_AT(EngineFields, backend_type, 8);
BATON_AT(EngineFields, custom_params, 40);
BATON_AT(EngineFields, telemetry_events, 96);
BATON_AT(EngineFields, telemetry_mutex, 120);
BATON_AT(EngineFields, init_error, 160);
BATON_AT(EngineFields, local_agent, 168);
BATON_AT(EngineFields, enable_telemetry, 200);

static_assert(sizeof(Plugin) == 56);
BATON_AT(Plugin, api_version, 0);
BATON_AT(Plugin, create_engine, 8);
BATON_AT(Plugin, destroy_engine, 16);
BATON_AT(Plugin, plugin_name, 24);
BATON_AT(Plugin, plugin_version, 32);
BATON_AT(Plugin, backend_options, 40);
BATON_AT(Plugin, backend_memory, 48);

#undef BATON_AT
#pragma GCC diagnostic pop

} // namespace baton_nixl
