"""What one API key may use: so many choices at once, so many requests and tokens a minute.

Requests and tokens are taken from buckets that refill steadily and hold a minute's worth. A request is let in while its
key's buckets are not empty, and may leave them in debt: prompts are taken when a request is queued, answers when they
end, so nobody is refused for tokens that were never generated. What is refused takes nothing.

Owned by the event loop. Holds a few numbers for each key with limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from server.errors import Overloaded, wrong
from server.keys import Key, KeyRing

if TYPE_CHECKING:
    from scheduler.engine import Engine


class _Bucket:
    """Refills at `per_minute`, up to as much; below zero is debt."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, amount: int, now: float) -> None:
        self._level = self._level_at(now) - amount
        self._at = now

    def seconds_until_one(self, now: float) -> float:
        return max(0.0, (1 - self._level_at(now)) * 60 / self.per_minute)

    def _level_at(self, now: float) -> float:
        return min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)


class KeyLimits:
    """The buckets of all keys, by name: they outlast a change of the key itself."""

    def __init__(self, keys: KeyRing, engine: Engine, clock: Callable[[], float]) -> None:
        self._keys = keys
        self._engine = engine
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}

    def admit(self, key_id: str, choices: int, field: str) -> Callable[[int], None]:
        """A function to call with tokens as they are used: with those of the prompts when the choices are queued, with
        those of the answers when they end.

        Raises Overloaded, and InvalidRequest, naming the field, for more choices than the key may ever have.
        """
        key = self._keys.by_id(key_id)
        if key is None:
            return lambda tokens: None
        now, most = self._clock(), key.max_concurrent or math.inf
        if choices > most:
            raise wrong(field, f"asks for {choices} choices, and your key may have no more than {most} at once")
        if (active := self._engine.active_of(key_id)) + choices > most:
            rate = self._engine.drain_rate or 1.0
            message = f"Your key may have no more than {most} choices at once, and has {active}."
            raise Overloaded(message, retry_after_seconds=min(60.0, 1 / rate))
        asked = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        buckets = {unit: self._bucket(key, unit, limit, now) for unit, limit in asked.items() if limit is not None}
        for unit, bucket in buckets.items():
            if wait := bucket.seconds_until_one(now):
                raise Overloaded(f"Your key may use {bucket.per_minute} {unit} a minute, and has.", wait)

        queued = False

        def spend(tokens: int) -> None:
            nonlocal queued
            for unit, bucket in buckets.items():
                bucket.take(tokens if unit == "tokens" else 0 if queued else choices, self._clock())
            queued = True

        return spend

    def _bucket(self, key: Key, unit: str, per_minute: int, now: float) -> _Bucket:
        bucket = self._buckets.get((key.name, unit))
        if bucket is None or bucket.per_minute != per_minute:
            bucket = self._buckets[key.name, unit] = _Bucket(per_minute, now)
        return bucket
