"""Grammars compiled within limits, and kept.

`GrammarCompiler.compile` is called by tasks that answer requests, on the event loop. A grammar is looked up by its
content; else it goes to the checker (`server.structured.checker`), and what passes is compiled by a thread, where it
takes no more time and memory than it did there. Tasks that want the same grammar wait together; when the last of them
gives up, its compilation is killed.

Kept are the last prototypes, bounded in number and memory, and the last refusals.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from server.errors import Overloaded, UnsupportedField, bounded, wrong
from server.structured.checking import CheckerEnded, CheckerProcess, Verdict
from server.structured.constraint import GrammarConstraint, Prototype
from server.structured.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from server.structured.vocabulary import Vocabulary

MAX_REASON_CHARS = 400
NICENESS = 5  # of threads that compile
SLOW_CPU_SECONDS = 0.1  # what took the checker longer is compiled behind others of its kind
WAIT_SECONDS = 30.0  # for a compilation, with its turn among the slow ones

_QUOTED = re.compile(r"\n(?= *\d+ \| |<state>)")  # where the grammar or a state is quoted
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")

Key = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What compiling may cost. Beyond them a grammar is refused."""

    max_size_bytes: int = 256 << 10  # of a grammar's text
    cpu_seconds: int = 3  # of one processor
    memory_bytes: int = 256 << 20
    max_waiting: int = 32  # grammars being compiled or waiting for it
    kept: int = 128  # compiled grammars and refusals
    kept_bytes: int = 256 << 20


class Refusal(NamedTuple):
    """Why a grammar is not served."""

    reason: str
    code: str | None = None


@dataclass(slots=True)
class _Pending:
    """A compilation under way and how many wait for it."""

    task: asyncio.Task[Prototype | Refusal]
    waiters: int = 0


