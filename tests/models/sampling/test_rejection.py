"""Leviathan's rule gives the target's distribution, whatever was drafted and however."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from models.base import Batch
from models.rejection import Drafts, distributions, run_with_rejection, verify
from models.sampling import SamplingBatch
from models.torch_sampler import sample
from tests.models.sampling.test_sampling_samplers import make_batch, mixed_batch, rows_of

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
DRAWS = 50_000
INF = float("inf")


def softmax(x: F32) -> F32:
    weights = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)


def draw(rng: np.random.Generator, p: F32, count: int) -> I32:
    return rng.choice(len(p), count, p=p.astype(np.float64) / p.sum(dtype=np.float64)).astype(np.int32)


def without(p: F32, token: int) -> F32:
    rest = np.where(np.arange(len(p)) == token, 0, p)
    return (rest / rest.sum()).astype(np.float32)


def kept(tokens: I32, draft: Drafts) -> tuple[int, ...]:
    """The output of a sequence by the scheduler's rule: the longest accepted path and the token behind it."""
    best: tuple[int, ...] = ()
    for path, first in zip(draft[0], draft[1], strict=True):
        rows = tokens[first : first + len(path) + 1].tolist()
        accepted = next((j for j, token in enumerate(path.tolist()) if rows[j] != token), len(path))
        best = max(best, (*path.tolist()[:accepted], rows[accepted]), key=len)
    return best


def fits(outputs: list[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> bool:
    """Whether outputs, cut to the length of the expected ones, come as often as they should."""
    length = len(next(iter(expected)))
    counts = Counter(output[:length] for output in outputs)
    total = sum(counts.values())
    likely = {key: share for key, share in expected.items() if share * total >= 5}
    found = [counts[key] for key in likely]
    wanted = [share * total for share in likely.values()]
    if total - sum(wanted) > 1e-3:
        found.append(total - sum(found))
        wanted.append(total - sum(wanted))
    elif total != sum(found):
        return False  # something came that cannot come
    return p_value(np.array(found), np.array(wanted) * sum(found) / sum(wanted)) > 1e-4


def p_value(found: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> float:
    """Pearson's chi-square test."""
    statistic, freedom = ((found - wanted) ** 2 / wanted).sum(), len(found) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))


def positions(count: int, rows: int) -> dict[str, Any]:
    """Every draw is the same place of a sequence with a seed of its own."""
    return {
        "seed": np.repeat(np.arange(count) * 7919 - 10_000, rows),
        "position": np.tile(np.arange(rows) + 30, count),
        "temperature": 1.0,
    }


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "chosen"])
@pytest.mark.parametrize("vocab_size", [3, 17])
def test_one_drafted_token_gives_the_distribution_of_the_target(vocab_size: int, sampled: bool) -> None:
    """Even if the drafter has sampled with the noise of the target's own sampler."""
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(0, 1.5, vocab_size).astype(np.float32)
    p, q = softmax(logits), softmax(rng.normal(0, 1.5, vocab_size).astype(np.float32))
    batch = make_batch(2 * DRAWS, **positions(DRAWS, 2))
    drafted = np.full(DRAWS, rng.integers(vocab_size), np.int32)
    if sampled:
        drafted = sample(torch.from_numpy(np.tile(np.log(q), (DRAWS, 1))), batch.rows(slice(None, None, 2))).tokens
    drafts: list[Drafts] = [([drafted[i : i + 1]], [2 * i], [q[None]] if sampled else None) for i in range(DRAWS)]
    tokens = verify(np.tile(logits, (2 * DRAWS, 1)), batch, drafts)
    assert fits([(token,) for token in tokens[::2].tolist()], {(t,): float(share) for t, share in enumerate(p)})
    accepted = (tokens[::2] == drafted).mean()
    # Kept are the drafted tokens that pass, and no sample can be a token that did not.
    expected = np.minimum(p, q).sum() if sampled else p[drafted[0]]
    assert abs(accepted - expected) < 5 * np.sqrt(0.25 / DRAWS)


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "chosen"])
def test_a_chain_gives_the_joint_distribution_of_the_target(sampled: bool) -> None:
    """Three drafted tokens; the target's distribution and the drafter's depend on the token before."""
    rng = np.random.default_rng(3)
    size, length = 4, 3
    logits = rng.normal(0, 1, (size, size)).astype(np.float32)  # by the token before
    p, q = softmax(logits), softmax(logits + rng.normal(0, 0.7, (size, size)).astype(np.float32))
    drafts: list[Drafts] = []
    contexts = np.zeros((DRAWS, length + 1), np.int32)  # the first context is token 0
    for j in range(length):
        for before in range(size):
            here = np.flatnonzero(contexts[:, j] == before)
            contexts[here, j + 1] = draw(rng, q[before], len(here)) if sampled else int(q[before].argmax())
    for i in range(DRAWS):
        drafts.append(([contexts[i, 1:]], [i * (length + 1)], [q[contexts[i, :-1]]] if sampled else None))
    batch = make_batch(DRAWS * (length + 1), **positions(DRAWS, length + 1))
    tokens = verify(logits[contexts.reshape(-1)], batch, drafts)
    outputs = [kept(tokens, draft) for draft in drafts]
    # What a step puts out goes on for as long as it was accepted; the first two tokens are looked at where it does.
    assert fits(outputs, {(a,): float(p[0, a]) for a in range(size)})
    for first in range(size):
        behind = [output for output in outputs if len(output) > 1 and output[0] == first]
        if len(behind) > 500:
            assert fits(behind, {(first, b): float(p[first, b]) for b in range(size)})
    whole = [output for output in outputs if len(output) == length + 1]
    bonus = Counter(output[-2:] for output in whole)
    for last in range(size):
        seen = [pair for pair in bonus.elements() if pair[0] == last]
        if len(seen) > 500:
            assert fits(seen, {(last, b): float(p[last, b]) for b in range(size)})


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "chosen"])
def test_a_tree_gives_the_distribution_of_the_target_at_both_levels(sampled: bool) -> None:
    """Two candidates at the root and two behind the first of them: three paths, two of which share a prefix."""
    rng = np.random.default_rng(4)
    size = 5
    root, behind = (rng.normal(0, 1, (1, size)).astype(np.float32) for _ in range(2))
    p, p2 = softmax(root)[0], softmax(behind)[0]
    q, q2 = (softmax(rng.normal(0, 1, size).astype(np.float32)) for _ in range(2))
    pairs = [(draw(rng, one, DRAWS), np.zeros(DRAWS, np.int32)) for one in (q, q2)]
    for one, (first, second) in zip((q, q2), pairs, strict=True):
        for token in range(size):
            here = np.flatnonzero(first == token)
            second[here] = draw(rng, without(one, token), len(here)) if sampled else (token + 1) % size
            first[here] = token if sampled else first[here]
    drafts: list[Drafts] = []
    rows = 8  # of paths [a, b], [a, c] and [d]
    for i in range(DRAWS):
        (a, d), (b, c) = (tuple(int(column[i]) for column in pair) for pair in pairs)
        paths = [np.array(path, np.int32) for path in ([a, b], [a, c], [d])]
        q_second, q2_second = without(q, a), without(q2, b)
        given = [np.stack([q, q2]), np.stack([q, q2_second]), q_second[None]] if sampled else None
        drafts.append((paths, [rows * i, rows * i + 3, rows * i + 6], given))
    at = np.tile([30, 31, 32, 30, 31, 32, 30, 31], DRAWS)
    batch = make_batch(rows * DRAWS, seed=np.repeat(np.arange(DRAWS), rows), position=at, temperature=1.0)
    logits = np.where((at == 31)[:, None], behind, root)
    tokens = verify(logits, batch, drafts)
    assert (tokens[0::rows] == tokens[3::rows]).all()
    assert (tokens[0::rows] == tokens[6::rows]).all()
    assert (tokens[1::rows] == tokens[4::rows]).all()
    outputs = [kept(tokens, draft) for draft in drafts]
    assert fits(outputs, {(t,): float(share) for t, share in enumerate(p)})
    deep = [output[1:] for output in outputs if len(output) > 1]
    assert len(deep) > DRAWS / 10
    assert fits(deep, {(t,): float(share) for t, share in enumerate(p2)})


