"""What can go wrong in the store. Running out of pages is not an error: `reserve` and `open` say so in their answer.

KVError           the caller broke the contract (closed twice, more computed than reserved, too long for a table)
├── IntegrityError    the store contradicts itself; the pool can no longer be trusted
└── SavedCacheError   a file that cannot be taken for this model's cache
"""

from __future__ import annotations


class KVError(RuntimeError):
    """A call that no correct caller makes."""


class IntegrityError(KVError):
    """An invariant of the store does not hold. The message says which."""


class SavedCacheError(KVError):
    """A saved cache that is not whole or not ours. The message says why."""
