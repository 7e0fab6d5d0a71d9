"""One set driven at one server: what to send, when, and the line that shows how it goes."""

from __future__ import annotations

import argparse
import asyncio
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.arrivals import due
from loadtest.driver import TIMEOUT_SECONDS, drive
from loadtest.figures import Answer, Figures, Slo, quantile_ms, summarise
from loadtest.servers import Server
from loadtest.workloads import KINDS, Prompt, leaving, make, sharegpt, trace

FROM_FILES = ("sharegpt", "trace")
REFRESH_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Run:
    """One set to drive. `concurrency` 0: as many at once as come."""

    kind: str
    requests: int
    concurrency: int = 0

    @classmethod
    def parse(cls, text: str) -> Run:
        """`chat:48:16` or `chat:48`; ArgumentTypeError otherwise."""
        kind, *numbers = text.split(":")
        known = kind in (*KINDS, *FROM_FILES)
        if not known or len(numbers) not in (1, 2) or not all(number.isdigit() and int(number) for number in numbers):
            kinds = ", ".join((*KINDS, *FROM_FILES))
            raise argparse.ArgumentTypeError(f"{text!r} is not KIND:REQUESTS[:CONCURRENCY] with KIND of {kinds}")
        return cls(kind, *map(int, numbers))


@dataclass(frozen=True, slots=True)
class How:
    """How requests are sent, whichever they are."""

    rate: float | None = None  # requests a second; None: the next when one is answered
    arrivals: str = "poisson"
    chat: bool = False
    keys: Sequence[str] = ()
    fields: Mapping[str, object] = field(default_factory=dict)  # of the body
    leave: float = 0.0  # share of clients that go away
    file: Path | None = None
    slo: Slo | None = None
    timeout_seconds: float = TIMEOUT_SECONDS
    tls: ssl.SSLContext | None = None  # whom to trust


def measure(
    server: Server, run: Run, seed: int, how: How | None = None, console: Console | None = None
) -> tuple[Figures, list[Answer]]:
    """Drive one set. Raises ValueError for a set that cannot be made, OSError for a file that cannot be read."""
    how = how or How()
    prompts, times = _requests(run, seed, how)
    total = sum(map(_turns, prompts))

    async def main() -> tuple[list[Answer], float]:
        begun: list[Answer] = []
        watching = asyncio.create_task(_show(console, run.kind, begun, total)) if console else None
        try:
            return await drive(
                server.url,
                server.model,
                prompts,
                run.concurrency,
                how.fields,
                due=times,
                chat=how.chat,
                keys=how.keys,
                timeout_seconds=how.timeout_seconds,
                tls=how.tls,
                started=begun.append,
            )
        finally:
            if watching is not None:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching

    computed = time.process_time()
    answers, seconds = uvloop.run(main())
    cpu = (time.process_time() - computed) / seconds
    rate = how.rate or (len(prompts) / times[-1] if times and times[-1] else None)
    return summarise(run.kind, run.concurrency, answers, seconds, slo=how.slo, rate=rate, client_cpu=cpu), answers


def _requests(run: Run, seed: int, how: How) -> tuple[list[Prompt], Sequence[float] | None]:
    """The prompts, and when each is due in an open loop."""
    times: Sequence[float] | None = None
    if run.kind in FROM_FILES:
        if how.file is None:
            raise ValueError(f"{run.kind} needs --file")
        if run.kind == "trace":
            prompts, times = trace(how.file, run.requests)
        else:
            prompts = sharegpt(how.file, run.requests)
        if not prompts:
            raise ValueError(f"{how.file} has no requests")
    else:
        prompts = list(make(run.kind, run.requests, seed))
    if how.rate is not None:
        times = due(how.arrivals, how.rate, len(prompts), seed)
    if times is None and not run.concurrency:
        raise ValueError(f"{run.kind}:{run.requests} needs a third number, of requests at once, or --rate")
    if how.leave:
        prompts = leaving(prompts, how.leave, seed)
    return prompts, times


def _turns(prompt: Prompt) -> int:
    return 1 + (0 if prompt.then is None else _turns(prompt.then))


async def _show(console: Console, kind: str, begun: Sequence[Answer], total: int) -> None:
    """A line that tells how it goes, until cancelled."""
    columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.fields[now]}"), console=console, transient=True, auto_refresh=False
    ) as progress:
        task = progress.add_task(kind, total=total, now="")
        seen, before = 0, time.perf_counter()
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            now = time.perf_counter()
            ended = [answer for answer in begun if answer.ended]
            pieces = sum(len(answer.stamps) for answer in begun)
            failed = sum(answer.error is not None for answer in ended)
            ttft = quantile_ms([answer.ttft for answer in begun if answer.stamps], 0.5)
            text = f"{len(begun) - len(ended)} running, {failed} failed, {(pieces - seen) / (now - before):.0f} tok/s"
            text += "" if ttft is None else f", TTFT p50 {ttft:.0f} ms"
            progress.update(task, completed=len(ended), now=text, refresh=True)
            seen, before = pieces, now
