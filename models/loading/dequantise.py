"""Quantised blocks to numbers.

Owner: any thread. The arithmetic is the `gguf` package's, which is the reference for these formats; it converts
150 to 500 million numbers a second on one core.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt


def dequantise(kind: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Blocks of a quantised kind, uint8 [rows, bytes per row] -> a new array [rows, numbers per row]."""
    from gguf import GGMLQuantizationType, dequantize

    return cast("npt.NDArray[np.float32]", dequantize(data, GGMLQuantizationType[kind]))
