"""What the replies of all routes share: ids, and what was used."""

from __future__ import annotations

from secrets import token_hex
from typing import Any

from server.generation import Generation


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
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in generation.choices),
            "accepted_prediction_tokens": generation.accepted_tokens,
            "rejected_prediction_tokens": generation.rejected_tokens,
        },
    }
