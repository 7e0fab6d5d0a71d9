"""The real daemon on the default model: what people ask of it, and what must not go wrong."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "tests" / "data" / "page.txt").read_text().split()
MODEL = "SmolLM2-135M-Instruct"
ANY_WAIT = ("--max-queue-delay", "inf")  # on a busy machine too

pytestmark = pytest.mark.e2e


@dataclass
class Served:
    """A daemon that answers at `url`."""

    process: subprocess.Popen[str]
    url: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, _strict_response_validation=True)

    def async_client(self) -> openai.AsyncOpenAI:
        # Not strict: the client reads chunks of a completion as whole completions, and refuses the null finish_reason
        # that OpenAI itself sends in them.
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=300)

    def metric(self, name: str) -> float:
        """The sum of a metric's series whose name and labels start with `name`."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}[^ ]* (\S+)$", text, re.MULTILINE))

    def wait_for(self, name: str, least: float) -> None:
        """Until a gauge is at least that; fails after a minute."""
        deadline = time.monotonic() + 60
        while self.metric(name) < least:
            assert time.monotonic() < deadline, name
            time.sleep(0.02)

    def wait_until_idle(self) -> None:
        """Until nothing runs, nothing waits and no page is held; fails after ten seconds."""
        names = ("octavo_requests_running", "octavo_requests_waiting", 'octavo_kv_pages{state="used"}')
        deadline = time.monotonic() + 10
        while any(self.metric(name) for name in names):
            assert time.monotonic() < deadline, {name: self.metric(name) for name in names}
            time.sleep(0.05)


def start(*flags: str) -> Served:
    command = [sys.executable, "-m", "server.cli", "serve", "--port", "0", "--open-metrics", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(180, process.kill)  # a first start compiles the kernels
    watchdog.start()
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("ready in"):
            break
    watchdog.cancel()
    watchdog.join()
    assert process.poll() is None, "".join(lines)
    return Served(process, lines[-1].split()[-1])


def stop(served: Served) -> None:
    served.process.terminate()
    assert served.process.wait(timeout=60) == 0
    assert served.process.stdout is not None
    served.process.stdout.close()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Served]:
    served = start("--kv-memory", "512MiB", *ANY_WAIT)
    yield served
    stop(served)


@pytest.fixture(scope="module")
def tight() -> Iterator[Served]:
    """A daemon whose KV pool holds one context of 512 tokens and a little more."""
    served = start("--kv-memory", "14MiB", "--max-model-len", "512", "--max-num-seqs", "16", *ANY_WAIT)
    yield served
    stop(served)


def words(count: int, seed: int) -> str:
    at = random.Random(seed).randrange(len(PAGE))
    return " ".join((PAGE + PAGE + PAGE)[at : at + count])


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("The capital of France is the city of", "Paris"),
        ("The opposite of hot is", "cold"),
        ("One, two, three,", "four"),
    ],
)
def test_a_factual_question_is_answered_sensibly(daemon: Served, prompt: str, answer: str) -> None:
    found = daemon.client().completions.create(model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
    assert answer in found.choices[0].text


def test_chat_streams_what_it_returns_whole(daemon: Served) -> None:
    messages: Any = [{"role": "user", "content": "Write two sentences about bread, and one emoji."}]
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "max_completion_tokens": 80,
        "seed": 7,
        "temperature": 0.9,
    }
    whole = daemon.client().chat.completions.create(**options)
    with daemon.client().chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def streamed(client: openai.AsyncOpenAI, options: dict[str, Any]) -> tuple[str, list[float], str | None]:
    """Text, logprobs and finish reason of one streamed completion."""
    text, logprobs, reason = "", [], None
    async for chunk in await client.completions.create(**options, stream=True):
        choice = chunk.choices[0]
        text += choice.text
        reason = choice.finish_reason or reason
        if choice.logprobs is not None:
            logprobs += choice.logprobs.token_logprobs or []
    return text, logprobs, reason


def mixed_requests(count: int, longest: int) -> list[dict[str, Any]]:
    """Requests of mixed lengths: greedy and seeded, with and without penalties, some with a stop string."""
    rng = random.Random(5)
    requests = []
    for i in range(count):
        request: dict[str, Any] = {
            "model": MODEL,
            "prompt": words(rng.randrange(1, longest), rng.randrange(6)),
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice([0, 0, 0.3, 1.0]),
            "seed": i,
            "logprobs": 2,
        }
        if i % 5 == 0:
            request["frequency_penalty"] = 0.5
        if i % 7 == 0:
            request["stop"] = [" the", "."]
        requests.append(request)
    return requests


