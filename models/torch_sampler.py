"""The sampler in torch: a whole batch of logits at once, on any device. `models.sampling` says what it does.

The reference for the native one, and the one in use where there is no compiler or the logits are on another device.
Owner: the thread that runs the model. No row's result depends on another row, although torch on CUDA may choose another
order for a row's sum when there are more rows: keys and maxima are exact in any order (of equal logits argmax takes the
lowest id), and masses are whole numbers, whose sums are too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.base import StepOutput
from models.noise import gumbel_noise
from models.sampling import COUNT_MASK, TOP_P_SLACK, SamplingBatch

MASS_ONE = 2.0**44  # the mass of the likeliest token: a flat distribution over 2^18 of them fits an int64
LARGEST_FACTOR = np.float32(3e38)  # of 1 / temperature: finite, so that 0 times it is 0


def sample(logits: torch.Tensor, batch: SamplingBatch) -> StepOutput:
    """Sample L rows of logits [L, V], float32 or narrower; they are not modified."""
    x = _processed(logits, batch)
    tokens = x.argmax(dim=1)
    drawing = np.flatnonzero((batch.temperature > 0) & (batch.target < 0))
    if drawing.size:
        rows = _to(drawing, x)
        seeds, positions = _to(batch.seed[drawing], x), _to(batch.position[drawing], x)
        noise = gumbel_noise(seeds, positions, x.shape[1])
        tokens[rows] = (_scaled(x[rows], batch, drawing) + noise).argmax(dim=1)
    if (batch.target >= 0).any():
        target = _to(batch.target, x).long()
        tokens = torch.where(target >= 0, target, tokens)
    return _report(x, tokens, batch)


def distributions(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """What `sample` draws from: the probabilities [L, V] float64 of every token. Certainty at temperature 0; NaN in
    rows that cannot be sampled. The batch has no targets."""
    x = _processed(logits, batch)
    weights = torch.zeros_like(x, dtype=torch.float64).scatter_(1, x.argmax(dim=1, keepdim=True), 1.0)
    drawing = np.flatnonzero(batch.temperature > 0)
    if drawing.size:
        weights[_to(drawing, x)] = _scaled(x[_to(drawing, x)], batch, drawing).double().exp()
    return torch.where(_peak(x).isfinite(), weights / weights.sum(dim=1, keepdim=True), torch.nan)


def report(logits: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> StepOutput:
    """`sample`, but of rows whose tokens [L] have been chosen already."""
    return _report(_processed(logits, batch), tokens, batch)


def _peak(x: torch.Tensor) -> torch.Tensor:
    """The largest of each row [L, 1]; NaN when anything in the row is NaN."""
    return x.amax(dim=1, keepdim=True)


def _mass(scaled: torch.Tensor) -> torch.Tensor:
    """exp of logits that are at most 0, in whole parts of `MASS_ONE`."""
    return (scaled.double().exp() * MASS_ONE).round().long()


def _to(array: npt.NDArray[Any], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device, non_blocking=True)


def _processed(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The logits in float32 after penalties, bias and mask; rows with a target as they were."""
    x = logits.float()
    if batch.count_row is not None:
        penalised = np.flatnonzero((batch.count_row >= 0) & (batch.target < 0))
        if penalised.size:
            rows = _to(penalised, x)
            x = x.index_copy(0, rows, _penalise(x[rows], batch, penalised))
    if batch.bias_row is not None and batch.bias_token is not None and batch.bias_value is not None:
        ours = batch.target[batch.bias_row] < 0
        where = tuple(_to(array[ours].astype(np.int64), x) for array in (batch.bias_row, batch.bias_token))
        x = x.index_put(where, _to(batch.bias_value[ours], x), accumulate=True)
    if batch.mask is not None and batch.mask_row is not None:
        masked = np.flatnonzero((batch.mask_row >= 0) & (batch.target < 0))
        if masked.size:
            rows, words = _to(masked, x), _to(batch.mask[batch.mask_row[masked]].view(np.int32), x)
            x = x.index_copy(0, rows, x[rows].masked_fill(~_bits(words, x.shape[1]), -torch.inf))
    return x


