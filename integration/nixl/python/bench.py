"""One run of the benchmark: two processes, stop and wait, through the stock NIXL API; one JSON line per case.

An iteration posts a prepared request of `--batch` descriptors with a notification and polls it to its end. The target
polls for notifications; a case ends when it has heard all of them, so what a backend leaves to be done after DONE
counts too. The first iterations are not counted. Before and after the counted ones the target's bytes are compared.
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


def case(here, there, op, size, batch, budget_bytes, local, remote, pool):
    """Runs one case and answers seconds per iteration, seconds in all, iterations."""
    per_request = size * batch
    handles = []
    for number in range(max(1, min(MAX_HANDLES, pool // per_request))):
        order = np.random.default_rng(number).permutation(batch)
        mine = [(local + number * per_request + i * size, size) for i in range(batch)]
        theirs = [(remote + number * per_request + int(i) * size, size) for i in order]
        handles.append(here.prepare(op, mine, theirs, "target", b"block set %d is done" % number))
    iterations = max(16, min(2000, budget_bytes // per_request))
    warm = max(4, len(handles), iterations // 10)
    transfer, state, now = here.agent.transfer, here.agent.check_xfer_state, time.perf_counter

    def loop(count):
        there.start("hear", "initiator", count)
        laps = []
        first = time.clock_gettime(time.CLOCK_MONOTONIC)
        for number in range(count):
            handle = handles[number % len(handles)]
            started = now()
            answer = transfer(handle)
            while answer == "PROC":
                answer = state(handle)
            laps.append(now() - started)
            assert answer == "DONE", f"{op} of {batch} x {size}: {answer}"
        return laps, there.answer() - first

    loop(warm)
    laps, total = loop(iterations)
    for handle in handles:
        here.release(handle)
    return laps, total, iterations, per_request


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
        for op in ("WRITE", "READ"):
            check(here, there, op, size, options.batch, (local, remote), (local_addr, remote_addr))
            laps, total, count, per_request = case(
                here, there, op, size, options.batch, options.budget_mib << 20, local_addr, remote_addr, pool
            )
            p50, p99 = np.percentile(laps, [50, 99])
            result = {
                "op": op,
                "size_bytes": size,
                "batch": options.batch,
                "gbps": per_request * count * 8 / total / 1e9,
                "latency_us_p50": p50 * 1e6,
                "latency_us_p99": p99 * 1e6,
            }
            print(json.dumps(result), flush=True)
    if options.idle:
        print(json.dumps({"idle_core_share": idle_share(there, options.idle)}), flush=True)


if __name__ == "__main__":
    main()
