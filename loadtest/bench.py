"""`make bench`: start the daemon, drive the standard request sets, print one table and keep the figures.

    python -m loadtest.bench                            the default model, the standard set
    python -m loadtest.bench --serve "--threads 4"      with flags for the daemon
    python -m loadtest.bench chat:48:16 decode:16:16    only these sets (kind:requests:concurrency)
    python -m loadtest.bench --url http://127.0.0.1:9000 --model NAME      another server, already running

Runs in a process of its own beside the server, which it knows as a command and a URL. Let nothing else run.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from loadtest.driver import Answer, Figures, drive, summarise
from loadtest.ratios import tpot_spread
from loadtest.results import RESULTS, new_path, write
from loadtest.servers import Server, daemon, first_model, get_json
from loadtest.workloads import KINDS, make

STANDARD = ("single:2:1", "decode:16:16", "chat:48:16", "prefix:40:8", "prefill:16:4", "long:6:3")


@dataclass(frozen=True, slots=True)
class Run:
    """One set to drive."""

    kind: str
    requests: int
    concurrency: int

    @classmethod
    def parse(cls, text: str) -> Run:
        """`chat:48:16`; ArgumentTypeError otherwise."""
        kind, *numbers = text.split(":")
        if kind not in KINDS or len(numbers) != 2 or not all(number.isdigit() and int(number) for number in numbers):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not KIND:REQUESTS:CONCURRENCY with KIND of {', '.join(KINDS)}"
            )
        return cls(kind, int(numbers[0]), int(numbers[1]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when any request failed."""
    options = _parser().parse_args(arguments)
    runs = options.runs or [Run.parse(text) for text in STANDARD]
    console = Console()
    try:
        if options.url:
            server = Server(options.url, options.model or first_model(options.url))
            return _measure(server, runs, options.seed, console)
        with daemon(shlex.split(options.serve)) as server:
            return _measure(server, runs, options.seed, console)
    except RuntimeError as error:
        console.print(f"bench: {error}", markup=False)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench", description="Drive the standard request sets and print figures."
    )
    parser.add_argument("runs", nargs="*", type=Run.parse, metavar="KIND:REQUESTS:CONCURRENCY", help=" ".join(STANDARD))
    parser.add_argument("--serve", default="", metavar="FLAGS", help="model and flags for the daemon, as one word")
    parser.add_argument("--url", help="measure the server that answers there instead of starting one")
    parser.add_argument("--model", help="what that server calls its model; the first it lists when not given")
    parser.add_argument("--seed", type=int, default=1, help="of the request sets")
    return parser


def _measure(server: Server, runs: Sequence[Run], seed: int, console: Console) -> int:
    results = []
    for run in runs:
        console.print(f"{run.kind}: {run.requests} requests, {run.concurrency} at once", style="dim")
        figures, answers = measure(server, run, seed)
        results.append(figures)
        if figures.failed:
            errors = "; ".join(sorted({answer.error for answer in answers if answer.error}))
            console.print(f"{run.kind}: {figures.failed} failed: {errors}", markup=False, style="red")
    console.print(table(results))
    memory = _memory(server)
    if memory:
        console.print(_memory_line(memory))
    path = save(results, server, memory)
    console.print(f"written to {path}", soft_wrap=True)
    return 1 if any(figures.failed for figures in results) else 0


def measure(server: Server, run: Run, seed: int) -> tuple[Figures, list[Answer]]:
    """Drive one set."""
    prompts = list(make(run.kind, run.requests, seed))
    answers, seconds = asyncio.run(drive(server.url, server.model, prompts, run.concurrency))
    return summarise(run.kind, run.concurrency, answers, seconds), answers


def table(results: Sequence[Figures]) -> Table:
    """The figures for people. Throughput is of output tokens, and of prompt tokens beside it."""
    shown = Table(box=None, header_style="bold", pad_edge=False, collapse_padding=True)
    shown.add_column("set", no_wrap=True)
    for heading in ("requests", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms", "p99/p50", "out tok/s", "in tok/s"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in results:
        times = (row.ttft_p50, row.ttft_p99, row.tpot_p50, row.tpot_p99)
        shown.add_row(
            row.kind,
            f"{row.requests} / {row.concurrency}",
            *("-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in times),
            "-" if (spread := tpot_spread(row)) is None else f"{spread:.2f}",
            f"{row.output_tokens_per_second:.1f}",
            f"{row.prompt_tokens_per_second:.0f}",
        )
    return shown


def save(results: Sequence[Figures], server: Server, memory: dict[str, int]) -> Path:
    """Write the figures with the machine they are of, in a new file."""
    path = new_path(RESULTS)
    write(
        path,
        {
            "model": server.model,
            "ready_seconds": server.ready_seconds,
            "memory": memory,
            "info": get_json(f"{server.url}/info"),
            "figures": [asdict(figures) for figures in results],
        },
    )
    return path


def _memory(server: Server) -> dict[str, int]:
    """Bytes the daemon holds, and what its plan says that weights and KV pool take; empty for a server not ours."""
    info = get_json(f"{server.url}/info")
    plan = info.get("plan") if isinstance(info, dict) else None
    if server.pid is None or not isinstance(plan, dict):
        return {}
    resident = psutil.Process(server.pid).memory_info().rss
    return {"resident": resident, "weights": plan["weight_bytes"], "kv_pool": plan["kv_bytes"]}


def _memory_line(memory: dict[str, int]) -> str:
    mib = {name: size >> 20 for name, size in memory.items()}
    rest = mib["resident"] - mib["weights"] - mib["kv_pool"]
    return f"resident {mib['resident']} MiB = weights {mib['weights']} + KV pool {mib['kv_pool']} + {rest}"


if __name__ == "__main__":
    sys.exit(main())
