/* A C host: two agents of one process, a READ and a WRITE with notifications, every byte compared. */
#define _POSIX_C_SOURCE 200809L

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "baton.h"

enum { BLOCK = 4096, BLOCKS = 8, DEADLINE_S = 60 };

static time_t begin;

static BatonSlice slice(const char *text) {
    BatonSlice out = {(const uint8_t *)text, strlen(text)};
    return out;
}

static BatonStatus check(BatonStatus code, const char *what) {
    if (code < 0) {
        char text[1024];
        uint64_t size = 0;
        if (baton_last_error((uint8_t *)text, sizeof text, &size) < 0) {
            size = 0;
        }
        fprintf(stderr, "%s: %d: %.*s\n", what, (int)code, (int)size, text);
        exit(1);
    }
    return code;
}

static void require(int condition, const char *what) {
    if (!condition) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

typedef struct {
    BatonHost *host;
    uint8_t *memory;
    uint64_t region;
    uint8_t blob[1024];
    uint64_t blob_size;
    uint8_t info[8192];
    uint64_t info_size;
} Agent;

static void open_agent(Agent *agent, const char *name, int seed) {
    size_t i;
    BatonCreateOptions options;
    BatonMemory memory;
    memset(&options, 0, sizeof options);
    options.size_bytes = sizeof options;
    options.flags = BATON_CREATE_PROGRESS_THREAD;
    options.agent_name = slice(name);
    check(baton_engine_open(&options, &agent->host), "open");
    agent->memory = malloc(BLOCK * BLOCKS);
    require(agent->memory != NULL, "no memory");
    for (i = 0; i < BLOCK * BLOCKS; i++) {
        agent->memory[i] = (uint8_t)(i * 31 + i / 256 + (size_t)seed);
    }
    memset(&memory, 0, sizeof memory);
    memory.addr = (uint64_t)(uintptr_t)agent->memory;
    memory.len_bytes = BLOCK * BLOCKS;
    memory.kind = BATON_MEM_DRAM;
    memory.access = BATON_ACCESS_REMOTE_READ | BATON_ACCESS_REMOTE_WRITE;
    check(baton_register(agent->host, &memory, &agent->region), "register");
    check(baton_export_region(agent->host, agent->region, agent->blob, sizeof agent->blob, &agent->blob_size), "export");
    check(baton_conn_info(agent->host, agent->info, sizeof agent->info, &agent->info_size), "conn_info");
}

static uint64_t learn(Agent *agent, const char *peer, const Agent *other) {
    uint64_t remote = 0;
    BatonSlice info = {other->info, other->info_size};
    BatonSlice blob = {other->blob, other->blob_size};
    check(baton_load_remote(agent->host, slice(peer), info), "load_remote");
    check(baton_import_region(agent->host, slice(peer), blob, &remote), "import_region");
    return remote;
}

static void step(Agent *a, Agent *b) {
    /* An engine without this entry moves by itself. */
    (void)baton_progress(a->host);
    (void)baton_progress(b->host);
    require(time(NULL) - begin < DEADLINE_S, "not within the deadline");
    sched_yield();
}

static void transfer(Agent *agent, Agent *other, const char *peer, uint64_t remote, uint32_t op, const char *message) {
    BatonXferSpec spec;
    BatonDesc local[BLOCKS], there[BLOCKS];
    BatonXfer *xfer = NULL;
    BatonStatus code;
    int i;
    memset(&spec, 0, sizeof spec);
    for (i = 0; i < BLOCKS / 2; i++) {
        BatonDesc here = {(uint64_t)(uintptr_t)agent->memory + (uint64_t)(2 * i) * BLOCK, BLOCK, agent->region, 0};
        BatonDesc away = {(uint64_t)(uintptr_t)other->memory + (uint64_t)(2 * i) * BLOCK, BLOCK, remote, 0};
        local[i] = here;
        there[i] = away;
    }
    spec.size_bytes = sizeof spec;
    spec.op = op;
    spec.peer = slice(peer);
    spec.local = local;
    spec.local_count = BLOCKS / 2;
    spec.remote = there;
    spec.remote_count = BLOCKS / 2;
    check(baton_create_xfer_req(agent->host, &spec, &xfer), "create_xfer_req");
    require(baton_xfer_status(agent->host, xfer) == BATON_NOT_POSTED, "a fresh request is not posted");
    check(baton_post_xfer_req(agent->host, xfer, slice(message), BATON_POST_NOTIFY), "post_xfer_req");
    while (check(baton_xfer_status(agent->host, xfer), "xfer_status") == BATON_IN_PROGRESS) {
        step(agent, other);
    }
    while ((code = baton_release_xfer_req(agent->host, xfer)) == BATON_ERR_BUSY) {
        step(agent, other);
    }
    check(code, "release_xfer_req");
}

/* The last block of `other` into the first of `agent`, by index. An engine may have no lists of blocks. */
static int by_index(Agent *agent, Agent *other, const char *peer, uint64_t remote) {
    BatonDesc local[BLOCKS], there[BLOCKS];
    BatonIndexSpec spec;
    BatonXfer *xfer = NULL;
    uint32_t first = 0, last = BLOCKS - 1, none = BLOCKS;
    BatonStatus code;
    int i;
    for (i = 0; i < BLOCKS; i++) {
        BatonDesc here = {(uint64_t)(uintptr_t)agent->memory + (uint64_t)i * BLOCK, BLOCK, agent->region, 0};
        BatonDesc away = {(uint64_t)(uintptr_t)other->memory + (uint64_t)i * BLOCK, BLOCK, remote, 0};
        local[i] = here;
        there[i] = away;
    }
    memset(&spec, 0, sizeof spec);
    spec.size_bytes = sizeof spec;
    spec.op = BATON_OP_READ;
    spec.peer = slice(peer);
    spec.index_count = 1;
    spec.local_indices = &first;
    spec.remote_indices = &none;
    code = baton_create_block_list(agent->host, slice(""), local, BLOCKS, &spec.local_list);
    if (code == BATON_ERR_UNSUPPORTED) {
        return 0;
    }
    check(code, "create_block_list");
    check(baton_create_block_list(agent->host, slice(peer), there, BLOCKS, &spec.remote_list), "create_block_list");
    require(baton_create_xfer_from_indices(agent->host, &spec, &xfer) == BATON_ERR_INVALID_PARAM && xfer == NULL,
            "an index behind the end is an invalid argument");
    spec.remote_indices = &last;
    check(baton_create_xfer_from_indices(agent->host, &spec, &xfer), "create_xfer_from_indices");
    check(baton_release_block_list(agent->host, spec.local_list), "release_block_list");
    check(baton_release_block_list(agent->host, spec.remote_list), "release_block_list");
    require(baton_release_block_list(agent->host, spec.local_list) == BATON_ERR_NOT_FOUND, "a list is released once");
    check(baton_post_xfer_req(agent->host, xfer, slice(""), 0), "post_xfer_req");
    while (check(baton_xfer_status(agent->host, xfer), "xfer_status") == BATON_IN_PROGRESS) {
        step(agent, other);
    }
    while ((code = baton_release_xfer_req(agent->host, xfer)) == BATON_ERR_BUSY) {
        step(agent, other);
    }
    check(code, "release_xfer_req");
    require(memcmp(agent->memory, other->memory + (BLOCKS - 1) * BLOCK, BLOCK) == 0, "the index named another block");
    return 1;
}

/* A buffer of the engine's own, into which the peer reads its blocks. An engine may have none. */
static int managed(Agent *agent, Agent *other, const char *peer, uint64_t remote) {
    BatonMemory memory;
    BatonXferSpec spec;
    BatonDesc here, away;
    BatonXfer *xfer = NULL;
    uint64_t region = 0;
    BatonStatus code;
    memset(&memory, 0, sizeof memory);
    memory.len_bytes = BLOCK * BLOCKS;
    memory.kind = BATON_MEM_DRAM;
    code = baton_alloc_managed(agent->host, &memory, &region);
    if (code == BATON_ERR_UNSUPPORTED) {
        return 0;
    }
    check(code, "alloc_managed");
    require(memory.addr != 0 && memory.addr % 4096 == 0, "managed memory begins with a page");
    require(baton_deregister(agent->host, region) == BATON_ERR_INVALID_PARAM, "managed memory is freed, not deregistered");
    require(baton_free_managed(agent->host, agent->region) == BATON_ERR_INVALID_PARAM, "one's own memory is not freed");
    memset(&spec, 0, sizeof spec);
    here.addr = memory.addr;
    away.addr = (uint64_t)(uintptr_t)other->memory;
    here.len_bytes = away.len_bytes = BLOCK * BLOCKS;
    here.reserved = away.reserved = 0;
    here.region = region;
    away.region = remote;
    spec.size_bytes = sizeof spec;
    spec.op = BATON_OP_READ;
    spec.peer = slice(peer);
    spec.local = &here;
    spec.local_count = 1;
    spec.remote = &away;
    spec.remote_count = 1;
    check(baton_create_xfer_req(agent->host, &spec, &xfer), "create_xfer_req");
    check(baton_post_xfer_req(agent->host, xfer, slice(""), 0), "post_xfer_req");
    while (check(baton_xfer_status(agent->host, xfer), "xfer_status") == BATON_IN_PROGRESS) {
        step(agent, other);
    }
    require(memcmp((const uint8_t *)(uintptr_t)memory.addr, other->memory, BLOCK * BLOCKS) == 0,
            "managed memory: the READ moved something else");
    while ((code = baton_release_xfer_req(agent->host, xfer)) == BATON_ERR_BUSY) {
        step(agent, other);
    }
    check(code, "release_xfer_req");
    check(baton_free_managed(agent->host, region), "free_managed");
    require(baton_free_managed(agent->host, region) == BATON_ERR_NOT_FOUND, "managed memory is freed once");
    return 1;
}

static void expect(Agent *agent, Agent *other, const char *peer, const char *message) {
    uint8_t buffer[4096];
    uint64_t needed = 0, count = 0;
    BatonNotifHeader header;
    for (;;) {
        check(baton_get_notifs(agent->host, buffer, sizeof buffer, &needed, &count), "get_notifs");
        if (count > 0) {
            break;
        }
        step(agent, other);
    }
    memcpy(&header, buffer, sizeof header);
    require(count == 1 && header.name_len_bytes == strlen(peer) && header.message_len_bytes == strlen(message) &&
                memcmp(buffer + sizeof header, peer, strlen(peer)) == 0 &&
                memcmp(buffer + sizeof header + header.name_len_bytes, message, strlen(message)) == 0,
            "another notification than expected");
}

static void compare(const uint8_t *memory, int even, int odd, const char *what) {
    size_t i;
    for (i = 0; i < BLOCK * BLOCKS; i++) {
        int seed = (i / BLOCK) % 2 == 0 ? even : odd;
        require(memory[i] == (uint8_t)(i * 31 + i / 256 + (size_t)seed), what);
    }
}

int main(void) {
    static Agent prefill, decode;
    static char json[1 << 16];
    uint64_t at_prefill, at_decode, size = 0;
    int indexed, has_managed;
    begin = time(NULL);
    open_agent(&prefill, "prefill", 1);
    open_agent(&decode, "decode", 2);
    at_prefill = learn(&decode, "prefill", &prefill);
    at_decode = learn(&prefill, "decode", &decode);

    transfer(&decode, &prefill, "prefill", at_prefill, BATON_OP_READ, "read");
    expect(&prefill, &decode, "decode", "read");
    compare(decode.memory, 1, 2, "the READ moved something else");

    memset(prefill.memory, 0, BLOCK * BLOCKS);
    transfer(&prefill, &decode, "decode", at_decode, BATON_OP_WRITE, "written");
    expect(&decode, &prefill, "prefill", "written");
    for (size_t i = 0; i < BLOCK * BLOCKS; i++) {
        uint8_t outside = (uint8_t)(i * 31 + i / 256 + 2);
        require(decode.memory[i] == ((i / BLOCK) % 2 == 0 ? 0 : outside), "the WRITE moved something else");
    }

    indexed = by_index(&prefill, &decode, "decode", at_decode);
    has_managed = managed(&prefill, &decode, "decode", at_decode);

    require(baton_deregister(prefill.host, 424242) == BATON_ERR_NOT_FOUND, "an unknown region is not found");
    check(baton_last_error((uint8_t *)json, sizeof json, &size), "last_error");
    require(size > 0, "an error has a text");
    require(baton_deregister(NULL, 1) == BATON_ERR_INVALID_PARAM, "no host is an invalid argument");
    check(baton_stats(decode.host, (uint8_t *)json, sizeof json - 1, &size), "stats");
    json[size] = 0;
    require(strstr(json, "\"choice\"") != NULL, "stats say what was chosen");

    check(baton_deregister(prefill.host, prefill.region), "deregister");
    check(baton_deregister(decode.host, decode.region), "deregister");
    check(baton_engine_close(prefill.host), "close");
    check(baton_engine_close(decode.host), "close");
    free(prefill.memory);
    free(decode.memory);
    printf("%s%sC host: READ and WRITE of %d blocks, libbaton %s\n", indexed ? "by index: " : "",
           has_managed ? "managed: " : "", BLOCKS / 2, baton_version());
    return 0;
}
