"""Tables and charts of `docs/speculation.md`, from the figures of `loadtest.speculation`. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from loadtest.plots import Axis, Series, chart
from loadtest.ratios import Row, markdown
from loadtest.scaling import image
from loadtest.speculation_theory import simulate, speedup, tokens_of_chain

DRAFTED = (1, 2, 4, 8)  # lengths of chains that are drawn
SHARES = [share / 20 for share in range(21)]
SECOND = (0.2, 0.5)  # how often a second choice is right where the first is wrong


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
    chains = [row for row in content["lengths"] if row["shape"].startswith("chain")]
    measured = [(acceptance(row["drafted"], 6), mean_length(row["drafted"])) for row in chains]
    rules = [(acceptance(row["drafted"], row["tokens"]), mean_length(row["drafted"])) for row in content["rules"]]
    across = Axis("share of drafted tokens accepted")
    return {
        "speculation-tokens": chart(
            "Tokens a step by acceptance and draft length K",
            across,
            Axis("tokens a step"),
            [
                *(
                    Series(f"theory, K = {drafted}", [(a, tokens_of_chain(a, drafted)) for a in SHARES], dashed=True)
                    for drafted in (1, 2, 4, 6)
                ),
                Series("measured, K = 6", sorted(measured)),
                Series("measured, K = 4", sorted(rules)),
            ],
        ),
        "speculation-speedup": chart(
            "Speedup of one stream by acceptance and K, drafting for nothing",
            across,
            Axis("times"),
            [
                Series(
                    f"K = {drafted}",
                    [(a, speedup(tokens_of_chain(a, drafted), (drafted,), costs)) for a in SHARES],
                    dashed=True,
                )
                for drafted in DRAFTED
            ],
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
    shapes: list[Row] = [("method", "set", "draft", "tokens a step", "acceptance", "theory", "tok/s")]
    for row in content["lengths"]:
        share = acceptance(row["drafted"], row["keys"]["num_speculative_tokens"])
        theory = f"{tokens_of_chain(share, 6):.2f}" if row["shape"].startswith("chain") else "-"
        length = f"{mean_length(row['drafted']):.2f}"
        shapes.append((row["name"], row["set"], row["shape"], length, f"{share:.0%}", theory, f"{row['speed']:.0f}"))
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
