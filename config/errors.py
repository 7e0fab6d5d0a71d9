"""The one error of this room.

ConfigError   the daemon cannot start as asked; the command line prints its one line and exits with code 2
"""

from __future__ import annotations


class ConfigError(Exception):
    """What is wrong and what to do about it, in one line for the operator."""
