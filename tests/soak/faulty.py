"""The daemon, built by its own code, with faults on demand: `python tests/soak/faulty.py serve [flags]`.

A line on its standard input names what goes wrong next, once: `step`, `logits`, `slow` (the model's thread), `tokenize`
(a worker thread), `send` (the event loop, as a socket that breaks while an answer is written to it).
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

sys.path.insert(0, str(Path(__file__).parents[2]))

import server.launch
import server.wiring
from models.base import Batch, StepOutput
from server.cli import main
from server.tokenize import Tokenizing

SLOW_SECONDS = 1.5
pending: Counter[str] = Counter()


def listen() -> None:
    for line in sys.stdin:
        pending[line.strip()] += 1


def due(fault: str) -> bool:
    if pending[fault] <= 0:
        return False
    pending[fault] -= 1
    return True


class FaultyRunner:
    """See `models.base.Runner`."""

    def __init__(self, runner: Any) -> None:
        self.config = runner.config
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Batch) -> StepOutput:
        if due("slow"):
            time.sleep(SLOW_SECONDS)
        if due("step"):
            raise RuntimeError("a step that was made to fail")
        output: StepOutput = self._runner.run(batch)
        if len(output.tokens) and due("logits"):
            output.tokens[0] = -1  # as where logits are not finite
        return output


class FaultyTokenizing(Tokenizing):
    async def run(self, work: Any, *arguments: Any) -> Any:
        def fail(*_: Any) -> None:
            raise MemoryError("tokenising that was made to fail")

        return await super().run(fail if due("tokenize") else work, *arguments)


def faulty_app(app: ASGIApp) -> ASGIApp:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def faulty_send(message: Message) -> None:
            if scope["type"] == "http" and scope["method"] == "POST" and due("send"):
                raise BrokenPipeError("a socket that was made to break")
            await send(message)

        await app(scope, receive, faulty_send)

    return call


def install() -> None:
    load, create = server.launch.load_model, server.wiring.create_app

    def load_model(*arguments: Any) -> Any:
        model = load(*arguments)
        return replace(model, runner=FaultyRunner(model.runner))  # type: ignore[arg-type]

    server.launch.load_model = load_model
    server.wiring.Tokenizing = FaultyTokenizing  # type: ignore[misc]
    server.wiring.create_app = lambda state: faulty_app(create(state))  # type: ignore[assignment,return-value]


if __name__ == "__main__":
    install()
    threading.Thread(target=listen, daemon=True).start()
    sys.exit(main())
