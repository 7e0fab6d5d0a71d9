"""The standard request sets: the same seed gives the same requests, so that servers can be compared. And sets of files.

Prompts are runs of words from Python's own manual, which every installation has; the same Python version makes the
same prompts on every machine. Lengths are in words: each server tokenises for itself. No state outside a call.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

_SHARED_PREFIXES = 5
_SHARED_WORDS = 1000
_WORDS_PER_TOKEN = 0.75  # of English, roughly: for files that give lengths in tokens
_BLOCK_TOKENS = 512  # that one of a trace's hash ids stands for


@dataclass(frozen=True, slots=True)
class Prompt:
    """One completion to ask for, or the first of a conversation."""

    prompt: str
    max_tokens: int
    then: Prompt | None = None  # what is said next, once this is answered
    leave_after: int | None = None  # pieces of text, after which the client goes away


@dataclass(frozen=True, slots=True)
class _Source:
    """Draws text. The order of draws is part of a set: changing it changes every prompt after."""

    random: random.Random
    words: Sequence[str]

    def text(self, length: int) -> str:
        """A run of `length` words."""
        start = self.random.randrange(len(self.words) - length)
        return " ".join(self.words[start : start + length])

    def lognormal(self, mean: float, sigma: float, low: int, high: int) -> int:
        """A whole number from the log-normal distribution with this mean, within [low, high]."""
        value = self.random.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
        return int(min(high, max(low, value)))


def _prefix(source: _Source, shared: Sequence[str], index: int) -> Prompt:
    # Nine of ten take the shared texts in turn, the tenth the first one: one prefix is hotter than the others.
    chosen = index % len(shared) if source.random.random() < 0.9 else 0
    return Prompt(f"{shared[chosen]} {source.text(24)}", 32)


def _turns(source: _Source) -> Prompt:
    said = Prompt(source.text(60), 48)
    for _ in range(3):
        said = Prompt(source.text(60), 48, said)
    return said


# From the source, the texts that prompts may share, and the prompt's number.
_SETS: dict[str, Callable[[_Source, Sequence[str], int], Prompt]] = {
    "single": lambda source, *_: Prompt(source.text(96), 256),
    "decode": lambda source, *_: Prompt(source.text(24), 256),
    "chat": lambda source, *_: Prompt(
        source.text(source.lognormal(160, 0.9, 8, 900)), source.lognormal(120, 0.7, 8, 400)
    ),
    "prefix": _prefix,
    "prefill": lambda source, *_: Prompt(source.text(900), 1),
    "long": lambda source, *_: Prompt(source.text(3000), 200),
    "turns": lambda source, *_: _turns(source),
}
KINDS = tuple(_SETS)


def make(kind: str, count: int, seed: int = 1, words: Sequence[str] | None = None) -> Iterator[Prompt]:
    """The first `count` prompts of a set. Raises KeyError for a kind that is not one of `KINDS`."""
    make_one = _SETS[kind]
    source = _Source(random.Random(seed), manual_words() if words is None else words)
    shared = [source.text(_SHARED_WORDS) for _ in range(_SHARED_PREFIXES)]
    for index in range(count):
        yield make_one(source, shared, index)


@cache
def manual_words() -> tuple[str, ...]:
    """The words of Python's manual, topic by topic."""
    from pydoc_data.topics import topics

    return tuple(re.findall(r"[A-Za-z][A-Za-z'\-]+", " ".join(topics[name] for name in sorted(topics))))


def sharegpt(path: Path, count: int) -> list[Prompt]:
    """The first `count` conversations of a ShareGPT-like file: what people said, each answer about as long as it was.

    A list of `{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}`. Raises
    ValueError for another form, OSError.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        found = (_conversation([(turn["from"], turn["value"]) for turn in entry["conversations"]]) for entry in entries)
        return list(islice((prompt for prompt in found if prompt is not None), count))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a list of conversations as ShareGPT has them: {error}") from None


def _conversation(turns: Sequence[tuple[str, str]]) -> Prompt | None:
    pairs = [
        (said, answer)
        for (who, said), (other, answer) in pairwise(turns)
        if who in ("human", "user") and other in ("gpt", "assistant") and said and answer
    ]
    prompt = None
    for said, answer in reversed(pairs):
        prompt = Prompt(said, max(1, round(len(answer.split()) / _WORDS_PER_TOKEN)), prompt)
    return prompt


def trace(path: Path, count: int, words: Sequence[str] | None = None) -> tuple[list[Prompt], list[float]]:
    """The first `count` requests of a trace file, and the seconds at which each is due.

    One JSON object a line, as Mooncake publishes them: `timestamp` in milliseconds, `output_length`, and `input_length`
    (with `hash_ids`, blocks of 512 tokens that requests share) or the `prompt` itself. Raises ValueError, OSError.
    """
    words = manual_words() if words is None else words
    prompts, due = [], []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(islice(lines, count)):
                row = json.loads(line)
                prompts.append(Prompt(row.get("prompt") or _blocks(row, number, words), max(1, row["output_length"])))
                due.append(row["timestamp"] / 1e3)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}, line {len(prompts) + 1}, is not a request of a trace: {error!r}") from None
    return prompts, [at - due[0] for at in due]


def _blocks(row: dict[str, Any], number: int, words: Sequence[str]) -> str:
    """As many words as make the prompt's length, the same ones for the same hash id."""
    blocks = math.ceil(row["input_length"] / _BLOCK_TOKENS)
    ids = row.get("hash_ids") or [f"{number} {block}" for block in range(blocks)]
    size = int(_BLOCK_TOKENS * _WORDS_PER_TOKEN)
    text = [word for name in ids for word in random.Random(str(name)).choices(words, k=size)]
    return " ".join(text[: max(1, int(row["input_length"] * _WORDS_PER_TOKEN))])


def leaving(prompts: Sequence[Prompt], share: float, seed: int) -> list[Prompt]:
    """The same prompts, of which a share has clients that go away somewhere in the answer."""
    chance = random.Random(seed)
    return [
        replace(prompt, leave_after=chance.randint(1, prompt.max_tokens)) if chance.random() < share else prompt
        for prompt in prompts
    ]
