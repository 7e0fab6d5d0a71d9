"""Each kind of block against a decoder of one number at a time, written from ggml's block structures."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest

from models.loading.gguf_header import KINDS
from models.loading.stored import dequantise

Block = bytes


def half(block: Block, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], np.float16)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def nibble(packed: Block, i: int) -> int:
    """Number i of 32: the low halves hold the first sixteen, the high halves the rest."""
    return packed[i] & 15 if i < 16 else packed[i - 16] >> 4


def fifth_bit(packed: Block, i: int) -> int:
    return (int.from_bytes(packed, "little") >> i & 1) << 4


def scale_and_minimum(block: Block, group: int) -> tuple[int, int]:
    six = block[4:16]
    if group < 4:
        return six[group] & 63, six[group + 4] & 63
    scale = (six[group + 4] & 15) | (six[group - 4] >> 6 << 4)
    minimum = (six[group + 4] >> 4) | (six[group] >> 6 << 4)
    return scale, minimum


def q4_0(b: Block, i: int) -> float:
    return half(b, 0) * (nibble(b[2:18], i) - 8)


def q4_1(b: Block, i: int) -> float:
    return half(b, 0) * nibble(b[4:20], i) + half(b, 2)


def q5_0(b: Block, i: int) -> float:
    return half(b, 0) * ((nibble(b[6:22], i) | fifth_bit(b[2:6], i)) - 16)


def q5_1(b: Block, i: int) -> float:
    return half(b, 0) * (nibble(b[8:24], i) | fifth_bit(b[4:8], i)) + half(b, 2)


def q8_0(b: Block, i: int) -> float:
    return half(b, 0) * signed(b[2 + i])


def q4_k(b: Block, i: int) -> float:
    group, j = divmod(i, 32)
    scale, minimum = scale_and_minimum(b, group)
    byte = b[16 + group // 2 * 32 + j]
    quant = byte >> 4 if group % 2 else byte & 15
    return half(b, 0) * scale * quant - half(b, 2) * minimum


def q5_k(b: Block, i: int) -> float:
    group, j = divmod(i, 32)
    scale, minimum = scale_and_minimum(b, group)
    byte = b[48 + group // 2 * 32 + j]
    quant = (byte >> 4 if group % 2 else byte & 15) | (b[16 + j] >> group & 1) << 4
    return half(b, 0) * scale * quant - half(b, 2) * minimum


def q6_k(b: Block, i: int) -> float:
    side, place = divmod(i, 128)
    quarter, j = divmod(place, 32)
    low = b[side * 64 + j + (32 if quarter % 2 else 0)]
    low = low >> 4 if quarter >= 2 else low & 15
    quant = (low | (b[128 + side * 32 + j] >> 2 * quarter & 3) << 4) - 32
    return half(b, 208) * signed(b[192 + i // 16]) * quant


DECODERS = {
    "Q4_0": (q4_0, [0]),
    "Q4_1": (q4_1, [0, 2]),
    "Q5_0": (q5_0, [0]),
    "Q5_1": (q5_1, [0, 2]),
    "Q8_0": (q8_0, [0]),
    "Q4_K": (q4_k, [0, 2]),
    "Q5_K": (q5_k, [0, 2]),
    "Q6_K": (q6_k, [208]),
}


def test_every_quantised_kind_that_can_be_read_is_tested() -> None:
    assert {kind.name for kind in KINDS.values() if kind.block > 1} == set(DECODERS)


@pytest.mark.parametrize("number", KINDS)
def test_block_sizes_are_those_of_the_gguf_package(number: int) -> None:
    kind = KINDS[number]
    reference = gguf.GGMLQuantizationType(number)
    assert kind.name == reference.name
    assert (kind.block, kind.block_bytes) == gguf.GGML_QUANT_SIZES[reference]


@pytest.mark.parametrize(("name", "decoder", "halves"), [(name, *rest) for name, rest in DECODERS.items()])
def test_random_blocks_decode_to_what_the_format_says(
    name: str, decoder: Callable[[Block, int], float], halves: list[int]
) -> None:
    kind = next(kind for kind in KINDS.values() if kind.name == name)
    generator = np.random.default_rng(1)
    blocks = generator.integers(0, 256, (6, kind.block_bytes), dtype=np.uint8)
    for at in halves:  # random bytes would make some of these infinite
        blocks[:, at : at + 2] = generator.normal(0, 0.1, (6, 1)).astype(np.float16).view(np.uint8)
    expected = [[decoder(block.tobytes(), i) for i in range(kind.block)] for block in blocks]
    actual = dequantise(name, blocks.reshape(3, -1))
    assert actual.shape == (3, 2 * kind.block)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual.reshape(6, -1), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "steps"), [("Q4_0", 8), ("Q4_1", 15), ("Q5_0", 16), ("Q5_1", 31), ("Q8_0", 127)])
def test_quantised_numbers_come_back_within_a_step(name: str, steps: int) -> None:
    values = np.random.default_rng(2).uniform(-1, 1, (4, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    assert np.abs(dequantise(name, blocks) - values).max() <= 2 / steps
