"""Errors as Anthropic's clients know them."""

from __future__ import annotations

from typing import Literal

from manylora.errors import ContextLengthError, PayloadTooLargeError
from manylora.server.http import sse
from manylora.server.http.bodies import View
from manylora.server.http.route_facts import ErrorShape, JsonBody

TYPES = {
    "server_error": "api_error",
    "insufficient_quota": "rate_limit_error",
    "conflict_error": "invalid_request_error",
}
"""Anthropic's names for some of the types."""


class AnthropicErrorFields(View):
    """The error: its type, and what went wrong."""

    type: str
    message: str


class AnthropicErrorView(View):
    """Every error of Anthropic's routes."""

    type: Literal["error"]
    error: AnthropicErrorFields


def _body(body: JsonBody) -> dict[str, object]:
    error = body["error"]
    kind = str(error["type"])
    message = str(error["message"])
    if error["code"] == ContextLengthError.code:
        # By these words Claude Code knows to shorten the conversation.
        message = f"prompt is too long: {message}"
    if error["code"] == PayloadTooLargeError.code:
        kind = "request_too_large"
    return {"type": "error", "error": {"type": TYPES.get(kind, kind), "message": message}}


ANTHROPIC = ErrorShape(
    view=AnthropicErrorView, body=_body, event=lambda body: sse.event(_body(body), "error")
)
