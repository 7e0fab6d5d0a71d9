"""Comparing and cutting runs of tokens and pages, whole arrays at a time.

Pure functions. Knows nothing of the tree.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.pool import I32


def common_length(run: I32, tokens: I32) -> int:
    """How many tokens two runs share from their beginning."""
    length = min(run.size, tokens.size)
    different = run[:length] != tokens[:length]
    first = int(different.argmax()) if length else 0
    return first if length and different[first] else length


def first_of(run: I32, length: int) -> I32:
    """run[:length], as a view unless that would keep a much longer run in memory."""
    owner = run if run.base is None else run.base
    return run[:length] if isinstance(owner, np.ndarray) and owner.size <= 2 * length else run[:length].copy()


def count_until(gains: npt.NDArray[np.bool_], wanted: int) -> int:
    """How many entries to take from the front to gain `wanted`; all of them if that is not enough."""
    return min(gains.size, int(np.searchsorted(np.cumsum(gains), wanted)) + 1)
