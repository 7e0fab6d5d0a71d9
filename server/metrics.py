"""What Prometheus scrapes.

Counters and histograms are fed by the tasks that answer requests and by the engine's step callback, all on the event
loop; gauges are read from the engine when someone scrapes. One registry per application. No label ever holds text from
a client, so the number of series is fixed.

Time to first token counts from the arrival of the request, queue included. A token that came with others in one update
counts in the inter-token latency as the mean of what that update took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from scheduler.engine import Engine
    from scheduler.journal import StepRecord

SECONDS = (
    0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.4, 0.6, 1, 1.5, 2.5, 4, 6, 10, 15,
    30, 60, 120, 300, 600,
)  # fmt: skip
STEP_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# A second series for each, which nobody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]

OUTCOMES = ("stop", "length", "cancelled", "error", "refused")


class Metrics:
    """All series of one server."""

    def __init__(self, version: str, startup_seconds: Mapping[str, float] | None = None) -> None:
        registry = self.registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"octavo_{name}_seconds", text, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"octavo_{name}", text, labels, registry=registry)

        def sizes(name: str, text: str, buckets: tuple[int, ...]) -> Histogram:
            return Histogram(f"octavo_{name}", text, buckets=buckets, registry=registry)

        self.first_token = seconds("time_to_first_token", "From a request's arrival to its first token.")
        self.token_gap = seconds("inter_token_latency", "Between one token of a choice and the next.")
        self.per_token = seconds("time_per_output_token", "Mean per request, first token excluded.")
        self.duration = seconds("request_duration", "From a request's arrival to the end of its answer.")
        self.queue_time = seconds("queue_time", "From a request's arrival to its first step.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were computed or found in the cache.")
        self.cached_tokens = counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache.")
        self.generated_tokens = counter("generated_tokens", "Tokens generated, stop tokens included.")
        self.prompt_sizes = sizes("request_prompt_tokens", "Prompt tokens per request.", TOKENS)
        self.answer_sizes = sizes("request_generated_tokens", "Generated tokens per request, all choices.", TOKENS)
        requests = counter("requests", "Generation requests by how they ended.", "outcome")
        self.outcomes = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self.responses = counter("http_responses", "HTTP responses by status code.", "status")
        self.preemptions = counter("preemptions", "Sequences that gave up their pages to others.")
        self.step_errors = counter("step_errors", "Steps that failed.")
        phases = Histogram(
            "octavo_step_seconds", "Duration of a step by phase.", ("phase",), buckets=STEP_SECONDS, registry=registry
        )
        self.plan_phase, self.run_phase, self.apply_phase = map(phases.labels, ("plan", "run", "apply"))
        self.step_rows = sizes("step_rows", "Token rows in a step.", ROWS)
        self.prefill_rows = counter("prefill_tokens", "Token rows of prompts, recomputed ones included.")
        Gauge("octavo_build_info", "The version, as a label.", ("version",), registry=registry).labels(version).set(1)
        startup = Gauge("octavo_startup_seconds", "Each phase of the start.", ("phase",), registry=registry)
        for phase, duration in (startup_seconds or {}).items():
            startup.labels(phase).set(duration)

    def watch(self, engine: Engine) -> None:
        """Read the engine's state at each scrape. To be called once."""
        self.registry.register(EngineCollector(engine))

    def on_step(self, step: StepRecord) -> None:
        """The engine's callback after each step."""
        self.plan_phase.observe(step.plan_seconds)
        self.run_phase.observe(step.run_seconds)
        self.apply_phase.observe(step.apply_seconds)
        self.step_rows.observe(step.rows)
        if step.prefill_tokens:
            self.prefill_rows.inc(step.prefill_tokens)
        if step.cached_tokens:
            self.cached_tokens.inc(step.cached_tokens)
        if step.preempted:
            self.preemptions.inc(len(step.preempted))
        if step.error is not None:
            self.step_errors.inc()

    def exposition(self) -> bytes:
        """The text Prometheus reads."""
        return generate_latest(self.registry)


class EngineCollector(Collector):
    """Gauges that are the engine's own state."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        engine = self._engine
        pages = engine.kv.stats()
        yield _gauge("octavo_requests_running", "Sequences in the running batch.", engine.running)
        yield _gauge("octavo_requests_waiting", "Sequences waiting for a place in it.", engine.waiting)
        yield _gauge("octavo_engine_healthy", "Whether steps can be run.", engine.healthy)
        family = GaugeMetricFamily("octavo_kv_pages", "Pages of the KV cache by state.", labels=["state"])
        for state, count in (("free", pages.free), ("evictable", pages.evictable), ("used", pages.used)):
            family.add_metric([state], count)
        yield family
        yield CounterMetricFamily("octavo_kv_evicted_pages", "Cached pages given up.", value=pages.evicted_pages)
        tier = engine.kv.tier
        if tier is not None:
            moved = CounterMetricFamily("octavo_kv_tier_pages", "Which way evicted pages went.", labels=["way"])
            for way, count in tier.counts.items():
                moved.add_metric([way], count)
            costs = {"store_page": tier.costs.store_page, "load_page": tier.costs.load_page}
            costs["compute_page"] = tier.costs.compute_token * tier.page_size
            measured = GaugeMetricFamily("octavo_kv_tier_seconds", "What decides the way.", labels=["what"])
            for what, seconds in costs.items():
                measured.add_metric([what], seconds)
            yield from (moved, measured, _gauge("octavo_kv_tier_used_pages", "Pages in the second tier.", tier.used))
        yield CounterMetricFamily("octavo_prefix_query_tokens", "Looked up in the cache.", value=pages.query_tokens)
        yield CounterMetricFamily("octavo_prefix_hit_tokens", "Found there.", value=pages.hit_tokens)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
