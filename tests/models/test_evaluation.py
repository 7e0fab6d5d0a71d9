"""The arithmetic of an evaluation, on distributions small enough to work out by hand."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from models.evaluation import LIMITS, TEXT, Comparison, Score, compare, evaluate, summarise, windows

F32Array = npt.NDArray[np.float32]
I32Array = npt.NDArray[np.int32]


def logits(*probabilities: list[float]) -> F32Array:
    """Logits of these distributions, each row shifted: a softmax must not mind."""
    rows = np.log(np.array(probabilities, np.float32))
    return np.asarray(rows + np.arange(len(rows), dtype=np.float32)[:, None], np.float32)


def score(**changes: float) -> Score:
    values = {"kl_mean": 0.0, "kl_p99": 0.0, "kl_max": 0.0, "agreement": 1.0, "perplexity": 10.0}
    values |= {"reference_perplexity": 10.0, "seconds": 1.0} | changes
    return Score("int8", 100, **values)


def test_divergence_agreement_and_surprise_are_those_worked_out_by_hand() -> None:
    expected, found = logits([0.5, 0.25, 0.25], [0.1, 0.2, 0.7]), logits([0.25, 0.5, 0.25], [0.1, 0.2, 0.7])
    part = compare(expected, found, np.array([2, -1], np.int32))
    assert part.kl[0] == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5), abs=1e-6)
    assert part.kl[1] == pytest.approx(0.0, abs=1e-9)
    assert part.agrees.tolist() == [False, True]
    assert part.surprise.tolist() == pytest.approx([math.log(4)], abs=1e-6)
    assert part.expected_surprise.tolist() == pytest.approx([math.log(4)], abs=1e-6)


def test_a_divergence_too_small_for_single_precision_is_seen() -> None:
    generator = np.random.default_rng(0)
    expected = generator.standard_normal((4, 5000)).astype(np.float32)
    found = np.asarray(expected + 1e-5 * generator.standard_normal(expected.shape), np.float32)
    kl = compare(expected, found, np.full(4, -1, np.int32)).kl
    # Small noise of variance v on the logits costs v / 2.
    assert kl.tolist() == pytest.approx([0.5e-10] * 4, rel=0.2)


def test_means_are_over_every_token_of_every_window() -> None:
    def part(*kl: float) -> Comparison:
        surprise = np.full(len(kl) - 1, math.log(8))
        return Comparison(np.array(kl), np.array(kl) < 1, surprise, surprise - math.log(2))

    result = summarise("int4", [part(0.0, 0.0, 3.0), part(1.0)], 2.0)
    assert (result.tokens, result.kl_mean, result.kl_max, result.agreement) == (4, 1.0, 3.0, 0.5)
    assert result.perplexity == pytest.approx(8)
    assert result.reference_perplexity == pytest.approx(4)
    assert result.perplexity_change == pytest.approx(1.0)


def test_each_limit_is_a_limit() -> None:
    assert score().misses == ()
    assert score(kl_mean=2.1e-2).misses == ("KL above 0.02",)
    assert score(agreement=0.949).misses == ("agreement below 95.0%",)
    for perplexity in (10.11, 9.89):
        assert score(perplexity=perplexity).misses == ("perplexity changed by more than 1.00%",)
    assert LIMITS["bfloat16"].perplexity_change == 0.002


def test_windows_cover_the_tokens_once_and_leave_no_window_of_one() -> None:
    cut = windows(list(range(100)), 21, 10)
    assert [window.tolist() for window in cut] == [list(range(10)), list(range(10, 20))]
    assert [len(window) for window in windows(list(range(5)), 100, 3)] == [3, 2]
    with pytest.raises(ValueError, match="two tokens"):
        windows([1], 10, 10)


def test_a_candidate_is_compared_with_the_reference_window_by_window() -> None:
    """Windows longer than a slice, so that rows must meet their own rows in the file."""
    texts = [np.arange(300, dtype=np.int32) % 7, np.arange(5, dtype=np.int32)]
    made: list[str] = []

    def model(name: str, noise: float) -> object:
        def make() -> object:
            made.append(name)

            def of(tokens: I32Array) -> F32Array:
                rows = np.random.default_rng(len(tokens)).standard_normal((len(tokens), 11))
                rows[:, 0] += noise * (len(tokens) == 5)
                return rows.astype(np.float32)

            return of

        return make

    same, other = evaluate(
        model("reference", 0.0),  # type: ignore[arg-type]
        [("float32", model("same", 0.0)), ("int4", model("other", 30.0))],  # type: ignore[list-item]
        texts,
    )
    assert made == ["reference", "same", "other"]
    assert (same.tokens, same.kl_max, same.agreement, same.perplexity_change) == (305, 0.0, 1.0, 0.0)
    assert other.agreement == pytest.approx(1 - 5 / 305, abs=2 / 305)
    assert other.kl_max > 1
    assert other.kl_mean < 5 * other.kl_max / 305


def test_the_text_is_plain_english_of_thousands_of_words() -> None:
    text = TEXT.read_text(encoding="ascii")
    assert len(text.split()) > 3300
    assert max(map(len, text.splitlines())) < 130
