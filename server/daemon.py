"""uvicorn, made to end well: on SIGTERM or SIGINT running answers finish while new ones are refused.

    first signal   /ready says no, new work is answered 503, what runs may go on for the grace
    the grace ends what still runs gets an error event, connections are closed
    second signal  the same, now

Owned by the event loop; signals arrive in the main thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from server.connection import Connection
from server.supervisor import tell

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from server.state import ServerState

logger = logging.getLogger("octavo")

# Longer than clients and proxies keep an idle connection, so that it is them who close it.
KEEP_ALIVE_SECONDS = 75
# Answers that the engine has finished or broken off only have to be written out.
FLUSH_SECONDS = 5.0
HURRIED_FLUSH_SECONDS = 0.2


class Daemon(uvicorn.Server):
    """Serves `app` with what is in `state` until a signal ends it; running answers then have `grace_seconds`.

    `clean` says afterwards whether nothing was left: neither tasks nor connections.
    """

    def __init__(
        self,
        app: ASGIApp,
        state: ServerState,
        grace_seconds: float,
        certfile: Path | None = None,
        keyfile: Path | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",
                http=Connection,
                ws="none",
                lifespan="on",
                proxy_headers=False,  # nothing here looks at where a client is
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                ssl_certfile=certfile,
                ssl_keyfile=keyfile,
            )
        )
        self.clean = False
        self._state = state
        self._grace_seconds = grace_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the engine with the socket still open, so that refusals can be heard; then close."""
        self._state.draining = True
        tell("STOPPING=1")
        engine = self._state.engine
        if running := engine.running + engine.waiting:
            logger.info(
                "finishing %d answers, for %g s at most; signal again to stop now", running, self._grace_seconds
            )
        drain = asyncio.create_task(engine.drain(self._grace_seconds))
        if not await self._done(drain):
            drain.cancel()
            await engine.stop(grace_seconds=0.0)
        # A reader that has stalled keeps its connection and task; whoever is left then is left.
        closing = asyncio.create_task(super().shutdown(sockets))
        self.clean = await self._done(closing, FLUSH_SECONDS)
        if not self.clean:
            await asyncio.sleep(HURRIED_FLUSH_SECONDS)

    async def _done(self, task: asyncio.Task[None] | asyncio.Task[bool], seconds: float | None = None) -> bool:
        """Wait for a task, but no longer than that, and not once somebody is in a hurry."""
        loop = asyncio.get_running_loop()
        until = None if seconds is None else loop.time() + seconds
        while not task.done() and not self.force_exit and (until is None or loop.time() < until):
            await asyncio.wait({task}, timeout=0.05)
        return task.done()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
