"""Whether one run was better than another, or only luckier: changes with confidence intervals.

Percentile bootstrap over requests, and over seconds for throughput (Efron: Bootstrap Methods, 1979). Pure functions of
two runs' files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.tables import Row

RESAMPLES = 2000
CONFIDENCE = 0.95
Floats = NDArray[np.float64]


def rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Row]:
    """A heading, and for each set that both runs have, each figure's change. Raises ValueError when they share none."""
    theirs = {entry["kind"]: entry["details"] for entry in before["figures"] if "details" in entry}
    result: list[Row] = [("set", "figure", "before", "after", "change", "95% interval", "")]
    for entry in after["figures"]:
        if entry["kind"] in theirs and "details" in entry:
            result += _set(entry["kind"], theirs[entry["kind"]], entry["details"])
    if len(result) == 1:
        raise ValueError("the two runs have no set in common")
    return result


def _set(kind: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Row]:
    found = [
        _row(kind, f"{name} p{share} ms", before[name], after[name], share)
        for name in ("ttft", "tpot", "e2e")
        for share in (50, 99)
    ]
    # The last second is not a whole one.
    old, new = (run["pieces_by_second"][:-1] for run in (before, after))
    return [row for row in [*found, _row(kind, "pieces/s", old, new, None)] if row is not None]


def _row(kind: str, title: str, before: Sequence[Any], after: Sequence[Any], share: float | None) -> Row | None:
    """None when one of the runs has nothing to resample."""
    old, new = (np.array([value for value in run if value is not None], np.float64) for run in (before, after))
    if min(len(old), len(new)) < 2 or not _statistic(old[None, :], share)[0]:
        return None
    was, now = (float(_statistic(sample[None, :], share)[0]) for sample in (old, new))
    low, high = interval(old, new, share)
    verdict = "less" if high < 0 else "more" if low > 0 else "no difference shown"
    return (kind, title, f"{was:.4g}", f"{now:.4g}", f"{now / was - 1:+.1%}", f"{low:+.1%} to {high:+.1%}", verdict)


def interval(before: Floats, after: Floats, share: float | None, seed: int = 0) -> tuple[float, float]:
    """Where the relative change of a percentile (None: the mean) lies, with 95% confidence."""
    chance = np.random.default_rng(seed)
    old, new = (_statistic(chance.choice(sample, (RESAMPLES, len(sample))), share) for sample in (before, after))
    low, high = np.quantile(new / old - 1, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _statistic(samples: Floats, share: float | None) -> Floats:
    """Of each row."""
    result: Floats = samples.mean(axis=1) if share is None else np.percentile(samples, share, axis=1)
    return result
