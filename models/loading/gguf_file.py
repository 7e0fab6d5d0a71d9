"""A GGUF file as a Checkpoint.

Owner: whoever loads the model, one thread at a time. Knows where tensors lie and how llama.cpp orders their rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.errors import CorruptModelError
from models.loading.checkpoint import Checkpoint
from models.loading.gguf_config import INTERLEAVED_ROPE, ROPE_DIVISORS, canonical_name, read_config
from models.loading.gguf_header import read_header
from models.loading.layout import check_tensors, tensor_shapes
from models.loading.mapped import MappedFile, fingerprint
from models.loading.stored import StoredTensor


@dataclass(frozen=True, slots=True, eq=False)
class GgufCheckpoint(Checkpoint):
    metadata: Mapping[str, Any]  # as the file has it: what the tokenizer is made from

    def stored(self, name: str) -> StoredTensor:
        stored = self._tensors[name]
        rows = stored.shape[0]
        order = self._row_order(name, rows)
        if order is None:
            return stored
        # A row is a whole number of blocks, so rows can move without being decoded; so can the numbers of a bias.
        return replace(stored, data=stored.data.reshape(rows, -1)[order].reshape(stored.data.shape))

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
    divisors = _rope_divisors(path, stored.pop(ROPE_DIVISORS, None))
    shapes = {tensor: place.shape for tensor, place in stored.items()}
    config = read_config(path, header.metadata, shapes, divisors)
    expected = tensor_shapes(config)
    check_tensors(str(path), shapes, expected)
    key, kept = fingerprint([(file, header.size)]), {tensor: stored[tensor] for tensor in expected}
    return GgufCheckpoint(name, config, path, key, kept, header.metadata)


def _rope_divisors(path: Path, stored: StoredTensor | None) -> tuple[float, ...]:
    if stored is None:
        return ()
    if stored.kind != "F32":
        raise CorruptModelError(f"{path}: {ROPE_DIVISORS} is not stored as F32.")
    return tuple(stored.numbers().reshape(-1).tolist())
