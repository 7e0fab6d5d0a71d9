"""A prompt that the answer repeats or scores, as a delta before its choices. Owned by the request's generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.stream import TokenLogprob, Update
from server.choice import Delta, TokenRecord
from server.detokenize import Decoding


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
        """The prompt as if it had been generated."""
        records = self.records(decoding, skip_special) if self.scored else []
        return Delta(self.text or "", records, [], None)

    def records(self, decoding: Decoding, skip_special: bool) -> list[TokenRecord]:
        """Its tokens with their logprobs, of a prompt that has been scored; the first has none."""
        records, detokenizer, offset = [], decoding.detokenizer(skip_special), 0
        for token, logprob in zip(self.tokens, [None, *self.logprobs], strict=True):
            records.append(TokenRecord(token, logprob, offset))
            offset += len(detokenizer.feed(token))
        return records
