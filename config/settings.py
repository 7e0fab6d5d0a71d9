"""What the operator asked for: every setting of the daemon, each defined once.

One field gives the flag (`--max-model-len`), its environment twin (`OCTAVO_MAX_MODEL_LEN`), its key in the YAML file
(`max-model-len`), its help text and its validation. A flag wins over the environment, the environment over the file,
the file over the default. Names are vLLM's where it has one.

Read once at start and immutable afterwards. Knows nothing of the machine or of the model: `config.plan` does.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from config.errors import ConfigError
from config.sizes import MemoryAmount, parse_amount, parse_size
from config.speculative import SpeculativeConfig

ENV_PREFIX = "OCTAVO_"

# What people coming from other servers type, and what the same thing is called here.
_KNOWN_ELSEWHERE = {
    "context_length": "max_model_len",
    "ctx_size": "max_model_len",
    "gpu_memory_utilization": "kv_memory",
    "kv_cache_memory_bytes": "kv_memory",
    "max_running_requests": "max_num_seqs",
    "mem_fraction_static": "kv_memory",
    "model_path": "model",
    "otlp_traces_endpoint": "otlp_endpoint",
    "page_size": "block_size",
    "schedule_policy": "scheduling_policy",
}


def _split(value: object) -> object:
    """A list written as one string, as environment variables and short YAML have it: `a, b`."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Strings = Annotated[tuple[str, ...], BeforeValidator(_split)]
SizeBytes = Annotated[int, BeforeValidator(parse_size)]
Amount = Annotated[MemoryAmount, BeforeValidator(lambda value: parse_amount(value))]


def _setting(group: str, metavar: str | None, text: str, default: object, **constraints: Any) -> Any:
    """A field, and how `config.flags` shows it on the command line."""
    extra: dict[str, Any] = {"group": group, "metavar": metavar}
    return Field(default, description=text, json_schema_extra=extra, **constraints)


_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
SECRETS = frozenset({"api_key", "admin_api_key"})
_MODEL, _KV, _SCHEDULING, _HTTP, _PROCESS = "model", "KV cache", "scheduling", "HTTP", "process"


