"""A Hugging Face folder of safetensors files as a Checkpoint.

Owner: whoever loads the model, one thread at a time. Knows the files of a folder, in one piece or in shards.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from models.config import ModelConfig
from models.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from models.loading.checkpoint import Checkpoint
from models.loading.folder_config import read_folder_config, read_json
from models.loading.layout import LM_HEAD, check_tensors, tensor_shapes
from models.loading.mapped import MappedFile, fingerprint
from models.loading.stored import FLOATS, StoredTensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FINGERPRINTED = ("config.json", "generation_config.json")


class Shard(NamedTuple):
    file: MappedFile
    header_bytes: int
    entries: dict[str, Any]  # of the header, by tensor: dtype, shape, data_offsets


def open_folder(folder: Path, name: str) -> Checkpoint:
    """Raises ModelError."""
    config = read_folder_config(folder)
    shards = [_read_shard(path) for path in _shards(folder)]
    found = {t: (shard, entry) for shard in shards for t, entry in shard.entries.items() if not _derived(t, config)}
    expected = tensor_shapes(config)
    check_tensors(str(folder), {tensor: tuple(entry["shape"]) for tensor, (_, entry) in found.items()}, expected)
    tensors = {}
    for tensor, shape in expected.items():
        shard, entry = found[tensor]
        if (kind := entry["dtype"]) not in FLOATS:
            raise UnsupportedModelError(
                f"{folder}: tensor {tensor} is of type {kind}; {', '.join(FLOATS)} can be read."
            )
        start = shard.header_bytes + entry["data_offsets"][0]
        rows = shard.file.rows(start, math.prod(shape[:-1]), shape[-1] * FLOATS[kind])
        tensors[tensor] = StoredTensor(kind, shape, rows)
    texts = [path.read_bytes() for path in (folder / text for text in FINGERPRINTED) if path.is_file()]
    key = fingerprint([(shard.file, shard.header_bytes) for shard in shards], texts)
    return Checkpoint(name, config, folder, key, tensors)


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


def _read_shard(path: Path) -> Shard:
    try:
        # It checks that every tensor lies within the file, and has the size of its shape, but does not say where.
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise CorruptModelError(f"{path} is truncated or damaged ({error}); download it again.") from None
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error}.") from None
    file = MappedFile(path)
    header_bytes = 8 + int.from_bytes(file.read(0, 8), "little")
    entries = json.loads(file.read(8, header_bytes - 8))
    entries.pop("__metadata__", None)
    return Shard(file, header_bytes, entries)