@pytest.mark.case(73, 76)
def test_64_concurrent_streams_each_equal_their_solo_run_bit_for_bit(daemon: Served) -> None:
    requests = mixed_requests(64, 300)

    async def run() -> None:
        async with daemon.async_client() as client:
            together = await asyncio.gather(*(streamed(client, r) for r in requests))
            for request, found in zip(requests, together, strict=True):
                assert await streamed(client, request) == found

    asyncio.run(run())
    daemon.wait_until_idle()


@pytest.mark.case(1)
def test_no_reply_holds_a_marker_of_another_request(daemon: Served) -> None:
    markers = [f"zq{i:02d}x" for i in range(24)]

    async def ask(client: openai.AsyncOpenAI, marker: str) -> str:
        prompt = f"{words(20, 3)}\nThe secret word is {marker}. Again, the secret word is"
        answer = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=24, temperature=0)
        return answer.choices[0].text

    async def run() -> list[str]:
        async with daemon.async_client() as client:
            return await asyncio.gather(*(ask(client, m) for m in markers))

    for _ in range(3):
        for marker, text in zip(markers, asyncio.run(run()), strict=True):
            assert not [other for other in markers if other != marker and other in text]
            assert marker in text


@pytest.mark.case(17)
def test_preemption_must_happen_in_a_small_pool_and_changes_nothing(tight: Served) -> None:
    requests = [r | {"max_tokens": 120, "ignore_eos": True} for r in mixed_requests(12, 150)]
    for request in requests:
        request["extra_body"] = {"ignore_eos": request.pop("ignore_eos")}
        request.pop("stop", None)
    before = tight.metric("octavo_preemptions_total")

    async def run() -> None:
        async with tight.async_client() as client:
            together = await asyncio.gather(*(streamed(client, r) for r in requests))
            assert tight.metric("octavo_preemptions_total") > before
            for request, found in zip(requests, together, strict=True):
                assert await streamed(client, request) == found

    asyncio.run(run())
    tight.wait_until_idle()


