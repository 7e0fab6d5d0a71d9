"""The noise of `models.noise` in numpy, word for word as its formula has it: what torch and C++ are compared with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from models.sampling import F32, I32, I64

U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF
LARGEST_UNIFORM = 1.0 - 2.0**-24


def philox(counter: tuple[U64, U64, U64, U64], key: tuple[U64, U64]) -> tuple[U64, U64, U64, U64]:
    """Philox4x32-10 of 32-bit words held in uint64 arrays that broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    mask, shift = np.uint64(MASK32), np.uint64(32)
    for _ in range(PHILOX_ROUNDS):
        first = c0 * np.uint64(PHILOX_MULTIPLIERS[0])
        second = c2 * np.uint64(PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = (second >> shift) ^ c1 ^ k0, second & mask, (first >> shift) ^ c3 ^ k1, first & mask
        k0 = (k0 + np.uint64(PHILOX_WEYL[0])) & mask
        k1 = (k1 + np.uint64(PHILOX_WEYL[1])) & mask
    return c0, c1, c2, c3


def noise_bits(seeds: I64, positions: I32, vocab_size: int, use: int = 0) -> U32:
    """The 32 random bits of every (row, vocabulary index), [L, vocab_size], for seeds [L] and positions [L]."""
    keys = seeds.astype(np.int64)[:, None].view(np.uint64)
    blocks = np.arange((vocab_size + 3) // 4, dtype=np.uint64)[None, :]
    rows = positions.astype(np.uint64)[:, None]
    zero = np.zeros((1, 1), np.uint64)
    words = philox((blocks, rows, zero + np.uint64(use), zero), (keys & np.uint64(MASK32), keys >> np.uint64(32)))
    bits: U32 = np.stack(words, axis=-1).astype(np.uint32).reshape(len(seeds), -1)[:, :vocab_size]
    return bits


def uniform(bits: U32) -> F32:
    """The v of the module's formula: float32 in the open interval (0, 1)."""
    v: F32 = np.minimum((bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(LARGEST_UNIFORM))
    return v


def gumbel_noise(seeds: I64, positions: I32, vocab_size: int) -> F32:
    """Noise to add to the scaled logits: float32 [L, vocab_size], for seeds [L] and positions [L]."""
    v = uniform(noise_bits(seeds, positions, vocab_size)).astype(np.float64)
    noise: F32 = (-np.log(-np.log1p(-v))).astype(np.float32)
    return noise
