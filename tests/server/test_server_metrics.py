"""/metrics tells what clients saw."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture
def fresh(serving: Any) -> Any:
    with serving() as server:
        yield server


def series(server: Any) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    return {(sample.name, tuple(sample.labels.items())) for family in families for sample in family.samples}


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
    assert fresh.metric("octavo_queue_time_seconds_count") == 8
    assert fresh.metric("octavo_inter_token_latency_seconds_count") == 45 + 9 + 2 * (usage - 1)
    assert fresh.metric("octavo_http_responses_total", status="400") == 1
    assert fresh.metric("octavo_step_rows_count") == fresh.metric("octavo_step_seconds_count", phase="run") > 0
    total = fresh.metric("octavo_time_to_first_token_seconds_sum")
    assert 0 < total < fresh.metric("octavo_request_duration_seconds_sum")


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


def test_no_client_makes_new_series(fresh: Any) -> None:
    fresh.complete("Hello")
    fresh.http.get("/nothing")
    fresh.http.put("/health")
    fresh.post(prompt="x", n=0)
    before = series(fresh)
    for number in range(20):
        fresh.http.get(f"/random/{number}")
        fresh.http.request("PUT", f"/other/{number}")
        fresh.complete(f"Prompt {number}", max_tokens=1, user=f"user-{number}", request_id=f"id-{number}")
    assert series(fresh) == before


def test_names_follow_the_conventions(fresh: Any) -> None:
    text = fresh.http.get("/metrics").text
    for family in text_string_to_metric_families(text):
        assert family.name.startswith(("octavo_", "process_"))
        assert family.documentation
