"""`make bench PEERS=1`: Octavo and its peers on the same request sets, one server at a time, and one table of ratios.

For each peer both servers are up, and every set is driven at one and then at the other: a machine's speed may change by
a third within minutes, and is then the same for both. The one that is not driven waits, and costs nothing but memory.

    python -m loadtest.compare --peers openvino,vllm --seeds 1,2,3
    python -m loadtest.compare --peers openvino single:1:1          only these sets
    python -m loadtest.compare --show bench-results/FILE.json       the tables of a run that was kept

Peers are installed into a cache folder when they are first needed (`PEERS_DIR`). Octavo serves through HTTP;
against peers that have only a bfloat16 model it is measured in bfloat16 too. Let nothing else run: a peer takes about
four minutes a seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import psutil
from rich.console import Console

from loadtest.bench import STANDARD
from loadtest.document import RESULTS, Content, json_of, new_path, write
from loadtest.figures import Figures
from loadtest.peers.catalogue import KV_GIB, PEERS, Peer, cache_folder, chosen, python_path
from loadtest.peers.install import install, model_for, version
from loadtest.ratios import MOST_TPOT_SPREAD, Measured, ceiling_rows, figure_rows, medians, ratio_rows, slower
from loadtest.run import Run, measure
from loadtest.servers import Server, daemon
from loadtest.tables import Row, markdown, terminal

Sets = Sequence[tuple[int, Run]]  # each with its seed
FLAGS = {"stored": [], "bfloat16": ["--dtype", "bfloat16", "--quantization", "none"]}


console = Console(highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when anything failed."""
    parser = argparse.ArgumentParser(prog="make bench PEERS=1", description="Compare with other servers.")
    parser.add_argument("runs", nargs="*", type=Run.parse, metavar="KIND:REQUESTS:CONCURRENCY", help=" ".join(STANDARD))
    parser.add_argument("--peers", type=chosen, default="all", metavar="NAMES", help=", ".join(PEERS))
    parser.add_argument("--seeds", default="1", metavar="N,N", help="of the request sets")
    parser.add_argument("--serve", default="", metavar="FLAGS", help="further flags for Octavo, as one word")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the tables of figures that were kept")
    options = parser.parse_args(arguments)
    try:
        if options.show:
            show(json.loads(options.show.read_text(encoding="utf-8")))
            return 0
        runs = options.runs or [Run.parse(text) for text in STANDARD]
        sets = [(seed, run) for seed in map(int, options.seeds.split(",")) for run in runs]
        return _compare(options.peers, sets, shlex.split(options.serve))
    except (RuntimeError, ValueError, OSError) as error:
        console.print(f"bench: {error}", markup=False)
        return 1


def _compare(peers: Sequence[Peer], sets: Sets, serve: Sequence[str]) -> int:
    path = new_path(RESULTS, "-peers")
    environments = {}
    for peer in peers:
        console.print(f"installing {peer.title}", style="dim")
        environments[peer.name] = install(peer, cache_folder())
    console.print("measuring the machine", style="dim")
    content: Content = {"seeds": list(dict.fromkeys(seed for seed, _ in sets)), "machine_probe": probe(), "servers": []}
    for peer in peers:
        title = f"{peer.title} {version(peer, environments[peer.name])}"
        with (
            _watched(content, "Octavo", peer.weights, False) as ours,
            daemon([*serve, *FLAGS[peer.weights]]) as server,
            _watched(content, title, peer.weights, True) as theirs,
            _driver(peer, environments[peer.name], theirs) as drive,
        ):
            ours["ready_seconds"] = server.ready_seconds
            for seed, run in sets:
                _drive(ours, server, seed, run)
                drive(seed, run)
        write(path, content)
    # A machine that was busy for a moment looks worse than it is: the better of two looks counts.
    content["machine_probe"] = better(content["machine_probe"], probe())
    write(path, content)
    show(content)
    document = path.with_suffix(".md")
    parts = [f"{title}:\n\n{markdown(rows)}\n" for title, rows in tables(content).items()]
    document.write_text("\n".join([*parts, *(f"- {line}" for line in remarks(content))]) + "\n", encoding="utf-8")
    console.print(f"written to {path} and {document}", soft_wrap=True)
    return int(any(entry["error"] or any(row["failed"] for row in entry["figures"]) for entry in content["servers"]))


