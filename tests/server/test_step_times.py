"""The tables of a profile: steps meet their calls, and parts make up the whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console, RenderableType

from server.step_times import Call, event_loop_table, latency_line, matched, step_table

ROOT = Path(__file__).parents[2]


def step(time: float, prompt: int = 0, rows: int = 4) -> dict[str, Any]:
    """A step of 12 ms: 2 wait, 1 plan, 8 run, 1 apply."""
    seconds = {"wait_seconds": 0.002, "plan_seconds": 0.001, "run_seconds": 0.008, "apply_seconds": 0.001}
    return {"time": time, "prefill_tokens": prompt, "rows": rows, "sampled_tokens": 4, **seconds}


def call(time: float) -> Call:
    """Of the step at `time`: it begins 2 ms after it was handed over and ends 1 ms before it was taken back."""
    return time + 0.003, time + 0.008


def shown(what: RenderableType) -> list[list[str]]:
    console = Console(width=150)
    with console.capture() as captured:
        console.print(what)
    return [line.split() for line in captured.get().splitlines()]


def test_a_steps_parts_are_in_their_order_and_leave_nothing_out() -> None:
    [(_, parts)] = matched([step(5.0)], [call(5.0)])
    waits, *others = parts
    assert waits == "wait for requests about to come"
    assert others == ["plan and batch", "to the model's thread", "model", "back to the event loop", "apply"]
    assert list(parts.values()) == pytest.approx([0.002, 0.001, 0.002, 0.005, 0.001, 0.001])


def test_steps_meet_their_own_calls_though_either_may_be_missing() -> None:
    steps = [step(1.0), step(2.0), step(3.0), step(4.0)]
    calls = [call(0.5), call(1.0), call(3.0), call(3.5), call(4.0)]  # the second step failed before the model
    assert len(matched(steps, calls)) == 3
    assert len(matched(steps, calls[:2])) == 1
    assert matched(steps, []) == []


def test_steps_with_prompts_stand_apart() -> None:
    rows = shown(step_table([step(1.0), step(2.0, prompt=60, rows=64)], [call(1.0), call(2.0)], 0.0005))
    assert rows[2] == ["steps", "1", "1", "2"]
    assert rows[3] == ["rows", "4.0", "64.0", "34.0"]
    assert rows[7] == ["model", *["5.000", "41.7%"] * 3]
    assert rows[8][-6:] == ["2.000", "16.7%"] * 3
    assert rows[-1] == ["together", *["12.000"] * 3]


def test_without_a_native_sampler_nothing_is_said_of_sampling() -> None:
    assert not any("sampling" in word for row in shown(step_table([step(1.0)], [call(1.0)], None)) for word in row)
    assert shown(step_table([], [], None))[-1] == ["together", "-", "-", "-"]


def test_what_no_job_accounts_for_is_everything_else() -> None:
    threads = {"event loop": (0.5, 0.1), "model": (1.5, 0.2)}
    rows = shown(event_loop_table({"plan": 0.1, "apply": 0.2}, 100, 2.0, threads))
    assert rows[2] == ["plan", "1.000", "5.0%"]
    assert rows[4] == ["everything", "else", "2.000", "10.0%"]
    assert rows[5][-2:] == ["5.000", "25.0%"]
    assert rows[8][-2:] == ["2.000", "10.0%"]
    assert shown(event_loop_table({"plan": 0.1}, 0, 2.0, {}))[-1] == ["plan", "100.000", "5.0%"]


def test_lateness_is_median_tail_and_worst() -> None:
    assert latency_line("it", [0.001] * 98 + [0.002, 0.005]) == (
        "it late by 1.00 ms (p50), 5.00 ms (p99), 5.00 ms at worst"
    )
    assert latency_line("it", []) == "it: not measured"


@pytest.mark.e2e
def test_a_profile_of_the_default_model_shows_every_part(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "server.cli", "profile", "--kv-memory", "256MiB", "--sets", "prefix:2:2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    for part in ("plan and batch", "of it sampling", "detokenise", "everything else", "late by"):
        assert part in result.stdout
    steps = next(line for line in result.stdout.splitlines() if line.startswith(" steps"))
    assert int(steps.split()[1]) >= 20  # decode steps whose calls were found
