"""`SamplingBatch` and `StepOutput` as the C structures that `sampler.h` reads and writes.

The structures hold bare pointers: whoever makes one keeps the arrays alive and unmoved for as long as it is in use.
Knows nothing of how the library was built.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from models.base import StepOutput
from models.sampling import SamplingBatch

POINTERS = (
    ("temperature", np.float32),
    ("top_p", np.float32),
    ("min_p", np.float32),
    ("top_k", np.int32),
    ("position", np.int32),
    ("target", np.int32),
    ("row_logprobs", np.int32),
    ("seed", np.int64),
    ("presence", np.float32),
    ("frequency", np.float32),
    ("repetition", np.float32),
    ("counts", np.int32),
    ("count_row", np.int32),
    ("bias_row", np.int32),
    ("bias_token", np.int32),
    ("bias_value", np.float32),
    ("mask", np.uint32),
    ("mask_row", np.int32),
)
# The arrays with a row of their own choosing, by how many tokens share a column.
WIDE = {"counts": 1, "mask": 32}


class SamplingView(ctypes.Structure):
    """`SamplingView` of sampler.h."""

    _fields_ = [
        ("rows", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("num_logprobs", ctypes.c_int32),
        ("biases", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name, _ in POINTERS),
    ]


class SampleOutput(ctypes.Structure):
    """`SampleOutput` of sampler.h."""

    _fields_ = [
        ("tokens", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("top_ids", ctypes.c_void_p),
        ("top_logprobs", ctypes.c_void_p),
    ]


def sampling_view(batch: SamplingBatch, vocab_size: int) -> SamplingView:
    """The view of a batch. The batch must outlive it.

    Raises ValueError for an array of another type, shape or layout than the sampler reads.
    """
    rows = len(batch.target)
    view = SamplingView(rows, vocab_size, batch.num_logprobs, 0 if batch.bias_row is None else len(batch.bias_row))
    for name, dtype in POINTERS:
        array = getattr(batch, name)
        if array is None:
            continue
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise ValueError(f"{name} must be a C-contiguous array of {np.dtype(dtype)}")
        if name in WIDE:
            columns = -(-vocab_size // WIDE[name])
            if array.shape[1] != columns:
                raise ValueError(f"{name} has {array.shape[1]} columns and needs {columns} for {vocab_size} tokens")
        elif len(array) != (view.biases if name.startswith("bias") else rows):
            raise ValueError(f"{name} has {len(array)} entries for {rows} rows and {view.biases} biases")
        setattr(view, name, array.ctypes.data)
    return view


def empty_output(rows: int, num_logprobs: int) -> tuple[StepOutput, SampleOutput]:
    """Arrays for the results of a step, and the structure that points at them. The arrays must outlive it."""
    tokens = np.empty(rows, np.int32)
    if num_logprobs < 0:
        return StepOutput(tokens, None, None, None), SampleOutput(tokens=_address(tokens))
    logprobs = np.empty(rows, np.float32)
    top_ids = np.empty((rows, num_logprobs), np.int32)
    top_logprobs = np.empty((rows, num_logprobs), np.float32)
    output = StepOutput(tokens, logprobs, top_ids, top_logprobs)
    return output, SampleOutput(*(_address(array) for array in (tokens, logprobs, top_ids, top_logprobs)))


def _address(array: npt.NDArray[Any]) -> int:
    return array.ctypes.data
