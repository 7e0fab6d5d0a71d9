"""Figures of several servers side by side: medians over seeds, ratios, and how far from the machine's ceilings.

Pure functions from figures to rows of text. Knows nothing of how anything was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from loadtest.figures import Figures
from loadtest.tables import Row, short

MOST_TPOT_SPREAD = 2.0  # a stream is smooth when its slow tokens take at most so many times the usual time


@dataclass(frozen=True, slots=True)
class Measured:
    """A server's figures: the medians over seeds of each set, by kind. `of_peer` False: Octavo itself."""

    title: str
    weights: str  # "stored" or "bfloat16": servers are compared within one
    of_peer: bool
    ready_seconds: float | None
    sets: Mapping[str, Figures]


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
    """Octavo as it was measured beside a peer: what stands before it."""
    before = measured[: measured.index(peer)]
    return next((one for one in reversed(before) if not one.of_peer and one.weights == peer.weights), None)


def ratio_rows(measured: Sequence[Measured]) -> list[Row]:
    """A heading, and for each peer Octavo's throughput as a multiple of it."""
    kinds = kinds_of(measured)
    rows: list[Row] = [("octavo against", *kinds)]
    for peer in measured:
        ours = own(measured, peer)
        if peer.of_peer and ours is not None:
            shown = [ratio(ours.sets.get(kind), peer.sets.get(kind)) for kind in kinds]
            rows.append(
                (f"{peer.title}, {peer.weights}", *("-" if value is None else f"{value:.2f}x" for value in shown))
            )
    return rows


def figure_rows(measured: Sequence[Measured]) -> list[Row]:
    """A heading, and for each server its throughput with TTFT p50 / TPOT p50 in milliseconds."""
    kinds = kinds_of(measured)
    rows: list[Row] = [("", *kinds, "start")]
    for one in measured:
        cells = [_cell(one.sets.get(kind)) for kind in kinds]
        start = "-" if one.ready_seconds is None else f"{one.ready_seconds:.1f} s"
        rows.append((f"{one.title}, {one.weights}", *cells, start))
    return rows


def ceiling_rows(measured: Sequence[Measured], probe: Mapping[str, Any]) -> list[Row]:
    """A heading, and for each set of Octavo's what it achieves of what the machine can do, as `models.probe` found it.

    Bytes: the weights, once a token of a stream. Operations: the matrix products of every token that was computed, in
    the arithmetic of the weights.
    """
    rows: list[Row] = [("set", "GB/s", "of the machine's", "GOP/s", "of the machine's")]
    for one in measured:
        ceilings, cost = probe["ceilings"], probe["costs"].get(one.weights)
        arithmetic = "bfloat16" if one.weights == "bfloat16" else "int8"
        if one.of_peer or cost is None:
            continue
        for kind, figures in one.sets.items():
            read, operations = bytes_per_second(figures, cost), operations_per_second(figures, cost)
            row = (f"{kind}, {one.weights}", *_share(read, ceilings["bytes_read"]))
            rows.append((*row, *_share(operations, ceilings[f"{arithmetic}_operations"])))
    return rows


def bytes_per_second(figures: Figures, cost: Mapping[str, int]) -> float | None:
    """Weight bytes of a step over the usual time of one; None where no stream was timed."""
    return None if not figures.tpot_p50 else cost["weight_bytes"] / (figures.tpot_p50 / 1e3)


def operations_per_second(figures: Figures, cost: Mapping[str, int]) -> float:
    """Two for each weight a computed token is multiplied by; the head's for output tokens only."""
    computed = figures.prompt_tokens - figures.cached_tokens + figures.completion_tokens - figures.requests
    products = computed * cost["layer_weights"] + figures.completion_tokens * cost["head_weights"]
    return 2 * products / figures.wall_seconds


def slower(measured: Sequence[Measured]) -> list[str]:
    """Where the best peer's median TTFT or TPOT is below Octavo's, in words."""
    found = []
    for ours in measured:
        peers = [peer for peer in measured if peer.of_peer and own(measured, peer) is ours]
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


def kinds_of(measured: Iterable[Measured]) -> list[str]:
    """Every set that any server has, in the order they were run."""
    return list(dict.fromkeys(kind for one in measured for kind in one.sets))


def _cell(figures: Figures | None) -> str:
    if figures is None:
        return "-"
    if figures.failed:
        return f"{figures.failed} failed"
    return f"{short(throughput(figures))} ({short(figures.ttft_p50)} / {short(figures.tpot_p50)})"


def _share(value: float | None, ceiling: float) -> tuple[str, str]:
    return ("-", "-") if value is None else (short(value / 1e9), f"{value / ceiling:.0%} of {short(ceiling / 1e9)}")
