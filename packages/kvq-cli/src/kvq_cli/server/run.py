"""From an address to a server that listens on it, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from kvq_cli.server.app import create_app
from kvq_cli.server.connection import ACCEPTED_AT_ONCE, LONGEST_QUEUE, Connection
from kvq_cli.server.limits import HttpOptions
from kvq_cli.server.places import Places

if TYPE_CHECKING:
    from kvq_cli.engine.async_engine import AsyncEngine

# How long open connections may take to hear of the end; their requests have ended by then.
LINGER_SECONDS = 5
# How long requests may go on after SIGTERM; what manages processes often kills after 30 s.
DRAIN_SECONDS = 20.0
# How long a step may then go on; a large prompt on a small machine takes longer.
STEP_SECONDS = 4.0


def serve(
    engine: AsyncEngine,
    listener: socket.socket,
    ready: Callable[[], None],
    options: HttpOptions | None = None,
) -> None:
    """Serve on a bound socket until SIGINT (returns) or SIGTERM (ends the process).

    After SIGTERM requests in flight have a while to finish and new ones are refused; after that,
    and at once after SIGINT, they end with an error that says so. SIGINT waits for the engine's
    current step, SIGTERM only so long that all takes less than half a minute; a second signal
    waits for nothing. `ready` is called once connections are accepted.
    """
    app = create_app(engine, options)
    config = configured(app)
    gc.collect()
    gc.freeze()  # a model's objects stay; looking through them stops all requests again and again
    # uvicorn raises the signal again after a clean end
    with contextlib.suppress(KeyboardInterrupt):
        _Server(config, engine, app.state.places, ready).run(sockets=[listener])


def configured(app: FastAPI) -> uvicorn.Config:
    """How uvicorn serves the application: the same whatever else is installed."""
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="asyncio",
        log_level="error",  # what clients do wrong is told to them; a log of it would have no end
        access_log=False,
        backlog=ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=LINGER_SECONDS,
    )


class _Server(uvicorn.Server):
    """Says when it is up, and ends the engine's requests before it waits for connections."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: AsyncEngine,
        places: Places,
        ready: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._engine = engine
        self._places = places
        self._drains = False
        self._ready = ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        self._drains = sig == signal.SIGTERM
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(LONGEST_QUEUE)  # asyncio has no word for it but how many it takes
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._places.closed = True
        end = time.monotonic() + (DRAIN_SECONDS if self._drains else 0)
        while self._places.taken and self._engine.healthy and time.monotonic() < end:
            await asyncio.sleep(0.05)
        await self._engine.stop(STEP_SECONDS if self._drains else None)
        await super().shutdown(sockets)
