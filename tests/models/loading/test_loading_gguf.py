from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from models.errors import CorruptModelError, ModelError, ModelNotFoundError, UnsupportedModelError
from models.loading.checkpoint import Checkpoint, open_checkpoint
from models.loading.gguf_file import open_gguf
from models.loading.layout import tensor_shapes
from models.loading.source import Source, resolve_source
from models.loading.stored import dequantise

Write = Callable[..., Path]
Tensors = Callable[..., dict[str, tuple[np.ndarray, str]]]
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(Source("gguf", path, path.stem))


def check_against_transformers(checkpoint: Checkpoint, path: Path) -> None:
    """Every tensor, as transformers reads the file into a model of the same shape."""
    config = transformers.AutoConfig.for_model(
        checkpoint.config.architecture,
        num_hidden_layers=checkpoint.config.num_layers,
        tie_word_embeddings=checkpoint.config.tie_embeddings,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    reference = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    assert set(checkpoint.names()) == set(reference)
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name).float(), reference[name].float()), name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_tensor_of_a_llama_file_equals_transformers(kind: str, write_gguf: Write, tiny_tensors: Tensors) -> None:
    path = write_gguf(tiny_tensors(kind))
    check_against_transformers(opened(path), path)


@pytest.mark.parametrize(("architecture", "extra"), [("qwen2", "qkv_bias"), ("qwen3", "qk_norm")])
def test_every_tensor_of_a_qwen_file_equals_transformers(
    architecture: str, extra: str, write_gguf: Write, tiny_tensors: Tensors
) -> None:
    path = write_gguf(tiny_tensors("Q8_0", **{extra: True}), architecture=architecture)
    checkpoint = opened(path)
    check_against_transformers(checkpoint, path)
    config = checkpoint.config
    assert (config.architecture, config.qkv_bias, config.qk_norm) == (
        architecture,
        extra == "qkv_bias",
        extra == "qk_norm",
    )


def test_biases_of_a_llama_file_are_put_in_order_like_their_rows(write_gguf: Write, tiny_tensors: Tensors) -> None:
    path = write_gguf(tiny_tensors(qkv_bias=True))
    stored = tiny_tensors(qkv_bias=True)["blk.0.attn_k.bias"][0]
    bias = opened(path).tensor("model.layers.0.self_attn.k_proj.bias")
    assert bias[:16].tolist() == [*stored[0:16:2].tolist(), *stored[1:16:2].tolist()]


def test_tensors_of_the_default_model_equal_those_of_the_gguf_package() -> None:
    source = resolve_source(None)
    checkpoint = open_checkpoint(source)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(source.path).tensors}
    assert len(checkpoint.names()) == len(stored)
    for name, ours in (
        ("token_embd", "model.embed_tokens"),
        ("blk.0.attn_v", "model.layers.0.self_attn.v_proj"),
        ("blk.17.ffn_down", "model.layers.17.mlp.down_proj"),
        ("blk.29.attn_norm", "model.layers.29.input_layernorm"),
        ("output_norm", "model.norm"),
    ):
        tensor = stored[f"{name}.weight"]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(checkpoint.tensor(f"{ours}.weight").numpy(), values), name
    keys = gguf.dequantize(stored["blk.3.attn_k.weight"].data, gguf.GGMLQuantizationType.Q4_1)
    ordered = [keys[head * 64 + 2 * pair + side] for head in range(3) for side in range(2) for pair in range(32)]
    assert np.array_equal(checkpoint.tensor("model.layers.3.self_attn.k_proj.weight").numpy(), ordered)


def test_the_default_model_is_described_as_it_is() -> None:
    checkpoint = open_checkpoint(resolve_source(None))
    config = checkpoint.config
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert (config.max_position, config.rope.theta, config.tie_embeddings) == (8192, 100000.0, True)
    assert (config.bos_token_id, config.eos_token_ids[0]) == (1, 2)
    assert checkpoint.stored_kind("model.embed_tokens.weight") == "Q8_0"
    assert checkpoint.stored_kind("model.layers.0.mlp.down_proj.weight") == "Q4_1"


def test_blocks_are_handed_out_in_the_order_of_the_tensor_and_from_the_file(
    write_gguf: Write, tiny_tensors: Tensors
) -> None:
    checkpoint = opened(write_gguf(tiny_tensors("Q4_1")))
    for name in (Q_PROJ, DOWN_PROJ):
        stored = checkpoint.stored(name)
        assert stored.kind == checkpoint.stored_kind(name) == "Q4_1"
        assert stored.shape == tuple(checkpoint.tensor(name).shape)
        assert np.array_equal(dequantise(stored.kind, stored.data), checkpoint.tensor(name).numpy())
    assert not checkpoint.stored(DOWN_PROJ).data.flags.owndata


