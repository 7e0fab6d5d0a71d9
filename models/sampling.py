"""How tokens are to be chosen: one request's parameters, and one step's parameters as arrays.

Owner: plain data; the server makes `SamplingParams`, `models.sampling_state` makes a `SamplingBatch` each step, a
sampler reads it. Knows nothing of requests, steps or devices, and imports without torch.

What a sampler does with one row of logits, in this order, in float32:

1. penalties: repetition (over prompt and output), then frequency, then presence (both over output);
2. bias: additive, -inf forbids a token; then a mask: a token without its bit is -inf, whatever it was;
3. logprobs are taken here, so they are those of the distribution before temperature and filters;
4. temperature: `scaled = (logit - max) / temperature`, so that the largest is 0 at any temperature;
5. min_p: keep `scaled >= ln(min_p)`, that is, probability at least min_p times the largest;
6. top_k: keep the k first, larger logit first and lower id first among equals;
7. top_p: keep the shortest run of that order whose share of what is left is at least top_p (to one part in a million,
   so that a share that equals top_p is not missed by rounding);
8. the largest of `scaled + noise` (`models.noise`) wins, the lowest id among equals.

Temperature 0 takes the largest logit after 2, the lowest id among equals. A row with a target does only 3, and that on
the raw logits. A row in which anything is NaN or +inf, or everything is -inf, gives token -1 and disturbs no other row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]

COUNT_MASK = (1 << 30) - 1  # low bits of a count: how often the token is in the output
IN_PROMPT = 1 << 30  # the bit of a count that says that the token is in the prompt
TOP_P_SLACK = 1e-6  # relative rounding allowed when a share of the mass is compared with top_p


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
    allowed_token_ids: tuple[int, ...] | None = None  # nothing else may be chosen; None for no such limit
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of output tokens not to be completed while there is a choice
    logprobs: int | None = None  # alternatives wanted beside each sampled token; None for no logprobs at all
    prompt_logprobs: int | None = None  # the same for prompt tokens
    max_tokens: int = 16
    min_tokens: int = 0  # until so many outputs, eos and stop tokens are forbidden
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # about finishing: eos may still be sampled


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of the L logit rows of one step, as arrays. All of them C-contiguous.

    A row with a target >= 0 does not sample: it reports the logprob of the target (prompt logprobs), from the raw
    logits. The arrays may be shared with the next step's batch and `counts` with the `SamplingState`: read only.
    """

    temperature: F32  # [L]
    top_p: F32  # [L]
    top_k: I32  # [L]
    min_p: F32  # [L]
    seed: I64  # [L]
    position: I32  # [L] index in the sequence of the token that is being chosen
    target: I32  # [L] -1 to sample
    num_logprobs: int  # -1: nobody asked; else the largest number of alternatives any row wants
    row_logprobs: I32 | None = None  # [L] alternatives each row wants, -1 for none; None: num_logprobs for each
    presence: F32 | None = None  # [L]; None when no row has a penalty
    frequency: F32 | None = None
    repetition: F32 | None = None
    counts: I32 | None = None  # [rows, vocab] output counts in the low 30 bits, bit 30 set when in the prompt
    count_row: I32 | None = None  # [L] row of `counts` for each logit row, -1 for none
    bias_row: I32 | None = None  # [B] additive logit changes, sorted by row; -inf to forbid
    bias_token: I32 | None = None
    bias_value: F32 | None = None
    mask: U32 | None = None  # [M, ceil(vocab / 32)] token t may be chosen when bit t % 32 of word t // 32 is set
    mask_row: I32 | None = None  # [L] row of `mask` for each logit row, -1 for none; None with `mask`

    def rows(self, which: slice | npt.NDArray[np.intp]) -> SamplingBatch:
        """Those of some of the rows, which are in ascending order."""
        index = np.arange(len(self.temperature))[which]
        per_row = ("temperature", "top_p", "top_k", "min_p", "seed", "position", "target")
        optional = ("row_logprobs", "presence", "frequency", "repetition", "count_row", "mask_row")
        changes = {name: getattr(self, name)[index] for name in per_row}
        changes |= {name: value[index] for name in optional if (value := getattr(self, name)) is not None}
        if self.bias_row is not None and self.bias_token is not None and self.bias_value is not None:
            ours = np.isin(self.bias_row, index)
            changes |= {
                "bias_row": np.searchsorted(index, self.bias_row[ours]).astype(np.int32),
                "bias_token": self.bias_token[ours],
                "bias_value": self.bias_value[ours],
            }
        return replace(self, **changes)
