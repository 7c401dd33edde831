"""Every error as OpenAI's clients expect it: {"error": {message, type, param, code}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvq_cli.engine.params import EngineFailed, RebuildBusy, RequestFailed, RequestRejected
from kvq_cli.quoting import shortened
from kvq_cli.server.answers import ErrorBody, ErrorDetail
from kvq_pools import RebuildFailed, RebuildRejected

logger = logging.getLogger(__name__)

# For the OpenAPI document: these answers have one shape on every route.
ANSWERS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "the request is wrong"},
    404: {"model": ErrorBody, "description": "no such model"},
    408: {"model": ErrorBody, "description": "the body did not come in time"},
    413: {"model": ErrorBody, "description": "the body is too large"},
    415: {"model": ErrorBody, "description": "the body is compressed"},
    429: {"model": ErrorBody, "description": "too many requests wait, or too much of bodies"},
    500: {"model": ErrorBody, "description": "computing it went wrong; the server serves on"},
    503: {"model": ErrorBody, "description": "the engine cannot serve"},
    504: {"model": ErrorBody, "description": "it took longer than the server allows"},
}
KEYED_ANSWERS: dict[int | str, dict[str, Any]] = {
    401: {"model": ErrorBody, "description": "the API key is missing or wrong"}
}
REBUILD_ANSWERS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "it cannot be done; nothing was touched"},
    408: ANSWERS[408],
    409: {"model": ErrorBody, "description": "another rebuild runs"},
    413: ANSWERS[413],
    415: ANSWERS[415],
    429: {"model": ErrorBody, "description": "too many bodies are here at once"},
    500: {"model": ErrorBody, "description": "it went wrong; the old cache is back and serves on"},
    503: ANSWERS[503],
}
CLIENT_LEFT = 499
# Characters of what was given in a message, of a message and of a parameter's name.
MOST_QUOTED, MOST_SAID, MOST_NAMED = 80, 1000, 200


class ApiError(Exception):
    """A refusal with a status, ready to be sent."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that is sent."""
        detail = ErrorDetail(
            message=_sendable(str(self), MOST_SAID),
            type="invalid_request_error" if self.status < 500 else "server_error",
            param=self.param and _sendable(self.param, MOST_NAMED),
            code=self.code,
        )
        return ErrorBody(error=detail).model_dump()


def _sendable(text: str, most: int) -> str:
    """What is quoted back may be as long as a body and hold surrogates, which UTF-8 cannot."""
    return shortened(text.encode("utf-8", "backslashreplace").decode(), most)


def stopping() -> ApiError:
    """Of requests that come, or are not done, when the server ends."""
    return ApiError(503, "the server is stopping", code="stopping")


def as_api_error(error: Exception) -> ApiError:
    """The error to send for whatever was raised; what nobody foresaw is logged, not shown."""
    match error:
        case ApiError():
            return error
        case RequestRejected():
            return ApiError(400, str(error))
        case RequestFailed():  # the engine logged it
            return ApiError(
                500,
                f"computing this request failed: {error}; the server serves on and its log has "
                "the details",
                code="request_failed",
            )
        case EngineFailed():
            return ApiError(503, f"the engine cannot serve: {error}", code="engine_failed")
        case RebuildRejected():
            return ApiError(400, str(error), code="rebuild_rejected")
        case RebuildBusy():
            return ApiError(409, str(error), code="rebuild_busy")
        case RebuildFailed():
            logger.error("a rebuild failed", exc_info=error)
            return ApiError(500, str(error), code="rebuild_failed")
        case _:
            logger.error("a request failed", exc_info=error)
            return ApiError(500, "internal error; the server's log has the details")


def install(app: FastAPI) -> None:
    """Make `app` answer every error in this shape."""

    async def known(request: Request, error: Exception) -> Response:
        return answer(as_api_error(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(explain(error.errors(), request.headers.get("content-type")))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return answer(_http_error(app, request, error))

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_LEFT)  # to nobody

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, left)
    for kind in (
        ApiError,
        RequestRejected,
        RequestFailed,
        EngineFailed,
        RebuildRejected,
        RebuildBusy,
        RebuildFailed,
        Exception,
    ):
        app.add_exception_handler(kind, known)


def describe(app: FastAPI) -> None:
    """Make `app`'s OpenAPI document say what it answers: what FastAPI answers with 422 is 400."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = make()
            for operations in document["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            for theirs in ("HTTPValidationError", "ValidationError"):
                document["components"]["schemas"].pop(theirs, None)
        return make()

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to change it


def answer(error: ApiError) -> Response:
    """The response that says so."""
    return JSONResponse(error.body, error.status, error.headers)


def _http_error(app: FastAPI, request: Request, error: HTTPException) -> ApiError:
    path, message = request.url.path, str(error.detail)
    if error.status_code == 404:
        path = shortened(path, MOST_QUOTED)
        message = f"there is no {path}; there are {', '.join(app.openapi()['paths'])}"
    if error.status_code == 400:  # FastAPI's, of a body that is text and yet cannot be parsed
        message = (
            "the body cannot be read as JSON: it must be UTF-8, nested less than a thousand deep, "
            "with numbers of at most 4,300 digits"
        )
    if error.status_code == 405:
        message = f"{shortened(path, MOST_QUOTED)} does not answer {request.method}"
    return ApiError(error.status_code, message, headers=error.headers)


def explain(errors: Sequence[Mapping[str, Any]], content_type: str | None) -> ApiError:
    """The first of pydantic's errors in words, with the parameter that it concerns."""
    error = errors[0]
    context = error.get("ctx", {})
    place = error["loc"][1:]  # without "body"
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {context['error']} at character {place[0]}")
    if error["type"] == "invalid_parameter":
        return _about(context["param"], error["msg"])
    if error["type"] == "string_unicode" and not place:
        return ApiError(400, "the name of a parameter must be Unicode text without lone surrogates")
    if not place and error["type"] == "missing":
        return ApiError(400, "the body is empty; send a JSON object")
    if not place:
        given = f" (Content-Type is {content_type})" if content_type else " (no Content-Type)"
        return ApiError(
            400, f"the body must be a JSON object, sent as Content-Type: application/json{given}"
        )
    param = place[0] + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place[1:])
    match error["type"]:
        case "extra_forbidden":
            return ApiError(
                400,
                f"unknown parameter: {shortened(param, MOST_NAMED)}",
                param=param,
                code="unknown_parameter",
            )
        case "missing":
            return _about(param, "is required", "missing_required_parameter")
        case "unsupported_parameter":
            return _about(param, error["msg"], "unsupported_parameter")
    message = error["msg"].replace("Input should", "must").replace("List should", "must")
    message = message.replace(" after validation", "")
    return _about(param, message + _got(error.get("input")))


def _got(value: Any) -> str:
    """The value given, where it is short enough to help."""
    shown = repr(value) if isinstance(value, int | float | str) else ""
    return f", got {shown}" if 0 < len(shown) < MOST_QUOTED else ""


def _about(param: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{param} {message}", param=param, code=code)
