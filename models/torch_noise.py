"""`models.noise` on torch tensors, on any device: the same integers bit for bit, the same floats to rounding.

Words of 32 bits are held in int64 tensors; products wrap modulo 2^64, which is what Philox wants.
"""

from __future__ import annotations

import torch

from models.noise import LARGEST_UNIFORM, MASK32, PHILOX_MULTIPLIERS, PHILOX_ROUNDS, PHILOX_WEYL


def noise_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The 32 random bits of every (row, vocabulary index): int64 [L, vocab_size], for int64 seeds and positions [L]."""
    keys = [(seeds & MASK32)[:, None], ((seeds >> 32) & MASK32)[:, None]]
    zero = torch.zeros_like(keys[0])
    c0 = torch.arange((vocab_size + 3) // 4, device=seeds.device)[None, :]
    c1, c2, c3 = positions.long()[:, None], zero, zero
    for _ in range(PHILOX_ROUNDS):
        first = c0 * PHILOX_MULTIPLIERS[0]
        second = c2 * PHILOX_MULTIPLIERS[1]
        # >> keeps the sign, so the high word is masked too.
        c0, c1 = ((second >> 32) & MASK32) ^ c1 ^ keys[0], second & MASK32
        c2, c3 = ((first >> 32) & MASK32) ^ c3 ^ keys[1], first & MASK32
        keys = [(key + weyl) & MASK32 for key, weyl in zip(keys, PHILOX_WEYL, strict=True)]
    # After ten rounds every word depends on both the row and the block, so all four are [L, blocks].
    words = torch.stack((c0, c1, c2, c3), dim=-1)
    return words.reshape(len(seeds), -1)[:, :vocab_size]


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise to add to the scaled logits: float32 [L, vocab_size], for int64 seeds and positions [L]."""
    v = ((noise_bits(seeds, positions, vocab_size).float() + 0.5) * 2.0**-32).clamp_(max=LARGEST_UNIFORM)
    # In double, so that a logarithm that differs in its last bit between devices, or between the body and the tail of
    # a vectorised loop, still rounds to the same float.
    return v.double().neg_().log1p_().neg_().log_().neg_().float()
