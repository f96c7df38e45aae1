"""The only place where errors become HTTP: one table from class to status, one JSON shape, one set of handlers.

The answer to a path that Manylora does not serve says what to call instead.
Bodies of 500 are constant; every other message is written by Manylora and holds values of the caller's own input only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from manylora import errors
from manylora.engine import request as engine_request
from manylora.errors import ManyloraError
from manylora.server.http.bodies import refusal_of
from manylora.server.http.route_facts import JsonBody, error_shape

ANSWERS: dict[type[ManyloraError], tuple[int, str]] = {
    errors.ManyloraError: (500, "server_error"),
    errors.RequestError: (400, "invalid_request_error"),
    errors.AuthenticationError: (401, "authentication_error"),
    errors.ForbiddenError: (403, "permission_error"),
    errors.NotFoundError: (404, "not_found_error"),
    errors.ConflictError: (409, "conflict_error"),
    errors.PayloadTooLargeError: (413, "invalid_request_error"),
    errors.TimeoutExceededError: (408, "timeout_error"),
    errors.RateLimitError: (429, "rate_limit_error"),
    errors.QuotaExceededError: (429, "insufficient_quota"),
    errors.AdapterError: (422, "adapter_error"),
    errors.CapacityError: (503, "overloaded_error"),
    errors.BusyError: (409, "conflict_error"),
}
"""Status and `type` of an error class, and of its subclasses that have no entry of their own."""
STATUS_BY_CODE = {
    "storage.full": 507,
    "config.too_large": 413,
    "headers_too_large": 431,
    "unsupported_encoding": 415,
    "idempotency.key_reused": 422,
}
"""Codes whose status differs from that of their class."""
LAST_BYTES = frozenset({401, 408, 413, 415, 431, 507})
"""Answers that may come before the whole body was read: the connection is closed after them."""
LAST_BYTES_CODES = frozenset(
    {
        "quota.storage",
        "upload.too_many",
        "upload.busy",
        "idempotency.in_progress",
        "storage.unavailable",
        "db.lost",
    }
)
"""Error codes after which it is closed too, where the status alone does not tell."""
FROM_ENGINE: dict[str, type[ManyloraError]] = {
    "request": errors.InvalidRequestError,
    "capacity": errors.CapacityError,
    "adapter": errors.AdapterUnavailableError,
}
"""Classes of errors that clients are told, by the engine's kind."""
MAX_SHOWN = 100
"""Characters of an unknown path that the answer repeats."""
_CHAT = "Use POST /v1/chat/completions"
NOT_SERVED = {
    "/v1/responses/": "stored responses, nor what is done with them. Send all items with each POST /v1/responses.",
    "/v1/messages/batches": "Anthropic's batches. Use POST /v1/batches.",
    "/v1/conversations": f"conversations. {_CHAT} and send the whole history with each request.",
    "/v1/assistants": f"assistants. {_CHAT}.",
    "/v1/threads": f"threads. {_CHAT} and send the whole history with each request.",
    "/v1/realtime": f"the Realtime API. {_CHAT} with stream=true.",
    **{
        f"/v1/{name}": f"{name.replace('_', ' ')}: the model generates text only."
        for name in ("embeddings", "moderations", "images", "audio", "videos", "vector_stores")
    },
    "/v1/evals": "evals. Use a client that calls POST /v1/completions, such as lm-eval.",
    "/v1/fine_tuning": "training. Train the adapter with PEFT and upload it with POST /v1/adapters.",
}
"""Routes of OpenAI's API, and of Anthropic's, that Manylora does not have.

They are answered 400. After a 404 a LiteLLM proxy takes the whole model out of rotation, for all of its users.
"""
ELSEWHERE = {
    "/": "POST /v1/completions or POST /v1/chat/completions",
    "/generate": "POST /v1/completions",
    "/generate_stream": "POST /v1/completions with stream=true",
    "/api/generate": "POST /v1/completions",
    "/api/chat": "POST /v1/chat/completions",
    "/api/tags": "GET /v1/models",
}
"""Routes of other engines, and what they are called here."""
METHODS = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
INTERNAL_MESSAGE = "The server had an internal error. Look for the request id in the server's log."


def answer(error: ManyloraError) -> tuple[int, str]:
    """HTTP status and `type` of an error."""
    status, kind = next(ANSWERS[cls] for cls in type(error).__mro__ if cls in ANSWERS)
    return STATUS_BY_CODE.get(error.code, status), kind


