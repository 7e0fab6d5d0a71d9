"""What all routes share: the engine, the tokenizer, names and limits. Built once by whoever starts the server, then
read only."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from server.auth import caller
from server.errors import ModelNotFound
from server.keys import KeyRing
from server.limits import KeyLimits
from server.metrics import Metrics
from server.protocol.checks import ServerLimits
from server.structured.compiler import GrammarCompiler
from server.tokenize import Tokenizing
from server.tools.formats import FORMATS, CallFormat
from server.tracing import Tracer

if TYPE_CHECKING:
    from scheduler.engine import Engine
    from server.saved_cache import SavedCache

DEFAULT_BODY_BYTES = 16 << 20


@dataclass(slots=True)
class ServerState:
    """Everything the routes need. `draining` is the one thing that changes: it turns `/ready` red."""

    engine: Engine
    tokenizing: Tokenizing
    metrics: Metrics
    limits: ServerLimits
    model_names: Sequence[str]  # the first is the one that owns the others
    version: str
    grammars: GrammarCompiler
    info: Mapping[str, Any] = field(default_factory=dict)  # what GET /info shows
    keys: KeyRing = field(default_factory=KeyRing)
    request_timeout_seconds: float | None = None  # from arrival to the end of the answer
    isolates_keys: bool = False  # callers with different keys share no prefixes
    saved_cache: SavedCache | None = None  # where the prefix cache is kept across restarts
    open_metrics: bool = False  # GET /metrics without a key
    tracer: Tracer | None = None  # who is told of every generation
    log_prompts: bool = False
    allowed_origins: Sequence[str] = ()  # of web pages that may call; none: no page may
    call_format: CallFormat = FORMATS["hermes"]  # how the model writes calls
    splits_reasoning: bool = False  # whether thoughts are told from answers
    max_body_bytes: int = DEFAULT_BODY_BYTES
    stall_seconds: float = 60.0  # without a finished step while there is work, after which `/ready` turns red
    keep_alive_seconds: float = 15.0  # of silence in a stream, after which a comment is sent
    clock: Callable[[], float] = time.monotonic  # the engine's
    created: int = field(default_factory=lambda: int(time.time()))
    system_fingerprint: str = ""  # of the build, the model and its format; made of version and name when not given
    draining: bool = False
    key_limits: KeyLimits = field(init=False)

    def __post_init__(self) -> None:
        self.key_limits = KeyLimits(self.keys, self.engine, self.clock)
        if not self.system_fingerprint:
            digest = hashlib.sha256(f"{self.version} {self.model_names[0]}".encode()).hexdigest()
            self.system_fingerprint = f"fp_{digest[:10]}"

    def head(self, answer_id: str, model: str) -> dict[str, str]:
        """How the answers of OpenAI's older APIs begin."""
        return {"id": answer_id, "model": model, "system_fingerprint": self.system_fingerprint}

    def namespace(self, salt: Hashable) -> Hashable:
        """Whose prefixes the request being answered shares: those of the same salt, and of the same key if so set."""
        return f"{caller.get()} {salt or ''}" if self.isolates_keys else salt

    def owner(self) -> str:
        """Whose share of the machine the request being answered takes: its key's; everybody's where none is needed."""
        return caller.get() if self.keys.closed else ""

    def require_model(self, name: str) -> None:
        """Raises ModelNotFound for a name that is not served."""
        if name not in self.model_names:
            raise ModelNotFound(name)

    def not_ready(self) -> str | None:
        """Why the server should get no new requests; None when it should."""
        engine = self.engine
        if not engine.healthy:
            return f"unhealthy: {engine.unhealthy_reason}"
        if self.draining or not engine.accepting:
            return "draining"
        if (engine.running or engine.waiting) and self.clock() - engine.last_progress > self.stall_seconds:
            return f"stalled: no step has finished for {self.clock() - engine.last_progress:.0f} s"
        return None
