"""Tables and charts of `docs/speculation.md`, from the figures of `loadtest.speculation`, beside what theory says.

Pure functions. A draft in theory is the lengths of its paths from the root: `(6,)` is a chain of six tokens, `(3, 3)` a
tree of two branches and three levels, which costs as many drafted rows. Every path but the first has a first token of
its own. Source of the formula: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative
Decoding", ICML 2023, equation 1.
"""

from __future__ import annotations

import bisect
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.document import image
from loadtest.plots import Axis, Series, chart
from loadtest.tables import Row, markdown

DRAFTED = (2, 4, 6)  # lengths of chains that are drawn
SHARES = [share / 20 for share in range(21)]
SECOND = (0.2, 0.5)  # how often a second choice is right where the first is wrong


def tokens_of_chain(acceptance: float, drafted: int) -> float:
    """Expected tokens of a step, (1 - a^(K+1)) / (1 - a): what is accepted of K, and the one that comes for nothing."""
    return sum(acceptance**length for length in range(drafted + 1))


def simulate(draft: Sequence[int], acceptance: float, second: float = 0.0, steps: int = 10_000, seed: int = 1) -> float:
    """Mean tokens of a step. `acceptance` is of a token whose prefix was accepted; `second` that of a branch's first
    token once the branches before it were wrong."""
    chance = random.Random(seed)
    tokens = 0
    for _ in range(steps):
        tokens += 1
        for branch, length in enumerate(draft):
            if chance.random() < (second if branch else acceptance):
                tokens += 1
                for _ in range(length - 1):
                    if chance.random() >= acceptance:
                        break
                    tokens += 1
                break
    return tokens / steps


def step_cost(costs: Mapping[int, float], rows: int) -> float:
    """Seconds of a step of so many rows, from a table of some: linear between those and beyond. Needs two."""
    known = sorted(costs)
    upper = min(max(bisect.bisect_left(known, rows), 1), len(known) - 1)
    low, high = known[upper - 1], known[upper]
    return costs[low] + (costs[high] - costs[low]) * (rows - low) / (high - low)


def speedup(tokens: float, draft: Sequence[int], costs: Mapping[int, float]) -> float:
    """Against one token a step. Every path has a row for the last token known too; drafting costs nothing."""
    return tokens * step_cost(costs, 1) / step_cost(costs, sum(draft) + len(draft))


def mean_length(drafted: Mapping[str, float]) -> float:
    """Tokens that a verification gave, the one that comes for nothing included; 1 without any."""
    count = drafted.get("acceptance_length_count", 0.0)
    return drafted["acceptance_length_sum"] / count if count else 1.0


def acceptance(drafted: Mapping[str, float], tokens: int) -> float:
    """Of drafted tokens whose prefix was accepted, in chains of `tokens`: a chain that was not accepted whole has one
    that was not."""
    count = drafted.get("acceptance_length_count", 0.0)
    right = drafted.get("acceptance_length_sum", 0.0) - count
    wrong = drafted.get(f"acceptance_length_bucket {tokens:g}", 0.0)
    return right / (right + wrong) if right + wrong else 0.0


def charts(content: dict[str, Any]) -> dict[str, str]:
    """SVG documents by name."""
    costs = dict(content["costs"])
    across = Axis("share of drafted tokens accepted")
    chains = [row for row in content["lengths"] if row["shape"].startswith("chain")]
    free = [row for row in chains if not row["bfloat16"]]  # a drafting model's time is not in the step's
    return {
        "speculation-tokens": chart(
            "Tokens a step by acceptance and draft length K",
            across,
            Axis("tokens a step"),
            [Series(f"theory, K = {k}", [(a, tokens_of_chain(a, k)) for a in SHARES], dashed=True) for k in DRAFTED]
            + [_scattered(chains, k, [mean_length(row["drafted"]) for row in chains]) for k in DRAFTED],
        ),
        "speculation-speedup": chart(
            "Speedup of one stream where drafting costs nothing",
            across,
            Axis("times"),
            [
                Series(
                    f"theory, K = {k}", [(a, speedup(tokens_of_chain(a, k), (k,), costs)) for a in SHARES], dashed=True
                )
                for k in DRAFTED
            ]
            + [_scattered(free, k, [times(row, content["lengths"]) for row in free]) for k in DRAFTED],
        ),
        "speculation-tree": chart(
            "Simulated: a chain of 6 against 2 branches of 3",
            Axis("acceptance of first choices"),
            Axis("tokens a step"),
            [
                Series("chain", [(a, simulate((6,), a)) for a in SHARES]),
                *(Series(f"tree, second {s:g}", [(a, simulate((3, 3), a, s)) for a in SHARES]) for s in SECOND),
            ],
        ),
    }


