"""`make bench-speculation`: what speculative decoding gains, drawn and written into `docs/speculation.md`.

    python -m loadtest.speculation                     measure, then write
    python -m loadtest.speculation --quick             the same with little of each, to try it out
    python -m loadtest.speculation --show FILE.json    write from figures that were kept

A daemon with speculation and one without stand side by side and are driven in turn, so that a ratio is of two runs made
within the same minute; only one of them works at a time. Let nothing else run: it takes about eight minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from loadtest.document import Content, command, publish
from loadtest.driver import drive
from loadtest.figures import Figures, summarise
from loadtest.peers.install import default_model
from loadtest.servers import Server, daemon, metrics_of
from loadtest.speculation_document import parts
from loadtest.workloads import Prompt, make

REPEATS = Path(__file__).parent / "data" / "repeats.jsonl"
PARTS = 3  # of the repeats: each repetition has another one, with prompts of every kind
QUICK_TOKENS = 24
BFLOAT16 = ("--quantization", "none", "--dtype", "bfloat16")
SERVE = ("--kv-memory", "512MiB", "--max-queue-delay", "inf")
CHAIN, TREE = {"num_speculative_tokens": 6}, {"num_speculative_tokens": 3, "branches": 2}  # six drafted rows each
BOTH = {"chain of 6": CHAIN, "tree of 2 x 3": TREE}
CHAINS = {f"chain of {tokens}": {"num_speculative_tokens": tokens} for tokens in (2, 4, 6)}


@dataclass(frozen=True, slots=True)
class Set:
    """Requests of one kind; `repeats` go to the chat route and end where the model ends them."""

    kind: str
    requests: int
    concurrency: int

    def prompts(self, repetition: int) -> list[Prompt]:
        if self.kind == "repeats":
            return repeats(repetition % PARTS, PARTS)[: self.requests]
        return list(make(self.kind, self.requests, seed=1 + repetition))


SINGLE, REPEATING = Set("single", 2, 1), Set("repeats", 8, 1)
DECODE, CHAT = Set("decode", 16, 16), Set("chat", 32, 16)
STREAMS = (1, 2, 4, 8, 16)  # at once, to see what rows of a step cost
# For each method: its configuration, the daemon's flags with it and without, and the least ratio wanted of each set.
METHODS: tuple[tuple[str, Mapping[str, Any], Sequence[str], Mapping[Set, float | None]], ...] = (
    ("ngram", {"method": "ngram"}, (), {REPEATING: 1.8, SINGLE: 1.0, DECODE: 0.97, CHAT: 0.97}),
    (
        "self, int4 for bfloat16",
        {"method": "self", "quantization": "int4", "num_speculative_tokens": 4},
        BFLOAT16,
        {SINGLE: 1.25},
    ),
    ("lookahead", {"method": "lookahead"}, (), {Set("repeats", 4, 1): None, SINGLE: None}),
)
SELF = {"method": "self", "quantization": "int4"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 1 when it failed."""
    parser = command("bench-speculation", "Measure speculative decoding.", "docs/speculation.md")
    parser.add_argument("--quick", action="store_true", help="a few tokens of everything, once")
    parser.add_argument("--repetitions", type=int, default=PARTS, metavar="N", help="that ratios are the median of")
    return publish(parser, arguments, "speculation", _measure, parts)


def _measure(options: argparse.Namespace) -> Content:
    repetitions = 1 if options.quick else options.repetitions
    content: Content = {"quick": options.quick, "repetitions": repetitions, "ratios": []}
    for name, config, flags, wanted in METHODS:
        with started(flags) as plain, started(flags, config) as drafting:
            if not flags and "costs" not in content:
                content["costs"] = costs(plain, options.quick)
            content["ratios"] += ratios(name, plain, drafting, wanted, repetitions, options.quick)
    return content | {"lengths": list(lengths(options.quick)), "rules": list(rules(options.quick))}


@contextlib.contextmanager
def started(flags: Sequence[str], config: Mapping[str, Any] | None = None, *more: str) -> Iterator[Server]:
    """A daemon that drafts as told, warm."""
    speculation = ["--speculative-config", json.dumps(config or {"method": "none"}), *more]
    print(" ".join(["octavo serve", *flags, *speculation]), flush=True)
    with daemon([*SERVE, *flags, *speculation]) as server:
        run(server, Set("decode", 1, 1), 1000, quick=True)
        yield server


