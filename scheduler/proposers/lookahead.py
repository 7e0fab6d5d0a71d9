"""Lookahead decoding: the model's own guesses at tokens it cannot see yet, without a second model.

A path of guesses is verified like any draft. Right or wrong, each of its rows says what the model would write behind
that guess, and that is the next step's guess, one place further on: Jacobi iteration, which comes to rest at the true
text. On its way it writes runs of tokens that follow one another; they are kept by the token before them, and verified
as branches when that token comes.

Source: Fu, Bailis, Stoica and Zhang, "Break the sequential dependency of LLM inference using lookahead decoding", 2024.
Owned by the engine's task.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from scheduler.proposers.base import Ask, Draft, Verified
from scheduler.request import I32, Sequence

MAX_KEYS = 4096  # tokens of one sequence that runs are kept for
MAX_RUNS = 4  # runs for each


class _Trajectory:
    """One sequence's guesses and the runs it has seen."""

    def __init__(self, guesses: I32) -> None:
        self.guesses = guesses  # [G] tokens that may follow the last one
        self.runs: OrderedDict[int, list[tuple[int, ...]]] = OrderedDict()  # the latest first

    def keep(self, key: int, run: tuple[int, ...]) -> None:
        runs = [run, *(other for other in self.runs.pop(key, ()) if other != run)]
        self.runs[key] = runs[:MAX_RUNS]
        if len(self.runs) > MAX_KEYS:
            self.runs.popitem(last=False)


class LookaheadProposer:
    """See `scheduler.proposers.base.Proposer`. `tokens` are guessed ahead; a run kept has at most as many."""

    name = "lookahead"
    runs_model = False

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._trajectories: dict[Sequence, _Trajectory] = {}

    def seconds(self, sequences: int) -> float:
        return 0.0

    def propose(self, asks: list[Ask]) -> list[Draft]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft:
        sequence = ask.sequence
        trajectory = self._trajectories.get(sequence)
        if trajectory is None:
            # Any guess will do to begin with; what was written before is at least language.
            start = np.resize(sequence.tokens[-self._tokens :], self._tokens)
            trajectory = self._trajectories[sequence] = _Trajectory(start)
        runs = trajectory.runs.get(int(sequence.buffer[sequence.known - 1]), [])
        paths = {run[: ask.tokens]: None for run in runs[: max(1, ask.branches - 1)]}
        paths[tuple(trajectory.guesses[: ask.tokens].tolist())] = None
        return Draft([np.array(path, np.int32) for path in list(paths)[: ask.branches]])

    def observe(self, verified: list[Verified]) -> None:
        for seen in verified:
            trajectory = self._trajectories.get(seen.sequence)
            if trajectory is None:
                continue
            for path, row in zip(seen.draft.paths, seen.rows, strict=True):
                said = seen.output.tokens[row : row + len(path) + 1].tolist()
                for place, guess in enumerate(path.tolist(), 1):
                    if run := tuple(said[place:]):
                        trajectory.keep(guess, run)
            # The last path was the guesses themselves: what the model said behind each is the guess for the next place.
            ahead = seen.output.tokens[
                seen.rows[-1] + seen.accepted + 1 : seen.rows[-1] + len(seen.draft.paths[-1]) + 1
            ]
            missing = self._tokens - len(ahead)
            trajectory.guesses = np.concatenate([ahead, np.resize(seen.sequence.tokens[-self._tokens :], missing)])

    def forget(self, sequence: Sequence) -> None:
        self._trajectories.pop(sequence, None)

    def reset(self) -> None:
        """Nothing is."""
