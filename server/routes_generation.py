"""POST /v1/completions and /v1/chat/completions, in OpenAI's shapes; lines of batches are planned here too."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fastapi import APIRouter, Request

from weft.engine.request import FlowKey, GenerationRequest
from weft.engine.sampling_params import SamplingParams
from weft.engine.text import TextStream
from weft.server.access import Caller
from weft.server.admission import GeneratingCaller, lease_of
from weft.server.generation import Choice, Generation
from weft.server.generation_response import GenerationResponse, Manner
from weft.server.json_body import INLINE_BYTES, json_body
from weft.server.lease import Lease
from weft.server.metering import Meter
from weft.server.openapi import takes
from weft.server.prompts import Limits, Prompt, chat_params, chat_prompt, completion_params, completion_prompts
from weft.server.resolve import ResolvedModel, resolve_model
from weft.server.responses import ChatView, CompletionView
from weft.server.schemas import ChatBody, CompletionBody, GenerationBody
from weft.server.services import Services, Wired
from weft.server.shapes import ChatShape, CompletionShape, Shape

router = APIRouter(tags=["generation"])
SESSION_HEADER = "x-session-id"
"""Where an alias splits its requests, those with one value get one version; the field `user` goes before it."""
ResultT = TypeVar("ResultT")
OPEN_TOKENS = 1024
"""Reserved for an answer whose length the client does not bound; a whole context would leave nothing to others."""
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


@router.post(
    "/v1/completions",
    response_model=None,
    responses={200: {"model": CompletionView, "content": _STREAM}},
    openapi_extra=takes(CompletionBody),
)
async def complete(request: Request, services: Wired, caller: GeneratingCaller) -> GenerationResponse:
    """Continue one or many prompts."""
    body = await json_body(request, CompletionBody, services.config.server.max_body_bytes, services.pace)
    return _respond(await plan_completion(_origin(request, services, caller), body))


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={200: {"model": ChatView, "content": _STREAM}},
    openapi_extra=takes(ChatBody),
)
async def chat(request: Request, services: Wired, caller: GeneratingCaller) -> GenerationResponse:
    """Answer a conversation."""
    body = await json_body(request, ChatBody, services.config.server.max_body_bytes, services.pace)
    return _respond(await plan_chat(_origin(request, services, caller), body))


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Whose request it is, and how it came."""

    services: Services
    caller: Caller
    lease: Lease
    """Admitted, nothing reserved."""
    endpoint: str
    request_id: str
    session: str | None = None
    line_id: str | None = None
    """For a line of a batch: its ledger id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGeneration:
    """A request that can run: checked, resolved and reserved."""

    origin: Origin
    generation: Generation
    shape: Shape
    meter: Meter
    manner: Manner


async def plan_completion(origin: Origin, body: CompletionBody) -> PlannedGeneration:
    """Make a completions body a generation.

    Raises:
        RequestError: The body asks for what cannot be; the model is missing; a limit is reached.
    """
    services = origin.services
    model = await _resolve(origin, body)
    limits = limits_of(services)
    params = completion_params(body, limits)
    prompts = await _off_loop(
        lambda: completion_prompts(body, services.tokenizer, limits), sum(len(prompt) for prompt in body.prompt)
    )
    plan = [(prompt, params) for prompt in prompts]
    return _plan(_Call(origin=origin, model=model, body=body), plan, CompletionShape(body, services.tokenizer))


async def plan_chat(origin: Origin, body: ChatBody) -> PlannedGeneration:
    """Make a chat body a generation; raises like `plan_completion`."""
    services = origin.services
    model = await _resolve(origin, body)
    limits = limits_of(services)
    prompt = await _off_loop(
        lambda: chat_prompt(body, services.tokenizer, limits), sum(len(message.content) for message in body.messages)
    )
    plan = [(prompt, chat_params(body, prompt, limits))]
    return _plan(_Call(origin=origin, model=model, body=body), plan, ChatShape(body, services.tokenizer))


def limits_of(services: Services) -> Limits:
    """What the engine and the settings allow."""
    return Limits(
        vocab_size=services.ready.vocab_size,
        max_model_len=services.ready.max_model_len,
        max_logprobs=services.config.server.max_logprobs,
        max_choices=services.config.server.max_choices,
    )


def _origin(request: Request, services: Services, caller: Caller) -> Origin:
    return Origin(
        services=services,
        caller=caller,
        lease=lease_of(request),
        endpoint=request.url.path,
        request_id=str(request.state.request_id),
        session=request.headers.get(SESSION_HEADER),
    )


async def _resolve(origin: Origin, body: GenerationBody) -> ResolvedModel:
    services = origin.services
    sticky = body.user or origin.session or secrets.token_hex(8)
    model = await resolve_model(
        services.registry, origin.caller, services.served_name, body.model, body.adapter_id, sticky=sticky
    )
    if model.adapter is not None and model.version is not None:
        services.metrics.learn_adapter(model.version.digest, model.adapter.tenant, model.adapter.name)
    return model


async def _off_loop(work: Callable[[], ResultT], num_characters: int) -> ResultT:
    """Tokenizing a long text would hold up everybody's stream; a short one is quicker than a thread."""
    return work() if num_characters <= INLINE_BYTES // 4 else await asyncio.to_thread(work)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What the steps of answering share."""

    origin: Origin
    model: ResolvedModel
    body: GenerationBody


