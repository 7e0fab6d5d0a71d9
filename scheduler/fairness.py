"""Who comes first when several owners want more than there is: start-time fair queueing, in tokens.

Every request gets a start tag: the later of the virtual time (the latest tag of those that have been let in) and of the
tag at which all that its owner asked for before has been served. The smallest tag runs first. So owners that always
have something waiting get the same number of tokens, whoever asks for more at once or at a time, and one that asks
little never waits behind the queue of one that asks much. Requests of one owner keep their order. (Goyal, Vin, Cheng:
Start-time Fair Queueing, SIGCOMM 1996.)

What a request costs is known when it ends. Until then its prompt is charged; then its output is added, and what the
cache had, or all of the prompt if it was never let in, is given back. Owned by the engine's task. Knows nothing of
time; holds one entry for each owner since the engine was last idle.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.request import Request, Sequence


@dataclass(slots=True)
class _Owner:
    active: int = 0  # choices that have not ended
    tag: int = 0  # of its latest request, so that its requests keep their order; 0 when none is left
    served_at: int = 0  # the tag at which all it asked for will have been served


class FairShares:
    """The tags of all owners."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._virtual_time = 0

    def active(self, owner: str) -> int:
        known = self._owners.get(owner)
        return 0 if known is None else known.active

    def next_tag(self, owner: str, running: Iterable[Sequence]) -> int:
        """The start tag that the owner's next request gets."""
        self._virtual_time = max([self._virtual_time, *(sequence.key[1] for sequence in running)])
        known = self._owners.get(owner)
        return self._virtual_time if known is None else max(self._virtual_time, known.tag, known.served_at)

    def enter(self, request: Request, tag: int) -> None:
        owner = self._owners.setdefault(request.owner, _Owner())
        owner.active += request.n
        owner.tag = tag
        owner.served_at = tag + len(request.prompt)

    def leave(self, sequence: Sequence) -> None:
        """A choice has ended, wherever it was."""
        owner = self._owners[sequence.request.owner]
        owner.active -= 1
        if not owner.active:
            owner.tag = 0
        was_let_in = sequence.computed or sequence.preemptions
        if was_let_in:
            self._virtual_time = max(self._virtual_time, sequence.key[1])
        if sequence.index == 0:
            owner.served_at -= sequence.cached_tokens if was_let_in else sequence.prompt_length
        owner.served_at += len(sequence.outputs)

    def forget(self) -> None:
        """Nothing is left: the next to come start even."""
        self._owners.clear()
        self._virtual_time = 0
