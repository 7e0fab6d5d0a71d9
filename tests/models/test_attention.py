"""The native attention backend against the torch reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.cpu_attention import CpuAttention
from support.steps import Piece, step

from models.config import ModelConfig, RopeConfig
from models.cpu import library as lib
from models.cpu.pages import KVDtype
from models.torch_attention import TorchAttention


@pytest.fixture(params=["tiles", "vectors"], autouse=True)
def _tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """With tile registers, where the processor has them, and without."""
    lib.load_library().octavo_tiles(request.param == "tiles")
    yield
    lib.load_library().octavo_tiles(True)


def config(heads: int, kv_heads: int, dim: int, window: int | None) -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=2,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, max_position=4096, norm_eps=1e-5,
        rope=RopeConfig(1e4), tie_embeddings=True,
        windows=(window, None),
    )  # fmt: skip


def attend(
    backend: CpuAttention | TorchAttention,
    shape: ModelConfig,
    lengths: list[int],
    new: list[int],
    page_size: int,
    seed: int,
) -> torch.Tensor:
    """Fill the pages of several sequences a chunk at a time, then attend with the last `new` rows of each."""
    torch.manual_seed(seed)
    page_count = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(page_count)).tolist()
    backend.allocate(len(order), page_size)
    pages = [[order.pop() for _ in range(n)] for n in page_count]
    outputs = []
    for ranges in (
        [(0, n - k) for n, k in zip(lengths, new, strict=True)],
        [(n - k, n) for n, k in zip(lengths, new, strict=True)],
    ):
        live = [(r, p) for r, p in zip(ranges, pages, strict=True) if r[1] > r[0]]
        if not live:
            continue
        backend.begin(step([Piece(range(b - a), p, a) for (a, b), p in live]))
        rows = sum(b - a for (a, b), _ in live)
        for layer in range(2):
            q, k, v = (
                torch.randn(rows, h, shape.head_dim) for h in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
            )
            outputs.append(backend.attend(layer, q, k, v))
    return torch.cat(outputs[-2:])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 1, 80)])
@pytest.mark.parametrize("page_size", [16, 64])
def test_native_attention_equals_the_reference_in_float32(
    heads: int, kv_heads: int, dim: int, window: int | None, page_size: int
) -> None:
    shape = config(heads, kv_heads, dim, window)
    lengths, new = [1, 16, 17, 100, 700, 1100], [1, 16, 3, 100, 1, 30]
    native = attend(CpuAttention(shape, "float32", 2), shape, lengths, new, page_size, 3)
    reference = attend(TorchAttention(shape, torch.device("cpu"), torch.float32), shape, lengths, new, page_size, 3)
    assert (native - reference).abs().max() < 2e-5


def test_native_attention_in_bfloat16_is_within_its_rounding() -> None:
    shape = config(9, 3, 64, None)
    native = attend(CpuAttention(shape, "bfloat16", 2), shape, [300, 5, 900], [1, 5, 64], 16, 4)
    reference = attend(
        TorchAttention(shape, torch.device("cpu"), torch.bfloat16), shape, [300, 5, 900], [1, 5, 64], 16, 4
    )
    assert (native - reference).abs().max() < 2e-2


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 128), (2, 1, 80)])
@pytest.mark.parametrize("window", [None, 40])
def test_native_attention_in_int8_is_within_its_rounding(
    heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    shape = config(heads, kv_heads, dim, window)
    lengths, new = [1, 16, 17, 100, 700, 1100], [1, 16, 3, 100, 1, 30]
    native = attend(CpuAttention(shape, "int8", 2), shape, lengths, new, 16, 3)
    reference = attend(TorchAttention(shape, torch.device("cpu"), torch.float32), shape, lengths, new, 16, 3)
    error = native - reference
    assert error.abs().max() < 6e-2
    assert error.square().mean().sqrt() < 6e-3 * reference.square().mean().sqrt() ** 0.5


def test_a_large_number_in_every_key_does_not_coarsen_the_others_in_int8() -> None:
    """What the rotation of keys and queries is for: one dim fifty times as large as the others."""
    shape = config(4, 2, 64, None)
    torch.manual_seed(8)
    q, k, v = torch.randn(200, 4, 64), torch.randn(200, 2, 64), torch.randn(200, 2, 64)
    k[:, :, 7] += 50
    results = []
    for backend in (CpuAttention(shape, "int8", 1), TorchAttention(shape, torch.device("cpu"), torch.float32)):
        backend.allocate(20, 16)
        backend.begin(step([Piece(range(200), range(13))]))
        results.append(backend.attend(0, q, k, v))
    assert (results[0] - results[1]).square().mean().sqrt() < 0.02


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_pages_are_copied_before_a_step_writes(backend: str) -> None:
    shape = config(2, 1, 32, None)
    attention: CpuAttention | TorchAttention = (
        TorchAttention(shape, torch.device("cpu"), torch.float32)
        if backend == "torch"
        else CpuAttention(shape, "float32", 1)
    )
    attention.allocate(8, 16)
    torch.manual_seed(0)
    q, k, v = torch.randn(20, 2, 32), torch.randn(20, 1, 32), torch.randn(20, 1, 32)
    for layer in range(2):
        if layer == 0:
            attention.begin(step([Piece(range(19), [0, 1])]))
        attention.attend(layer, q[:19], k[:19], v[:19])
    attention.begin(step([Piece([0], [0, 5], 19)], copies=[(1, 5)]))
    forked = attention.attend(1, q[19:], k[19:], v[19:])
    attention.begin(step([Piece([0], [0, 1], 19)]))
    assert torch.equal(forked, attention.attend(1, q[19:], k[19:], v[19:]))
    attention.begin(step([Piece([0], [0, 1], 19)]))
    other = attention.attend(1, q[19:], k[19:] + 1, v[19:] + 1)
    attention.begin(step([Piece([0], [0, 5], 19)]))
    assert not torch.equal(forked, other)
    assert torch.equal(forked, attention.attend(1, q[19:], k[19:], v[19:]))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_row_does_not_depend_on_threads_or_on_how_many_rows_share_the_step(kv_dtype: KVDtype) -> None:
    shape = config(9, 3, 64, None)
    results = []
    for threads, lengths, new in ((1, [1300], [1]), (3, [1300], [1]), (2, [1300], [700])):
        results.append(last_row(shape, kv_dtype, threads, lengths, new))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def last_row(shape: ModelConfig, kv_dtype: KVDtype, threads: int, lengths: list[int], new: list[int]) -> torch.Tensor:
    backend = CpuAttention(shape, kv_dtype, threads)
    backend.allocate(100, 16)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(lengths[0], h, 64, generator=generator) for h in (9, 3, 3))
    first = lengths[0] - new[0]
    backend.begin(step([Piece(range(first), range(90))]))
    backend.attend(0, q[:first], k[:first], v[:first])
    backend.begin(step([Piece(range(new[0]), range(90), first)]))
    return backend.attend(0, q[first:], k[first:], v[first:])[-1]


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 128)])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_sequences_that_attend_to_a_prefix_together_get_the_bits_that_each_gets_alone(
    kv_dtype: KVDtype, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    """Of the first 512 slots all have the same pages, of the next all but one; some have fewer rows than others."""
    backend = CpuAttention(config(heads, kv_heads, dim, window), kv_dtype, 2)
    backend.allocate(200, 16)
    torch.manual_seed(11)
    new = [1, 4, 1, 2, 3, 1, 1, 2]
    lengths = [1090, 1094, 1153, 1089, 1100, 1090, 1026, 1040]
    pages = [[*range(64), *range(70 + 10 * s, 80 + 10 * s)] for s in range(len(new))]
    pages[3][40:64] = range(160, 184)  # from slot 640 on
    for s, table in enumerate(pages):
        first = lengths[s] - new[s]
        backend.begin(step([Piece(range(first), table)]))
        torch.manual_seed(s if s == 3 else 0)
        rows = [torch.randn(1200, h, dim)[:first] for h in (heads, kv_heads, kv_heads)]
        backend.attend(0, *rows)
    own = [[torch.randn(n, h, dim) for h in (heads, kv_heads, kv_heads)] for n in new]
    pieces = [Piece(range(n), table, length - n) for n, table, length in zip(new, pages, lengths, strict=True)]
    backend.begin(step(pieces))
    together = backend.attend(0, *(torch.cat(part) for part in zip(*own, strict=True)))
    for piece, rows, mine in zip(pieces, own, together.split(new), strict=True):
        backend.begin(step([piece]))
        assert torch.equal(backend.attend(0, *rows), mine)


@pytest.mark.parametrize(
    ("native", "kv_dtype"),
    [(True, "float32"), (True, "bfloat16"), (True, "int8"), (False, "float32"), (False, "bfloat16")],
)
def test_a_page_that_was_read_and_written_elsewhere_attends_to_the_same_bits(native: bool, kv_dtype: KVDtype) -> None:
    shape = config(4, 2, 64, None)
    backend: CpuAttention | TorchAttention = (
        CpuAttention(shape, kv_dtype, 1)
        if native
        else TorchAttention(shape, torch.device("cpu"), getattr(torch, kv_dtype))
    )
    backend.allocate(5, 16)
    torch.manual_seed(3)
    rows = [torch.randn(40, heads, 64) for heads in (4, 2, 2)]
    last = [torch.randn(1, heads, 64) for heads in (4, 2, 2)]

    def attend_after(pages: list[int]) -> list[torch.Tensor]:
        backend.begin(step([Piece([1], pages, 40)]))
        return [backend.attend(layer, *last) for layer in range(2)]

    backend.begin(step([Piece(range(40), [4, 1, 3])]))
    for layer in range(2):
        backend.attend(layer, *rows)
    expected = attend_after([4, 1, 3])
    kept = np.zeros((2, backend.page_bytes(16)), np.uint8)
    backend.read_page(4, kept[0])
    backend.read_page(1, kept[1])
    backend.write_page(4, np.zeros(backend.page_bytes(16), np.uint8))
    assert not all(torch.equal(a, b) for a, b in zip(attend_after([4, 1, 3]), expected, strict=True))
    backend.write_page(0, kept[0])
    backend.write_page(2, kept[1])
    assert all(torch.equal(a, b) for a, b in zip(attend_after([0, 2, 3]), expected, strict=True))
