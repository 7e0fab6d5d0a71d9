"""`make crosscheck`: the same requests by our client and by NVIDIA's AIPerf, and whether both measure the same.

    python -m loadtest.crosscheck --client .venv-aiperf/bin/aiperf chat:32:4

AIPerf lives in a virtual environment of its own and is known as a command. The daemon runs without a prefix cache, so
that whoever comes second finds it as the first did; we come before and after, and our two means are taken.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.figures import details
from loadtest.run import Run, measure
from loadtest.servers import Server, serving
from loadtest.tables import markdown
from loadtest.workloads import make

MOST_DIFFERENCE = 0.05
# Ours, and the name of the same in AIPerf's file. It calls the time per output token inter-token latency.
NAMES = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "e2e": "request_latency",
    "requests/s": "request_throughput",
    "output tok/s": "output_token_throughput",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a figure differs by more than 5%."""
    parser = argparse.ArgumentParser(prog="make crosscheck", description="Measure as another client does.")
    parser.add_argument("run", nargs="?", type=Run.parse, default="chat:32:4", metavar="KIND:REQUESTS:CONCURRENCY")
    parser.add_argument("--client", type=Path, required=True, metavar="FILE", help="AIPerf's command")
    parser.add_argument("--url", help="another server, already running; without a prefix cache, or the second wins")
    parser.add_argument("--serve", default="", metavar="FLAGS", help="further flags for the daemon, as one word")
    options = parser.parse_args(arguments)
    try:
        with serving(options.url, ["--no-enable-prefix-caching", *shlex.split(options.serve)]) as server:
            first = ours(server, options.run)
            theirs = other(server, options.run, options.client)
            second = ours(server, options.run)
    except (RuntimeError, OSError, ValueError) as error:
        print(f"crosscheck: {error}", file=sys.stderr)
        return 1
    mean = {name: (first[name] + second[name]) / 2 for name in NAMES}
    rows = [("mean", "ours", "AIPerf", "difference")]
    for name, value in mean.items():
        rows.append((name, f"{value:.4g}", f"{theirs[name]:.4g}", f"{theirs[name] / value - 1:+.1%}"))
    print(markdown(rows))
    return int(any(abs(theirs[name] / value - 1) > MOST_DIFFERENCE for name, value in mean.items()))


def ours(server: Server, run: Run) -> dict[str, float]:
    """Means in milliseconds, and rates."""
    figures, answers = measure(server, run, seed=1)
    if figures.failed:
        raise RuntimeError(f"{figures.failed} requests failed")
    kept = details(answers)
    means = {name: statistics.mean(value for value in kept[name] if value) for name in ("ttft", "tpot", "e2e")}
    return means | {"requests/s": figures.requests_per_second, "output tok/s": figures.output_tokens_per_second}


def other(server: Server, run: Run, client: Path) -> dict[str, float]:
    """The same by AIPerf. Raises RuntimeError when it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = [{"text": one.prompt, "output_length": one.max_tokens} for one in make(run.kind, run.requests, 1)]
        (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
        _tokenizer(folder)
        flags = {
            "model": server.model,
            "url": server.url,
            "endpoint-type": "completions",
            "tokenizer": name,
            "input-file": str(folder / "requests.jsonl"),
            "custom-dataset-type": "single_turn",
            "dataset-sampling-strategy": "sequential",
            "request-count": str(run.requests),
            "concurrency": str(run.concurrency),
            "extra-inputs": '{"temperature": 0, "ignore_eos": true}',
            "connection-reuse-strategy": "never",
            "ui-type": "none",
            "artifact-dir": name,
        }
        switches = ["--streaming", "--use-server-token-count", "--use-legacy-max-tokens"]
        words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
        result = subprocess.run([client, "profile", *words, *switches], capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{client} failed: {result.stderr.strip()[-500:] or result.stdout.strip()[-500:]}")
        found: dict[str, Any] = json.loads((folder / "profile_export_aiperf.json").read_text())
    return {ours: float(found[theirs]["avg"]) for ours, theirs in NAMES.items()}


def _tokenizer(folder: Path) -> None:
    """One that AIPerf can load without a network. It does not use it: the server counts the tokens."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


if __name__ == "__main__":
    sys.exit(main())
