"""Speaks to a running `kvq serve`."""

from __future__ import annotations

from typing import Any

import httpx

from kvq_cli.commands.messages import SERVER_FAILED, UNREACHABLE, WRONG_INPUT, refuse

STATUS, REBUILD = "/v1/kv/status", "/v1/kv/rebuild"
# A rebuild moves the live pages to the host and back: as long as it takes.
TIMEOUT = httpx.Timeout(10.0, read=None)


def status(url: str) -> dict[str, Any]:
    """What GET /v1/kv/status answers."""
    return _call("GET", url, STATUS)


def rebuild(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """What POST /v1/kv/rebuild answers; the program ends when it is refused or fails."""
    return _call("POST", url, REBUILD, body)


def _call(verb: str, url: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        # not through a proxy: a control command reaches its server itself
        with httpx.Client(timeout=TIMEOUT, trust_env=False) as client:
            answer = client.request(verb, url.rstrip("/") + path, json=body)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        refuse(f"--url {url} is no http:// or https:// address", WRONG_INPUT)
    except httpx.TransportError as error:
        refuse(f"no server answers at {url}: {error}; is `kvq serve` running there?", UNREACHABLE)
    content = _json(answer)
    if answer.is_success and ("bytes_per_token" in content or "before" in content):
        return content
    detail = content.get("error")
    message = detail.get("message") if isinstance(detail, dict) else None
    if message is None or answer.status_code == httpx.codes.NOT_FOUND:
        refuse(
            f"{url} is no kvq server of this version: {verb} {path} answered "
            f"{answer.status_code} {answer.reason_phrase}",
            UNREACHABLE,
        )
    refuse(message, SERVER_FAILED if answer.is_server_error else WRONG_INPUT)


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        content = answer.json()
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
