"""The bounds the scheduler works within. Fixed for the life of an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Policy = Literal["fcfs", "priority", "prefix"]


@dataclass(frozen=True, slots=True)
class Limits:
    """All counts are positive. A choice of an `n > 1` request counts as one sequence, running or queued."""

    max_model_len: int  # tokens of prompt and output together
    max_num_seqs: int = 256  # sequences running at once
    max_num_batched_tokens: int = 2048  # token rows in one step
    max_prefill_beside: int = 2048  # of them, those of prompts while others decode: see `plan`
    max_queued_requests: int = 1024  # sequences waiting
    max_queued_tokens: int | None = None  # prompt tokens waiting, each prompt counted once; None: no bound
    max_queue_delay: float | None = math.inf  # seconds until a place; None: as a first token takes from there on
    max_scored_rows: int = 256  # prompt rows with logprobs in one step: each costs a row of logits over the vocabulary
    policy: Policy = "fcfs"
    prefix_caching: bool = True
    journal_steps: int = 512  # steps remembered
    journal_requests: int = 512  # finished requests remembered
