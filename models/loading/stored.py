"""A tensor as a model file stores it, and its numbers.

Owner: the checkpoint that it belongs to. Knows how numbers are stored, not in which format of file. Importing this
module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from models.loading.layout import Shape

U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]

FLOATS = {"F32": 4, "F16": 2, "BF16": 2}  # the kinds that are not quantised, and their bytes per number


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """Each row is a run of plain numbers, or of fixed-size blocks of quantised ones. A vector is one row.

    NOTE: `data` is a private memory map of the file unless its rows had to be reordered: read it, do not write to it.
    """

    kind: str  # "F32", "BF16", "Q4_1", ...
    shape: Shape  # a matrix's is rows, numbers per row
    data: U8  # [rows, bytes per row]

    def numbers(self) -> F32:
        """In its shape and exactly, quantised ones too. Of F32 it is `data` itself."""
        match self.kind:
            case "F32":
                numbers = self.data.view(np.float32)
            case "F16":
                numbers = self.data.view(np.float16).astype(np.float32)
            case "BF16":  # the upper half of a float32
                numbers = (self.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            case _:
                numbers = dequantise(self.kind, self.data)
        return numbers.reshape(self.shape)


def dequantise(kind: str, data: U8) -> F32:
    """Blocks of a quantised kind, [rows, bytes per row] -> a new array [rows, numbers per row].

    The arithmetic is the `gguf` package's, the reference for these formats: 150 to 500 million numbers a second.
    """
    from gguf import GGMLQuantizationType, dequantize

    return cast("F32", dequantize(data, GGMLQuantizationType[kind]))
