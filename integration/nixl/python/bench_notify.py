"""One run of the benchmark of notifications: they go to and fro between two processes; one JSON line.

Both sides spin on `get_new_notifs`. Half of a round trip is what a notification takes one way. Every message carries
its number, and the answer must be the same message.
"""

import argparse
import json
import os
import time

import numpy as np

from side import DEADLINE_S, Peer, Side

STOP = b"stop"


class Echo(Side):
    """The side that sends everything back until it is told to stop."""

    def echo(self, sender):
        poll, answer = self.agent.get_new_notifs, self.agent.send_notif
        while True:
            for message in poll().get(sender, ()):
                answer(sender, message)
                if message == STOP:
                    return self.cpu_seconds()


def round_trip(here, message, deadline):
    """Sends one message and spins until its answer is there."""
    poll = here.agent.get_new_notifs
    here.agent.send_notif("target", message)
    while not (got := poll().get("target")):
        assert time.monotonic() < deadline, f"no answer within {DEADLINE_S:g} s"
    assert got == [message], f"{got} instead of {message}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2, help="how long round trips are counted")
    parser.add_argument("--warm-up", type=int, default=50, help="round trips before those that count")
    parser.add_argument("--message-bytes", type=int, default=16)
    parser.add_argument("--no-progress-thread", action="store_true", help="both agents; NIXL's default is with")
    options = parser.parse_args()
    assert options.message_bytes >= 8, "--message-bytes: a message holds its number, 8 bytes at least"
    how = {"progress_thread": not options.no_progress_thread}
    here, there = Side("initiator", **how), Peer("target", role="bench_notify:Echo", **how)
    here.load(there.metadata())
    there.load(here.metadata())
    cpu = here.cpu_seconds() + there.cpu_seconds()
    there.start("echo", "initiator")
    laps, now, end, number = [], time.perf_counter, float("inf"), 0
    while (started := now()) < end:
        if number == options.warm_up:
            end = started + options.seconds
        message = number.to_bytes(8, "little") + bytes(options.message_bytes - 8)
        round_trip(here, message, time.monotonic() + DEADLINE_S)
        laps.append(now() - started)
        number += 1
    round_trip(here, STOP, time.monotonic() + DEADLINE_S)
    cpu = here.cpu_seconds() + there.answer() - cpu
    one_way = np.array(laps[options.warm_up :]) / 2 * 1e6
    p50, p99, p999 = np.percentile(one_way, [50, 99, 99.9])
    print(
        json.dumps(
            {
                "case": f"{options.message_bytes} B",
                "count": len(one_way),
                "p50_us": p50,
                "p99_us": p99,
                "p999_us": p999,
                "mean_us": float(one_way.mean()),
                "cpu_us": cpu / (len(laps) + 1) / 2 * 1e6,
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main()
    os._exit(0)  # everything is printed; taking UCX down may hang, and is not what is measured
