"""`make bench-cache`: what the prefix cache saves, drawn and written into `docs/kv-store.md`.

    python -m loadtest.cache                     measure, then write
    python -m loadtest.cache --show FILE.json    write from figures that were kept

The store itself is measured by `kvstore.measure`, without a model; the rest on the daemon through HTTP, started once
for each setting. Let nothing else run: it takes some minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from loadtest.document import Content, Part, command, drawn, json_of, publish
from loadtest.plots import Axis, Series, line
from loadtest.servers import Server, daemon, metrics_of
from loadtest.tables import table

VOCABULARY = 40_000  # token ids below this are words in any model worth measuring
LONGEST = 2048  # tokens that `kvstore.measure` sets aside for a contiguous context
OPERATIONS = {"match_per_100": "match, 100 tokens", "lock": "open, close", "insert": "insert", "evict": "evict"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 1 when it failed."""
    parser = command("bench-cache", "Measure the prefix cache.", "docs/kv-store.md")
    return publish(parser, arguments, "cache", _measure, parts)


def _measure(_: argparse.Namespace) -> Content:
    content = json_of("kvstore.measure") | {"burst": [burst(policy) for policy in ("fcfs", "prefix")]}
    content |= {"turns_served": turns(), "preempted": [preempted(size) for size in ("0", "1GiB")]}
    return content | {"restart": restart()}


