"""One choice of an answer: from the engine's tokens to the text a client may see.

Detokenises, watches for stop strings, and keeps each token's logprob beside the text it belongs to: a record is let out
when the text it begins with is, and never after a stop. What comes out depends on the tokens alone, not on how many
came at once.

Owned by the task that answers the request. Knows nothing of JSON.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.stream import TokenLogprob, Update
from server.detokenize import Decoding, Detokenizer
from server.message import MessageParser
from server.stops import Found, StopMatcher
from server.tools.parts import Part, joined


class TokenRecord(NamedTuple):
    """A token with its logprob, at its place in the text."""

    token: int
    logprob: TokenLogprob | None  # None for the first token of an echoed prompt, which nothing precedes
    offset: int  # characters of text before it


class Delta(NamedTuple):
    """What an update added to a choice."""

    text: str
    records: list[TokenRecord]
    tokens: list[int]
    finish_reason: str | None
    stop: str | int | None = None  # the stop string or the client's own stop token that ended it
    parts: list[Part] | None = None  # what it is made of, when it is more than text; `text` is then only the text in it


def merged(deltas: Sequence[Delta]) -> Delta:
    """All that was added to a choice, from the first to the last."""
    return Delta(
        "".join([delta.text for delta in deltas]),
        [record for delta in deltas for record in delta.records],
        [token for delta in deltas for token in delta.tokens],
        deltas[-1].finish_reason,
        deltas[-1].stop,
        None if deltas[-1].parts is None else joined([part for delta in deltas for part in delta.parts or ()]),
    )


@dataclass(slots=True)
class Echo:
    """A prompt that the answer says something about: itself, before each of its choices, or its logprobs, or both."""

    text: str | None  # None: it is not repeated
    tokens: Sequence[int]
    scored: bool
    logprobs: list[TokenLogprob] = field(default_factory=list)  # from the second token on
    held: list[Update] = field(default_factory=list)  # that came before the prompt was scored

    @property
    def complete(self) -> bool:
        return not self.scored or len(self.logprobs) == len(self.tokens) - 1

    def delta(self, decoding: Decoding, skip_special: bool) -> Delta:
        records = self.records(decoding, skip_special) if self.scored else []
        return Delta(self.text or "", records, [], None)

    def records(self, decoding: Decoding, skip_special: bool) -> list[TokenRecord]:
        """Its tokens with their logprobs, of a prompt that has been scored; the first has none."""
        records, detokenizer, offset = [], decoding.detokenizer(skip_special), 0
        for token, logprob in zip(self.tokens, [None, *self.logprobs], strict=True):
            records.append(TokenRecord(token, logprob, offset))
            offset += len(detokenizer.feed(token))
        return records


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a request wants its text cut."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: bool = False
    shown: frozenset[int] = frozenset()  # special tokens that are text all the same
    parser: Callable[[], MessageParser] | None = None  # for each choice; None when an answer is only text


class Choice:
    """The state of one choice. `index` is its place among all choices of the answer; `start` is how many characters of
    text come before it, for the offsets of its records."""

    def __init__(self, index: int, options: TextOptions, detokenizer: Detokenizer, start: int = 0) -> None:
        self.index = index
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.logprob_sum = 0.0
        self.finish_reason: str | None = None
        self.echoed = False  # whether its prompt was put before it
        self.started = False  # whether anything of it was sent
        self.calls = 0  # of functions, that were sent
        self._options = options
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(options.stops) if options.stops else None
        self._parser = options.parser() if options.parser else None
        self._length = start  # characters the tokens so far stand for
        self._released = start  # characters let out
        self._pending: deque[TokenRecord] = deque()

    def take(self, update: Update) -> Delta:
        """Add an update. After a delta with a finish reason there is nothing more to take."""
        said: list[str] = []
        parts: list[Part] = []
        parser = self._parser
        stop: str | int | None = None
        for position, token in enumerate(update.tokens):
            self.completion_tokens += 1
            if update.logprobs:
                self.logprob_sum += update.logprobs[position].logprob
                if self._options.logprobs:
                    self._pending.append(TokenRecord(token, update.logprobs[position], self._length))
            text, stop = self._add(self._detokenizer.feed(token))
            said.append(text)
            if parser is not None:
                # A token belongs to a thought that was open before it or is after it.
                thinking = parser.thinking
                parts += parser.feed(text)
                self.reasoning_tokens += thinking or parser.thinking
            if stop is not None:
                self.finish_reason = "stop"
                break
        tokens = update.tokens[: len(said)]
        if self.finish_reason is None and update.finish_reason is not None:
            text, stop = self._finish(update)
            said.append(text)
            parts += [] if parser is None else parser.feed(text)
        records = self._due()
        if parser is None:
            return Delta("".join(said), records, tokens, self.finish_reason, stop)
        if self.finish_reason is not None:
            parts += parser.finish()
            self.finish_reason = parser.reason(self.finish_reason)
        text = "".join([part.text for part in parts if part.kind == "text"])
        return Delta(text, records, tokens, self.finish_reason, stop, joined(parts))

    @property
    def mean_logprob(self) -> float:
        """Per token; what best_of goes by."""
        return self.logprob_sum / max(1, self.completion_tokens)

    def _add(self, piece: str) -> Found:
        """Add text; what of it is let out, and the stop string it completed."""
        self._length += len(piece)
        found = Found(piece)
        # The first min_tokens tokens are not searched, and cannot be the beginning of a match either.
        if self._matcher is not None and self.completion_tokens > self._options.min_tokens:
            found = self._matcher.feed(piece)
            if found.stop is not None and self._options.include_stop:
                found = Found(found.text + found.stop, found.stop)
        self._released += len(found.text)
        return found

    def _finish(self, update: Update) -> tuple[str, str | int | None]:
        self.finish_reason = update.finish_reason
        said = ""
        if update.stop_token is not None:
            self.completion_tokens += 1
            if self._options.include_stop:
                said = self._detokenizer.feed(update.stop_token)
        found = self._add(self._detokenizer.finish())
        if found.stop is not None:
            self.finish_reason = "stop"
            return said + found.text, found.stop
        held = "" if self._matcher is None else self._matcher.finish()
        self._released += len(said) + len(held)
        stop = update.stop_token if update.stop_token in self._options.stop_token_ids else None
        return said + found.text + held, stop

    def _due(self) -> list[TokenRecord]:
        """Records whose text has begun to be let out; at a natural end also those without text of their own."""
        due = []
        ended = self.finish_reason is not None and self._released >= self._length
        while self._pending and (self._pending[0].offset < self._released or ended):
            due.append(self._pending.popleft())
        return due
