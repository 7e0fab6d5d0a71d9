"""/metrics tells what clients saw."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from models.roofline import Roofline
from models.step_cost import StepCost
from scheduler.journal import StepRecord
from server.errors import APIError
from server.metrics import OUTCOMES, Metrics


@pytest.fixture
def fresh(serving: Any) -> Any:
    with serving() as server:
        yield server


def series(server: Any) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {(sample.name, tuple(sample.labels.items())) for family in families for sample in family.samples}


@pytest.mark.case(95)
def test_requests_and_tokens_add_up(fresh: Any) -> None:
    for _ in range(5):
        fresh.complete("Hello", max_tokens=10, ignore_eos=True)
    fresh.complete("Hello", max_tokens=4, ignore_eos=True, n=3)
    fresh.script("Short", "yes")
    fresh.complete("Short", max_tokens=50)
    fresh.post(prompt="x", n=0)
    assert fresh.metric("octavo_requests_total", outcome="length") == 6
    assert fresh.metric("octavo_requests_total", outcome="stop") == 1
    usage = fresh.complete("Short", max_tokens=50)["usage"]["completion_tokens"]
    assert fresh.metric("octavo_generated_tokens_total") == 50 + 12 + 2 * usage
    assert fresh.metric("octavo_time_to_first_token_seconds_count") == 8
    assert fresh.metric("octavo_request_duration_seconds_count") == 8
    for name in ("queue", "prefill", "decode"):
        assert fresh.metric(f"octavo_{name}_time_seconds_count") == 8
    parts = [fresh.metric(f"octavo_{name}_time_seconds_sum") for name in ("queue", "prefill", "decode")]
    assert 0 < sum(parts) <= fresh.metric("octavo_request_duration_seconds_sum")
    assert fresh.metric("octavo_inter_token_latency_seconds_count") == 45 + 9 + 2 * (usage - 1)
    assert fresh.metric("octavo_http_responses_total", status="400") == 1
    assert fresh.metric("octavo_step_rows_count") == fresh.metric("octavo_step_seconds_count", phase="run") > 0
    total = fresh.metric("octavo_time_to_first_token_seconds_sum")
    assert 0 < total < fresh.metric("octavo_request_duration_seconds_sum")


@pytest.mark.case(95)
def test_every_request_has_one_outcome_and_every_error_its_code(serving: Any) -> None:
    with serving(limits={"max_num_seqs": 1, "max_queued_requests": 0, "max_model_len": 64}) as server:
        server.complete("Hello", max_tokens=3, ignore_eos=True)
        server.runner.gate.clear()
        body = {"model": server.model, "prompt": "Hello", "stream": True, "max_tokens": 30, "ignore_eos": True}
        leaving = httpx.Client(base_url=server.url)
        thread = threading.Thread(target=lambda: _read_and_leave(leaving, body))
        thread.start()
        server.wait_until(lambda: server.engine.running == 1)
        server.error(server.post(prompt="Hello"), 429)
        server.runner.gate.set()
        thread.join(10)
        server.assert_baseline()
        server.runner.broken = RuntimeError("broken")
        server.error(server.post(prompt="Hello"), 500)
        server.error(server.post(prompt="Hello", max_tokens=1000), 400)
        server.error(server.post(prompt=[2] * 64), 400)
        server.error(server.post(prompt=3.5), 400)
        outcomes = {outcome: server.metric("octavo_requests_total", outcome=outcome) for outcome in OUTCOMES}
        assert outcomes == {"stop": 0, "length": 1, "cancelled": 1, "error": 1, "refused": 1}
        assert server.metric("octavo_refused_requests_total", reason="queued_requests") == 1
        codes = ("rate_limit_exceeded", "internal_error", "context_length_exceeded", "invalid_type")
        assert [server.metric("octavo_errors_total", code=code) for code in codes] == [1, 1, 2, 1]
        assert server.metric("octavo_step_errors_total") == 1


def _read_and_leave(client: httpx.Client, body: dict[str, Any]) -> None:
    with client, client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())


def test_who_waits_is_seen_by_why(serving: Any) -> None:
    with serving(limits={"max_num_seqs": 1}) as server:
        server.runner.gate.clear()
        threads = [threading.Thread(target=lambda: server.complete("Hello", max_tokens=9)) for _ in range(3)]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: server.engine.waiting == 2)
        server.runner.step_seconds = 0.05
        server.runner.gate.set()
        server.wait_until(lambda: server.metric("octavo_requests_waiting_by_reason", reason="slots") == 2)
        for thread in threads:
            thread.join(10)
        assert server.metric("octavo_requests_waiting_by_reason", reason="slots") == 0


def test_what_steps_read_and_compute_stands_beside_the_ceilings(serving: Any) -> None:
    cost = StepCost(layer_weights=10, head_weights=4, weight_bytes=1000, kv_bytes_per_token=8, attention_operations=6)
    with serving(metrics_options={"roofline": Roofline(cost, (5e9, 7e9))}) as server:
        server.complete([5, 6, 7], max_tokens=2, ignore_eos=True)
        server.assert_baseline()
        assert server.metric("octavo_roofline_per_second", what="read_bytes") == 5e9
        assert server.metric("octavo_roofline_per_second", what="operations") == 7e9
        assert server.metric("octavo_step_read_bytes_total") == 2 * 1000 + (3 + 4) * 8
        assert server.metric("octavo_step_operations_total") == 2 * (4 * 10 + 2 * 4) + (1 + 2 + 3 + 4) * 6


def test_what_steps_read_is_counted_where_the_ceilings_are_not_known() -> None:
    metrics = Metrics("0.0", roofline=Roofline(StepCost(1, 1, 1, 1, 1), None))
    metrics.on_step(StepRecord(1, 0.0))
    value = metrics.registry.get_sample_value
    assert value("octavo_step_read_bytes_total") == 1
    assert value("octavo_roofline_per_second", {"what": "read_bytes"}) is None


def test_drafts_are_counted_by_proposer_and_place_and_by_what_they_gave() -> None:
    metrics = Metrics("0.0")
    metrics.on_step(StepRecord(1, 0.0, drafts=(("ngram", 3, 2), ("ngram", 3, 0), ("model", 20, 20))))
    value = metrics.registry.get_sample_value

    def of(kind: str, proposer: str, position: int) -> float | None:
        labels = {"proposer": proposer, "position": str(position)}
        return value(f"octavo_spec_{kind}_tokens_total", labels)

    assert [of("drafted", "ngram", position) for position in (1, 2, 3, 4)] == [2, 2, 2, None]
    assert [of("accepted", "ngram", position) for position in (1, 2, 3)] == [1, 1, 0]
    assert [of("accepted", "model", position) for position in (15, 16, 17)] == [1, 5, None]
    assert value("octavo_spec_acceptance_length_sum") == 3 + 1 + 21
    assert value("octavo_spec_acceptance_length_count") == 3


def test_a_busy_event_loop_is_seen(fresh: Any) -> None:
    fresh.wait_until(lambda: fresh.metric("octavo_event_loop_lag_seconds_count") > 0)
    fresh.loop.call_soon_threadsafe(time.sleep, 0.3)
    fresh.wait_until(lambda: fresh.metric("octavo_event_loop_lag_seconds_sum") > 0.15)


def test_the_cache_and_its_pages_are_seen(fresh: Any) -> None:
    free = fresh.metric("octavo_kv_pages", state="free")
    for _ in range(2):
        fresh.complete("The quick brown fox jumps over the lazy dog. " * 3, max_tokens=1)
    assert fresh.metric("octavo_kv_pages", state="evictable") > 0
    pages = [fresh.metric("octavo_kv_pages", state=state) for state in ("free", "evictable", "used")]
    assert sum(pages) == free
    assert fresh.metric("octavo_prefix_hit_tokens_total") > 0
    assert fresh.metric("octavo_cached_prompt_tokens_total") > 0
    assert fresh.metric("octavo_requests_running") == 0
    assert fresh.metric("octavo_engine_healthy") == 1
    assert fresh.metric("octavo_startup_seconds", phase="weights") == 0.5
    assert fresh.metric("octavo_build_info", version="0.0") == 1


def test_a_pool_too_small_shows_preemptions_and_changes_nothing(serving: Any) -> None:
    fields = {"prompt": [f"Request {number}" for number in range(8)], "seed": 1, "max_tokens": 60, "ignore_eos": True}
    with serving() as roomy:
        expected = roomy.post(**fields, logprobs=2).json()["choices"]
        assert roomy.metric("octavo_preemptions_total") == 0
    with serving(num_pages=40) as tight:
        assert tight.post(**fields, logprobs=2).json()["choices"] == expected
        assert tight.metric("octavo_preemptions_total") > 0
        assert tight.metric("octavo_kv_evicted_pages_total") >= 0
        tight.assert_baseline()


@pytest.mark.case(46)
def test_no_client_makes_new_series(fresh: Any) -> None:
    fresh.complete("Hello")
    fresh.http.get("/nothing")
    fresh.http.put("/health")
    fresh.http.request("METHOD", "/health")
    fresh.post(prompt="x", n=0)
    fresh.post(prompt="x", model="other")
    fresh.post(prompt=[2] * 600)
    before = series(fresh)
    for number in range(20):
        headers = {"x-api-key": f"key-{number}", "x-request-id": f"id-{number}", "user-agent": f"agent-{number}"}
        fresh.http.get(f"/random/{number}", headers=headers)
        fresh.http.request("PUT", f"/other/{number}")
        fresh.http.request(f"METHOD{number}", "/health")
        fresh.complete(f"Prompt {number}", max_tokens=1, user=f"user-{number}", request_id=f"id-{number}")
        fresh.post(prompt="x", model=f"model-{number}")
        fresh.post(prompt=[2] * (600 + number))
    assert series(fresh) == before


@pytest.mark.case(46)
def test_the_number_of_series_is_bounded(fresh: Any) -> None:
    """All that a server can ever have: every error, every status, every proposer at its longest."""
    metrics = fresh.state.metrics
    for proposer in ("ngram", "suffix", "model"):
        metrics.on_step(StepRecord(1, 0.0, drafts=((proposer, 100, 100),)))
    for error in errors():
        metrics.errors.labels(error.default_code or "error").inc()
        metrics.responses.labels(str(error.status)).inc()
    assert len(series(fresh)) < 700


def errors(root: type[APIError] = APIError) -> Iterator[type[APIError]]:
    yield root
    for error in root.__subclasses__():
        yield from errors(error)


def test_names_follow_the_conventions(fresh: Any) -> None:
    text = fresh.http.get("/metrics").text
    for family in text_string_to_metric_families(text):
        assert family.name.startswith(("octavo_", "process_"))
        assert family.documentation
