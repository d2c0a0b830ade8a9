// Baton for C++17: baton.h with owners and exceptions, header only.
#ifndef BATON_HPP
#define BATON_HPP

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "baton.h"

namespace baton {

using Bytes = std::vector<std::uint8_t>;

// A negative status with its text.
class Error : public std::runtime_error {
  public:
    Error(BatonStatus code, const std::string &text) : std::runtime_error(text), code_(code) {}
    BatonStatus code() const noexcept { return code_; }

  private:
    BatonStatus code_;
};

namespace detail {

inline BatonSlice slice(std::string_view text) {
    return {reinterpret_cast<const std::uint8_t *>(text.data()), text.size()};
}

inline BatonSlice slice(const Bytes &bytes) { return {bytes.data(), bytes.size()}; }

// Calls what fills a buffer until the buffer is large enough.
template <typename Call> BatonStatus fill(Bytes &out, Call &&call) {
    out.resize(1024);
    for (int tries = 0; tries < 16; ++tries) {
        std::uint64_t needed = 0;
        const BatonStatus code = call(out.data(), static_cast<std::uint64_t>(out.size()), &needed);
        if (code != BATON_ERR_TOO_SMALL || needed <= out.size()) {
            out.resize(code < 0 ? 0 : static_cast<std::size_t>(needed));
            return code;
        }
        out.resize(static_cast<std::size_t>(needed));
    }
    return BATON_ERR_TOO_SMALL;
}

inline std::string text(const Bytes &bytes) { return std::string(bytes.begin(), bytes.end()); }

inline BatonStatus check(BatonStatus code) {
    if (code < 0) {
        Bytes words;
        fill(words, baton_last_error);
        throw Error(code, text(words));
    }
    return code;
}

template <typename Call> Bytes read(Call &&call) {
    Bytes out;
    check(fill(out, std::forward<Call>(call)));
    return out;
}

} // namespace detail

// A message of a peer.
struct Notification {
    std::string peer;
    std::string message;
};

// Registered memory: deregistered at the end of its life. When that returns, no byte lands there any more.
class Region {
  public:
    Region(BatonHost *host, void *addr, std::size_t len_bytes,
           std::uint32_t access = BATON_ACCESS_REMOTE_READ | BATON_ACCESS_REMOTE_WRITE)
        : host_(host), addr_(reinterpret_cast<std::uintptr_t>(addr)) {
        const BatonMemory memory = {addr_, len_bytes, 0, BATON_MEM_DRAM, access};
        detail::check(baton_register(host_, &memory, &handle_));
    }
    Region(Region &&other) noexcept
        : host_(std::exchange(other.host_, nullptr)), addr_(other.addr_), handle_(other.handle_) {}
    Region &operator=(Region &&) = delete;
    ~Region() {
        if (host_ != nullptr) {
            baton_deregister(host_, handle_);
        }
    }

    Bytes exported() const {
        return detail::read([&](std::uint8_t *buf, std::uint64_t cap, std::uint64_t *needed) {
            return baton_export_region(host_, handle_, buf, cap, needed);
        });
    }
    // A piece of it for the local side of a transfer.
    BatonDesc desc(std::uint64_t offset, std::uint64_t len_bytes) const {
        return {addr_ + offset, len_bytes, handle_, 0};
    }
    std::uint64_t addr() const noexcept { return addr_; }

  private:
    BatonHost *host_;
    std::uint64_t addr_;
    std::uint64_t handle_ = 0;
};

// Memory of the engine's own, registered, page-aligned and at first zero: withdrawn and unmapped at the end of its life.
class ManagedBuffer {
  public:
    ManagedBuffer(BatonHost *host, std::size_t len_bytes,
                  std::uint32_t access = BATON_ACCESS_REMOTE_READ | BATON_ACCESS_REMOTE_WRITE)
        : host_(host), memory_{0, len_bytes, 0, BATON_MEM_DRAM, access} {
        detail::check(baton_alloc_managed(host_, &memory_, &handle_));
    }
    ManagedBuffer(ManagedBuffer &&other) noexcept
        : host_(std::exchange(other.host_, nullptr)), memory_(other.memory_), handle_(other.handle_) {}
    ManagedBuffer &operator=(ManagedBuffer &&) = delete;
    ~ManagedBuffer() {
        if (host_ != nullptr) {
            baton_free_managed(host_, handle_);
        }
    }

