"""`octavo loadtest` and `make bench`: drive request sets at a server, print one table, keep figures and a page.

    octavo loadtest http://127.0.0.1:9000                    the standard sets, on any server of OpenAI's API
    octavo loadtest URL chat:48:16 decode:16:16              KIND:REQUESTS:CONCURRENCY
    octavo loadtest URL chat:200 --rate 4 --slo ttft=500,tpot=50        an open loop: four requests a second
    octavo loadtest URL --find-capacity --slo ttft=500       the highest rate that keeps this
    octavo loadtest --compare before.json after.json         what has changed, and whether that is chance
    octavo loadtest --serve "--threads 4"                    on a daemon of its own, with these flags

Runs in a process of its own beside the server, which it knows as a command and a URL. Let nothing else run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import shlex
import ssl
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import psutil
from rich.console import Console

from loadtest import difference
from loadtest.arrivals import due
from loadtest.document import RESULTS, new_path, write
from loadtest.driver import TIMEOUT_SECONDS
from loadtest.figures import Figures, Slo, details
from loadtest.report import page
from loadtest.run import How, Run, measure
from loadtest.servers import Server, get_json, serving, trusting
from loadtest.tables import Row, short, terminal

STANDARD = ("single:2:1", "decode:16:16", "chat:48:16", "prefix:40:8", "prefill:16:4", "long:6:3")
TRIAL_SECONDS = 30.0  # of one rate, in the search for the capacity
LEAST_REQUESTS = 10  # of one rate
PRECISION = 0.05  # of the capacity
LEAST, MOST = 1 / 64, 1024  # times the first rate, beyond which the search gives up
ATTAINED = 0.99  # share of requests that an objective is kept by when it counts as kept

# Of the table: what it is called, the field of `Figures`, and its format.
SHOWN = (
    ("failed", "failed", "d"),
    ("left by the client", "left", "d"),
    ("TTFT p50 ms", "ttft_p50", ""),
    ("TTFT p99 ms", "ttft_p99", ""),
    ("TPOT p50 ms", "tpot_p50", ""),
    ("TPOT p99 ms", "tpot_p99", ""),
    ("TPOT p99/p50", "tpot_spread", ".2f"),
    ("ITL p50 ms", "itl_p50", ""),
    ("ITL p99 ms", "itl_p99", ""),
    ("E2E p50 ms", "e2e_p50", ""),
    ("E2E p99 ms", "e2e_p99", ""),
    ("output tok/s", "output_tokens_per_second", ""),
    ("prompt tok/s", "prompt_tokens_per_second", ""),
    ("prompt tokens cached", "cached_tokens", "d"),
    ("requests/s", "requests_per_second", ".2f"),
    ("goodput, requests/s", "goodput", ".2f"),
    ("within the SLO", "within_slo", ".1%"),
    ("fairness (Jain)", "fairness", ".2f"),
    ("client, of one core", "client_cpu", ".1%"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the load test; 1 when any request failed or there is no server, 2 for a mistake in what was asked for."""
    console = Console()
    try:
        options = _parser().parse_intermixed_args(arguments)
        if options.compare:
            console.print(terminal(difference.rows(*map(_kept, options.compare))))
            return 0
        words: list[str] = options.words
        url = words.pop(0).rstrip("/").removesuffix("/v1") if words and "://" in words[0] else None
        runs = [Run.parse(word) for word in words or (["chat:10000"] if options.find_capacity else STANDARD)]
        how = _how(options)
        with serving(url, shlex.split(options.serve), how.keys, options.model, how.tls) as server:
            return _measure(server, runs, options, how, console)
    except ssl.SSLCertVerificationError as error:
        said = f"the server's certificate is not trusted ({error.verify_message}): give its own as --cafile"
        console.print(f"loadtest: {said}", markup=False, soft_wrap=True)
        return 1
    except (RuntimeError, ValueError, KeyError, OSError, argparse.ArgumentTypeError) as error:
        console.print(f"loadtest: {error}", markup=False, soft_wrap=True)
        return 1 if isinstance(error, RuntimeError) else 2
    except KeyboardInterrupt:
        return 130


