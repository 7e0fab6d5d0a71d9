"""Leviathan's rule for drafted tokens: accept with probability min(1, p/q), else sample from what p has more than q.

The text then has the target's distribution, whatever was drafted; unlike with the rule of equal samples it is not the
text of the undrafted run, and it depends on what was drafted where. Several candidates behind one prefix are tried in
their order, each against what the ones before it have left of p. A candidate that was chosen, not sampled, counts as
one that q was certain of. Owner: the thread that runs the model. Knows nothing of requests.

    p    the target's distribution: after penalties, bias, mask, temperature and filters; one-hot at temperature 0
    q    what a candidate was sampled from. Candidates behind one prefix differ, so the q of a later one has to be what
         it was sampled from once the ones before were known: without them

Random numbers are keyed like the sampler's noise, with another third word of the Philox counter (`models.noise`), so
that the noise a drafter has sampled with says nothing about them: for the token at a position, number 0 samples from
what is left, and number 1 + i decides about candidate i.

Sources: Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023; Miao et
al., "SpecInfer", ASPLOS 2024, for several candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Protocol

import numpy as np
import torch

from models import torch_sampler
from models.base import F32, I32, Batch, StepOutput
from models.noise import noise_bits
from models.sampling import SamplingBatch
from models.torch_runner import join, slices

# Of one sequence: paths; the first of the len(path) + 1 logit rows of each, row j having read the path's first j
# tokens; and for each path what its tokens were sampled from [len(path), V], None for tokens that were chosen.
Drafts = tuple[list[I32], list[int], list[F32] | None]

PHILOX_USE = 1


class LogitsRunner(Protocol):
    def logits(self, batch: Batch) -> F32:
        """Those of the step's logit rows [L, V]."""


@dataclass(slots=True)
class _Node:
    """A prefix of paths. Its rows are alike."""

    rows: list[int] = field(default_factory=list)
    children: dict[int, tuple[_Node, F32 | None]] = field(default_factory=dict)  # by token, each with its q [V]


@torch.inference_mode()
def run_with_rejection(runner: LogitsRunner, batch: Batch, drafts: Sequence[Drafts]) -> StepOutput:
    """`Runner.run` with the tokens that `verify` gives, and the logprobs of these."""
    logits = runner.logits(batch)
    tokens = verify(logits, batch.sampling, drafts)
    return join(
        [
            torch_sampler.report(
                torch.from_numpy(logits[part]), torch.from_numpy(tokens[part]).long(), batch.sampling.rows(part)
            )
            for part in slices(len(tokens))
        ]
    )


@torch.inference_mode()
def run_with_distributions(runner: LogitsRunner, batch: Batch) -> tuple[StepOutput, F32]:
    """`Runner.run`, and for a drafter the q of each row [L, V]."""
    logits = runner.logits(batch)
    return torch_sampler.sample(torch.from_numpy(logits), batch.sampling), distributions(logits, batch.sampling)


def distributions(logits: F32, sampling: SamplingBatch) -> F32:
    """The p of each row [L, V], none of which has a target; NaN for a row that cannot be sampled."""
    return torch_sampler.distributions(torch.from_numpy(logits), sampling).float().numpy()


def verify(logits: F32, sampling: SamplingBatch, drafts: Sequence[Drafts]) -> I32:
    """The token of each of the L rows.

    The row behind a prefix has the candidate that is accepted there, or the sample instead, the same in every path that
    has the prefix: so what is to be kept of a path are its tokens up to the first that its row does not have, and that
    row's token. Rows that cannot be reached have some token. Rows without drafts have the sampler's.
    """
    tokens: I32 = logits.argmax(axis=1).astype(np.int32)
    drafted = [
        first + row
        for paths, firsts, _ in drafts
        for path, first in zip(paths, firsts, strict=True)
        for row in range(len(path) + 1)
    ]
    others = np.setdiff1d(np.arange(len(tokens)), drafted)
    if others.size:
        unreported = replace(sampling.rows(others), num_logprobs=-1)
        tokens[others] = torch_sampler.sample(torch.from_numpy(logits[others]), unreported).tokens
    level = [_tree(*draft) for draft in drafts]
    while level:
        level.sort(key=lambda node: node.rows[0])
        rows = np.array([node.rows[0] for node in level], np.intp)
        chosen = _choose(level, logits[rows], sampling.rows(rows)).tolist()
        for node, token in zip(level, chosen, strict=True):
            tokens[node.rows] = token
        level = [node.children[token][0] for node, token in zip(level, chosen, strict=True) if token in node.children]
    return tokens


def _tree(paths: list[I32], firsts: list[int], probabilities: list[F32] | None) -> _Node:
    root = _Node()
    for path, first, q in zip(paths, firsts, repeat(None) if probabilities is None else probabilities, strict=False):
        node = root
        node.rows.append(first)
        for place, token in enumerate(path.tolist()):
            node = node.children.setdefault(token, (_Node(), None if q is None else q[place]))[0]
            node.rows.append(first + place + 1)
    return root


def _choose(nodes: Sequence[_Node], logits: F32, sampling: SamplingBatch) -> I32:
    """The token behind each of N prefixes with these logits [N, V]; -1 where it cannot be sampled."""
    left = distributions(logits, sampling).astype(np.float64)
    tries = max(len(node.children) for node in nodes)
    seeds, positions = torch.from_numpy(sampling.seed), torch.from_numpy(sampling.position)
    uniform = ((noise_bits(seeds, positions, 1 + tries, PHILOX_USE).double() + 0.5) * 2.0**-32).numpy()
    chosen = np.full(len(nodes), -1, np.int32)
    candidates = [list(node.children.items()) for node in nodes]
    for turn in range(tries):
        asking = np.array([n for n, those in enumerate(candidates) if turn < len(those) and chosen[n] < 0], np.intp)
        token = np.array([candidates[n][turn][0] for n in asking], np.intp)
        q = np.zeros((len(asking), left.shape[1]))
        for row, n in enumerate(asking):
            drafted, (_, given) = candidates[n][turn]
            q[row, drafted if given is None else slice(None)] = 1 if given is None else given
        each = np.arange(len(asking))
        accepted = uniform[asking, 1 + turn] * q[each, token] < left[asking, token]
        chosen[asking[accepted]] = token[accepted]
        lost = asking[~accepted]
        rest = np.maximum(left[lost] - q[~accepted], 0)
        mass = rest.sum(axis=1, keepdims=True)
        # Nothing but rounding can reject a candidate where p has nothing more than q.
        left[lost] = np.where(mass > 0, rest / np.where(mass > 0, mass, 1), left[lost])
    open_ = np.flatnonzero((chosen < 0) & np.isfinite(left[:, 0]))
    below = left[open_].cumsum(axis=1)
    chosen[open_] = (below > uniform[open_, :1] * below[:, -1:]).argmax(axis=1)
    return chosen
