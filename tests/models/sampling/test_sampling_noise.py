"""Keyed noise: the published Philox vectors, the same numbers from numpy, torch and C++, and a Gumbel distribution."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from support import noise as reference

from models import noise

# counter, key and result from the known-answer file of the authors' own library
PHILOX_VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEEDS = np.array([0, 1, -1, 42, 2**63 - 1, -(2**63), 0x0123456789ABCDEF], np.int64)
POSITIONS = np.array([0, 1, 2, 4095, 2**31 - 1, 7, 100_000], np.int32)


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_VECTORS)
def test_philox_gives_the_published_vectors(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3, k0, k1 = (np.array([word], np.uint64) for word in words(counter) + words(key))
    result = reference.philox((c0, c1, c2, c3), (k0, k1))
    assert [int(word[0]) for word in result] == words(expected)


@pytest.mark.parametrize(("counter", "key", "expected"), PHILOX_VECTORS)
def test_native_philox_gives_the_published_vectors(library: ctypes.CDLL, counter: str, key: str, expected: str) -> None:
    c = (ctypes.c_uint32 * 4)(*words(counter))
    library.octavo_philox(c, (ctypes.c_uint32 * 2)(*words(key)))
    assert list(c) == words(expected)


def test_a_word_is_the_lane_of_the_counter_and_key_that_the_formula_names() -> None:
    seed, position, index = -5, 77, 1003
    u64 = [np.array([x], np.uint64) for x in (index // 4, position, 0, seed % 2**32, (seed >> 32) % 2**32)]
    expected = reference.philox((u64[0], u64[1], u64[2], u64[2]), (u64[3], u64[4]))[index % 4]
    bits = reference.noise_bits(np.array([seed]), np.array([position], np.int32), 1004)
    assert bits[0, index] == expected[0]


@pytest.mark.parametrize("vocab_size", [1, 5, 32, 1003])
def test_torch_gives_the_same_noise(vocab_size: int) -> None:
    seeds, positions = torch.from_numpy(SEEDS), torch.from_numpy(POSITIONS)
    bits = noise.noise_bits(seeds, positions, vocab_size)
    assert (bits.numpy() == reference.noise_bits(SEEDS, POSITIONS, vocab_size)).all()
    gumbel = noise.gumbel_noise(seeds, positions, vocab_size)
    assert gumbel.dtype == torch.float32
    np.testing.assert_allclose(gumbel, reference.gumbel_noise(SEEDS, POSITIONS, vocab_size), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 5, 32, 1003])
def test_native_code_gives_the_same_noise(library: ctypes.CDLL, vocab_size: int) -> None:
    expected_bits = reference.noise_bits(SEEDS, POSITIONS, vocab_size)
    expected = reference.gumbel_noise(SEEDS, POSITIONS, vocab_size)
    for row, (seed, position) in enumerate(zip(SEEDS.tolist(), POSITIONS.tolist(), strict=True)):
        bits = np.zeros(vocab_size, np.uint32)
        uniform, gumbel, bound = (np.zeros(vocab_size, np.float32) for _ in range(3))
        library.octavo_noise(
            ctypes.c_int64(seed),
            position,
            vocab_size,
            *(ctypes.c_void_p(array.ctypes.data) for array in (bits, uniform, gumbel, bound)),
        )
        assert (bits == expected_bits[row]).all()
        assert (uniform == reference.uniform(expected_bits[row])).all()
        np.testing.assert_allclose(gumbel, expected[row], rtol=1e-6, atol=1e-6)
        assert (bound > gumbel).all(), "the bound that lets a token be passed over must never be below its noise"
        assert (bound - gumbel)[uniform < 0.01].max(initial=0) < 0.08


def test_uniforms_lie_strictly_between_0_and_1() -> None:
    ends = reference.uniform(np.array([0, 1, 2**32 - 2, 2**32 - 1], np.uint32))
    assert ends.dtype == np.float32
    assert (ends > 0).all()
    assert (ends < 1).all()
    assert ends[0] < ends[1]


def test_noise_has_the_gumbel_distribution() -> None:
    drawn = np.sort(reference.gumbel_noise(np.arange(40, dtype=np.int64), np.zeros(40, np.int32), 5000).ravel())
    exact = np.exp(-np.exp(-drawn.astype(np.float64)))
    n = len(drawn)
    kolmogorov_smirnov = np.abs(exact - (np.arange(n) + 0.5) / n).max() * np.sqrt(n)
    assert kolmogorov_smirnov < 1.95, "exceeded once in a thousand by chance"


@pytest.mark.parametrize("step", [1, 2**32, 2**62])
def test_neighbouring_seeds_and_positions_are_independent(step: int) -> None:
    n = 50_000
    seeds = np.array([9, 9 + step, 9], np.int64)
    rows = reference.gumbel_noise(seeds, np.array([5, 5, 6], np.int32), n)
    correlation = np.corrcoef(rows) - np.eye(3)
    assert np.abs(correlation).max() < 4 / np.sqrt(n)
    assert abs(np.corrcoef(rows[0, 1:], rows[0, :-1])[0, 1]) < 4 / np.sqrt(n)


def test_a_row_of_noise_does_not_depend_on_the_other_rows() -> None:
    alone = noise.gumbel_noise(torch.tensor([3]), torch.tensor([8]), 1001)
    among = noise.gumbel_noise(torch.tensor([1, 2, 3, 4]), torch.tensor([5, 5, 8, 8]), 1001)
    assert torch.equal(alone[0], among[2])


def test_native_exp_is_within_two_units_in_the_last_place(library: ctypes.CDLL) -> None:
    x = np.concatenate([np.linspace(-87.3, 0, 20_001), -np.logspace(-30, 1, 2000)]).astype(np.float32)
    out = np.empty_like(x)
    library.octavo_exp(ctypes.c_void_p(x.ctypes.data), len(x), ctypes.c_void_p(out.ctypes.data))
    exact = np.exp(x.astype(np.float64))
    error = np.abs(out - exact) / np.spacing(exact.astype(np.float32))
    assert error.max() < 1.5
    far = np.array([-88, -1000, -3e38, -np.inf], np.float32)
    library.octavo_exp(ctypes.c_void_p(far.ctypes.data), len(far), ctypes.c_void_p(out.ctypes.data))
    assert (out[: len(far)] == 0).all()