class _Parser(argparse.ArgumentParser):
    """argparse, except that a mistake is one line instead of a usage message."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _number(wanted: str, right: Callable[[float], bool], text: str) -> float:
    with contextlib.suppress(ValueError):
        if right(value := float(text)):
            return value
    raise argparse.ArgumentTypeError(f"must be a {wanted}, not {text!r}")


_positive = partial(_number, "number above zero", lambda value: 0 < value < math.inf)
_share = partial(_number, "share from 0 to 1", lambda value: 0 <= value <= 1)


def _fields(text: str) -> dict[str, object]:
    with contextlib.suppress(ValueError):
        if isinstance(fields := json.loads(text), dict):
            return fields
    raise argparse.ArgumentTypeError(f'must be a JSON object such as {{"top_p": 0.9}}, not {text!r}')


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="octavo loadtest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("words", nargs="*", metavar="URL | SET", help=f"a server, and sets; without: {' '.join(STANDARD)}")
    add("--serve", default="", metavar="FLAGS", help="model and flags of a daemon to start when there is no URL")
    add("--model", help="what the server calls its model; the first it lists when not given")
    add("--seed", type=int, default=1, help="of requests and arrivals")
    add("--rate", type=_positive, metavar="R", help="requests a second that come whether or not others are answered")
    add("--arrivals", default="poisson", metavar="HOW", help="poisson, constant, burst:SIZE or ramp:RATE [poisson]")
    add("--file", type=Path, help="of the set `sharegpt` or `trace`")
    add("--leave", type=_share, default=0.0, metavar="SHARE", help="of clients that go away in the middle, 0 to 1")
    add("--chat", action="store_true", help="ask /v1/chat/completions")
    add("--natural", action="store_true", help="let answers end where the model ends them; no `ignore_eos`")
    add("--fields", type=_fields, default={}, metavar="JSON", help="further fields of every body")
    add("--api-key", action="append", default=[], metavar="KEY", help="several take turns")
    add("--cafile", type=Path, metavar="FILE", help="certificates to trust instead of the system's, for https")
    add("--timeout", type=_positive, default=TIMEOUT_SECONDS, metavar="SECONDS", help="of one request")
    add("--slo", type=Slo.parse, metavar="MS", help="what a request may take: ttft=500,tpot=50,e2e=10000")
    add("--find-capacity", action="store_true", help="search the highest rate that keeps --slo, beginning at --rate")
    add("--trial", type=_positive, default=TRIAL_SECONDS, metavar="SECONDS", help="that each rate is tried for")
    add("--compare", nargs=2, type=Path, metavar="FILE", help="figures that were kept: before, after")
    return parser


def _kept(path: Path) -> dict[str, Any]:
    """The figures in a file. Raises OSError, or ValueError where there are none."""
    with contextlib.suppress(ValueError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(kept, dict) and "figures" in kept:
            return kept
    raise ValueError(f"{path} has no figures of a load test")


def _how(options: argparse.Namespace) -> How:
    if options.find_capacity and options.slo is None:
        raise ValueError("--find-capacity needs --slo")
    due(options.arrivals, options.rate or 1.0, 1, options.seed)  # a mistake is known before a server is asked
    fields = ({"ignore_eos": None} if options.natural else {}) | options.fields
    rest = (options.leave, options.file, options.slo, options.timeout, trusting(options.cafile))
    return How(options.rate, options.arrivals, options.chat, options.api_key, fields, *rest)


def _measure(server: Server, runs: Sequence[Run], options: argparse.Namespace, how: How, console: Console) -> int:
    live = console if console.is_terminal else None
    results: list[Figures] = []
    entries: list[dict[str, Any]] = []

    def one(run: Run, seed: int, how: How) -> Figures:
        figures, answers = measure(server, run, seed, how, live)
        results.append(figures)
        entries.append(asdict(figures) | {"details": details(answers)})
        for text, count in entries[-1]["details"]["errors"].items():
            console.print(f"{run.kind}: {count} failed: {text}", markup=False, style="red")
        return figures

    given = {name: str(value) for name, value in vars(options).items() if value and name != "api_key"}
    content: dict[str, Any] = {"url": server.url, "settings": given}
    if options.find_capacity:
        content["capacity"] = _capacity(one, runs, options, how, console)
    else:
        for run in runs:
            at_once = f", {run.concurrency} at once" if run.concurrency else ""
            console.print(f"{run.kind}: {run.requests} requests{at_once}", style="dim")
            one(run, options.seed, how)
    console.print(terminal(table(results)))
    if "capacity" in content:
        console.print(f"capacity: {content['capacity']:.3g} requests a second", style="bold")
    info = get_json(f"{server.url}/info", how.keys, how.tls)
    memory = _memory(server, info)
    if memory:
        mib = {name: size >> 20 for name, size in memory.items()}
        # Of the pool only the pages that were used are resident.
        console.print(
            f"resident {mib['resident']} MiB: weights {mib['weights']}, of the KV pool's {mib['kv_pool']} what was used"
        )
    content |= {"memory": memory, "info": info, "figures": entries}
    path = save(content, server, table(results))
    console.print(f"written to {path} and {path.with_suffix('.html').name}", soft_wrap=True)
    return 1 if any(figures.failed for figures in results) and not options.find_capacity else 0


def _capacity(one: Any, runs: Sequence[Run], options: argparse.Namespace, how: How, console: Console) -> float:
    """Try rates. Every trial has prompts of its own, or the server would know them from the one before."""
    seeds = itertools.count(options.seed)

    def keeps(rate: float) -> bool:
        count = min(runs[0].requests, max(LEAST_REQUESTS, round(rate * options.trial)))
        figures: Figures = one(replace(runs[0], requests=count), next(seeds), replace(how, rate=rate))
        share = figures.within_slo or 0.0
        verdict = "" if share >= ATTAINED else ", too few"
        console.print(f"{rate:.3g} requests/s: {share:.1%} in time{verdict}", highlight=False)
        return share >= ATTAINED

    return highest_rate(keeps, how.rate or 1.0)


def highest_rate(keeps: Callable[[float], bool], first: float) -> float:
    """The highest rate found at which `keeps`, to within 5%; 0 when none near `first` does.

    Doubles until it does not, then halves the interval: as if what is kept at a rate were kept at every lower one.
    """
    low, high, rate = 0.0, math.inf, first
    while high - low > PRECISION * low and first * LEAST <= rate <= first * MOST:
        low, high = (rate, high) if keeps(rate) else (low, rate)
        rate = 2 * low if high == math.inf else (low + high) / 2
    return low


def table(results: Sequence[Figures]) -> list[Row]:
    """The figures for people, one column a set. Throughput is of output tokens, and of prompt tokens beside it."""
    rows: list[Row] = [("", *(row.kind for row in results))]
    rows.append(("requests", *(str(row.requests) for row in results)))
    rows.append(("at once, or a second", *(str(row.concurrency or f"{row.rate or 0:.3g}/s") for row in results)))
    for title, name, scale in SHOWN:
        values = [getattr(row, name) for row in results]
        if any(value is not None for value in values) and (scale != "d" or any(values)):
            rows.append(
                (title, *(format(value, scale) if scale and value is not None else short(value) for value in values))
            )
    return rows


def save(content: dict[str, Any], server: Server, shown: Sequence[Row]) -> Path:
    """Write figures with the machine they are of in a new file, and a page of them beside it."""
    path = new_path(RESULTS)
    kept = write(path, {"model": server.model, "ready_seconds": server.ready_seconds, **content})
    path.with_suffix(".html").write_text(page(kept, shown), encoding="utf-8")
    return path


def _memory(server: Server, info: Any) -> dict[str, int]:
    """Bytes the daemon holds, and what its plan says that weights and KV pool take; empty for a server not ours."""
    plan = info.get("plan") if isinstance(info, dict) else None
    if server.pid is None or not isinstance(plan, dict):
        return {}
    resident = psutil.Process(server.pid).memory_info().rss
    return {"resident": resident, "weights": plan["weight_bytes"], "kv_pool": plan["kv_bytes"]}


if __name__ == "__main__":
    sys.exit(main())
