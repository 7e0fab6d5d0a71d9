"""Timing the phases of a start."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from server.startup import Phases


def test_phases_are_shown_as_they_end_and_those_before_the_first_showing_too() -> None:
    phases = Phases(time.perf_counter())
    phases.note("settings", 0.25)
    shown: list[str] = []
    phases.show(shown.append)
    with phases.phase("weights"):
        assert len(shown) == 1
    assert shown == ["settings      0.25 s", "weights       0.00 s"]
    assert list(phases.seconds) == ["settings", "weights"]


def test_a_phase_that_fails_is_not_recorded() -> None:
    phases = Phases(time.perf_counter())
    with pytest.raises(KeyError), phases.phase("weights"):
        raise KeyError
    assert phases.seconds == {}


def test_age_counts_from_the_start_of_the_process() -> None:
    age = Phases(time.perf_counter()).age_seconds()
    # psutil knows the moment of booting only to the second.
    assert age == pytest.approx(time.time() - psutil.Process(os.getpid()).create_time(), abs=1.5)


def test_age_counts_from_the_command_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.startup._process_age_seconds", lambda: None)
    assert Phases(time.perf_counter() - 3).age_seconds() == pytest.approx(3, abs=0.5)
