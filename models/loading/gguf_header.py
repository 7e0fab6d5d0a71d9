"""The header of a GGUF file: metadata and tensor table, read in one pass without touching tensor data.

Owner: whoever opens the file. Knows the container format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md),
not what the metadata means. The `gguf` package's own reader keeps every token of the vocabulary as numpy arrays and
takes two seconds for 49,000 of them; this takes 30 ms.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.errors import CorruptModelError, UnsupportedModelError
from models.loading.mapped import MappedFile
from models.loading.stored import StoredTensor

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS = {
    value_type: struct.Struct(f"<{code}")
    for value_type, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """How a tensor's numbers are stored: blocks of `block` numbers in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int


# by the format's number for them
KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18),
    3: Kind("Q4_1", 32, 20),
    6: Kind("Q5_0", 32, 22),
    7: Kind("Q5_1", 32, 24),
    8: Kind("Q8_0", 32, 34),
    12: Kind("Q4_K", 256, 144),
    13: Kind("Q5_K", 256, 176),
    14: Kind("Q6_K", 256, 210),
    30: Kind("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: dict[str, Any]  # scalars, strings, lists of strings, numpy arrays of numbers
    tensors: dict[str, StoredTensor]
    size: int  # bytes before the tensor data


def read_header(file: MappedFile) -> GgufHeader:
    """Raises CorruptModelError for a damaged file, UnsupportedModelError for a version or tensor kind not handled."""
    try:
        return _Reader(file).header()
    except (struct.error, ValueError, OverflowError, MemoryError):
        raise CorruptModelError(f"{file.path} is damaged: its header cannot be read to the end.") from None


class _Reader:
    """A position in the header, moving forward. Reading past the end raises struct.error or ValueError."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.position = 0

    def header(self) -> GgufHeader:
        if self.file.read(0, 4) != b"GGUF":
            raise CorruptModelError(f"{self.file.path} is not a GGUF file: it does not begin with GGUF.")
        self.position = 4
        version = self.scalar(4)
        if version not in VERSIONS:
            raise UnsupportedModelError(f"{self.file.path} is GGUF version {version}; versions 2 and 3 can be read.")
        num_tensors, num_values = self.scalar(10), self.scalar(10)
        metadata = {}
        for _ in range(num_values):
            key = self.string()
            metadata[key] = self.value(self.scalar(4))
        table = [self.table_row() for _ in range(num_tensors)]
        size = self.position
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError("alignment")
        data = size + -size % alignment
        tensors = {name: self.stored(name, row, data) for name, *row in table}
        if len(tensors) != len(table):
            raise ValueError("two tensors of one name")
        return GgufHeader(metadata, tensors, size)

    def scalar(self, value_type: int) -> Any:
        layout = SCALARS[value_type]
        (value,) = layout.unpack_from(self.file.buffer, self.position)
        self.position += layout.size
        return value

    def string(self) -> str:
        length = self.scalar(10)
        end = self.position + length
        if end > self.file.size:
            raise ValueError("string past the end")
        text = self.file.buffer[self.position : end].decode()
        self.position = end
        return text

    def value(self, value_type: int) -> Any:
        if value_type == STRING:
            return self.string()
        if value_type in SCALARS:
            return self.scalar(value_type)
        if value_type != ARRAY:
            raise ValueError("unknown type of value")
        item_type, count = self.scalar(4), self.scalar(10)
        if item_type == STRING:
            return [self.string() for _ in range(count)]
        if item_type not in SCALARS:
            raise ValueError("array of arrays")
        dtype = np.dtype(SCALARS[item_type].format)
        array = np.frombuffer(self.file.buffer, dtype=dtype, count=count, offset=self.position).copy()
        self.position += array.nbytes
        return array

    def table_row(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self.string(), self.scalar(4)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError("number of dimensions")
        shape = tuple(self.scalar(10) for _ in range(num_dimensions))[::-1]
        return name, shape, self.scalar(4), self.scalar(10)

    def stored(self, name: str, row: list[Any], data: int) -> StoredTensor:
        shape, kind_number, offset = row
        if kind_number not in KINDS:
            supported = ", ".join(kind.name for kind in KINDS.values())
            raise UnsupportedModelError(
                f"{self.file.path}: tensor {name} is stored as {_kind_name(kind_number)}; supported are {supported}."
            )
        kind, start = KINDS[kind_number], data + offset
        rows, row_bytes = math.prod(shape[:-1]), shape[-1] // kind.block * kind.block_bytes
        if shape[-1] % kind.block:
            raise CorruptModelError(f"{self.file.path}: tensor {name} does not hold whole blocks of {kind.name}.")
        if start + rows * row_bytes > self.file.size:
            raise CorruptModelError(
                f"{self.file.path} is truncated: tensor {name} lies past its end; download the file again."
            )
        return StoredTensor(kind.name, shape, self.file.rows(start, rows, row_bytes))


def _kind_name(number: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(number).name)
    except ValueError:
        return f"kind {number}"
