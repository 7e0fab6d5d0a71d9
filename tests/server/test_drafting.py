"""Loading a model that drafts, on tiny models with a tokenizer each."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM

from config.errors import ConfigError
from config.settings import Settings
from models.cpu.runner import CpuRunner
from models.torch_runner import TorchRunner
from server.loading import Model, load_model
from server.startup import Phases
from server.wiring import make_engine

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def make(name: str, tokens: list[str], hidden: int = 64) -> Path:
        torch.manual_seed(0)
        shape = LlamaConfig(
            vocab_size=len(tokens), hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=256, eos_token_id=1,
        )  # fmt: skip
        LlamaForCausalLM(shape).save_pretrained(tmp_path / name)
        vocabulary = {token: number for number, token in enumerate(tokens)}
        Tokenizer(WordLevel(vocabulary, unk_token=tokens[0])).save(str(tmp_path / name / "tokenizer.json"))
        return tmp_path / name

    return make


TOKENS = ["<unk>", "<eos>", *(f"t{i}" for i in range(62))]


def load(model: Path, drafting: dict[str, Any], **settings: Any) -> tuple[Model, Settings, list[str]]:
    flags = {"model": str(model), "speculative_config": drafting, "kv_memory": "1MiB", "dtype": "bfloat16", **settings}
    asked = Settings.load(flags, {})
    phases = Phases(time.perf_counter())
    return load_model(asked, phases, lambda plan: None, lambda: None), asked, list(phases.seconds)


def test_a_second_model_has_pages_of_its_own_and_the_targets_threads(make: Make) -> None:
    drafting = {"method": "draft_model", "model": str(make("small", TOKENS, 32)), "kv_memory": "64KiB", "branches": 2}
    model, settings, phases = load(make("large", TOKENS), drafting)
    assert isinstance(model.drafter, CpuRunner)
    assert isinstance(model.runner, CpuRunner)
    assert model.drafter.config.hidden_size == 32
    assert model.drafter.engine == model.runner.engine
    assert model.drafter.memory is not model.runner.memory
    assert model.plan.drafting is not None
    assert model.drafter.halves.shape[1] == model.plan.drafting.num_pages == (64 << 10) // model.drafter.page_bytes(16)
    assert "drafter" in phases
    proposer = make_engine(model, settings, lambda record: None).speculation.proposer  # type: ignore[union-attr]
    assert (proposer.name, proposer.runs_model) == ("draft_model", True)
    assert proposer.seconds(1) > 0


def test_the_same_weights_draft_in_the_targets_pages(make: Make) -> None:
    model, settings, _ = load(make("large", TOKENS), {"method": "self", "quantization": "int8"})
    assert isinstance(model.drafter, CpuRunner)
    assert isinstance(model.runner, CpuRunner)
    assert model.drafter.memory is model.runner.memory
    assert [layer.keys for layer in model.drafter.layers] == [layer.keys for layer in model.runner.layers]
    assert model.drafter.weights.nbytes < model.runner.weights.nbytes
    assert make_engine(model, settings, lambda record: None).speculation.proposer.name == "self"  # type: ignore[union-attr]


def test_another_vocabulary_is_refused_by_what_is_other(make: Make) -> None:
    large = make("large", TOKENS)
    cases = {
        "shorter": (TOKENS[:-1], "63 tokens instead of 64"),
        "other": ([*TOKENS[:-1], "x"], "'t61' is None instead of 63"),
        "swapped": ([*TOKENS[:-2], TOKENS[-1], TOKENS[-2]], "'t60' is 63 instead of 62"),
    }
    for name, (tokens, message) in cases.items():
        with pytest.raises(ConfigError, match=message) as caught:
            load(large, {"method": "draft_model", "model": str(make(name, tokens))})
        assert str(caught.value).startswith(f"--speculative-config: {name} has another vocabulary: ")


def test_torch_drafts_with_a_second_model_but_not_with_the_same_weights(make: Make) -> None:
    large = make("large", TOKENS)
    with pytest.raises(ConfigError, match='"self" needs the CPU kernels'):
        load(large, {"method": "self"}, attention_backend="torch")
    drafting = {"method": "draft_model", "model": str(make("small", TOKENS, 32))}
    model, _, _ = load(large, drafting, attention_backend="torch")
    assert isinstance(model.drafter, TorchRunner)
    assert model.drafter.config.hidden_size == 32
