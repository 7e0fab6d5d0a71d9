"""What every reply of one request shares: who it is, and what it has used."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any

from server.generation import Generation


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that are equal in all chunks of an answer."""

    id: str
    model: str
    system_fingerprint: str
    timings: bool = False  # whether the client wants them
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }

    def closing(self, generation: Generation, *, usage: bool = True) -> dict[str, Any]:
        """The fields at the end of an answer."""
        fields = {"usage": usage_of(generation)} if usage else {}
        return fields | {"timings": generation.timings()} if self.timings else fields


def new_id(prefix: str, separator: str = "-") -> str:
    """`cmpl-` and 24 random hexadecimal digits."""
    return f"{prefix}{separator}{token_hex(12)}"


def usage_of(generation: Generation) -> dict[str, Any]:
    """OpenAI's usage object. Prompt tokens count once per prompt, generated ones once per choice, shown or not."""
    prompt_tokens, completion_tokens = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": generation.reasoning_tokens,
            "accepted_prediction_tokens": generation.accepted_tokens,
            "rejected_prediction_tokens": generation.rejected_tokens,
        },
    }
