"""POST /v1/completions and /v1/chat/completions, in OpenAI's shapes; lines of batches are planned here too."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from manylora.engine.request import FlowKey, GenerationRequest
from manylora.engine.text.text_stream import NONE_SHOWN, TextStream
from manylora.errors import InvalidRequestError, ManyloraError
from manylora.server.admission.rates import GeneratingCaller, admit_generation, reservation_of
from manylora.server.auth.callers import Caller
from manylora.server.generation.chat_schemas import ChatBody, ChatView
from manylora.server.generation.choices import Choice, Generation
from manylora.server.generation.meter import Meter, Origin
from manylora.server.generation.openai_format import ChatFormat, CompletionFormat, JsonObject
from manylora.server.generation.prompts import Prompts, chat_job, held_to, prompts_and_params
from manylora.server.generation.response import GenerationResponse, PlannedGeneration
from manylora.server.generation.schemas import CompletionBody, CompletionView, GenerationBody
from manylora.server.generation.writer import ChunkWriter
from manylora.server.hop import SESSION_HEADER, hop_of, is_probe
from manylora.server.http.bodies import Body, View
from manylora.server.http.body import held_body
from manylora.server.http.json_body import BodyT, parsed
from manylora.server.http.openapi import takes
from manylora.server.limits.gate import Admission
from manylora.server.limits.prediction import AdmissionRequest
from manylora.server.limits.reservation import LimitReservation
from manylora.server.process.long_work import INLINE_BYTES
from manylora.server.services import Services, services_of
from manylora.server.versions.names import ResolvedModel

if TYPE_CHECKING:
    from manylora.server.generation.items import ItemWriter


class GenerationRoute(APIRoute):
    """Finds the caller itself and runs what its endpoint plans.

    FastAPI's own handling of dependencies would be a third of the cost of a refusal.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of a request. FastAPI reads the dependencies for the OpenAPI page only."""

        async def handle(request: Request) -> Response:
            services = services_of(request)
            caller = await admit_generation(request, request.query_params.get("tenant"))
            if is_probe(request):
                reservation_of(request).withdraw()
                return Response(status_code=204)
            await services.limits.arrivals.turn(caller.tenant_id or "")
            planned = await self.endpoint(request, caller)
            held_body(request).end()
            return GenerationResponse(planned, services.drain)

        return handle


router = APIRouter(tags=["generation"], route_class=GenerationRoute)
DEADLINE_HEADERS = ("x-manylora-ttft-ms", "x-slo-ttft-ms")
"""Headers with the client's deadline for the first token, in milliseconds. The first one present counts."""
EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])
WriterOfAnswer = Callable[[Meter, JsonObject], "ItemWriter"]
"""Makes the writer of an answer in items: of the tokens delivered, and `created`, `model` and `system_fingerprint`."""
OPEN_TOKENS = 1024
"""Reserved first per choice if the client gives no length. A whole context would leave nothing to others."""
STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
"""How the OpenAPI page describes an answer that is streamed."""


def post(
    router: APIRouter, path: str, body: type[Body], view: type[View]
) -> Callable[[EndpointT], EndpointT]:
    """Decorator of an endpoint that plans a generation; `body` and `view` are for the OpenAPI page."""
    answers: dict[int | str, dict[str, Any]] = {200: {"model": view, "content": STREAM}}
    return router.post(path, response_model=None, responses=answers, openapi_extra=takes(body))


@post(router, "/v1/completions", CompletionBody, CompletionView)
async def complete(request: Request, caller: GeneratingCaller) -> PlannedGeneration:
    """Continue one or many prompts."""
    return await plan_generation(*await received(request, caller, CompletionBody))


@post(router, "/v1/chat/completions", ChatBody, ChatView)
async def chat(request: Request, caller: GeneratingCaller) -> PlannedGeneration:
    """Answer a conversation."""
    return await plan_generation(*await received(request, caller, ChatBody))


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


async def plan_generation(
    origin: Origin, body: CompletionBody | ChatBody, writer: WriterOfAnswer | None = None
) -> PlannedGeneration:
    """Make a body a generation.

    Args:
        origin: The request.
        body: What to generate.
        writer: Makes the writer of the answer; None writes OpenAI's completions and chats.

    Raises:
        RequestError: The body asks for what cannot be; the model is missing; a limit is reached.
        CapacityError: It would wait too long.
    """
    services, reservation = origin.services, origin.reservation
    model = await _resolve(origin, body)
    with _admitted(origin, model, body) as admission:
        num_characters = origin.num_bytes or body.num_characters
        if body.has_grammar or (isinstance(body, ChatBody) and body.tools):
            num_characters = max(num_characters, INLINE_BYTES)  # schemas take long for their size
        rendered = ""
        if isinstance(body, ChatBody):
            rendered = await services.chats.render(
                await origin.work(partial(chat_job, body, services), num_characters), num_characters
            )
        prompts, asked = await origin.tokenize(
            lambda: prompts_and_params(body, services, rendered), num_characters
        )
        if asked is not None:
            prompts = await held_to(prompts, asked, services, origin.caller.tenant_id or "")
        num_prompt = await _reserve(services, reservation, body, prompts)
        meter = Meter(origin, model)
        choices = _choices(origin, model, body, prompts, meter.ledger_id)

        tokenizer = services.tokenizer
        shape = (
            ChatFormat(body, tokenizer)
            if isinstance(body, ChatBody)
            else CompletionFormat(body, tokenizer)
        )
        created, fingerprint = int(services.clock.now().timestamp()), services.fingerprint
        head: JsonObject = {
            "created": created,
            "model": model.name,
            "system_fingerprint": fingerprint,
        }
        generation = Generation(
            services.engine,
            choices,
            lambda num_output: reservation.grow(num_prompt + num_output),
            admission,
        )
        return PlannedGeneration(
            generation=generation,
            body=body,
            shape=shape,
            writer=(writer or partial(ChunkWriter, body, shape))(meter, head),
            meter=meter,
            headers=model.headers,
        )


