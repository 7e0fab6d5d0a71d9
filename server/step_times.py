"""The tables of a profile, from steps as the journal has them and calls as the model's thread saw them.

Pure functions. Times in milliseconds, means over the steps of a kind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

Call = tuple[float, float]  # when the model began and ended a step
Step = Mapping[str, Any]  # as the journal has it


def matched(
    steps: Sequence[Step], calls: Sequence[Call], sampling_seconds_per_row: float | None = None
) -> list[tuple[Step, dict[str, float]]]:
    """Each step that has a call, in order, with the seconds of its parts, in theirs. Steps that failed have none."""
    found, at = [], 0
    for step in steps:
        handed_over = step["time"] + step["plan_seconds"]
        returned = handed_over + step["run_seconds"]
        while at < len(calls) and calls[at][0] < handed_over:
            at += 1
        if at == len(calls) or calls[at][1] > returned:
            continue
        began, ended = calls[at]
        parts = {
            "wait for requests about to come": step["wait_seconds"],
            "plan and batch": step["plan_seconds"],
            "to the model's thread": began - handed_over,
            "model": ended - began,
        }
        if sampling_seconds_per_row is not None:
            parts["  of it sampling, about"] = step["sampled_tokens"] * sampling_seconds_per_row
        parts |= {"back to the event loop": returned - ended, "apply": step["apply_seconds"]}
        found.append((step, parts))
    return found


def step_table(steps: Sequence[Step], calls: Sequence[Call], sampling_seconds_per_row: float | None) -> Table:
    """Where the time of a step goes; steps that only decode apart from those that compute prompts too."""
    times = matched(steps, calls, sampling_seconds_per_row)
    kinds = {
        "decode only": [one for one in times if not one[0]["prefill_tokens"]],
        "with prompts": [one for one in times if one[0]["prefill_tokens"]],
        "all": times,
    }
    columns = {}
    for name, group in kinds.items():
        count, whole = len(group), sum(map(_seconds, (step for step, _ in group)))
        cells = columns[name] = {"steps": (str(count), "")}
        cells["rows"] = (f"{sum(step['rows'] for step, _ in group) / count:.1f}" if count else "-", "")
        for part in times[0][1] if times else ():
            spent = sum(parts[part] for _, parts in group)
            cells[part] = (_ms(spent / count), f"{spent / whole:.1%}") if count else ("-", "")
        cells["together"] = (_ms(whole / count) if count else "-", "")
    table = _table("A step, mean ms", *(heading for name in columns for heading in (name, "share")))
    for line in columns["all"]:
        table.add_row(line, *(text for cells in columns.values() for text in cells[line]))
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


def _seconds(step: Step) -> float:
    seconds: float = sum(step[part] for part in ("wait_seconds", "plan_seconds", "run_seconds", "apply_seconds"))
    return seconds


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"
