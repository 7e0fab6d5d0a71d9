"""The tables of a profile, from steps as the journal has them and calls as the model's thread saw them.

Pure functions. Times in milliseconds, means over the steps of a kind.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from models.timed_runner import Call


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, in their order."""

    has_prompt: bool
    rows: int
    sampled: int
    plan: float  # planning and building the batch
    there: float  # until the model's thread begins
    model: float
    back: float  # until the event loop has the result
    apply: float

    @property
    def together(self) -> float:
        return self.plan + self.there + self.model + self.back + self.apply


def matched(steps: Sequence[Mapping[str, Any]], calls: Sequence[Call]) -> list[StepTimes]:
    """Each step of the journal with its call, in order. Steps that failed have none."""
    found, at = [], 0
    for step in steps:
        handed_over = step["time"] + step["plan_seconds"]
        returned = handed_over + step["run_seconds"]
        while at < len(calls) and calls[at].began < handed_over:
            at += 1
        if at == len(calls) or calls[at].ended > returned:
            continue
        call = calls[at]
        found.append(
            StepTimes(
                has_prompt=step["prefill_tokens"] > 0,
                rows=step["rows"],
                sampled=step["sampled_tokens"],
                plan=step["plan_seconds"],
                there=call.began - handed_over,
                model=call.ended - call.began,
                back=returned - call.ended,
                apply=step["apply_seconds"],
            )
        )
    return found


def step_table(
    steps: Sequence[Mapping[str, Any]], calls: Sequence[Call], sampling_seconds_per_row: float | None
) -> Table:
    """Where the time of a step goes; steps that only decode apart from those that compute prompts too."""
    times = matched(steps, calls)
    kinds = {
        "decode only": [one for one in times if not one.has_prompt],
        "with prompts": [one for one in times if one.has_prompt],
        "all": times,
    }
    table = Table(title="A step, mean ms", title_justify="left", box=None, header_style="bold")
    table.add_column("")
    for name in kinds:
        table.add_column(name, justify="right")
        table.add_column("share", justify="right", style="dim")
    lines = {
        "plan and batch": "plan",
        "to the model's thread": "there",
        "model": "model",
        "back to the event loop": "back",
        "apply": "apply",
    }
    table.add_row("steps", *(cell for group in kinds.values() for cell in (str(len(group)), "")))
    table.add_row("rows", *(cell for group in kinds.values() for cell in (_mean([one.rows for one in group]), "")))
    for name, part in lines.items():
        cells = [
            _part([getattr(one, part) for one in group], [one.together for one in group]) for group in kinds.values()
        ]
        table.add_row(name, *(text for cell in cells for text in cell))
        if name == "model" and sampling_seconds_per_row is not None:
            each = sampling_seconds_per_row
            cells = [
                _part([one.sampled * each for one in group], [one.together for one in group])
                for group in kinds.values()
            ]
            table.add_row("  of it sampling, about", *(text for cell in cells for text in cell))
    table.add_row(
        "together", *(t for group in kinds.values() for t in (_ms(_mean_of([one.together for one in group])), ""))
    )
    return table


def event_loop_table(
    jobs: Mapping[str, float], steps: int, seconds: float, thread_seconds: Mapping[str, tuple[float, float]]
) -> Table:
    """Processor time of the event loop's thread by job, and what its thread and the model's did in all: milliseconds
    a step, and the share of the whole time. `thread_seconds` by name: computing, and waiting for a core."""
    steps = max(1, steps)
    table = Table(title="The event loop's thread, ms a step", title_justify="left", box=None, header_style="bold")
    table.add_column("")
    table.add_column("ms", justify="right")
    table.add_column("of the time", justify="right", style="dim")
    rows = dict(jobs)
    if "event loop" in thread_seconds:
        rows["everything else"] = max(0.0, thread_seconds["event loop"][0] - sum(jobs.values()))
    for name, (computed, waited) in thread_seconds.items():
        rows[f"{name} thread, computing"] = computed
        rows[f"{name} thread, waiting for a core"] = waited
    for name, spent in rows.items():
        table.add_row(name, _ms(spent / steps), f"{spent / seconds:.1%}")
    return table


def latency_line(what: str, late_seconds: Sequence[float]) -> str:
    """Median, 99th percentile and worst of how late something was."""
    if not late_seconds:
        return f"{what}: not measured"
    ordered = sorted(late_seconds)
    p50, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.99))
    return f"{what} late by {p50 * 1e3:.2f} ms (p50), {p99 * 1e3:.2f} ms (p99), {ordered[-1] * 1e3:.2f} ms at worst"


def _part(parts: Sequence[float], wholes: Sequence[float]) -> tuple[str, str]:
    share = f"{sum(parts) / sum(wholes):.1%}" if wholes else ""
    return _ms(_mean_of(parts)), share


def _mean_of(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _mean(values: Sequence[int]) -> str:
    return f"{statistics.fmean(values):.1f}" if values else "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"
