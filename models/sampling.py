"""Sampling parameters and the per-step arrays made of them. (contract draft: the sampling room fills this in)"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request wants its tokens chosen and when to stop. Validated by the server; immutable.

    `seed` is always set: the server draws one when the client gives none.
    """

    seed: int  # any signed 64-bit integer
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0  # over output tokens
    frequency_penalty: float = 0.0  # over output tokens
    repetition_penalty: float = 1.0  # over prompt and output tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # alternatives wanted beside each sampled token; None for no logprobs at all
    prompt_logprobs: int | None = None  # the same for prompt tokens
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of the L logit rows of one step, as arrays.

    A row with a target >= 0 does not sample: it reports the logprob of the target (prompt logprobs), from the raw
    logits.
    """

    temperature: F32  # [L]
    top_p: F32  # [L]
    top_k: I32  # [L]
    min_p: F32  # [L]
    seed: npt.NDArray[np.int64]  # [L]
    position: I32  # [L] index in the sequence of the token that is being chosen
    target: I32  # [L] -1 to sample
    num_logprobs: int  # -1: nobody asked; else the largest number of alternatives any row wants
    presence: F32 | None = None  # [L]; None when no row has a penalty
    frequency: F32 | None = None
    repetition: F32 | None = None
    counts: I32 | None = None  # [slots, vocab] output counts in the low 30 bits, bit 30 set when in the prompt
    count_row: I32 | None = None  # [L] row of `counts` for each logit row, -1 for none
    bias_row: I32 | None = None  # [B] additive logit changes, sorted by row; -inf to forbid
    bias_token: I32 | None = None
    bias_value: F32 | None = None
