"""What can go wrong with a model before it serves its first token.

All but KernelError end a start with exit code 2; none of them can happen once a model serves.
"""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be loaded. The message is one line meant for the operator."""


class ModelNotFoundError(ModelError):
    """The model named on the command line cannot be found."""


class UnsupportedModelError(ModelError):
    """The model is of an architecture, format or size that cannot be run."""


class CorruptModelError(ModelError):
    """The model's files are damaged or contradict each other."""


class CacheError(ModelError):
    """A derived file cannot be kept."""


class KernelError(ModelError):
    """The native kernels cannot be used; the torch operators can."""