def error_body(error: ManyloraError) -> JsonBody:
    """The JSON body of an error, also sent as an event inside a stream."""
    status, kind = answer(error)
    if status == 500:
        return _body(INTERNAL_MESSAGE, kind, None, "internal_error")
    body = _body(error.message, kind, error.param, error.code)
    if isinstance(error, errors.AdapterError) and error.findings:
        body["error"]["findings"] = [asdict(finding) for finding in error.findings]
    return body


def error_response(error: ManyloraError, path: str = "") -> Response:
    """The whole answer: status, headers that it asks for, and a body in the shape of the path."""
    status, _ = answer(error)
    headers: dict[str, str] = {}
    if isinstance(error, errors.CapacityError | errors.RateLimitError):
        # By these OpenAI's clients retry: after how long, or not at all.
        if error.retry_after_s is None:
            headers["x-should-retry"] = "false"
        else:
            headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
            headers["retry-after-ms"] = str(max(1, math.ceil(1000 * error.retry_after_s)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status in LAST_BYTES or error.code in LAST_BYTES_CODES:
        headers["connection"] = "close"
    return _response(status, error_body(error), headers, path)


def from_engine(error: engine_request.ErrorInfo) -> ManyloraError:
    """The exception for an error that the engine reported; its code says more than its class."""
    return FROM_ENGINE.get(error.kind, errors.EngineError)(error.message, code=error.code)


def install(app: FastAPI) -> None:
    """Give errors of FastAPI and Starlette their answers; `Boundary` answers all others."""
    app.exception_handler(HTTPException)(_on_http_exception)
    app.exception_handler(RequestValidationError)(_on_validation_error)


def unknown_route(path: str, has_route: Callable[[str], bool]) -> ManyloraError:
    """The error for a path without a route; the arguments are those of `hint`."""
    for known, instead in NOT_SERVED.items():
        if path == known or path.startswith(f"{known.rstrip('/')}/"):
            return errors.InvalidRequestError(
                f"Manylora does not serve {instead}", code="unsupported_route"
            )
    return errors.NotFoundError(f"There is no route {path[:MAX_SHOWN]}.{hint(path, has_route)}")


def hint(path: str, has_route: Callable[[str], bool]) -> str:
    """A sentence that says what to call instead; empty if nothing is like `path`.

    Args:
        path: What the client asked for.
        has_route: Says whether Manylora serves a path.
    """
    bare = path.strip("/")
    if f"/{bare}" in ELSEWHERE:
        return f" Manylora's route for this is {ELSEWHERE[f'/{bare}']}."
    meant = f"/v1/{bare.rpartition('v1/')[2]}"
    if meant == path or not has_route(meant):
        return ""
    return f" Call {meant[:MAX_SHOWN]}: the base URL of a client ends in one /v1, as in http://HOST:8000/v1."


def _body(message: str, kind: str, param: str | None, code: str) -> JsonBody:
    shown = param and _on_one_line(param)
    return {"error": {"message": _on_one_line(message), "type": kind, "param": shown, "code": code}}


def _on_one_line(message: str) -> str:
    """A text that may quote any other of a client's: what is no printable character is escaped."""
    if message.isprintable():
        return message
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in message
    )


def _response(status: int, body: JsonBody, headers: dict[str, str], path: str) -> Response:
    content = orjson.dumps(error_shape(path).body(body))
    return Response(content, status_code=status, headers=headers, media_type="application/json")


async def _on_http_exception(request: Request, error: HTTPException) -> Response:
    path = request.url.path

    def has_route(other: str) -> bool:
        return bool(_matches(request, {"path": other}))

    if error.status_code == 404:
        return error_response(unknown_route(path, has_route), path)
    message = "The request is malformed."
    code = "invalid_request"
    headers = dict(error.headers or {})
    if error.status_code == 405:
        allowed = ", ".join(
            each for each in METHODS if Match.FULL in _matches(request, {"method": each})
        )
        message = f"This route takes {allowed}, not {request.method}.{hint(path, has_route)}"
        code = "method_not_allowed"
        headers = {"allow": allowed}
    return _response(
        error.status_code, _body(message, "invalid_request_error", None, code), headers, path
    )


def _matches(request: Request, changes: dict[str, str]) -> set[Match]:
    """Matches of the routes with this request under another path or method."""
    scope = {**request.scope, **changes}
    return {route.matches(scope)[0] for route in request.app.routes} - {Match.NONE}


async def _on_validation_error(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    return error_response(refusal_of({**first, "loc": first["loc"][-1:]}), request.url.path)
