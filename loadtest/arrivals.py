"""When the requests of an open loop come: seconds from the start, at a mean rate. Pure functions of a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import accumulate


def due(arrivals: str, rate: float, count: int, seed: int) -> list[float]:
    """When each of `count` requests comes. Raises ValueError for a process that is none of

    poisson    each independent of the others
    constant   one every 1/rate seconds
    burst:8    eight at once, such bursts as a Poisson process
    ramp:4     Poisson whose rate goes evenly from `rate` to 4
    """
    name, _, number = arrivals.partition(":")
    if name == "constant" and not number:
        return [place / rate for place in range(count)]
    try:
        value = float(number or 1)
    except ValueError:
        value = 0.0  # which nothing can be
    if name == "burst" and 1 <= value < math.inf:
        bursts = list(accumulate(_gaps(rate / value, math.ceil(count / value), seed)))
        return [bursts[int(place // value)] for place in range(count)]
    if (name == "poisson" and not number) or (name == "ramp" and 0 < value < math.inf):
        last = rate if name == "poisson" else value
        # The expected number of arrivals by time t is rate t + slope t^2 / 2: its inverse at unit-rate arrivals.
        slope = (last * last - rate * rate) / (2 * count)
        units = accumulate(_gaps(1.0, count, seed))
        return [2 * unit / (rate + math.sqrt(max(0.0, rate * rate + 2 * slope * unit))) for unit in units]
    raise ValueError(f"{arrivals!r} is none of poisson, constant, burst:SIZE and ramp:RATE")


def _gaps(rate: float, count: int, seed: int) -> Iterator[float]:
    chance = random.Random(seed)
    return (chance.expovariate(rate) for _ in range(count))