class GrammarCompiler:
    """Owned by the event loop. `vocabulary` is called once, in a thread, for the first grammar."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: GrammarLimits | None = None) -> None:
        self._vocabulary_of_model = vocabulary
        self._limits = limits or GrammarLimits()
        self._starting = asyncio.Lock()
        self._loaded: tuple[Vocabulary, LLTokenizer] | None = None
        self._checker: CheckerProcess | None = None
        self._kept: OrderedDict[Key, Prototype | Refusal] = OrderedDict()
        self._pending: dict[Key, _Pending] = {}
        self._quick = ThreadPoolExecutor(1, "grammar", _yield_to_others)
        self._slow = ThreadPoolExecutor(1, "slow-grammar", _yield_to_others)

    @property
    def compiling(self) -> int:
        return len(self._pending)

    async def compile(self, grammar: Grammar) -> GrammarConstraint:
        """Raises InvalidRequest, naming the grammar's field, for one that is malformed or too complex, and Overloaded
        when too many are under way. May be cancelled."""
        limit = self._limits.max_size_bytes
        if grammar.size_bytes > limit:
            problem = f"makes a grammar of {grammar.size_bytes} bytes, and at most {limit} are taken"
            raise wrong(grammar.field, problem, "grammar_too_complex")
        key = (grammar.text, grammar.foreign)
        outcome = self._kept.get(key)
        if outcome is None or (isinstance(outcome, Prototype) and outcome.worn):
            outcome = await self._wait_for(key)
        else:
            self._kept.move_to_end(key)
        if isinstance(outcome, Refusal):
            raise wrong(grammar.field, f"cannot be followed: {outcome.reason}", outcome.code)
        return GrammarConstraint(outcome)

    async def close(self) -> None:
        """End the checker; whoever still waits is cancelled."""
        for pending in list(self._pending.values()):
            pending.task.cancel()
        async with self._starting:
            if self._checker is not None:
                await self._checker.close()
        self._quick.shutdown(wait=False, cancel_futures=True)
        self._slow.shutdown(wait=False, cancel_futures=True)

    async def _wait_for(self, key: Key) -> Prototype | Refusal:
        pending = self._pending.get(key)
        if pending is None:
            if len(self._pending) >= self._limits.max_waiting:
                raise Overloaded(f"{len(self._pending)} grammars are being compiled.", 1.0)
            pending = self._pending[key] = _Pending(asyncio.create_task(self._compile(key), name="compile grammar"))
        pending.waiters += 1
        try:
            return await asyncio.shield(pending.task)
        finally:
            pending.waiters -= 1
            if not pending.waiters:
                pending.task.cancel()
                if self._pending.get(key) is pending:
                    del self._pending[key]

    async def _compile(self, key: Key) -> Prototype | Refusal:
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                verdict = await self._check(key)
        except TimeoutError:
            raise Overloaded("Too many slow grammars are being compiled.", WAIT_SECONDS) from None
        outcome = self._kept[key] = self._refusal(verdict) or await self._prototype(verdict)
        self._kept.move_to_end(key)
        kept_bytes = sum(kept.grown_bytes for kept in self._kept.values() if isinstance(kept, Prototype))
        while len(self._kept) > self._limits.kept or kept_bytes > self._limits.kept_bytes:
            _, dropped = self._kept.popitem(last=False)
            kept_bytes -= dropped.grown_bytes if isinstance(dropped, Prototype) else 0
        return outcome

    async def _prototype(self, verdict: Verdict) -> Prototype:
        assert verdict.grammar is not None
        assert self._loaded is not None
        vocabulary, tokenizer = self._loaded
        pool = self._slow if verdict.cpu_seconds > SLOW_CPU_SECONDS else self._quick
        return await asyncio.get_running_loop().run_in_executor(
            pool, Prototype, tokenizer, verdict.grammar, vocabulary.eos_token_ids, verdict.grown_bytes
        )

    async def _check(self, key: Key) -> Verdict:
        for _ in range(2):
            checker = await self._started()
            try:
                return await checker.check(*key)
            except CheckerEnded:
                continue
        raise CheckerEnded

    async def _started(self) -> CheckerProcess:
        async with self._starting:
            if self._checker is None or not self._checker.alive:
                run = asyncio.get_running_loop().run_in_executor
                if self._loaded is None:
                    self._loaded = await run(self._quick, self._load)
                limits = (self._limits.cpu_seconds, self._limits.memory_bytes)
                first = await run(self._quick, self._loaded[0].for_checker, *limits)
                self._checker = await CheckerProcess.start(first)
            return self._checker

    def _load(self) -> tuple[Vocabulary, LLTokenizer]:
        """In a thread."""
        from llguidance import LLTokenizer

        from server.structured.vocabulary import SLICES

        try:
            vocabulary = self._vocabulary_of_model()
        except ValueError as error:
            raise UnsupportedField(f"This model cannot follow grammars: {error}.") from None
        tokenizer = LLTokenizer(vocabulary, eos_token=vocabulary.eos_token_ids, slices=SLICES)  # type: ignore[arg-type]
        return vocabulary, tokenizer

    def _refusal(self, verdict: Verdict) -> Refusal | None:
        if verdict.limit is None:
            return None if verdict.error is None else Refusal(reason_of(verdict.error))
        seconds, mebibytes = self._limits.cpu_seconds, self._limits.memory_bytes >> 20
        most = f"{seconds} seconds of a processor" if verdict.limit == "time" else f"{mebibytes} MiB"
        return Refusal(f"it takes more than {most} to compile", "grammar_too_complex")


def reason_of(error: str) -> str:
    """llguidance's words without what they quote: the grammar made of the client's, the state of the parser."""
    if error.startswith("NoExtension"):
        return "nothing satisfies it"
    if error.startswith("oneOf") or ": oneOf constraints" in error:
        return "oneOf is only supported where its schemas exclude each other; use anyOf"
    message = _QUOTED.split(error)[0]
    if inner := re.search(r"^error: (.+)$", message, re.MULTILINE):
        return bounded(f"regular expression: {inner[1]}", MAX_REASON_CHARS)
    message = " ".join(_PLACE.sub("", message).split())
    if keywords := re.fullmatch(r"Unimplemented keys: \[(.+)\]", message):
        return bounded(f"these keywords are not supported: {keywords[1]}", MAX_REASON_CHARS)
    return bounded(message.rstrip(".:"), MAX_REASON_CHARS)


def _yield_to_others() -> None:
    """Let threads that serve requests go first. On Linux a thread has a niceness of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
