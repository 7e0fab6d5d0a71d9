"""Gauges and counters that are the engine's own state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from scheduler.engine import Engine

WAITING_REASONS = ("budget", "queue", "slots", "pages", "prefix", "prompt")


class EngineCollector(Collector):
    """Gives what was last read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.read()

    def collect(self) -> Iterable[Metric]:
        return self._families

    def read(self) -> None:
        """On the event loop: the engine's state changes there."""
        self._families = list(self._state())

    def _state(self) -> Iterator[Metric]:
        engine = self._engine
        pages = engine.kv.stats()
        yield _gauge("requests_running", "Sequences in the running batch.", engine.running)
        yield _gauge("requests_waiting", "Sequences waiting for a place in it.", engine.waiting)
        last = engine.journal.steps[-1].waiting_reasons if engine.waiting and engine.journal.steps else {}
        reasons = {reason: last.get(reason, 0) for reason in WAITING_REASONS}
        yield _gauges("requests_waiting_by_reason", "The same by why, at the last step.", "reason", reasons)
        yield _gauge("engine_healthy", "Whether steps can be run.", engine.healthy)
        states = {"free": pages.free, "evictable": pages.evictable, "used": pages.used}
        yield _gauges("kv_pages", "Pages of the KV cache by state.", "state", states)
        yield _counter("kv_evicted_pages", "Cached pages given up.", pages.evicted_pages)
        yield _counter("prefix_query_tokens", "Looked up in the cache.", pages.query_tokens)
        yield _counter("prefix_hit_tokens", "Found there.", pages.hit_tokens)
        tier = engine.kv.tier
        if tier is None:
            return
        moved = CounterMetricFamily("octavo_kv_tier_pages", "Which way evicted pages went.", labels=["way"])
        for way, count in tier.counts.items():
            moved.add_metric([way], count)
        yield moved
        costs = {"store_page": tier.costs.store_page, "load_page": tier.costs.load_page}
        costs["compute_page"] = tier.costs.compute_token * tier.page_size
        yield _gauges("kv_tier_seconds", "What decides the way.", "what", costs)
        yield _gauge("kv_tier_used_pages", "Pages in the second tier.", tier.used)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"octavo_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"octavo_{name}", text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"octavo_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
