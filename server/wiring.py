"""The rooms' pieces joined: an engine over the loaded model, what the routes share, and the daemon that serves them.

Runs in the event loop that it will serve from. Importing it is slow, so `server.launch` does that while a model loads.
"""

from __future__ import annotations

import gc
import logging
import math
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from config.errors import ConfigError
from config.settings import SECRETS, Settings
from config.version import VERSION
from kvstore.store import KVStore
from kvstore.tier import HostTier
from models.errors import CacheError
from models.sampling import SamplingParams
from models.sampling_state import SamplingState
from scheduler.engine import Engine
from scheduler.journal import StepRecord
from scheduler.limits import Limits
from scheduler.recording import Recorder
from scheduler.request import Request
from server.app import create_app
from server.daemon import Daemon
from server.drafting import make_speculation
from server.keys import KeyRing
from server.listen import refusal, url_of
from server.loading import Model
from server.message import CLOSING
from server.metrics import Metrics
from server.protocol.checks import ServerLimits
from server.saved_cache import SavedCache
from server.startup import Phases
from server.state import ServerState
from server.structured.compiler import GrammarCompiler, GrammarLimits
from server.structured.vocabulary import Vocabulary
from server.supervisor import leave, tell
from server.tokenize import Tokenizing
from server.tools.formats import FORMATS, taught_by
from server.tracing import Tracer
from server.watchdog import Watchdog

if TYPE_CHECKING:
    from models.roofline import Roofline

BACKLOG = 2048  # connections that wait to be accepted
MODEL_LABELS = ("model", "device", "dtype", "quantization", "attention_backend", "kv_dtype")  # of the metrics

logger = logging.getLogger("octavo")


async def run(
    settings: Settings,
    model: Model,
    template: str | None,
    keys: KeyRing,
    bound: socket.socket,
    phases: Phases,
    ready: Callable[[str], None],
) -> None:
    """Show that the engine works, serve until a signal, and end. `ready` is told the URL.

    Raises ConfigError when the port has been taken meanwhile, SchedulerError when the model cannot run.
    """
    with phases.phase("ceilings"):
        ceilings = _roofline(model)
    with phases.phase("first token"):
        await first_token(model, settings)
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        raise refusal(error, settings.host, settings.port) from None
    phases.seconds["ready"] = phases.age_seconds()
    names = _names(settings, model)
    metrics = Metrics(
        VERSION,
        phases.seconds,
        {key: str(getattr(model.plan, key)) for key in MODEL_LABELS},
        ceilings,
        names[0] if settings.metrics_compat == "vllm" else None,
    )
    engine = make_engine(model, settings, metrics.on_step)
    cache = None if settings.kv_cache_dir is None else SavedCache(settings.kv_cache_dir, engine, model)
    if cache is not None:
        cache.load_at_start()
    state = _state(settings, model, template, engine, metrics, phases, cache, keys)
    engine.start()
    daemon = Daemon(create_app(state), state, settings.shutdown_timeout, settings.ssl_certfile, settings.ssl_keyfile)
    watchdog = Watchdog(engine, settings.step_timeout or math.inf)
    # What was made at start lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    watchdog.start()
    ready(url_of(bound, "http" if settings.ssl_certfile is None else "https"))
    tell("READY=1")
    await daemon.serve(sockets=[bound])
    watchdog.stop()
    if state.tracer is not None and not daemon.force_exit:
        state.tracer.close()
    if engine.busy:  # a step that does not end would keep the process
        leave(0)
    if cache is not None:
        cache.save_at_end()
    if not daemon.clean:
        leave(0)


def _roofline(model: Model) -> Roofline | None:
    """What bounds the model's steps; None, with a warning, where it cannot be measured."""
    from models.roofline import roofline

    try:
        return roofline(model.runner, model.plan.threads)
    except (CacheError, RuntimeError) as error:
        logger.warning("the machine's ceilings are not known: %s", error)
        return None


def _names(settings: Settings, model: Model) -> tuple[str, ...]:
    return settings.served_model_name or (model.plan.model,)


