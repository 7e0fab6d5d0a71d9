"""Figures of several servers side by side: medians over seeds, ratios, and how far from the machine's ceilings.

Pure functions from figures to rows of text. Knows nothing of how anything was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from loadtest.figures import Figures

Row = tuple[str, ...]
MOST_TPOT_SPREAD = 2.0  # a stream is smooth when its slow tokens take at most so many times the usual time


@dataclass(frozen=True, slots=True)
class Measured:
    """A server's figures: the medians over seeds of each set, by kind. `of_peer` False: Octavo itself."""

    title: str
    weights: str  # "stored" or "bfloat16": servers are compared within one
    of_peer: bool
    ready_seconds: float | None
    sets: Mapping[str, Figures]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The machine's best, per second."""

    bytes_read: float
    int8_operations: float
    bfloat16_operations: float

    def operations(self, weights: str) -> float:
        """Of the arithmetic that these weights are computed in."""
        return self.bfloat16_operations if weights == "bfloat16" else self.int8_operations


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step of the model costs."""

    layer_weights: int
    head_weights: int
    weight_bytes: int


def medians(figures: Iterable[Figures]) -> dict[str, Figures]:
    """By kind, each number the median over the runs of that kind. Failures add up: one is enough to distrust a set."""
    by_kind: dict[str, list[Figures]] = {}
    for figure in figures:
        by_kind.setdefault(figure.kind, []).append(figure)
    return {kind: _median(runs) for kind, runs in by_kind.items()}


def _median(runs: Sequence[Figures]) -> Figures:
    values: dict[str, float | None] = {}
    for field in fields(Figures):
        if field.name in ("kind", "requests", "concurrency", "failed"):
            continue
        known = [value for run in runs if (value := getattr(run, field.name)) is not None]
        values[field.name] = statistics.median(known) if known else None
    return replace(runs[0], failed=sum(run.failed for run in runs), **values)  # type: ignore[arg-type]


def throughput(figures: Figures) -> float:
    """Tokens a second: of prompts where nothing else is asked for, else of output."""
    one_token = figures.completion_tokens <= figures.requests
    return figures.prompt_tokens_per_second if one_token else figures.output_tokens_per_second


def ratio(ours: Figures | None, theirs: Figures | None) -> float | None:
    """How many times their throughput ours is; None unless both answered every request."""
    if ours is None or theirs is None or ours.failed or theirs.failed or not throughput(theirs):
        return None
    return throughput(ours) / throughput(theirs)


def own(measured: Sequence[Measured], peer: Measured) -> Measured | None:
    """Octavo in the weights that a peer is compared in."""
    return next((one for one in measured if not one.of_peer and one.weights == peer.weights), None)


def ratio_rows(measured: Sequence[Measured]) -> list[Row]:
    """A heading, and for each peer Octavo's throughput as a multiple of it."""
    kinds = kinds_of(measured)
    rows: list[Row] = [("octavo against", *kinds)]
    for peer in measured:
        ours = own(measured, peer)
        if peer.of_peer and ours is not None:
            shown = [ratio(ours.sets.get(kind), peer.sets.get(kind)) for kind in kinds]
            rows.append((f"{peer.title}, {peer.weights}", *(_times(value) for value in shown)))
    return rows


def figure_rows(measured: Sequence[Measured]) -> list[Row]:
    """A heading, and for each server its throughput with TTFT p50 / TPOT p50 in milliseconds."""
    kinds = kinds_of(measured)
    rows: list[Row] = [("", *kinds, "start")]
    for one in measured:
        cells = [_cell(one.sets.get(kind)) for kind in kinds]
        rows.append((f"{one.title}, {one.weights}", *cells, _seconds(one.ready_seconds)))
    return rows


def ceiling_rows(measured: Sequence[Measured], ceilings: Ceilings, costs: Mapping[str, Cost]) -> list[Row]:
    """A heading, and for each set of Octavo's what it achieves of what the machine can do.

    Bytes: the weights, once a token of a stream. Operations: the matrix products of every token that was computed.
    """
    rows: list[Row] = [("set", "GB/s", "of the machine's", "GOP/s", "of the machine's")]
    for one in measured:
        cost = costs.get(one.weights)
        if one.of_peer or cost is None:
            continue
        for kind, figures in one.sets.items():
            read, operations = bytes_per_second(figures, cost), operations_per_second(figures, cost)
            row = (f"{kind}, {one.weights}", *_share(read, ceilings.bytes_read))
            rows.append((*row, *_share(operations, ceilings.operations(one.weights))))
    return rows


def bytes_per_second(figures: Figures, cost: Cost) -> float | None:
    """Weight bytes of a step over the usual time of one; None where no stream was timed."""
    return None if not figures.tpot_p50 else cost.weight_bytes / (figures.tpot_p50 / 1e3)


def operations_per_second(figures: Figures, cost: Cost) -> float:
    """Two for each weight a computed token is multiplied by; the head's for output tokens only."""
    computed = figures.prompt_tokens - figures.cached_tokens + figures.completion_tokens - figures.requests
    products = computed * cost.layer_weights + figures.completion_tokens * cost.head_weights
    return 2 * products / figures.wall_seconds


def slower(measured: Sequence[Measured]) -> list[str]:
    """Where the best peer's median TTFT or TPOT is below Octavo's, in words."""
    found = []
    for ours in measured:
        peers = [peer for peer in measured if peer.of_peer and peer.weights == ours.weights]
        for kind, figures in {} if ours.of_peer else ours.sets.items():
            for name in ("ttft_p50", "tpot_p50"):
                theirs = [
                    (value, peer.title)
                    for peer in peers
                    if kind in peer.sets and not peer.sets[kind].failed
                    if (value := getattr(peer.sets[kind], name)) is not None
                ]
                value = getattr(figures, name)
                if theirs and value is not None and min(theirs)[0] < value:
                    what = name.removesuffix("_p50").upper()
                    best, title = min(theirs)
                    found.append(f"{kind}, {ours.weights}: {what} p50 is {value:.1f} ms, {title}'s {best:.1f} ms")
    return found


def tpot_spread(figures: Figures) -> float | None:
    """TPOT p99 as a multiple of p50."""
    if not figures.tpot_p50 or figures.tpot_p99 is None:
        return None
    return figures.tpot_p99 / figures.tpot_p50


def kinds_of(measured: Iterable[Measured]) -> list[str]:
    """Every set that any server has, in the order they were run."""
    return list(dict.fromkeys(kind for one in measured for kind in one.sets))


def markdown(rows: Sequence[Row]) -> str:
    """A table in Markdown: the first row is its heading, numbers to the right."""
    head, *body = rows
    rule = ("---", *("---:" for _ in head[1:]))
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body))


def _cell(figures: Figures | None) -> str:
    if figures is None:
        return "-"
    if figures.failed:
        return f"{figures.failed} failed"
    return f"{_short(throughput(figures))} ({_short(figures.ttft_p50)} / {_short(figures.tpot_p50)})"


def _short(value: float | None) -> str:
    """Three digits or so."""
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def _share(value: float | None, ceiling: float) -> tuple[str, str]:
    return ("-", "-") if value is None else (_short(value / 1e9), f"{value / ceiling:.0%} of {_short(ceiling / 1e9)}")
