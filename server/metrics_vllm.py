"""vLLM's names for our series (`--metrics-compat vllm`), so that dashboards and gateways made for vLLM work here.

Renamed copies of what our own registry holds, with vLLM's labels; buckets are ours, which resolve shorter times. What
has no counterpart here is absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from server.metrics_engine import family

# Families, without the suffix of their samples. Several of theirs may be one of ours.
NAMES = {
    "vllm:num_requests_running": "octavo_requests_running",
    "vllm:num_requests_waiting": "octavo_requests_waiting",
    "vllm:num_preemptions": "octavo_preemptions",
    "vllm:prefix_cache_queries": "octavo_prefix_query_tokens",
    "vllm:prefix_cache_hits": "octavo_prefix_hit_tokens",
    "vllm:prompt_tokens": "octavo_prompt_tokens",
    "vllm:prompt_tokens_cached": "octavo_cached_prompt_tokens",
    "vllm:generation_tokens": "octavo_generated_tokens",
    "vllm:request_prompt_tokens": "octavo_request_prompt_tokens",
    "vllm:request_generation_tokens": "octavo_request_generated_tokens",
    "vllm:request_max_num_generation_tokens": "octavo_request_generated_tokens",
    "vllm:iteration_tokens_total": "octavo_step_rows",
    "vllm:time_to_first_token_seconds": "octavo_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "octavo_inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": "octavo_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "octavo_request_duration_seconds",
    "vllm:request_queue_time_seconds": "octavo_queue_time_seconds",
    "vllm:request_prefill_time_seconds": "octavo_prefill_time_seconds",
    "vllm:request_decode_time_seconds": "octavo_decode_time_seconds",
}
FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}  # by our outcome


class VLLMNames(Collector):
    """Collects from our registry at each scrape."""

    def __init__(self, registry: CollectorRegistry, page_size: int, model: str) -> None:
        self._registry = registry
        self._page_size = page_size
        self._labels = {"model_name": model, "engine": "0"}

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        ours = {family.name: family for family in self._registry.collect()}
        for theirs, name in NAMES.items():
            copy = Metric(theirs, ours[name].documentation, ours[name].type)
            for sample in ours[name].samples:
                copy.add_sample(theirs + sample.name.removeprefix(name), sample.labels | self._labels, sample.value)
            yield copy
        yield from self._requests(ours)
        yield from self._cache(ours)
        yield from self._speculation(ours)

    def _requests(self, ours: Mapping[str, Metric]) -> Iterator[Metric]:
        ends = [(FINISHED.get(sample.labels["outcome"]), sample.value) for sample in ours["octavo_requests"].samples]
        finished = [({"finished_reason": reason}, value) for reason, value in ends if reason is not None]
        yield self._family("vllm:request_success", "counter", *finished)
        classes = Counter[str]()
        for sample in ours["octavo_http_responses"].samples:
            classes[sample.labels["status"][0] + "xx"] += int(sample.value)
        yield self._family("http_requests", "counter", *(({"status": name}, value) for name, value in classes.items()))

    def _cache(self, ours: Mapping[str, Metric]) -> Iterator[Metric]:
        states = {sample.labels["state"]: sample.value for sample in ours["octavo_kv_pages"].samples}
        pages = sum(states.values())
        yield self._family("vllm:kv_cache_usage_perc", "gauge", ({}, states["used"] / pages))
        config = {"block_size": str(self._page_size), "num_gpu_blocks": str(int(pages))}
        yield self._family("vllm:cache_config_info", "gauge", (config, 1))
        # Gateways want to see that there are none.
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        yield self._family("vllm:lora_requests_info", "gauge", (adapters, 1))

    def _speculation(self, ours: Mapping[str, Metric]) -> Iterator[Metric]:
        tokens = {"drafted": Counter[str](), "accepted": Counter[str]()}
        for kind, found in tokens.items():
            for sample in ours[f"octavo_spec_{kind}_tokens"].samples:
                found[str(int(sample.labels["position"]) - 1)] += int(sample.value)
        [drafts] = [one.value for one in ours["octavo_spec_acceptance_length"].samples if one.name.endswith("_count")]
        yield self._family("vllm:spec_decode_num_drafts", "counter", ({}, drafts))
        yield self._family("vllm:spec_decode_num_draft_tokens", "counter", ({}, tokens["drafted"].total()))
        yield self._family("vllm:spec_decode_num_accepted_tokens", "counter", ({}, tokens["accepted"].total()))
        accepted = [({"position": position}, count) for position, count in tokens["accepted"].items()]
        yield self._family("vllm:spec_decode_num_accepted_tokens_per_pos", "counter", *accepted)

    def _family(self, name: str, kind: str, *samples: tuple[Mapping[str, str], float]) -> Metric:
        return family(
            kind, name, "As vLLM has it.", *(({**labels, **self._labels}, value) for labels, value in samples)
        )
