"""The native matrix product: every format and every stored kind against plain arithmetic, and bits that do not move."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch

from models.cpu import library as lib
from models.cpu.memory import Arena

F32Array = npt.NDArray[np.float32]
OUTS, INS = 88, 512  # the last block of outputs is half full
GGUF_KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.fixture(params=["tiles", "vectors"], autouse=True)
def tiles(request: pytest.FixtureRequest) -> Iterator[bool]:
    """With tile registers, where the processor has them, and without."""
    library = lib.load_library()
    library.octavo_tiles(request.param == "tiles")
    yield request.param == "tiles" and bool(library.octavo_has_tiles())
    library.octavo_tiles(True)


class Native:
    """One packed matrix and the engine that multiplies by it."""

    def __init__(
        self,
        kind: str,
        data: npt.NDArray[np.uint8],
        form: int,
        *,
        bias: F32Array | None = None,
        threads: int = 2,
        ins: int = INS,
    ) -> None:
        self.library = lib.load_library()
        self.engine = self.library.octavo_engine(threads)
        self.packed = Arena(self.library.octavo_packed_bytes(form, OUTS, ins)).memory
        self.bias = bias
        self.library.octavo_pack(
            self.engine, lib.KINDS[kind], data.ctypes.data, data.strides[0], OUTS, ins, form, self.packed.ctypes.data
        )
        self.matrix = lib.Matrix(
            form, OUTS, ins, 0, self.packed.ctypes.data, bias.ctypes.data if bias is not None else None
        )

    def __call__(self, x: F32Array) -> F32Array:
        out = np.zeros((len(x), OUTS), np.float32)
        x = np.ascontiguousarray(x)
        self.library.octavo_linear(self.engine, self.matrix, x.ctypes.data, len(x), ctypes.c_void_p(out.ctypes.data))
        return out


def floats(seed: int, rows: int, ins: int = INS) -> F32Array:
    return np.random.default_rng(seed).standard_normal((rows, ins)).astype(np.float32)


def relative_error(found: F32Array, expected: F32Array) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 9, 31])
@pytest.mark.parametrize(("form", "tolerance"), [(lib.F32, 1e-6), (lib.BF16, 4e-3), (lib.W8, 1.3e-2), (lib.W4, 0.11)])
def test_every_format_multiplies_and_adds_its_bias(form: int, tolerance: float, rows: int) -> None:
    weight, x = floats(0, OUTS), floats(1, rows)
    bias = np.arange(OUTS, dtype=np.float32)
    native = Native("F32", weight.view(np.uint8), form, bias=bias)
    assert relative_error(native(x) - bias, x @ weight.T) < tolerance


@pytest.mark.parametrize("groups", [1, 3, 17, 32, 33])
@pytest.mark.parametrize("form", [lib.W8, lib.W4])
def test_any_number_of_groups_is_multiplied(form: int, groups: int) -> None:
    ins = 32 * groups
    weight, x = floats(0, OUTS, ins), floats(1, 9, ins) * np.logspace(-4, 0, ins, dtype=np.float32)
    native = Native("F32", weight.view(np.uint8), form, ins=ins)
    assert relative_error(native(x), x @ weight.T) < (1.5e-2 if form == lib.W8 else 0.13)
    assert not native(np.zeros((3, ins), np.float32)).any()


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_codes_of_a_gguf_file_are_kept(kind: str, tiles: bool) -> None:
    """Vector units round only activations, to int8 with scales a power of two apart; tiles round both to bfloat16."""
    number = gguf.GGMLQuantizationType[kind]
    data = gguf.quants.quantize(floats(2, OUTS), number)
    weight, x = gguf.quants.dequantize(data, number), floats(3, 9)
    native = Native(kind, data, lib.W4 if kind.startswith("Q4") else lib.W8)
    assert relative_error(native(x), x @ weight.T) < 9e-3
    exact = np.zeros((INS, INS), np.float32)  # one-hot rows are exact in int8: they read the weights back
    np.fill_diagonal(exact, 127.0)
    assert np.abs(native(exact) / 127.0 - weight.T).max() < (2**-8 if tiles else 3e-5) * np.abs(weight).max()


@pytest.mark.parametrize(
    ("kind", "bytes_per_block", "scale_at"), [("Q4_K", 144, (0, 2)), ("Q5_K", 176, (0, 2)), ("Q6_K", 210, (208,))]
)
def test_superblocks_are_read_as_ggml_reads_them(kind: str, bytes_per_block: int, scale_at: tuple[int, ...]) -> None:
    data = np.random.default_rng(4).integers(0, 256, (OUTS, INS // 256 * bytes_per_block), np.uint8)
    blocks = data.reshape(OUTS, -1, bytes_per_block)
    for at in scale_at:  # random bits would make infinite scales
        blocks[:, :, at : at + 2] = np.float16(0.01).tobytes()[0], np.float16(0.01).tobytes()[1]
    weight, x = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]), floats(5, 4)
    native = Native(kind, data, lib.W4 if kind == "Q4_K" else lib.W8)
    assert relative_error(native(x), x @ weight.T) < 1.2e-2


@pytest.mark.parametrize("form", [lib.F32, lib.BF16, lib.W8, lib.W4])
def test_a_rows_bits_do_not_depend_on_the_other_rows_or_on_threads(form: int) -> None:
    weight, x = floats(6, OUTS), floats(7, 37)
    one, three = (
        Native("F32", weight.view(np.uint8), form, threads=1),
        Native("F32", weight.view(np.uint8), form, threads=3),
    )
    alone = np.concatenate([one(x[i : i + 1]) for i in range(len(x))])
    for count in (2, 3, 4, 5, 6, 7, 8, 16, 37):
        for native in (one, three):
            assert np.array_equal(native(x[:count]), alone[:count]), count


@pytest.mark.parametrize("form", [lib.W8, lib.W4])
def test_activations_of_any_size_survive_quantisation(form: int) -> None:
    weight, x = floats(8, OUTS), floats(9, 3)
    native = Native("F32", weight.view(np.uint8), form)
    x[1] *= 1e-20
    x[2] *= 1e12
    assert relative_error(native(x)[1], x[1] @ weight.T) < 0.12
    assert relative_error(native(x)[2], x[2] @ weight.T) < 0.12
    assert not native(np.zeros_like(x)).any()


def test_other_libraries_may_use_tile_registers_on_the_same_thread() -> None:
    weight, x = floats(10, OUTS), floats(11, 40)
    native = Native("F32", weight.view(np.uint8), lib.BF16)
    before = native(x)
    narrow = torch.from_numpy(x).bfloat16()
    integers = torch.ones((256, 256), dtype=torch.int8)
    for _ in range(3):  # torch shapes the tiles for its own products, and releases them
        torch._int_mm(integers, integers)
        assert (narrow @ narrow.T).isfinite().all()
        assert np.array_equal(native(x), before)
