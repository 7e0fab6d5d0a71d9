"""The simulator of speculation, and the set of prompts whose answers repeat them."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from loadtest.speculation import CHAIN, counters, repeats
from loadtest.speculation_document import (
    acceptance,
    mean_length,
    parts,
    simulate,
    speedup,
    step_cost,
    tokens_of_chain,
)
from loadtest.tables import markdown


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("drafted", [1, 4, 6])
def test_a_simulated_chain_gives_what_the_formula_says(acceptance: float, drafted: int) -> None:
    expected = drafted + 1 if acceptance == 1 else (1 - acceptance ** (drafted + 1)) / (1 - acceptance)
    assert tokens_of_chain(acceptance, drafted) == pytest.approx(expected)
    assert simulate((drafted,), acceptance, steps=20_000) == pytest.approx(expected, rel=0.03)


def test_a_tree_beats_a_chain_of_its_cost_where_second_choices_are_often_right() -> None:
    assert simulate((3, 3), 0.4, second=0.5) > simulate((6,), 0.4)
    assert simulate((3, 3), 0.9, second=0.1) < simulate((6,), 0.9)


def test_a_tree_gives_what_its_branches_say() -> None:
    expected = 1 + (0.6 + 0.4 * 0.25) * (1 + 0.6 + 0.36)
    assert simulate((3, 3), 0.6, second=0.25, steps=50_000) == pytest.approx(expected, rel=0.02)


def test_the_cost_of_rows_lies_on_the_lines_between_those_that_are_known() -> None:
    costs = {1: 5.0, 4: 8.0, 16: 20.0}
    assert [step_cost(costs, rows) for rows in (1, 2, 4, 10, 16, 28)] == [5.0, 6.0, 8.0, 14.0, 20.0, 32.0]
    assert speedup(3.0, (3,), costs) == pytest.approx(3 * 5 / 8)
    assert speedup(3.0, (1, 1), costs) == pytest.approx(3 * 5 / 8)


def test_there_are_24_prompts_that_repeat_in_parts_of_every_kind() -> None:
    thirds = [repeats(part, 3) for part in range(3)]
    assert [len(prompts) for prompts in thirds] == [8, 8, 8]
    assert len({prompt.prompt for prompts in thirds for prompt in prompts}) == 24
    for prompts in thirds:
        assert any("```json" in prompt.prompt for prompt in prompts)
        assert all(150 <= prompt.max_tokens <= 250 for prompt in prompts)


def test_what_was_drafted_is_summed_over_proposers_and_told_by_place() -> None:
    text = """# TYPE octavo_spec_drafted_tokens counter
octavo_spec_drafted_tokens_total{proposer="ngram",position="1"} 30
octavo_spec_drafted_tokens_total{proposer="self",position="1"} 10
octavo_spec_drafted_tokens_total{proposer="self",position="2"} 8
octavo_step_errors_total 5
# TYPE octavo_spec_acceptance_length histogram
octavo_spec_acceptance_length_bucket{le="2.0"} 20
octavo_spec_acceptance_length_bucket{le="+Inf"} 40
octavo_spec_acceptance_length_count 40
octavo_spec_acceptance_length_sum 100
"""
    found = counters(text)
    assert found == {
        "drafted_tokens 1": 40,
        "drafted_tokens 2": 8,
        "acceptance_length_bucket 2": 20,
        "acceptance_length_bucket inf": 40,
        "acceptance_length_count": 40,
        "acceptance_length_sum": 100,
    }
    assert mean_length(found) == 2.5
    # Of 40 chains of two, 20 had a wrong token, behind which nothing was asked.
    assert acceptance(found, 2) == pytest.approx(60 / 80)


def test_the_document_has_every_figure_and_says_which_goals_were_reached() -> None:
    drafted = {"acceptance_length_count": 40, "acceptance_length_sum": 100, "acceptance_length_bucket 6": 20}
    asked = {"kind": "single", "requests": 2, "concurrency": 1}
    row = {"name": "ngram", "set": asked, "pairs": [(100, 130), (100, 150), (50, 60)], "drafted": drafted}
    plain = {"name": "none", "shape": "-", "set": "single", "drafted": {}, "speed": 40, "bfloat16": False, "keys": {}}
    chain = plain | {"name": "ngram", "shape": "chain of 6", "drafted": drafted, "speed": 80, "keys": CHAIN}
    content = {
        "machine": {"processor": "A processor", "cpus": 2},
        "quick": False,
        "repetitions": 3,
        "costs": [[1, 0.005], [16, 0.02]],
        "ratios": [row | {"wanted": wanted} for wanted in (1.25, 1.4, None)],
        "lengths": [plain, *(chain | {"keys": {"num_speculative_tokens": k}} for k in (2, 4)), chain],
        "rules": [{"rule": "keyed", "temperature": 0.7, "drafted": drafted, "speed": 70, "tokens": 4}],
    }
    found = parts(content)
    text = "\n".join(markdown(part) for part in found if isinstance(part, list))
    assert "| ngram | single, 1 at once | 100 | 130 | 1.30x | 1.20 - 1.50 | 1.25x reached | 2.50 |" in text
    assert "1.4x missed" in text
    assert "| ngram | single | chain of 6 | 75% | 2.50 | 3.47 | 80 | 2.00x |" in text
    drawings = [part[1] for part in found if isinstance(part, tuple)]
    assert len(drawings) == 3
    for drawing in drawings:
        ElementTree.fromstring(drawing)
