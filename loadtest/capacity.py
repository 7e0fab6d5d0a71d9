"""Search for the highest rate that a server keeps an objective at. Knows servers only as a yes or no for a rate."""

from __future__ import annotations

from collections.abc import Callable

PRECISION = 0.05
LEAST, MOST = 1 / 64, 1024  # times the first rate, beyond which the search gives up


def highest_rate(keeps: Callable[[float], bool], first: float) -> float:
    """The highest rate found at which `keeps`, to within 5%; 0 when none near `first` does.

    Doubles until it does not, then halves the interval: as if what is kept at a rate were kept at every lower one.
    """
    low, high = 0.0, float("inf")
    rate = first
    while high - low > PRECISION * low:
        if not first * LEAST <= rate <= first * MOST:
            return low
        if keeps(rate):
            low = rate
        else:
            high = rate
        rate = 2 * low if high == float("inf") else (low + high) / 2
    return low
