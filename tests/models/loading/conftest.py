"""Tiny model files, written as the tools that people use write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

NUMBERS = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "vocab_size": 48,
}
Tensors = dict[str, tuple[np.ndarray, str]]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_tensors() -> Callable[..., Tensors]:
    """Makes every tensor of a model of these NUMBERS by llama.cpp's name: values, and the kind to store them as."""

    def make(kind: str = "F32", *, qk_norm: bool = False, qkv_bias: bool = False) -> Tensors:
        generator = np.random.default_rng(0)
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (48, 64)}
        for layer in ("blk.0.", "blk.1."):
            shapes[layer + "attn_norm.weight"] = shapes[layer + "ffn_norm.weight"] = (64,)
            for projection, rows in (("attn_q", 64), ("attn_k", 32), ("attn_v", 32)):
                shapes[f"{layer}{projection}.weight"] = (rows, 64)
                if qkv_bias:
                    shapes[f"{layer}{projection}.bias"] = (rows,)
            if qk_norm:
                shapes[layer + "attn_q_norm.weight"] = shapes[layer + "attn_k_norm.weight"] = (16,)
            shapes[layer + "attn_output.weight"] = (64, 64)
            shapes[layer + "ffn_gate.weight"] = shapes[layer + "ffn_up.weight"] = (96, 64)
            shapes[layer + "ffn_down.weight"] = (64, 96)
        shapes["output_norm.weight"] = (64,)
        return {
            name: (generator.normal(0, 0.1, shape).astype(np.float32), kind if len(shape) == 2 else "F32")
            for name, shape in shapes.items()
        }

    return make


@pytest.fixture
def write_gguf(tmp_path: Path, tiny_tensors: Callable[..., Tensors]) -> Callable[..., Path]:
    """Writes a GGUF file with the `gguf` package: a tiny Llama unless told otherwise.

    `numbers` are keys of the architecture, `metadata` whole keys; None leaves one out. A uint8 array of tensors is
    stored as it is.
    """

    def write(
        tensors: Tensors | None = None,
        *,
        architecture: str = "llama",
        numbers: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        name: str = "tiny.gguf",
    ) -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, architecture)
        keys = {f"{architecture}.{key}": value for key, value in {**NUMBERS, **(numbers or {})}.items()}
        for key, value in {**keys, **(metadata or {})}.items():
            _add(writer, key, value)
        for tensor, (values, kind) in (tiny_tensors() if tensors is None else tensors).items():
            number = gguf.GGMLQuantizationType[kind]
            stored = values if values.dtype == np.uint8 else gguf.quants.quantize(values, number)
            writer.add_tensor(tensor, stored, raw_dtype=number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
