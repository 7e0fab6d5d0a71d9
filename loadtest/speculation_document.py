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
from collections.abc import Callable, Mapping, Sequence

from loadtest.document import Content, Part, drawn
from loadtest.plots import Axis, Series
from loadtest.tables import table

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


def parts(content: Content) -> list[Part]:
    """The generated part of the document."""
    made_by, costs, lengths = content["machine"], dict(content["costs"]), _lengths(content["lengths"])
    chains = [row for row in lengths if row["drafts"]]
    free = [row for row in chains if not row["bfloat16"]]  # a drafting model's time is not in the step's
    shares = Axis("share of drafted tokens accepted")
    few = " A quick run: the figures mean nothing." if content["quick"] else ""
    steps = ", ".join(f"{rows}: {seconds * 1e3:.1f}" for rows, seconds in content["costs"])
    return [
        f"{made_by['processor']}, {made_by['cpus']} CPUs, {content['repetitions']} runs of each ratio.{few}",
        "## Gain",
        table(
            "method | set | without, tok/s | with, tok/s | ratio | from - to | wanted | tokens a draft",
            "{name} | {set[kind]}, {set[concurrency]} at once | {without:.0f} | {speculating:.0f} | {ratio:.2f}x |"
            " {least:.2f} - {most:.2f} | {verdict} | {length:.2f}",
            map(_gain, content["ratios"]),
        ),
        "## Chains and trees",
        table(
            "method | set | draft | acceptance | tokens a step | theory | tok/s | times",
            "{method} | {set} | {shape} | {found} | {length:.2f} | {theory} | {speed:.0f} | {times:.2f}x",
            lengths,
        ),
        drawn(
            "speculation-tokens",
            "Tokens a step by acceptance and draft length K",
            shares,
            Axis("tokens a step"),
            [*(_theory(k, tokens_of_chain) for k in DRAFTED), *_measured(chains, "length")],
        ),
        drawn(
            "speculation-tree",
            "Simulated: a chain of 6 against 2 branches of 3",
            Axis("acceptance of first choices"),
            Axis("tokens a step"),
            [
                Series("chain", [(a, simulate((6,), a)) for a in SHARES]),
                *(Series(f"tree, second {s:g}", [(a, simulate((3, 3), a, s)) for a in SHARES]) for s in SECOND),
            ],
        ),
        "## Two rules",
        table(
            "rule | temperature | acceptance | tokens a step | theory | tok/s",
            "{rule} | {temperature:g} | {share:.1%} | {length:.2f} | {theory:.2f} | {speed:.0f}",
            (_compared(row, row["tokens"]) for row in content["rules"]),
        ),
        "## What to expect",
        f"Milliseconds of a step by its rows: {steps}.",
        drawn(
            "speculation-speedup",
            "Speedup of one stream where drafting costs nothing",
            shares,
            Axis("times"),
            [
                *(_theory(k, lambda a, k: speedup(tokens_of_chain(a, k), (k,), costs)) for k in DRAFTED),
                *_measured(free, "times"),
            ],
        ),
    ]


def _theory(drafted: int, height: Callable[[float, int], float]) -> Series:
    return Series(f"theory, K = {drafted}", [(share, height(share, drafted)) for share in SHARES], dashed=True)


def _measured(chains: Sequence[Content], height: str) -> list[Series]:
    """For each length of chains, each where its acceptance is."""
    return [
        Series(
            f"measured, K = {drafted}",
            sorted((row["share"], row[height]) for row in chains if row["drafts"] == drafted),
            scattered=True,
        )
        for drafted in DRAFTED
    ]


def _compared(row: Content, tokens: int) -> Content:
    """What chains of so many tokens gave, and what they give in theory at the same acceptance."""
    share = acceptance(row["drafted"], tokens)
    return row | {"share": share, "length": mean_length(row["drafted"]), "theory": tokens_of_chain(share, tokens)}


def _lengths(rows: Sequence[Content]) -> list[Content]:
    """With the throughput against that of the same requests without drafts; `drafts` is the length of a chain, or 0."""
    plain = {(row["set"], row["bfloat16"]): row["speed"] for row in reversed(rows) if row["name"] == "none"}
    found = []
    for row in rows:
        drafts = row["keys"]["num_speculative_tokens"] if row["shape"].startswith("chain") else 0
        one = _compared(row, drafts) | {"drafts": drafts, "times": row["speed"] / plain[row["set"], row["bfloat16"]]}
        shown = {"found": f"{one['share']:.0%}", "theory": f"{one['theory']:.2f}"} if drafts else {}
        method = f"{row['name']}, bfloat16" if row["bfloat16"] else row["name"]
        found.append(one | {"method": method, "found": "-", "theory": "-"} | shown)
    return found


def _gain(row: Content) -> Content:
    """The medians of a ratio's runs."""
    each = [b / a for a, b in row["pairs"]]
    without, speculating = (statistics.median(column) for column in zip(*row["pairs"], strict=True))
    ratio, wanted = statistics.median(each), row["wanted"]
    verdict = "-" if wanted is None else f"{wanted:g}x {'reached' if ratio >= wanted else 'missed'}"
    speeds = {"without": without, "speculating": speculating, "ratio": ratio, "least": min(each), "most": max(each)}
    return row | speeds | {"verdict": verdict, "length": mean_length(row["drafted"])}
