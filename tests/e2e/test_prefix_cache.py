"""The prefix cache of the real daemon: under pressure, across tenants and across a restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from loadtest import servers
from loadtest.servers import Server, daemon

ROOT = Path(__file__).parents[2]
CONTEXT = 512
TIGHT = ("--kv-memory", "14MiB", "--max-model-len", str(CONTEXT), "--open-metrics")  # 1.2 times one full context

pytestmark = pytest.mark.e2e


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(count)]


def metric(server: Server, series: str) -> float:
    text = httpx.get(server.url + "/metrics").text
    return sum(float(value) for value in re.findall(rf"^octavo_{re.escape(series)} (\S+)$", text, re.MULTILINE))


async def ask(client: httpx.AsyncClient, server: Server, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": server.model, "prompt": prompt, "temperature": 0, "logprobs": 1, "ignore_eos": True, **fields}
    answer = await client.post(server.url + "/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def leave(client: httpx.AsyncClient, server: Server, rng: random.Random) -> None:
    """A client that goes away at a moment of its own."""
    size = rng.choice([5, 60, 200])
    prompt = [*tokens(rng.randrange(3), size), rng.randrange(100, 40_000)]
    work = ask(client, server, prompt, max_tokens=rng.randint(1, 60), n=rng.choice([1, 1, 2]))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(work, rng.random() * 1.5)


WORK = [
    *((tokens(seed, CONTEXT * 3 // 10), {"max_tokens": CONTEXT * 3 // 10}) for seed in range(4)),
    *((tokens(10 + seed, 30), {"max_tokens": 20}) for seed in range(24)),
    (tokens(50, 40), {"n": 8, "max_tokens": 30, "temperature": 1.0, "seed": 4}),
]


def test_everything_completes_in_a_small_pool_as_it_does_alone_and_can_be_replayed(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with daemon([*TIGHT, "--kv-offload", "64MiB", "--journal-file", str(journal)]) as server:

        async def main() -> None:
            limits = httpx.Limits(max_connections=200)
            async with httpx.AsyncClient(limits=limits) as client:
                alone = [await ask(client, server, prompt, **fields) for prompt, fields in WORK]
                rng = random.Random(6)
                leaving = [asyncio.create_task(leave(client, server, rng)) for _ in range(120)]
                together = await asyncio.gather(*(ask(client, server, prompt, **fields) for prompt, fields in WORK))
                await asyncio.gather(*leaving)
                for one, other in zip(alone, together, strict=True):
                    assert one["choices"] == other["choices"]
                whole = await ask(client, server, tokens(7, CONTEXT - 20), max_tokens=20)
                assert whole["usage"]["completion_tokens"] == 20
                refused = await client.post(
                    server.url + "/v1/completions", json={"model": server.model, "prompt": tokens(8, CONTEXT)}
                )
                assert refused.status_code == 400
                assert str(CONTEXT) in refused.json()["error"]["message"]

        asyncio.run(main())
        deadline = time.monotonic() + 10
        while metric(server, 'kv_pages{state="used"}') and time.monotonic() < deadline:
            time.sleep(0.05)
        assert metric(server, 'kv_pages{state="used"}') == metric(server, "requests_running") == 0
        assert metric(server, "preemptions_total") > 0
        assert metric(server, 'kv_tier_pages_total{way="loaded"}') > 0
        view = httpx.get(server.url + "/debug/cache").json()
        assert view["evictions"]
        assert view["second_tier"]["compute_page_seconds"] > view["second_tier"]["load_page_seconds"] > 0
    replayed = subprocess.run(
        [sys.executable, "-m", "server.cli", "replay", str(journal)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "all as recorded" in replayed.stdout


@pytest.mark.case(44)
def test_another_key_learns_nothing_from_the_cache_or_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "first_model", lambda url: "SmolLM2-135M-Instruct")  # it would need a key
    with daemon(["--kv-memory", "256MiB", "--cache-isolation", "key", "--api-key", "a", "b"]) as server:

        def time_of(key: str, prompt: list[int]) -> tuple[float, int]:
            began = time.perf_counter()
            answer = httpx.post(
                server.url + "/v1/completions",
                json={"model": server.model, "prompt": prompt, "max_tokens": 1},
                headers={"authorization": f"Bearer {key}"},
            )
            seconds = time.perf_counter() - began
            return seconds, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        cold, own, others = [], [], []
        for number in range(12):
            prompt = tokens(100 + number, 500)
            for times, key, found in ((cold, "a", 0), (own, "a", 499), (others, "b", 0)):
                seconds, cached = time_of(key, prompt)
                assert cached == found
                times.append(seconds)
        assert statistics.median(own) < 0.5 * statistics.median(cold)
        assert 0.6 < statistics.median(others) / statistics.median(cold) < 1.6


def test_a_system_prompt_survives_a_restart_and_a_damaged_file_does_no_harm(tmp_path: Path) -> None:
    prompt = tokens(200, 600)
    answers = []
    for expected in (0, 599, 0):
        with daemon(["--kv-memory", "128MiB", "--kv-cache-dir", str(tmp_path)]) as server:
            body = {"model": server.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 2}
            answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == (expected if not expected else pytest.approx(expected, abs=16))
            answers.append(answer["choices"])
        [file] = tmp_path.iterdir()
        if expected:
            file.write_bytes(file.read_bytes()[:-1000])
    assert answers[0] == answers[1] == answers[2]


def test_turns_of_a_chat_recompute_almost_nothing() -> None:
    with daemon(["--kv-memory", "512MiB"]) as server:

        async def chat(client: httpx.AsyncClient, user: int) -> tuple[int, int]:
            said, history, found = list[int](), 0, 0
            for turn in range(5):
                answer = await ask(
                    client, server, said + tokens(300 + 10 * user + turn, 50), max_tokens=20, return_token_ids=True
                )
                history += len(said)
                found += min(len(said), answer["usage"]["prompt_tokens_details"]["cached_tokens"])
                said = said + tokens(300 + 10 * user + turn, 50) + answer["choices"][0]["token_ids"]
            return history, found

        async def main() -> list[tuple[int, int]]:
            async with httpx.AsyncClient() as client:
                return list(await asyncio.gather(*(chat(client, user) for user in range(8))))

        histories = asyncio.run(main())
    history, found = (sum(part) for part in zip(*histories, strict=True))
    assert 1 - found / history < 0.02, json.dumps(histories)
