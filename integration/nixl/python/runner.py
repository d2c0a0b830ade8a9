"""Runs scenarios, each in a process of its own with a watchdog: `runner.py [--core] [--long] [--list] [NAME…]`."""

import argparse
import os
import signal
import subprocess
import sys
import time
import traceback

from side import die_with_parent

SCENARIOS = {}
WATCHDOG_S = 120


class Scenario:
    def __init__(self, run, core, long):
        self.run, self.core, self.long = run, core, long


def scenario(core=False, long=False):
    """Marks a function as a scenario. `core`: runs in every wheel; `long`: only when asked for."""

    def register(run):
        SCENARIOS[run.__name__] = Scenario(run, core, long)
        return run

    return register


def run_here(name):
    """One scenario in this process. Leaves without exit handlers only after a failure, when threads may hang."""
    die_with_parent()
    try:
        SCENARIOS[name].run()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def run_in_child(name):
    """True if the scenario's process ended well; its output is shown only otherwise."""
    command = [sys.executable, os.path.abspath(sys.argv[0]), "--here", name]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    started = time.monotonic()
    try:
        output, _ = child.communicate(timeout=WATCHDOG_S)
        verdict = f"exit code {child.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        verdict = f"no end within {WATCHDOG_S} s"
    good = child.returncode == 0
    took = time.monotonic() - started
    print(f"{'ok  ' if good else 'FAIL'} {name.replace('_', ' ')} ({took:.1f} s)", flush=True)
    if not good:
        print(f"---- {verdict}\n{output.decode(errors='replace')}----", flush=True)
    return good


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--core", action="store_true", help="only what every wheel must pass")
    parser.add_argument("--long", action="store_true", help="also what takes long")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--here", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.here:
        return run_here(options.here)
    chosen = [
        name
        for name, one in SCENARIOS.items()
        if (not options.core or one.core)
        and (options.long or not one.long or name in options.names)
        and (not options.names or any(part in name for part in options.names))
    ]
    if options.list:
        print("\n".join(chosen))
        return
    passed = sum(run_in_child(name) for name in chosen)
    print(f"{passed} passed, {len(chosen) - passed} failed")
    sys.exit(0 if chosen and passed == len(chosen) else 1)
