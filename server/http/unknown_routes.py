"""Answers to paths that Manylora does not serve: each says what to call instead."""

from __future__ import annotations

from collections.abc import Callable

from manylora.errors import InvalidRequestError, ManyloraError, NotFoundError

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


def unknown_route(path: str, has_route: Callable[[str], bool]) -> ManyloraError:
    """The error for a path without a route; the arguments are those of `hint`."""
    for known, instead in NOT_SERVED.items():
        if path == known or path.startswith(f"{known.rstrip('/')}/"):
            return InvalidRequestError(
                f"Manylora does not serve {instead}", code="unsupported_route"
            )
    return NotFoundError(f"There is no route {path[:MAX_SHOWN]}.{hint(path, has_route)}")


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
