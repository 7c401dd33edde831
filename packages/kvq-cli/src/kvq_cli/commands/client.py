"""Speaks to a running `kvq serve`."""

from __future__ import annotations

from typing import Any

import httpx
from pydantic import BaseModel, ValidationError

from kvq_cli.commands.messages import (
    FAILED,
    INTERRUPTED,
    UNREACHABLE,
    WRONG_INPUT,
    refuse,
)
from kvq_cli.server.kv_protocol import Rebuild, Status

STATUS, REBUILD = "/v1/kv/status", "/v1/kv/rebuild"
STATUS_TIMEOUT = httpx.Timeout(10.0)
# A rebuild moves the live pages to the host and back: as long as it takes.
REBUILD_TIMEOUT = httpx.Timeout(10.0, read=None)
# Gateways and strangers answer these; kvq's own refusals have other numbers.
FOREIGN = (
    httpx.codes.UNAUTHORIZED,
    httpx.codes.FORBIDDEN,
    httpx.codes.NOT_FOUND,
    httpx.codes.METHOD_NOT_ALLOWED,
)


def status(url: str, api_key: str | None = None) -> dict[str, Any]:
    """What GET /v1/kv/status answers."""
    return _call("GET", url, STATUS, Status, STATUS_TIMEOUT, api_key)


def rebuild(url: str, body: dict[str, Any], api_key: str | None = None) -> dict[str, Any]:
    """What POST /v1/kv/rebuild answers; the program ends when it is refused or fails."""
    try:
        return _call("POST", url, REBUILD, Rebuild, REBUILD_TIMEOUT, api_key, body)
    except KeyboardInterrupt:
        refuse(
            f"interrupted; the server at {url} goes on with what it was asked: `kvq ctl stats` "
            "shows how it ends",
            INTERRUPTED,
        )


def _call(
    verb: str,
    url: str,
    path: str,
    kind: type[BaseModel],
    timeout: httpx.Timeout,
    api_key: str | None,
    body: dict[str, Any] | None = None,
) -> dict[str, Any]:
    try:
        # not through a proxy: a control command reaches its server itself
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        with httpx.Client(timeout=timeout, trust_env=False, headers=headers) as client:
            answer = client.request(verb, url.rstrip("/") + path, json=body)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        refuse(f"--url {url} is no http:// or https:// address", WRONG_INPUT)
    except httpx.ReadTimeout:
        refuse(
            f"the server at {url} took the question and gave no answer within {timeout.read:g} s; "
            "is it `kvq serve`, and does it run?",
            UNREACHABLE,
        )
    except httpx.TransportError as error:
        refuse(f"no server answers at {url}: {error}; is `kvq serve` running there?", UNREACHABLE)
    content = _json(answer)
    if answer.is_success and _is(kind, content):
        return content
    detail = content.get("error")
    message = detail.get("message") if isinstance(detail, dict) else None
    keyless = isinstance(detail, dict) and detail.get("code") == "invalid_api_key"
    refuses = answer.is_error and (answer.status_code not in FOREIGN or keyless)
    if not refuses or not isinstance(message, str):
        refuse(
            f"{url} is no kvq server of this version: {verb} {path} answered "
            f"{answer.status_code} {answer.reason_phrase}"
            + (", and not with what kvq answers" if answer.is_success else ""),
            UNREACHABLE,
        )
    refuse(message, FAILED if answer.is_server_error else WRONG_INPUT)


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        content = answer.json()
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _is(kind: type[BaseModel], content: dict[str, Any]) -> bool:
    try:
        kind.model_validate(content)
    except ValidationError:
        return False
    return True
