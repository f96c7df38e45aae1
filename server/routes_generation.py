"""POST /v1/completions and /v1/chat/completions, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from fastapi import APIRouter, Request

from weft.engine.request import FlowKey, GenerationRequest
from weft.engine.sampling_params import SamplingParams
from weft.engine.text import TextStream
from weft.errors import InvalidRequestError, WeftError
from weft.server.access import Caller
from weft.server.admission import GeneratingCaller, lease_of
from weft.server.gate import Admission, Ask
from weft.server.generation import Choice, Generation
from weft.server.generation_response import GenerationResponse, Manner
from weft.server.json_body import INLINE_BYTES, json_bytes, parsed
from weft.server.lease import Lease
from weft.server.metering import Meter
from weft.server.openapi import takes
from weft.server.prompts import Limits, Prompt, chat_params, chat_prompt, completion_params, completion_prompts
from weft.server.resolve import ResolvedModel, resolve_model
from weft.server.responses import ChatView, CompletionView
from weft.server.schemas import ChatBody, CompletionBody, GenerationBody
from weft.server.services import Services, services_of
from weft.server.shapes import ChatShape, CompletionShape, Shape

router = APIRouter(tags=["generation"])
SESSION_HEADER = "x-session-id"
"""Where an alias splits its requests, those with one value get one version; the field `user` goes before it."""
DEADLINE_HEADERS = ("x-weft-ttft-ms", "x-slo-ttft-ms")
"""Where a client says within how many milliseconds it wants the first token; the first that is there counts."""
ResultT = TypeVar("ResultT")
OPEN_TOKENS = 1024
"""Reserved first for an answer whose length the client leaves open; a whole context would leave nothing to others."""
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}


@router.post(
    "/v1/completions",
    response_model=None,
    responses={200: {"model": CompletionView, "content": _STREAM}},
    openapi_extra=takes(CompletionBody),
)
async def complete(request: Request, caller: GeneratingCaller) -> GenerationResponse:
    """Continue one or many prompts."""
    services = services_of(request)
    raw = await json_bytes(request, services.config.server.max_body_bytes, services.pace)
    body = await parsed(CompletionBody, raw)
    model = await _resolve(request, services, caller, body)
    call = _Call(request=request, services=services, caller=caller, model=model, body=body)
    with call.admitted(raw, len(body.prompt), body.max_tokens) as admission:
        limits = limits_of(services)
        params = completion_params(body, limits)
        prompts = await _off_loop(
            lambda: completion_prompts(body, services.tokenizer, limits), sum(len(prompt) for prompt in body.prompt)
        )
        plan = [(prompt, params) for prompt in prompts]
        return _respond(call, plan, CompletionShape(body, services.tokenizer), admission)


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={200: {"model": ChatView, "content": _STREAM}},
    openapi_extra=takes(ChatBody),
)
async def chat(request: Request, caller: GeneratingCaller) -> GenerationResponse:
    """Answer a conversation."""
    services = services_of(request)
    raw = await json_bytes(request, services.config.server.max_body_bytes, services.pace)
    body = await parsed(ChatBody, raw)
    model = await _resolve(request, services, caller, body)
    call = _Call(request=request, services=services, caller=caller, model=model, body=body)
    with call.admitted(raw, 1, body.token_limit) as admission:
        limits = limits_of(services)
        prompt = await _off_loop(
            lambda: chat_prompt(body, services.tokenizer, limits),
            sum(len(message.content) for message in body.messages),
        )
        plan = [(prompt, chat_params(body, prompt, limits))]
        return _respond(call, plan, ChatShape(body, services.tokenizer), admission)


def deadline_s(headers: Mapping[str, str]) -> float | None:
    """Seconds within which the client wants the first token; None where it does not say.

    Raises:
        InvalidRequestError: A header is no whole number of milliseconds.
    """
    for name in DEADLINE_HEADERS:
        value = headers.get(name)
        if value is None:
            continue
        if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value)):
            raise InvalidRequestError(f"{name} must be a whole number of milliseconds, at least 1.", param=name)
        return int(value) / 1000
    return None


def limits_of(services: Services) -> Limits:
    """What the engine and the settings allow."""
    return Limits(
        vocab_size=services.ready.vocab_size,
        max_model_len=services.ready.max_model_len,
        max_logprobs=services.config.server.max_logprobs,
        max_choices=services.config.server.max_choices,
    )


async def _resolve(request: Request, services: Services, caller: Caller, body: GenerationBody) -> ResolvedModel:
    sticky = body.user or request.headers.get(SESSION_HEADER) or secrets.token_hex(8)
    model = await resolve_model(
        services.registry, caller, services.served_name, body.model, body.adapter_id, sticky=sticky
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

    request: Request
    services: Services
    caller: Caller
    model: ResolvedModel
    body: GenerationBody

    @contextmanager
    def admitted(self, raw: bytes, num_prompts: int, max_tokens: int | None) -> Iterator[Admission]:
        """Let the request through the gate; whatever fails before the response begins, it has left again.

        Raises:
            InvalidRequestError: The deadline in the headers is no number of milliseconds.
            RateLimitError: It would wait too long, by its tenant's doing.
            CapacityError: It would wait too long.
        """
        services, ref = self.services, self.model.ref
        lease = lease_of(self.request)
        ask = Ask(
            tenant=self.caller.tenant_id or "",
            name=self.caller.tenant,
            weight=self.caller.weight,
            adapter=ref.digest if ref else None,
            num_bytes=len(raw),
            num_choices=self.body.num_candidates * num_prompts,
            max_tokens=services.ready.max_model_len if max_tokens is None else max_tokens,
            deadline_s=deadline_s(self.request.headers),
            key=hash((self.caller.tenant_id, self.caller.identity.key_id, raw)),
        )
        try:
            admission = services.gate.admit(ask)
        except WeftError:
            lease.withdraw()
            raise
        try:
            yield admission
        except BaseException:
            admission.end()
            raise


def _respond(
    call: _Call, plan: list[tuple[Prompt, SamplingParams]], shape: Shape, admission: Admission
) -> GenerationResponse:
    services, body = call.services, call.body
    request_id = str(call.request.state.request_id)
    lease = lease_of(call.request)
    num_prompt = _reserve(lease, body, plan)
    meter = Meter(services, call.caller, call.model, lease, endpoint=call.request.url.path, request_id=request_id)
    manner = Manner(
        head={
            "id": shape.id_prefix + secrets.token_hex(16),
            "created": int(services.now().timestamp()),
            "model": call.model.name,
            "system_fingerprint": services.fingerprint,
        },
        headers=call.model.headers,
        n=body.n,
        stream=body.stream,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
    choices = _choices(call, plan, meter.ledger_id)
    generation = Generation(services.engine, choices, lambda num_output: lease.grow(num_prompt + num_output), admission)
    return GenerationResponse(generation, shape, meter, services.drain, manner)


def _reserve(lease: Lease, body: GenerationBody, plan: list[tuple[Prompt, SamplingParams]]) -> int:
    """Take the request's tokens before the engine sees it; returns those of the prompts. Raises RateLimitError."""
    is_open = isinstance(body, ChatBody) and body.token_limit is None
    prompts = sum(len(prompt.token_ids) for prompt, _ in plan)
    outputs = sum(min(params.max_tokens, OPEN_TOKENS) if is_open else params.max_tokens for _, params in plan)
    count = body.num_candidates
    lease.reserve(prompts + count * len(plan), prompts + count * outputs, is_open=is_open)
    return prompts


def _choices(call: _Call, plan: list[tuple[Prompt, SamplingParams]], ledger_id: str) -> list[Choice]:
    """All candidates; those of a beam search have one request."""
    flow = FlowKey(
        tenant=call.caller.tenant_id or "",
        weight=call.caller.weight,
        priority=call.body.priority,
        deadline_s=deadline_s(call.request.headers),
    )
    choices = []
    beam, count = call.body.beam, call.body.num_candidates
    for prompt_index, (prompt, params) in enumerate(plan):
        for choice_index in range(count):
            index = prompt_index * count + choice_index
            first_id = f"{ledger_id}-{index - choice_index}"
            fork_index = 0 if beam is not None else choice_index
            request = GenerationRequest(
                request_id=f"{ledger_id}-{index - choice_index + fork_index}",
                prompt_token_ids=prompt.token_ids,
                params=params,
                adapter=call.model.ref,
                flow=flow,
                choice_index=fork_index,
                fork_of=first_id if fork_index else None,
                beam=beam,
            )
            text = TextStream(call.services.tokenizer, params, prompt.token_ids)
            choices.append(Choice(index=index, prompt_index=prompt_index, prompt=prompt, request=request, text=text))
    return choices
