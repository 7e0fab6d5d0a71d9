"""uvicorn, made to end well: on SIGTERM or SIGINT running answers finish while new ones are refused.

    first signal   /ready says no, new work is answered 503, what runs may go on for the grace
    the grace ends what still runs gets an error event, connections are closed
    second signal  everything ends now

Owned by the event loop; signals arrive in the main thread.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from server.state import ServerState

logger = logging.getLogger("octavo")

# Answers that the engine has finished or broken off only have to be written out.
FLUSH_SECONDS = 5


class Daemon(uvicorn.Server):
    """Serves `app` with what is in `state` until a signal ends it; running answers then have `grace_seconds`."""

    def __init__(self, app: ASGIApp, state: ServerState, grace_seconds: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",
                http="httptools",
                ws="none",
                lifespan="on",
                proxy_headers=False,  # nothing here looks at where a client is
                access_log=False,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )
        self._state = state
        self._grace_seconds = grace_seconds

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain the engine with the socket still open, so that refusals can be heard; then close."""
        self._state.draining = True
        engine = self._state.engine
        if running := engine.running + engine.waiting:
            logger.info(
                "finishing %d answers, for %g s at most; signal again to stop now", running, self._grace_seconds
            )
        drain = asyncio.create_task(engine.drain(self._grace_seconds))
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=0.05)
        if not drain.done():
            drain.cancel()
            await engine.stop(grace_seconds=0.0)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
