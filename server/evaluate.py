"""`octavo eval`: how close each weights format comes to float32 on plain English, as a table or as JSON.

Runs in the main thread, without a server. Exit code 1 when a format misses its limits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from config.errors import ConfigError
from config.hardware import Hardware
from models.evaluation import (
    FORMATS,
    TEXT,
    Logits,
    Score,
    evaluate,
    native,
    transformers,
    windows,
)
from models.loading.checkpoint import Checkpoint, open_checkpoint
from models.loading.source import Source, resolve_source
from models.loading.tokenizer import load_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the subcommand."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as for serve; the embedded default when not given")
    parser.add_argument("--weights", nargs="+", choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("--text", type=Path, default=TEXT, metavar="FILE", help="plain text; the built-in one if not given")
    parser.add_argument("--tokens", type=int, default=4000, metavar="N", help="tokens of it [4000]")
    parser.add_argument("--context", type=int, default=1000, metavar="N", help="tokens read in one go [1000]")
    parser.add_argument(
        "--reference", choices=("native", "transformers"), default="native", help="float32 by whose code [native]"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; the physical cores when not given")
    parser.add_argument("--json", action="store_true", help="print JSON")
