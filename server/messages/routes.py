"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter, Request

from manylora.server.admission.rates import TokenizingCaller
from manylora.server.core_services import Core
from manylora.server.generation.prompts import chat_job, check_text
from manylora.server.generation.routes import post
from manylora.server.generation.run import GenerationRun
from manylora.server.generation.tokens import rendered_chat, unbilled
from manylora.server.http.json_body import named
from manylora.server.http.openapi import takes
from manylora.server.messages import MESSAGES
from manylora.server.messages.chat import NAMES, chat_of
from manylora.server.messages.schemas import (
    MessagesBody,
    MessageView,
    TokenCountBody,
    TokenCountView,
)
from manylora.server.messages.writer import MessageWriter

router = APIRouter()


@post(router, MESSAGES, MessagesBody, MessageView)
async def message(run: GenerationRun, body: MessagesBody) -> None:
    """Answer a conversation, as Anthropic's clients ask."""
    max_model_len = run.services.ready.max_model_len
    chat = await run.work(lambda: chat_of(body, max_model_len), run.num_bytes)
    with named(NAMES):
        await run.prepare(chat, MessageWriter)


@router.post("/v1/messages/count_tokens", openapi_extra=takes(TokenCountBody), tags=["tokens"])
async def count_tokens(
    request: Request, services: Core, caller: TokenizingCaller
) -> TokenCountView:
    """Count the tokens of a conversation as the model reads it."""
    body = await services.bodies.json(request, TokenCountBody)
    await services.models.resolve(caller.tenant_id, body.model)

    max_model_len = services.ready.max_model_len
    rendered = await rendered_chat(
        request, caller, lambda: chat_job(chat_of(body, max_model_len), services)
    )

    def count() -> tuple[int, TokenCountView]:
        check_text(rendered, services)
        tokens = len(services.tokenizer.encode(rendered, add_special_tokens=False))
        return tokens, TokenCountView(input_tokens=tokens)

    return await unbilled(request, caller, count)
