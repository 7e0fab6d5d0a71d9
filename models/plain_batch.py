"""A runner and batches without a scheduler, greedy and with pages handed in: for evaluating and measuring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from models.base import I32, Batch
from models.loading.checkpoint import Checkpoint
from models.sampling import SamplingBatch

if TYPE_CHECKING:
    from models.cpu.pages import KVDtype
    from models.cpu.runner import CpuRunner
    from models.cpu.weights import WeightFormat


def plain_runner(checkpoint: Checkpoint, weights: WeightFormat, threads: int, max_length: int) -> CpuRunner:
    """The CPU kernels, with keys and values as they are served beside such weights. Raises KernelError."""
    from models.cpu.library import load_library
    from models.cpu.runner import CpuRunner

    plain = weights in ("float32", "bfloat16") or load_library().octavo_has_tiles()
    kv_dtype: KVDtype = "float32" if weights == "float32" else "bfloat16" if plain else "int8"
    return CpuRunner(checkpoint, weights=weights, kv_dtype=kv_dtype, threads=threads, max_length=max_length)


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
        sampling=SamplingBatch(
            temperature=np.zeros(len(rows), np.float32),
            top_p=np.ones(len(rows), np.float32),
            top_k=np.zeros(len(rows), np.int32),
            min_p=np.zeros(len(rows), np.float32),
            seed=np.zeros(len(rows), np.int64),
            position=positions[rows] + 1,
            target=np.full(len(rows), -1, np.int32),
            num_logprobs=-1,
        ),
    )
