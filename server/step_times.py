"""The tables of a profile, from steps as the journal has them and calls as the model's thread saw them.

Pure functions. Times in milliseconds, means over the steps of a kind.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
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
    groups = {
        "decode only": [one for one in times if not one.has_prompt],
        "with prompts": [one for one in times if one.has_prompt],
        "all": times,
    }
    table = _table("A step, mean ms", *(heading for name in groups for heading in (name, "share")))

    def row(name: str, cells: Callable[[list[StepTimes]], tuple[str, str]]) -> None:
        table.add_row(name, *(text for group in groups.values() for text in cells(group)))

    def part(name: str, seconds: Callable[[StepTimes], float], *, share: bool = True) -> None:
        def cells(group: list[StepTimes]) -> tuple[str, str]:
            if not group:
                return "-", ""
            spent, whole = sum(map(seconds, group)), sum(one.together for one in group)
            return _ms(spent / len(group)), f"{spent / whole:.1%}" if share else ""

        row(name, cells)

    row("steps", lambda group: (str(len(group)), ""))
    row("rows", lambda group: (f"{statistics.fmean(one.rows for one in group):.1f}" if group else "-", ""))
    part("plan and batch", lambda one: one.plan)
    part("to the model's thread", lambda one: one.there)
    part("model", lambda one: one.model)
    if (each := sampling_seconds_per_row) is not None:
        part("  of it sampling, about", lambda one: one.sampled * each)
    part("back to the event loop", lambda one: one.back)
    part("apply", lambda one: one.apply)
    part("together", lambda one: one.together, share=False)
    return table


def event_loop_table(
    jobs: Mapping[str, float], steps: int, seconds: float, thread_seconds: Mapping[str, tuple[float, float]]
) -> Table:
    """Processor time of the event loop's thread by job, and what its thread and the model's did in all: milliseconds
    a step, and the share of the whole time. `thread_seconds` by name: computing, and waiting for a core."""
    steps = max(1, steps)
    table = _table("The event loop's thread, ms a step", "ms", "of the time")
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


def _table(title: str, *headings: str) -> Table:
    """Figures, and beside each its share."""
    table = Table("", title=title, title_justify="left", box=None, header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right", style="dim" if number % 2 else None)
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
