"""How the daemon ends, with an application and an engine that do as little as possible."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from server.daemon import Daemon
from server.listen import bind


@dataclass
class FakeEngine:
    """Has one answer to give; `finish` ends it."""

    waiting: int = 0
    running: int = 1
    finish: asyncio.Event = field(default_factory=asyncio.Event)
    draining: asyncio.Event = field(default_factory=asyncio.Event)

    async def drain(self, grace_seconds: float) -> bool:
        self.draining.set()
        try:
            await asyncio.wait_for(self.finish.wait(), grace_seconds)
        except TimeoutError:
            await self.stop()
            return False
        return True

    async def stop(self, grace_seconds: float = 5.0) -> None:
        self.running = 0
        self.finish.set()


@dataclass
class FakeState:
    engine: FakeEngine
    draining: bool = False


class Running:
    """A daemon that serves /stream, which lasts as long as the engine's answer, and /ready."""

    def __init__(self, grace_seconds: float) -> None:
        self.state = FakeState(FakeEngine())
        self.daemon = Daemon(self.app, self.state, grace_seconds)  # type: ignore[arg-type]
        self.writers: list[asyncio.StreamWriter] = []
        self.bound = bind("127.0.0.1", 0)
        self.bound.listen()
        self.port = self.bound.getsockname()[1]
        self.task = asyncio.create_task(self.daemon.serve(sockets=[self.bound]))

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        ready = not self.state.draining
        await send({"type": "http.response.start", "status": 200 if ready else 503, "headers": []})
        if scope["path"] == "/stream":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await self.state.engine.finish.wait()
        await send({"type": "http.response.body", "body": b"last"})

    async def open(self, path: str) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return reader

    async def get(self, path: str) -> bytes:
        return await (await self.open(path)).read()

    async def begin_stream(self) -> asyncio.StreamReader:
        reader = await self.open("/stream")
        await reader.readuntil(b"first")
        return reader

    async def end(self) -> None:
        await self.task
        for writer in self.writers:
            writer.close()

    def signal(self) -> None:
        self.daemon.handle_exit(signal.SIGTERM, None)


def run(test: Any, grace_seconds: float = 5.0) -> float:
    """Seconds that a test with a running daemon took."""

    async def main() -> None:
        async with asyncio.timeout(10):
            running = Running(grace_seconds)
            await test(running)
            await running.end()

    began = time.monotonic()
    asyncio.run(main())
    return time.monotonic() - began


@pytest.mark.case(48)
def test_a_running_stream_finishes_after_the_signal_while_new_work_is_refused() -> None:
    async def test(running: Running) -> None:
        stream = await running.begin_stream()
        assert (await running.get("/ready")).startswith(b"HTTP/1.1 200")
        running.signal()
        await asyncio.wait_for(running.state.engine.draining.wait(), 5)
        assert (await running.get("/ready")).startswith(b"HTTP/1.1 503")
        assert not running.task.done()
        running.state.engine.finish.set()
        assert b"last" in await stream.read()

    run(test)


@pytest.mark.case(48)
def test_after_the_grace_what_still_runs_is_broken_off() -> None:
    async def test(running: Running) -> None:
        stream = await running.begin_stream()
        running.signal()
        await stream.read()
        assert running.state.engine.running == 0

    assert run(test, grace_seconds=0.3) < 3


@pytest.mark.case(48)
def test_a_second_signal_ends_everything_now() -> None:
    async def test(running: Running) -> None:
        await running.begin_stream()
        running.signal()
        running.signal()

    assert run(test, grace_seconds=60) < 3


def test_with_nothing_running_it_ends_at_once() -> None:
    async def test(running: Running) -> None:
        await running.get("/ready")
        running.state.engine.finish.set()
        running.signal()

    assert run(test, grace_seconds=60) < 3