def test_plain_tensors_keep_their_type_and_their_memory(write_gguf: Write, tiny_tensors: Tensors) -> None:
    for kind, dtype in (("F16", torch.float16), ("BF16", torch.bfloat16)):
        checkpoint = opened(write_gguf(tiny_tensors(kind)))
        assert checkpoint.stored_kind(DOWN_PROJ) == kind
        assert checkpoint.tensor(DOWN_PROJ).data_ptr() == checkpoint.stored(DOWN_PROJ).data.ctypes.data
        assert checkpoint.tensor(DOWN_PROJ).dtype == checkpoint.tensor(Q_PROJ).dtype == dtype
        assert checkpoint.tensor("model.norm.weight").dtype == torch.float32


def test_names_come_in_the_order_of_a_forward_pass_with_the_shapes_of_the_layout(write_gguf: Write) -> None:
    checkpoint = opened(write_gguf())
    shapes = tensor_shapes(checkpoint.config)
    assert checkpoint.names() == list(shapes)
    assert checkpoint.names()[0] == "model.embed_tokens.weight"
    assert checkpoint.names()[-1] == "model.norm.weight"
    assert {name: tuple(checkpoint.tensor(name).shape) for name in shapes} == shapes


def test_another_name_is_a_key_error(write_gguf: Write) -> None:
    checkpoint = opened(write_gguf())
    for method in (checkpoint.tensor, checkpoint.stored, checkpoint.stored_kind):
        with pytest.raises(KeyError):
            method("lm_head.weight")


def test_an_output_matrix_of_its_own_unties_the_embeddings(write_gguf: Write, tiny_tensors: Tensors) -> None:
    tensors = tiny_tensors()
    tensors["output.weight"] = (np.ones((48, 64), np.float32), "F32")
    checkpoint = opened(write_gguf(tensors))
    assert not checkpoint.config.tie_embeddings
    assert checkpoint.tensor("lm_head.weight").sum() == 48 * 64


def test_heads_may_be_larger_than_the_hidden_size_over_their_number(write_gguf: Write, tiny_tensors: Tensors) -> None:
    tensors = tiny_tensors(qk_norm=True)
    for layer in range(2):
        for name, shape in (
            ("attn_q", (128, 64)), ("attn_k", (64, 64)), ("attn_v", (64, 64)), ("attn_output", (64, 128)),
            ("attn_q_norm", (32,)), ("attn_k_norm", (32,)),
        ):  # fmt: skip
            tensors[f"blk.{layer}.{name}.weight"] = (np.zeros(shape, np.float32), "F32")
    path = write_gguf(tensors, architecture="qwen3", numbers={"attention.key_length": 32, "attention.value_length": 32})
    assert opened(path).config.head_dim == 32


