"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request

from manylora.server.admission.rates import GeneratingCaller, TokenizingCaller, reservation_of
from manylora.server.generation.items import named
from manylora.server.generation.prompts import chat_job, check_text
from manylora.server.generation.response import PlannedGeneration
from manylora.server.generation.routes import GenerationRoute, plan_generation, post, received
from manylora.server.generation.tokens import rendered_chat, unbilled
from manylora.server.http.openapi import takes
from manylora.server.messages.chat import NAMES, chat_of
from manylora.server.messages.schemas import (
    MessagesBody,
    MessageView,
    TokenCountBody,
    TokenCountView,
)
from manylora.server.messages.writer import MessageWriter
from manylora.server.services import Wired

router = APIRouter(tags=["generation"], route_class=GenerationRoute)
count_router = APIRouter(tags=["tokens"])


@post(router, "/v1/messages", MessagesBody, MessageView)
async def message(request: Request, caller: GeneratingCaller) -> PlannedGeneration:
    """Answer a conversation, as Anthropic's clients ask."""
    origin, body = await received(request, caller, MessagesBody)
    max_model_len = origin.services.ready.max_model_len
    chat = await origin.work(lambda: chat_of(body, max_model_len), origin.num_bytes)
    with named(NAMES):
        return await plan_generation(origin, chat, MessageWriter)


@count_router.post("/v1/messages/count_tokens", openapi_extra=takes(TokenCountBody))
async def count_tokens(
    request: Request, services: Wired, caller: TokenizingCaller
) -> TokenCountView:
    """Count the tokens of a conversation as the model reads it."""
    body = await services.bodies.json(request, TokenCountBody)
    await services.versions.names.resolve(caller.tenant_id, body.model)

    max_model_len = services.ready.max_model_len
    rendered = await rendered_chat(
        request, caller, lambda: chat_job(chat_of(body, max_model_len), services)
    )

    def count() -> int:
        check_text(rendered, services)
        return len(services.tokenizer.encode(rendered, add_special_tokens=False))

    tokens = await unbilled(request, caller, count)
    reservation_of(request).spend(tokens)
    return TokenCountView(input_tokens=tokens)