    // Frees it now. If that throws, it is still mapped, and this can be tried again.
    void free() {
        if (host_ != nullptr) {
            detail::check(baton_free_managed(host_, handle_));
            host_ = nullptr;
        }
    }
    Bytes exported() const {
        return detail::read([&](std::uint8_t *buf, std::uint64_t cap, std::uint64_t *needed) {
            return baton_export_region(host_, handle_, buf, cap, needed);
        });
    }
    // A piece of it for the local side of a transfer.
    BatonDesc desc(std::uint64_t offset, std::uint64_t len_bytes) const {
        return {memory_.addr + offset, len_bytes, handle_, 0};
    }
    std::uint8_t *data() const noexcept {
        return reinterpret_cast<std::uint8_t *>(static_cast<std::uintptr_t>(memory_.addr));
    }
    std::size_t size() const noexcept { return static_cast<std::size_t>(memory_.len_bytes); }
    std::uint64_t addr() const noexcept { return memory_.addr; }

  private:
    BatonHost *host_;
    BatonMemory memory_;
    std::uint64_t handle_ = 0;
};

// A peer's region: forgotten at the end of its life.
class RemoteRegion {
  public:
    RemoteRegion(BatonHost *host, std::string_view peer, const Bytes &blob) : host_(host) {
        detail::check(baton_import_region(host_, detail::slice(peer), detail::slice(blob), &handle_));
    }
    RemoteRegion(RemoteRegion &&other) noexcept
        : host_(std::exchange(other.host_, nullptr)), handle_(other.handle_) {}
    RemoteRegion &operator=(RemoteRegion &&) = delete;
    ~RemoteRegion() {
        if (host_ != nullptr) {
            baton_release_remote_region(host_, handle_);
        }
    }

    // A piece of it, by its address at the peer, for the remote side of a transfer.
    BatonDesc desc(std::uint64_t addr, std::uint64_t len_bytes) const { return {addr, len_bytes, handle_, 0}; }

  private:
    BatonHost *host_;
    std::uint64_t handle_ = 0;
};

// Blocks that transfers pick by index: forgotten at the end of its life, which no transfer made of it minds.
class BlockList {
  public:
    // Of this engine's own memory, or with a name of that peer's.
    BlockList(BatonHost *host, std::string_view peer, const std::vector<BatonDesc> &blocks) : host_(host) {
        detail::check(baton_create_block_list(host_, detail::slice(peer), blocks.data(), blocks.size(), &handle_));
    }
    BlockList(BlockList &&other) noexcept : host_(std::exchange(other.host_, nullptr)), handle_(other.handle_) {}
    BlockList &operator=(BlockList &&) = delete;
    ~BlockList() {
        if (host_ != nullptr) {
            baton_release_block_list(host_, handle_);
        }
    }

    std::uint64_t handle() const noexcept { return handle_; }

  private:
    BatonHost *host_;
    std::uint64_t handle_ = 0;
};

// A transfer, prepared once and posted any number of times. The end of its life releases it; while its memory may
// still be touched that is only a cancel, and the engine keeps the request until it is closed: wait first.
class Transfer {
  public:
    Transfer(BatonHost *host, std::uint32_t op, std::string_view peer, const std::vector<BatonDesc> &local,
             const std::vector<BatonDesc> &remote)
        : host_(host) {
        const BatonXferSpec spec = {static_cast<std::uint32_t>(sizeof(BatonXferSpec)),
                                    op,
                                    detail::slice(peer),
                                    local.data(),
                                    local.size(),
                                    remote.data(),
                                    remote.size()};
        detail::check(baton_create_xfer_req(host_, &spec, &raw_));
    }
    Transfer(BatonHost *host, std::uint32_t op, std::string_view peer, const BlockList &local,
             const std::vector<std::uint32_t> &local_indices, const BlockList &remote,
             const std::vector<std::uint32_t> &remote_indices)
        : host_(host) {
        if (local_indices.size() != remote_indices.size()) {
            throw Error(BATON_ERR_INVALID_PARAM, std::to_string(local_indices.size()) + " local indices, " +
                                                     std::to_string(remote_indices.size()) + " remote ones");
        }
        const BatonIndexSpec spec = {static_cast<std::uint32_t>(sizeof(BatonIndexSpec)),
                                     op,
                                     detail::slice(peer),
                                     local.handle(),
                                     remote.handle(),
                                     local_indices.data(),
                                     remote_indices.data(),
                                     local_indices.size()};
        detail::check(baton_create_xfer_from_indices(host_, &spec, &raw_));
    }
    Transfer(Transfer &&other) noexcept
        : host_(other.host_), raw_(std::exchange(other.raw_, nullptr)) {}
    Transfer &operator=(Transfer &&) = delete;
    ~Transfer() {
        if (raw_ != nullptr) {
            baton_release_xfer_req(host_, raw_);
        }
    }

