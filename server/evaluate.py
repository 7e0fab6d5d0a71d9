"""`octavo eval`: how close each weights format comes to float32 on plain English, as a table or as JSON.

Runs in the main thread, without a server. Like the command line it imports what is heavy only when it runs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from config.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from models.base import I32
    from models.cpu.weights import WeightFormat
    from models.evaluation import Score
    from models.loading.checkpoint import Checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="as for serve; the embedded default when not given")
    formats = "float32, bfloat16, stored, int8, int4 [all that apply]"
    parser.add_argument("--weights", nargs="+", metavar="FORMAT", help=formats)
    parser.add_argument("--text", type=Path, metavar="FILE", help="plain text; the built-in one when not given")
    parser.add_argument("--tokens", type=int, default=4000, metavar="N", help="tokens of it that are read [4000]")
    parser.add_argument("--context", type=int, default=1000, metavar="N", help="tokens read in one go [1000]")
    parser.add_argument(
        "--reference", choices=("native", "transformers"), default="native", help="whose float32 arithmetic [native]"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads; the physical cores when not given")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the scores; 1 when a format misses its limits. Raises ConfigError or ModelError."""
    from rich.console import Console

    from config.hardware import Hardware
    from models.evaluation import evaluate, native, transformers
    from models.loading.checkpoint import open_checkpoint
    from models.loading.source import resolve_source

    if options.threads is not None and options.threads < 1:
        raise ConfigError(f"--threads must be 1 or more, not {options.threads}")
    if options.tokens < 2:
        raise ConfigError(f"--tokens must be 2 or more, not {options.tokens}")
    source = resolve_source(options.model)
    checkpoint = open_checkpoint(source)
    texts = _texts(options, checkpoint)
    formats = _formats(options, checkpoint)
    threads = options.threads or Hardware.detect("cpu").cores
    length = max(len(text) for text in texts)
    if options.reference == "transformers":
        reference = partial(transformers, source, threads)
    else:
        reference = partial(native, checkpoint, "float32", threads, length)
    candidates = [(weights, partial(native, checkpoint, weights, threads, length)) for weights in formats]

    console = Console()
    scores = []
    for score in evaluate(reference, candidates, texts):
        scores.append(score)
        Console(stderr=True).print(f"{score.weights}: {score.tokens} tokens in {score.seconds:.1f} s", style="dim")
    if options.json:
        print(json.dumps(report(checkpoint.name, options.reference, scores), indent=1))
    else:
        console.print(table(checkpoint.name, options.reference, scores))
        for score in scores:
            for miss in score.misses:
                console.print(f"{score.weights}: {miss}", style="red")
    return 1 if any(score.misses for score in scores) else 0


def table(model: str, reference: str, scores: Sequence[Score]) -> Table:
    from rich.table import Table

    title = f"{model} against float32 ({reference}), {scores[0].tokens} tokens of English"
    shown = Table(title=title, box=None, header_style="bold", title_justify="left")
    shown.add_column("weights")
    for heading in ("KL mean", "p99", "max", "top-1 agreement", "perplexity", "change"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_row("float32 (reference)", "-", "-", "-", "-", f"{scores[0].reference_perplexity:.3f}", "-")
    for score in scores:
        shown.add_row(
            score.weights,
            *(f"{value:.1e}" for value in (score.kl_mean, score.kl_p99, score.kl_max)),
            f"{score.agreement:.2%}",
            f"{score.perplexity:.3f}",
            f"{score.perplexity_change:+.3%}",
        )
    return shown


def report(model: str, reference: str, scores: Sequence[Score]) -> dict[str, object]:
    rows = [asdict(score) | {"perplexity_change": score.perplexity_change, "misses": score.misses} for score in scores]
    return {"model": model, "reference": reference, "scores": rows}


def _texts(options: argparse.Namespace, checkpoint: Checkpoint) -> list[I32]:
    from models.evaluation import TEXT, windows
    from models.loading.tokenizer import load_tokenizer

    path = options.text or TEXT
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read: {error}") from None
    if not 2 <= options.context <= checkpoint.config.max_position:
        raise ConfigError(f"--context must be 2 to {checkpoint.config.max_position}, not {options.context}")
    try:
        return windows(load_tokenizer(checkpoint).tokenizer.encode(text).ids, options.tokens, options.context)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _formats(options: argparse.Namespace, checkpoint: Checkpoint) -> list[WeightFormat]:
    """Those asked for; else all that say something about this file and this reference."""
    from models.evaluation import FORMATS
    from models.loading.layout import EMBEDDING, tensor_shapes
    from models.loading.stored import FLOATS

    kinds = {checkpoint.stored_kind(name) for name in tensor_shapes(checkpoint.config) if name != EMBEDDING}
    quantised = bool(kinds - FLOATS.keys())
    sensible = [
        weights
        for weights in FORMATS
        if (weights != "stored" or quantised) and (weights != "float32" or options.reference != "native")
    ]
    if unknown := set(options.weights or ()) - set(FORMATS):
        raise ConfigError(f"--weights must be of {', '.join(FORMATS)}, not {min(unknown)}")
    return [weights for weights in FORMATS if weights in (options.weights or sensible)]
