"""Batches without a scheduler: greedy, one layer group, pages handed in. For evaluating and measuring a runner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from models.base import I32, Batch
from models.sampling import SamplingBatch


def plain_batch(
    tokens: I32, tables: I32, *, starts: Sequence[int], counts: Sequence[int], logit_rows: I32 | None = None
) -> Batch:
    """One step over S sequences: `counts[s]` rows of sequence s, the first at position `starts[s]`.

    tokens [T], the sequences' rows one after the other; tables [S, pages]. Logits of each sequence's last row unless
    told otherwise.
    """
    ends = np.cumsum(counts, dtype=np.int32)
    rows = ends - 1 if logit_rows is None else logit_rows
    positions = np.concatenate(
        [np.arange(start, start + count, dtype=np.int32) for start, count in zip(starts, counts, strict=True)]
    )
    return Batch(
        token_ids=tokens,
        positions=positions,
        query_starts=np.concatenate((np.zeros(1, np.int32), ends)),
        lengths=np.asarray(starts, np.int32) + np.asarray(counts, np.int32),
        page_tables=(tables,),
        copies=(np.zeros((0, 2), np.int32),),
        logit_rows=rows,
        sampling=_greedy(positions[rows] + 1),
    )


def _greedy(positions: I32) -> SamplingBatch:
    count = len(positions)
    return SamplingBatch(
        temperature=np.zeros(count, np.float32),
        top_p=np.ones(count, np.float32),
        top_k=np.zeros(count, np.int32),
        min_p=np.zeros(count, np.float32),
        seed=np.zeros(count, np.int64),
        position=positions,
        target=np.full(count, -1, np.int32),
        num_logprobs=-1,
    )