def _scattered(rows: Sequence[Any], drafted: int, heights: Sequence[float]) -> Series:
    """Chains of one length, each where its acceptance is."""
    points = [
        (acceptance(row["drafted"], drafted), height)
        for row, height in zip(rows, heights, strict=True)
        if row["keys"]["num_speculative_tokens"] == drafted
    ]
    return Series(f"measured, K = {drafted}", sorted(points), scattered=True)


def times(row: Mapping[str, Any], rows: Sequence[Any]) -> float:
    """Throughput against that of the same requests without drafts."""
    without = (one for one in rows if one["name"] == "none" and one["set"] == row["set"])
    return float(row["speed"] / next(one["speed"] for one in without if one["bfloat16"] == row["bfloat16"]))


def body(content: dict[str, Any]) -> str:
    """The generated part of the document."""
    gains: list[Row] = [
        ("method", "set", "without, tok/s", "with, tok/s", "ratio", "from - to", "wanted", "tokens a draft")
    ]
    for row in content["ratios"]:
        each = [b / a for a, b in row["pairs"]]
        without, speculating = (statistics.median(column) for column in zip(*row["pairs"], strict=True))
        ratio = statistics.median(each)
        wanted = (
            "-" if row["wanted"] is None else f"{row['wanted']:g}x {'reached' if ratio >= row['wanted'] else 'missed'}"
        )
        gains.append(
            (
                row["name"],
                f"{row['set']['kind']}, {row['set']['concurrency']} at once",
                *(f"{without:.0f}", f"{speculating:.0f}", f"{ratio:.2f}x"),
                *(f"{min(each):.2f} - {max(each):.2f}", wanted, f"{mean_length(row['drafted']):.2f}"),
            )
        )
    shapes: list[Row] = [("method", "set", "draft", "acceptance", "tokens a step", "theory", "tok/s", "times")]
    for row in content["lengths"]:
        theory = found = "-"
        if row["shape"].startswith("chain"):
            drafted = row["keys"]["num_speculative_tokens"]
            share = acceptance(row["drafted"], drafted)
            found, theory = f"{share:.0%}", f"{tokens_of_chain(share, drafted):.2f}"
        name = f"{row['name']}, bfloat16" if row["bfloat16"] else row["name"]
        given = (f"{mean_length(row['drafted']):.2f}", theory, f"{row['speed']:.0f}")
        shapes.append((name, row["set"], row["shape"], found, *given, f"{times(row, content['lengths']):.2f}x"))
    rules: list[Row] = [("rule", "temperature", "acceptance", "tokens a step", "theory", "tok/s")]
    for row in content["rules"]:
        share = acceptance(row["drafted"], row["tokens"])
        cells = (f"{share:.1%}", f"{mean_length(row['drafted']):.2f}", f"{tokens_of_chain(share, row['tokens']):.2f}")
        rules.append((row["rule"], f"{row['temperature']:g}", *cells, f"{row['speed']:.0f}"))
    costs = ", ".join(f"{rows}: {seconds * 1e3:.1f}" for rows, seconds in content["costs"])
    made_by = content["machine"]
    few = " A quick run: the figures mean nothing." if content["quick"] else ""
    parts = [
        f"{made_by['processor']}, {made_by['cpus']} CPUs, {content['repetitions']} runs of each ratio.{few}",
        *("## Gain", markdown(gains)),
        *("## Chains and trees", markdown(shapes), image("speculation-tokens"), image("speculation-tree")),
        *("## Two rules", markdown(rules)),
        *("## What to expect", f"Milliseconds of a step by its rows: {costs}.", image("speculation-speedup")),
    ]
    return "\n\n".join(parts) + "\n"
