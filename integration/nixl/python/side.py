"""One side of a transfer: a stock NIXL agent with its buffers, and the same thing in another process.

`Side` wraps an agent. `Peer` starts a process that holds a `Side` and calls its methods there, one at a time, over a
socket pair: between two calls the peer's thread waits for the next one and calls nothing, as a passive target does.
"""

import ctypes
import importlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import zlib

import numpy as np

try:
    from nixl._api import nixl_agent, nixl_agent_config
    from nixl import _bindings as bindings
except ImportError as error:  # the scripts need the wheel on PYTHONPATH; cargo xtask puts it there
    sys.exit(f"the stock NIXL wheel is not importable ({error}); run this through cargo xtask")

BACKEND = os.environ.get("NIXL_TEST_BACKEND", "BATON")
GUARD = 4096  # sentinel bytes on both sides of every buffer
ODD = 64  # buffers do not start on a page: vLLM's do not either
SENTINEL = 0xA5
HERE = os.path.dirname(os.path.abspath(__file__))
PEER_DEVICES = os.environ.get("NIXL_TEST_PEER_DEVICES")  # RDMA devices of other processes, where they have their own
DEADLINE_S = float(os.environ.get("NIXL_TEST_DEADLINE_S", "30"))


class Timeout(Exception):
    """A condition did not come true before its deadline."""


def wait_until(what, condition, deadline_s=DEADLINE_S):
    """Polls `condition` until it answers something true, and returns that."""
    deadline = time.monotonic() + deadline_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise Timeout(f"{what}: not within {deadline_s:g} s")
        os.sched_yield()


def pattern(size, seed):
    """`size` bytes that differ from place to place and from seed to seed."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Buffer:
    """Memory with sentinels around it; only what is between them is registered."""

    def __init__(self, size):
        self.size = size
        self.whole = np.full(size + 2 * GUARD + ODD, SENTINEL, dtype=np.uint8)
        self.bytes = self.whole[GUARD + ODD : GUARD + ODD + size]
        self.addr = self.bytes.ctypes.data

    def guards_intact(self):
        before, after = self.whole[: GUARD + ODD], self.whole[GUARD + ODD + self.size :]
        return bool((before == SENTINEL).all() and (after == SENTINEL).all())


class Side:
    """An agent, its buffers (by number) and what it has been told."""

    def __init__(self, name, params=None, progress_thread=True, sync=None, listen_port=None, backend=BACKEND):
        options = {"enable_prog_thread": progress_thread, "backends": []}
        if listen_port is not None:
            options.update(enable_listen_thread=True, listen_port=listen_port)
        if sync is not None:
            from nixl._api import nixl_thread_sync_t

            options["sync_mode"] = nixl_thread_sync_t[sync]
        self.name = name
        self.backend = backend
        self.agent = nixl_agent(name, nixl_agent_config(**options))
        self.agent.create_backend(backend, params or {})
        self.buffers = []
        self.registered = {}
        self.heard = {}

    # -- memory --

    def buffer(self, size, seed=None, register=True, device=0):
        """A new buffer, filled with a pattern or with zeroes; returns its number and address."""
        buffer = Buffer(size)
        buffer.bytes[:] = 0 if seed is None else pattern(size, seed)
        self.buffers.append(buffer)
        number = len(self.buffers) - 1
        if register:
            self.register([number], [device])
        return number, buffer.addr

    def register(self, numbers, devices=None):
        """Registers buffers in one list; may be called again for the same ones."""
        devices = devices or [0] * len(numbers)
        rows = [(self.buffers[n].addr, self.buffers[n].size, d, "") for n, d in zip(numbers, devices)]
        descs = self.agent.register_memory(rows, "DRAM", [self.backend])
        self.registered.setdefault(tuple(numbers), []).append(descs)

    def deregister(self, numbers):
        self.agent.deregister_memory(self.registered[tuple(numbers)].pop(), [self.backend])

    def fill(self, number, seed, start=0, size=None):
        buffer = self.buffers[number]
        size = buffer.size - start if size is None else size
        buffer.bytes[start : start + size] = 0 if seed is None else pattern(size, seed)

    def content(self, number):
        """Every byte of a buffer; its sentinels are checked on the way."""
        buffer = self.buffers[number]
        assert buffer.guards_intact(), f"{self.name}: bytes around buffer {number} were overwritten"
        return buffer.bytes.tobytes()

    def checksum(self, number):
        return zlib.crc32(self.content(number))

    def slice_checksum(self, number, size):
        assert self.buffers[number].guards_intact(), f"{self.name}: bytes around buffer {number} were overwritten"
        return zlib.crc32(self.buffers[number].bytes[:size])

    # -- what agents tell each other --

    def metadata(self):
        return self.agent.get_agent_metadata()

    def partial_metadata(self, numbers, connection):
        descs = self.registered[tuple(numbers)][-1] if numbers else bindings.nixlRegDList(bindings.DRAM_SEG)
        return self.agent.get_partial_agent_metadata(descs, connection, [self.backend])

    def load(self, metadata):
        name = self.agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def fetch(self, name, port):
        """Asks a peer's own listener for its metadata, which a thread of the agent then loads."""
        self.agent.fetch_remote_metadata(name, "127.0.0.1", port)
        wait_until(f"{self.name}: metadata of {name}", lambda: self.agent.check_remote_metadata(name))

    def remove(self, name):
        self.agent.remove_remote_agent(name)

    def connect(self, name):
        self.agent.make_connection(name, [self.backend])

    # -- notifications --

    def poll(self):
        """Takes what has come; returns everything not yet taken by `take`."""
        for sender, messages in self.agent.get_new_notifs().items():
            self.heard.setdefault(sender, []).extend(bytes(m) for m in messages)
        return {sender: list(messages) for sender, messages in self.heard.items() if messages}

    def take(self, sender, count=1):
        """Waits for `count` messages of one sender and returns them in their order."""
        def enough():
            self.poll()
            return len(self.heard.get(sender, [])) >= count

        wait_until(f"{self.name}: {count} notification(s) of {sender}", enough)
        messages = self.heard[sender]
        self.heard[sender] = messages[count:]
        return messages[:count]

    def send(self, name, message):
        self.agent.send_notif(name, message)

    # -- transfers --

    def prepare(self, op, local, remote, name, message=b""):
        """`local` and `remote` are lists of (address, length) or (address, length, device)."""
        rows = lambda list_: [(d[0], d[1], d[2] if len(d) > 2 else 0) for d in list_]
        return self.agent.initialize_xfer(
            op,
            self.agent.get_xfer_descs(rows(local), "DRAM"),
            self.agent.get_xfer_descs(rows(remote), "DRAM"),
            name,
            message,
            [self.backend],
        )

    def post(self, handle, message=b""):
        return self.agent.transfer(handle, message)

    def state(self, handle):
        return self.agent.check_xfer_state(handle)

    def finish(self, handle, deadline_s=DEADLINE_S):
        """Polls to the end; anything but DONE is an error."""
        def ended():
            state = self.state(handle)
            return state if state != "PROC" else None

        state = wait_until(f"{self.name}: end of a transfer", ended, deadline_s)
        assert state == "DONE", f"{self.name}: the transfer ended with {state}"

    def run(self, op, local, remote, name, message=b""):
        """A whole transfer: prepare, post, wait, release."""
        handle = self.prepare(op, local, remote, name, message)
        assert self.post(handle) in ("DONE", "PROC")
        self.finish(handle)
        self.release(handle)

    def release(self, handle):
        self.agent.release_xfer_handle(handle)

    def release_in_the_end(self, handle):
        """Releases a request that may be in progress: while it is refused, it is tried again."""
        def released():
            try:
                self.agent.release_xfer_handle(handle)
                return True
            except bindings.nixlRepostActiveError:
                return False

        wait_until(f"{self.name}: release of a request in progress", released)

    # -- for peers --

    def checksum_when_heard(self, sender, number):
        """Waits for one message and at once sums up what is in the buffer."""
        (message,) = self.take(sender)
        return message, self.checksum(number)

    def wipe_when_heard(self, sender, number):
        """Waits for one message and at once overwrites the buffer, as a prefill reuses freed blocks."""
        (message,) = self.take(sender)
        self.fill(number, None)
        return message

    def cpu_seconds(self):
        return time.process_time()

    def leave_in_mid_transfer(self, local, remote, name):
        """Posts a transfer and leaves the interpreter with everything alive, so that it ends in exit handlers."""
        self.post(self.prepare("WRITE", local, remote, name, b"bye"))
        raise SystemExit(0)