def _bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` bits of each row of int32 words, the lowest of each word first, as booleans [R, count]."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> places) & 1).flatten(1)[:, :count].bool()


def _penalise(x: torch.Tensor, batch: SamplingBatch, rows: npt.NDArray[np.intp]) -> torch.Tensor:
    """l > 0 ? l / repetition : l * repetition for tokens seen; less frequency * count; less presence if counted."""
    if batch.counts is None or batch.count_row is None:
        return x
    counts = _to(batch.counts[batch.count_row[rows]], x)
    repetition, frequency, presence = (
        _to(array[rows], x)[:, None]
        for array in (batch.repetition, batch.frequency, batch.presence)
        if array is not None
    )
    times = (counts & COUNT_MASK).float()
    x = torch.where(counts != 0, torch.where(x > 0, x / repetition, x * repetition), x)
    x = x - times * frequency
    return x - torch.where(times > 0, presence, 0.0)


def _scaled(x: torch.Tensor, batch: SamplingBatch, rows: npt.NDArray[np.intp]) -> torch.Tensor:
    """Logits [R, V] of rows with a temperature after that and the filters; `rows` are their places in the batch."""
    vocab_size = x.shape[1]
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.minimum(np.float32(1) / batch.temperature[rows], LARGEST_FACTOR)
        floor = np.log(batch.min_p[rows].astype(np.float64)).astype(np.float32)
    scaled = (x - _peak(x)) * _to(factor, x)[:, None]
    scaled = scaled.masked_fill(scaled < _to(floor, x)[:, None], -torch.inf)
    top_k = np.where(batch.top_k[rows] > 0, batch.top_k[rows], vocab_size)
    top_p = batch.top_p[rows].astype(np.float64)
    filtered = np.flatnonzero((top_k < vocab_size) | (top_p < 1))
    if filtered.size:
        which = _to(filtered, x)
        kept = _filtered(x[which], scaled[which], _to(top_k[filtered], x), _to(top_p[filtered], x))
        scaled = scaled.index_copy(0, which, kept)
    return scaled


def _filtered(x: torch.Tensor, scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`scaled` with -inf beyond the first top_k, and beyond the first whose mass reaches top_p of what those have.

    A top_p of 1 keeps all.
    """
    order = _order_keys(x).argsort(dim=1, descending=True)
    sorted_scaled = scaled.gather(1, order)
    rank = torch.arange(x.shape[1], device=x.device)
    sorted_scaled = sorted_scaled.masked_fill(rank >= top_k[:, None], -torch.inf)
    weight = _mass(sorted_scaled)
    mass = weight.cumsum(dim=1)
    need = torch.where(top_p < 1, top_p * (1 - TOP_P_SLACK), torch.inf)[:, None] * mass[:, -1:]
    sorted_scaled = sorted_scaled.masked_fill(mass - weight >= need, -torch.inf)
    return torch.empty_like(scaled).scatter_(1, order, sorted_scaled)


def _order_keys(x: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different within a row: descending keys are larger logits first, then lower ids.

    A float's bits read as an integer are in its order once those of negative numbers are flipped; adding 0 turns -0
    into +0.
    """
    bits = (x + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.long() * 2**32 + torch.arange(x.shape[1] - 1, -1, -1, device=x.device)


def _report(x: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch) -> StepOutput:
    """The tokens, -1 for rows that cannot be sampled, and for the rows that want them the logprobs of these and of the
    most likely; -inf and -1 elsewhere."""
    peak = _peak(x)
    usable = peak.isfinite().squeeze(1)
    tokens = torch.where(usable, tokens, -1)
    if batch.num_logprobs < 0:
        return StepOutput(tokens.int().cpu().numpy(), None, None, None)
    columns, vocab_size = batch.num_logprobs, x.shape[1]
    logprobs = x.new_full((len(x),), -torch.inf)
    top_ids = tokens.new_full((len(x), columns), -1)
    top_logprobs = x.new_full((len(x), columns), -torch.inf)
    wanted = np.full(len(x), columns, np.int32) if batch.row_logprobs is None else batch.row_logprobs
    asking = np.flatnonzero(wanted >= 0)
    if asking.size:
        rows = _to(asking, x)
        x, ok = x[rows], usable[rows]
        norm = peak[rows].double() + (_mass(x - peak[rows]).sum(dim=1, keepdim=True) / MASS_ONE).log()
        chosen = x.gather(1, tokens[rows].clamp(min=0)[:, None])
        logprobs[rows] = torch.where(ok, (chosen - norm).float().squeeze(1), -torch.inf)
        k = min(columns, vocab_size)
        ids = _order_keys(x).topk(k, dim=1).indices
        shown = ok[:, None] & (torch.arange(k, device=x.device) < _to(wanted[asking], x)[:, None])
        top_ids[rows, :k] = torch.where(shown, ids, -1)
        top_logprobs[rows, :k] = torch.where(shown, (x.gather(1, ids) - norm).float(), -torch.inf)
    kept = (tokens.int(), logprobs, top_ids.int(), top_logprobs)
    return StepOutput(*(one.cpu().numpy() for one in kept))
