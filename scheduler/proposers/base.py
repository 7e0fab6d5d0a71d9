"""What a proposer is: something that guesses how running sequences go on.

A guess never changes a text: the target computes every drafted row in its next step and keeps what it would have said
itself (see `scheduler.speculation`). So a proposer may use anything it can see, and is judged by how often it is right.

    allot (how far) ──▶ propose ──▶ one step verifies all paths ──▶ observe ──▶ ... ──▶ forget

Drafts are paths: the most likely continuation, and where the proposer was asked for more branches, others beside it. A
tree is given as its paths from the root. Each path runs in the step as a fork of the sequence that shares its pages, so
the keys of a path lie in order and a token's bits are those of the undrafted run.

Heads that read the target's hidden states (EAGLE, Medusa) fit in as a proposer whose `observe` gets them: the accepted
rows are in `Verified.rows`, and a runner that keeps its step's hidden states can be asked for those.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from models.base import StepOutput
from scheduler.request import I32, Sequence

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Ask:
    """A running sequence with one token to compute, whose pages are reserved for `tokens` more behind that one."""

    sequence: Sequence
    tokens: int  # the longest path wanted, at least 1
    branches: int = 1  # paths wanted at most


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses for one sequence.

    `paths` are none or some, each of 1 to `Ask.tokens` tokens, no two of them alike, the most likely first.
    `probabilities`, one [len(path), vocab] for each path, are the distributions the tokens were sampled from, for the
    rejection rule; None when the tokens were not sampled but chosen, which counts as certainty.
    """

    paths: list[I32] = field(default_factory=list)
    probabilities: list[F32] | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """What became of one draft. Row j of path p read the path's first j tokens; it is logit row rows[p] + j."""

    sequence: Sequence  # its tokens are those after the step; it may have finished
    draft: Draft
    rows: list[int]
    accepted: int  # drafted tokens that became output
    output: StepOutput


class Proposer(Protocol):
    """Owned by the engine's task, called between steps. `propose` of one that runs a model is called in the model's
    thread while no step runs; everything else on the event loop, so it has to be quick."""

    name: str
    runs_model: bool

    def seconds(self, sequences: int) -> float:
        """What drafting one more token for so many sequences at once takes."""

    def propose(self, asks: list[Ask]) -> list[Draft]:
        """A draft for each ask, in order. Raises what it raises: the step then runs without drafts."""

    def observe(self, verified: list[Verified]) -> None:
        """A step has been applied: the sequences have grown, or ended."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended or lost its pages. Called for sequences that were never asked about too."""

    def reset(self) -> None:
        """Drop all that is remembered of sequences that have ended."""
