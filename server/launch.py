"""The start of the daemon, phase by phase.

    settings -> port -> model opened -> plan -> weights | tokenizer | imports -> KV pool -> first token -> listening

Mistakes of the operator are found in the first four, before anything slow is imported or loaded. Runs in the main
thread; ends in the event loop of `server.wiring`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from threading import Thread

from rich.console import Console
from rich.table import Table

from config.errors import ConfigError
from config.plan import Plan
from config.settings import Settings
from config.version import VERSION
from server.keys import KeyRing
from server.listen import bind, check_tls
from server.loading import load_model
from server.logs import configure
from server.startup import Phases
from server.tracing import check_sdk

logger = logging.getLogger("octavo")

# How long a thread may keep the interpreter's lock while another waits for it. The default of 5 ms is what the event
# loop would wait for each time the model's thread prepares a step in Python; a decode step takes about that long.
SWITCH_INTERVAL_SECONDS = 0.0005
MAX_DESCRIPTORS = 1 << 16  # more connections than that are a matter of memory


def serve(settings: Settings, began: float) -> int:
    """Serve until a signal ends it; the exit code. `began` is when the command started, on `time.perf_counter`.

    Raises ConfigError or ModelError for what keeps it from starting.
    """
    # Until there is something to end well, signals end the process at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    configure(settings.log_level, settings.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    _raise_descriptor_limit()
    if settings.cache_dir is not None:
        os.environ["OCTAVO_CACHE_DIR"] = str(settings.cache_dir)

    console = Console(highlight=False, quiet=settings.log_format == "json")
    phases = Phases(began)
    phases.note("settings", phases.age_seconds())
    template = _chat_template(settings)
    keys = KeyRing(settings.api_key, settings.admin_api_key, settings.api_key_file)
    if settings.api_key_file is not None:
        signal.signal(signal.SIGHUP, lambda *_: Thread(target=_reload, args=(keys,), name="keys").start())
    if settings.otlp_endpoint is not None:
        check_sdk()
    check_tls(settings.ssl_certfile, settings.ssl_keyfile)
    bound = bind(settings.host, settings.port)

    def planned(plan: Plan) -> None:
        # Nothing is printed before: a mistake found until here is one line and no more.
        console.print(f"octavo {VERSION}", style="bold")
        console.print(_table(plan))
        phases.show(lambda line: console.print(f"  {line}", style="dim"))

    model = load_model(settings, phases, planned, lambda: _import_rest(phases))

    import uvloop

    from server.wiring import run

    def ready(url: str) -> None:
        line = f"ready in {phases.seconds['ready']:.1f} s on {url}"
        console.print(line, style="bold")
        if console.quiet:
            logger.info(line, extra={"fields": {"url": url, "startup_seconds": phases.seconds}})

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(settings, model, template, keys, bound, phases, ready))
    return 0


def _raise_descriptor_limit() -> None:
    """Each connection takes one; a shell's soft limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _reload(keys: KeyRing) -> None:
    """On SIGHUP, in a thread: neither the start nor the event loop waits for it."""
    try:
        logger.info("the API keys were read again: %d", keys.reload())
    except ConfigError as error:
        logger.error("the API keys stay as they were: %s", error)


def _import_rest(phases: Phases) -> None:
    """Import what only the running daemon needs, while the model loads."""
    with phases.phase("imports"):
        import uvloop  # noqa: F401

        import server.wiring  # noqa: F401


def _chat_template(settings: Settings) -> str | None:
    if settings.chat_template is None:
        return None
    try:
        return Path(settings.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {settings.chat_template} cannot be read: {error}") from None


def _table(plan: Plan) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="dim")
    for row in plan.rows():
        table.add_row(*row)
    return table
