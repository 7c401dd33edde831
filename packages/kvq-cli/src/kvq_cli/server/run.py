"""From an address to a server that listens on it, until Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn

from kvq_cli.server.app import create_app

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine

# How long open connections may take to hear of the end; their requests have ended by then.
LINGER_SECONDS = 5


def serve(engine: AsyncEngine, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve on a bound socket until SIGINT (returns) or SIGTERM (ends the process).

    Requests in flight end with an error that says so, once the engine's current step is done; a
    second signal does not wait for that. `ready` is called once connections are accepted.
    """
    config = uvicorn.Config(
        create_app(engine),
        log_level="warning",
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=LINGER_SECONDS,
    )
    # uvicorn raises the signal again after a clean end
    with contextlib.suppress(KeyboardInterrupt):
        _Server(config, engine, ready).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Says when it is up, and ends the engine's requests before it waits for connections."""

    def __init__(
        self, config: uvicorn.Config, engine: AsyncEngine, ready: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._ready = ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._engine.stop()
        await super().shutdown(sockets)
