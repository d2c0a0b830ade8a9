"""Notifications of Mooncake's two-sided transport between two processes: their rate, and their latency one way.

Python's interface sends a notification only behind a transfer, so this calls the library's own `sendNotifyByName`, which the
wheel exports. Fallback to the handshake's TCP connection is off: what is measured goes over RDMA or fails. Every message
is compared, in order, after the clock has stopped. Prints one JSON object. Needs Mooncake's wheel on PYTHONPATH.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time

SETTINGS = {"MC_USE_RDMA_TWOSIDED": "1", "MC_RDMA_NOTIFY_ENABLED": "1", "MC_RDMA_NOTIFY_OOB_FALLBACK": "0"}
# Read when the library starts.
for setting, value in SETTINGS.items():
    os.environ.setdefault(setting, value)

import mooncake.engine  # noqa: E402
from mooncake.engine import TransferEngine  # noqa: E402

HOST = "127.0.0.1"
TITLE = b"notify"
PATIENCE_S = 60
SEND = (
    "_ZN8mooncake14TransferEngine16sendNotifyByNameENSt7__cxx1112basic_string"
    "IcSt11char_traitsIcESaIcEEENS_16TransferMetadata10NotifyDescE"
)


class Text(ctypes.Structure):
    """A std::string of libstdc++: pointer, length, and either room for 15 bytes or the capacity of what it points to."""

    _fields_ = [("at", ctypes.c_void_p), ("length", ctypes.c_size_t), ("room", ctypes.c_char * 16)]


class Desc(ctypes.Structure):
    """What a notification consists of. A class with a destructor: passed by value means by the address of a copy."""

    _fields_ = [("name", Text), ("message", Text)]


LIBC = ctypes.CDLL(None)
LIBC.malloc.restype, LIBC.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
LIBC.free.restype, LIBC.free.argtypes = None, [ctypes.c_void_p]


def put(text, content):
    """Makes a string of bytes out of one that is unset, empty or of the same length. Whoever is called with it may empty it."""
    room = ctypes.addressof(text) + Text.room.offset
    if text.length != len(content) or not text.at:
        text.at, text.length = room, len(content)
        if len(content) > 15:
            # `operator new` of libstdc++ is malloc.
            text.at = LIBC.malloc(len(content) + 1)
            ctypes.c_size_t.from_address(room).value = len(content)
    ctypes.memmove(text.at, content + b"\0", len(content) + 1)


class Side:
    def __init__(self, device, pause_us):
        self.engine = TransferEngine()
        answer = self.engine.initialize(HOST, "P2PHANDSHAKE", "rdma", device)
        assert answer == 0, f"Mooncake does not start on {device}: initialize answers {answer}"
        self.name = f"{HOST}:{self.engine.get_rpc_port()}"
        self.pause_us = pause_us
        self.call = getattr(ctypes.CDLL(mooncake.engine.__file__), SEND)
        self.call.restype, self.call.argtypes = ctypes.c_int, [ctypes.c_void_p] * 3
        self.this = self.engine.get_engine_ptr()
        self.peer, self.desc = Text(), Desc()
        self.where, self.what = ctypes.addressof(self.peer), ctypes.addressof(self.desc)

    def to(self, peer):
        put(self.peer, peer)
        put(self.desc.name, TITLE)

    def send(self, peer, message):
        # Empty: whoever was called before has taken them over.
        if not (self.peer.length and self.desc.name.length):
            self.to(peer)
        put(self.desc.message, message)
        answer = self.call(self.this, self.where, self.what)
        assert answer == 0, f"sendNotifyByName answers {answer}"

    def hear(self, count):
        """Takes so many, unread."""
        heard, deadline = [], time.monotonic() + PATIENCE_S
        while len(heard) < count:
            some = self.engine.get_notifies()
            heard += some
            if not some:
                assert time.monotonic() < deadline, f"{len(heard)} notifications instead of {count}"
                self.pause()
        assert len(heard) == count, f"{len(heard)} notifications instead of {count}"
        return heard

    def pause(self):
        if self.pause_us:
            time.sleep(self.pause_us / 1e6)
        else:
            os.sched_yield()


def message(number, size):
    return f"{number:0{size}}".encode()


def check(heard, size, first=0):
    for number, one in enumerate(heard, first):
        expected = message(number, size).decode()
        assert (one.name, one.msg) == (TITLE.decode(), expected), f"{one.name} {one.msg} instead of {expected}"


def tell(stream, **words):
    stream.write(json.dumps(words) + "\n")
    stream.flush()


def read_line(stream):
    line = stream.readline()
    assert line, "the other process ended"
    return json.loads(line)


def target(options):
    side = Side(options.device, options.look_us)
    tell(sys.stdout, name=side.name)
    for line in sys.stdin:
        order = json.loads(line)
        if "hear" in order:
            heard = side.hear(order["hear"])
            tell(sys.stdout, done=True)
            check(heard, options.message_bytes)
        if "echo" in order:
            peer, size = order["peer"].encode(), options.message_bytes
            for number in range(order["echo"]):
                check(side.hear(1), size, number)
                side.send(peer, message(number, size))
        tell(sys.stdout, checked=True)


def run(options):
    command = [sys.executable, __file__, "--role", "target", "--device", options.target_device]
    command += ["--message-bytes", str(options.message_bytes), "--look-us", str(options.look_us)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        measure(options, other)
    finally:
        other.kill()
        other.wait()


def percentile(sorted_laps, part):
    return sorted_laps[min(len(sorted_laps) - 1, int(part * len(sorted_laps)))]


def own_cost_us(side, peer, messages):
    """What a send costs in this script itself: all of it, with a call of the C library instead."""
    call, side.call = side.call, LIBC.labs
    started = time.perf_counter()
    for message in messages:
        side.send(peer, message)
    took, side.call = time.perf_counter() - started, call
    return took / len(messages) * 1e6


def measure(options, other):
    side, size = Side(options.device, options.look_us), options.message_bytes
    # It takes one argument and answers with its lower half, which the converter makes a success.
    LIBC.labs.restype, LIBC.labs.argtypes = (lambda _: 0), [ctypes.c_void_p] * 3
    peer = read_line(other.stdout)["name"].encode()

    def stream(messages):
        tell(other.stdin, hear=len(messages))
        started = time.perf_counter()
        for message in messages:
            side.send(peer, message)
        read_line(other.stdout)
        took = time.perf_counter() - started
        read_line(other.stdout)
        return took / len(messages) * 1e6

    def ping(messages):
        tell(other.stdin, echo=len(messages), peer=side.name)
        laps = []
        for number, message in enumerate(messages):
            before = time.perf_counter()
            side.send(peer, message)
            heard = side.hear(1)
            laps.append((time.perf_counter() - before) * 1e6 / 2)
            check(heard, size, number)
        read_line(other.stdout)
        return sorted(laps)

    def messages(count):
        return [message(number, size) for number in range(max(1, count))]

    stream(messages(options.count // 10))
    op_us = stream(messages(options.count))
    script_us = own_cost_us(side, peer, messages(options.count))
    ping(messages(options.pings // 10))
    laps = ping(messages(options.pings))
    tell(
        sys.stdout,
        case=f"{size} B",
        ops_per_s=1e6 / op_us,
        op_us=op_us,
        script_us=script_us,
        net_op_us=max(0, op_us - script_us),
        p50_us=percentile(laps, 0.5),
        p99_us=percentile(laps, 0.99),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", default="run", choices=["run", "target"])
    parser.add_argument("--device", default="rxe0")
    parser.add_argument("--target-device", default="rxe1")
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--pings", type=int, default=1000)
    parser.add_argument("--message-bytes", type=int, default=16)
    parser.add_argument("--look-us", type=int, default=0)
    options = parser.parse_args()
    target(options) if options.role == "target" else run(options)


if __name__ == "__main__":
    main()
