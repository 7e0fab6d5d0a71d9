"""Batches made by hand, for tests that run a model without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.base import Batch
from models.sampling import SamplingBatch


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence that a step computes, from position `start` on, its pages in `pages`."""

    tokens: Sequence[int]
    pages: Sequence[int]
    start: int = 0


def greedy(rows: int) -> SamplingBatch:
    """Take the most likely token in every row."""
    return SamplingBatch(
        temperature=np.zeros(rows, np.float32),
        top_p=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        min_p=np.zeros(rows, np.float32),
        seed=np.zeros(rows, np.int64),
        position=np.zeros(rows, np.int32),
        target=np.full(rows, -1, np.int32),
        num_logprobs=-1,
    )


def step(
    pieces: Sequence[Piece], copies: Sequence[tuple[int, int]] = (), logit_rows: Sequence[int] | None = None
) -> Batch:
    """One step over `pieces`, with the logits of every row unless told otherwise."""
    width = max(len(p.pages) for p in pieces)
    table = np.zeros((len(pieces), width), np.int32)
    for row, piece in zip(table, pieces, strict=True):
        row[: len(piece.pages)] = piece.pages
    count = sum(len(p.tokens) for p in pieces)
    rows = np.arange(count, dtype=np.int32) if logit_rows is None else np.array(logit_rows, np.int32)
    return Batch(
        token_ids=np.concatenate([np.asarray(p.tokens, np.int32) for p in pieces]),
        positions=np.concatenate([np.arange(p.start, p.start + len(p.tokens), dtype=np.int32) for p in pieces]),
        query_starts=np.cumsum([0] + [len(p.tokens) for p in pieces]).astype(np.int32),
        lengths=np.array([p.start + len(p.tokens) for p in pieces], np.int32),
        page_tables=(table,),
        copies=(np.array(copies, np.int32).reshape(-1, 2),),
        logit_rows=rows,
        sampling=greedy(len(rows)),
    )
