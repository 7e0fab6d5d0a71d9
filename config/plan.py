"""What the settings mean on this hardware with this model: the `Plan`.

Every number that was decided comes with its reason, printed at start and served by `GET /info`. `resolve` is a pure
function of plain numbers, so that any machine can be planned for on any other. Knows no tensors and no other room.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from config.drafting import DraftPlan, choose_speculation, plan_drafting
from config.errors import ConfigError
from config.facts import ModelFacts
from config.hardware import Hardware
from config.settings import Settings
from config.sizes import format_size
from config.speculative import SpeculativeConfig

# Free memory after the weights that the KV pool takes when nothing is said. A CPU's memory belongs to other programs
# too; a GPU is usually taken whole, less what activations and graphs need.
_CPU_SHARE, _CUDA_SHARE = 0.25, 0.85
_CPU_TILE = 16  # tokens
# Rows of prompts in a step beside sequences that decode. More hold up every stream for a tenth of a second at once; how
# many of such steps a stream bears is the scheduler's to say.
_CPU_PREFILL_BESIDE = 192
_AS_ASKED = "as asked"
# A context shortened to fit the memory is not worth serving below this.
_SHORTEST_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run. Invariant: `num_pages * page_size >= max_model_len`, so that one full context always fits."""

    model: str
    device: str  # "cpu" or "cuda"
    dtype: str
    quantization: str  # of the linear weights: "none", "stored" (as the file has them), "int8" or "int4"
    attention_backend: str
    threads: int
    page_size: int  # tokens
    kv_dtype: str
    page_bytes: int
    num_pages: int
    offload_pages: int  # of the second tier
    max_model_len: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_beside: int  # of these, of prompts in a step in which others decode
    weight_bytes: int  # an estimate
    speculation: SpeculativeConfig | None = None
    drafting: DraftPlan | None = None  # its model, where it has one
    reasons: dict[str, str] = field(default_factory=dict)  # by field name

    @property
    def kv_bytes(self) -> int:
        """The KV pool's size."""
        return self.num_pages * self.page_bytes

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, value, why) for people."""
        pool = f"{format_size(self.kv_bytes)}: {self.num_pages} pages of {self.page_size} tokens, {self.kv_dtype}"
        tier = f"{format_size(self.offload_pages * self.page_bytes)}: {self.offload_pages} pages"
        drafts = f"{self.drafting.model}, {self.drafting.quantization}" if self.drafting else None
        step = f"{self.max_num_batched_tokens} tokens"
        if self.max_prefill_beside < self.max_num_batched_tokens:
            step += f", {self.max_prefill_beside} of prompts beside sequences that decode"
        method = "none" if self.speculation is None else self.speculation.method
        lines: list[tuple[str, str, str | None]] = [
            ("model", "model", self.model),
            ("device", "device", self.device),
            ("dtype", "dtype", self.dtype),
            ("weights", "quantization", self.quantization),
            ("attention", "attention_backend", self.attention_backend),
            ("threads", "threads", str(self.threads)),
            ("KV pool", "num_pages", pool),
            ("context", "max_model_len", f"{self.max_model_len} tokens"),
            ("at once", "max_num_seqs", f"{self.max_num_seqs} sequences"),
            ("step", "max_num_batched_tokens", step),
            ("second tier", "offload_pages", tier if self.offload_pages else None),
            ("speculation", "speculation", method if "speculation" in self.reasons else None),
            ("drafting", "drafting", drafts),
        ]
        return [(label, value, self.reasons.get(name, "")) for label, name, value in lines if value is not None]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        speculation = None if self.speculation is None else self.speculation.model_dump(mode="json")
        return asdict(self) | {"kv_bytes": self.kv_bytes, "speculation": speculation}


def resolve(settings: Settings, hardware: Hardware, facts: ModelFacts, draft: ModelFacts | None = None) -> Plan:
    """Decide everything that `settings` leaves open; `draft` is a second model that drafts. Raises ConfigError when it
    cannot work."""
    reasons = {"model": f"{facts.parameters / 1e6:,.0f} M parameters, {facts.weights}"}
    if not settings.enable_prefix_caching and (settings.kv_offload or settings.kv_cache_dir):
        raise ConfigError("--kv-offload and --kv-cache-dir keep cached prefixes: leave out --no-enable-prefix-caching")
    if settings.journal_file and settings.kv_cache_dir:
        raise ConfigError("--journal-file records from an empty cache on: leave out --kv-cache-dir")
    if settings.cache_isolation == "key" and not settings.api_key:
        raise ConfigError("--cache-isolation key tells callers apart by --api-key: give each of them one")
    device, reasons["device"] = _device(settings, hardware)
    dtype, reasons["dtype"] = _dtype(settings, hardware, device)
    backend, reasons["attention_backend"] = _attention_backend(
        settings, hardware, device, {dtype, settings.kv_cache_dtype}
    )
    quantization, reasons["quantization"] = _quantization(settings, facts, backend)
    kv_dtype, reasons["kv_dtype"] = _kv_dtype(settings, hardware, backend, quantization, dtype)
    threads, reasons["threads"] = _threads(settings, hardware)

    token_bytes = facts.kv_token_bytes(kv_dtype)
    page_bytes = token_bytes * settings.block_size
    weight_bytes = facts.weight_bytes(quantization, dtype)
    free = hardware.cuda[0].free_bytes if device == "cuda" else hardware.free_bytes
    if weight_bytes > free:
        raise ConfigError(
            f"the weights need {format_size(weight_bytes)} and {format_size(free)} are free: "
            "use a smaller model, or --quantization int8 or int4"
        )

    free -= weight_bytes
    speculation, why = choose_speculation(settings, backend)
    if why:
        reasons["speculation"] = why
    drafting = plan_drafting(
        speculation, facts, draft, quantization=quantization, dtype=dtype, kv_dtype=kv_dtype,
        backend=backend, page_size=settings.block_size, free=free,
    )  # fmt: skip
    if drafting is not None:
        free -= drafting.total_bytes
        reasons["drafting"] = drafting.sizes()

    budget, seqs, reasons["max_num_batched_tokens"], reasons["max_num_seqs"] = _step(settings, device)
    wanted, asked = _wanted_context(settings, facts)
    most = seqs * -(-wanted // settings.block_size)
    num_pages, reasons["num_pages"] = _pool(settings, device, free, page_bytes, most)
    max_model_len, reasons["max_model_len"] = _context(wanted, asked, num_pages, settings.block_size, token_bytes)
    return Plan(
        model=facts.name,
        device=device,
        dtype=dtype,
        quantization=quantization,
        attention_backend=backend,
        threads=threads,
        page_size=settings.block_size,
        kv_dtype=kv_dtype,
        page_bytes=page_bytes,
        num_pages=num_pages,
        offload_pages=settings.kv_offload // page_bytes,
        max_model_len=max_model_len,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        max_prefill_beside=min(budget, _CPU_PREFILL_BESIDE) if device == "cpu" else budget,
        weight_bytes=weight_bytes,
        speculation=speculation,
        drafting=drafting,
        reasons=reasons,
    )


def resolve_without_kernels(
    settings: Settings, hardware: Hardware, facts: ModelFacts, draft: ModelFacts | None = None
) -> Plan:
    """The plan where the kernels that `resolve` counted on could not be had. Raises ConfigError where that is of no
    use, or not as asked."""
    plan = resolve(settings.model_copy(update={"attention_backend": "torch"}), hardware, facts, draft)
    return replace(plan, reasons=plan.reasons | {"attention_backend": "the CPU kernels could not be built"})


def _device(settings: Settings, hardware: Hardware) -> tuple[str, str]:
    gpu = hardware.cuda[0] if hardware.cuda else None
    if settings.device == "cuda" and gpu is None:
        raise ConfigError("--device cuda: torch sees no CUDA device; check the driver, or use --device cpu")
    if settings.device == "cpu" or gpu is None:
        return "cpu", hardware.cpu + ("" if settings.device == "cpu" else ", no CUDA device found")
    return "cuda", f"{gpu.name}, {format_size(gpu.memory_bytes)}"


def _dtype(settings: Settings, hardware: Hardware, device: str) -> tuple[str, str]:
    if settings.dtype != "auto":
        return settings.dtype, _AS_ASKED
    if device == "cuda":
        modern = hardware.cuda[0].capability >= (8, 0)
        return ("bfloat16", "the GPU computes in it") if modern else ("float16", "the GPU is older than bfloat16")
    for name in ("amx_bf16", "avx512_bf16", "bf16"):
        if name in hardware.isa:
            return "bfloat16", f"the processor has {name}"
    return "float32", "the processor has no bfloat16 arithmetic"


def _attention_backend(settings: Settings, hardware: Hardware, device: str, dtypes: set[str]) -> tuple[str, str]:
    if settings.attention_backend == "cpu" and device == "cuda":
        raise ConfigError("--attention-backend cpu needs --device cpu; on CUDA use torch")
    if settings.attention_backend == "cpu" and "float16" in dtypes:
        raise ConfigError("--attention-backend cpu has no float16: use --dtype bfloat16 or --attention-backend torch")
    if settings.deterministic and device == "cuda":
        if settings.attention_backend == "torch":
            raise ConfigError("--attention-backend torch depends on the batch on CUDA: not with --deterministic")
        if not hardware.triton:
            raise ConfigError("--deterministic needs triton on CUDA, and there is none: pip install triton")
        return "triton", "--deterministic: matrix products, norms and attention that do not depend on the batch"
    if settings.attention_backend != "auto":
        backend, reason = settings.attention_backend, _AS_ASKED
    elif device == "cuda":
        backend, reason = "torch", "runs on any device"
    elif "float16" in dtypes:
        backend, reason = "torch", "the C++ kernels have no float16"
    else:
        backend, reason = "cpu", "C++ kernels for this processor"
    if backend == "cpu" and settings.block_size % _CPU_TILE:
        raise ConfigError(f"--block-size {settings.block_size} is not a multiple of {_CPU_TILE}, the CPU kernels' tile")
    return backend, reason


def _quantization(settings: Settings, facts: ModelFacts, backend: str) -> tuple[str, str]:
    if settings.quantization == "auto":
        if facts.weight_bits is None:
            return "none", "the file is not quantised"
        return ("stored", "as the file has them") if backend == "cpu" else ("none", f"dequantised from {facts.weights}")
    if settings.quantization != "none" and backend != "cpu":
        raise ConfigError(f"--quantization {settings.quantization} needs the CPU kernels: use none with torch")
    return settings.quantization, _AS_ASKED


def _kv_dtype(settings: Settings, hardware: Hardware, backend: str, quantization: str, dtype: str) -> tuple[str, str]:
    if settings.kv_cache_dtype == "int8" and backend != "cpu":
        raise ConfigError("--kv-cache-dtype int8 needs the CPU kernels: use auto with torch")
    if settings.kv_cache_dtype != "auto":
        return settings.kv_cache_dtype, _AS_ASKED
    # Tile registers multiply bfloat16 faster than the vector units do int8.
    if backend == "cpu" and quantization != "none" and "amx_bf16" not in hardware.isa:
        return "int8", "as few bits as the weights' arithmetic"
    return dtype, "as the model's arithmetic"


def _threads(settings: Settings, hardware: Hardware) -> tuple[int, str]:
    if settings.threads is not None:
        return settings.threads, f"as asked; {hardware.cores} physical cores usable"
    return hardware.cores, "physical cores usable"


def _step(settings: Settings, device: str) -> tuple[int, int, str, str]:
    """Tokens in a step, sequences at once, and the reason of each."""
    budget = settings.max_num_batched_tokens or (8192 if device == "cuda" else 512)
    seqs = settings.max_num_seqs or min(256 if device == "cuda" else 128, budget)
    if seqs > budget:
        raise ConfigError(
            f"--max-num-seqs {seqs} sequences take a token each from a step of {budget}: "
            f"raise --max-num-batched-tokens to {seqs} or more"
        )
    default = f"default on {'CUDA' if device == 'cuda' else 'the CPU'}"
    return (
        budget,
        seqs,
        _AS_ASKED if settings.max_num_batched_tokens else f"{default}: longer steps hold up streams",
        _AS_ASKED if settings.max_num_seqs else default,
    )


def _wanted_context(settings: Settings, facts: ModelFacts) -> tuple[int, bool]:
    """The context to serve if the pool allows it, in tokens, and whether the operator asked for it."""
    if settings.max_model_len is None:
        return facts.max_position, False
    if settings.max_model_len > facts.max_position:
        raise ConfigError(
            f"--max-model-len {settings.max_model_len} is longer than the model's context: "
            f"use {facts.max_position} or less"
        )
    return settings.max_model_len, True


def _pool(settings: Settings, device: str, free: int, page_bytes: int, most: int) -> tuple[int, str]:
    """Pages of the KV pool. `free` bytes are left after the weights; more than `most` pages could not be used."""
    if settings.kv_memory is not None:
        size = settings.kv_memory.of(free)
        if size > free:
            raise ConfigError(
                f"--kv-memory {settings.kv_memory} is more than the {format_size(free)} left after the weights: "
                f"use {free >> 20}MiB or less"
            )
        if size < page_bytes:
            raise ConfigError(
                f"--kv-memory {settings.kv_memory} does not hold one page of {settings.block_size} tokens "
                f"({format_size(page_bytes)}): use more, or a smaller --block-size"
            )
        return size // page_bytes, f"--kv-memory {settings.kv_memory}"
    share = _CUDA_SHARE if device == "cuda" else _CPU_SHARE
    pages = int(free * share) // page_bytes
    if pages < 1:
        raise ConfigError(
            f"{format_size(free)} left after the weights do not hold one page of KV cache: use a smaller model"
        )
    if pages >= most:
        return most, "as much as every sequence at its longest needs"
    return pages, f"{share:.0%} of the {format_size(free)} left after the weights"


def _context(wanted: int, asked: bool, pages: int, page_size: int, token_bytes: int) -> tuple[int, str]:
    """The longest context, at most `wanted`, that the pool holds; ConfigError when that is too short to serve."""
    held = pages * page_size
    if wanted <= held:
        return wanted, _AS_ASKED if asked else "the model's own"
    need = -(-wanted // page_size) * page_size * token_bytes
    if asked or held < _SHORTEST_CONTEXT:
        raise ConfigError(
            f"the KV pool holds {held} tokens, less than one context of {wanted}: "
            f"raise --kv-memory to {_up(need)}, or lower --max-model-len to {held}"
        )
    return held, f"what the KV pool holds; the model's {wanted} need --kv-memory {_up(need)}"


def _up(size_bytes: int) -> str:
    """`size_bytes` in whole MiB, rounded up, as the flag takes it."""
    return f"{-(-size_bytes // (1 << 20))}MiB"
