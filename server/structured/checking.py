"""The daemon's end of the checker: starts the process, sends it grammars, hands its verdicts to those who wait.

Owned by the event loop. A process that ends is started again by the next grammar.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import orjson

from server.structured.checker import MAX_LINE_BYTES

PROGRAM = Path(__file__).with_name("checker.py")
CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a trial compilation."""

    grammar: str | None  # what to compile; None when there was something wrong
    error: str | None
    limit: Literal["time", "memory"] | None  # what stopped it
    cpu_seconds: float
    grown_bytes: int


class CheckerEnded(Exception):  # noqa: N818
    """The process ended under its work."""


class CheckerProcess:
    """One process, once started. `vocabulary` is the first line it reads."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._waiting: dict[int, asyncio.Future[Verdict]] = {}
        self._numbers = count()
        self._reader = asyncio.create_task(self._read(), name="grammar checker")

    @classmethod
    async def start(cls, vocabulary: Mapping[str, Any]) -> CheckerProcess:
        """Raises OSError when the program cannot be run."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # nothing beside the program itself is importable
            str(PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # a terminal's Ctrl-C is for the daemon
        )
        checker = cls(process)
        checker._send(vocabulary)
        return checker

    @property
    def alive(self) -> bool:
        return not self._reader.done()

    async def check(self, text: str, foreign: str | None) -> Verdict:
        """Compile a grammar there. Cancelling this kills the compilation. Raises CheckerEnded."""
        if self._reader.done():
            raise CheckerEnded
        number = next(self._numbers)
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            self._send({"id": number, "text": text, "foreign": foreign})
            return await future
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """End the process and everything it compiles."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reader

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(orjson.dumps(message) + b"\n")

    async def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            while line := await self._process.stdout.readline():
                answer = orjson.loads(line)
                future = self._waiting.get(answer.pop("id"))
                if future is not None and not future.done():
                    future.set_result(Verdict(**answer))
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(CheckerEnded())
