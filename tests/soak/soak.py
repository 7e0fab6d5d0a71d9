"""`make soak`: many requests of every kind, after which the daemon holds what it held before.

    python tests/soak/soak.py --requests 20000          until so many have been sent
    python tests/soak/soak.py --seconds 90              or so much time has passed

The first fifth fills caches and pools; what is held then is what must not grow. Exit code 1 when it does, when any
request is answered otherwise than it should be, or when the daemon does not come to rest.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from itertools import count

from traffic import Tally, Traffic
from watched import Held, Watched, watched

AT_ONCE = 16
ROUND = 100  # requests, between which the daemon is looked at while it is idle
# Grown after the first fifth: what an allocator may keep in a heap that has warmed up, and what a request may leave.
MEMORY_SLACK_BYTES = 24 << 20
MEMORY_PER_REQUEST_BYTES = 512
# Pools that are not yet full, and labels that are seen for the first time: there is a bounded number of both.
THREADS_SLACK, SERIES_SLACK = 6, 10
FLAGS = ["--kv-memory", "48MiB", "--max-model-len", "2048", "--max-queue-delay", "inf"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak", description="Send many requests and see what is left of them.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", default="", metavar="FLAGS", help="further flags of the daemon, as one word")
    options = parser.parse_args()
    with watched([*FLAGS, *shlex.split(options.serve)]) as daemon:
        complaints = soak(daemon, options.requests, options.seconds, options.seed)
    print("\n".join(complaints) or "nothing grew, and every request was answered as it should be")
    return int(bool(complaints))


def soak(daemon: Watched, requests: int, seconds: float, seed: int) -> list[str]:
    began, tally, base, sent = time.monotonic(), Tally(), None, 0
    print(" requests  seconds      memory   fds threads series")
    for number in count():
        traffic = Traffic(daemon.url, daemon.model, seed * 1_000_003 + number)
        asyncio.run(traffic.run(min(ROUND, requests - sent), AT_ONCE))
        sent += ROUND
        tally.asked += traffic.tally.asked
        tally.wrong += traffic.tally.wrong
        if complaint := daemon.complaint():
            return [complaint]
        held, passed = daemon.held(), time.monotonic() - began
        print(f"{min(sent, requests):9} {passed:8.0f} {held.row()}", flush=True)
        share = max(sent / requests, passed / seconds)
        if base is None and share >= 0.2:
            base, base_sent = held, sent
        if share >= 1:
            break
    print(", ".join(f"{kind}: {number}" for kind, number in sorted(tally.asked.items())))
    complaints = [f"{number} times {what}" for what, number in tally.wrong.items()]
    return complaints + (grown(base, held, sent - base_sent) if base else [])


def grown(before: Held, after: Held, requests: int) -> list[str]:
    """In words."""
    complaints = []
    if after.memory > before.memory + MEMORY_SLACK_BYTES + requests * MEMORY_PER_REQUEST_BYTES:
        complaints.append(f"memory grew from {before.memory >> 20} to {after.memory >> 20} MiB in {requests} requests")
    for name, slack in (("descriptors", 0), ("threads", THREADS_SLACK), ("series", SERIES_SLACK)):
        if getattr(after, name) > getattr(before, name) + slack:
            complaints.append(f"{name} grew from {getattr(before, name)} to {getattr(after, name)}")
    return complaints


if __name__ == "__main__":
    sys.exit(main())
