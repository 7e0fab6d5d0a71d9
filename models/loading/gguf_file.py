"""A GGUF file as a Checkpoint.

Owner: whoever loads the model, one thread at a time. Knows where tensors lie and how llama.cpp orders their rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from models.errors import CorruptModelError
from models.loading.checkpoint import Checkpoint, QuantizedTensor
from models.loading.gguf_config import INTERLEAVED_ROPE, ROPE_DIVISORS, canonical_name, read_config
from models.loading.gguf_header import StoredTensor, read_header
from models.loading.layout import check_tensors, tensor_shapes
from models.loading.mapped import MappedFile, fingerprint

if TYPE_CHECKING:
    import torch

_TORCH_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True, eq=False)
class GgufCheckpoint(Checkpoint):
    metadata: Mapping[str, Any]  # as the file has it: what the tokenizer is made from
    _file: MappedFile
    _tensors: Mapping[str, StoredTensor]

    def names(self) -> list[str]:
        return list(self._tensors)

    def stored_kind(self, name: str) -> str:
        return self._tensors[name].kind.name

    def quantized(self, name: str) -> QuantizedTensor | None:
        stored = self._tensors[name]
        if stored.kind.plain:
            return None
        data = self._file.rows(stored.start, stored.num_rows, stored.row_bytes)
        order = self._row_order(name, stored.num_rows)
        if order is not None:
            # A row is a whole number of blocks, so rows can move without being decoded.
            data = data[order]
            data.flags.writeable = False
        return QuantizedTensor(stored.kind.name, data, (stored.num_rows, stored.shape[-1]))

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        stored = self._tensors[name]
        blocks = self.quantized(name)
        if blocks is not None:
            return torch.from_numpy(dequantise(blocks.kind, blocks.data)).reshape(stored.shape)
        dtype: torch.dtype = getattr(torch, _TORCH_DTYPES[stored.kind.name])
        count = math.prod(stored.shape)
        plain = torch.frombuffer(self._file.buffer, dtype=dtype, count=count, offset=stored.start).reshape(stored.shape)
        order = self._row_order(name, stored.shape[0])
        return plain if order is None else plain[torch.from_numpy(order)]

    def _row_order(self, name: str, rows: int) -> npt.NDArray[np.int64] | None:
        """Which stored row comes where, or None when rows are in order already.

        llama.cpp rotates neighbouring numbers of a head, Hugging Face's layout a head's first half with its second: in
        these files row 2i + h of a head is the one that belongs at h * head_dim / 2 + i.
        """
        if self.config.architecture not in INTERLEAVED_ROPE:
            return None
        if not name.endswith((".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias")):
            return None
        heads = rows // self.config.head_dim
        return np.arange(rows).reshape(heads, self.config.head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def open_gguf(path: Path, name: str) -> GgufCheckpoint:
    """Raises ModelError."""
    file = MappedFile(path)
    header = read_header(file)
    stored = {canonical_name(tensor): place for tensor, place in header.tensors.items()}
    divisors = _rope_divisors(file, stored.pop(ROPE_DIVISORS, None))
    shapes = {tensor: place.shape for tensor, place in stored.items()}
    config = read_config(path, header.metadata, shapes, divisors)
    expected = tensor_shapes(config)
    check_tensors(str(path), shapes, expected)
    key, kept = fingerprint([(file, header.size)]), {tensor: stored[tensor] for tensor in expected}
    return GgufCheckpoint(name, config, path, key, header.metadata, file, kept)


def _rope_divisors(file: MappedFile, stored: StoredTensor | None) -> tuple[float, ...]:
    if stored is None:
        return ()
    if stored.kind.name != "F32":
        raise CorruptModelError(f"{file.path}: {ROPE_DIVISORS} is not stored as F32.")
    return tuple(np.frombuffer(file.buffer, dtype="<f4", count=stored.shape[-1], offset=stored.start).tolist())


def dequantise(kind: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Blocks of a quantised kind, uint8 [rows, bytes per row] -> a new array [rows, numbers per row].

    The arithmetic is the `gguf` package's, the reference for these formats: 150 to 500 million numbers a second.
    """
    from gguf import GGMLQuantizationType, dequantize

    return cast("npt.NDArray[np.float32]", dequantize(data, GGMLQuantizationType[kind]))
