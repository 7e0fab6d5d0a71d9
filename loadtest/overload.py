"""Offer a server three times what it can serve and see whether those it lets in notice: `make overload`.

    full load  closed loop, a client for each place in the batch: what it can serve, tokens and requests a second, and
               the time to first token at that
    overload   three times as many requests, by a Poisson process; beside it a second process asks /health and reads
               the server's memory
    after      full load again: a machine that others share does not keep its speed for minutes

Exit code 1 when a promise is broken: the 99th percentile of the time to first token of accepted requests at most twice
that at full load, throughput at least 95% of what it is before and after on average, /health within 100 ms at the 99th
percentile, memory flat, no answer but a whole one or a 429 with Retry-After. Let nothing else run beside it. Knows the
HTTP API only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import ssl
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import uvloop
from rich.console import Console

from loadtest.arrivals import due
from loadtest.driver import drive
from loadtest.figures import Answer, quantile_ms
from loadtest.servers import Server, get_json, serving, trusting
from loadtest.tables import Row, terminal
from loadtest.workloads import make

TIMES = 3
PROBE_SECONDS = 0.2
PAUSE_SECONDS = 3.0  # between phases, so that what is measured first has ended
FLAT_BYTES = 32 << 20
# As many places as its cores can serve well, no long wait for one, and a pool that is full before memory is watched.
FLAGS = ("--max-num-seqs", "32", "--max-queue-delay", "3", "--kv-memory", "512MiB")

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class Phase:
    """What one phase came to."""

    offered_per_second: float
    accepted: int
    refused: int
    failed: int
    output_tokens_per_second: float  # while requests were offered, the first fifth left out
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make overload ARGS=...", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="of overload [%(default)g]")
    parser.add_argument("--kind", default="chat", help="request set [%(default)s]")
    parser.add_argument("--url", help="a server that runs already; the daemon, with its defaults, when not given")
    parser.add_argument("--api-key", action="append", default=[], metavar="KEY", help="several take turns")
    parser.add_argument("--cafile", type=Path, metavar="FILE", help="certificates to trust instead of the system's")
    parser.add_argument("--slots", type=int, default=128, help="its places in the batch, where /info does not say")
    parser.add_argument("--probe", nargs=2, metavar=("URL", "PID"), help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help="flags for the daemon, after --")
    options = parser.parse_args(arguments)
    try:
        tls = trusting(options.cafile)
        if options.probe:
            return _probe(*options.probe, tls=tls)
        url = options.url and options.url.rstrip("/")
        with serving(url, [*FLAGS, *options.flags], options.api_key, tls=tls) as server:
            return _measure(server, options, tls)
    except ssl.SSLCertVerificationError as error:
        print(f"overload: the server's certificate is not trusted ({error.verify_message}): give its own as --cafile")
    except (RuntimeError, ValueError) as error:
        print(f"overload: {error}")
    return 1


def _measure(server: Server, options: argparse.Namespace, tls: ssl.SSLContext) -> int:
    info = get_json(server.url + "/info", options.api_key, tls) or {}
    slots = (info.get("plan") or {}).get("max_num_seqs") or options.slots
    seconds = min(60.0, options.seconds)
    numbers = iter(range(1, 100))

    def phase(count: int, rate: float = 0.0) -> Phase:
        """`count` requests, at `rate` a second; when that is 0, as soon as one of `slots` clients is free."""
        console.print(f"{count} requests, " + (f"{rate:.3g} a second" if rate else f"{slots} at a time"), style="dim")
        time.sleep(PAUSE_SECONDS)
        prompts = list(make(options.kind, count, seed=next(numbers)))
        arrivals = due("poisson", rate, count, seed=count) if rate else None
        keys = options.api_key
        sent = drive(server.url, server.model, prompts, 0 if rate else slots, due=arrivals, keys=keys, tls=tls)
        answers, _ = uvloop.run(sent)
        good = [answer for answer in answers if answer.error is None]
        last = arrivals[-1] if arrivals else max(answer.started for answer in good) - answers[0].started
        # The last ones to begin leave places empty as they end: only what began before is a full server's work.
        return _summary(answers, last, rate)

    trial = phase(2 * slots)
    count = max(slots, round(trial.offered_per_second * seconds)) + slots
    full = phase(count)
    rate = TIMES * full.offered_per_second
    with _probed(server, options.cafile) as probe:
        overload = phase(max(20, round(rate * options.seconds)), rate)
    return _report(full, overload, phase(count), probe)


def _summary(answers: Sequence[Answer], offered_seconds: float, rate: float) -> Phase:
    good = [answer for answer in answers if answer.error is None]
    refused = [answer for answer in answers if answer.status == 429]
    began = min(answer.started for answer in answers)
    first, last = began + offered_seconds / 5, began + offered_seconds
    pieces = sum(first <= stamp < last for answer in answers for stamp in answer.stamps)
    texts = sum(len(answer.stamps) for answer in good)
    tokens_per_piece = sum(answer.completion_tokens for answer in good) / max(1, texts)
    ttft = [answer.ttft for answer in good if answer.stamps]
    tokens_per_second = pieces * tokens_per_piece / max(last - first, 1e-9)
    return Phase(
        offered_per_second=rate or tokens_per_second * len(good) / sum(answer.completion_tokens for answer in good),
        accepted=len(good),
        refused=len(refused),
        failed=len(answers) - len(good) - len(refused),
        output_tokens_per_second=tokens_per_second,
        ttft_p50_ms=quantile_ms(ttft, 0.5),
        ttft_p99_ms=quantile_ms(ttft, 0.99),
    )


def _probe(url: str, pid: str, *, tls: ssl.SSLContext) -> int:
    """Until its input ends: how long /health takes, in seconds, and the memory of the process, in bytes."""
    process = psutil.Process(int(pid)) if int(pid) else None
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            began = time.perf_counter()
            with urllib.request.urlopen(url + "/health", timeout=30, context=tls) as answer:
                answer.read()
            took = time.perf_counter() - began
            print(took, process.memory_info().rss if process else 0, flush=True)
            time.sleep(PROBE_SECONDS)
    return 0


@contextlib.contextmanager
def _probed(server: Server, cafile: Path | None) -> Iterator[list[tuple[float, int]]]:
    """What a process of its own sees of the server while the block lasts."""
    samples: list[tuple[float, int]] = []
    command = [sys.executable, "-m", "loadtest.overload", "--probe", server.url, str(server.pid or 0)]
    command += [] if cafile is None else ["--cafile", str(cafile)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield samples
    finally:
        process.terminate()
        printed, _ = process.communicate()
        for line in printed.splitlines():
            took, rss = line.split()
            samples.append((float(took), int(rss)))


def _report(full: Phase, overload: Phase, after: Phase, probe: list[tuple[float, int]]) -> int:
    health = quantile_ms([took for took, _ in probe], 0.99) or float("inf")
    quarter = max(1, len(probe) // 4)
    first, last = ([rss for _, rss in part] for part in (probe[:quarter], probe[-quarter:]))
    grown = statistics.median(last) - statistics.median(first) if probe else float("inf")
    slower = (overload.ttft_p99_ms or float("inf")) / (full.ttft_p99_ms or float("inf"))
    share = 2 * overload.output_tokens_per_second / (full.output_tokens_per_second + after.output_tokens_per_second)
    promises = {
        "TTFT p99 against full load, at most 2": (slower, slower <= 2),
        "throughput against full load, at least 0.95": (share, share >= 0.95),
        "/health p99, ms, at most 100": (health, health <= 100),
        "memory grown, MiB, at most 32": (grown / (1 << 20), grown <= FLAT_BYTES),
        "answers that failed, none": (float(overload.failed), overload.failed == 0),
    }
    rows: list[Row] = [("", *(column.replace("_", " ") for column in Phase.__dataclass_fields__))]
    phases = {"full load": asdict(full), "overload": asdict(overload), "after": asdict(after)}
    for name, phase in phases.items():
        rows.append((name, *("-" if value is None else f"{value:.4g}" for value in phase.values())))
    console.print(terminal(rows, "phases"))
    for name, (value, kept) in promises.items():
        console.print(f"{'kept  ' if kept else 'BROKEN'} {name}: {value:.3g}")
    print(json.dumps(phases | {"promises": promises}))
    return 0 if all(kept for _, kept in promises.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
