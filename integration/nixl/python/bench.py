"""One run of the benchmark: two processes, stop and wait, through the stock NIXL API; one JSON line per case.

An iteration posts a prepared request of `--batch` descriptors with a notification and polls it to its end; with
`--prepare-each` it creates and releases that request, too. The target polls for notifications; a case ends when it has
heard all of them, so what a backend leaves to be done after DONE counts too. The first iterations are not counted.
Before the counted ones every byte is compared.
"""

import argparse
import json
import time

import numpy as np

from side import Peer, Side

POOL = 256 << 20  # memory on each side, walked through so that blocks are as cold as a cache of that size makes them
MAX_HANDLES = 16


class Target(Side):
    """The passive side; it only polls for notifications."""

    def hear(self, sender, count):
        """Polls until `count` notifications of one sender have come; returns when they had."""
        heard = 0
        poll = self.agent.get_new_notifs
        while heard < count:
            heard += len(poll().get(sender, ()))
        return time.clock_gettime(time.CLOCK_MONOTONIC)


class Laps:
    """Seconds of every iteration: from its start to DONE, and the parts on the caller's thread."""

    def __init__(self):
        self.whole, self.prepare, self.post = [], [], []


def blocks(here, size, batch, base, number, order):
    """One side's descriptor list; NIXL copies it when a request is created."""
    start = base + number * size * batch
    return here.agent.get_xfer_descs([(start + int(i) * size, size, 0) for i in order], "DRAM")


def machine_cpu_seconds():
    words = open("/proc/stat").readline().split()
    return sum(int(words[i]) for i in (1, 2, 3, 6, 7)) / 100


def case(here, there, op, size, batch, options, local, remote, pool):
    """Runs one case and answers what one line of the output holds."""
    per_request = size * batch
    lists = []
    for number in range(max(1, min(MAX_HANDLES, pool // per_request))):
        order = np.random.default_rng(number).permutation(batch)
        mine = blocks(here, size, batch, local, number, range(batch))
        lists.append((mine, blocks(here, size, batch, remote, number, order)))
    budget = options.budget_mib << 20
    iterations = max(16, min(2000, budget // per_request))
    warm = max(4, len(lists), iterations // 10)
    create, transfer, state = here.agent.initialize_xfer, here.agent.transfer, here.agent.check_xfer_state
    now, laps = time.perf_counter, Laps()

    def prepare(number):
        mine, theirs = lists[number % len(lists)]
        started = now()
        handle = create(op, mine, theirs, "target", b"blocks are there", [here.backend])
        laps.prepare.append(now() - started)
        return handle

    ready = [] if options.prepare_each else [prepare(number) for number in range(len(lists))]

    def loop(count):
        there.start("hear", "initiator", count)
        first = time.clock_gettime(time.CLOCK_MONOTONIC)
        for number in range(count):
            started = now()
            handle = ready[number % len(ready)] if ready else prepare(number)
            before = now()
            answer = transfer(handle)
            laps.post.append(now() - before)
            while answer == "PROC":
                answer = state(handle)
            laps.whole.append(now() - started)
            assert answer == "DONE", f"{op} of {batch} x {size}: {answer}"
            if not ready:
                here.release(handle)
        return there.answer() - first

    loop(warm)
    laps.whole, laps.post = [], []
    if not ready:
        laps.prepare = []
    cpu, machine = here.cpu_seconds() + there.cpu_seconds(), machine_cpu_seconds()
    total = loop(iterations)
    machine = machine_cpu_seconds() - machine
    cpu = here.cpu_seconds() + there.cpu_seconds() - cpu
    for handle in ready:
        here.release(handle)
    gib = per_request * iterations / 2**30
    whole = np.percentile(laps.whole, [50, 99, 99.9]) * 1e6
    return {
        "op": op,
        "size_bytes": size,
        "batch": batch,
        "gbps": per_request * iterations * 8 / total / 1e9,
        "latency_us_p50": whole[0],
        "latency_us_p99": whole[1],
        "latency_us_p999": whole[2],
        "prepare_us_p50": float(np.median(laps.prepare)) * 1e6,
        "post_us_p50": float(np.median(laps.post)) * 1e6,
        "cpu_s_per_gib": cpu / gib,
        "machine_cpu_s_per_gib": machine / gib,
    }


def check(here, there, op, size, batch, numbers, addresses):
    """One request with fresh bytes, compared in full: a backend that is fast because it moves nothing is found out."""
    source, target = (here, there) if op == "WRITE" else (there, here)
    source_number, target_number = numbers if op == "WRITE" else reversed(numbers)
    source.fill(source_number, size + batch, 0, size * batch)
    target.fill(target_number, None, 0, size * batch)
    rows = lambda base: [(base + i * size, size) for i in range(batch)]
    there.start("take", "initiator")  # polls meanwhile: UCX without a progress thread needs it
    here.run(op, rows(addresses[0]), rows(addresses[1]), "target", b"check")
    assert there.answer() == [b"check"]
    same = source.slice_checksum(source_number, size * batch) == target.slice_checksum(target_number, size * batch)
    assert same, f"{op} of {batch} x {size}: the bytes differ"


def idle_share(there, seconds):
    """CPU of the idle target, as a share of one core."""
    before = there.cpu_seconds()
    time.sleep(seconds)  # the measured interval itself: idle time cannot be waited for any other way
    return (there.cpu_seconds() - before) / seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="4096,65536,1048576")
    parser.add_argument("--ops", default="write,read")
    parser.add_argument("--prepare-each", action="store_true", help="every iteration creates its request")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--budget-mib", type=int, default=1024, help="bytes to move per case")
    parser.add_argument("--no-progress-thread", action="store_true", help="both agents; NIXL's default is with")
    parser.add_argument("--idle", type=float, default=0, help="measure an idle target for so many seconds")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",") if size]
    pool = max([POOL, *(size * options.batch for size in sizes)])
    how = {"progress_thread": not options.no_progress_thread}
    here, there = Side("initiator", **how), Peer("target", role="bench:Target", **how)
    local, local_addr = here.buffer(pool, seed=1)
    remote, remote_addr = there.buffer(pool, seed=2)
    here.load(there.metadata())
    there.load(here.metadata())
    for size in sizes:
        for op in options.ops.upper().split(","):
            check(here, there, op, size, options.batch, (local, remote), (local_addr, remote_addr))
            result = case(here, there, op, size, options.batch, options, local_addr, remote_addr, pool)
            print(json.dumps(result), flush=True)
    if options.idle:
        print(json.dumps({"idle_core_share": idle_share(there, options.idle)}), flush=True)


if __name__ == "__main__":
    main()
