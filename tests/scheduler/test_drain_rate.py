"""How long a refused client is asked to stay away."""

from __future__ import annotations

import pytest

from scheduler.drain_rate import DrainRate


def test_nothing_measured_means_one_second() -> None:
    rate = DrainRate()
    rate.busy(10.0)
    assert rate.per_second(20.0) is None
    assert rate.retry_after_seconds(50, 20.0) == 1.0


def test_departures_are_counted_over_the_time_of_work() -> None:
    rate = DrainRate()
    rate.busy(10.0)
    for now in (12.0, 14.0, 16.0, 18.0):
        rate.note(now)
    assert rate.per_second(20.0) == pytest.approx(0.4)
    assert rate.retry_after_seconds(3, 20.0) == 8.0


def test_time_without_work_does_not_count() -> None:
    rate = DrainRate()
    rate.busy(0.0)
    rate.note(1.0)
    rate.note(2.0)
    rate.idle(2.0)
    assert rate.per_second(5000.0) == pytest.approx(1.0)
    rate.busy(5000.0)
    assert rate.per_second(5001.0) == pytest.approx(1.0)
    rate.note(5002.0)
    assert rate.per_second(5004.0) == pytest.approx(0.25)


def test_only_the_last_minute_counts() -> None:
    rate = DrainRate()
    rate.busy(0.0)
    for now in range(1, 31):
        rate.note(float(now))
    rate.note(100.0)
    assert rate.per_second(120.0) == pytest.approx(1 / 60)


def test_many_departures_are_measured_over_the_latest_of_them() -> None:
    rate = DrainRate()
    rate.busy(0.0)
    for now in range(2000):
        rate.note(20 + now / 100)
    assert rate.per_second(40.0) == pytest.approx(100, rel=0.02)


def test_the_answer_is_bounded() -> None:
    rate = DrainRate()
    rate.busy(0.0)
    rate.note(50.0)
    assert rate.retry_after_seconds(10**6, 50.0) == 600.0
    assert rate.retry_after_seconds(0, 50.0) == 1.0