def run(
    server: Server, asked: Set, repetition: int, quick: bool, fields: Mapping[str, object] | None = None
) -> tuple[Figures, Counter[str], list[str]]:
    """Drive a set; its figures, what was drafted, and the answers. Raises RuntimeError when a request fails."""
    prompts = asked.prompts(repetition)
    if quick:
        prompts = [replace(prompt, max_tokens=min(prompt.max_tokens, QUICK_TOKENS)) for prompt in prompts]
    repeating = asked.kind == "repeats"
    extra = dict(fields or {}) | ({"ignore_eos": None} if repeating else {})
    before = counters(metrics_of(server))
    answers, seconds = uvloop.run(drive(server.url, server.model, prompts, asked.concurrency, extra, chat=repeating))
    if errors := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"{asked.kind}: {errors[0]}")
    figures = summarise(asked.kind, asked.concurrency, answers, seconds)
    return figures, counters(metrics_of(server)) - before, [answer.text for answer in answers]


def counters(text: str) -> Counter[str]:
    """Speculation's counters in a page of metrics, by name and, where there is one, position or bucket."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("octavo_spec_"):
                name = sample.name.removeprefix("octavo_spec_").removesuffix("_total")
                where = sample.labels.get("position") or sample.labels.get("le")
                found[name if where is None else f"{name} {float(where):g}"] += int(sample.value)
    return found


def repeats(part: int, parts: int) -> list[Prompt]:
    """One of `parts` equal parts of the prompts whose answers repeat most of them."""
    lines = REPEATS.read_text(encoding="utf-8").splitlines()[part::parts]
    return [Prompt(row["prompt"], row["max_tokens"]) for row in map(json.loads, lines)]


def costs(server: Server, quick: bool) -> list[tuple[int, float]]:
    """Seconds of a step by its rows, without drafting."""
    found = []
    for streams in STREAMS:
        figures, _, _ = run(server, Set("decode", streams, streams), 100 + streams, quick)
        found.append((streams, (figures.tpot_p50 or 0.0) / 1e3))
    return found


def ratios(
    name: str, plain: Server, drafting: Server, wanted: Mapping[Set, float | None], repetitions: int, quick: bool
) -> Iterator[dict[str, Any]]:
    """For each set the throughput of both servers, repetition by repetition, and what was drafted in all."""
    for asked, least in wanted.items():
        pairs, drafted = [], Counter[str]()
        for repetition in range(repetitions):
            without, _, expected = run(plain, asked, repetition, quick)
            figures, seen, said = run(drafting, asked, repetition, quick)
            if said != expected:
                raise RuntimeError(f"{name} changed answers of {asked.kind}")
            pairs.append((without.output_tokens_per_second, figures.output_tokens_per_second))
            drafted += seen
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"  {asked.kind}, {asked.concurrency} at once: {ratio:.2f}x", flush=True)
        yield {"name": name, "set": asdict(asked), "wanted": least, "pairs": pairs, "drafted": drafted}


def lengths(quick: bool) -> Iterator[dict[str, Any]]:
    """Tokens that a verification gives and the throughput, with drafts of full length: chains and trees."""
    drafter = {"method": "draft_model", "model": str(default_model()), "quantization": "int4"}
    for name, config, flags, shapes in (
        ("none", None, BFLOAT16, {"-": {}}),
        ("self", SELF, BFLOAT16, BOTH),
        ("draft_model", drafter, BFLOAT16, BOTH),
        ("none", None, (), {"-": {}}),
        ("lookahead", {"method": "lookahead"}, (), BOTH),
        ("ngram", {"method": "ngram"}, (), CHAINS),
    ):
        for shape, keys in shapes.items():
            with started(flags, config and {**config, **keys, "adaptive": False}) as server:
                for asked in (replace(SINGLE, requests=1), replace(REPEATING, requests=2)):
                    figures, seen, _ = run(server, asked, 0, quick)
                    row = {"name": name, "shape": shape, "set": asked.kind, "drafted": seen, "keys": keys}
                    yield row | {"bfloat16": bool(flags), "speed": figures.output_tokens_per_second}


def rules(quick: bool) -> Iterator[dict[str, Any]]:
    """Acceptance by either rule, of the same drafting model at the same temperatures."""
    for rule in ("keyed", "rejection"):
        config = {**SELF, "num_speculative_tokens": 4, "adaptive": False}
        with started(BFLOAT16, config, "--speculative-acceptance", rule) as server:
            for temperature in (0.7, 1.0):
                figures, seen, _ = run(server, SINGLE, 0, quick, {"temperature": temperature, "seed": 1})
                speed = figures.output_tokens_per_second
                yield {"rule": rule, "temperature": temperature, "drafted": seen, "speed": speed, "tokens": 4}


if __name__ == "__main__":
    sys.exit(main())
