"""The noise that turns logits into a sample: a pure function of (seed, position, vocabulary index).

Nothing is drawn and no state is kept, so a token does not depend on who shares its batch or on how it was reached.
`models/cpu/sampler_noise.h` gives the same integers bit for bit and the same floats to one part in a million.

    words[0..3] = Philox4x32-10(counter = (index // 4, position, use, 0), key = (seed mod 2^32, seed div 2^32 mod 2^32))
    x           = words[index % 4]                                   32 bits
    v           = min((float32(x) + 0.5) * 2^-32, 1 - 2^-24)         float32, uniform in (0, 1)
    noise       = float32(-log(-log1p(-v)))                          Gumbel, between -2.82 and 22.88

`use` is 0 for this noise; `models.rejection` has another, so that its numbers are never these. float32(x) rounds to
nearest. v keeps 24 significant bits wherever it lies, so it is finest near 0, which is where the noise is large and the
winner is decided: two tokens hardly ever tie. (A uniform of 24 bits in equal steps would give the lower id an edge of
about one per cent between the tokens of a flat distribution over a large vocabulary.)

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, for Philox.
"""

from __future__ import annotations

import torch

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
MASK32 = 0xFFFFFFFF
LARGEST_UNIFORM = 1.0 - 2.0**-24


def noise_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, use: int = 0) -> torch.Tensor:
    """The 32 random bits of every (row, vocabulary index): int64 [L, vocab_size], for int64 seeds and positions [L].

    Words of 32 bits are held in int64 tensors; products wrap modulo 2^64, which is what Philox wants.
    """
    k0, k1 = (seeds & MASK32)[:, None], ((seeds >> 32) & MASK32)[:, None]
    blocks = (vocab_size + 3) // 4
    c0 = torch.arange(blocks, device=seeds.device).expand(len(seeds), -1)
    c1 = positions.long()[:, None].expand(-1, blocks)
    c2, c3 = torch.full_like(c0, use), torch.zeros_like(c0)
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
