"""The main job: KV blocks cross between a prefill and a decode process, each with a stock NIXL agent.

Prefill computes the KV cache of each request (here: a pattern that differs in every byte) in blocks scattered over its
cache. Decode reads them into blocks of its own, just as scattered, and the notification of that read lets prefill free
its blocks. Then the other way round: prefill writes a request's blocks into decode's cache and tells it so. Checksums
are taken on both sides. Prints one JSON object a line, for `cargo xtask demo` to show.
"""

import argparse
import json
import os
import time
import zlib

import numpy as np

from side import Peer, Side


class Shape:
    """A paged KV cache: per layer a K and a V half, each of `blocks` blocks."""

    def __init__(self, layers, blocks, tokens=16, heads=8, head_size=128, bytes_per_number=2):
        self.layers, self.blocks, self.tokens, self.heads, self.head_size = layers, blocks, tokens, heads, head_size
        self.block_bytes = tokens * heads * head_size * bytes_per_number
        self.layer_bytes = 2 * blocks * self.block_bytes
        self.total_bytes = layers * self.layer_bytes

    def __str__(self):
        return (
            f"{self.layers} layers x K and V x {self.blocks} blocks of {self.tokens} tokens x {self.heads} heads x "
            f"{self.head_size} x bf16 = {self.total_bytes / 2**20:.0f} MiB, {self.block_bytes // 1024} KiB a block"
        )


FULL = Shape(32, 256)
QUICK = Shape(8, 64)


class Cache(Side):
    """An agent with a KV cache, one registered buffer a layer."""

    def __init__(self, name, layers, blocks):
        super().__init__(name)
        self.shape = Shape(layers, blocks)
        self.layers = [self.buffer(self.shape.layer_bytes, seed=None, register=False)[0] for _ in range(layers)]
        self.register(self.layers)
        self.free = list(np.random.default_rng(zlib.crc32(name.encode())).permutation(blocks))

    def addresses(self):
        return [self.buffers[layer].addr for layer in self.layers]

    def take_blocks(self, count):
        """Blocks for a request, wherever there are free ones."""
        taken, self.free = self.free[:count], self.free[count:]
        return [int(block) for block in taken]

    def give_back(self, blocks):
        """Frees blocks and overwrites them at once, as the next request would."""
        for layer in self.layers:
            view = self.halves(layer)
            view[:, blocks] = 0xDD
        self.free.extend(blocks)

    def halves(self, layer):
        return self.buffers[layer].bytes.reshape(2, self.shape.blocks, self.shape.block_bytes)

    def compute(self, blocks, seed):
        """What a model would do: KV for every layer of a request. Answers its checksum."""
        noise = np.random.default_rng(seed)
        size = len(blocks) * self.shape.block_bytes
        for layer in self.layers:
            for half in (0, 1):
                self.halves(layer)[half, blocks] = np.frombuffer(noise.bytes(size), np.uint8).reshape(len(blocks), -1)
        return self.checksum_of(blocks)

    def checksum_of(self, blocks):
        sum_ = 0
        for layer in self.layers:
            for half in (0, 1):
                sum_ = zlib.crc32(self.halves(layer)[half, blocks].tobytes(), sum_)
        return sum_

    def descriptors(self, blocks):
        return descriptors(self.shape, self.addresses(), blocks)

    def move(self, op, blocks, other_addresses, other_blocks, name, message):
        """One transfer of a request's blocks, from post to the end; answers the seconds it took."""
        remote = descriptors(self.shape, other_addresses, other_blocks)
        agent = self.agent
        handle = agent.initialize_xfer(
            op,
            agent.get_xfer_descs(self.descriptors(blocks), "DRAM"),
            agent.get_xfer_descs(remote, "DRAM"),
            name,
            message,
            [self.backend],
        )
        started = time.perf_counter()
        self.post(handle)
        self.finish(handle)
        took = time.perf_counter() - started
        self.release(handle)
        return took

    def guards(self):
        return all(self.buffers[layer].guards_intact() for layer in self.layers)


def descriptors(shape, layer_addresses, blocks):
    """Rows of (address, length, device) for every layer, half and block, as a connector makes them."""
    offsets = np.array(
        [(half * shape.blocks + block) * shape.block_bytes for half in (0, 1) for block in blocks], np.uint64
    )
    addresses = (np.array(layer_addresses, np.uint64)[:, None] + offsets[None, :]).reshape(-1)
    rows = np.zeros((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1] = addresses, shape.block_bytes
    return rows


def say(**what):
    print(json.dumps(what), flush=True)


def rate(size, seconds):
    return f"{size / 2**20:.0f} MiB in {seconds * 1e3:.1f} ms, {size / seconds / 1e9:.2f} GB/s"


class Failed(Exception):
    pass


def must(condition, what):
    if not condition:
        raise Failed(what)


def demo(shape, requests, blocks_each):
    size = shape.layers * 2 * blocks_each * shape.block_bytes
    say(say=f"cache of each process: {shape}")
    say(total=2 * requests * size)
    prefill = Peer("prefill", role="demo:Cache", layers=shape.layers, blocks=shape.blocks)
    decode = Cache("decode", shape.layers, shape.blocks)
    decode.load(prefill.metadata())
    prefill.load(decode.metadata())
    addresses = {"prefill": prefill.addresses(), "decode": decode.addresses()}
    say(say=f"prefill is process {prefill.process.pid}, decode is process {os.getpid()}")

    seconds = {"READ": 0.0, "WRITE": 0.0}
    for number in range(requests):
        theirs, ours = prefill.take_blocks(blocks_each), decode.take_blocks(blocks_each)
        wanted = prefill.compute(theirs, number)
        message = b"request-%d:1" % number
        seconds["READ"] += decode.move("READ", ours, addresses["prefill"], theirs, "prefill", message)
        must(prefill.take("decode") == [message], "prefill was not told that its blocks were read")
        prefill.give_back(theirs)
        must(decode.checksum_of(ours) == wanted, f"request {number}: decode read other bytes than prefill computed")
        decode.give_back(ours)
        say(moved=size)

    for number in range(requests):
        theirs, ours = prefill.take_blocks(blocks_each), decode.take_blocks(blocks_each)
        wanted = prefill.compute(theirs, 1000 + number)
        message = b"pushed-%d" % number
        seconds["WRITE"] += prefill.move("WRITE", theirs, addresses["decode"], ours, "decode", message)
        must(decode.take("prefill") == [message], "decode was not told that blocks were written")
        must(decode.checksum_of(ours) == wanted, f"request {number}: prefill wrote other bytes than it computed")
        prefill.give_back(theirs)
        decode.give_back(ours)
        say(moved=size)

    must(decode.guards() and prefill.guards(), "bytes around the caches were overwritten")
    count = shape.layers * 2 * blocks_each
    stories = {"READ": "decode read, prefill freed on the notification", "WRITE": "prefill wrote and notified"}
    for op, who in stories.items():
        say(say=f"{op:<5} {requests} requests x {count} blocks: {rate(requests * size, seconds[op])} ({who})")
    say(say="checksums agree on both sides, no byte outside the blocks was touched")
    must(prefill.close() == 0, "prefill did not end well")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    try:
        if options.quick:
            demo(QUICK, 4, 12)
        else:
            demo(FULL, 6, 64)
    except Failed as failure:
        say(failed=str(failure))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
