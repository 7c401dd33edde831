"""What is turned away before any route sees it: strangers and bodies that are too large."""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass

from fastapi.exceptions import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvq_cli.config import ConfigError
from kvq_cli.quoting import quoted
from kvq_cli.server.errors import ApiError, answer

OPEN_PATHS = ("/health", "/ready")  # load balancers have no keys
BODY_SECONDS = 60.0  # in which a body must be here
MOST_BODIES = 16  # of the largest size, that are here at once: read, or kept while it is answered
CLOSE = {"Connection": "close"}  # what still comes on it is of no use


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """What a user chose for the HTTP server.

    Attributes
    ----------
    api_key : that requests must bring; None = anyone may ask
    max_queued_requests : answers that may wait while as many as the engine runs are computed
    max_body_bytes : largest body of a request
    request_timeout : most seconds from a request's submission to its last token; None = any
    """

    api_key: str | None = None
    max_queued_requests: int = 256
    max_body_bytes: int = 16 << 20
    request_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key must be printable ASCII: it travels in a header")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("api_key is empty; give a key or leave it out")
        if self.api_key is not None and self.api_key != self.api_key.strip():
            raise ConfigError("api_key begins or ends with a space, which no header keeps")
        if self.max_queued_requests < 0:
            raise ConfigError(
                f"max_queued_requests must be at least 0, got {self.max_queued_requests}"
            )
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be at least 1, got {self.max_body_bytes}")
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise ConfigError(f"request_timeout must be above 0, got {self.request_timeout}")


class KeyCheck:
    """Lets in who brings the key as `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._wanted = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = Headers(scope=scope).get("authorization")
            scheme, _, key = (given or "").partition(" ")
            # in a time that says nothing about how much of it is right
            right = hmac.compare_digest(key.strip().encode("latin-1"), self._wanted)
            if scheme.lower() != "bearer" or not right:
                problem = "is missing" if given is None else "is wrong"
                error = ApiError(
                    401,
                    f"the API key {problem}; send it as `Authorization: Bearer KEY`",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                return await answer(error)(scope, receive, send)
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies that are larger than the limit, from their declared length if they have one,
    those that would take too much memory beside others, and gives up on those that do not arrive.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._held = 0  # bytes of all requests that are not answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        if (encoding := headers.get("content-encoding", "identity")) != "identity":
            error = ApiError(
                415,
                f"the body is compressed ({quoted(encoding)}); send it as it is",
                headers=CLOSE,
            )
            return await answer(error)(scope, receive, send)
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            error = ApiError(413, self._too_large(f"{int(declared):,} bytes"), headers=CLOSE)
            return await answer(error)(scope, receive, send)
        seen, whole, deadline = 0, False, asyncio.get_running_loop().time() + BODY_SECONDS

        async def limited() -> Message:
            nonlocal seen, whole
            if whole:  # what comes now is that the client left
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(
                    408, f"the body did not arrive within {BODY_SECONDS:g} s", headers=CLOSE
                ) from error
            fresh = len(message.get("body", b""))
            seen, self._held = seen + fresh, self._held + fresh
            whole = not message.get("more_body", False)
            if seen > self._max_bytes:
                raise HTTPException(413, self._too_large(f"{seen:,} bytes or more"), headers=CLOSE)
            if self._held > MOST_BODIES * self._max_bytes:
                raise HTTPException(
                    429,
                    f"the bodies of requests that are being answered have {self._held:,} bytes; "
                    f"this server holds at most {MOST_BODIES * self._max_bytes:,} at once; try "
                    "again later",
                    headers={**CLOSE, "Retry-After": "1"},
                )
            return message

        try:
            await self._app(scope, limited, send)
        finally:
            self._held -= seen

    def _too_large(self, given: str) -> str:
        return f"the body has {given}; this server takes at most {self._max_bytes:,}"
