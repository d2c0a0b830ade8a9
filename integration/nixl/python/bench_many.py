"""One run of the benchmark of large requests: very many small descriptors in random order; one JSON line per direction.

A request is created, posted and polled to its end, each time a fresh one as a host has a fresh one for every sequence.
A request of the same kind goes first and is not counted. Blocks are adjacent on both sides, and both sides' order is
random: there is nothing to merge. Every byte of every request is compared.
"""

import argparse
import json
import os
import time
import zlib

import numpy as np

from bench import Target
from side import Peer, Side


def rows(base, size, order):
    """Descriptors of the blocks at their places in this order, as NIXL takes them."""
    return np.stack([base + order.astype(np.uint64) * size, np.full_like(order, size), np.zeros_like(order)], axis=1)


class Case:
    """One direction between two sides that hold `count` blocks each."""

    def __init__(self, here, there, op, options, numbers, addresses):
        self.here, self.there, self.op = here, there, op
        self.count, self.size = options.count, options.size
        self.numbers, self.addresses = numbers, addresses

    def prepare(self, seed):
        """Both lists in new orders, and what the receiving side must hold afterwards."""
        order = np.random.default_rng(seed)
        self.mine, self.theirs = (order.permutation(self.count).astype(np.uint64) for _ in range(2))
        # NIXL copies lists when a request is created; making them is the host's work, not the backend's.
        lists = [
            self.here.agent.get_xfer_descs(rows(base, self.size, order), "DRAM")
            for base, order in zip(self.addresses, (self.mine, self.theirs))
        ]
        bytes_of = np.random.default_rng(seed + 1).integers(0, 256, self.count * self.size, dtype=np.uint8)
        writes = self.op == "WRITE"
        source, target = (self.here, self.there) if writes else (self.there, self.here)
        at_source, at_target = self.numbers if writes else reversed(self.numbers)
        source.fill(at_source, seed + 1)
        target.fill(at_target, None)
        from_, to = (self.mine, self.theirs) if writes else (self.theirs, self.mine)
        expected = np.empty((self.count, self.size), dtype=np.uint8)
        expected[to] = bytes_of.reshape(self.count, self.size)[from_]
        return lists, lambda: target.checksum(at_target) == zlib.crc32(expected.reshape(-1))

    def once(self, seed):
        lists, arrived = self.prepare(seed)
        agent, now = self.here.agent, time.perf_counter
        self.there.start("hear", "initiator", 1)
        cpu, held, started = self.here.cpu_seconds(), time.thread_time(), now()
        handle = agent.initialize_xfer(self.op, *lists, "target", b"blocks are there", [self.here.backend])
        created = now()
        state = agent.transfer(handle)
        posted, held = now(), time.thread_time() - held
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        done = now()
        cpu = self.here.cpu_seconds() - cpu
        what = f"{self.op} of {self.count} x {self.size}"
        assert state == "DONE", f"{what}: {state}"
        self.there.answer()
        self.here.release(handle)
        assert arrived(), f"{what}: the bytes differ"
        return {
            "create_ms": (created - started) * 1e3,
            "post_ms": (posted - created) * 1e3,
            "caller_ms": (posted - started) * 1e3,
            "caller_cpu_ms": held * 1e3,
            "done_ms": (done - started) * 1e3,
            "own_cpu_s": cpu,
        }

    def measure(self, repeats):
        """Medians of `repeats` requests after one that does not count."""
        self.once(1)
        laps, cpu = [], 0.0
        for number in range(repeats):
            # Filling and comparing are the target's work as well: only what it does while it listens counts.
            before = self.there.heard_cpu_seconds()
            laps.append(self.once(10 + 2 * number))
            cpu += laps[-1].pop("own_cpu_s") + self.there.heard_cpu_seconds() - before
        figures = {name: float(np.median([lap[name] for lap in laps])) for name in laps[0]}
        return {"case": self.op, **figures, "cpu_s": cpu / repeats}


class Counting(Target):
    """A target that knows how much CPU time it took while it listened."""

    heard_cpu = 0.0

    def hear(self, sender, count):
        before = self.cpu_seconds()
        try:
            return super().hear(sender, count)
        finally:
            self.heard_cpu += self.cpu_seconds() - before

    def heard_cpu_seconds(self):
        return self.heard_cpu


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=120_000, help="descriptors of a request")
    parser.add_argument("--size", type=int, default=512, help="bytes of a descriptor")
    parser.add_argument("--ops", default="write,read")
    parser.add_argument("--repeats", type=int, default=1, help="requests that count, per direction")
    parser.add_argument("--no-progress-thread", action="store_true", help="both agents; NIXL's default is with")
    options = parser.parse_args()
    how = {"progress_thread": not options.no_progress_thread}
    here, there = Side("initiator", **how), Peer("target", role="bench_many:Counting", **how)
    numbers, addresses = zip(*(side.buffer(options.count * options.size, seed=1) for side in (here, there)))
    here.load(there.metadata())
    there.load(here.metadata())
    for op in options.ops.upper().split(","):
        case = Case(here, there, op, options, numbers, addresses)
        print(json.dumps(case.measure(options.repeats)), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # everything is printed; taking UCX down may hang, and is not what is measured