async def received(request: Request, caller: Caller, kind: type[BodyT]) -> tuple[Origin, BodyT]:
    """Who sent a request, and its body, read and checked.

    Raises:
        RequestError: The body is no JSON, does not fit `kind`, is too large, or comes too slowly.
    """
    services, hop = services_of(request), hop_of(request)
    if hop is not None:
        caller = replace(caller, weight=caller.weight * hop.weight_share)
    raw = await services.bodies.raw(request)
    body = await services.bodies.long_work.run(
        partial(parsed, kind, raw), len(raw), caller.tenant_id, caller.weight
    )
    origin = Origin(
        services=services,
        caller=caller,
        reservation=reservation_of(request),
        endpoint=request.url.path,
        request_id=str(request.state.request_id),
        session=request.headers.get(SESSION_HEADER),
        hop=hop,
        num_bytes=len(raw),
        digest=hash((caller.tenant_id, caller.identity.key_id, raw)),
        deadline_s=deadline_s(request.headers),
    )
    return origin, body


async def _resolve(origin: Origin, body: GenerationBody) -> ResolvedModel:
    services = origin.services
    sticky = (
        origin.hop.sticky if origin.hop else body.user or origin.session or secrets.token_hex(8)
    )
    model = await services.versions.names.resolve(
        origin.caller.tenant_id, body.model, body.adapter_id, sticky=sticky
    )
    if model.adapter is not None and model.version is not None:
        adapter, version = model.adapter, model.version
        services.metrics.learn_adapter(version.digest, adapter.tenant, adapter.name, version.rank)
        if version.held_by is not None:
            origin.reservation.at_end.append(
                services.versions.weights.hold(model, services.clock.now())
            )
    return model


@contextmanager
def _admitted(
    origin: Origin, model: ResolvedModel, body: CompletionBody | ChatBody
) -> Iterator[Admission | None]:
    """Let the request through the gate; if anything fails before the response begins, it leaves again.

    Raises:
        RateLimitError: It would wait too long, by its tenant's doing.
        CapacityError: It would wait too long.
    """
    if origin.line_id is not None:
        yield None
        return
    services, caller = origin.services, origin.caller
    num_prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
    asked = AdmissionRequest(
        tenant=caller.tenant_id or "",
        name=caller.tenant,
        weight=caller.weight,
        adapter=model.ref.digest if model.ref else None,
        num_bytes=origin.num_bytes,
        num_choices=body.num_candidates * num_prompts,
        max_tokens=services.ready.max_model_len if body.token_limit is None else body.token_limit,
        deadline_s=origin.deadline_s,
        key=origin.digest,
    )
    try:
        admission = services.limits.gate.admit(asked)
    except ManyloraError:
        origin.reservation.withdraw()
        raise
    try:
        yield admission
    except BaseException:
        admission.end()
        raise


async def _reserve(
    services: Services,
    reservation: LimitReservation,
    body: CompletionBody | ChatBody,
    plan: Prompts,
) -> int:
    """Take the request's tokens before the engine sees it; returns those of the prompts.

    Raises:
        RateLimitError: A limit is reached.
        CapacityError: What is used is not known, and the database cannot answer now.
    """
    is_open = body.token_limit is None
    prompts = sum(len(prompt.token_ids) for prompt, _ in plan)
    outputs = sum(
        min(params.max_tokens, OPEN_TOKENS) if is_open else params.max_tokens for _, params in plan
    )
    count = body.num_candidates
    least, most = prompts + count * len(plan), prompts + count * outputs
    await services.limits.accounts.secure(
        reservation.shares, tokens=reservation.wanted(least, most, is_open=is_open)
    )
    reservation.reserve(least, most, is_open=is_open)
    return prompts


def _choices(
    origin: Origin, model: ResolvedModel, body: GenerationBody, plan: Prompts, ledger_id: str
) -> list[Choice]:
    """All candidates; those of a beam search have one request."""
    flow = FlowKey(
        lane=int(origin.line_id is not None),
        tenant=origin.caller.tenant_id or "",
        weight=origin.caller.weight,
        priority=body.priority,
        deadline_s=origin.deadline_s,
    )
    choices = []
    beam, count = body.beam, body.num_candidates
    for prompt_index, (prompt, params) in enumerate(plan):
        for choice_index in range(count):
            index = prompt_index * count + choice_index
            first_id = f"{ledger_id}-{index - choice_index}"
            fork_index = 0 if beam is not None else choice_index
            request = GenerationRequest(
                request_id=f"{ledger_id}-{index - choice_index + fork_index}",
                prompt_token_ids=prompt.token_ids,
                params=params,
                adapter=model.ref,
                flow=flow,
                choice_index=fork_index,
                fork_of=first_id if fork_index else None,
                beam=beam,
                grammar=prompt.grammar,
            )
            shown_ids = prompt.answer.shown_ids if prompt.answer is not None else NONE_SHOWN
            text = TextStream(origin.services.tokenizer, params, prompt.token_ids, shown_ids)
            choices.append(
                Choice(
                    index=index,
                    prompt_index=prompt_index,
                    prompt=prompt,
                    request=request,
                    text=text,
                )
            )
    return choices