async def first_token(model: Model, settings: Settings) -> None:
    """Take one token through a whole engine. That engine is then thrown away, so that the one which serves starts with
    an empty cache and journal. Raises SchedulerError."""
    engine = make_engine(model, settings)
    engine.start()
    prompt = np.array(model.tokenizer.tokenizer.encode("Hello").ids or [0], np.int32)
    request = Request(id="start", prompt=prompt, params=SamplingParams(seed=0, temperature=0.0, max_tokens=1))
    [stream] = engine.submit([request])
    async for update in stream:
        if update.error is not None:
            raise update.error
    await engine.stop()


def make_engine(model: Model, settings: Settings, on_step: Callable[[StepRecord], None] | None = None) -> Engine:
    """An engine with a KV store and a sampling state of its own, over the model's only runner.

    Only one that is told `on_step` records, speculates and has the second tier."""
    plan, config = model.plan, model.runner.config
    drafting = plan.speculation
    memory = None if on_step is None else model.tier_memory
    store = KVStore(
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        max_sequences=plan.max_num_seqs * (1 if drafting is None else drafting.branches),
        max_model_len=plan.max_model_len,
        prefix_caching=settings.enable_prefix_caching,
        tier=None if memory is None else HostTier(memory, plan.page_size),
    )
    limits = Limits(
        max_model_len=plan.max_model_len,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_prefill_beside=plan.max_prefill_beside,
        max_queued_requests=settings.max_queued_requests,
        max_queued_tokens=settings.max_queued_tokens,
        max_queue_delay=settings.max_queue_delay,
        policy=settings.scheduling_policy,
        prefix_caching=settings.enable_prefix_caching,
    )
    sampling = SamplingState(plan.max_num_seqs, config.vocab_size, config.eos_token_ids)
    speculation = None
    if drafting is not None and on_step is not None:
        speculation = make_speculation(drafting, settings.speculative_acceptance, model, store, sampling)
    recorder = None
    if settings.journal_file is not None and on_step is not None:
        try:
            recorder = Recorder(settings.journal_file, store, limits)
        except OSError as error:
            raise ConfigError(f"--journal-file {settings.journal_file}: {error.strerror}") from None
    return Engine(model.runner, store, sampling, limits, on_step=on_step, recorder=recorder, speculation=speculation)


def _state(
    settings: Settings,
    model: Model,
    template: str | None,
    engine: Engine,
    metrics: Metrics,
    phases: Phases,
    cache: SavedCache | None,
    keys: KeyRing,
) -> ServerState:
    plan, tokenizer = model.plan, model.tokenizer
    config = model.runner.config
    source = template or tokenizer.chat_template
    tokenizing = Tokenizing(
        tokenizer.tokenizer,
        max_model_len=plan.max_model_len,
        chat_template=source,
        named_tokens=tokenizer.special_tokens,
    )
    vocabulary = partial(Vocabulary, tokenizer.tokenizer, tokenizing.decoding, config.vocab_size, config.eos_token_ids)
    return ServerState(
        engine=engine,
        tokenizing=tokenizing,
        grammars=GrammarCompiler(
            vocabulary,
            GrammarLimits(max_size_bytes=settings.max_grammar_size, cpu_seconds=settings.grammar_timeout),
        ),
        call_format=taught_by(source) if settings.tool_call_parser == "auto" else FORMATS[settings.tool_call_parser],
        splits_reasoning=(
            CLOSING in (source or "") if settings.reasoning_parser == "auto" else settings.reasoning_parser != "none"
        ),
        metrics=metrics,
        limits=ServerLimits(
            vocab_size=config.vocab_size,
            max_model_len=plan.max_model_len,
            max_logprobs=settings.max_logprobs,
            strict_fields=settings.strict_fields,
            priorities=settings.scheduling_policy == "priority",
        ),
        model_names=_names(settings, model),
        version=VERSION,
        info={
            "plan": plan.as_dict(),
            "settings": settings.model_dump(mode="json", exclude=set(SECRETS)),
            "startup_seconds": phases.seconds,
        },
        keys=keys,
        stall_seconds=settings.step_timeout / 2 or math.inf,
        request_timeout_seconds=settings.request_timeout,
        isolates_keys=settings.cache_isolation == "key",
        saved_cache=cache,
        open_metrics=settings.open_metrics,
        tracer=None if settings.otlp_endpoint is None else Tracer(settings.otlp_endpoint, VERSION),
        log_prompts=settings.log_prompts,
        allowed_origins=settings.allowed_origins,
        max_body_bytes=settings.max_body_size,
    )
