"""Batches made by hand, for tests that run a model without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from models.base import Batch
from models.plain_batch import plain_batch


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence that a step computes, from position `start` on, its pages in `pages`."""

    tokens: Sequence[int]
    pages: Sequence[int]
    start: int = 0


def step(
    pieces: Sequence[Piece], copies: Sequence[tuple[int, int]] = (), logit_rows: Sequence[int] | None = None
) -> Batch:
    """One step over `pieces`, with the logits of every row unless told otherwise."""
    table = np.zeros((len(pieces), max(len(p.pages) for p in pieces)), np.int32)
    for row, piece in zip(table, pieces, strict=True):
        row[: len(piece.pages)] = piece.pages
    tokens = np.concatenate([np.asarray(p.tokens, np.int32) for p in pieces])
    rows = np.arange(len(tokens), dtype=np.int32) if logit_rows is None else np.array(logit_rows, np.int32)
    batch = plain_batch(
        tokens, table, starts=[p.start for p in pieces], counts=[len(p.tokens) for p in pieces], logit_rows=rows
    )
    return replace(batch, copies=(np.array(copies, np.int32).reshape(-1, 2),))
