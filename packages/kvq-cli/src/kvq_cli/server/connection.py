"""One TCP connection: how long it may stay silent, how many there are, what no HTTP is answered."""

from __future__ import annotations

import asyncio
import json
import os

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvq_cli.server.errors import ApiError

# How long a connection may be open without a request that is answered: for a request's head to
# come, for the rest of an answer to be read, for a body that is of no use any more to end.
SILENT_SECONDS = 20.0
# A head of 64 KiB each is the most that they hold.
MOST_CONNECTIONS = 4096
# Of the files that a process may open: for itself, and for clients that are let in before those
# that they displace are gone.
KEPT_FILES = 192
ACCEPTED_AT_ONCE = 32  # asyncio takes so many from the queue before it attends to any
LONGEST_QUEUE = 2048  # of connections that the system keeps until they are taken


def most_connections() -> int:
    """How many connections are open at the same time, by what the system allows."""
    if os.name != "posix":
        return MOST_CONNECTIONS
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if files < 0 else max(16, min(MOST_CONNECTIONS, files - KEPT_FILES))


class Connection(H11Protocol):
    """HTTP/1.1 of one client, who may be slow but not for ever, and one of many but not too many.

    When there are too many, the one goes that has been silent the longest.
    """

    _watch: asyncio.TimerHandle | None = None
    _silent_since = 0.0
    _unread = 0

    @property
    def answering(self) -> bool:
        """Whether a request is being received or answered; both have limits of their own."""
        cycle = self.cycle  # None before the first request, whatever its type says
        return cycle is not None and not cycle.response_complete  # type: ignore[redundant-expr]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._attend()
        if len(self.connections) > most_connections():
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._attend()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._attend()

    def shutdown(self) -> None:
        """The server ends: a request that is not here yet ends with it, an answer may go on."""
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Say so in the shape of all errors, unless an answer has begun."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._leave(
            ApiError(
                400,
                "this is not HTTP/1.1 as the server understands it: a malformed request, or one "
                "whose head has more than 64 KiB",
            )
        )

    def _leave(self, error: ApiError) -> None:
        """Answer what no application sees, and close."""
        body = json.dumps(error.body).encode()
        reason = {400: "Bad Request", 503: "Service Unavailable"}[error.status]
        head = [
            f"HTTP/1.1 {error.status} {reason}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in error.headers.items()),
        ]
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()

    # ---- silence ------------------------------------------------------------------------------

    def _attend(self) -> None:
        """See that the silence is watched, if there is one; bytes alone do not break it."""
        if self.answering:
            self._unwatch()
        elif self._watch is None:
            self._silent_since = self.loop.time()
            self._listen()

    def _listen(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._watch = self.loop.call_later(SILENT_SECONDS, self._expire)

    def _expire(self) -> None:
        if 0 < self.transport.get_write_buffer_size() < self._unread:  # it is being read
            self._listen()
        else:
            self.transport.abort()

    def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    # ---- too many -----------------------------------------------------------------------------

    def _make_room(self) -> None:
        silent = [
            each
            for each in self.connections
            if isinstance(each, Connection) and each is not self and not each.answering
        ]
        if silent:
            longest = min(silent, key=lambda each: each._silent_since)
            self.connections.discard(longest)  # at once: many may come before it is gone
            longest.transport.abort()
        else:
            self._leave(
                ApiError(
                    503,
                    f"the server has {len(self.connections):,} connections open, all of them in "
                    "use; try again later",
                    code="too_many_connections",
                    headers={"Retry-After": "1"},
                )
            )
