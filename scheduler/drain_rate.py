"""How fast sequences leave the engine, to tell those refused when to come back.

Owned by the engine's task. The engine says when it is idle: time without work would make it look slow.
"""

from __future__ import annotations

import math
from collections import deque

WINDOW_SECONDS = 60.0
MAX_RETRY_SECONDS = 600.0


class DrainRate:
    """Departures per second, measured over the last minute of work, at most 256 of them."""

    def __init__(self) -> None:
        self._departures: deque[float] = deque(maxlen=256)
        self._busy_since: float | None = None
        self._last_rate: float | None = None  # of the work before the engine was last idle

    def busy(self, now: float) -> None:
        if self._busy_since is None:
            self._busy_since = now

    def idle(self, now: float) -> None:
        self._last_rate = self.per_second(now)
        self._departures.clear()
        self._busy_since = None

    def note(self, now: float) -> None:
        """A sequence has left."""
        self._departures.append(now)

    def per_second(self, now: float) -> float | None:
        """None until something has been measured."""
        departures = self._departures
        while departures and departures[0] < now - WINDOW_SECONDS:
            departures.popleft()
        if not departures or self._busy_since is None:
            return self._last_rate
        since = departures[0] if len(departures) == departures.maxlen else self._busy_since
        span = now - max(since, now - WINDOW_SECONDS)
        return len(departures) / span if span > 0 else self._last_rate

    def retry_after_seconds(self, departures: float, now: float) -> float:
        """Whole seconds until that many will have left, between 1 and 600; 1 when nothing has been measured."""
        rate = self.per_second(now)
        if not rate:
            return 1.0
        return float(min(MAX_RETRY_SECONDS, max(1, math.ceil(departures / rate))))