@contextmanager
def _watched(content: Content, title: str, weights: str, of_peer: bool) -> Iterator[Content]:
    """A server's entry among the figures. One that fails is noted, and the others go on."""
    console.print(f"{title}, {weights}", style="bold")
    entry: Content = {"title": title, "weights": weights, "of_peer": of_peer, "ready_seconds": None}
    entry |= {"figures": [], "error": None}
    content["servers"].append(entry)
    try:
        yield entry
    except (RuntimeError, OSError) as error:
        entry["error"] = str(error)
        console.print(str(error), style="red", markup=False)


def _drive(entry: Content, server: Server, seed: int, run: Run) -> None:
    figures, answers = measure(server, run, seed)
    _note(entry, figures, seed)
    if errors := sorted({answer.error for answer in answers if answer.error}):
        console.print(f"  {figures.failed} failed: {errors[0]}", markup=False, style="red")


@contextmanager
def _driver(peer: Peer, environment: Path, entry: Content) -> Iterator[Callable[[int, Run], None]]:
    """A peer that is ready, and what drives a set at it and notes its figures."""
    model = model_for(peer, cache_folder())
    log = RESULTS / f"{peer.name}.log"
    if peer.command is not None:
        with peer.start(environment, model, psutil.cpu_count(logical=False) or 1, log) as server:
            entry["ready_seconds"] = server.ready_seconds
            yield partial(_drive, entry, server)
        return
    command = [str(environment / "bin/python"), "-m", f"loadtest.peers.{peer.name}", str(model), str(KV_GIB)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            env=os.environ | python_path(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        asked, said = process.stdin, process.stdout

        def answer() -> Content:
            for line in said:
                if line.startswith("{"):
                    return dict(json.loads(line))
            raise RuntimeError(f"{peer.title} ended with exit code {process.wait()}; see {log}")

        def drive(seed: int, run: Run) -> None:
            print(f"{seed}:{run.kind}:{run.requests}:{run.concurrency}", file=asked, flush=True)
            _note(entry, Figures.of(answer()), seed)

        entry["ready_seconds"] = answer()["ready_seconds"]
        yield drive


def _note(entry: Content, figures: Figures, seed: int) -> None:
    entry["figures"].append(asdict(figures) | {"seed": seed})
    rate = f"{figures.output_tokens_per_second:8.1f} out, {figures.prompt_tokens_per_second:8.0f} in tok/s"
    console.print(f"  seed {seed} {figures.kind:8}{rate}", style="dim")


def probe() -> Content:
    """What the machine can do, and what a step costs. Raises RuntimeError."""
    return json_of("models.probe", "--weights", *FLAGS)


def better(first: Content, second: Content) -> Content:
    """The higher of two measurements of each ceiling."""
    return first | {"ceilings": {name: max(rate, second["ceilings"][name]) for name, rate in first["ceilings"].items()}}


def tables(content: Content) -> dict[str, list[Row]]:
    """Every table of a run, by its heading."""
    servers = _servers(content)
    return {
        "Throughput as a multiple of each peer's": ratio_rows(servers),
        "Tokens per second (TTFT p50 / TPOT p50, ms); prompt tokens for prefill": figure_rows(servers),
        "Octavo beside the machine's ceilings": ceiling_rows(servers, content["machine_probe"]),
    }


def remarks(content: Content) -> list[str]:
    """What the tables do not say: where a peer answers sooner, and whether streams are smooth."""
    servers = _servers(content)
    lines = [f"A peer is quicker: {line}." for line in slower(servers)]
    for one in servers:
        chat = one.sets.get("chat")
        spread = None if chat is None or one.of_peer else chat.tpot_spread
        if spread is not None:
            verdict = "within" if spread <= MOST_TPOT_SPREAD else "MORE than"
            lines.append(
                f"chat, {one.weights}: TPOT p99 is {spread:.2f} times its p50, {verdict} {MOST_TPOT_SPREAD:g} times."
            )
    return lines


def show(content: Content) -> None:
    """Print the tables."""
    for title, rows in tables(content).items():
        console.print(terminal(rows, title))
        console.print()
    for line in remarks(content):
        console.print(line, markup=False)


def _servers(content: Content) -> list[Measured]:
    about = ("title", "weights", "of_peer", "ready_seconds")
    return [
        Measured(sets=medians(map(Figures.of, entry["figures"])), **{name: entry[name] for name in about})
        for entry in content["servers"]
    ]


if __name__ == "__main__":
    sys.exit(main())