class Client:
    """Asks a server for completions of token ids."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def complete(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        """The answer, with its token ids; raises OSError."""
        body = {"model": self._server.model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, **fields}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self._server.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return dict(json.load(answer))

    def metric(self, series: str) -> float:
        found = re.search(rf"^octavo_{re.escape(series)} (\S+)$", metrics_of(self._server), re.MULTILINE)
        return float(found.group(1)) if found else 0.0


def _words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(100, VOCABULARY) for _ in range(count)]


def burst(policy: str, requests: int = 64, prefix: int = 2000, own: int = 12) -> dict[str, Any]:
    """Many requests at once that begin with the same new prefix: prompt tokens computed against the fewest possible."""
    rng = random.Random(1)
    shared = _words(rng, prefix)
    prompts = [shared + _words(rng, own) for _ in range(requests)]
    with daemon(["--scheduling-policy", policy, "--kv-memory", "1GiB"]) as server:
        client = Client(server)
        with ThreadPoolExecutor(requests) as threads:
            list(threads.map(lambda prompt: client.complete(prompt, 2), prompts))
        computed = client.metric("prefill_tokens_total")
    return {
        "policy": policy,
        "computed": computed,
        "fewest": prefix + requests * own,
        "asked": requests * len(prompts[0]),
    }


def turns(users: int = 8, rounds: int = 10) -> list[dict[str, Any]]:
    """Chats of several turns at once: of the history that each turn repeats, the part that was computed again."""
    with daemon(["--kv-memory", "1GiB"]) as server:
        client = Client(server)

        def chat(user: int) -> list[tuple[int, int]]:
            rng, said, seen = random.Random(user), list[int](), list[tuple[int, int]]()
            for _ in range(rounds):
                prompt = said + _words(rng, 60)
                answer = client.complete(prompt, 40)
                seen.append((len(said), answer["usage"]["prompt_tokens_details"]["cached_tokens"]))
                said = prompt + answer["choices"][0]["token_ids"]
            return seen

        with ThreadPoolExecutor(users) as threads:
            found = list(threads.map(chat, range(users)))
    by_turn = [[chat[turn] for chat in found] for turn in range(1, rounds)]
    return [
        {"turn": turn, "history": sum(known for known, _ in seen), "found": sum(min(pair) for pair in seen)}
        for turn, seen in enumerate(by_turn, 2)
    ]


def preempted(offload: str, urgent: int = 12, length: int = 1500) -> dict[str, Any]:
    """A long answer that urgent requests of two contexts in turn push out of the pool again and again, and each other:
    time until all is done."""
    rng = random.Random(2)
    background, others = _words(rng, length), [_words(rng, length) for _ in range(2)] * (urgent // 2)
    flags = ["--max-model-len", "2048", "--scheduling-policy", "priority", "--kv-offload", offload]
    with daemon([*flags, "--kv-memory", "52MiB"]) as server, ThreadPoolExecutor(1) as threads:
        client = Client(server)
        began = time.perf_counter()
        long = threads.submit(client.complete, background, 400, priority=10)
        for prompt in others:
            time.sleep(0.1)
            client.complete(prompt, 4, priority=0)
        tokens = long.result()["usage"]["completion_tokens"]
        seconds = time.perf_counter() - began
        moved = {
            way: client.metric(f'kv_tier_pages_total{{way="{way}"}}') for way in ("stored", "loaded", "recomputed")
        }
        return {
            "offload": offload,
            "seconds": seconds,
            "tokens_per_second": (tokens + length + urgent * (length + 4)) / seconds,
            "preemptions": client.metric("preemptions_total"),
            **moved,
        }


def restart(length: int = 1800) -> dict[str, float]:
    """Milliseconds to an answer of one token after a long system prompt: cold, warm, and first after a restart."""
    prompt = _words(random.Random(3), length)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for names in (("cold", "warm"), ("restarted",)):
            with daemon(["--kv-memory", "256MiB", "--kv-cache-dir", folder]) as server:
                client = Client(server)
                client.complete([100, 101], 1)
                for name in names:
                    began = time.perf_counter()
                    client.complete(prompt, 1)
                    found[name] = (time.perf_counter() - began) * 1e3
    return found


def parts(content: Content) -> list[Part]:
    """The generated part of the document."""
    waste = {row["way"]: row["wasted"] for row in content["chats"]}
    limits = (2048, 4096, 8192)  # a run that is longer wastes what it is longer by
    contiguous = [(limit, 100 - 100 * (1 - waste["contiguous"]) * LONGEST / limit) for limit in limits]
    chats, reuse = (
        [row | {"found": row["found_tokens"] / row["prompt_tokens"]} for row in content[name]]
        for name in ("chats", "reuse")
    )
    costs, classic, again, served = (content[name] for name in ("costs", "classic", "restart", "turns_served"))
    recomputed = 1 - sum(p["found"] for p in served) / sum(p["history"] for p in served)
    return [
        f"{content['machine']['processor']}, {content['machine']['cpus']} CPUs.",
        "## Sharing",
        drawn(
            "cache-waste",
            "Memory set aside and not used, 1,000 chats",
            Axis("longest context served", 2),
            Axis("percent of what is set aside"),
            [
                Series("contiguous", contiguous),
                Series("pages", [(limit, 100 * waste["radix tree"]) for limit in limits]),
            ],
        ),
        drawn(
            "cache-reuse",
            "Prompt tokens found in the cache, chats of ten turns",
            Axis("pages in the pool", 2),
            Axis("percent of all prompt tokens"),
            [
                line(name, [row for row in reuse if row["way"] == way], "pages", "found", 100)
                for name, way in (("tree", "radix tree"), ("full blocks", "hashed full blocks"))
            ],
        ),
        table(
            "1,000 chats | wasted | prompt tokens found | us an operation",
            "{way} | {wasted:.1%} | {found:.1%} | {microseconds:.1f}",
            chats,
        ),
        f"1,000 requests of which 60% share one of 5 prefixes: {classic['bounded']:.1%} found theirs in a cache of 500"
        f" entries, {classic['unbounded']:.1%} in one without bound.",
        "## Cost",
        drawn(
            "cache-cost",
            "Cost of an operation by the size of the tree",
            Axis("tokens in the tree", 10),
            Axis("microseconds", 10),
            [line(name, costs, "tokens", key) for key, name in OPERATIONS.items()],
        ),
        table(
            " | ".join(("leaves", "tokens in the tree", *OPERATIONS.values())),
            " | ".join(("{leaves:,}", "{tokens:,}", *(f"{{{key}:.1f}}" for key in OPERATIONS))),
            costs,
        ),
        "## A burst of 64 requests with one new prefix of 2,000 tokens",
        table(
            "policy | prompt tokens asked | computed | fewest possible | over",
            "{policy} | {asked:,} | {computed:,.0f} | {fewest:,} | {over:.1%}",
            [row | {"over": row["computed"] / row["fewest"] - 1} for row in content["burst"]],
        ),
        "## Chats of ten turns",
        drawn(
            "cache-turns",
            "History computed again in a chat, 8 users at once",
            Axis("turn"),
            Axis("percent of the history"),
            [Series("computed", [(p["turn"], 100 - 100 * p["found"] / p["history"]) for p in served])],
        ),
        f"In all, {recomputed:.2%} of the history was computed again.",
        "## Pushed out of the pool in turns",
        table(
            "second tier | seconds | tokens/s | preemptions | pages stored | loaded | recomputed",
            "{offload} | {seconds:.1f} | {tokens_per_second:,.0f} | {preemptions:,.0f} | {stored:,.0f} |"
            " {loaded:,.0f} | {recomputed:,.0f}",
            content["preempted"],
        ),
        "## A restart",
        f"An answer of one token after a prompt of 1,800: {again['cold']:.0f} ms cold, {again['warm']:.0f} ms warm,"
        f" {again['restarted']:.0f} ms first after a restart with `--kv-cache-dir`.",
    ]


if __name__ == "__main__":
    sys.exit(main())
