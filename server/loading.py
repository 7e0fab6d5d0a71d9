"""From settings to a model that can run: open it, plan for it, load weights and tokenizer side by side.

Runs in the main thread at start, before there is an event loop; the loads have threads of their own. What is heavy
to import is imported here while the main thread has nothing better to do.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from config.errors import ConfigError
from config.facts import ModelFacts
from config.hardware import Hardware
from config.plan import Plan, resolve, resolve_without_kernels
from config.settings import Settings
from config.sizes import format_size
from kvstore.tier import U8, file_memory
from models.loading.layout import tensor_shapes
from models.loading.source import resolve_source
from models.loading.stored import FLOATS
from server.drafting import attach, check_vocabulary, open_drafting
from server.startup import Phases

if TYPE_CHECKING:
    from models.base import Runner
    from models.loading.checkpoint import Checkpoint
    from models.loading.tokenizer import LoadedTokenizer


logger = logging.getLogger("octavo")


@dataclass(frozen=True, slots=True)
class Model:
    """A model ready to run steps, its KV memory allocated."""

    plan: Plan
    runner: Runner
    tokenizer: LoadedTokenizer
    identity: Mapping[str, str]  # what the bits of a page depend on
    tier_memory: U8 | None  # [offload_pages, page_bytes]
    drafter: Runner | None = None  # what drafts, its pages its own or the runner's


def load_model(
    settings: Settings, phases: Phases, planned: Callable[[Plan], None], meanwhile: Callable[[], None]
) -> Model:
    """Load what `settings` ask for. Raises ConfigError or ModelError.

    `planned` is told the plan before anything slow begins; `meanwhile` is called while weights and tokenizer load.
    """
    with phases.phase("open model"):
        from models.loading.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(resolve_source(settings.model))
        drafting = open_drafting(settings, checkpoint)
        facts, draft_facts = facts_of(checkpoint), None if drafting is None else facts_of(drafting)
        hardware = Hardware.detect(settings.device)
        plan = resolve(settings, hardware, facts, draft_facts)
    planned(plan)
    with ThreadPoolExecutor(3, thread_name_prefix="load") as threads:
        kernels = threads.submit(_load_kernels, plan, phases)
        weights = threads.submit(_load_runners, checkpoint, drafting, plan, phases, kernels)
        tokenizing = threads.submit(_load_tokenizer, checkpoint, phases)
        meanwhile()
        tokenizer = tokenizing.result()
        if drafting is not None:
            check_vocabulary(tokenizer, drafting)
        runner, drafter = weights.result()
    from models.cpu.runner import CpuRunner

    if plan.attention_backend == "cpu" and not isinstance(runner, CpuRunner):
        was, plan = plan, resolve_without_kernels(settings, hardware, facts, draft_facts)
        _tell_change(was, plan)
    # What ends a text is known to the tokenizer's files too, and the scheduler goes by the runner's numbers.
    runner.config = replace(runner.config, eos_token_ids=tokenizer.eos_token_ids)
    with phases.phase("KV pool"):
        runner.allocate(plan.num_pages, plan.page_size)
        memory = _tier_memory(plan) if plan.offload_pages else None
        if drafter is not None:
            attach(plan, runner, drafter)
    from models.build import build_key

    sizes = (plan.page_size, runner.page_bytes(plan.page_size))
    forms = (plan.quantization, plan.dtype, plan.kv_dtype, plan.attention_backend, *sizes)
    identity = {"model": checkpoint.fingerprint, "format": " ".join(map(str, forms)), "build": build_key(runner)}
    return Model(plan, runner, tokenizer, identity, memory, drafter)


def _tell_change(was: Plan, plan: Plan) -> None:
    """The plan that was printed no longer holds."""
    before, now = ({label: value for label, value, _ in one.rows()} for one in (was, plan))
    changed = (f"{label} {now.get(label, 'none')}" for label, value in before.items() if now.get(label) != value)
    logger.warning("the plan without the CPU kernels: %s", "; ".join(changed))


def _tier_memory(plan: Plan) -> U8:
    if plan.device == "cuda":
        import torch

        pinned: U8 = torch.empty((plan.offload_pages, plan.page_bytes), dtype=torch.uint8, pin_memory=True).numpy()
        return pinned
    from models.loading.cache import cache_root

    folder = cache_root() / "pages"
    try:
        return file_memory(plan.offload_pages, plan.page_bytes, folder)
    except OSError as error:
        size = format_size(plan.offload_pages * plan.page_bytes)
        reason = error.strerror or error
        raise ConfigError(f"--kv-offload: no file of {size} in {folder} ({reason}): use less, or --cache-dir") from None


def facts_of(checkpoint: Checkpoint) -> ModelFacts:
    """What the plan has to know of an opened model."""
    config = checkpoint.config
    shapes = tensor_shapes(config)
    numbers = Counter[str]()
    for name, shape in shapes.items():
        numbers[checkpoint.stored_kind(name)] += math.prod(shape)
    kind, _ = numbers.most_common(1)[0]
    return ModelFacts(
        name=checkpoint.name,
        weights=kind,
        weight_bits=None if kind in FLOATS else 4 if kind.startswith("Q4") else 8,
        parameters=numbers.total(),
        max_position=config.max_position,
        kv_numbers_per_token=config.num_layers * 2 * config.num_kv_heads * config.head_dim,
        head_dim=config.head_dim,
    )


def _load_kernels(plan: Plan, phases: Phases) -> None:
    """Compile the kernels, or find them compiled. Without them `build_runner` says so and goes on."""
    if plan.attention_backend != "cpu":
        return
    from models.cpu.library import load_library
    from models.errors import KernelError

    with phases.phase("kernels"), suppress(KernelError):
        load_library()


def _load_runners(
    checkpoint: Checkpoint, drafting: Checkpoint | None, plan: Plan, phases: Phases, kernels: Future[None]
) -> tuple[Runner, Runner | None]:
    """The model's runner, and that of the model which drafts."""
    kernels.result()
    from models.build import build_runner

    load = partial(
        build_runner,
        device=plan.device,
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        attention_backend=plan.attention_backend,
        threads=plan.threads,
        max_model_len=plan.max_model_len,
    )
    with phases.phase("weights"):
        runner = load(checkpoint, quantization=plan.quantization)
    if plan.drafting is None:
        return runner, None
    with phases.phase("drafter"):
        return runner, load(drafting or checkpoint, quantization=plan.drafting.quantization)


def _load_tokenizer(checkpoint: Checkpoint, phases: Phases) -> LoadedTokenizer:
    with phases.phase("tokenizer"):
        from models.loading.tokenizer import load_tokenizer

        return load_tokenizer(checkpoint)
