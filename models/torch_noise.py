"""`models.noise` on torch tensors, on any device: the same integers bit for bit, the same floats to rounding.

Words of 32 bits are held in int64 tensors; products wrap modulo 2^64, which is what Philox wants.
"""

from __future__ import annotations

import torch

from models.noise import LARGEST_UNIFORM, MASK32, PHILOX_MULTIPLIERS, PHILOX_ROUNDS, PHILOX_WEYL


def noise_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The 32 random bits of every (row, vocabulary index): int64 [L, vocab_size], for int64 seeds and positions [L]."""
    k0, k1 = (seeds & MASK32)[:, None], ((seeds >> 32) & MASK32)[:, None]
    blocks = (vocab_size + 3) // 4
    c0 = torch.arange(blocks, device=seeds.device).expand(len(seeds), -1)
    c1 = positions.long()[:, None].expand(-1, blocks)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(PHILOX_ROUNDS):
        # Only what is multiplied next is cut to 32 bits: the high half of c1 and c3 never reaches a product.
        first, second = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        c0, c1 = (second >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(MASK32), second
        c2, c3 = (first >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(MASK32), first
        k0, k1 = (k0 + PHILOX_WEYL[0]) & MASK32, (k1 + PHILOX_WEYL[1]) & MASK32
    words = torch.stack((c0, c1 & MASK32, c2, c3 & MASK32), dim=-1)
    return words.reshape(len(seeds), -1)[:, :vocab_size]


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Noise to add to the scaled logits: float32 [L, vocab_size], for int64 seeds and positions [L]."""
    v = ((noise_bits(seeds, positions, vocab_size).float() + 0.5) * 2.0**-32).clamp_(max=LARGEST_UNIFORM)
    # In double, so that a logarithm that differs in its last bit between devices, or between the body and the tail of
    # a vectorised loop, still rounds to the same float.
    return v.double().neg_().log1p_().neg_().log_().neg_().float()
