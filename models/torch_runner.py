"""The runner for any device torch has: decoder, attention and sampler in torch operators."""

from __future__ import annotations

import numpy as np
import torch

from models.base import F32, Batch, StepOutput
from models.decoder import Decoder
from models.torch_attention import TorchAttention
from models.torch_sampler import sample

LOGIT_SLICE = 256  # logit rows in memory at a time: a prompt's logprobs would else take length x vocabulary floats


class TorchRunner:
    """See `models.base.Runner`. Runs in inference mode; one thread at a time."""

    def __init__(self, decoder: Decoder, attention: TorchAttention) -> None:
        self.decoder, self.attention, self.config = decoder, attention, decoder.config
        self.page_bytes, self.allocate = attention.page_bytes, attention.allocate
        self.read_page, self.write_page = attention.read_page, attention.write_page

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepOutput:
        hidden = self.decoder.hidden(batch, self.attention)
        rows = torch.from_numpy(batch.logit_rows).to(hidden.device)
        parts = [
            sample(self.decoder.logits(hidden[rows[part]]), batch.sampling.rows(part)) for part in slices(len(rows))
        ]
        return join(parts) if len(parts) != 1 else parts[0]

    @torch.inference_mode()
    def logits(self, batch: Batch) -> F32:
        """The logits of the step's logit rows [L, vocab], unsampled: for tests and evaluation."""
        hidden = self.decoder.hidden(batch, self.attention)
        return self.decoder.logits(hidden[torch.from_numpy(batch.logit_rows).to(hidden.device)]).cpu().numpy()


def slices(count: int) -> list[slice]:
    """Runs of `count` logit rows that may be in memory together."""
    return [slice(first, first + LOGIT_SLICE) for first in range(0, count, LOGIT_SLICE)]


def join(parts: list[StepOutput]) -> StepOutput:
    """One output of several slices, in order; empty when there are none."""
    if not parts:
        return StepOutput(np.empty(0, np.int32), None, None, None)
    rows = [[getattr(part, name) for part in parts] for name in ("tokens", "logprobs", "top_ids", "top_logprobs")]
    tokens, logprobs, ids, values = (None if any(x is None for x in row) else np.concatenate(row) for row in rows)
    assert tokens is not None
    return StepOutput(tokens, logprobs, ids, values)