def test_rotary_scaling_is_passed_on_under_transformers_names(write_gguf: Write) -> None:
    plain = opened(write_gguf()).config.rope
    assert dict(plain.parameters) == {"rope_type": "default", "rope_theta": 10000.0}
    linear = opened(write_gguf(numbers={"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})).config.rope
    assert dict(linear.parameters) == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    yarn = opened(
        write_gguf(
            numbers={
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
            }
        )
    ).config.rope
    assert dict(yarn.parameters) == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }


def test_rotary_divisors_of_newer_llamas_are_read_from_their_tensor(write_gguf: Write, tiny_tensors: Tensors) -> None:
    tensors = tiny_tensors()
    tensors["rope_freqs.weight"] = (np.arange(1, 9, dtype=np.float32), "F32")
    checkpoint = opened(write_gguf(tensors))
    parameters = dict(checkpoint.config.rope.parameters)
    assert parameters["rope_type"] == "divided"
    assert parameters["divisors"] == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    assert "rope_freqs.weight" not in checkpoint.names()


def test_a_sliding_window_holds_for_every_layer(write_gguf: Write) -> None:
    assert opened(write_gguf()).config.windows == (None, None)
    assert opened(write_gguf(numbers={"attention.sliding_window": 32})).config.windows == (32, 32)


def test_end_tokens_are_those_named_and_those_known_by_their_spelling(write_gguf: Write) -> None:
    tokens = ["a", "<|im_end|>", "<|eot_id|>", "</s>", "<|endoftext|>"]
    path = write_gguf(
        metadata={
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1, 3, 1, 3, 3],  # here <|eot_id|> is text
            "tokenizer.ggml.eos_token_id": 3,
            "tokenizer.ggml.eot_token_id": 1,
            "tokenizer.ggml.bos_token_id": 0,
        }
    )
    assert opened(path).config.eos_token_ids == (3, 1, 4)
    assert opened(path).config.bos_token_id == 0


def test_opening_a_file_imports_neither_torch_nor_transformers_nor_the_gguf_package(write_gguf: Write) -> None:
    code = (
        "import sys; from pathlib import Path; from models.loading.checkpoint import open_checkpoint;"
        "from models.loading.source import Source;"
        f"open_checkpoint(Source('gguf', Path({str(write_gguf())!r}), 'x'));"
        "sys.exit(str([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules] or ''))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr.strip() == ""


def test_the_fingerprint_is_of_the_content_alone(write_gguf: Write, tiny_tensors: Tensors, tmp_path: Path) -> None:
    path = write_gguf()
    copy = tmp_path / "copy.gguf"
    shutil.copy(path, copy)
    key = opened(path).fingerprint
    assert opened(copy).fingerprint == key
    assert len(key) == 32
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    copy.write_bytes(data)
    assert opened(copy).fingerprint != key
    assert opened(write_gguf(numbers={"context_length": 256}, name="other.gguf")).fingerprint != key


# What cannot be read


def test_a_file_that_is_not_there_or_is_empty_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        opened(tmp_path / "none.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CorruptModelError, match="is empty"):
        opened(tmp_path / "empty.gguf")


def test_a_file_of_another_format_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "not.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptModelError, match="not a GGUF file"):
        opened(path)


def test_another_version_of_the_format_is_said_so(write_gguf: Write) -> None:
    path = write_gguf()
    data = bytearray(path.read_bytes())
    data[4] = 1
    path.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match="GGUF version 1"):
        opened(path)


def test_a_file_cut_anywhere_is_never_opened(write_gguf: Write, tmp_path: Path) -> None:
    data = write_gguf().read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(1, 1800, 7), *range(1800, len(data), 9001), len(data) - 200]:
        cut.write_bytes(data[:size])
        with pytest.raises(CorruptModelError, match=r"truncated|damaged|not a GGUF file"):
            opened(cut)


def test_a_damaged_header_gives_a_model_error_or_nothing(write_gguf: Write, tmp_path: Path) -> None:
    data = write_gguf(metadata={"tokenizer.ggml.tokens": ["a", "bc"], "tokenizer.ggml.token_type": [1, 3]}).read_bytes()
    header = data.index(b"output_norm.weight") + 60
    damaged = tmp_path / "damaged.gguf"
    generator = np.random.default_rng(3)
    refusals = []
    for _ in range(600):
        changed = bytearray(data)
        changed[generator.integers(0, header)] = generator.integers(0, 256)
        damaged.write_bytes(changed)
        try:
            opened(damaged)
        except ModelError as error:
            refusals.append(str(error))
    assert len(refusals) > 300
    assert not any("\n" in refusal for refusal in refusals)


def test_a_missing_a_strange_and_a_misshapen_tensor_are_named(write_gguf: Write, tiny_tensors: Tensors) -> None:
    tensors = tiny_tensors()
    del tensors["blk.1.ffn_down.weight"]
    with pytest.raises(CorruptModelError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is missing"):
        opened(write_gguf(tensors))
    tensors = tiny_tensors()
    tensors["blk.0.attn_sinks.weight"] = tensors["blk.0.attn_norm.weight"]
    with pytest.raises(CorruptModelError, match=r"blk\.0\.attn_sinks\.weight does not belong"):
        opened(write_gguf(tensors))
    tensors = tiny_tensors()
    tensors["blk.0.attn_k.weight"] = tensors["blk.0.attn_q.weight"]
    with pytest.raises(CorruptModelError, match=r"k_proj\.weight has shape \[64, 64\] where .* \[32, 64\]"):
        opened(write_gguf(tensors))


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ({"block_count": None}, "block_count is missing"),
        ({"embedding_length": "64"}, "embedding_length is missing .* or is not a number"),
        ({"attention.head_count": 0}, "num_heads = 0"),
        ({"attention.head_count_kv": 3}, "4 attention heads cannot share 3"),
        ({"block_count": 4_000_000_000}, "says 4000000000 layers"),
    ],
)
def test_numbers_that_contradict_each_other_are_named(
    numbers: dict[str, object], problem: str, write_gguf: Write
) -> None:
    with pytest.raises(CorruptModelError, match=problem):
        opened(write_gguf(numbers=numbers))


@pytest.mark.parametrize(
    ("numbers", "metadata", "problem"),
    [
        ({"expert_count": 8}, {}, "mixture of experts"),
        ({"rope.dimension_count": 8}, {}, r"rope\.dimension_count differs from the size of a head, 16"),
        ({"attention.value_length": 8}, {}, r"attention\.value_length differs"),
        ({"rope.scaling.type": "longrope"}, {}, "rotary scaling 'longrope'"),
        ({}, {"split.count": 3}, "one part of a split model"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    numbers: dict[str, object], metadata: dict[str, object], problem: str, write_gguf: Write
) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        opened(write_gguf(numbers=numbers, metadata=metadata))


def test_another_architecture_and_another_kind_of_block_are_refused_by_name(
    write_gguf: Write, tiny_tensors: Tensors
) -> None:
    with pytest.raises(UnsupportedModelError, match="architecture 'gpt2'; supported are llama"):
        opened(write_gguf(architecture="gpt2"))
    tensors = tiny_tensors()
    number = gguf.GGMLQuantizationType.TQ1_0
    tensors["blk.0.ffn_down.weight"] = (np.zeros((64, gguf.GGML_QUANT_SIZES[number][1]), np.uint8), "TQ1_0")
    with pytest.raises(UnsupportedModelError, match=r"ffn_down\.weight is stored as TQ1_0; supported are F32, F16"):
        open_gguf(write_gguf(tensors), "x")
