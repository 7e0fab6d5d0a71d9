"""The command line as a process: what a mistake looks like, and how soon."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from scheduler.limits import Limits
from server.cli import main

ROOT = Path(__file__).parents[2]
SECONDS = 5.0  # far more than it takes, on a busy machine too; loading a model takes longer than the mistakes may


def octavo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.cli", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def refusal(*arguments: str, **environment: str) -> str:
    """The one line of a start that fails."""
    result = octavo("serve", "--port", "0", *arguments, **environment)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    line = result.stderr.removesuffix("\n")
    assert "\n" not in line
    assert line.startswith("octavo: error: ")
    return line.removeprefix("octavo: error: ")


def test_a_flag_that_does_not_exist_is_one_line() -> None:
    assert refusal("--prot", "1") == "unknown flag --prot: did you mean --port?"


def test_an_environment_variable_that_does_not_exist_is_one_line() -> None:
    assert "did you mean OCTAVO_PORT?" in refusal(OCTAVO_PRT="1")


def test_a_model_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    assert "does not exist" in refusal(str(tmp_path / "model.gguf"))


def test_a_file_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF and then nothing")
    assert str(file) in refusal(str(file))


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert refusal("--port", str(port)) == (
            f"port {port} on 127.0.0.1 is in use: stop what listens there, or choose another --port"
        )


def test_an_address_of_another_machine_is_one_line() -> None:
    assert refusal("--host", "192.0.2.1").startswith("--host 192.0.2.1 is not an address of this machine")


def test_a_context_longer_than_the_models_is_one_line() -> None:
    assert refusal("--max-model-len", "100000") == (
        "--max-model-len 100000 is longer than the model's context: use 8192 or less"
    )


def test_too_little_memory_for_a_page_is_one_line() -> None:
    assert "does not hold one page of 16 tokens" in refusal("--kv-memory", "10KiB")


def test_too_little_memory_for_a_context_is_one_line() -> None:
    message = refusal("--kv-memory", "40MiB", "--max-model-len", "8192")
    assert "less than one context of 8192: raise --kv-memory to" in message


def test_a_chat_template_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert "cannot be read" in refusal("--chat-template", str(tmp_path / "none.jinja"))


@pytest.mark.parametrize("arguments", [["srve"], [], ["serve", "--port"]])
def test_a_command_that_makes_no_sense_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("octavo: error: ")
    assert printed.err.count("\n") == 1


def test_what_keeps_a_daemon_from_being_asked_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show = ["cache", "show", "--url", "http://127.0.0.1:1"]
    assert main(show) == 1
    assert capsys.readouterr().err == "octavo: no daemon answers at http://127.0.0.1:1: Connection refused\n"
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("nonsense")
    for file in tmp_path / "none.pem", tmp_path, nonsense:
        assert main([*show, "--cafile", str(file)]) == 2
        assert capsys.readouterr().err == f"octavo: error: --cafile {file} is no file of certificates in PEM form\n"


def test_a_replay_that_nobody_reads_on_ends_without_a_traceback(tmp_path: Path) -> None:
    limits = asdict(Limits(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=16))
    store = {"num_pages": 2, "page_size": 16, "max_sequences": 1}
    journal = tmp_path / "journal"
    journal.write_text(json.dumps({"kind": "start", "limits": limits, "store": store, "slots": 0}) + "\n")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "server.cli", "replay", str(journal)]
    result = subprocess.run(command, cwd=ROOT, env={}, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, "")


def test_help_and_version_are_there_at_once() -> None:
    began = time.monotonic()
    help_text, version = octavo("serve", "--help"), octavo("--version")
    assert time.monotonic() - began < SECONDS
    assert (help_text.returncode, version.returncode) == (0, 0)
    assert "--max-model-len TOKENS" in help_text.stdout
    assert version.stdout.startswith("octavo ")
