"""The sampling state: whatever its history, its batches are those of a state opened afresh."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from models.sampling import IN_PROMPT, SamplingBatch, SamplingParams
from models.sampling_state import SamplingState

VOCAB, EOS = 50, (2, 7)
INF = float("inf")
I32 = npt.NDArray[np.int32]


def ints(*values: int) -> I32:
    return np.array(values, np.int32)


def one_batch(state: SamplingState, *slots: int, targets: I32 | None = None) -> SamplingBatch:
    positions = np.arange(len(slots), dtype=np.int32) + 100
    return state.batch(ints(*slots), positions, np.full(len(slots), -1, np.int32) if targets is None else targets)


def biases(batch: SamplingBatch) -> set[tuple[int, int, float]]:
    if batch.bias_row is None or batch.bias_token is None or batch.bias_value is None:
        return set()
    assert (np.diff(batch.bias_row) >= 0).all(), "the samplers search the biases by row"
    triples = zip(batch.bias_row.tolist(), batch.bias_token.tolist(), batch.bias_value.tolist(), strict=True)
    return set(triples)


def counts_of(batch: SamplingBatch, row: int) -> I32:
    assert batch.counts is not None
    assert batch.count_row is not None
    return batch.counts[batch.count_row[row]]


def test_a_batch_has_the_parameters_of_its_slots_row_by_row() -> None:
    state = SamplingState(4, VOCAB, EOS)
    state.open(0, SamplingParams(seed=-(2**63), temperature=0.5, top_p=0.9, top_k=8, min_p=0.1), ints(1), ints())
    state.open(3, SamplingParams(seed=2**63 - 1, logprobs=4), ints(1), ints())
    batch = one_batch(state, 3, 0)
    assert batch.seed.tolist() == [2**63 - 1, -(2**63)]
    assert batch.temperature.tolist() == [1.0, 0.5]
    assert batch.top_p.tolist() == [1.0, np.float32(0.9)]
    assert batch.top_k.tolist() == [0, 8]
    assert batch.min_p.tolist() == [0.0, np.float32(0.1)]
    assert batch.position.tolist() == [100, 101]
    assert batch.target.tolist() == [-1, -1]
    assert batch.num_logprobs == 4
    assert batch.row_logprobs is not None
    assert batch.row_logprobs.tolist() == [4, -1]
    assert batch.counts is None
    assert batch.bias_row is None
    for name in ("temperature", "top_p", "min_p"):
        assert getattr(batch, name).dtype == np.float32
    for name in ("top_k", "position", "target", "row_logprobs"):
        assert getattr(batch, name).dtype == np.int32
    assert batch.seed.dtype == np.int64


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 9e-6])
def test_a_greedy_row_has_no_filters_to_spend_time_on(temperature: float) -> None:
    state = SamplingState(1, VOCAB, EOS)
    state.open(0, SamplingParams(seed=0, temperature=temperature, top_p=0.5, top_k=3, min_p=0.1), ints(), ints())
    batch = one_batch(state, 0)
    assert (batch.temperature[0], batch.top_p[0], batch.top_k[0], batch.min_p[0]) == (0, 1, 0, 0)


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB, 10**9])
def test_a_top_k_that_keeps_everything_is_off(top_k: int) -> None:
    state = SamplingState(1, VOCAB, EOS)
    state.open(0, SamplingParams(seed=0, top_k=top_k), ints(), ints())
    assert one_batch(state, 0).top_k[0] == 0


def test_eos_and_stop_tokens_are_forbidden_until_min_tokens() -> None:
    state = SamplingState(2, VOCAB, (*EOS, 1000))
    params = SamplingParams(seed=0, min_tokens=2, stop_token_ids=(9, 2), logit_bias=((4, 1.5), (7, -2.0)))
    state.open(1, params, ints(1, 2), ints())
    always = {(0, 4, 1.5), (0, 7, -2.0)}
    forbidden = {(0, 2, -INF), (0, 7, -INF), (0, 9, -INF)}
    for _ in range(2):
        assert biases(one_batch(state, 1)) == always | forbidden
        state.append(ints(1), ints(5))
    assert biases(one_batch(state, 1)) == always
    state.close(1)
    state.open(1, params, ints(1, 2), ints(5))
    assert biases(one_batch(state, 1)) == always | forbidden
    state.close(1)
    state.open(1, params, ints(1, 2), ints(5, 5))
    assert biases(one_batch(state, 1)) == always


def test_only_allowed_tokens_are_left() -> None:
    state = SamplingState(2, VOCAB, EOS)
    state.open(0, SamplingParams(seed=0, allowed_token_ids=(3, 7, 3), logit_bias=((3, 1.0),)), ints(1), ints())
    others = {(0, token, -INF) for token in range(VOCAB) if token not in (3, 7)}
    assert biases(one_batch(state, 0)) == others | {(0, 3, 1.0)}
    # Ends that are all there is to choose are chosen, also before min_tokens.
    state.open(1, SamplingParams(seed=0, allowed_token_ids=EOS, min_tokens=5), ints(1), ints())
    assert biases(one_batch(state, 1)) == {(0, token, -INF) for token in range(VOCAB) if token not in EOS}


def test_a_bad_word_is_not_completed() -> None:
    state = SamplingState(3, VOCAB, EOS)
    params = SamplingParams(seed=0, bad_words=((9,), (4, 5), (3, 4, 6), (3, 4, 5)), logit_bias=((8, 2.0),))
    state.open(0, params, ints(3, 4), ints())
    state.open(1, SamplingParams(seed=0, logit_bias=((1, 1.0),)), ints(1), ints())
    state.open(2, SamplingParams(seed=0, bad_words=((2, 2),)), ints(2), ints(2))
    always = {(0, 9, -1e5), (0, 8, 2.0)}
    assert biases(one_batch(state, 0, 1)) == always | {(1, 1, 1.0)}  # a prompt begins no word of the output
    state.append(ints(0, 0), ints(1, 4))
    assert biases(one_batch(state, 0)) == always | {(0, 5, -1e5)}
    state.append(ints(0, 0, 1), ints(3, 4, 4))
    expected = {(1, token, value) for _, token, value in always | {(0, 5, -1e5), (0, 6, -1e5)}}
    assert biases(one_batch(state, 2, 0, 1)) == expected | {(0, 2, -1e5), (2, 1, 1.0)}
    assert biases(one_batch(state, 0, targets=ints(5))) == set()
    state.close(0)
    state.open(0, params, ints(3, 4), ints(7, 4))  # after a preemption
    assert biases(one_batch(state, 0)) == always | {(0, 5, -1e5)}


def test_ignore_eos_leaves_sampling_alone() -> None:
    state = SamplingState(1, VOCAB, EOS)
    state.open(0, SamplingParams(seed=0, ignore_eos=True), ints(), ints())
    assert biases(one_batch(state, 0)) == set()


def test_counts_say_what_is_in_the_prompt_and_how_often_in_the_output() -> None:
    state = SamplingState(2, VOCAB, EOS)
    state.open(0, SamplingParams(seed=0), ints(1), ints())
    state.open(1, SamplingParams(seed=0, repetition_penalty=1.1), ints(3, 3, 4), ints(4, 5, 5))
    state.append(ints(1, 0, 1, 1), ints(5, 5, 6, 6))
    batch = one_batch(state, 0, 1)
    assert batch.count_row is not None
    assert batch.count_row[0] == -1
    expected = np.zeros(VOCAB, np.int32)
    expected[3], expected[4], expected[5], expected[6] = IN_PROMPT, IN_PROMPT + 1, 3, 2
    assert (counts_of(batch, 1) == expected).all()


def test_rows_with_targets_want_prompt_logprobs_and_no_penalties_or_biases() -> None:
    state = SamplingState(1, VOCAB, EOS)
    params = SamplingParams(
        seed=0, logprobs=2, prompt_logprobs=5, frequency_penalty=1.0, logit_bias=((1, 1.0),), min_tokens=3
    )
    state.open(0, params, ints(1, 2, 3), ints())
    batch = one_batch(state, 0, 0, 0, targets=ints(2, 3, -1))
    assert batch.num_logprobs == 5
    assert batch.row_logprobs is not None
    assert batch.row_logprobs.tolist() == [5, 5, 2]
    assert batch.count_row is not None
    assert batch.count_row.tolist() == [-1, -1, 0]
    assert batch.bias_row is not None
    assert set(batch.bias_row.tolist()) == {2}
    assert one_batch(state, 0).num_logprobs == 2


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    state = SamplingState(2, VOCAB, EOS)
    with pytest.raises(ValueError, match="token 50"):
        state.open(0, SamplingParams(seed=0, logit_bias=((VOCAB, 1.0),)), ints(), ints())
    for limits in ({"allowed_token_ids": (1, VOCAB)}, {"bad_words": ((-1,),)}):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            state.open(0, SamplingParams(seed=0, **limits), ints(), ints())  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        state.open(0, SamplingParams(seed=0, presence_penalty=1.0), ints(VOCAB), ints())
    with pytest.raises(OverflowError):
        state.open(0, SamplingParams(seed=2**63), ints(), ints())
    state.open(0, SamplingParams(seed=0, presence_penalty=1.0), ints(), ints())
    with pytest.raises(ValueError, match="in use"):
        state.open(0, SamplingParams(seed=0), ints(), ints())
    with pytest.raises(ValueError, match="not in use"):
        state.close(1)
    for token in (-1, VOCAB):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            state.append(ints(0), ints(token))
    assert counts_of(one_batch(state, 0), 0).sum() == 0


def test_an_empty_step_is_a_batch_of_no_rows() -> None:
    state = SamplingState(1, VOCAB, EOS)
    state.append(ints(), ints())
    batch = one_batch(state)
    assert len(batch.seed) == 0
    assert batch.num_logprobs == -1


def random_params(rng: np.random.Generator) -> SamplingParams:
    def maybe(chance: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < chance else otherwise

    return SamplingParams(
        seed=int(rng.integers(-(2**63), 2**63)),
        temperature=float(rng.choice([0, 0.7, 1])),
        presence_penalty=maybe(0.3, 0.5, 0.0),
        repetition_penalty=maybe(0.3, 1.2, 1.0),
        logit_bias=maybe(0.2, ((int(rng.integers(VOCAB)), 2.0),), ()),
        logprobs=maybe(0.2, 3, None),
        min_tokens=maybe(0.3, 4, 0),
        stop_token_ids=maybe(0.2, (9,), ()),
        allowed_token_ids=maybe(0.2, (2, 7, 9, 30), None),
        bad_words=maybe(0.4, ((4,), *((token, 3) for token in range(0, VOCAB, 2)), (1, 3, 5)), ()),
    )


def as_seen(batch: SamplingBatch) -> list[object]:
    """All that a sampler reads of a batch, whatever rows the counts lie in."""
    rows = range(len(batch.seed))
    count_row = np.full(len(rows), -1) if batch.count_row is None else batch.count_row
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "position", "target")
    penalties = [
        (batch.presence[row], batch.frequency[row], batch.repetition[row], counts_of(batch, row).tolist())
        if batch.presence is not None
        and batch.frequency is not None
        and batch.repetition is not None
        and count_row[row] >= 0
        else None
        for row in rows
    ]
    wanted = None if batch.row_logprobs is None else batch.row_logprobs.tolist()
    return [*(getattr(batch, name).tolist() for name in names), batch.num_logprobs, wanted, biases(batch), penalties]


@pytest.mark.parametrize("seed", range(6))
def test_a_state_with_a_history_equals_a_state_opened_afresh(seed: int) -> None:
    """Random opening, closing, preemption and appending; after each step the batch is compared with a new state's."""
    rng = np.random.default_rng(seed)
    slots = 9
    state = SamplingState(slots, VOCAB, EOS)
    running: dict[int, tuple[SamplingParams, I32, list[int]]] = {}
    for _ in range(150):
        if rng.random() < 0.3 and len(running) < slots:
            slot = int(rng.choice([s for s in range(slots) if s not in running]))
            prompt = rng.integers(0, VOCAB, 6).astype(np.int32)
            running[slot] = (random_params(rng), prompt, [])
            state.open(slot, running[slot][0], prompt, ints())
        if rng.random() < 0.15 and running:
            slot = int(rng.choice(list(running)))
            state.close(slot)
            happened = rng.choice(["finished", "preempted and resumed", "replaced by another"])
            if happened == "replaced by another":
                running[slot] = (random_params(rng), running[slot][1], [])
            params, prompt, outputs = running[slot]
            if happened == "finished":
                del running[slot]
            else:
                state.open(slot, params, prompt, ints(*outputs))
        if not running:
            continue
        order = rng.permutation(list(running)) if rng.random() < 0.2 else np.array(sorted(running))
        fresh = SamplingState(slots, VOCAB, EOS)
        for slot, (params, prompt, outputs) in running.items():
            fresh.open(slot, params, prompt, ints(*outputs))
        assert as_seen(one_batch(state, *order)) == as_seen(one_batch(fresh, *order))
        chosen = rng.choice(order, int(rng.integers(0, 2 * len(order)))).astype(np.int32)
        tokens = rng.integers(0, VOCAB, len(chosen)).astype(np.int32)
        state.append(chosen, tokens)
        for slot, token in zip(chosen.tolist(), tokens.tolist(), strict=True):
            running[slot][2].append(token)


def test_sampling_state_imports_without_torch() -> None:
    program = "import sys, models.sampling, models.sampling_state, models.base; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
