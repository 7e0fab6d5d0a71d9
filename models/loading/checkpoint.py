"""A model's weights and numbers on disk, behind one interface whatever the file format.

Owner: whoever loads the model, one thread at a time. Opening reads headers only; tensors are mapped into memory and
read when asked for. Importing this module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from models.config import ModelConfig
from models.loading.source import Source

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix as a GGUF file stores it: each row is a run of fixed-size blocks of quantised numbers."""

    kind: str  # "Q4_1", "Q8_0", ...
    data: npt.NDArray[np.uint8]  # [rows, bytes per row], read-only; a memory map unless its rows had to be reordered
    shape: tuple[int, int]  # rows, numbers per row


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint(ABC):
    """An opened model.

    Tensors have the names of a Hugging Face Llama checkpoint ("model.layers.0.self_attn.q_proj.weight"; no
    "lm_head.weight" when the embeddings are tied) and rows in its order, so that rotary halves are contiguous.
    Exactly the tensors of `layout.tensor_shapes(config)` are there, with those shapes; another name raises KeyError.
    """

    name: str  # readable
    config: ModelConfig
    path: Path
    fingerprint: str  # of the content, equal for equal files wherever they lie: see `mapped.fingerprint`

    @abstractmethod
    def names(self) -> list[str]:
        """Every tensor, in the order of a forward pass."""

    @abstractmethod
    def stored_kind(self, name: str) -> str:
        """How the file stores a tensor: "F32", "F16", "BF16", "Q4_1", ..."""

    def quantized(self, name: str) -> QuantizedTensor | None:
        """A tensor's blocks, or None when it is stored as plain floats."""
        self.stored_kind(name)
        return None

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as numbers: float32 when stored quantised, else the stored dtype.

        NOTE: a plain tensor is a private memory map of the file: read it, do not write to it.
        """


def open_checkpoint(source: Source) -> Checkpoint:
    """Read a model's headers and check that it is complete and can be run. Raises ModelError."""
    if source.kind == "gguf":
        from models.loading.gguf_file import open_gguf

        return open_gguf(source.path, source.name)
    from models.loading.safetensors_dir import open_folder

    return open_folder(source.path, source.name)