class Settings(BaseModel):
    """Every setting with its default. None means: decided by `config.plan` for this machine and model."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    model: str | None = _setting(
        _MODEL,
        "MODEL",
        "a Hugging Face directory, a hub id or a .gguf file; the embedded SmolLM2-135M-Instruct when not given",
        None,
    )
    served_model_name: Strings = _setting(
        _MODEL, "NAME", "names clients may use for the model, the first one in answers; its own name when not given", ()
    )
    max_model_len: int | None = _setting(
        _MODEL, "TOKENS", "longest context, prompt and answer together; the model's own when not given", None, gt=0
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        _MODEL, None, "arithmetic of activations and of weights that are not quantised", "auto"
    )
    quantization: Literal["auto", "none", "int8", "int4"] = _setting(
        _MODEL, None, "format of the linear weights; auto keeps the file's own", "auto"
    )
    device: Literal["auto", "cpu", "cuda"] = _setting(_MODEL, None, "where the model runs", "auto")
    threads: int | None = _setting(
        _MODEL, "N", "CPU threads that compute; the usable physical cores when not given", None, gt=0
    )
    attention_backend: Literal["auto", "torch", "cpu"] = _setting(
        _MODEL, None, "attention kernels: torch is the reference, cpu is C++", "auto"
    )
    deterministic: bool = _setting(
        _MODEL,
        None,
        "on CUDA, Triton kernels whose result does not depend on the batch; on the CPU all are such",
        False,
    )
    chat_template: str | None = _setting(
        _MODEL, "FILE", "a Jinja file to use in place of the model's own chat template", None
    )

    kv_memory: Amount | None = _setting(
        _KV,
        "SIZE",
        "memory for keys and values: 2GiB, 512MiB, or 70% of what is free after the weights; 25% of that on the CPU "
        "and 85% on CUDA when not given",
        None,
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = _setting(
        _KV,
        None,
        "type of stored keys and values; auto is int8 beside quantised weights on the CPU, else the dtype",
        "auto",
    )
    block_size: int = _setting(_KV, "TOKENS", "tokens in a page of the KV cache", 16, ge=1, le=256)
    enable_prefix_caching: bool = _setting(_KV, None, "reuse keys and values of prompts that begin alike", True)
    kv_offload: SizeBytes = _setting(
        _KV,
        "SIZE",
        "second tier for evicted pages: pinned memory on CUDA, a file in the cache folder on the CPU; 0 for none",
        0,
        ge=0,
    )
    kv_cache_dir: Path | None = _setting(
        _KV, "FOLDER", "where the prefix cache is kept when the daemon ends, and found when it starts", None
    )
    cache_isolation: Literal["salt", "key"] = _setting(
        _KV, None, "who shares prefixes: all with the same cache_salt, or only those with the same API key too", "salt"
    )

    max_num_seqs: int | None = _setting(
        _SCHEDULING, "N", "sequences running at once; 128 on the CPU and 256 on CUDA when not given", None, gt=0
    )
    max_num_batched_tokens: int | None = _setting(
        _SCHEDULING, "TOKENS", "tokens in one step; 512 on the CPU and 8192 on CUDA when not given", None, gt=0
    )
    max_queued_requests: int = _setting(
        _SCHEDULING, "N", "sequences that may wait for a place; further ones are answered 429", 1024, ge=0
    )
    max_queued_tokens: int = _setting(_SCHEDULING, "TOKENS", "prompt tokens that may wait for a place", 1 << 20, gt=0)
    max_queue_delay: float | None = _setting(
        _SCHEDULING,
        "SECONDS",
        "longest expected wait for a place before a request is answered 429, inf for any; as long as a first token "
        "takes from there on when not given",
        None,
        ge=0,
    )
    scheduling_policy: Literal["fcfs", "priority", "prefix"] = _setting(
        _SCHEDULING,
        None,
        "order of waiting requests: by arrival, by their `priority` field, or by how much of them is cached",
        "fcfs",
    )
    speculative_config: SpeculativeConfig | None = _setting(
        _SCHEDULING,
        "JSON",
        'draft tokens ahead and verify them, or {"method": "none"}; when not given, {"method": "ngram"} where that '
        "changes no bit",
        None,
    )
    speculative_acceptance: Literal["keyed", "rejection"] = _setting(
        _SCHEDULING,
        None,
        "which drafts count: those that the undrafted run would have sampled, or by rejection sampling",
        "keyed",
    )

    host: str = _setting(_HTTP, "HOST", "address to listen on; 0.0.0.0 for all", "127.0.0.1")
    port: int = _setting(_HTTP, "PORT", "port to listen on; 0 takes a free one", 8000, ge=0, le=65535)
    api_key: Strings = _setting(_HTTP, "KEY", "keys that clients must present; none when not given", (), repr=False)
    admin_api_key: Strings = _setting(
        _HTTP,
        "KEY",
        "keys for /v1/cache/reset, save and load, and, when there are any, for /debug; they open all else too",
        (),
        repr=False,
    )
    api_key_file: Path | None = _setting(
        _HTTP, "FILE", "named keys with their limits, from `octavo keys new`; read again on SIGHUP", None
    )
    ssl_certfile: Path | None = _setting(_HTTP, "FILE", "serve HTTPS with this PEM certificate chain", None)
    ssl_keyfile: Path | None = _setting(_HTTP, "FILE", "its private key, when not in the same file", None)
    allowed_origins: Strings = _setting(
        _HTTP, "ORIGIN", "web origins whose pages may call, such as https://app.example, or *; none when not given", ()
    )
    open_metrics: bool = _setting(_HTTP, None, "let /metrics be read without an API key", False)
    metrics_compat: Literal["none", "vllm"] = _setting(
        _HTTP, None, "give /metrics vLLM's names too, for dashboards and gateways made for it", "none"
    )
    max_logprobs: int = _setting(_HTTP, "N", "most alternatives a request may ask for beside each token", 20, ge=0)
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "pythonic"] = _setting(
        _HTTP, None, "how the model writes calls of functions; auto is what its chat template speaks of", "auto"
    )
    reasoning_parser: Literal["auto", "none", "think", "qwen3", "deepseek_r1"] = _setting(
        _HTTP,
        None,
        "tell <think> from the answer, as all but none do; auto does for a chat template that speaks of it",
        "auto",
    )
    grammar_timeout: int = _setting(
        _HTTP, "SECONDS", "processor time that compiling one JSON schema or grammar may take", 3, ge=1, le=60
    )
    max_grammar_size: SizeBytes = _setting(
        _HTTP, "SIZE", "largest JSON schema or grammar of a request, its functions together", 256 << 10, gt=0
    )
    strict_fields: bool = _setting(
        _HTTP, None, "refuse every unknown request field, not only those that look like a typo", False
    )
    max_body_size: SizeBytes = _setting(_HTTP, "SIZE", "largest request body", 16 << 20, gt=0)
    request_timeout: float | None = _setting(
        _HTTP, "SECONDS", "longest a request may take, queue included; no limit when not given", None, gt=0
    )
    shutdown_timeout: float = _setting(
        _HTTP, "SECONDS", "how long running requests may go on after SIGTERM or SIGINT", 30.0, ge=0
    )

    step_timeout: float = _setting(
        _PROCESS,
        "SECONDS",
        "without a finished step for half of this while there is work /ready says no; for all of it the process logs "
        "every thread's stack and exits with 1; 0 for never",
        120.0,
        ge=0,
    )
    cache_dir: Path | None = _setting(
        _PROCESS, "FOLDER", "where compiled kernels and converted files are kept; the user's cache when not given", None
    )
    journal_file: Path | None = _setting(
        _PROCESS, "FILE", "record every scheduling decision, prompts included, for `octavo replay`", None
    )
    config: Path | None = _setting(_PROCESS, "FILE", "a YAML file with any of these settings", None)
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        _PROCESS, None, "least severe messages shown", "info"
    )
    log_format: Literal["text", "json"] = _setting(
        _PROCESS, None, "how messages are written to stderr: for people, or an object a line", "text"
    )
    log_prompts: bool = _setting(_PROCESS, None, "log what clients ask, which is left out otherwise", False)
    otlp_endpoint: str | None = _setting(
        _PROCESS, "URL", "OpenTelemetry collector that gets a trace of each request: http://localhost:4318", None
    )

    @field_validator("api_key", "admin_api_key", "served_model_name")
    @classmethod
    def _no_empty_string(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if not all(values):
            raise ValueError("must not be empty")
        return values

    @field_validator("allowed_origins")
    @classmethod
    def _as_browsers_write_them(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        if not all(_ORIGIN.fullmatch(value) for value in values):
            raise ValueError("must be * or such as https://app.example: scheme and host in lower case, no path")
        return values

    @field_validator("otlp_endpoint")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError("must be a URL such as http://localhost:4318")
        return value

    @classmethod
    def load(cls, flags: Mapping[str, object], environment: Mapping[str, str]) -> Self:
        """Merge the sources and validate. `flags` holds only those given, by field name.

        Raises ConfigError, with one line that names the source, for the first thing that is wrong.
        """
        env = _read_environment(environment)
        path = flags.get("config") or env.get("config")
        file = _read_file(Path(str(path))) if path else {}
        values: dict[str, object] = {}
        origins: dict[str, str] = {}
        for source, given in ((f"in {path}", file), ("from the environment", env), ("", flags)):
            values |= given
            origins |= dict.fromkeys(given, source)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_explain(error, origins)) from None


def flag_of(name: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def suggest(name: str) -> str | None:
    """The setting somebody probably meant by `name`, given as a field, a flag or a key."""
    field = name.lstrip("-").replace("-", "_").lower()
    if field in _KNOWN_ELSEWHERE:
        return _KNOWN_ELSEWHERE[field]
    close = difflib.get_close_matches(field, Settings.model_fields, n=1, cutoff=0.7)
    return close[0] if close else None


def _read_environment(environment: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for variable, value in environment.items():
        if not variable.startswith(ENV_PREFIX):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in Settings.model_fields:
            meant = suggest(name)
            hint = f"did you mean {ENV_PREFIX}{meant.upper()}?" if meant else "`octavo serve --help` lists the settings"
            raise ConfigError(f"unknown environment variable {variable}: {hint}")
        values[name] = value
    return values


def _read_file(path: Path) -> dict[str, object]:
    import yaml  # only when a file is given

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {(error.strerror or str(error)).lower()}") from None
    except (yaml.YAMLError, ValueError) as error:  # a ValueError is a date or a number that is none
        raise ConfigError(f"--config {path}: is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must hold `setting: value` lines, such as `port: 8000`")
    values: dict[str, object] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in Settings.model_fields or name == "config":
            meant = suggest(name)
            hint = f"did you mean {meant.replace('_', '-')}?" if meant else "`octavo serve --help` lists the settings"
            raise ConfigError(f"--config {path}: unknown key {key}: {hint}")
        values[name] = value
    return values


def _explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """The first of pydantic's complaints as one line: `--port must be ... , not 'abc' (from the environment)`."""
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0])
    within = " ".join(map(str, first["loc"][1:]))
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ").partition(", unable to")[0]
    message = message if message.startswith("must") else f"must be {message[0].lower()}{message[1:]}"
    # A key must not end up in a log.
    got = "" if name in SECRETS else f", not {first['input']!r}"
    origin = f" ({origins[name]})" if origins.get(name) else ""
    return f"{flag_of(name)}{within and ' ' + within} {message}{got}{origin}"
