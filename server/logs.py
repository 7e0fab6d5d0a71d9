"""What the daemon logs: its own messages and a line for each request, as text or as one JSON object a line.

No prompt and no answer is ever logged, unless `--log-prompts` asks for prompts. Everything goes to stderr.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Literal

import orjson

from server.errors import shown
from server.exchange import Exchange, current

logger = logging.getLogger("octavo.requests")


def configure(level: str, form: Literal["text", "json"]) -> None:
    """Set up the root logger. To be called once, before anything is logged."""
    handler = logging.StreamHandler()
    if form == "json":
        handler.setFormatter(JSONFormatter())
        logging.captureWarnings(True)
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=[handler]
    )
    # It tells what we tell.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger().level))


class JSONFormatter(logging.Formatter):
    """One object a line; `fields` of a record stand beside its message, and the id of the request it belongs to."""

    def format(self, record: logging.LogRecord) -> str:
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (exchange := current.get()) is not None:
            content["request_id"] = exchange.request_id
        content |= getattr(record, "fields", {})
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(content, default=str).decode()


def log_request(exchange: Exchange) -> None:
    """A line for a request that is over; for what only reads, such as probes and scrapes, at the level of debug."""
    method, path = exchange.scope["method"], exchange.scope["path"]
    failed = exchange.status is None or exchange.status >= 400
    level = logging.INFO if method == "POST" or failed else logging.DEBUG
    if not logger.isEnabledFor(level):
        return
    seconds = round(time.monotonic() - exchange.began, 6)
    fields = {"method": method, "path": path, "status": exchange.status, "seconds": seconds, "error": exchange.error}
    fields |= exchange.generation
    if exchange.prompts is not None:
        fields["prompts"] = exchange.prompts
    facts = [
        f"{name} {value}" for name, value in fields.items() if value is not None and name not in ("method", "path")
    ]
    where = f"{method} {shown(path)}"
    logger.log(level, "%s: %s [%s]", where, ", ".join(facts), exchange.request_id, extra={"fields": fields})
