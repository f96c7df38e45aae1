"""POST /v1/completions and /v1/chat/completions, and the registration of every route that generates."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute

from manylora.errors import InvalidRequestError
from manylora.server.admission.rates import Admitted, admit_generation, reservation_of
from manylora.server.auth.callers import Caller
from manylora.server.generation import CHAT, COMPLETIONS
from manylora.server.generation.chat_schemas import ChatBody, ChatView
from manylora.server.generation.response import GenerationResponse
from manylora.server.generation.run import GenerationRun
from manylora.server.generation.schemas import CompletionBody, CompletionView
from manylora.server.hop import SESSION_HEADER, hop_of, is_probe
from manylora.server.http.bodies import View
from manylora.server.http.body import held_body
from manylora.server.http.json_body import BodyT, parsed
from manylora.server.http.openapi import takes
from manylora.server.http.route_facts import ROUTES, RouteFacts
from manylora.server.services import services_of

router = APIRouter()
DEADLINE_HEADERS = ("x-manylora-ttft-ms", "x-slo-ttft-ms")
"""Headers with the client's deadline for the first token, in milliseconds. The first one present counts."""
Prepare = Callable[[GenerationRun, BodyT], Awaitable[None]]
"""Makes a body a chat or a completion, and prepares the run of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[BodyT]):
    """A route that generates."""

    facts: RouteFacts
    body: type[BodyT]
    prepare: Prepare[BodyT]
    admits: Admitted
    """Finds the caller, and counts the request in its limits."""

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        services = services_of(request)
        caller = await self.admits(request, request.query_params.get("tenant"))
        if is_probe(request):
            return Response(status_code=204)
        await services.limits.arrivals.turn(caller.tenant_id or "")
        run, body = await _received(request, caller, self.body)
        await self.prepare(run, body)
        held_body(request).end()
        return GenerationResponse(run)


endpoints: dict[str, Endpoint[Any]] = {}
"""All routes that generate, by path; batches run their lines through them."""


class GenerationRoute(APIRoute):
    """Hands a request to its endpoint, which calls its one dependency by itself.

    FastAPI's own handling of dependencies would be a third of the cost of a refusal.
    """

    def get_route_handler(self) -> Callable[[Request], Any]:
        """Handler of a request. FastAPI reads the dependency for the OpenAPI page only."""
        return self.endpoint


def post(
    router: APIRouter,
    facts: RouteFacts,
    body: type[BodyT],
    view: type[View],
    admits: Admitted = admit_generation,
) -> Callable[[Prepare[BodyT]], Prepare[BodyT]]:
    """Register a route that generates; decorates what prepares its runs.

    Args:
        router: Gets the route.
        facts: Facts of the route, as its folder declares them.
        body: The body that it takes.
        view: The answer, for the OpenAPI page.
        admits: Finds the caller, and counts the request in its limits.

    Raises:
        ValueError: The facts are not declared, or say that the route does not generate.
    """
    if ROUTES.get(facts.path) is not facts or not facts.generates:
        raise ValueError(
            f"{facts.path} has no declared facts of a route that generates: gateways would neither try it again "
            "nor bill it. Declare them with generates=True in the __init__.py of its folder."
        )

    def register(prepare: Prepare[BodyT]) -> Prepare[BodyT]:
        endpoint = Endpoint(facts=facts, body=body, prepare=prepare, admits=admits)
        endpoints[facts.path] = endpoint
        stream = {"text/event-stream": {"schema": {"type": "string"}}}
        route = GenerationRoute(
            facts.path,
            endpoint.answer,
            methods=["POST"],
            name=prepare.__name__,
            description=prepare.__doc__,
            tags=["generation"],
            dependencies=[Depends(admits)],
            response_model=None,
            responses={200: {"model": view, "content": stream}},
            openapi_extra=takes(body),
        )
        router.routes.append(route)
        return prepare

    return register


@post(router, COMPLETIONS, CompletionBody, CompletionView)
async def complete(run: GenerationRun, body: CompletionBody) -> None:
    """Continue one or many prompts."""
    await run.prepare(body)


@post(router, CHAT, ChatBody, ChatView)
async def chat(run: GenerationRun, body: ChatBody) -> None:
    """Answer a conversation."""
    await run.prepare(body)


def deadline_s(headers: Mapping[str, str]) -> float | None:
    """Seconds within which the client wants the first token; None where it does not say.

    Raises:
        InvalidRequestError: A header is no whole number of milliseconds.
    """
    for name in DEADLINE_HEADERS:
        if (value := headers.get(name)) is not None:
            if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value)):
                raise InvalidRequestError(
                    f"{name} must be a whole number of milliseconds, at least 1.", param=name
                )
            return int(value) / 1000
    return None


async def _received(
    request: Request, caller: Caller, kind: type[BodyT]
) -> tuple[GenerationRun, BodyT]:
    """The run of a request, and its body, read and checked.

    Raises:
        RequestError: The body is no JSON, does not fit `kind`, is too large, or comes too slowly.
    """
    services = services_of(request)
    hop = hop_of(request)
    if hop is not None:
        caller = replace(caller, weight=caller.weight * hop.weight_share)
    raw = await services.bodies.raw(request)
    body = await services.bodies.long_work.run(
        partial(parsed, kind, raw), len(raw), caller.tenant_id, caller.weight
    )
    run = GenerationRun(
        services=services,
        caller=caller,
        reservation=reservation_of(request),
        ends=request.state.ends,
        endpoint=request.url.path,
        request_id=str(request.state.request_id),
        session=request.headers.get(SESSION_HEADER),
        hop=hop,
        num_bytes=len(raw),
        digest=hash((caller.tenant_id, caller.identity.key_id, raw)),
        deadline_s=deadline_s(request.headers),
    )
    return run, body
