"""The comparison as a command, with servers that are not real: what it runs, keeps and prints."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from loadtest import compare
from loadtest.figures import Figures
from loadtest.peers import catalogue, install
from loadtest.run import Run
from loadtest.servers import Server

FIGURES = Figures("chat", 4, 2, 0, 10.0, 1000, 400, 40.0, 100.0, 50.0, 90.0, 20.0, 30.0)
PROBE = {
    "ceilings": {"bytes_read": 2e10, "int8_operations": 1e12, "bfloat16_operations": 5e11, "float32_operations": 1e11},
    "costs": {
        weights: {"layer_weights": 10**8, "head_weights": 10**7, "weight_bytes": 10**8, "other": 1}
        for weights in ("stored", "bfloat16")
    },
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Servers in the order they were started and driven; nothing is installed, started or driven."""
    started: list[str] = []

    @contextmanager
    def octavo(flags: list[str]) -> Iterator[Server]:
        started.append(" ".join(["octavo", *flags]))
        yield Server("octavo", "m", 1, 1.5)

    @contextmanager
    def peer(self: catalogue.Peer, environment: Path, *_: object) -> Iterator[Server]:
        started.append(self.name)
        if self.name == "vllm":
            raise RuntimeError("it did not start")
        yield Server(environment.name, "m", 2, 9.0)

    def measure(server: Server, run: Run, seed: int) -> tuple[Figures, list[object]]:
        started.append(f"drive {server.url}")
        speed = {"octavo": 40.0, "llama": 10.0}[server.url] * seed
        return replace(FIGURES, kind=run.kind, output_tokens_per_second=speed), []

    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "daemon", octavo)
    monkeypatch.setattr(catalogue.Peer, "start", peer)
    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(compare, "install", lambda peer, cache: cache / peer.name)
    monkeypatch.setattr(compare, "version", lambda peer, environment: "1.2")
    monkeypatch.setattr(compare, "model_for", lambda peer, cache: cache)
    monkeypatch.setattr(compare, "probe", lambda: PROBE)
    return started


def test_every_set_is_driven_at_both_servers_and_their_figures_are_kept(
    started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--peers", "llama", "--seeds", "1,3,2", "--serve", "--threads 1", "chat:4:2"]) == 0
    assert started == ["octavo --threads 1", "llama", *["drive octavo", "drive llama"] * 3]
    [path] = tmp_path.glob("*-peers.json")
    servers = json.loads(path.read_text())["servers"]
    assert [(entry["title"], len(entry["figures"])) for entry in servers] == [
        ("Octavo", 3),
        ("llama.cpp server 1.2", 3),
    ]
    document = path.with_suffix(".md").read_text()
    assert "| llama.cpp server 1.2, stored | 4.00x |" in document
    assert "| Octavo, stored | 80.0 (50.0 / 20.0) | 1.5 s |" in document
    assert "chat, stored: TPOT p99 is 1.50 times its p50, within 2 times." in document
    capsys.readouterr()
    assert compare.main(["--show", str(path)]) == 0
    assert "4.00x" in capsys.readouterr().out


def test_a_peer_in_bfloat16_is_compared_with_octavo_in_bfloat16(started: list[str]) -> None:
    compare.main(["--peers", "vllm", "chat:4:2"])
    assert started == ["octavo --dtype bfloat16 --quantization none", "vllm"]


def test_a_peer_that_does_not_start_is_noted_and_the_others_go_on(
    started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main(["--peers", "vllm,llama", "chat:4:2"]) == 1
    assert started[-3:] == ["llama", "drive octavo", "drive llama"]
    [path] = tmp_path.glob("*-peers.json")
    assert [entry["error"] for entry in json.loads(path.read_text())["servers"]][1] == "it did not start"
    assert "4.00x" in capsys.readouterr().out


def test_a_peer_without_a_server_reports_its_figures_line_by_line(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, figures = json.dumps({"ready_seconds": 3.5}), json.dumps(asdict(FIGURES))
    program = f"print('loading')\nprint({ready!r}, flush=True)\nassert input() == '1:chat:4:2'\nprint({figures!r})\n"
    python = tmp_path / "openvino" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\n{program}")
    python.chmod(0o755)
    monkeypatch.setattr(compare, "cache_folder", lambda: tmp_path)
    assert compare.main(["--peers", "openvino", "chat:4:2"]) == 0
    [path] = tmp_path.glob("*-peers.json")
    entry: dict[str, Any] = json.loads(path.read_text())["servers"][1]
    assert (entry["ready_seconds"], entry["figures"][0]["seed"]) == (3.5, 1)


def test_the_better_of_two_looks_at_the_machine_counts() -> None:
    other = {"ceilings": PROBE["ceilings"] | {"bytes_read": 3e10, "int8_operations": 1.0}}
    ceilings = compare.better(PROBE, other)["ceilings"]
    assert (ceilings["bytes_read"], ceilings["int8_operations"]) == (3e10, 1e12)


def test_peers_are_chosen_by_name() -> None:
    assert [peer.name for peer in catalogue.chosen("1")] == ["openvino", "llama", "vllm"]
    assert [peer.name for peer in catalogue.chosen("vllm, openvino")] == ["vllm", "openvino"]
    with pytest.raises(ArgumentTypeError, match="no peer is called 'tgi'"):
        catalogue.chosen("tgi")


def test_an_environment_is_made_once_for_the_same_requirements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(install.venv, "create", lambda folder, with_pip: folder.mkdir())
    monkeypatch.setattr(install, "_pip", lambda environment, *packages: installed.append(packages))
    peer = catalogue.PEERS["llama"]
    for requirements in (("a",), ("a",), ("b",)):
        install.install(replace(peer, requirements=requirements), tmp_path)
    assert installed == [("a",), ("b",)]


def test_an_environment_that_failed_half_way_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install.venv, "create", lambda folder, with_pip: folder.mkdir())
    peer = replace(catalogue.PEERS["llama"], requirements=("nothing",))
    failing = [sys.executable, "-c", "raise SystemExit('no such package')"]
    monkeypatch.setattr(install, "_pip", lambda *_: install._run(failing))
    with pytest.raises(RuntimeError, match="no such package"):
        install.install(peer, tmp_path)
    monkeypatch.setattr(install, "_pip", lambda *_: None)
    assert (install.install(peer, tmp_path) / install.MARK).is_file()


def test_only_what_a_package_itself_needs_is_installed_beside_torch() -> None:
    listed = ["numpy>=2", "torch==2.13.0+cpu", "torchvision; extra == 'image'", "ray; extra == 'ray'", "torchaudio"]
    assert install.needed(listed) == ["numpy>=2"]
