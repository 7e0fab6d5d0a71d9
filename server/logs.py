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
    handler.setFormatter(JSONFormatter() if form == "json" else TextFormatter())
    logging.captureWarnings(form == "json")
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # It tells what we tell.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger().level))


class TextFormatter(logging.Formatter):
    """For people: `fields` of a record follow its message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        facts = [f" {name}={value!r}" for name, value in getattr(record, "fields", {}).items()]
        return super().formatMessage(record) + "".join(facts)


class JSONFormatter(logging.Formatter):
    """One object a line: `fields` of a record stand beside its message, and the id of the request it belongs to."""

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
    fields = {
        "request_id": exchange.request_id,
        "status": exchange.status,
        "seconds": round(time.monotonic() - exchange.began, 6),
        "error": exchange.error,
        "key": exchange.key,
        **exchange.generation,
        "prompts": exchange.prompts,
    }
    known = {name: value for name, value in fields.items() if value is not None}
    logger.log(level, "%s %s", method, shown(path), extra={"fields": known})
