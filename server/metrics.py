"""What Prometheus scrapes: every series of one server.

Counters and histograms are fed by the tasks that answer requests and by the engine's step callback, all on the event
loop; gauges are read from the engine when someone scrapes (`server.metrics_engine`). One registry per application. No
label ever holds text from a client, so the number of series is fixed.

Time to first token counts from the arrival of the request, queue included. A token that came with others in one update
counts in the inter-token latency as the mean of what that update took.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Multiset
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

from server.metrics_engine import EngineCollector
from server.metrics_vllm import VLLMNames

if TYPE_CHECKING:
    from models.roofline import Roofline
    from scheduler.engine import Engine
    from scheduler.journal import StepRecord

SECONDS = (
    0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.4, 0.6, 1, 1.5, 2.5, 4, 6, 10, 15,
    30, 60, 120, 300, 600,
)  # fmt: skip
STEP_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ACCEPTED = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
# A second series for each, which nobody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]

OUTCOMES = ("stop", "length", "cancelled", "error", "refused")
REFUSALS = (
    "too_long", "queued_requests", "queued_tokens", "queued_share", "queued_seconds", "key_limit", "deadline",
    "not_accepting",
)  # fmt: skip
MAX_POSITION = 16  # in a draft; what comes later counts there too
LAG_INTERVAL_SECONDS = 0.1


class Metrics:
    """All series of one server. `model` is what is known of it, as labels; `vllm_model` adds vLLM's names for it."""

    def __init__(
        self,
        version: str,
        startup_seconds: Mapping[str, float] | None = None,
        model: Mapping[str, str] | None = None,
        roofline: Roofline | None = None,
        vllm_model: str | None = None,
    ) -> None:
        registry = self.registry = CollectorRegistry()
        self._roofline = roofline
        self._vllm_model = vllm_model
        self._vllm: CollectorRegistry | None = None
        self._engine: EngineCollector | None = None
        ProcessCollector(registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"octavo_{name}", text, labels, buckets=buckets, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return histogram(f"{name}_seconds", text, SECONDS)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"octavo_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, values: Mapping[str, float], label: str) -> None:
            family = Gauge(f"octavo_{name}", text, (label,), registry=registry)
            for key, value in values.items():
                family.labels(key).set(value)

        self.first_token = seconds("time_to_first_token", "From a request's arrival to its first token.")
        self.token_gap = seconds("inter_token_latency", "Between one token of a choice and the next.")
        self.per_token = seconds("time_per_output_token", "Mean per request, first token excluded.")
        self.duration = seconds("request_duration", "From a request's arrival to the end of its answer.")
        self.queue_time = seconds("queue_time", "From a request's arrival to its first step.")
        self.prefill_time = seconds("prefill_time", "From a request's first step to its first token.")
        self.decode_time = seconds("decode_time", "From a request's first token to its last.")
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts that were computed or found in the cache.")
        self.cached_tokens = counter("cached_prompt_tokens", "Prompt tokens found in the prefix cache.")
        self.generated_tokens = counter("generated_tokens", "Tokens generated, stop tokens included.")
        self.prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens per request.", TOKENS)
        self.answer_sizes = histogram("request_generated_tokens", "Generated tokens per request, all choices.", TOKENS)
        requests = counter("requests", "Generation requests by how they ended.", "outcome")
        self.outcomes = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
        self._refusals = counter("refused_requests", "Generation requests that were not queued, by why.", "reason")
        for reason in REFUSALS:
            self._refusals.labels(reason)
        self.errors = counter("errors", "Answers that were errors or ended with one, by its code.", "code")
        self.responses = counter("http_responses", "HTTP responses by status code.", "status")

        self.preemptions = counter("preemptions", "Sequences that gave up their pages to others.")
        self.step_errors = counter("step_errors", "Steps that failed.")
        phases = histogram("step_seconds", "Duration of a step by phase; mask is a part of run.", STEP_SECONDS, "phase")
        self.wait_phase, self.plan_phase, self.run_phase, self.mask_phase, self.apply_phase = map(
            phases.labels, ("wait", "plan", "run", "mask", "apply")
        )
        self.step_rows = histogram("step_rows", "Token rows in a step, drafted ones included.", ROWS)
        self.step_sequences = histogram("step_sequences", "Sequences in a step.", SEQUENCES)
        self.prefill_rows = counter("prefill_tokens", "Token rows of prompts, recomputed ones included.")
        self.decode_rows = counter("decode_tokens", "Token rows of answers.")
        self.read_bytes = counter("step_read_bytes", "Weights, keys and values that steps had to read.")
        self.operations = counter("step_operations", "Arithmetic operations of the steps' matrix products.")
        self.drafted = counter("spec_drafted_tokens", "Drafted tokens that were verified.", "proposer", "position")
        self.accepted = counter("spec_accepted_tokens", "Of them, those that were right.", "proposer", "position")
        self.acceptance = histogram("spec_acceptance_length", "Tokens that one verification gave.", ACCEPTED)
        self.loop_lag = histogram("event_loop_lag_seconds", "How late the event loop wakes its tasks.", STEP_SECONDS)

        gauge("startup_seconds", "Each phase of the start.", startup_seconds or {}, "phase")
        gauge("build_info", "The version, as a label.", {version: 1}, "version")
        if model:
            info = Gauge("octavo_model_info", "What is served, as labels.", tuple(model), registry=registry)
            info.labels(**model).set(1)
        if roofline is not None and roofline.best is not None:
            best = dict(zip(("read_bytes", "operations"), roofline.best, strict=True))
            gauge("roofline_per_second", "The best that this machine was seen to do.", best, "what")

    def watch(self, engine: Engine) -> None:
        """Read the engine's state at each scrape. To be called once."""
        self._engine = EngineCollector(engine)
        self.registry.register(self._engine)
        if self._vllm_model is not None:
            self._vllm = CollectorRegistry()
            self._vllm.register(VLLMNames(self.registry, engine.kv.page_size, self._vllm_model))

    def refuse(self, reason: str) -> None:
        """Count a request that was not queued; `reason` is one of a few words."""
        self.outcomes["refused"].inc()
        self._refusals.labels(reason).inc()

    def on_step(self, step: StepRecord) -> None:
        """The engine's callback after each step."""
        self.plan_phase.observe(step.plan_seconds)
        self.run_phase.observe(step.run_seconds)
        self.apply_phase.observe(step.apply_seconds)
        if step.wait_seconds:
            self.wait_phase.observe(step.wait_seconds)
        if step.mask_seconds:
            self.mask_phase.observe(step.mask_seconds)
        rows = step.rows + step.drafted_tokens
        self.step_rows.observe(rows)
        self.step_sequences.observe(len(step.sequences))
        self.prefill_rows.inc(step.prefill_tokens)
        self.decode_rows.inc(step.decode_rows)
        self.cached_tokens.inc(step.cached_tokens)
        self.preemptions.inc(len(step.preempted))
        if self._roofline is not None:
            cost = self._roofline.cost
            self.read_bytes.inc(cost.bytes_read(step.context_tokens))
            logit_rows = step.sampled_tokens + step.drafted_tokens
            self.operations.inc(cost.operations(rows, logit_rows, step.attended_tokens))
        if step.drafts:
            self._on_drafts(step.drafts)
        if step.error is not None:
            self.step_errors.inc()

    def _on_drafts(self, drafts: Iterable[tuple[str, int, int]]) -> None:
        tried, right = Multiset[tuple[str, int]](), Multiset[tuple[str, int]]()
        for proposer, drafted, accepted in drafts:
            self.acceptance.observe(accepted + 1)
            places = [(proposer, min(position, MAX_POSITION)) for position in range(1, drafted + 1)]
            tried.update(places)
            right.update(places[:accepted])
        for place, count in tried.items():
            self.drafted.labels(*place).inc(count)
            self.accepted.labels(*place).inc(right[place])

    async def watch_loop(self) -> None:
        """Measure the event loop that this runs in, until cancelled."""
        while True:
            due = time.monotonic() + LAG_INTERVAL_SECONDS
            await asyncio.sleep(LAG_INTERVAL_SECONDS)
            self.loop_lag.observe(max(0.0, time.monotonic() - due))

    async def exposition(self) -> bytes:
        """The text Prometheus reads. The engine is read on its event loop; the text takes longer, and a thread."""
        if self._engine is not None:
            self._engine.read()
        return await asyncio.to_thread(self._text)

    def _text(self) -> bytes:
        return generate_latest(self.registry) + (b"" if self._vllm is None else generate_latest(self._vllm))
