"""A Hugging Face folder of safetensors files as a Checkpoint.

Owner: whoever loads the model, one thread at a time. Knows the files of a folder, in one piece or in shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from safetensors import SafetensorError, safe_open

from models.config import ModelConfig
from models.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from models.loading.checkpoint import Checkpoint
from models.loading.folder_config import read_folder_config, read_json
from models.loading.layout import LM_HEAD, check_tensors, tensor_shapes
from models.loading.mapped import MappedFile, fingerprint

if TYPE_CHECKING:
    import torch

KINDS = ("F32", "F16", "BF16")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FINGERPRINTED = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    shard: Path
    kind: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FolderCheckpoint(Checkpoint):
    _tensors: Mapping[str, StoredTensor]
    _open: dict[Path, Any] = field(default_factory=dict)

    def names(self) -> list[str]:
        return list(self._tensors)

    def stored_kind(self, name: str) -> str:
        return self._tensors[name].kind

    def tensor(self, name: str) -> torch.Tensor:
        shard = self._tensors[name].shard
        if shard not in self._open:
            self._open[shard] = safe_open(shard, framework="pt")
        return cast("torch.Tensor", self._open[shard].get_tensor(name))


def open_folder(folder: Path, name: str) -> FolderCheckpoint:
    """Raises ModelError."""
    config = read_folder_config(folder)
    stored: dict[str, StoredTensor] = {}
    shards = _shards(folder)
    for shard in shards:
        stored.update(_read_shard(shard))
    stored = {tensor: place for tensor, place in stored.items() if not _derived(tensor, config)}
    expected = tensor_shapes(config)
    check_tensors(str(folder), {tensor: place.shape for tensor, place in stored.items()}, expected)
    for tensor, place in stored.items():
        if place.kind not in KINDS:
            raise UnsupportedModelError(
                f"{folder}: tensor {tensor} is of type {place.kind}; {', '.join(KINDS)} can be read."
            )
    files = [MappedFile(shard) for shard in shards]
    headers = [(file, 8 + int.from_bytes(file.read(0, 8), "little")) for file in files]
    texts = [path.read_bytes() for path in (folder / text for text in FINGERPRINTED) if path.is_file()]
    return FolderCheckpoint(name, config, folder, fingerprint(headers, texts), {t: stored[t] for t in expected})


def _derived(tensor: str, config: ModelConfig) -> bool:
    """Whether a tensor says nothing new: rotary tables of old checkpoints, and the output of a tied embedding."""
    return tensor.endswith(".rotary_emb.inv_freq") or (tensor == LM_HEAD and config.tie_embeddings)


def _shards(folder: Path) -> list[Path]:
    """The files that hold the weights, in a fixed order."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CorruptModelError(f"{folder / INDEX} names no tensors.")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if Path(name).name != name:
                raise CorruptModelError(f"{folder / INDEX} names a file outside its folder: {name}.")
            if not (folder / name).is_file():
                raise CorruptModelError(f"{folder} is incomplete: {name} is missing; download it again.")
        return [folder / name for name in names]
    if any(path for pattern in PICKLES for path in folder.glob(pattern)):
        raise UnsupportedModelError(
            f"{folder} holds its weights as Python pickles only, which can run code; convert them to safetensors."
        )
    raise ModelNotFoundError(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}.")


def _read_shard(shard: Path) -> dict[str, StoredTensor]:
    try:
        # Asked for as numpy, which reads the header only and does not import torch.
        with safe_open(shard, framework="np") as file:
            slices = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118
            return {t: StoredTensor(shard, s.get_dtype(), tuple(s.get_shape())) for t, s in slices.items()}
    except SafetensorError as error:
        raise CorruptModelError(f"{shard} is truncated or damaged ({error}); download it again.") from None
    except OSError as error:
        raise ModelNotFoundError(f"{shard} cannot be read: {error}.") from None
