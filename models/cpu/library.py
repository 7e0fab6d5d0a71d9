"""The compiled kernels: built once for this machine, loaded through ctypes.

ctypes releases the interpreter lock during a call, so the event loop goes on while a step computes. The structures
mirror those of decoder.cpp field by field.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_float, c_int32, c_size_t, c_void_p
from functools import cache
from pathlib import Path

from models.base import Batch
from models.errors import KernelError
from models.loading.cache import build_once, cache_path

F32, BF16, W8, W4 = 0, 1, 2, 3  # weight formats of linear.h
KINDS = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}

# -ffp-contract=off: only explicit fused multiply-adds, so that every instance of a kernel rounds alike (see simd.h).
FLAGS = ["-O2", "-std=gnu++17", "-ffp-contract=off", "-fPIC", "-pthread", "-w", "-march=native"]


class Matrix(Structure):
    _fields_ = (
        ("format", c_int32),
        ("outs", c_int32),
        ("ins", c_int32),
        ("reserved", c_int32),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


class Layer(Structure):
    _fields_ = (
        ("qkv", Matrix * 3),
        ("output", Matrix),
        ("gate_up", Matrix * 2),
        ("down", Matrix),
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int32),
        ("group", c_int32),
    )


class Model(Structure):
    _fields_ = (
        ("hidden", c_int32),
        ("intermediate", c_int32),
        ("layers", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("vocab", c_int32),
        ("page_size", c_int32),
        ("kv_format", c_int32),
        ("eps", c_float),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("final_norm", c_void_p),
        ("embedding", Matrix),
        ("head", Matrix),
        ("layer", POINTER(Layer)),
    )


class Step(Structure):
    _fields_ = (
        ("rows", c_int32),
        ("sequences", c_int32),
        ("logits", c_int32),
        ("table_stride", c_int32),
        ("groups", c_int32),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("query_starts", c_void_p),
        ("lengths", c_void_p),
        ("tables", POINTER(c_void_p)),
        ("copies", POINTER(c_void_p)),
        ("copy_counts", c_void_p),
        ("logit_rows", c_void_p),
        ("sampling", c_void_p),
        ("output", c_void_p),
        ("logits_out", c_void_p),
    )


SIGNATURES: dict[str, tuple[Sequence[object], object]] = {
    "octavo_engine": ([c_int32], c_void_p),
    "octavo_engine_free": ([c_void_p], None),
    "octavo_tiles": ([c_int32], None),
    "octavo_has_tiles": ([], c_int32),
    "octavo_step": ([c_void_p, POINTER(Model), POINTER(Step)], None),
    "octavo_start": ([c_void_p, POINTER(Model), POINTER(Step), c_int32], None),
    "octavo_packed_bytes": ([c_int32, c_int32, c_int32], c_size_t),
    "octavo_pack": ([c_void_p, c_int32, c_void_p, c_size_t, c_int32, c_int32, c_int32, c_void_p], None),
    "octavo_linear": ([c_void_p, POINTER(Matrix), c_void_p, c_int32, c_void_p], None),
    "octavo_attend": ([c_void_p, POINTER(Model), POINTER(Layer), POINTER(Step), c_void_p, c_void_p], None),
}


def compiler() -> str | None:
    """The C++ compiler to use, or None: `CXX`, then g++, then clang++."""
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "clang++") if name and (found := shutil.which(name))), None
    )


def sources() -> list[Path]:
    folder = Path(__file__).parent
    return sorted([*folder.glob("*.h"), *folder.glob("*.cpp")])


def machine_key(command: str) -> str:
    """What decides the compiled bytes: sources, flags, compiler, and the processor's instruction set."""
    digest = hashlib.sha256()
    for source in sources():
        digest.update(source.read_bytes())
    digest.update(
        " ".join(FLAGS).encode()
        + command.encode()
        + str(Path(command).resolve()).encode()
        + platform.machine().encode()
    )
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        digest.update(next((line for line in lines if line.startswith(("flags", "Features"))), "").encode())
    except OSError:
        digest.update(platform.processor().encode())
    return digest.hexdigest()[:24]


def build(command: str, target: Path) -> None:
    """Compile every source at once, a process each, and link. Raises KernelError with the compiler's last words."""
    with tempfile.TemporaryDirectory() as folder:
        units = {source: Path(folder) / (source.stem + ".o") for source in sources() if source.suffix == ".cpp"}
        lines = [[command, *FLAGS, "-c", str(source), "-o", str(unit)] for source, unit in units.items()]
        running = [
            subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for line in lines
        ]
        finished = [(process.communicate()[1], process.returncode) for process in running]
        link = [command, "-shared", "-pthread", *map(str, units.values()), "-o", str(target)]
        if not any(code for _, code in finished):
            run = subprocess.run(link, capture_output=True, text=True, check=False)
            finished.append((run.stderr, run.returncode))
    if failed := [(words.strip()[-400:], code) for words, code in finished if code]:
        words, code = failed[0]
        raise KernelError(
            f"{command} could not build the CPU kernels: {words or f'it ended with {code} and said nothing'}"
        )


@cache
def load_library() -> ctypes.CDLL:
    """Compile if need be, load, and declare every function. Raises KernelError without a compiler."""
    command = compiler()
    if command is None:
        raise KernelError("no C++ compiler found (set CXX or install g++)")

    library = ctypes.CDLL(
        str(build_once(cache_path("kernels", machine_key(command), ".so"), lambda target: build(command, target)))
    )
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def make_step(batch: Batch) -> tuple[Step, object]:
    """A batch as the C structure, and what must be kept alive while it is used. Sampling is left out."""
    groups = len(batch.page_tables)
    tables = (c_void_p * groups)(*(t.ctypes.data for t in batch.page_tables))
    copies = (c_void_p * groups)(*(c.ctypes.data for c in batch.copies))
    counts = (c_int32 * groups)(*(len(c) for c in batch.copies))
    step = Step(
        rows=len(batch.token_ids),
        sequences=len(batch.lengths),
        logits=len(batch.logit_rows),
        table_stride=batch.page_tables[0].shape[1],
        groups=groups,
        tokens=batch.token_ids.ctypes.data,
        positions=batch.positions.ctypes.data,
        query_starts=batch.query_starts.ctypes.data,
        lengths=batch.lengths.ctypes.data,
        tables=tables,
        copies=copies,
        copy_counts=ctypes.addressof(counts),
        logit_rows=batch.logit_rows.ctypes.data,
    )
    return step, (batch, tables, copies, counts)