@pytest.mark.parametrize("moment", ["before the first token", "after three chunks"])
@pytest.mark.case(31)
def test_a_client_that_leaves_stops_its_request(daemon: Served, moment: str) -> None:
    body = {"model": MODEL, "prompt": words(300, 1), "max_tokens": 4000, "stream": True, "n": 2, "ignore_eos": True}
    with httpx.stream("POST", daemon.url + "/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        if moment == "after three chunks":
            for _ in range(6):
                next(lines)
        assert daemon.metric("octavo_requests_running") > 0
    left = time.monotonic()
    daemon.wait_until_idle()
    assert time.monotonic() - left < 2


@pytest.mark.case(34)
def test_waiting_requests_whose_clients_leave_are_never_prefilled(tight: Served) -> None:
    async def ask(url: str, index: int) -> None:
        body = {"model": MODEL, "prompt": f"{index} {words(100, index)}", "max_tokens": 100, "stream": True}
        async with httpx.AsyncClient(timeout=60) as client:
            await client.post(url + "/v1/completions", json=body)

    async def run() -> tuple[float, float]:
        long = {"model": MODEL, "prompt": words(60, 2), "max_tokens": 300, "extra_body": {"ignore_eos": True}}
        async with tight.async_client() as client:
            busy = [asyncio.create_task(streamed(client, long | {"seed": i})) for i in range(16)]
            await asyncio.to_thread(tight.wait_for, "octavo_requests_running", 2)
            queued = [asyncio.create_task(ask(tight.url, i)) for i in range(50)]
            await asyncio.to_thread(tight.wait_for, "octavo_requests_waiting", 50)
            for task in queued:  # nothing has been answered yet, so this closes the connection of a waiting request
                task.cancel()
            await asyncio.gather(*queued, return_exceptions=True)
            for _ in range(100):
                waiting = await asyncio.to_thread(tight.metric, "octavo_requests_waiting")
                if waiting < 16:
                    break
                await asyncio.sleep(0.05)
            await asyncio.gather(*busy)
            return waiting, await asyncio.to_thread(tight.metric, "octavo_prompt_tokens_total")

    before = tight.metric("octavo_prompt_tokens_total")
    waiting, after = asyncio.run(run())
    assert waiting < 16
    assert after - before < 16 * 200
    tight.wait_until_idle()


@pytest.mark.case(71)
def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(tight: Served) -> None:
    for path, body in (
        ("completions", {"prompt": [5] * 512}),
        ("completions", {"prompt": [5] * 5000, "stream": True}),
        ("chat/completions", {"messages": [{"role": "user", "content": words(900, 1)}], "stream": True}),
    ):
        answer = httpx.post(f"{tight.url}/v1/{path}", json={"model": MODEL, **body})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
    found = tight.client().completions.create(model=MODEL, prompt=[5] * 510, max_tokens=2, temperature=0)
    assert found.usage is not None
    assert found.usage.prompt_tokens == 510


MALFORMED: list[tuple[str, Any, str]] = [
    ("prompt missing", {}, "prompt"),
    ("prompt a number", {"prompt": 5}, "prompt"),
    ("prompt an empty list", {"prompt": []}, "prompt"),
    ("prompt an empty string", {"prompt": ""}, "prompt"),
    ("token id negative", {"prompt": [-1]}, "prompt"),
    ("token id past the vocabulary", {"prompt": [49152]}, "prompt"),
    ("token id huge", {"prompt": [2**63]}, "prompt"),
    ("token id a float", {"prompt": [1.5]}, "prompt"),
    ("token id a boolean", {"prompt": [True]}, "prompt"),
    ("max_tokens negative", {"max_tokens": -1}, "max_tokens"),
    ("max_tokens a string", {"max_tokens": "10"}, "max_tokens"),
    ("max_tokens beyond the context", {"max_tokens": 10**12}, "max_tokens"),
    ("temperature above two", {"temperature": 2.5}, "temperature"),
    ("temperature a string", {"temperature": "hot"}, "temperature"),
    ("top_p zero", {"top_p": 0}, "top_p"),
    ("top_k a fraction", {"top_k": 0.01}, "top_k"),
    ("n zero", {"n": 0}, "n"),
    ("n absurd", {"n": 5_000_000}, "n"),
    ("logprobs absurd", {"logprobs": 10**9}, "logprobs"),
    ("logit_bias of an unknown token", {"logit_bias": {"999999": 1}}, "logit_bias"),
    ("logit_bias of a word", {"logit_bias": {"AI": 1}}, "logit_bias"),
    ("logit_bias too large", {"logit_bias": {"5": 101}}, "logit_bias"),
    ("stop empty", {"stop": ""}, "stop"),
    ("stop five", {"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ("seed past 64 bits", {"seed": 2**64}, "seed"),
    ("stream a string", {"stream": "yes"}, "stream"),
    ("stream_options without stream", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("presence_penalty a string", {"presence_penalty": "1"}, "presence_penalty"),
]


@pytest.mark.parametrize(("body", "param"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
@pytest.mark.case(5)
def test_a_malformed_body_is_refused_by_name_and_the_next_request_is_served(
    daemon: Served, body: Any, param: str
) -> None:
    sound = {} if param == "prompt" else {"prompt": "Hello"}
    for stream in ({}, {"stream": True}):
        if "stream" in param and stream:
            continue
        answer = httpx.post(daemon.url + "/v1/completions", json={"model": MODEL, **sound, **body, **stream})
        assert answer.status_code == 400, answer.text
        assert answer.headers["content-type"].startswith("application/json")
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert answer.json()["error"]["param"].split(".")[0] == param
    after = httpx.post(daemon.url + "/v1/completions", json={"model": MODEL, "prompt": "Hello", "max_tokens": 1})
    assert after.status_code == 200


@pytest.mark.case(50)
def test_an_idle_daemon_uses_no_processor(daemon: Served) -> None:
    import psutil

    daemon.wait_until_idle()
    process = psutil.Process(daemon.process.pid)
    time.sleep(1)
    before, began = sum(process.cpu_times()[:2]), time.monotonic()
    time.sleep(5)
    used = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - began)
    assert used < 0.02


@pytest.mark.case(3)
def test_the_cache_gives_the_same_answer_and_says_what_it_reused(daemon: Served) -> None:
    client, prompt = daemon.client(), "Unique beginning. " + words(200, 4)
    options: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "temperature": 0, "logprobs": 3}
    cold, warm = client.completions.create(**options), client.completions.create(**options)
    assert cold.choices[0] == warm.choices[0]
    for found, expected in ((cold, 0), (warm, 200)):
        assert found.usage is not None
        assert found.usage.prompt_tokens_details is not None
        cached = found.usage.prompt_tokens_details.cached_tokens
        assert cached is not None
        assert (cached >= expected) if expected else cached < 16
