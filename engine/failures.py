"""How an error becomes the last thing a client hears of its request."""

from __future__ import annotations

from weft import errors
from weft.engine.request import RequestError

INTERNAL = RequestError(
    code=errors.EngineError.code, message="The engine failed while it computed this request.", kind="internal"
)
"""Faults of ours say nothing about themselves to clients; the log does."""

UNSOUND = RequestError(
    code="scores_not_finite",
    message="The scores of the next token are not finite numbers. An adapter whose training diverged does that, and so "
    "does a repetition_penalty close to 0. Change it and send the request again.",
)
"""The doing of the request or its adapter; others in the step are not touched."""

EXPIRED = RequestError(
    code="deadline.queue",
    message="The request waited for longer than its deadline allows and was not begun. Send it again later.",
    kind="capacity",
)


def request_error(error: errors.WeftError) -> RequestError:
    """What the client is told: the error's own words, unless the fault is ours."""
    if isinstance(error, errors.RequestError):
        return RequestError(code=error.code, message=error.message, kind="request")
    if isinstance(error, errors.AdapterError):
        return RequestError(code=error.code, message=error.message, kind="adapter")
    if isinstance(error, errors.CapacityError):
        return RequestError(code=error.code, message=error.message, kind="capacity")
    return INTERNAL
