"""The part of the plan that is for a drafting model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from config.errors import ConfigError
from config.facts import ModelFacts
from config.hardware import Hardware
from config.plan import Plan, resolve
from config.settings import Settings

GIB = 1 << 30
MACHINE = Hardware("CPU", cores=4, memory_bytes=16 * GIB, free_bytes=8 * GIB, isa=frozenset({"amx_bf16"}))
TARGET = ModelFacts(
    "target", "bfloat16", None, parameters=1_000_000_000, max_position=8192, kv_numbers_per_token=20_000, head_dim=100
)
QUANTISED = ModelFacts("target", "Q4_1", 4, 1_000_000_000, 8192, 20_000, 100)
DRAFT = ModelFacts("draft", "Q8_0", 8, 100_000_000, 2048, 5_000, 100)


def plan(asked: dict[str, Any] | None, target: ModelFacts = TARGET, **settings: Any) -> Plan:
    draft = DRAFT if asked and "model" in asked else None
    return resolve(Settings.load({"speculative_config": asked, **settings}, {}), MACHINE, target, draft)


def refusal(asked: dict[str, Any], target: ModelFacts = TARGET, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(asked, target, **settings)
    return str(caught.value)


def test_a_second_models_weights_and_pages_come_out_of_the_same_memory() -> None:
    drafting = plan({"method": "draft_model", "model": "draft", "kv_memory": "1GiB"})
    assert drafting.drafting is not None
    assert drafting.drafting.quantization == "int4"
    assert drafting.drafting.weight_bytes == 62_500_000
    assert drafting.drafting.page_bytes == 16 * 5_000 * 2
    assert drafting.drafting.num_pages == GIB // (16 * 5_000 * 2)
    alone = plan(None)
    assert alone.drafting is None
    given = drafting.drafting.total_bytes * 0.25 / alone.page_bytes  # the pool is a quarter of what is left
    assert alone.num_pages - drafting.num_pages == pytest.approx(given, abs=2)
    [line] = [row for row in drafting.rows() if row[0] == "drafting"]
    assert line == ("drafting", "draft, int4", "59.6 MiB of weights, 1023.9 MiB of pages")


def test_the_same_weights_draft_in_the_same_pages() -> None:
    decided = plan({"method": "self"})
    assert decided.drafting is not None
    assert decided.drafting.num_pages == 0
    assert decided.drafting.weight_bytes < decided.weight_bytes / 3
    assert plan({"method": "self", "quantization": "auto"}, QUANTISED, quantization="none").drafting is not None


def method(asked: dict[str, Any] | None, **settings: Any) -> str | None:
    speculation = plan(asked, **settings).speculation
    return None if speculation is None else speculation.method


def test_what_changes_no_bit_drafts_unless_told_otherwise() -> None:
    assert method(None) == "ngram"
    assert method({"method": "none"}) is None
    assert method({"method": "lookahead"}) == "lookahead"
    assert method(None, attention_backend="torch") is None
    assert method(None, speculative_acceptance="rejection") is None
    assert method({"method": "ngram"}, speculative_acceptance="rejection") == "ngram"
    [line] = [row for row in plan(None).rows() if row[0] == "speculation"]
    assert line == ("speculation", "ngram", "default: changes no bit, and drafts only where it pays")
    json.dumps(plan(None).as_dict())
    assert ("speculation", "none", "as asked") in plan({"method": "none"}).rows()


def test_proposers_without_a_model_need_no_plan() -> None:
    assert plan({"method": "ngram"}).drafting is None


def test_what_cannot_draft_is_refused_by_name() -> None:
    assert "no lighter" in refusal({"method": "self"}, QUANTISED)
    assert "no lighter" in refusal({"method": "self", "quantization": "none"})
    assert '"self" needs the CPU kernels' in refusal({"method": "self"}, attention_backend="torch")
    assert '"int4" needs the CPU kernels' in refusal(
        {"method": "draft_model", "model": "draft", "quantization": "int4"}, attention_backend="torch"
    )
    assert "use a smaller one" in refusal({"method": "draft_model", "model": "draft", "kv_memory": "7GiB"})


def test_a_drafting_model_is_not_quantised_where_torch_computes_unless_that_is_asked() -> None:
    decided = plan({"method": "draft_model", "model": "draft"}, attention_backend="torch")
    assert decided.drafting is not None
    assert decided.drafting.quantization == "none"