def _respond(planned: PlannedGeneration) -> GenerationResponse:
    drain = planned.origin.services.drain
    return GenerationResponse(planned.generation, planned.shape, planned.meter, drain, planned.manner)


def _plan(call: _Call, plan: list[tuple[Prompt, SamplingParams]], shape: Shape) -> PlannedGeneration:
    origin, services, body, lease = call.origin, call.origin.services, call.body, call.origin.lease
    _reserve(lease, body, plan)
    meter = Meter(
        services,
        origin.caller,
        call.model,
        lease,
        endpoint=origin.endpoint,
        request_id=origin.request_id,
        line_id=origin.line_id,
    )
    manner = Manner(
        head={
            "id": shape.id_prefix + secrets.token_hex(16),
            "created": int(services.now().timestamp()),
            "model": call.model.name,
            "system_fingerprint": services.fingerprint,
        },
        headers=call.model.headers,
        stream=body.stream,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
    generation = Generation(services.engine, _choices(call, plan, meter.ledger_id))
    return PlannedGeneration(origin=origin, generation=generation, shape=shape, meter=meter, manner=manner)


def _reserve(lease: Lease, body: GenerationBody, plan: list[tuple[Prompt, SamplingParams]]) -> None:
    """Take the request's tokens before the engine sees it; raises RateLimitError."""
    is_open = isinstance(body, ChatBody) and body.token_limit is None
    prompts = sum(len(prompt.token_ids) for prompt, _ in plan)
    outputs = sum(min(params.max_tokens, OPEN_TOKENS) if is_open else params.max_tokens for _, params in plan)
    lease.reserve(prompts + body.n * len(plan), prompts + body.n * outputs, is_open=is_open)


def _choices(call: _Call, plan: list[tuple[Prompt, SamplingParams]], ledger_id: str) -> list[Choice]:
    choices, origin = [], call.origin
    for prompt_index, (prompt, params) in enumerate(plan):
        for choice_index in range(call.body.n):
            index = prompt_index * call.body.n + choice_index
            first_id = f"{ledger_id}-{index - choice_index}"
            request = GenerationRequest(
                request_id=f"{ledger_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                params=params,
                adapter=call.model.ref,
                flow=FlowKey(lane=int(origin.line_id is not None), tenant=origin.caller.tenant_id or ""),
                choice_index=choice_index,
                fork_of=first_id if choice_index else None,
            )
            text = TextStream(origin.services.tokenizer, params, prompt.token_ids)
            choices.append(Choice(index=index, prompt_index=prompt_index, prompt=prompt, request=request, text=text))
    return choices
