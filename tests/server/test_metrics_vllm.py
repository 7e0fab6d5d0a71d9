"""`--metrics-compat vllm`: what was made for vLLM finds here what it looks for, and the same numbers."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from scheduler.journal import StepRecord

# What the panels of vLLM's own dashboards and the Kubernetes inference gateway ask for.
ASKED_FOR = [
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_sum",
    "vllm:e2e_request_latency_seconds_count",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_sum",
    "vllm:inter_token_latency_seconds_count",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:time_to_first_token_seconds_sum",
    "vllm:time_to_first_token_seconds_count",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:kv_cache_usage_perc",
    "vllm:request_success_total",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_queue_time_seconds_sum",
    "vllm:request_prefill_time_seconds_sum",
    "vllm:request_decode_time_seconds_sum",
    "vllm:num_preemptions_total",
    "vllm:request_max_num_generation_tokens_sum",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:iteration_tokens_total_bucket",
    "vllm:lora_requests_info",
    "vllm:cache_config_info",
    "http_requests_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
]


def test_names_and_numbers_are_those_that_vllm_would_give(serving: Any) -> None:
    with serving(metrics_options={"vllm_model": "served"}) as server:
        server.complete("Hello", max_tokens=4, ignore_eos=True)
        server.state.metrics.on_step(StepRecord(1, 0.0, drafts=(("ngram", 3, 2), ("ngram", 2, 0))))
        text = server.http.get("/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert set(ASKED_FOR) <= {sample.name for sample in samples}
        theirs = [sample for sample in samples if sample.name.startswith("vllm:")]
        assert all((sample.labels["model_name"], sample.labels["engine"]) == ("served", "0") for sample in theirs)
        values = {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}

        def value(name: str, *labels: str) -> float:
            return float(values[name, *sorted(["0", "served", *labels])])

        assert value("vllm:generation_tokens_total") == 4
        assert value("vllm:request_success_total", "length") == 1
        assert value("vllm:inter_token_latency_seconds_count") == 3
        assert value("vllm:kv_cache_usage_perc") == 0
        assert value("vllm:cache_config_info", "8", "1024") == 1
        assert value("vllm:spec_decode_num_drafts_total") == 2
        assert value("vllm:spec_decode_num_draft_tokens_total") == 5
        assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1") == 1
        assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", "2") == 0
        assert value("http_requests_total", "2xx") == 1


def test_there_are_none_unless_asked(server: Any) -> None:
    assert "vllm:" not in server.http.get("/metrics").text
