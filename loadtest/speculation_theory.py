"""What speculative decoding should give: tokens a step and speedup, by formula and by simulation.

Pure functions. A draft is the lengths of its paths from the root: `(6,)` is a chain of six tokens, `(3, 3)` a tree of
two branches and three levels, which costs as many drafted rows. Every path but the first has a first token of its own.

Source of the formula: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML
2023, equation 1.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Mapping, Sequence


def tokens_of_chain(acceptance: float, drafted: int) -> float:
    """Expected tokens of a step, (1 - a^(K+1)) / (1 - a): what is accepted of K, and the one that comes for nothing."""
    return sum(acceptance**length for length in range(drafted + 1))


def simulate(draft: Sequence[int], acceptance: float, second: float = 0.0, steps: int = 10_000, seed: int = 1) -> float:
    """Mean tokens of a step. `acceptance` is of a token whose prefix was accepted; `second` that of a branch's first
    token once the branches before it were wrong."""
    chance = random.Random(seed)
    tokens = 0
    for _ in range(steps):
        tokens += 1
        for branch, length in enumerate(draft):
            if chance.random() < (second if branch else acceptance):
                tokens += 1
                for _ in range(length - 1):
                    if chance.random() >= acceptance:
                        break
                    tokens += 1
                break
    return tokens / steps


def step_cost(costs: Mapping[int, float], rows: int) -> float:
    """Seconds of a step of so many rows, from a table of some: linear between those and beyond. Needs two."""
    known = sorted(costs)
    upper = min(max(bisect.bisect_left(known, rows), 1), len(known) - 1)
    low, high = known[upper - 1], known[upper]
    return costs[low] + (costs[high] - costs[low]) * (rows - low) / (high - low)


def speedup(tokens: float, draft: Sequence[int], costs: Mapping[int, float]) -> float:
    """Against one token a step. Every path has a row for the last token known too; drafting costs nothing."""
    return tokens * step_cost(costs, 1) / step_cost(costs, sum(draft) + len(draft))
