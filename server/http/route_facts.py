"""Facts of routes that others act by: gateways, the worker of batches, answers to errors, and the OpenAPI page.

The folder of an API declares them in its `__init__.py`, which imports neither engine nor tokenizer, because a gateway
has none. A route without facts here generates nothing, is answered by any replica, and has OpenAI's errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from manylora.server.http import sse
from manylora.server.http.bodies import ErrorView, View

JsonBody = dict[str, dict[str, object]]
"""The body of an error in OpenAI's shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorShape:
    """The look of an API's errors, made of OpenAI's."""

    view: type[View]
    """The body, for the OpenAPI page."""
    body: Callable[[JsonBody], Mapping[str, object]]
    """Makes the body of an answer."""
    event: Callable[[JsonBody], bytes]
    """Makes the event that ends a stream."""


OPENAI = ErrorShape(view=ErrorView, body=lambda body: body, event=sse.event)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteFacts:
    """Facts of one route. None has a default: who writes a route decides each of them."""

    path: str
    generates: bool
    """A gateway tries another replica where one is lost, and bills what the client got of it."""
    is_for_all_replicas: bool
    """A gateway sends it to all replicas instead of one."""
    in_batches: bool
    """A batch may name it as the endpoint of its lines."""
    errors: ErrorShape
    """Shape of its errors, and of those of all paths below it."""


ROUTES: dict[str, RouteFacts] = {}
"""The table, by path. `manylora.server.apis` has it whole."""

PUBLIC_PATHS = frozenset({"/health", "/ready", "/version", "/openapi.json"})
"""Answered without a key, to GET and HEAD."""


def declare(facts: RouteFacts) -> RouteFacts:
    """Enter a route in the table.

    Raises:
        ValueError: The path is in it already, or batches may name a route that does not generate.
    """
    if facts.path in ROUTES:
        raise ValueError(f"{facts.path} is declared twice: keep one of both.")
    if facts.in_batches and not facts.generates:
        raise ValueError(
            f"{facts.path} does not generate, so no batch can name it: say in_batches=False."
        )
    ROUTES[facts.path] = facts
    return facts


def error_shape(path: str) -> ErrorShape:
    """The shape of the errors of a path, whether there is a route or not."""
    for facts in ROUTES.values():
        if path == facts.path or path.startswith(f"{facts.path}/"):
            return facts.errors
    return OPENAI
