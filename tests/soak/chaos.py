"""`make chaos`: things go wrong at random while requests run; after each, the daemon answers and comes to rest.

    python tests/soak/chaos.py --seconds 90

Exit code 1 when after a fault the next plain request is not answered as ever, a gauge does not come back to zero, a
descriptor is left open, or the process has ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from traffic import Traffic
from watched import Watched, watched

REQUESTS, AT_ONCE = 24, 12  # that run while something goes wrong
FLAGS = ["--kv-memory", "24MiB", "--max-model-len", "1024", "--max-num-seqs", "16", "--max-queue-delay", "inf"]
INSIDE = ("step", "logits", "slow", "tokenize", "send")
LONG = {"prompt": "Hello", "max_tokens": 600, "ignore_eos": True, "stream": True, "n": 4}

Fault = Callable[[Watched, random.Random], Awaitable[None]]


def connect(daemon: Watched, receive_bytes: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    address = urlsplit(daemon.url)
    connection.settimeout(10)
    connection.connect((address.hostname, address.port))
    return connection


def request(daemon: Watched, **fields: object) -> bytes:
    body = json.dumps({"model": daemon.model, **LONG, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


async def reset(daemon: Watched, chance: random.Random) -> None:
    """Connections that are reset in the middle of an answer."""
    for _ in range(4):
        with connect(daemon) as connection:
            connection.sendall(request(daemon))
            await asyncio.sleep(chance.uniform(0, 0.3))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def half_open(daemon: Watched, chance: random.Random) -> None:
    """Connections that say half of what they have to say, and some that will hear but not speak."""
    whole = request(daemon)
    connections = [connect(daemon) for _ in range(12)]
    for connection in connections:
        connection.sendall(whole[: chance.randrange(len(whole))])
    speechless = connect(daemon)
    speechless.sendall(whole)
    speechless.shutdown(socket.SHUT_WR)
    await asyncio.sleep(1)
    for connection in [*connections, speechless]:
        connection.close()


async def slow_readers(daemon: Watched, chance: random.Random) -> None:
    """Clients that ask for much and take it a few bytes at a time, and then go."""
    connections = [connect(daemon, receive_bytes=1024) for _ in range(3)]
    for connection in connections:
        connection.sendall(request(daemon, logprobs=5))
    for _ in range(20):
        await asyncio.sleep(0.1)
        for connection in connections:
            connection.recv(64)
    for connection in connections:
        connection.close()


async def nonsense(daemon: Watched, chance: random.Random) -> None:
    """Bytes that are not HTTP, or almost."""
    pieces = [
        chance.randbytes(3000),
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ]
    pieces += [b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"\r\n" * 500]
    for piece in pieces:
        with connect(daemon) as connection:
            connection.sendall(piece)
            await asyncio.sleep(0.02)


async def stampede(daemon: Watched, chance: random.Random) -> None:
    """Eighty clients that come at once and leave at random."""
    connections = [connect(daemon) for _ in range(80)]
    for number, connection in enumerate(connections):
        connection.sendall(request(daemon, prompt=f"Client {number}", n=1 + number % 2))
    chance.shuffle(connections)
    for connection in connections:
        await asyncio.sleep(chance.uniform(0, 0.02))
        connection.close()


def inside(name: str) -> Fault:
    async def fault(daemon: Watched, chance: random.Random) -> None:
        for _ in range(chance.randint(1, 2)):
            daemon.break_next(name)
            await asyncio.sleep(chance.uniform(0, 0.3))

    return fault


FAULTS: dict[str, Fault] = {name: inside(name) for name in INSIDE}
FAULTS |= {fault.__name__: fault for fault in (reset, half_open, slow_readers, nonsense, stampede)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description="Let things go wrong and see what is left.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", default="", metavar="FLAGS", help="further flags of the daemon, as one word")
    options = parser.parse_args()
    with watched([*FLAGS, *shlex.split(options.serve)]) as daemon:
        complaints = chaos(daemon, options.seconds, options.seed)
    print("\n".join(complaints) or "after every fault it answered and came to rest")
    return int(bool(complaints))


def chaos(daemon: Watched, seconds: float, seed: int) -> list[str]:
    began, chance, happened = time.monotonic(), random.Random(seed), Counter[str]()
    names: list[str] = []
    # What is opened when it is first needed is open then.
    asyncio.run(Traffic(daemon.url, daemon.model, seed).run(3 * REQUESTS, AT_ONCE))
    if complaint := daemon.complaint():
        return [complaint]
    before = daemon.held()
    while time.monotonic() - began < seconds:
        names = names or chance.sample(list(FAULTS), len(FAULTS))
        name = names.pop()
        happened[name] += 1
        print(f"{time.monotonic() - began:6.1f} s  {name}", flush=True)
        traffic = Traffic(daemon.url, daemon.model, chance.randrange(1 << 30), faults_expected=True)

        async def fault(name: str = name, traffic: Traffic = traffic) -> None:
            await asyncio.gather(traffic.run(REQUESTS, AT_ONCE), FAULTS[name](daemon, chance))

        asyncio.run(fault())
        settle(daemon, name)
        if complaint := daemon.complaint():
            return [f"after {name}: {complaint}"]
        if traffic.tally.wrong:
            return [f"after {name}: {what}" for what in traffic.tally.wrong]
    after = daemon.held()
    print(", ".join(f"{name}: {number}" for name, number in happened.items()))
    print(f"before {before.row()}\nafter  {after.row()}")
    complaints = []
    if after.descriptors > before.descriptors:
        complaints.append(f"{after.descriptors - before.descriptors} descriptors are left open")
    if not daemon.metric("octavo_step_errors_total") >= happened["step"]:
        complaints.append("not every step that was to fail did")
    return complaints


def settle(daemon: Watched, name: str) -> None:
    """Let a fault that nothing has met yet happen to plain requests, one of which it then fails."""
    for _ in range(3 if name in INSIDE else 0):
        try:
            daemon.ask()
        except OSError:
            continue


if __name__ == "__main__":
    sys.exit(main())
