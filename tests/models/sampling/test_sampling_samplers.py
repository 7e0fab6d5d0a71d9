"""What the samplers do with rows of logits, each test with the torch sampler and the native one on every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from support.noise import gumbel_noise

from models.base import StepOutput
from models.cpu.sampling_abi import sampling_view
from models.sampling import IN_PROMPT, SamplingBatch
from models.torch_sampler import sample

F32 = npt.NDArray[np.float32]
Sampler = Callable[[F32, SamplingBatch], StepOutput]
INF = float("inf")


def make_batch(rows: int, **changes: Any) -> SamplingBatch:
    """Greedy rows unless told otherwise; a scalar counts for every row."""
    values: dict[str, Any] = {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": np.arange(rows),
        "position": np.arange(rows) + 10,
        "target": -1,
        "num_logprobs": -1,
    } | changes
    types = {
        name: dtype
        for dtype, names in {
            np.float32: "temperature top_p min_p presence frequency repetition",
            np.int32: "top_k position target row_logprobs count_row mask_row",
            np.int64: "seed",
        }.items()
        for name in names.split()
    }
    for name, dtype in types.items():
        if name in values:
            values[name] = np.array(np.broadcast_to(np.asarray(values[name], dtype), rows))
    return SamplingBatch(**values)


def rows_of(batch: SamplingBatch, rows: npt.NDArray[np.intp]) -> SamplingBatch:
    """The batch of some of the rows, in that order."""
    changes: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        shared = field.name in ("counts", "mask") or field.name.startswith("bias")
        if isinstance(value, np.ndarray) and not shared:
            changes[field.name] = np.ascontiguousarray(value[rows])
    if batch.bias_row is not None and batch.bias_token is not None and batch.bias_value is not None:
        picked = [np.flatnonzero(batch.bias_row == row) for row in rows]
        order = np.concatenate(picked)
        changes["bias_row"] = np.repeat(np.arange(len(rows), dtype=np.int32), [len(p) for p in picked])
        changes["bias_token"], changes["bias_value"] = batch.bias_token[order], batch.bias_value[order]
    return replace(batch, **changes)


def mixed_batch(rng: np.random.Generator, rows: int, vocab_size: int, num_logprobs: int) -> SamplingBatch:
    """Every option in every combination."""

    def choose(*values: float) -> npt.NDArray[Any]:
        return rng.choice(np.array(values), rows)

    biases = np.sort(rng.integers(0, rows, 3 * rows)).astype(np.int32)
    return make_batch(
        rows,
        temperature=choose(0, 1e-8, 1e-3, 0.3, 0.8, 1, 2),
        top_p=choose(1e-4, 0.3, 0.9, 0.999, 1, 1),
        top_k=choose(0, 0, 1, 3, 40, 700, vocab_size, vocab_size + 5),
        min_p=choose(0, 0, 0.01, 0.3, 1),
        seed=rng.integers(-(2**63), 2**63, rows),
        position=rng.integers(0, 10_000, rows),
        target=np.where(rng.random(rows) < 0.1, rng.integers(0, vocab_size, rows), -1),
        num_logprobs=num_logprobs,
        row_logprobs=rng.integers(-1, num_logprobs + 1, rows),
        presence=choose(0, 0.5, -2),
        frequency=choose(0, 0.7, -1),
        repetition=choose(1, 1.3, 0.5),
        counts=make_counts(rng, rows, vocab_size),
        count_row=np.where(rng.random(rows) < 0.5, rng.permutation(rows), -1),
        bias_row=biases,
        bias_token=rng.integers(0, vocab_size, len(biases)).astype(np.int32),
        bias_value=rng.choice(np.array([-INF, -100, -1, 3], np.float32), len(biases)),
        mask=pack(rng.random((rows, vocab_size)) < rng.choice(np.array([0.02, 0.5, 0.98]), (rows, 1))),
        mask_row=np.where(rng.random(rows) < 0.4, rng.permutation(rows), -1),
    )


def pack(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """[M, V] as the words of a mask, with the bits beyond the vocabulary set."""
    columns = -(-allowed.shape[1] // 32) * 32
    padded = np.ones((len(allowed), columns), np.bool_)
    padded[:, : allowed.shape[1]] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def make_counts(rng: np.random.Generator, rows: int, vocab_size: int) -> npt.NDArray[np.int32]:
    counts = rng.integers(1, 4, (rows, vocab_size)) * (rng.random((rows, vocab_size)) < 0.1)
    return (counts | IN_PROMPT * (rng.random((rows, vocab_size)) < 0.1)).astype(np.int32)


def same_bits(a: StepOutput, b: StepOutput) -> None:
    assert (a.tokens == b.tokens).all()
    assert a.logprobs is not None
    assert b.logprobs is not None
    assert (a.logprobs.view(np.int32) == b.logprobs.view(np.int32)).all()
    assert a.top_ids is not None
    assert (a.top_ids == b.top_ids).all()
    assert a.top_logprobs is not None
    assert b.top_logprobs is not None
    assert (a.top_logprobs.view(np.int32) == b.top_logprobs.view(np.int32)).all()


# --- greedy


@pytest.mark.parametrize("vocab_size", [1, 3, 16, 1023, 4099])
def test_greedy_takes_the_largest_logit(sampler: Sampler, vocab_size: int) -> None:
    logits = np.random.default_rng(1).normal(0, 3, (40, vocab_size)).astype(np.float32)
    assert (sampler(logits, make_batch(40)).tokens == logits.argmax(1)).all()


def test_greedy_settles_ties_for_the_lowest_id(sampler: Sampler) -> None:
    logits = np.zeros((3, 2100), np.float32)
    logits[0, [2099, 1500, 70]] = 5
    logits[1, 3] = -0.0
    logits[2] = -1
    logits[2, [2000, 33]] = [0.0, -0.0]
    assert sampler(logits, make_batch(3)).tokens.tolist() == [70, 0, 33]


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-8, 1e-6, 1e-4])
@pytest.mark.parametrize("top_p", [1.0, 1e-4])
@pytest.mark.case(77)
def test_a_very_small_temperature_is_greedy(sampler: Sampler, temperature: float, top_p: float) -> None:
    logits = np.random.default_rng(2).normal(0, 300, (50, 997)).astype(np.float32)
    batch = make_batch(50, temperature=temperature, top_p=top_p, num_logprobs=2)
    output = sampler(logits, batch)
    assert (output.tokens == logits.argmax(1)).all()
    assert output.logprobs is not None
    assert not np.isnan(output.logprobs).any()


# --- rows that cannot be sampled, and masks


def test_rows_that_are_not_finite_give_minus_one_and_disturb_no_other(sampler: Sampler) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (12, 333)).astype(np.float32)
    batch = make_batch(12, temperature=[0, 1, 1] * 4, top_p=[1, 1, 0.8] * 4, num_logprobs=4, target=[-1] * 11 + [5])
    expected = sampler(logits, batch)
    broken = logits.copy()
    broken[1, 332] = np.nan
    broken[2] = -INF
    broken[3, 5] = INF
    broken[5, 0] = np.nan
    broken[6] = np.nan
    broken[11, 7] = np.nan
    output = sampler(broken, batch)
    bad = np.isin(np.arange(12), [1, 2, 3, 5, 6, 11])
    assert (output.tokens[bad] == -1).all()
    assert output.logprobs is not None
    assert (output.logprobs[bad] == -INF).all()
    assert output.top_ids is not None
    assert (output.top_ids[bad] == -1).all()
    good = np.flatnonzero(~bad)
    same_bits(
        StepOutput(*(a[good] for a in (output.tokens, output.logprobs, output.top_ids, output.top_logprobs))),
        StepOutput(*(a[good] for a in (expected.tokens, expected.logprobs, expected.top_ids, expected.top_logprobs))),
    )


def test_a_row_in_which_everything_is_forbidden_gives_minus_one(sampler: Sampler) -> None:
    logits = np.zeros((2, 4), np.float32)
    batch = make_batch(
        2,
        bias_row=np.zeros(4, np.int32),
        bias_token=np.arange(4, dtype=np.int32),
        bias_value=np.full(4, -INF, np.float32),
    )
    assert sampler(logits, batch).tokens.tolist() == [-1, 0]


def test_a_forbidden_token_is_never_sampled(sampler: Sampler) -> None:
    rows, vocab_size = 600, 40
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 1, (rows, vocab_size)).astype(np.float32)
    logits[:, 17] = 50
    logits[:, ::3] = -INF
    batch = make_batch(
        rows,
        temperature=rng.choice(np.array([0, 1e-8, 1, 2]), rows),
        top_p=rng.choice(np.array([0.9, 1]), rows),
        top_k=rng.choice(np.array([0, 39]), rows),
        bias_row=np.arange(rows, dtype=np.int32),
        bias_token=np.full(rows, 17, np.int32),
        bias_value=np.full(rows, -INF, np.float32),
    )
    tokens = sampler(logits, batch).tokens
    assert (tokens != 17).all()
    assert (tokens % 3 != 0).all()


def test_a_single_token_left_is_taken_at_any_setting(sampler: Sampler) -> None:
    logits = np.full((64, 100), -INF, np.float32)
    logits[np.arange(64), np.arange(64)] = -1e30
    rng = np.random.default_rng(5)
    batch = replace(mixed_batch(rng, 64, 100, 0), count_row=None, bias_row=None, bias_token=None, bias_value=None)
    batch = replace(batch, target=np.full(64, -1, np.int32), mask=None, mask_row=None)
    assert (sampler(logits, batch).tokens == np.arange(64)).all()


# --- logprobs


def test_logprobs_are_those_of_the_logits_before_temperature_and_filters(sampler: Sampler) -> None:
    logits = np.random.default_rng(6).normal(0, 4, (30, 1500)).astype(np.float32)
    exact = torch.log_softmax(torch.from_numpy(logits).double(), 1).numpy()
    output = sampler(logits, make_batch(30, temperature=[0, 0.7, 2] * 10, top_k=5, num_logprobs=6))
    assert output.logprobs is not None
    np.testing.assert_allclose(output.logprobs, exact[np.arange(30), output.tokens], rtol=2e-6, atol=1e-6)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :6]
    assert output.top_ids is not None
    assert (output.top_ids == order).all()
    assert output.top_logprobs is not None
    np.testing.assert_allclose(output.top_logprobs, np.take_along_axis(exact, order, 1), rtol=2e-6, atol=1e-6)


def test_alternatives_with_equal_logits_come_in_order_of_id(sampler: Sampler) -> None:
    logits = np.zeros((2, 3000), np.float32)
    logits[0, [2999, 12, 700]] = 1
    logits[1, 1] = -0.0
    output = sampler(logits, make_batch(2, num_logprobs=5))
    assert output.top_ids is not None
    assert output.top_ids.tolist() == [[12, 700, 2999, 0, 1], [0, 1, 2, 3, 4]]


def test_each_row_reports_as_many_alternatives_as_it_wants(sampler: Sampler) -> None:
    logits = np.random.default_rng(7).normal(0, 2, (4, 9)).astype(np.float32)
    logits[3, 2:] = -INF
    output = sampler(logits, make_batch(4, num_logprobs=12, row_logprobs=[-1, 0, 2, 12]))
    assert output.logprobs is not None
    assert np.isfinite(output.logprobs).tolist() == [False, True, True, True]
    assert output.top_ids is not None
    assert output.top_ids.shape == (4, 12)
    assert (output.top_ids >= 0).sum(1).tolist() == [0, 0, 2, 9]
    assert output.top_ids[3, 2:9].tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert output.top_logprobs is not None
    assert np.isfinite(output.top_logprobs).sum(1).tolist() == [0, 0, 2, 2]
    assert not np.isnan(output.top_logprobs).any()


def test_no_logprobs_are_computed_when_nobody_asks(sampler: Sampler) -> None:
    output = sampler(np.zeros((2, 5), np.float32), make_batch(2))
    assert (output.logprobs, output.top_ids, output.top_logprobs) == (None, None, None)


def test_a_target_is_reported_from_the_raw_logits(sampler: Sampler) -> None:
    logits = np.random.default_rng(8).normal(0, 2, (3, 64)).astype(np.float32)
    logits[2, 9] = -INF
    batch = make_batch(
        3,
        temperature=1.0,
        target=[4, 5, 9],
        num_logprobs=1,
        presence=1.0,
        frequency=1.0,
        repetition=2.0,
        counts=np.ones((1, 64), np.int32),
        count_row=0,
        bias_row=np.array([0, 1], np.int32),
        bias_token=np.array([4, 6], np.int32),
        bias_value=np.array([-INF, 100], np.float32),
        mask=np.zeros((1, 2), np.uint32),
        mask_row=0,
    )
    output = sampler(logits, batch)
    assert output.tokens.tolist() == [4, 5, 9]
    exact = torch.log_softmax(torch.from_numpy(logits).double(), 1).numpy()
    assert output.logprobs is not None
    np.testing.assert_allclose(output.logprobs, exact[np.arange(3), output.tokens], rtol=2e-6)
    assert output.top_ids is not None
    assert (output.top_ids[:, 0] == logits.argmax(1)).all()


# --- penalties and bias


def test_penalties_and_bias_follow_their_formulas(sampler: Sampler) -> None:
    rng = np.random.default_rng(9)
    rows, vocab_size = 6, 41
    logits = rng.normal(0, 3, (rows, vocab_size)).astype(np.float32)
    counts = make_counts(rng, rows, vocab_size)
    batch = make_batch(
        rows,
        num_logprobs=vocab_size,
        presence=[0, 0.5, 0, -1, 0.3, 1],
        frequency=[0, 0, 0.7, -0.4, 0.2, 1],
        repetition=[1.5, 1, 1, 0.6, 1.2, 2],
        counts=counts,
        count_row=[5, 4, 3, 2, -1, 1],
        bias_row=np.array([1, 1, 4], np.int32),
        bias_token=np.array([0, 40, 7], np.int32),
        bias_value=np.array([2.5, -3, -INF], np.float32),
    )
    output = sampler(logits, batch)
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    for row in range(rows):
        expected = naive_processed(logits, batch, row)
        exact = torch.log_softmax(torch.tensor(expected, dtype=torch.float64), 0).numpy()
        np.testing.assert_allclose(output.top_logprobs[row], exact[output.top_ids[row]], rtol=1e-5, atol=1e-5)
        assert output.tokens[row] == int(np.argmax(expected))


def naive_processed(logits: F32, batch: SamplingBatch, row: int) -> list[float]:
    """Penalties and bias as the formulas read, one token at a time."""
    result = []
    for token, logit in enumerate(logits[row].tolist()):
        value = logit
        count_row = -1 if batch.count_row is None else int(batch.count_row[row])
        if count_row >= 0:
            assert batch.counts is not None
            count = int(batch.counts[count_row, token])
            times, seen = count % IN_PROMPT, count != 0
            if seen:
                assert batch.repetition is not None
                repetition = float(batch.repetition[row])
                value = value / repetition if value > 0 else value * repetition
            assert batch.frequency is not None
            value -= float(batch.frequency[row]) * times
            if times > 0:
                assert batch.presence is not None
                value -= float(batch.presence[row])
        if batch.bias_row is not None:
            for r, t, v in zip(batch.bias_row, batch.bias_token, batch.bias_value, strict=True):
                if r == row and t == token:
                    value += float(v)
        if batch.mask is not None and batch.mask_row is not None and batch.mask_row[row] >= 0:
            word = int(batch.mask[batch.mask_row[row], token // 32])
            value = value if word >> token % 32 & 1 else -INF
        result.append(value)
    return result


# --- masks


def test_what_a_mask_leaves_out_has_logprob_minus_infinity_and_the_rest_share_the_mass(sampler: Sampler) -> None:
    rng = np.random.default_rng(17)
    rows, vocab_size = 8, 75
    logits = rng.normal(0, 3, (rows, vocab_size)).astype(np.float32)
    logits[0, 3], logits[1, 4] = np.nan, INF  # masked below: whatever they are, they are left out
    allowed = rng.random((rows, vocab_size)) < 0.3
    allowed[:, 70] = True
    allowed[0, 3] = allowed[1, 4] = False
    batch = make_batch(
        rows,
        num_logprobs=vocab_size,
        presence=0.5,
        frequency=0.1,
        repetition=1.2,
        counts=make_counts(rng, rows, vocab_size),
        count_row=np.where(np.arange(rows) % 2, np.arange(rows), -1),
        bias_row=np.array([2, 3], np.int32),
        bias_token=np.array([70, 70], np.int32),
        bias_value=np.array([100, 100], np.float32),
        mask=pack(allowed),
        mask_row=np.arange(rows),
    )
    output = sampler(logits, batch)
    assert output.tokens[2:4].tolist() == [70, 70]
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    for row in range(rows):
        assert allowed[row, output.tokens[row]]
        exact = torch.log_softmax(torch.tensor(naive_processed(logits, batch, row), dtype=torch.float64), 0).numpy()
        assert (np.isfinite(exact) == allowed[row]).all()
        np.testing.assert_allclose(output.top_logprobs[row], exact[output.top_ids[row]], rtol=1e-5, atol=1e-5)


def test_a_mask_changes_no_bit_of_the_rows_beside_it(sampler: Sampler) -> None:
    rng = np.random.default_rng(18)
    rows, vocab_size = 40, 333
    logits = rng.normal(0, 3, (rows, vocab_size)).astype(np.float32)
    batch = replace(mixed_batch(rng, rows, vocab_size, 5), mask=None, mask_row=None)
    masked = np.arange(rows) % 3 == 0
    with_masks = replace(
        batch,
        mask=pack(rng.random((rows, vocab_size)) < 0.1),
        mask_row=np.where(masked, np.arange(rows), -1).astype(np.int32),
    )
    alone, beside = sampler(logits, batch), sampler(logits, with_masks)
    kept = np.flatnonzero(~masked)
    same_bits(*(StepOutput(*(getattr(o, f.name)[kept] for f in fields(o))) for o in (alone, beside)))  # type: ignore[arg-type]
    assert (alone.tokens != beside.tokens).any()


def test_a_mask_that_leaves_nothing_gives_minus_one(sampler: Sampler) -> None:
    logits = np.zeros((3, 40), np.float32)
    allowed = np.zeros((2, 40), np.bool_)
    allowed[1, 39] = True
    for temperature in (0.0, 1.0):
        batch = make_batch(3, temperature=temperature, num_logprobs=1, mask=pack(allowed), mask_row=[-1, 0, 1])
        tokens = sampler(logits, batch).tokens
        assert tokens[0] >= 0
        assert tokens[1:].tolist() == [-1, 39]


# --- exact distributions

ROWS, VOCAB = 20_000, 24


def exact_probabilities(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> F32:
    """The distribution that the settings define, in double precision, by sorting and adding."""
    peak = max(logits)
    weights = [np.exp((x - peak) / temperature) for x in logits]
    kept = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = [i for i in kept if weights[i] >= min_p * (1 - 1e-9)]
    kept = kept[: top_k or None]
    if top_p < 1:
        total, running, nucleus = sum(weights[i] for i in kept), 0.0, []
        for i in kept:
            nucleus.append(i)
            running += weights[i]
            if running >= top_p * total * (1 - 1e-6):
                break
        kept = nucleus
    probabilities = np.zeros(len(logits))
    probabilities[kept] = [weights[i] for i in kept]
    return probabilities / probabilities.sum()


def chi_square_p_value(tokens: npt.NDArray[np.int32], probabilities: npt.NDArray[np.float64]) -> float:
    """How often chance alone strays further from the distribution; 0 when a token of probability 0 was drawn.

    Tokens expected fewer than five times count as one.
    """
    observed, expected = np.bincount(tokens, minlength=len(probabilities)), probabilities * len(tokens)
    if observed[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed, expected = (np.append(a[~rare], a[rare].sum()) for a in (observed, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([(len(expected) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


SETTINGS: dict[str, dict[str, float]] = {
    "temperature 1": {},
    "temperature 0.3": {"temperature": 0.3},
    "temperature 2": {"temperature": 2.0},
    "top_p 0.7": {"top_p": 0.7},
    "top_p 0.01": {"top_p": 0.01},
    "top_k 7": {"top_k": 7},
    "min_p 0.1": {"min_p": 0.1},
    "all of them": {"temperature": 1.5, "top_p": 0.8, "top_k": 12, "min_p": 0.02},
    "min_p before top_p": {"temperature": 1.2, "top_p": 0.85, "min_p": 0.08},
}


@pytest.mark.parametrize(
    ("name", "source"), [*((name, "position") for name in SETTINGS), ("temperature 1", "seed"), ("all of them", "seed")]
)
def test_draws_follow_the_exact_distribution(sampler: Sampler, name: str, source: str) -> None:
    row = np.random.default_rng(10).normal(0, 1.5, VOCAB).astype(np.float32)
    varying = np.arange(ROWS)
    draws = (
        {"seed": 5, "position": varying} if source == "position" else {"seed": varying * 7919 - 50_000, "position": 3}
    )
    full = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0} | SETTINGS[name]
    tokens = sampler(np.tile(row, (ROWS, 1)), make_batch(ROWS, **full, **draws)).tokens
    exact = exact_probabilities(row.tolist(), full["temperature"], int(full["top_k"]), full["top_p"], full["min_p"])
    assert chi_square_p_value(tokens, exact) > 1e-3


def test_draws_with_penalties_and_bias_follow_the_exact_distribution(sampler: Sampler) -> None:
    rng = np.random.default_rng(11)
    row = rng.normal(0, 1.5, VOCAB).astype(np.float32)
    batch = make_batch(
        ROWS,
        temperature=0.9,
        top_p=0.95,
        seed=3,
        presence=0.4,
        frequency=0.3,
        repetition=1.4,
        counts=make_counts(rng, 2, VOCAB),
        count_row=1,
        bias_row=np.repeat(np.arange(ROWS, dtype=np.int32), 2),
        bias_token=np.tile(np.array([3, 4], np.int32), ROWS),
        bias_value=np.tile(np.array([1.5, -INF], np.float32), ROWS),
    )
    tokens = sampler(np.tile(row, (ROWS, 1)), batch).tokens
    processed = naive_processed(row[None], rows_of(batch, np.array([0])), 0)
    assert chi_square_p_value(tokens, exact_probabilities(processed, 0.9, 0, 0.95, 0.0)) > 1e-3


def test_draws_under_a_mask_follow_the_exact_distribution_of_what_it_allows(sampler: Sampler) -> None:
    rng = np.random.default_rng(16)
    row = rng.normal(0, 1.5, VOCAB).astype(np.float32)
    masks = np.ones((3, VOCAB), np.bool_)
    masks[1, rng.permutation(VOCAB)[:10]] = False
    masks[1, row.argmax()] = False
    rows = np.arange(ROWS)
    batch = make_batch(
        ROWS, temperature=0.9, top_p=0.9, top_k=9, seed=6, position=rows, mask=pack(masks), mask_row=rows % 2
    )
    tokens = sampler(np.tile(row, (ROWS, 1)), batch).tokens
    masked = np.where(masks[1], row, -INF).tolist()
    assert chi_square_p_value(tokens[1::2], exact_probabilities(masked, 0.9, 9, 0.9, 0.0)) > 1e-3
    assert chi_square_p_value(tokens[::2], exact_probabilities(row.tolist(), 0.9, 9, 0.9, 0.0)) > 1e-3


def test_the_chi_square_test_can_tell_a_temperature_that_is_off_by_a_tenth(sampler: Sampler) -> None:
    row = np.random.default_rng(10).normal(0, 1.5, VOCAB).astype(np.float32)
    tokens = sampler(np.tile(row, (ROWS, 1)), make_batch(ROWS, temperature=1.1, seed=5)).tokens
    assert chi_square_p_value(tokens, exact_probabilities(row.tolist(), 1.0, 0, 1.0, 0.0)) < 1e-3


@pytest.mark.parametrize("settings", [{"top_p": 0.3}, {"top_k": 3}, {"top_p": 0.5, "top_k": 6}])
def test_filters_settle_ties_for_the_lowest_ids(sampler: Sampler, settings: dict[str, float]) -> None:
    row = np.full(1300, -20, np.float32)
    equal = np.arange(1250, 50, -120)  # ten equal logits; a share of 3 / 10 is reached by exactly three of them
    row[equal] = 2
    tokens = sampler(np.tile(row, (300, 1)), make_batch(300, temperature=1.0, **settings)).tokens
    assert sorted(set(tokens.tolist())) == sorted(equal.tolist())[:3]


def test_top_p_keeps_the_smallest_set_that_reaches_it(sampler: Sampler) -> None:
    row = np.log(np.array([0.05, 0.4, 0.15, 0.3, 0.1])).astype(np.float32)
    for top_p, kept in [(0.39, {1}), (0.41, {1, 3}), (0.7, {1, 3}), (0.71, {1, 2, 3}), (0.949, {1, 2, 3, 4})]:
        tokens = sampler(np.tile(row, (1000, 1)), make_batch(1000, temperature=1.0, top_p=top_p)).tokens
        assert set(tokens.tolist()) == kept


def test_top_p_may_end_within_a_large_group_of_equal_logits(sampler: Sampler) -> None:
    row = np.where(np.arange(2000) % 3 == 0, 1.0, 0.0).astype(np.float32)
    groups = np.flatnonzero(row == 1), np.flatnonzero(row == 0)
    half = len(groups[1]) // 2
    top_p = (len(groups[0]) * np.e + half) / (len(groups[0]) * np.e + len(groups[1]))
    tokens = sampler(np.tile(row, (400, 1)), make_batch(400, temperature=1.0, top_p=top_p)).tokens
    last = groups[1][half]  # one more or less, since the share is as near as can be to a boundary
    assert tokens[np.isin(tokens, groups[1])].max() <= last
    assert 100 < np.isin(tokens, groups[1]).sum() < 200


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_top_p_over_a_large_vocabulary_keeps_the_same_tokens_as_sorting_does(sampler: Sampler, spread: float) -> None:
    """Few draws cannot show a set of thousands, so the noise is known: the winner is computed from the sorted set."""
    rows, vocab_size = 12, 8_000
    rng = np.random.default_rng(12)
    logits = rng.normal(0, spread, (rows, vocab_size)).astype(np.float32)
    batch = make_batch(rows, temperature=1.3, top_p=np.linspace(0.05, 0.9999, rows), top_k=[0, 0, 5000] * 4)
    noise = gumbel_noise(batch.seed, batch.position, vocab_size)
    tokens = sampler(logits, batch).tokens
    for row in range(rows):
        probabilities = exact_probabilities(
            logits[row].tolist(), 1.3, int(batch.top_k[row]), float(batch.top_p[row]), 0.0
        )
        with np.errstate(divide="ignore"):
            assert tokens[row] == np.argmax(np.log(probabilities) + noise[row])


# --- one row is one row


def test_a_row_gives_the_same_bits_whoever_shares_its_batch(sampler: Sampler) -> None:
    rng = np.random.default_rng(13)
    rows, vocab_size = 40, 1111
    logits = rng.normal(0, 3, (rows, vocab_size)).astype(np.float32)
    batch = mixed_batch(rng, rows, vocab_size, 7)
    together = sampler(logits, batch)
    shuffled = rng.permutation(rows)
    for picked in (shuffled, shuffled[:7], shuffled[-1:], np.concatenate([shuffled, shuffled[:20]])):
        apart = sampler(np.ascontiguousarray(logits[picked]), rows_of(batch, picked))
        assert together.logprobs is not None
        assert together.top_ids is not None
        assert together.top_logprobs is not None
        same_bits(
            apart,
            StepOutput(
                together.tokens[picked],
                together.logprobs[picked],
                together.top_ids[picked],
                together.top_logprobs[picked],
            ),
        )


def test_a_token_does_not_depend_on_whether_logprobs_are_asked_for(sampler: Sampler) -> None:
    rng = np.random.default_rng(14)
    logits = rng.normal(0, 3, (60, 500)).astype(np.float32)
    batch = mixed_batch(rng, 60, 500, 20)
    without = replace(batch, num_logprobs=-1, row_logprobs=None)
    assert (sampler(logits, batch).tokens == sampler(logits, without).tokens).all()


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 17, 64, 1000, 3001])
def test_the_native_sampler_chooses_the_tokens_of_the_torch_one(native_sampler: Sampler, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = 60
    logits = (rng.normal(0, 1, (rows, vocab_size)) * rng.choice([0.1, 1, 5], (rows, 1))).astype(np.float32)
    logits[rng.random((rows, vocab_size)) < 0.1] = -INF
    batch = mixed_batch(rng, rows, vocab_size, 5)
    reference, output = sample(torch.from_numpy(logits), batch), native_sampler(logits, batch)
    assert (output.tokens == reference.tokens).all()
    assert reference.top_ids is not None
    assert (output.top_ids == reference.top_ids).all()
    for ours, theirs in ((output.logprobs, reference.logprobs), (output.top_logprobs, reference.top_logprobs)):
        assert ours is not None
        assert theirs is not None
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-6)


def test_the_same_seed_and_position_give_the_same_token_and_others_do_not(sampler: Sampler) -> None:
    logits = np.zeros((40, 2000), np.float32)
    fixed = sampler(logits, make_batch(40, temperature=1.0, seed=-4, position=9)).tokens
    assert len(set(fixed.tolist())) == 1
    assert len(set(sampler(logits, make_batch(40, temperature=1.0, position=9)).tokens.tolist())) > 35
    assert len(set(sampler(logits, make_batch(40, temperature=1.0, seed=-4)).tokens.tolist())) > 35


# --- what only one of them has to do


def test_torch_takes_bfloat16_and_leaves_the_logits_alone() -> None:
    rng = np.random.default_rng(15)
    logits = torch.from_numpy(rng.normal(0, 3, (50, 300)).astype(np.float32)).bfloat16()
    before = logits.clone()
    batch = mixed_batch(rng, 50, 300, 3)
    same_bits(sample(logits, batch), sample(logits.float(), batch))
    assert torch.equal(logits, before)
    single = logits.float()
    sample(single, batch)
    assert torch.equal(single, before.float())


def test_the_view_refuses_arrays_that_the_native_sampler_would_misread() -> None:
    batch = make_batch(3)
    with pytest.raises(ValueError, match="temperature"):
        sampling_view(replace(batch, temperature=np.zeros(3)), 8)
    with pytest.raises(ValueError, match="top_k"):
        sampling_view(replace(batch, top_k=np.zeros(2, np.int32)), 8)
    with pytest.raises(ValueError, match="seed"):
        sampling_view(replace(batch, seed=np.zeros(6, np.int64)[::2]), 8)
    with pytest.raises(ValueError, match="counts has 9 columns"):
        sampling_view(replace(batch, counts=np.zeros((1, 9), np.int32)), 8)
    with pytest.raises(ValueError, match="mask has 1 columns and needs 2"):
        sampling_view(replace(batch, mask=np.zeros((1, 1), np.uint32)), 33)
    with pytest.raises(ValueError, match="mask_row"):
        sampling_view(replace(batch, mask_row=np.zeros(2, np.int32)), 8)
