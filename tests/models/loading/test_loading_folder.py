from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from models.loading.checkpoint import Checkpoint, open_checkpoint
from models.loading.folder_config import read_folder_config
from models.loading.source import Source

Save = Callable[..., Path]
SIZES = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 8},
    "llama with new scaling": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral": {"sliding_window": 32},
    "mistral with full attention": {"sliding_window": None, "head_dim": 32},
    "qwen2": {},
    "qwen2 with a late window": {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    "qwen2 with listed layers": {
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3": {"head_dim": 32},
    "qwen3 with biases": {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
}


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Saves a random model of a kind with transformers, in shards when told how large they may be."""

    def save_model(
        kind: str = "llama", shard_size: str = "5GB", dtype: torch.dtype = torch.float32, **extra: Any
    ) -> Path:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(kind.split()[0], **{**SIZES, **MODELS.get(kind, {}), **extra})
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
        for parameter in model.parameters():
            parameter.data.normal_()
        folder = tmp_path / kind.replace(" ", "-")
        model.save_pretrained(folder, max_shard_size=shard_size)
        return folder

    return save_model


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(Source("folder", folder, folder.name))


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> Path:
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in remove}
    path.write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize("kind", MODELS)
def test_every_tensor_equals_transformers_and_none_is_left_out(kind: str, save: Save) -> None:
    folder = save(kind, shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    checkpoint = opened(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    reference = model.state_dict()
    if checkpoint.config.tie_embeddings:
        del reference["lm_head.weight"]
    assert set(checkpoint.names()) == set(reference)
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name), reference[name]), name


@pytest.mark.parametrize("kind", MODELS)
def test_the_configuration_means_what_transformers_takes_it_to_mean(kind: str, save: Save) -> None:
    folder = save(kind)
    reference = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(reference)
    config = opened(folder).config
    assert config.architecture == reference.model_type
    assert config.head_dim == model.model.layers[0].self_attn.head_dim
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.norm_eps == reference.rms_norm_eps
    assert config.max_position == reference.max_position_embeddings
    assert dict(config.rope.parameters) == reference.rope_parameters
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.tie_embeddings == reference.tie_word_embeddings
    windows = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    if reference.model_type == "mistral":
        windows = [reference.sliding_window] * 3
    assert config.windows == tuple(windows)
    assert config.bos_token_id == reference.bos_token_id
    assert list(config.eos_token_ids) == ([] if reference.eos_token_id is None else [reference.eos_token_id])


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_an_empty_configuration_has_the_defaults_of_transformers(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    config = read_folder_config(tmp_path)
    reference = transformers.AutoConfig.for_model(kind)
    assert config.vocab_size == reference.vocab_size
    assert (config.hidden_size, config.intermediate_size) == (reference.hidden_size, reference.intermediate_size)
    assert (config.num_layers, config.num_heads) == (reference.num_hidden_layers, reference.num_attention_heads)
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == getattr(reference, "head_dim", 128)
    assert (config.max_position, config.norm_eps) == (reference.max_position_embeddings, reference.rms_norm_eps)
    assert config.tie_embeddings == reference.tie_word_embeddings
    assert config.windows == (getattr(reference, "sliding_window", None),) * 32
    assert dict(config.rope.parameters) == reference.rope_parameters
    assert config.bos_token_id == reference.bos_token_id
    assert list(config.eos_token_ids) == ([] if reference.eos_token_id is None else [reference.eos_token_id])


@pytest.mark.parametrize(
    "older",
    [
        {"rope_theta": 25000.0},
        {"rope_theta": 25000.0, "rope_scaling": None},
        {"rope_theta": 25000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ],
)
def test_the_older_way_to_write_rotary_scaling_means_the_same(older: dict[str, Any], save: Save) -> None:
    folder = edit_config(save(), remove=("rope_parameters",), **older)
    reference = transformers.AutoConfig.from_pretrained(folder).rope_parameters
    assert dict(opened(folder).config.rope.parameters) == {k: v for k, v in reference.items() if k != "type"}


def test_stored_types_are_kept(save: Save) -> None:
    for dtype, kind in ((torch.bfloat16, "BF16"), (torch.float16, "F16")):
        checkpoint = opened(save(dtype=dtype))
        assert checkpoint.stored_kind("model.norm.weight") == kind
        assert checkpoint.tensor("model.norm.weight").dtype == dtype
        for name in checkpoint.names():
            numbers = checkpoint.stored(name).numbers()
            assert torch.equal(torch.from_numpy(numbers), checkpoint.tensor(name).float()), name


def test_one_file_and_many_hold_the_same_model(save: Save) -> None:
    whole = opened(save())
    names, norm = whole.names(), whole.tensor("model.norm.weight").clone()
    shutil.rmtree(whole.path)
    sharded = opened(save(shard_size="60KB"))
    assert sharded.names() == names
    assert torch.equal(sharded.tensor("model.norm.weight"), norm)


def test_end_tokens_of_the_generation_configuration_come_first(save: Save) -> None:
    folder = save()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2, 9]}))
    assert opened(folder).config.eos_token_ids == (7, 2, 9)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert opened(folder).config.eos_token_ids == (7, 2)


def test_tables_and_copies_that_say_nothing_new_are_left_out(save: Save) -> None:
    folder = save("llama tied")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    assert "lm_head.weight" not in opened(folder).names()


def test_opening_a_folder_imports_neither_torch_nor_transformers(save: Save) -> None:
    code = (
        "import sys; from pathlib import Path; from models.loading.checkpoint import open_checkpoint;"
        "from models.loading.source import Source;"
        f"open_checkpoint(Source('folder', Path({str(save())!r}), 'x'));"
        "sys.exit(str([m for m in ('torch', 'transformers') if m in sys.modules] or ''))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr.strip() == ""


def test_the_fingerprint_changes_with_the_weights_and_the_configuration(save: Save, tmp_path: Path) -> None:
    folder = save()
    key = opened(folder).fingerprint
    copy = tmp_path / "a copy"
    shutil.copytree(folder, copy)
    assert opened(copy).fingerprint == key
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, copy / "model.safetensors")
    assert opened(copy).fingerprint != key
    assert opened(edit_config(folder, rms_norm_eps=1e-4)).fingerprint != key


# What cannot be read


def test_a_folder_without_a_configuration_or_without_weights_is_said_so(save: Save, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json: it is not a Hugging Face model folder"):
        opened(tmp_path / "nothing")
    folder = save()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="holds no weights"):
        opened(folder)


def test_pickled_weights_are_refused(save: Save) -> None:
    folder = save()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match="pickles only"):
        opened(folder)


def test_a_truncated_file_is_said_so(save: Save) -> None:
    path = save() / "model.safetensors"
    data = path.read_bytes()
    for size in (0, 5, 200, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptModelError, match="truncated or damaged"):
            opened(path.parent)


def test_a_missing_shard_is_named(save: Save) -> None:
    folder = save(shard_size="60KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CorruptModelError, match=f"{shard.name} is missing"):
        opened(folder)


def test_an_index_may_not_lead_out_of_its_folder(save: Save) -> None:
    folder = save(shard_size="60KB")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(CorruptModelError, match="outside its folder"):
        opened(folder)
    index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(CorruptModelError, match="names no tensors"):
        opened(folder)


def test_a_missing_a_strange_and_a_misshapen_tensor_are_named(save: Save) -> None:
    folder = save()
    whole = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    save_file({key: value for key, value in whole.items() if key != name}, folder / "model.safetensors")
    with pytest.raises(CorruptModelError, match=r"layers\.2\.mlp\.down_proj\.weight is missing"):
        opened(folder)
    save_file({**whole, "model.layers.3.mlp.down_proj.weight": whole[name].clone()}, folder / "model.safetensors")
    with pytest.raises(CorruptModelError, match=r"layers\.3\.mlp\.down_proj\.weight does not belong"):
        opened(folder)
    save_file({**whole, name: whole[name].T.contiguous()}, folder / "model.safetensors")
    with pytest.raises(CorruptModelError, match=r"shape \[96, 64\] where the configuration says \[64, 96\]"):
        opened(folder)
    for dtype, kind in ((torch.int8, "I8"), (torch.float64, "F64")):
        save_file({**whole, name: whole[name].to(dtype)}, folder / "model.safetensors")
        with pytest.raises(UnsupportedModelError, match=f"of type {kind}"):
            opened(folder)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "bert"}, "of type 'bert'; supported are llama"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with gptq"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "cover part of a head"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differ by layer"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(changes: dict[str, Any], problem: str, save: Save) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        opened(edit_config(save(), **changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"num_attention_heads": 0}, "num_heads = 0"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"vocab_size": None}, "vocab_size = None"),
        ({"num_hidden_layers": 10**9}, "says 1000000000 layers"),
        ({"rms_norm_eps": []}, "wrong type"),
    ],
)
def test_numbers_that_contradict_each_other_are_named(changes: dict[str, Any], problem: str, save: Save) -> None:
    with pytest.raises(CorruptModelError, match=problem):
        opened(edit_config(save(), **changes))


def test_a_configuration_that_is_not_json_is_said_so(save: Save) -> None:
    folder = save()
    for text in ("{", "[]", "\xff"):
        (folder / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(CorruptModelError, match=r"config\.json"):
            opened(folder)
