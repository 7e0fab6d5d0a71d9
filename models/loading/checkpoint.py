"""A model's weights and numbers on disk, behind one interface whatever the file format.

Owner: whoever loads the model, one thread at a time. Opening reads headers only; tensors are mapped into memory and
read when asked for. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from models.config import ModelConfig
from models.loading.source import Source
from models.loading.stored import FLOATS, StoredTensor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An opened model.

    Tensors have the names of a Hugging Face Llama checkpoint ("model.layers.0.self_attn.q_proj.weight"; no
    "lm_head.weight" when the embeddings are tied) and rows in its order, so that rotary halves are contiguous.
    Exactly the tensors of `layout.tensor_shapes(config)` are there, with those shapes; another name raises KeyError.
    """

    name: str  # readable
    config: ModelConfig
    path: Path
    fingerprint: str  # of the content, equal for equal files wherever they lie: see `mapped.fingerprint`
    _tensors: Mapping[str, StoredTensor]  # in the order of a forward pass, the rows of each in that of the file

    def names(self) -> list[str]:
        """Every tensor, in the order of a forward pass."""
        return list(self._tensors)

    def stored_kind(self, name: str) -> str:
        """How the file stores a tensor: "F32", "F16", "BF16", "Q4_1", ..."""
        return self._tensors[name].kind

    def stored(self, name: str) -> StoredTensor:
        """A tensor's bytes, its rows in the order described above."""
        return self._tensors[name]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as numbers: float32 when stored quantised, else the stored dtype and memory."""
        import torch

        stored = self.stored(name)
        if stored.kind not in FLOATS:
            return torch.from_numpy(stored.numbers())
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[stored.kind]
        return torch.from_numpy(stored.data).view(dtype).reshape(stored.shape)


def open_checkpoint(source: Source) -> Checkpoint:
    """Read a model's headers and check that it is complete and can be run. Raises ModelError."""
    if source.kind == "gguf":
        from models.loading.gguf_file import open_gguf

        return open_gguf(source.path, source.name)
    from models.loading.safetensors_dir import open_folder

    return open_folder(source.path, source.name)