def test_a_second_candidate_is_accepted_from_what_the_first_has_left() -> None:
    p, q = np.array([0.2, 0.3, 0.5], np.float32), np.array([0.6, 0.2, 0.2], np.float32)
    count = 8_000
    drafts: list[Drafts] = [
        ([np.array([0], np.int32), np.array([2], np.int32)], [4 * i, 4 * i + 2], [q[None], without(q, 0)[None]])
        for i in range(count)
    ]
    logits = np.tile(np.log(p), (4 * count, 1))
    batch = make_batch(4 * count, seed=np.repeat(np.arange(count), 4), position=9, temperature=1.0)
    tokens = verify(logits, batch, drafts)[::4]
    # 0 passes with 0.2/0.6. Else (0, 0.1, 0.3)/0.4 is left, and 2 passes with certainty: 0.75 against its 0.5.
    assert abs((tokens == 0).mean() - 1 / 3) < 0.02
    assert not (tokens == 1).any()


def test_at_temperature_0_the_largest_logit_is_taken_whatever_was_drafted() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (4 * 300, 11)).astype(np.float32)
    best = logits.argmax(axis=1)
    drafts: list[Drafts] = []
    for i in range(300):
        path = np.where(rng.random(3) < 0.7, best[4 * i : 4 * i + 3], rng.integers(0, 11, 3)).astype(np.int32)
        q = softmax(rng.normal(0, 1, (3, 11)).astype(np.float32))
        drafts.append(([path], [4 * i], [None, [q]][i % 2]))
    tokens = verify(logits, make_batch(len(logits)), drafts)
    for i, draft in enumerate(drafts):
        output = kept(tokens, draft)
        assert list(output) == best[4 * i : 4 * i + len(output)].tolist()


