"""Compiles grammars where that can hurt nobody: a program of its own, run with a bare interpreter.

There are small grammars that take minutes or gigabytes to compile, and a compiler in a thread cannot be stopped. So
each grammar is first compiled here, in a child of its own with limits on processor time and memory, which can be
killed. What passes is compiled again by the daemon, and takes no more there.

    daemon ──stdin──▶ this program ──fork──▶ child per grammar
           ◀─stdout──              ◀──pipe── its verdict, or nothing when a limit killed it

One JSON object a line. The first line in is the vocabulary and the limits: `{"tokens": [latin-1 strings], "special":
[ids], "eos": [ids], "cpu_seconds", "memory_bytes"}`. Then jobs, `{"id", "text", "foreign"}`, and `{"cancel": id}`. Out
come `{"id", "grammar", "error", "limit", "cpu_seconds", "grown_bytes"}`: `limit` is "time" or "memory" when that was
what stopped it. Most grammars take a millisecond; of those that take longer only SLOW_CHILDREN run at a time, and the
others are held, so that a quick one never waits behind them.

Imports nothing of the project. Ends, and its children with it, when stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import IO, Any

MAX_LINE_BYTES = 64 << 20
QUICK_SECONDS = 0.25  # after which a child is one of the slow
SLOW_CHILDREN = 2
NICENESS = 5
MAX_ERROR_CHARS = 500
PR_SET_PDEATHSIG = 1  # of Linux's prctl


class Tokens:
    """What llguidance wants to know of a vocabulary. Called, it cuts text into the longest tokens there are, from its
    beginning on; bytes that no token has are passed over."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: Sequence[int]) -> None:
        self.tokens, self.special_token_ids, self.eos_token_ids = tokens, list(special), list(eos)
        self.eos_token_id = eos[0]
        left_out = set(special)
        self._ids = {token: id for id, token in enumerate(tokens) if token and id not in left_out}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        spelled = text.encode() if isinstance(text, str) else text
        ids, place = [], 0
        while place < len(spelled):
            for length in range(min(self._longest, len(spelled) - place), 0, -1):
                if (found := self._ids.get(spelled[place : place + length])) is not None:
                    ids.append(found)
                    place += length
                    break
            else:
                place += 1
        return ids


class Checker:
    """Reads jobs, forks, listens, answers."""

    def __init__(self) -> None:
        self._children: dict[int, int] = {}  # process ids by job
        self._slow: list[int] = []  # of them, in the order they came

    async def run(self) -> None:
        jobs = set()
        lines = await _reader(sys.stdin)
        while line := await lines.readline():
            message = json.loads(line)
            if "tokens" in message:
                self._set_up(**message)
            elif "cancel" not in message:
                jobs.add(job := asyncio.create_task(self._check(message)))
                job.add_done_callback(jobs.discard)
            elif message["cancel"] in self._children:
                os.kill(self._children[message["cancel"]], signal.SIGKILL)

    def stop(self) -> None:
        for pid in self._children.values():
            os.kill(pid, signal.SIGKILL)

    def _set_up(self, tokens: Sequence[str], special: Sequence[int], eos: Sequence[int], **limits: int) -> None:
        from llguidance import LLTokenizer

        known = Tokens([token.encode("latin-1") for token in tokens], special, eos)
        self._tokenizer = LLTokenizer(known, eos_token=eos)  # type: ignore[arg-type]
        self._cpu_seconds, self._memory_bytes = limits["cpu_seconds"], limits["memory_bytes"]

    async def _check(self, job: dict[str, Any]) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                self._compile(job, writing)
            finally:
                os._exit(0)
        os.close(writing)
        self._children[job["id"]] = pid
        heard = asyncio.create_task((await _reader(os.fdopen(reading, "rb"))).read())
        if not (await asyncio.wait({heard}, timeout=QUICK_SECONDS))[0]:
            self._slow.append(pid)
            self._share_out()
            await heard
            self._slow.remove(pid)
            self._share_out()
        del self._children[job["id"]]
        _, status, usage = os.wait4(pid, 0)  # noqa: ASYNC222  # it has ended
        verdict: dict[str, Any] = {"grammar": None, "error": None, "limit": None, "grown_bytes": 0}
        if heard.result().endswith(b"\n"):
            verdict |= json.loads(heard.result())
        else:
            killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            verdict["limit"] = "time" if killed in (signal.SIGXCPU, signal.SIGKILL) else "memory"
        verdict |= {"id": job["id"], "cpu_seconds": usage.ru_utime + usage.ru_stime}
        sys.stdout.buffer.write(json.dumps(verdict).encode() + b"\n")
        sys.stdout.buffer.flush()

    def _share_out(self) -> None:
        """Hold all but the oldest of the slow."""
        for place, pid in enumerate(self._slow):
            os.kill(pid, signal.SIGCONT if place < SLOW_CHILDREN else signal.SIGSTOP)

    def _compile(self, job: dict[str, Any], out: int) -> None:
        """In the child."""
        if sys.platform == "linux":  # end with this program, even when it is killed while this child is held
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.nice(NICENESS)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (self._cpu_seconds, self._cpu_seconds + 1))
        with contextlib.suppress(OSError, ValueError):  # where addresses cannot be limited
            limit = _address_space() + self._memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        before = _resident()
        try:
            grammar, error = self._verdict(job)
            verdict = {"grammar": grammar, "error": error, "grown_bytes": max(0, _resident() - before)}
        except MemoryError:
            return
        with os.fdopen(out, "wb") as pipe:
            pipe.write(json.dumps(verdict).encode() + b"\n")

    def _verdict(self, job: dict[str, Any]) -> tuple[str | None, str | None]:
        """The grammar in llguidance's own words, and what is wrong with it."""
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        grammar = job["text"]
        if job["foreign"] is not None:
            try:
                foreign = any_to_lark(job["foreign"])
            except Exception as error:
                return None, str(error)[:MAX_ERROR_CHARS]
            grammar = f"{grammar}{{\n{foreign}\n}}" if grammar else foreign
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if not matcher.is_error():
            return grammar, None
        return None, matcher.get_error()[:MAX_ERROR_CHARS]


async def _reader(pipe: IO[Any]) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as numbers:
        return int(numbers.read().split()[0]) * resource.getpagesize()


def _resident() -> int:
    """The most memory this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides when to end
    checker = Checker()
    try:
        asyncio.run(checker.run())
    finally:
        checker.stop()


if __name__ == "__main__":
    main()
