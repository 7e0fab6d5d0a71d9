"""How much the store wastes, how much it reuses and what it costs, against three simpler ways to keep a KV cache.

    python -m kvstore.measure [--quick]

prints one JSON object. No model is needed: the tokens are drawn, the store is real, and each other way is a page of
code below. Waste and reuse do not depend on the machine; the times do.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvstore.pool import I32
from kvstore.sequence import KVSequence
from kvstore.store import KVStore

PAGE = 16
LONGEST = 2048  # tokens of one context: what contiguous allocation sets aside
AT_ONCE = 32  # requests that run at the same time


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt and what is generated after it."""

    tokens: I32
    prompt: int


class Tree:
    """The store as the scheduler uses it, or without sharing."""

    def __init__(self, pages: int, caching: bool = True) -> None:
        self.name = "radix tree" if caching else "pages, no sharing"
        self.kv = KVStore(
            num_pages=pages, page_size=PAGE, max_sequences=AT_ONCE, max_model_len=LONGEST, prefix_caching=caching
        )
        self._open: dict[int, KVSequence] = {}

    def begin(self, number: int, prompt: I32) -> int:
        """Take a request in; the prompt tokens it need not compute."""
        seq = self._open[number] = _some(self.kv.open(prompt))
        found = seq.computed
        self.grow(number, prompt, len(prompt))
        return found

    def grow(self, number: int, tokens: I32, length: int) -> None:
        seq = self._open[number]
        if not self.kv.reserve(seq, length):
            raise MemoryError(f"{self.kv.pools[0].total} pages are too few")
        self.kv.drain_copies()
        self.kv.commit(seq, tokens, length)

    def end(self, number: int, tokens: I32) -> None:
        seq = self._open.pop(number)
        self.kv.close(seq, tokens, seq.computed)

    def slots(self) -> tuple[int, int]:
        """Slots set aside for running requests, and those of them without a token."""
        empty = sum(seq.blocks[0] * PAGE - seq.computed for seq in self._open.values())
        return self.kv.pools[0].used * PAGE, empty


class Contiguous:
    """One run of LONGEST slots a request."""

    name = "contiguous"

    def __init__(self, pages: int) -> None:
        self._lengths: dict[int, int] = {}

    def begin(self, number: int, prompt: I32) -> int:
        self._lengths[number] = len(prompt)
        return 0

    def grow(self, number: int, tokens: I32, length: int) -> None:
        self._lengths[number] = length

    def end(self, number: int, tokens: I32) -> None:
        del self._lengths[number]

    def slots(self) -> tuple[int, int]:
        return len(self._lengths) * LONGEST, sum(LONGEST - length for length in self._lengths.values())


class HashedBlocks:
    """Full blocks found by a chain of hashes, the least recently used given up first, the end of a request before its
    beginning; a block is never shared in part, and a fully cached prompt computes its last block again."""

    name = "hashed full blocks"

    def __init__(self, pages: int) -> None:
        self._total = pages
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached, and nobody's now
        self._users: dict[int, int] = {}
        self._own: dict[int, int] = {}  # by request: tokens
        self._held: dict[int, list[int]] = {}  # by request: the blocks it found or has filled

    def _hashes(self, tokens: I32) -> Iterator[int]:
        parent = 0
        for start in range(0, len(tokens) - PAGE + 1, PAGE):
            parent = hash((parent, tuple(tokens[start : start + PAGE].tolist())))
            yield parent

    def begin(self, number: int, prompt: I32) -> int:
        self._held[number] = []
        for block in self._hashes(prompt[:-1]):
            if block not in self._idle and block not in self._users:
                break
            self._hold(number, block)
        found = len(self._held[number]) * PAGE
        self.grow(number, prompt, len(prompt))
        return found

    def grow(self, number: int, tokens: I32, length: int) -> None:
        self._own[number] = length
        for block in list(self._hashes(tokens[:length]))[len(self._held[number]) :]:
            self._hold(number, block)
        used = len(self._users) + len(self._own)  # and a block that is being filled for each
        while self._idle and used + len(self._idle) > self._total:
            self._idle.popitem(last=False)

    def _hold(self, number: int, block: int) -> None:
        self._idle.pop(block, None)
        self._users[block] = self._users.get(block, 0) + 1
        self._held[number].append(block)

    def end(self, number: int, tokens: I32) -> None:
        del self._own[number]
        for block in reversed(self._held.pop(number)):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                self._idle[block] = None

    def slots(self) -> tuple[int, int]:
        partial = [length % PAGE for length in self._own.values() if length % PAGE]
        return (len(self._users) + len(partial)) * PAGE, sum(PAGE - filled for filled in partial)


WAYS: tuple[Callable[[int], Any], ...] = (Contiguous, partial(Tree, caching=False), HashedBlocks, Tree)


def chats(count: int, seed: int = 1) -> list[Chat]:
    """Conversations of one turn, long and short, nothing in common but a system prompt of one of five applications."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, 50_000, 40 + 83 * i) for i in range(5)]
    lengths = np.clip(rng.lognormal(4.9, 0.9, (count, 2)), 8, 700).astype(int)
    made = []
    for number, (asked, answered) in enumerate(lengths.tolist()):
        prompt = np.concatenate((systems[number % 5], rng.integers(0, 50_000, asked)))
        made.append(Chat(np.concatenate((prompt, rng.integers(0, 50_000, answered))).astype(np.int32), len(prompt)))
    return made


def turns(users: int, rounds: int, seed: int = 2) -> list[Chat]:
    """Conversations of several turns: each asks again with all that was said, all users by turns."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, 50_000, 211 + 97 * i) for i in range(5)]
    said = [systems[user % 5] for user in range(users)]
    made = []
    for _ in range(rounds):
        for user in range(users):
            asked, answered = np.clip(rng.lognormal(3.6, 0.7, 2), 5, 100).astype(int).tolist()
            prompt = np.concatenate((said[user], rng.integers(0, 50_000, asked)))
            said[user] = np.concatenate((prompt, rng.integers(0, 50_000, answered)))
            made.append(Chat(said[user].astype(np.int32), len(prompt)))
    return made


