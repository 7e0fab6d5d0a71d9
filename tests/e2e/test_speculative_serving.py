"""Speculation in the real daemon: whatever drafts, clients are told the same, to the bit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from loadtest.servers import Server, daemon

pytestmark = pytest.mark.e2e

LOOP = "Repeat after me: the cat sat on the mat. The cat sat on the mat. The cat sat on the mat. The cat"
PLAIN = "In the spring of that year the old harbour town had"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "tags": {"type": "array", "items": {"enum": ["a"]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}  # fmt: skip

REQUESTS: dict[str, dict[str, Any]] = {
    **{f"greedy, {n} tokens": {"prompt": LOOP, "max_tokens": n} for n in (1, 2, 3, 5, 8, 13, 40)},
    "not repetitive": {"prompt": PLAIN, "max_tokens": 40},
    "sampled": {"prompt": LOOP, "max_tokens": 30, "temperature": 0.8, "seed": 42},
    "sampled wildly": {"prompt": PLAIN, "max_tokens": 30, "temperature": 1.5, "top_p": 0.95, "seed": -7},
    "n of 3": {"prompt": LOOP, "max_tokens": 20, "temperature": 1.0, "seed": 3, "n": 3},
    "frequency penalty": {"prompt": LOOP, "max_tokens": 30, "frequency_penalty": 2.0},
    "frequency reward": {"prompt": LOOP, "max_tokens": 30, "frequency_penalty": -2.0},
    "repetition penalty": {"prompt": LOOP, "max_tokens": 30, "repetition_penalty": 1.3},
    "at least 20": {"prompt": LOOP, "max_tokens": 30, "min_tokens": 20, "stop_token_ids": [28, 30]},
    "bias": {"prompt": LOOP, "max_tokens": 20, "logit_bias": {"2644": -100}},
    "bad words": {"prompt": LOOP, "max_tokens": 20, "bad_words": [" sat on", " mat"]},
    "stop string across tokens": {"prompt": LOOP, "max_tokens": 40, "stop": ["t on th", "on the mat. The cat sat on"]},
    "stop string kept": {"prompt": LOOP, "max_tokens": 40, "stop": ["mat. T"], "include_stop_str_in_output": True},
    "echo and prompt logprobs": {"prompt": LOOP, "max_tokens": 12, "echo": True, "logprobs": 2},
    "schema": {"prompt": LOOP, "max_tokens": 60, "structured_outputs": {"json": SCHEMA}},
    "min_p": {"prompt": LOOP, "max_tokens": 30, "temperature": 1.0, "min_p": 0.1, "seed": 5},
}
SELF = {"method": "self", "num_speculative_tokens": 4}
DRAFTERS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "share_outputs": True, "adaptive": False},
    "lookahead": {"method": "lookahead", "num_speculative_tokens": 4, "branches": 3, "adaptive": False},
    "self": {**SELF, "branches": 2, "adaptive": False},
}
POOL = ("--kv-memory", "40MiB", "--max-model-len", "512", "--quantization", "none", "--max-num-seqs", "16")
POOL += ("--max-queue-delay", "inf")


async def told(server: Server, *, stream: bool) -> dict[str, Any]:
    """What clients are told of all requests at once, but for ids and times."""

    async def ask(client: httpx.AsyncClient, fields: dict[str, Any]) -> Any:
        body = {"model": server.model, "temperature": 0, "logprobs": 1, **fields}
        if not stream:
            answer = await client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            content = answer.json()
            return content["choices"], {k: v for k, v in content["usage"].items() if not k.endswith("_details")}
        choices: dict[int, list[Any]] = {}
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        seen = choices.setdefault(choice["index"], ["", [], None])
                        seen[0] += choice["text"]
                        seen[1] += (choice["logprobs"] or {}).get("token_logprobs", [])
                        seen[2] = choice["finish_reason"] or seen[2]
        return choices

    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        answers = await asyncio.gather(*(ask(client, fields) for fields in REQUESTS.values()))
    return dict(zip(REQUESTS, answers, strict=True))


@pytest.fixture(scope="module")
def undrafted() -> dict[str, Any]:
    with daemon([*POOL]) as server:
        whole = asyncio.run(told(server, stream=False))
        return whole | {"streamed": asyncio.run(told(server, stream=True))}


@pytest.fixture(params=DRAFTERS)
def drafted(request: pytest.FixtureRequest) -> Iterator[Server]:
    with daemon([*POOL, "--open-metrics", "--speculative-config", json.dumps(DRAFTERS[request.param])]) as server:
        yield server


@pytest.mark.case(17)
@pytest.mark.case(20)
@pytest.mark.case(22)
@pytest.mark.case(54)
def test_clients_are_told_the_same_with_drafting_as_without(undrafted: dict[str, Any], drafted: Server) -> None:
    whole = asyncio.run(told(drafted, stream=False))
    for name, answer in whole.items():
        assert answer == undrafted[name], name
    streamed = asyncio.run(told(drafted, stream=True))
    for name, answer in streamed.items():
        assert answer == undrafted["streamed"][name], name
    series = dict(
        line.rsplit(" ", 1)
        for line in httpx.get(drafted.url + "/metrics").text.splitlines()
        if line.startswith(("octavo_spec_", "octavo_running"))
    )
    drafts, right = (
        sum(float(value) for name, value in series.items() if name.startswith(f"octavo_spec_{kind}_tokens_total"))
        for kind in ("drafted", "accepted")
    )
    assert drafts > right > 5
    assert all(float(value) == 0 for name, value in series.items() if name.startswith("octavo_running"))


@pytest.mark.case(23)
def test_seeded_and_unseeded_requests_side_by_side_keep_their_texts(drafted: Server) -> None:
    body = {"model": drafted.model, "prompt": LOOP, "max_tokens": 24, "temperature": 1.0}

    async def main() -> tuple[list[str], list[str]]:
        async with httpx.AsyncClient(base_url=drafted.url, timeout=300) as client:

            async def ask(**fields: Any) -> str:
                return str((await client.post("/v1/completions", json=body | fields)).json()["choices"][0]["text"])

            alone = await ask(seed=42)
            texts = [alone]
            for _ in range(3):
                texts += await asyncio.gather(*(ask(**({"seed": 42} if i % 2 else {})) for i in range(8)))
            return [texts[0], *texts[2::2]], texts[1::2]

    seeded, unseeded = asyncio.run(main())
    assert len(set(seeded)) == 1
    assert len(set(unseeded)) > 6


def test_usage_and_the_requests_life_say_what_was_drafted(drafted: Server) -> None:
    body = {"model": drafted.model, "prompt": LOOP, "max_tokens": 40, "temperature": 0, "request_id": "told"}
    answer = httpx.post(drafted.url + "/v1/completions", json=body, timeout=300).json()
    details = answer["usage"]["completion_tokens_details"]
    life = next(
        life
        for life in httpx.get(drafted.url + "/debug/requests").json()["requests"]
        if life["id"].startswith(answer["id"])
    )
    assert life["accepted_tokens"] == details["accepted_prediction_tokens"] > 0
    assert life["drafted_tokens"] - life["accepted_tokens"] == details["rejected_prediction_tokens"]
    drafts = httpx.get(f"{drafted.url}/debug/requests/{life['id']}").json()["drafts"]
    assert sum(draft["accepted"] for draft in drafts) == life["accepted_tokens"]
