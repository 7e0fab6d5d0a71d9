"""Search for the highest rate that a server keeps an objective at. Knows servers only as a yes or no for a rate."""

from __future__ import annotations

from collections.abc import Callable

PRECISION = 0.05
LEAST_SHARE = 1 / 64  # of the first rate, below which the search gives up


def highest_rate(keeps: Callable[[float], bool], first: float) -> float:
    """The highest rate found at which `keeps`, to within 5%; 0 when none near `first` does.

    Doubles until it does not, then halves the interval: as if what is kept at a rate were kept at every lower one.
    """
    low, high = 0.0, float("inf")
    rate = first
    while high - low > PRECISION * low:
        if rate < first * LEAST_SHARE:
            return 0.0
        if keeps(rate):
            low = rate
        else:
            high = rate
        rate = 2 * low if high == float("inf") else (low + high) / 2
    return low