def serve(way: Any, requests: list[Chat]) -> dict[str, Any]:
    """Run requests, AT_ONCE at a time and four tokens a step: what was wasted, found, and spent."""
    waiting, running = iter(enumerate(requests)), dict[int, int]()
    allocated = empty = found = operations = 0
    seconds = 0.0
    while True:
        began = time.perf_counter()
        while len(running) < AT_ONCE and (item := next(waiting, None)) is not None:
            number, chat = item
            found += way.begin(number, chat.tokens[: chat.prompt])
            running[number] = chat.prompt
            operations += 1
        for number, length in list(running.items()):
            chat = requests[number]
            if length == len(chat.tokens):
                way.end(number, chat.tokens)
                del running[number]
            else:
                running[number] = min(len(chat.tokens), length + 4)
                way.grow(number, chat.tokens, running[number])
            operations += 1
        seconds += time.perf_counter() - began
        if not running:
            break
        now = way.slots()
        allocated, empty = allocated + now[0], empty + now[1]
    return {
        "way": way.name,
        "wasted": empty / allocated,
        "prompt_tokens": sum(chat.prompt for chat in requests),
        "found_tokens": found,
        "microseconds": seconds / operations * 1e6,
    }


def classic(entries: int | None, seed: int = 3) -> float:
    """1,000 requests of 96 tokens, of which 60% begin with one of 5 prefixes of 64 and the others with nothing known,
    and room for `entries` of them: the part of the requests that found a prefix."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, 50_000, (5, 64))
    tree = Tree((entries or 1000) * 96 // PAGE)
    hits = 0
    for number in range(1000):
        head = prefixes[rng.integers(5)] if rng.random() < 0.6 else rng.integers(0, 50_000, 64)
        tokens = np.concatenate((head, rng.integers(0, 50_000, 32))).astype(np.int32)
        hits += tree.begin(number, tokens) >= 64
        tree.end(number, tokens)
    return hits / 1000


def costs(leaves: int, length: int = 96) -> dict[str, Any]:
    """Microseconds of each operation in a tree of so many leaves, each of which has ten tokens for itself."""
    rng = random.Random(leaves)
    shared = np.array([rng.randrange(50_000) for _ in range(length - 10)], np.int32)
    kv = KVStore(num_pages=leaves + length // PAGE + 200, page_size=PAGE, max_sequences=8, max_model_len=16_384)
    prompts = np.array([[rng.randrange(50_000) for _ in range(10)] for _ in range(min(leaves, 2000))], np.int32)

    def tokens_of(number: int) -> I32:
        own = prompts[number % len(prompts)].copy()
        own[0] = number  # every leaf its own
        return np.concatenate((shared, own))

    def say(tokens: I32) -> None:
        seq = _some(kv.open(tokens))
        if not kv.reserve(seq, len(tokens)):
            raise MemoryError("the pool is too small")
        kv.drain_copies()
        kv.close(seq, tokens, len(tokens))

    for number in range(leaves):
        say(tokens_of(number))
    long = np.array([rng.randrange(50_000) for _ in range(2000)], np.int32)
    say(long)
    some = [tokens_of(rng.randrange(leaves)) for _ in range(200)]

    def lock(number: int) -> None:
        seq = _some(kv.open(long))
        kv.close(seq, long, seq.computed)

    new = [tokens_of(leaves + number) for number in range(200)]
    timed = {
        "match_per_100": _median(lambda i: kv.match_length(some[i])) / length * 100,
        "match_long_per_100": _median(lambda i: kv.match_length(long)) / 20,
        "lock": _median(lock),
        "insert": _median(lambda i: say(new[i])),
    }

    def evict(number: int) -> None:
        kv.tree.evict([kv.pools[0].free + 1], "measured")

    timed["evict"] = _median(evict)
    return {"leaves": leaves, "tokens": length - 10 + leaves * 10 + 2000, **timed}


def _median(operation: Callable[[int], Any]) -> float:
    """Microseconds, of 200 times."""
    times = []
    for number in range(200):
        began = time.perf_counter()
        operation(number)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def _some(seq: KVSequence | None) -> KVSequence:
    if seq is None:
        raise MemoryError("no slot is free")
    return seq


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvstore.measure", description="Measure the KV store.")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    part = 10 if parser.parse_args().quick else 1
    users = turns(100 // part, 10)
    content = {
        "chats": [serve(way(8000), chats(1000 // part)) for way in WAYS],
        "reuse": [
            {"pages": pages, **serve(way(pages), users)} for pages in (2000, 3000, 6000, 12_000) for way in WAYS[2:]
        ],
        "classic": {"bounded": classic(500), "unbounded": classic(None)},
        "costs": [costs(leaves) for leaves in (100, 1000, 10_000, 100_000) if leaves <= 100_000 // part],
    }
    print(json.dumps(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
