"""One run of Mooncake's transfer engine over RDMA or TCP: two processes, stop and wait, every request with a notification.

A request moves blocks that are not adjacent and carries a notification, for which the target polls; a case ends when the
target has heard all of them. Prints one JSON object a case. Needs Mooncake's wheel on PYTHONPATH.
"""

import argparse
import json
import subprocess
import sys
import time

import numpy as np
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

GAP = 4096
HOST = "127.0.0.1"


class Side:
    def __init__(self, protocol, device, size, blocks):
        self.engine = TransferEngine()
        assert self.engine.initialize(HOST, "P2PHANDSHAKE", protocol, device) == 0, "Mooncake does not start"
        self.size, self.blocks = size, blocks
        self.memory = np.zeros(GAP + blocks * (size + GAP), np.uint8)
        assert self.engine.register_memory(self.memory.ctypes.data, self.memory.nbytes) == 0, "no registration"

    def places(self, base):
        return [base + GAP + i * (self.size + GAP) for i in range(self.blocks)]

    def block(self, i):
        start = GAP + i * (self.size + GAP)
        return self.memory[start : start + self.size]


def read_line(stream):
    line = stream.readline()
    assert line, "the other process ended"
    return json.loads(line)


def target(options):
    side = Side(options.protocol, options.device, options.size, options.blocks)
    name = f"{HOST}:{side.engine.get_rpc_port()}"
    print(json.dumps({"name": name, "addr": side.memory.ctypes.data}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "fill" in order:
            side.memory[:] = np.random.default_rng(order["fill"]).integers(0, 256, side.memory.nbytes, np.uint8)
        if "hear" in order:
            heard, deadline = 0, time.monotonic() + 120
            while heard < order["hear"] and time.monotonic() < deadline:
                some = len(side.engine.get_notifies())
                heard += some
                if not some and options.look_us:
                    time.sleep(options.look_us / 1e6)
            assert heard == order["hear"], f"{heard} notifications instead of {order['hear']}"
        if "check" in order:
            check(side, order["check"])
        print(json.dumps({"done": True, "cpu": time.process_time()}), flush=True)


def check(side, seed):
    """Block i has come from block n-1-i of a side that was filled with `seed`."""
    source = np.random.default_rng(seed).integers(0, 256, side.memory.nbytes, np.uint8)
    for i in range(side.blocks):
        start = GAP + (side.blocks - 1 - i) * (side.size + GAP)
        assert (side.block(i) == source[start : start + side.size]).all(), f"block {i} has other bytes"


def machine_cpu_s():
    words = open("/proc/stat").readline().split()
    return sum(int(words[i]) for i in (1, 2, 3, 6, 7)) / 100


def run(options):
    command = [sys.executable, __file__, "--role", "target", "--device", options.target_device]
    command += ["--protocol", options.protocol]
    command += ["--size", str(options.size), "--blocks", str(options.blocks), "--look-us", str(options.look_us)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        measure(options, other)
    finally:
        other.kill()
        other.wait()


def measure(options, other):
    there = read_line(other.stdout)
    here = Side(options.protocol, options.device, options.size, options.blocks)
    opcode = {"write": TransferOpcode.Write, "read": TransferOpcode.Read}[options.op]
    mine, theirs = here.places(here.memory.ctypes.data), here.places(there["addr"])[::-1]
    lengths = [options.size] * options.blocks
    notify = TransferNotify("initiator", "blocks are there")

    def tell(**order):
        other.stdin.write(json.dumps(order) + "\n")
        other.stdin.flush()

    def turn(count):
        """Posts `count` requests one after the other; answers when each ended and when all had been heard."""
        tell(hear=count)
        laps, started = [], time.perf_counter()
        for _ in range(count):
            before = time.perf_counter()
            answer = here.engine.batch_transfer_sync(there["name"], mine, theirs, lengths, opcode, notify)
            assert answer == 0, f"batch_transfer_sync answers {answer}"
            laps.append(time.perf_counter() - before)
        read_line(other.stdout)
        return laps, time.perf_counter() - started

    tell(fill=2)
    read_line(other.stdout)
    here.memory[:] = np.random.default_rng(1).integers(0, 256, here.memory.nbytes, np.uint8)
    turn(1)
    if options.op == "write":
        tell(check=1)
        read_line(other.stdout)
    else:
        check(here, 2)
    per_request = options.size * options.blocks
    count = max(2, (options.mib << 20) // per_request)
    turn(max(1, count // 10))

    def own_cpu():
        tell()
        return time.process_time() + read_line(other.stdout)["cpu"]

    cpu, machine = own_cpu(), machine_cpu_s()
    laps, took = turn(count)
    machine = machine_cpu_s() - machine
    cpu = own_cpu() - cpu
    gib = per_request * count / 2**30
    sample = {
        "op": options.op.upper(),
        "size_bytes": options.size,
        "batch": options.blocks,
        "gbps": per_request * count * 8 / took / 1e9,
        "latency_us_p50": float(np.percentile(laps, 50) * 1e6),
        "latency_us_p99": float(np.percentile(laps, 99) * 1e6),
        "latency_us_p999": float(np.percentile(laps, 99.9) * 1e6),
        "cpu_s_per_gib": cpu / gib,
        "machine_cpu_s_per_gib": machine / gib,
    }
    print(json.dumps(sample), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", default="run", choices=["run", "target"])
    parser.add_argument("--op", default="write", choices=["write", "read"])
    parser.add_argument("--protocol", default="rdma", choices=["rdma", "tcp"])
    parser.add_argument("--device", default="rxe0", help="for RDMA")
    parser.add_argument("--target-device", default="rxe1")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=128)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--look-us", type=int, default=0)
    options = parser.parse_args()
    if options.protocol == "tcp":
        options.device = options.target_device = ""
    target(options) if options.role == "target" else run(options)


if __name__ == "__main__":
    main()
