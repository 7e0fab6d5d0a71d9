"""`octavo replay`: take the decisions of a recorded run again, and show or compare them."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="what `octavo serve --journal-file` wrote")
    parser.add_argument("--show", action="store_true", help="print every decision, with its reason where it has one")


def run(options: argparse.Namespace) -> int:
    """1 when a decision differs, 2 when the file cannot be read."""
    from scheduler.recording import replay

    counts: Counter[str] = Counter()
    last_eviction = 0
    try:
        for number, (recorded, repeated) in enumerate(replay(options.file)):
            if recorded != repeated:
                different = [what for what in recorded if recorded[what] != repeated[what]]
                for what in different:
                    print(f"plan {number}: {what}: recorded {recorded[what]}, now {repeated[what]}")
                return 1
            new = [eviction for eviction in repeated["evicted"] if eviction[0] > last_eviction]
            last_eviction = max([last_eviction, *(eviction[0] for eviction in new)])
            counts.update(plans=1, admissions=len(repeated["admitted"]), preemptions=len(repeated["preempted"]))
            counts.update(evictions=len(new))
            if options.show:
                _show(number, repeated, new)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"octavo: {options.file} cannot be replayed: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{count} {what}" for what, count in counts.items()) + ": all as recorded")
    return 0


def _show(number: int, decided: dict[str, Any], evicted: list[list[Any]]) -> None:
    for request, choice, computed, restored in decided["admitted"]:
        print(f"plan {number}: admit {request}/{choice}: {computed} tokens there, {restored} from the second tier")
    for request, choice, computed in decided["preempted"]:
        print(f"plan {number}: preempt {request}/{choice} at {computed} tokens")
    for _, start, end, freed, kept, reason in evicted:
        print(f"plan {number}: evict [{start}, {end}): {sum(freed)} pages, {kept} kept in the second tier: {reason}")
    if decided["waiting"]:
        print(f"plan {number}: waiting for {decided['waiting']}")
