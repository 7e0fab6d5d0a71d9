"""Gauges and counters that are the engine's own state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from scheduler.engine import Engine

WAITING_REASONS = ("budget", "queue", "slots", "pages", "prefix", "prompt")


def family(kind: str, name: str, text: str, *samples: tuple[Mapping[str, str], float]) -> Metric:
    """`samples` are labels with their values."""
    result = Metric(name, text, kind)
    for labels, value in samples:
        result.add_sample(name + ("_total" if kind == "counter" else ""), dict(labels), value)
    return result


class EngineCollector(Collector):
    """Gives what was last read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.read()

    def collect(self) -> Iterable[Metric]:
        return self._families

    def read(self) -> None:
        """On the event loop: the engine's state changes there."""
        self._families = [
            family(kind, f"octavo_{name}", text, *(({label: key} if label else {}, n) for key, n in values.items()))
            for kind, name, text, label, values in self._state()
        ]

    def _state(self) -> Iterator[tuple[str, str, str, str, Mapping[str, float]]]:
        """Kind, name and help of each family, the name of its label if it has one, and values by label."""
        engine, tier, pages = self._engine, self._engine.kv.tier, self._engine.kv.stats()
        yield "gauge", "requests_running", "Sequences in the running batch.", "", {"": engine.running}
        yield "gauge", "requests_waiting", "Sequences waiting for a place in it.", "", {"": engine.waiting}
        last = engine.journal.steps[-1].waiting_reasons if engine.waiting and engine.journal.steps else {}
        reasons = {reason: last.get(reason, 0) for reason in WAITING_REASONS}
        yield "gauge", "requests_waiting_by_reason", "The same by why, at the last step.", "reason", reasons
        yield "gauge", "engine_healthy", "Whether steps can be run.", "", {"": engine.healthy}
        states = {"free": pages.free, "evictable": pages.evictable, "used": pages.used}
        yield "gauge", "kv_pages", "Pages of the KV cache by state.", "state", states
        yield "counter", "kv_evicted_pages", "Cached pages given up.", "", {"": pages.evicted_pages}
        yield "counter", "prefix_query_tokens", "Looked up in the cache.", "", {"": pages.query_tokens}
        yield "counter", "prefix_hit_tokens", "Found there.", "", {"": pages.hit_tokens}
        if tier is not None:
            yield "counter", "kv_tier_pages", "Which way evicted pages went.", "way", tier.counts
            costs = {"store_page": tier.costs.store_page, "load_page": tier.costs.load_page}
            costs["compute_page"] = tier.costs.compute_token * tier.page_size
            yield "gauge", "kv_tier_seconds", "What decides the way.", "what", costs
            yield "gauge", "kv_tier_used_pages", "Pages in the second tier.", "", {"": tier.used}
