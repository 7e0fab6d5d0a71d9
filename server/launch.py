"""Bring the daemon up, phase by phase. (the phases follow as their rooms land)"""

from __future__ import annotations

from config.settings import Settings


def serve(settings: Settings, began: float) -> int:
    raise NotImplementedError
