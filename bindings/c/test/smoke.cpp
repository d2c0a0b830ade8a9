// A C++ host: what smoke.c does, through baton.hpp.
#include <chrono>
#include <cstdio>
#include <thread>

#include "baton.hpp"

namespace {

constexpr std::size_t block = 4096, blocks = 8;
const auto begin = std::chrono::steady_clock::now();

void require(bool condition, const char *what) {
    if (!condition) {
        throw std::runtime_error(what);
    }
}

void step(baton::Engine &a, baton::Engine &b) {
    a.progress();
    b.progress();
    require(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60), "not within the deadline");
    std::this_thread::yield();
}

// The odd blocks, the last first, unless the engine has no lists of blocks.
void by_index(baton::Engine &prefill, baton::Engine &decode, baton::Region &ours, const baton::RemoteRegion &remote,
              std::uint64_t there, const baton::Bytes &source, const baton::Bytes &target) {
    std::vector<BatonDesc> local, away;
    for (std::size_t i = 0; i < blocks; ++i) {
        local.push_back(ours.desc(i * block, block));
        away.push_back(remote.desc(there + i * block, block));
    }
    try {
        const auto here = prefill.block_list(local), at_decode = prefill.block_list(away, "decode");
        auto write = prefill.by_index(BATON_OP_WRITE, "decode", here, {7, 5, 3, 1}, at_decode, {1, 3, 5, 7});
        write.post();
        while (write.status() != BATON_OK) {
            step(prefill, decode);
        }
        require(target == source, "the indices moved something else");
        while (!write.release()) {
            step(prefill, decode);
        }
        std::printf("by index: ");
    } catch (const baton::Error &error) {
        require(error.code() == BATON_ERR_UNSUPPORTED, error.what());
    }
}

// Out of memory of one engine's own into that of the other, unless the engine has none.
void managed(baton::Engine &prefill, baton::Engine &decode) {
    try {
        auto from = prefill.alloc_managed(block * blocks);
        auto to = decode.alloc_managed(block * blocks);
        for (std::size_t i = 0; i < from.size(); ++i) {
            require(from.data()[i] == 0, "managed memory begins with zeroes");
            from.data()[i] = static_cast<std::uint8_t>(i * 31 + i / 256);
        }
        const auto remote = prefill.import_region("decode", to.exported());
        auto write = prefill.write("decode", {from.desc(block, 2 * block)}, {remote.desc(to.addr() + block, 2 * block)});
        write.post();
        while (write.status() != BATON_OK) {
            step(prefill, decode);
        }
        for (std::size_t i = 0; i < to.size(); ++i) {
            const bool moved = i / block == 1 || i / block == 2;
            require(to.data()[i] == (moved ? from.data()[i] : 0), "managed memory: the WRITE moved something else");
        }
        while (!write.release()) {
            step(prefill, decode);
        }
        from.free();
        std::printf("managed: ");
    } catch (const baton::Error &error) {
        require(error.code() == BATON_ERR_UNSUPPORTED, error.what());
    }
}

void run() {
    baton::Bytes source(block * blocks, 7), target(block * blocks, 9);
    baton::Engine prefill("prefill"), decode("decode");
    auto ours = prefill.register_memory(source.data(), source.size());
    auto theirs = decode.register_memory(target.data(), target.size());
    prefill.load_remote("decode", decode.conn_info());
    decode.load_remote("prefill", prefill.conn_info());
    const auto remote = prefill.import_region("decode", theirs.exported());

    std::vector<BatonDesc> local, there;
    for (std::size_t i = 0; i < blocks; i += 2) {
        local.push_back(ours.desc(i * block, block));
        there.push_back(remote.desc(theirs.addr() + i * block, block));
    }
    auto write = prefill.write("decode", local, there);
    write.post("written");
    while (write.status() != BATON_OK) {
        step(prefill, decode);
    }
    std::vector<baton::Notification> got;
    while ((got = decode.notifications()).empty()) {
        step(prefill, decode);
    }
    require(got.size() == 1 && got[0].peer == "prefill" && got[0].message == "written", "another notification");
    for (std::size_t i = 0; i < target.size(); ++i) {
        require(target[i] == ((i / block) % 2 == 0 ? 7 : 9), "the WRITE moved something else");
    }
    while (!write.release()) {
        step(prefill, decode);
    }

    by_index(prefill, decode, ours, remote, theirs.addr(), source, target);

    managed(prefill, decode);

    bool thrown = false;
    try {
        decode.import_region("prefill", baton::Bytes{1, 2, 3});
    } catch (const baton::Error &error) {
        thrown = error.code() < 0 && error.what()[0] != 0;
    }
    require(thrown, "garbage is refused with a text");
    require(decode.stats().find("\"choice\"") != std::string::npos, "stats say what was chosen");
}

} // namespace

int main() {
    try {
        run();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    std::printf("C++ host: WRITE of %zu blocks, libbaton %s\n", blocks / 2, baton_version());
    return 0;
}
