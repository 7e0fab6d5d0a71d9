"""Log-probabilities in the two shapes OpenAI has for them.

Numbers are natural logs of the distribution after penalties and logit_bias, before temperature and filters. Minus
infinity, which JSON has not, is -9999. A token that is not a whole character is named by its bytes, as OpenAI does:
`bytes:\\xf0\\x9f` on completions and `\\xf0\\x9f` on chat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scheduler.stream import TokenLogprob
from server.choice import TokenRecord
from server.generation import Generation

FLOOR = -9999.0


class LogprobShapes:
    """Shapes the records of one request. `alternatives` is how many it asked for beside each token."""

    def __init__(self, work: Generation, alternatives: int) -> None:
        self._decoding = work.decoding
        self._alternatives = alternatives
        # Tokens that leave no text.
        self._silent = work.decoding.special_ids if work.options.skip_special else frozenset()

    def completion(self, records: Sequence[TokenRecord]) -> dict[str, Any]:
        return {
            "tokens": [self._name(record.token, "bytes:") for record in records],
            "token_logprobs": [None if r.logprob is None else max(FLOOR, r.logprob.logprob) for r in records],
            "top_logprobs": [self._alternatives_of(record) for record in records],
            "text_offset": [record.offset for record in records],
        }

    def chat(self, records: Sequence[TokenRecord]) -> dict[str, Any]:
        return {"content": [self._entry(record) for record in records], "refusal": None}

    def prompt(self, records: Sequence[TokenRecord]) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each token of the prompt but the first, itself and the most likely ones in its
        place, by id. The rank of a token that is not among those is not known."""
        return [None if record.logprob is None else self._ranked(record.token, record.logprob) for record in records]

    def _ranked(self, token: int, logprob: TokenLogprob) -> dict[str, Any]:
        top = logprob.top[: self._alternatives]
        ranks: dict[int, tuple[float, int | None]] = {id: (value, rank) for rank, (id, value) in enumerate(top, 1)}
        ranks.setdefault(token, (logprob.logprob, None))
        return {
            str(id): {"logprob": max(FLOOR, value), "rank": rank, "decoded_token": self._name(id, "")}
            for id, (value, rank) in ranks.items()
        }

    def response(self, records: Sequence[TokenRecord]) -> list[dict[str, Any]]:
        """As chat's entries, but that bytes are never null."""
        return [
            _with_bytes({**entry, "top_logprobs": list(map(_with_bytes, entry["top_logprobs"]))})
            for entry in map(self._entry, records)
        ]

    def _alternatives_of(self, record: TokenRecord) -> dict[str, float] | None:
        """The most likely tokens, and the token itself when it is not among them."""
        if record.logprob is None:
            return None
        top = record.logprob.top[: self._alternatives]
        pairs = [*top, (record.token, record.logprob.logprob)]
        result: dict[str, float] = {}
        for token, logprob in pairs:
            result.setdefault(self._name(token, "bytes:"), max(FLOOR, logprob))
        return result

    def _entry(self, record: TokenRecord) -> dict[str, Any]:
        assert record.logprob is not None  # only echoed prompts, which chat has not, begin with a token without one
        top = record.logprob.top[: self._alternatives]
        return {
            **self._token(record.token, record.logprob.logprob),
            "top_logprobs": [self._token(token, logprob) for token, logprob in top],
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        own = None if token in self._silent else list(self._decoding.bytes_of(token))
        return {"token": self._name(token, ""), "logprob": max(FLOOR, logprob), "bytes": own}

    def _name(self, token: int, prefix: str) -> str:
        own = self._decoding.bytes_of(token)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in own)


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    return {**entry, "bytes": entry["bytes"] or []}