# ---- the same in another process ----


def send_object(connection, value):
    data = pickle.dumps(value)
    connection.sendall(struct.pack("<Q", len(data)) + data)


def receive_object(connection):
    """The next object, or None when the other end is gone."""
    head = receive_exactly(connection, 8)
    return None if head is None else pickle.loads(receive_exactly(connection, struct.unpack("<Q", head)[0]))


def receive_exactly(connection, size):
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class PeerError(Exception):
    """What a call raised in the peer's process."""


class Peer:
    """A `Side` in a process of its own; unknown attributes are methods that run there. `role` may name a subclass."""

    def __init__(self, name, env=None, role="side:Side", **options):
        ours, theirs = socket.socketpair()
        ours.settimeout(2 * DEADLINE_S)
        self.name = name
        self.connection = ours
        command = [sys.executable, os.path.join(HERE, "side.py"), str(theirs.fileno()), role]
        devices = {"BATON_DEVICES": PEER_DEVICES} if PEER_DEVICES else {}
        everything = {**os.environ, **devices, **(env or {})}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=everything)
        theirs.close()
        self.call("__init__", name, **options)

    def call(self, method, *args, **kwargs):
        self.start(method, *args, **kwargs)
        return self.answer()

    def start(self, method, *args, **kwargs):
        """Begins a call; `answer` waits for its end."""
        send_object(self.connection, (method, args, kwargs))

    def answer(self):
        reply = receive_object(self.connection)
        if reply is None:
            raise PeerError(f"{self.name}: the process ended (exit code {self.process.wait(DEADLINE_S)})")
        good, value = reply
        if not good:
            raise PeerError(f"{self.name}: {value}")
        return value

    def __getattr__(self, method):
        return lambda *args, **kwargs: self.call(method, *args, **kwargs)

    def kill(self):
        """As the out-of-memory killer does it."""
        self.process.kill()
        self.process.wait(DEADLINE_S)
        self.connection.close()

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def close(self):
        """Lets the process end by itself; answers its exit code."""
        self.connection.close()
        return self.process.wait(DEADLINE_S)


def die_with_parent():
    """A peer whose driver is killed must not stay behind."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(connection, role):
    """The peer's main loop: nothing of NIXL is called but what is asked for."""
    module, name = role.split(":")
    kind = getattr(importlib.import_module(module), name)
    side = None
    while (request := receive_object(connection)) is not None:
        method, args, kwargs = request
        try:
            if method == "__init__":
                side, value = kind(*args, **kwargs), None
            else:
                value = getattr(side, method)(*args, **kwargs)
            send_object(connection, (True, value))
        except Exception:
            send_object(connection, (False, traceback.format_exc()))


if __name__ == "__main__":
    die_with_parent()
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
