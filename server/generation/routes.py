"""POST /v1/completions and /v1/chat/completions; registration, reading and answers of every route that generates.

Status and headers go out with the engine's first token, so a refusal is a real 4xx or 5xx. A client that goes away
aborts its generations at once, streaming or not, and is billed what was computed until then. The usage event is durable
before the last bytes go out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from manylora.errors import EngineError, InvalidRequestError, ManyloraError, RequestError
from manylora.registry.records import ResolvedModel
from manylora.server.auth.admission import Admitted, admit_generation, reservation_of
from manylora.server.auth.callers import Caller
from manylora.server.core_services import CoreServices
from manylora.server.generation import CHAT, COMPLETIONS
from manylora.server.generation.chat_schemas import ChatBody, ChatView
from manylora.server.generation.choices import ChoiceStep, best_choices
from manylora.server.generation.openai_format import AnswerPart, JsonObject, joined
from manylora.server.generation.run import GenerationRun
from manylora.server.generation.schemas import CompletionBody, CompletionView
from manylora.server.hop import SESSION_HEADER, Hop
from manylora.server.http import sse
from manylora.server.http.bodies import BodyT, View, parsed
from manylora.server.http.body import held_body
from manylora.server.http.openapi import takes
from manylora.server.http.route_facts import ROUTES, RouteFacts
from manylora.server.http.wire import IS_CLOSING

router = APIRouter()
DEADLINE_HEADERS = ("x-manylora-ttft-ms", "x-slo-ttft-ms")
"""Headers with the client's deadline for the first token, in milliseconds. The first one present counts."""
Prepare = Callable[[GenerationRun, BodyT], Awaitable[None]]
"""Makes a body a chat or a completion, and prepares the run of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[BodyT]):
    """A route that generates."""

    body: type[BodyT]
    prepare: Prepare[BodyT]
    admits: Admitted
    """Finds the caller, and counts the request in its limits."""

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        services: CoreServices = request.app.state.services
        caller = await self.admits(request, request.query_params.get("tenant"))
        if request.state.is_probe:
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
        endpoint = Endpoint(body=body, prepare=prepare, admits=admits)
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
    services: CoreServices = request.app.state.services
    hop: Hop | None = request.state.hop
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


async def whole_answer(run: GenerationRun) -> tuple[JsonObject, str, dict[str, str]]:
    """All steps of a generation as one body; raises what ends them early.

    Returns:
        The body, which is counted as delivered; the status that is recorded of it; and the headers.
    """
    parts: dict[int, list[AnswerPart]] = {}
    taken: list[ChoiceStep] = []
    async for together in run.generation.steps():
        for step in together:
            run.meter.observe(step)
            parts.setdefault(step.choice.index, []).append(run.openai.part(step))
        taken += together
    for step in taken:
        run.meter.deliver(step)
    best = best_choices(run.generation.choices, taken, run.body.n)
    ends = [joined(parts[choice.index]) for choice in best]
    body = run.writer.whole(list(zip(best, ends, strict=True)))
    return body, _overall(ends), _headers(run.model, taken[0])


class GenerationResponse(Response):
    """Has the engine compute a prepared run when it is called as an ASGI application."""

    def __init__(self, run: GenerationRun) -> None:
        super().__init__()
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer.

        Raises:
            ManyloraError: The engine refused, and nothing was sent yet.
            ClientDisconnect: The client is gone.
        """
        run = self._run
        cut = run.generation.cut
        is_closing: Callable[[], bool] = scope.get("state", {}).get(IS_CLOSING, lambda: False)
        watcher = asyncio.create_task(_until_gone(receive))
        watcher.add_done_callback(lambda _: cut(ClientDisconnect()))
        answer = self._stream if run.body.stream else self._whole
        try:
            with run.services.drain.running(cut):
                async with run.generating():
                    await answer(send, lambda: watcher.done() or is_closing())
        finally:
            watcher.cancel()

    async def _whole(self, send: Send, is_gone: Callable[[], bool]) -> None:
        body, status, headers = await whole_answer(self._run)
        if is_gone():
            raise ClientDisconnect
        await self._run.meter.finish(status)
        response = Response(orjson.dumps(body), media_type="application/json", headers=headers)
        await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def _stream(self, send: Send, is_gone: Callable[[], bool]) -> None:
        run = self._run
        steps = run.generation.steps()
        first = await anext(steps)
        headers = Headers({**_headers(run.model, first[0]), **sse.HEADERS})
        await send({"type": "http.response.start", "status": 200, "headers": headers.raw})
        try:
            await self._send_steps(first, steps, send, is_gone)
        except ClientDisconnect:
            raise
        except Exception as error:
            if isinstance(error, RequestError):
                await run.take_computed()
            shown = error if isinstance(error, ManyloraError) else EngineError(str(error))
            await _send_body(send, run.writer.failure(shown), is_last=True)
            if shown is not error:
                raise

    async def _send_steps(
        self,
        first: list[ChoiceStep],
        steps: AsyncIterator[list[ChoiceStep]],
        send: Send,
        is_gone: Callable[[], bool],
    ) -> None:
        """Send all steps that have arrived in one write, one event per step. A slow client gets more in each write."""
        run = self._run
        ends = list[AnswerPart]()
        together: list[ChoiceStep] | None = first
        while together is not None:
            payload = b""
            for step in together:
                run.meter.observe(step)
                part = run.openai.part(step)
                if part.finish_reason is not None:
                    ends.append(part)
                run.meter.deliver(step)
                payload += run.writer.events(step, part)
            if len(ends) == len(run.generation.choices) and not is_gone():
                await run.meter.finish(_overall(ends))
                await _send_body(send, payload + run.writer.closing(), is_last=True)
                return
            if payload:
                await _send_body(send, payload, is_last=False)
            if is_gone():
                raise ClientDisconnect
            run.meter.mark()
            together = await anext(steps, None)


async def _send_body(send: Send, payload: bytes, *, is_last: bool) -> None:
    await send({"type": "http.response.body", "body": payload, "more_body": not is_last})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _headers(model: ResolvedModel, first: ChoiceStep) -> dict[str, str]:
    """Headers that name the version that answers, and say where its weights were."""
    headers: dict[str, str] = {}
    if model.adapter is not None and model.version is not None:
        name = f"{model.adapter.tenant}/{model.adapter.name}@{model.version.version}"
        headers["x-manylora-adapter"] = name
        headers["x-manylora-adapter-digest"] = model.version.digest
    state = first.output.adapter_state
    if state is not None and state != "base":
        headers["x-manylora-adapter-state"] = state
    return headers


def _overall(ends: list[AnswerPart]) -> str:
    """One status for all choices: `length` if any was cut short."""
    return "length" if any(part.finish_reason == "length" for part in ends) else "stop"
