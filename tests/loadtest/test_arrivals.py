"""When requests come, how far a rate can go, and whether two runs differ: arithmetic that can be checked by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from loadtest.arrivals import due
from loadtest.bench import highest_rate
from loadtest.difference import interval, rows


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def test_arrivals_have_the_rate_that_was_asked_for() -> None:
    for arrivals in ("poisson", "constant", "burst:5"):
        assert due(arrivals, 4.0, 8000, seed=1)[-1] == pytest.approx(2000, rel=0.05), arrivals


def test_poisson_gaps_vary_as_much_as_they_last_and_constant_ones_not_at_all() -> None:
    assert np.std(gaps(due("poisson", 4.0, 8000, seed=1))) == pytest.approx(0.25, rel=0.05)
    assert np.std(gaps(due("constant", 4.0, 8000, seed=1))) == pytest.approx(0, abs=1e-9)


def test_a_burst_comes_at_once() -> None:
    times = due("burst:4", 4.0, 40, seed=1)
    assert [times.count(at) for at in dict.fromkeys(times)] == [4] * 10


def test_a_ramp_begins_at_one_rate_and_ends_at_the_other() -> None:
    times = due("ramp:20", 2.0, 22_000, seed=1)
    assert times[-1] == pytest.approx(2000, rel=0.05)
    first, last = (sum(low <= at < low + 100 for at in times) / 100 for low in (0, times[-1] - 100))
    assert (first, last) == (pytest.approx(2.45, rel=0.2), pytest.approx(19.55, rel=0.1))


def test_the_same_seed_gives_the_same_times_and_others_other_ones() -> None:
    assert due("poisson", 1.0, 9, seed=3) == due("poisson", 1.0, 9, seed=3) != due("poisson", 1.0, 9, seed=4)


@pytest.mark.parametrize("arrivals", ["often", "burst:0", "burst:x", "ramp:0", "ramp:inf", "poisson:3", "constant:2"])
def test_other_arrivals_are_refused(arrivals: str) -> None:
    with pytest.raises(ValueError, match="none of poisson"):
        due(arrivals, 1.0, 3, seed=1)


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.0, 100.0])
def test_the_highest_rate_is_found_to_within_five_percent(capacity: float) -> None:
    tried: list[float] = []
    found = highest_rate(lambda rate: bool(tried.append(rate)) or rate <= capacity, 1.0)
    assert capacity / 1.06 <= found <= capacity
    assert len(tried) < 20


def test_a_server_that_keeps_nothing_has_no_capacity() -> None:
    assert highest_rate(lambda rate: False, 1.0) == 0.0


def test_a_server_that_keeps_everything_ends_the_search_too() -> None:
    assert highest_rate(lambda rate: True, 1.0) == 1024


def test_an_interval_holds_the_true_change_and_luck_is_not_shown_as_one() -> None:
    chance = np.random.default_rng(1)
    old, same, slower = (chance.lognormal(mean, 0.3, 300) for mean in (3.0, 3.0, 3.2))
    low, high = interval(old, slower, 50)
    assert 0 < low < np.exp(0.2) - 1 < high
    low, high = interval(old, same, 50)
    assert low < 0 < high


def test_runs_without_a_set_in_common_are_not_compared() -> None:
    entry = {"kind": "chat", "details": {"ttft": [], "tpot": [], "e2e": [], "pieces_by_second": []}}
    with pytest.raises(ValueError, match="in common"):
        rows({"figures": [entry]}, {"figures": [entry | {"kind": "other"}]})
