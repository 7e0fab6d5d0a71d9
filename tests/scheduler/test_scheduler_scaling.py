"""What the scheduler's cost is measured on: every request decodes in every step that counts."""

from __future__ import annotations

import pytest

from scheduler.scaling import measure


@pytest.mark.parametrize("running", [1, 5, 40])
def test_all_requests_run_together_and_every_part_takes_time(running: int) -> None:
    point = measure(running, outputs=12)
    assert point.running == running
    assert 9 <= point.steps <= 11  # the first token comes with the prompt, and the last step has none after it
    assert min(point.plan, point.apply, point.other) > 0
