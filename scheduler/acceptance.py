"""How often drafted tokens turn out right: for one sequence, and for a proposer in general. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass

FORGETTING = 0.9  # what a draft's outcome still counts after the next one
PRIOR_WEIGHT = 2.0  # drafted tokens that the prior counts for


@dataclass(slots=True)
class Acceptance:
    """The share of drafted tokens that is accepted, of late; those behind a rejected one are not asked."""

    accepted: float = 0.0
    rejected: float = 0.0

    def note(self, accepted: int, drafted: int) -> None:
        self.accepted = FORGETTING * self.accepted + accepted
        self.rejected = FORGETTING * self.rejected + (accepted < drafted)

    def estimate(self, prior: float) -> float:
        return (self.accepted + PRIOR_WEIGHT * prior) / (self.accepted + self.rejected + PRIOR_WEIGHT)