    // Without notification. Both posts return BATON_OK or BATON_IN_PROGRESS.
    BatonStatus post() { return detail::check(baton_post_xfer_req(host_, raw_, BatonSlice{nullptr, 0}, 0)); }
    // With a notification, which may be empty, after all data.
    BatonStatus post(std::string_view message) {
        return detail::check(baton_post_xfer_req(host_, raw_, detail::slice(message), BATON_POST_NOTIFY));
    }
    // With an id for the peer's inbound_status, with or without a notification.
    BatonStatus post_with_id(std::uint64_t id) { return post_with(BatonPostOptions{0, BATON_POST_ID, BatonSlice{nullptr, 0}, id}); }
    BatonStatus post_with_id(std::string_view message, std::uint64_t id) {
        return post_with(BatonPostOptions{0, BATON_POST_ID | BATON_POST_NOTIFY, detail::slice(message), id});
    }
    // BATON_OK, BATON_IN_PROGRESS or BATON_NOT_POSTED; throws the error of the last post.
    BatonStatus status() const {
        const BatonStatus code = baton_xfer_status(host_, raw_);
        if (code < 0) {
            Bytes words;
            detail::fill(words, [&](std::uint8_t *buf, std::uint64_t cap, std::uint64_t *needed) {
                return baton_xfer_error(host_, raw_, buf, cap, needed);
            });
            throw Error(code, detail::text(words));
        }
        return code;
    }
    void cancel() { detail::check(baton_xfer_cancel(host_, raw_)); }
    // Whether it is released; if not, its memory may still be touched: try again.
    bool release() {
        const BatonStatus code = baton_release_xfer_req(host_, raw_);
        if (code == BATON_ERR_BUSY) {
            return false;
        }
        raw_ = nullptr;
        detail::check(code);
        return true;
    }

  private:
    BatonStatus post_with(BatonPostOptions options) {
        options.size_bytes = sizeof(options);
        return detail::check(baton_post_xfer_req_with(host_, raw_, &options));
    }

    BatonHost *host_;
    BatonXfer *raw_ = nullptr;
};

// An engine, chosen by the settings. Everything made from it must end before it does.
class Engine {
  public:
    explicit Engine(std::string_view agent_name, const std::map<std::string, std::string> &settings = {},
                    bool progress_thread = true) {
        std::vector<BatonSetting> list;
        for (const auto &[key, value] : settings) {
            list.push_back({detail::slice(key), detail::slice(value)});
        }
        BatonCreateOptions options = {};
        options.size_bytes = sizeof(options);
        options.flags = progress_thread ? BATON_CREATE_PROGRESS_THREAD : 0;
        options.agent_name = detail::slice(agent_name);
        options.settings = list.data();
        options.settings_count = list.size();
        detail::check(baton_engine_open(&options, &host_));
    }
    Engine(Engine &&other) noexcept : host_(std::exchange(other.host_, nullptr)) {}
    Engine &operator=(Engine &&) = delete;
    ~Engine() {
        if (host_ != nullptr) {
            baton_engine_close(host_);
        }
    }

