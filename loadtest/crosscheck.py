"""`make crosscheck`: the same requests by our client and by another one, and whether both measure the same.

    python -m loadtest.crosscheck --client .venv-aiperf/bin/aiperf chat:32:4
    python -m loadtest.crosscheck --client path/to/bin/vllm chat:32:4

NVIDIA's AIPerf and `vllm bench serve` live in virtual environments of their own and are known as commands. The daemon
runs without a prefix cache, so that whoever comes second finds it as the first did; we come before and after, and our
two means are taken.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.figures import details
from loadtest.run import Run, measure
from loadtest.servers import Server, serving
from loadtest.tables import markdown
from loadtest.workloads import make

MOST_DIFFERENCE = 0.05


@dataclass(frozen=True, slots=True)
class Client:
    """Another client: what it is told, and where its figures are."""

    title: str
    prompt: str  # the fields of a line in its file of requests
    tokens: str
    command: str
    result: str  # the file it writes
    names: Mapping[str, str]  # ours, and the name of the same there


CLIENTS = {
    "aiperf": Client(
        "AIPerf",
        "text",
        "output_length",
        "profile --model {model} --url {url} --endpoint-type completions --tokenizer {folder} "
        "--input-file {folder}/requests.jsonl --custom-dataset-type single_turn --dataset-sampling-strategy sequential "
        "--request-count {requests} --concurrency {concurrency} --connection-reuse-strategy never --ui-type none "
        '--extra-inputs {{"temperature":0,"ignore_eos":true}} --artifact-dir {folder} --streaming '
        "--use-server-token-count --use-legacy-max-tokens",
        "profile_export_aiperf.json",
        {
            "ttft": "time_to_first_token",
            "tpot": "inter_token_latency",  # by which it means the same
            "e2e": "request_latency",
            "requests/s": "request_throughput",
            "output tok/s": "output_token_throughput",
        },
    ),
    "vllm": Client(
        "vLLM",
        "prompt",
        "output_tokens",
        "bench serve --backend openai --model {model} --base-url {url} --tokenizer {folder} --dataset-name custom "
        "--dataset-path {folder}/requests.jsonl --custom-output-len -1 --skip-chat-template --disable-shuffle "
        "--num-prompts {requests} --max-concurrency {concurrency} --temperature 0 --ignore-eos --disable-tqdm "
        "--percentile-metrics ttft,tpot,e2el --save-result --result-dir {folder} --result-filename result.json",
        "result.json",
        {
            "ttft": "mean_ttft_ms",
            "tpot": "mean_tpot_ms",
            "e2e": "mean_e2el_ms",
            "requests/s": "request_throughput",
            "output tok/s": "output_throughput",
        },
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when a figure differs by more than 5%."""
    parser = argparse.ArgumentParser(prog="make crosscheck", description="Measure as another client does.")
    parser.add_argument("run", nargs="?", type=Run.parse, default="chat:32:4", metavar="KIND:REQUESTS:CONCURRENCY")
    parser.add_argument("--client", type=Path, required=True, metavar="FILE", help=f"command: {' or '.join(CLIENTS)}")
    parser.add_argument("--url", help="another server, already running; without a prefix cache, or the second wins")
    parser.add_argument("--serve", default="", metavar="FLAGS", help="further flags for the daemon, as one word")
    options = parser.parse_args(arguments)
    if options.client.name not in CLIENTS:
        parser.error(f"{options.client.name} is none of the clients known: {', '.join(CLIENTS)}")
    client = CLIENTS[options.client.name]
    try:
        with serving(options.url, ["--no-enable-prefix-caching", *shlex.split(options.serve)]) as server:
            first = ours(server, options.run)
            theirs = other(server, options.run, client, options.client)
            second = ours(server, options.run)
    except (RuntimeError, OSError, ValueError) as error:
        print(f"crosscheck: {error}", file=sys.stderr)
        return 1
    mean = {name: (first[name] + second[name]) / 2 for name in client.names}
    rows = [("mean", "ours", client.title, "difference")]
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


def other(server: Server, run: Run, client: Client, command: Path) -> dict[str, float]:
    """The same by another client. Raises RuntimeError when it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = make(run.kind, run.requests, 1)
        lines = [json.dumps({client.prompt: one.prompt, client.tokens: one.max_tokens}) for one in prompts]
        (folder / "requests.jsonl").write_text("\n".join(lines))
        _tokenizer(folder)
        known = {"model": server.model, "url": server.url, "folder": folder}
        known |= {"requests": run.requests, "concurrency": run.concurrency}
        words = [word.format_map(known) for word in client.command.split()]
        result = subprocess.run([command, *words], capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{command} failed: {result.stderr.strip()[-500:] or result.stdout.strip()[-500:]}")
        found = json.loads((folder / client.result).read_text())
    values = {ours: found[theirs] for ours, theirs in client.names.items()}
    return {name: float(value["avg"] if isinstance(value, dict) else value) for name, value in values.items()}


def _tokenizer(folder: Path) -> None:
    """One that can be loaded without a network. What it counts is not used: the server counts the tokens."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


if __name__ == "__main__":
    sys.exit(main())