def test_a_token_that_is_forbidden_is_never_accepted() -> None:
    count = 2000
    logits = np.zeros((2 * count, 4), np.float32)
    batch = make_batch(
        2 * count,
        temperature=1.0,
        bias_row=np.arange(0, 2 * count, 2, dtype=np.int32),
        bias_token=np.full(count, 3, np.int32),
        bias_value=np.full(count, -INF, np.float32),
    )
    q = np.array([[0.1, 0.1, 0.1, 0.7]], np.float32)
    drafts: list[Drafts] = [([np.array([3], np.int32)], [2 * i], [q]) for i in range(count)]
    assert not (verify(logits, batch, drafts)[::2] == 3).any()


def test_a_row_that_is_not_a_number_fails_alone() -> None:
    logits = np.zeros((4, 5), np.float32)
    logits[1, 2] = np.nan
    path = np.array([1], np.int32)
    drafts: list[Drafts] = [([path], [0], None), ([path], [2], None)]
    for temperature in (0.0, 1.0):
        batch = make_batch(4, temperature=temperature, bias_row=np.array([0, 2], np.int32))
        batch = replace(batch, bias_token=np.array([1, 1], np.int32), bias_value=np.array([99, 99], np.float32))
        tokens = verify(logits, batch, drafts)
        assert tokens[[0, 1, 2]].tolist() == [1, -1, 1]
        assert tokens[3] >= 0


def test_the_distribution_is_the_one_that_the_sampler_draws_from() -> None:
    """With every option, the share of a token among many draws is its probability."""
    rng = np.random.default_rng(6)
    kinds, draws, size = 24, 4000, 7
    batch = mixed_batch(rng, kinds, size, -1)
    batch = replace(batch, target=np.full(kinds, -1, np.int32), row_logprobs=None)
    logits = rng.normal(0, 2, (kinds, size)).astype(np.float32)
    p = distributions(logits, batch)
    many = np.repeat(np.arange(kinds), draws)
    drawn = rows_of(replace(batch, bias_row=None, bias_token=None, bias_value=None), many)
    bias = np.zeros((kinds, size), np.float32)
    assert batch.bias_row is not None
    assert batch.bias_token is not None
    np.add.at(bias, (batch.bias_row, batch.bias_token), batch.bias_value)
    where, token = np.nonzero(bias[many])
    drawn = replace(
        drawn,
        seed=np.arange(len(many)),
        bias_row=where.astype(np.int32),
        bias_token=token.astype(np.int32),
        bias_value=bias[many][where, token],
    )
    tokens = sample(torch.from_numpy(logits[many]), drawn).tokens.reshape(kinds, draws)
    for kind in range(kinds):
        if np.isnan(p[kind]).any():
            assert (tokens[kind] == -1).all()
            continue
        shares = np.bincount(tokens[kind], minlength=size) / draws
        assert np.abs(shares - p[kind]).max() < 5 * np.sqrt(0.25 / draws)
        assert (shares[p[kind] == 0] == 0).all()


def test_a_step_reports_the_logprobs_of_the_tokens_it_took_and_leaves_other_rows_alone() -> None:
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 2, (600, 40)).astype(np.float32)
    batch = make_batch(600, temperature=1.0, num_logprobs=3, frequency=0.5, presence=0.0, repetition=1.0)
    counts = rng.integers(0, 3, (600, 40)).astype(np.int32)
    batch = replace(batch, counts=counts, count_row=np.arange(600, dtype=np.int32))

    class Runner:
        def logits(self, batch: Batch) -> F32:
            return logits

    step = Batch(*(np.zeros(0, np.int32) for _ in range(4)), (), (), np.arange(600, dtype=np.int32), batch)
    drafts: list[Drafts] = [([rng.integers(0, 40, 3).astype(np.int32)], [100 + 4 * i], None) for i in range(80)]
    output = run_with_rejection(Runner(), step, drafts)
    assert (output.tokens == verify(logits, batch, drafts)).all()
    undrafted = np.r_[0:100, 420:600]
    alone = sample(torch.from_numpy(logits), batch)
    assert (output.tokens[undrafted] == alone.tokens[undrafted]).all()
    assert (output.tokens != alone.tokens).any()
    penalised = logits - 0.5 * counts
    expected = np.log(softmax(penalised)[np.arange(600), output.tokens])
    assert output.logprobs is not None
    np.testing.assert_allclose(output.logprobs, expected, atol=1e-4)
    assert output.top_ids is not None
    assert alone.top_ids is not None
    assert (output.top_ids == alone.top_ids).all()


def test_the_same_drafts_are_verified_alike_alone_and_among_others() -> None:
    rng = np.random.default_rng(8)
    logits = rng.normal(0, 1, (40, 9)).astype(np.float32)
    batch: SamplingBatch = make_batch(40, temperature=0.8)
    q = softmax(rng.normal(0, 1, (10, 3, 9)).astype(np.float32))
    paths = [np.array([draw(rng, one, 1)[0] for one in qs], np.int32) for qs in q]
    together = verify(logits, batch, [([paths[i]], [4 * i], [q[i]]) for i in reversed(range(10))])
    for i in range(10):
        rows = np.arange(4 * i, 4 * i + 4)
        alone = verify(logits[rows], rows_of(batch, rows), [([paths[i]], [0], [q[i]])])
        assert (together[rows] == alone).all()