    // Secret: whoever holds it may connect.
    Bytes conn_info() const {
        return detail::read([&](std::uint8_t *buf, std::uint64_t cap, std::uint64_t *needed) {
            return baton_conn_info(host_, buf, cap, needed);
        });
    }
    void load_remote(std::string_view name, const Bytes &info) {
        detail::check(baton_load_remote(host_, detail::slice(name), detail::slice(info)));
    }
    BatonStatus connect(std::string_view peer, std::uint32_t timeout_ms) {
        return detail::check(baton_connect(host_, detail::slice(peer), timeout_ms));
    }
    void disconnect(std::string_view peer) { detail::check(baton_disconnect(host_, detail::slice(peer))); }
    Region register_memory(void *addr, std::size_t len_bytes) { return Region(host_, addr, len_bytes); }
    // Zeroed memory of the engine's own.
    ManagedBuffer alloc_managed(std::size_t len_bytes) { return ManagedBuffer(host_, len_bytes); }
    RemoteRegion import_region(std::string_view peer, const Bytes &blob) { return RemoteRegion(host_, peer, blob); }
    Transfer read(std::string_view peer, const std::vector<BatonDesc> &local, const std::vector<BatonDesc> &remote) {
        return Transfer(host_, BATON_OP_READ, peer, local, remote);
    }
    Transfer write(std::string_view peer, const std::vector<BatonDesc> &local, const std::vector<BatonDesc> &remote) {
        return Transfer(host_, BATON_OP_WRITE, peer, local, remote);
    }
    // Blocks for transfers by index: of `peer`, or without a name our own.
    BlockList block_list(const std::vector<BatonDesc> &blocks, std::string_view peer = {}) {
        return BlockList(host_, peer, blocks);
    }
    Transfer by_index(std::uint32_t op, std::string_view peer, const BlockList &local,
                      const std::vector<std::uint32_t> &local_indices, const BlockList &remote,
                      const std::vector<std::uint32_t> &remote_indices) {
        return Transfer(host_, op, peer, local, local_indices, remote, remote_indices);
    }
    void notify(std::string_view peer, std::string_view message) {
        detail::check(baton_gen_notif(host_, detail::slice(peer), detail::slice(message)));
    }
    // Whether the transfer that a peer posted with this id has landed here; true once for each.
    bool landed(std::string_view peer, std::uint64_t id) {
        return detail::check(baton_inbound_status(host_, detail::slice(peer), id)) == BATON_OK;
    }
    // All that wait, oldest first per peer.
    std::vector<Notification> notifications() {
        std::vector<Notification> out;
        inbox_.resize(inbox_.empty() ? 4096 : inbox_.size());
        for (;;) {
            std::uint64_t needed = 0, count = 0;
            const BatonStatus code = baton_get_notifs(host_, inbox_.data(), inbox_.size(), &needed, &count);
            if (code == BATON_ERR_TOO_SMALL && needed > inbox_.size()) {
                inbox_.resize(static_cast<std::size_t>(needed));
                continue;
            }
            detail::check(code);
            if (count == 0) {
                return out;
            }
            const std::uint8_t *at = inbox_.data();
            for (; count > 0; --count) {
                BatonNotifHeader header;
                std::memcpy(&header, at, sizeof(header));
                const char *name = reinterpret_cast<const char *>(at + sizeof(header));
                out.push_back({std::string(name, header.name_len_bytes),
                               std::string(name + header.name_len_bytes,
                                           static_cast<std::size_t>(header.message_len_bytes))});
                at += header.total_bytes;
            }
        }
    }
    // Whether there was work for this thread. An engine without the entry moves by itself.
    bool progress() {
        const BatonStatus code = baton_progress(host_);
        return code != BATON_ERR_UNSUPPORTED && detail::check(code) == 1;
    }
    // One JSON object.
    std::string stats() const {
        return detail::text(detail::read([&](std::uint8_t *buf, std::uint64_t cap, std::uint64_t *needed) {
            return baton_stats(host_, buf, cap, needed);
        }));
    }
    BatonHost *raw() const noexcept { return host_; }

  private:
    BatonHost *host_ = nullptr;
    Bytes inbox_;
};

} // namespace baton

#endif
