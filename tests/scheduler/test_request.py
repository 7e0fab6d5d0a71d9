"""A sequence's own bookkeeping."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler.request import Sequence, derive_seed


@pytest.mark.case(74)
def test_choice_0_keeps_the_seed_and_the_others_differ_for_good() -> None:
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        seeds = [derive_seed(seed, index) for index in range(64)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 64
        assert all(-(2**63) <= derived < 2**63 for derived in seeds)
    assert derive_seed(42, 1) == -4767286540954276203  # a seeded request gives the same choices in every release
    assert not {derive_seed(1, i) for i in range(1, 99)} & {derive_seed(2, i) for i in range(1, 99)}


def test_tokens_grow_without_bound_by_the_prompts_first_allocation(tools: Any) -> None:
    request = tools.request("r", [1, 2, 3], max_tokens=1000)
    sequence = Sequence(request, 0, key=(0, 0, 0, 0), context_limit=600, eos_token_ids=(7,))
    assert len(sequence.buffer) == 67
    for token in range(597):
        sequence.append(token % 50)
    assert sequence.known == sequence.goal == sequence.known_limit == len(sequence.buffer) == 600
    assert sequence.tokens[:5].tolist() == [1, 2, 3, 0, 1]
    assert sequence.outputs.tolist() == [token % 50 for token in range(597)]
